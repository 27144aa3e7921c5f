//! The outbox: messages in the transactions of users, and what their relays need.
//!
//! `migrations/0007_outbox.sql` has the tables and the functions; `horizon` says how far they can be read.

mod held;
mod horizon;
mod relay;

use hapax_core::outbox::NewOutboxMessage;
use hapax_core::{InboxError, StoreError};
use sqlx::{PgConnection, Row as _};
use tokio::sync::{Mutex, broadcast};

use crate::PostgresStore;
use crate::hints::{Hint, Topic};
use crate::inbox::before_commit;
use horizon::Horizon;

/// The outbox of a store's database. Clones are the same outbox.
///
/// A message is written in the caller's own transaction, so it exists if and only if the business write does. `hapax relay`
/// publishes it. Every other language calls the SQL function `hapax.enqueue`.
///
/// ```no_run
/// # async fn example(store: hapax_postgres::PostgresStore, mut db: sqlx::PgConnection) -> Result<(), Box<dyn std::error::Error>> {
/// use hapax_core::outbox::NewOutboxMessage;
/// use sqlx::Connection as _;
///
/// let outbox = store.outbox()?;
/// let mut tx = db.begin().await?;
/// sqlx::query("INSERT INTO orders VALUES (7)").execute(&mut *tx).await?;
/// outbox.enqueue(&mut tx, &NewOutboxMessage::new("orders.placed", r#"{"order":7}"#).key("order-7")).await?;
/// tx.commit().await?;
/// outbox.wake(); // not needed, but the relay looks at once
/// # Ok(())
/// # }
/// ```
pub struct PostgresOutbox {
    store: PostgresStore,
    /// Locked while the database is asked: polls are observed in the order in which they were made.
    horizon: Mutex<Horizon>,
    /// Hints that something was enqueued; opened by the first wait.
    hints: Mutex<Option<broadcast::Receiver<Hint>>>,
}

impl Clone for PostgresOutbox {
    /// The clone observes the outbox by itself, so that relays do not wait for each other.
    fn clone(&self) -> Self {
        Self { store: self.store.clone(), horizon: Mutex::default(), hints: Mutex::default() }
    }
}

impl PostgresStore {
    /// The outbox of this database. Fails on the portable form of the schema, which has none.
    pub fn outbox(&self) -> Result<PostgresOutbox, StoreError> {
        if self.base.options.portable {
            return Err(StoreError::Invalid("the portable form of the schema has no outbox".to_owned()));
        }
        Ok(PostgresOutbox { store: self.clone(), horizon: Mutex::default(), hints: Mutex::default() })
    }
}

impl PostgresOutbox {
    /// Writes a message in the caller's transaction; returns its id.
    pub async fn enqueue(
        &self,
        db: &mut PgConnection,
        message: &NewOutboxMessage,
    ) -> Result<String, InboxError> {
        let headers = (!message.headers.is_empty()).then(|| serde_json::json!(message.headers).to_string());
        let sql = "SELECT hapax.enqueue($1, $2, $3::bytea, $4::jsonb, to_timestamp($5 / 1000.0))::text";
        let row = sqlx::query(sql)
            .bind(&message.topic)
            .bind(&message.key)
            .bind(&message.body[..])
            .bind(headers)
            .bind(message.deliver_at_ms.map(|ms| ms as f64))
            .fetch_one(db)
            .await
            .map_err(before_commit)?;
        row.try_get(0).map_err(before_commit)
    }

    /// Tells the relays that something was enqueued and committed, at most every 50 ms and on a connection of the store's
    /// own: a transaction that notifies by itself would wait for all others that do. Returns at once. Without it relays find
    /// the message when they look next.
    pub fn wake(&self) {
        self.store.base.hints.publish(Topic::Outbox, [0]);
    }
}
