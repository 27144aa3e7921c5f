//! A user's transaction alone, with its ledger entry, and with the settle of its message.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_core::{
    AsyncInbox as _, Delivery, EntryId, InboxEntry, InboxLookup, Json, NewMessage, QueueAdmin as _,
    QueueConfig, QueueName, QueueStore as _, Receipt, Receive, RecordedOutcome, Settle, Tier,
};
use hapax_postgres::{InboxOptions, Options, PostgresInbox, PostgresStore};
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;

use crate::server::Server;

const OUTCOME: &str = r#"{"charge":"ch_1234567890","cents":1999,"status":"succeeded"}"#;
/// Enough that two transactions rarely meet in one account.
const ACCOUNTS: u64 = 10_000;
const TABLES: &str = "CREATE TABLE account (id bigint PRIMARY KEY, cents bigint NOT NULL); \
     INSERT INTO account SELECT id, 0 FROM generate_series(0, 9999) id; \
     CREATE TABLE journal (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account bigint NOT NULL, cents bigint NOT NULL); \
     CREATE TABLE inbox (scope text, key text, fingerprint text NOT NULL, outcome text, entered timestamptz NOT NULL DEFAULT now(), \
     PRIMARY KEY (scope, key))";
/// More messages than a turn needs.
const READY: u64 = 4_000;
const SEND_BATCH: u64 = 100;
const RECEIVE_BATCH: usize = 10;

/// What is done beside the business writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Nothing: the writes are committed.
    Plain,
    /// Two statements that do nothing: what the round trips of any inbox cost.
    TwoMore,
    /// The key is inserted and its outcome updated in a table of one's own, without functions, fences and retention.
    ByHand,
    /// The key is entered and its outcome recorded, on a connection of one's own: each is a statement.
    Statements,
    /// The key is entered and its outcome recorded by a worker whose queue is elsewhere.
    Entered,
    /// A message was received, and is acked after the commit.
    ThenAck,
    /// As `Entered`; a message was received, and is acked after the commit.
    EnteredThenAck,
    /// As `Entered`; a message was received, and is settled in the transaction.
    Settled,
}

impl How {
    pub const ALL: [Self; 8] = [
        Self::Plain,
        Self::TwoMore,
        Self::ByHand,
        Self::Statements,
        Self::Entered,
        Self::ThenAck,
        Self::EnteredThenAck,
        Self::Settled,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "transaction",
            Self::TwoMore => "transaction with two empty statements",
            Self::ByHand => "transaction with an inbox table by hand",
            Self::Statements => "transaction with enter and record as statements",
            Self::Entered => "transaction with enter and record",
            Self::ThenAck => "transaction, then ack",
            Self::EnteredThenAck => "transaction with enter and record, then ack",
            Self::Settled => "transaction with enter, record and settle",
        }
    }

    pub fn database(self) -> &'static str {
        match self {
            Self::Plain => "tx_plain",
            Self::TwoMore => "tx_two_more",
            Self::ByHand => "tx_by_hand",
            Self::Statements => "tx_statements",
            Self::Entered => "tx_entered",
            Self::ThenAck => "tx_then_ack",
            Self::EnteredThenAck => "tx_entered_then_ack",
            Self::Settled => "tx_settled",
        }
    }

    fn enters(self) -> bool {
        matches!(self, Self::Entered | Self::EnteredThenAck | Self::Settled)
    }

    fn receives(self) -> bool {
        matches!(self, Self::ThenAck | Self::EnteredThenAck | Self::Settled)
    }
}

/// One contestant with its database.
#[derive(Clone)]
pub struct Transactions {
    pub how: How,
    store: PostgresStore,
    inbox: PostgresInbox,
    queue: QueueName,
    keys: Arc<AtomicU64>,
    url: String,
    /// Connections of the transactions, kept from turn to turn as a pool keeps them.
    connections: Arc<Mutex<Vec<PgConnection>>>,
}

impl Transactions {
    pub async fn open(server: &mut Server, how: How, clients: usize) -> Self {
        server.create(how.database(), TABLES).await;
        let url = server.url(how.database());
        let options = Options { migrate: true, ..Options::default() };
        let store = PostgresStore::open(&url, options).await.expect("the store opens");
        let options = InboxOptions { transactions_max: clients, ..InboxOptions::default() };
        let inbox = PostgresInbox::with_options(&store, options).expect("the options are valid");
        let queue = QueueName::new("payments").expect("a name");
        let config = QueueConfig { tier: Tier::Transactional, ..QueueConfig::default() };
        store.create_queue(&queue, config).await.expect("a queue");
        Self { how, store, inbox, queue, keys: Arc::default(), url, connections: Arc::default() }
    }

    /// Sends messages until a turn has enough of them.
    pub async fn fill(&self) {
        let stats = self.store.stats(&self.queue).await.expect("stats");
        let mut ready = stats.ready;
        while self.how.receives() && ready < READY {
            let messages = (0..SEND_BATCH).map(|_| NewMessage::new("1999")).collect();
            self.store.send(&self.queue, messages).await.expect("they are sent");
            ready += SEND_BATCH;
        }
    }

    /// A turn; gives the count of transactions and the seconds.
    pub async fn turn(&self, clients: usize, time: Duration) -> (u64, f64) {
        let mut connections = std::mem::take(&mut *self.connections.lock().expect("no panic"));
        while connections.len() < clients {
            connections.push(PgConnection::connect(&self.url).await.expect("a connection"));
        }
        let spare = connections.split_off(clients);
        let (start, mut running) = (Instant::now(), JoinSet::new());
        for mut db in connections {
            let this = self.clone();
            running.spawn(async move {
                let mut done = 0;
                while start.elapsed() < time {
                    done += this.pay_some(&mut db).await;
                }
                (done, db)
            });
        }
        let (done, mut connections): (Vec<u64>, Vec<_>) = running.join_all().await.into_iter().unzip();
        let secs = start.elapsed().as_secs_f64();
        connections.extend(spare);
        *self.connections.lock().expect("no panic") = connections;
        (done.iter().sum(), secs)
    }

    async fn pay_some(&self, db: &mut PgConnection) -> u64 {
        if !self.how.receives() {
            self.pay(db, None).await;
            return 1;
        }
        let ask = Receive::up_to(RECEIVE_BATCH).lease(Duration::from_mins(10));
        let got = self.store.receive(&self.queue, ask).await.expect("it is received");
        for delivery in &got {
            self.pay(db, Some(delivery)).await;
        }
        got.len() as u64
    }

    fn entry(&self, delivery: Option<&Delivery>) -> InboxEntry {
        let number = self.keys.fetch_add(1, Ordering::Relaxed);
        let id = match delivery {
            Some(delivery) => EntryId::of_queue(&self.queue, delivery.key.clone()),
            None => EntryId::new(
                "queue/payments".parse().expect("a scope"),
                format!("order-{number:012}").parse().expect("a key"),
            ),
        };
        InboxEntry { id, fingerprint: format!("{number:064x}").parse().expect("a fingerprint") }
    }

    async fn pay(&self, db: &mut PgConnection, delivery: Option<&Delivery>) {
        if self.how.enters() {
            self.pay_as_worker(delivery).await;
        } else {
            let mut tx = db.begin().await.expect("it begins");
            self.pay_in(&mut tx).await;
            tx.commit().await.expect("it is committed");
        }
        if self.how != How::Settled
            && let Some(delivery) = delivery
        {
            let ack = Settle::ack(delivery.receipt.clone());
            self.store
                .settle(&self.queue, vec![ack])
                .await
                .expect("it is acked")
                .remove(0)
                .expect("it is held");
        }
    }

    async fn pay_in(&self, tx: &mut PgConnection) {
        let entry = self.entry(None);
        match self.how {
            How::Statements => {
                let found = self.inbox.enter_on(tx, &entry).await;
                assert_eq!(found.expect("it is entered"), InboxLookup::Fresh);
                write(tx).await;
                self.inbox.record_on(tx, &entry, outcome(), 86_400_000).await.expect("it is recorded");
            }
            How::ByHand => {
                let (scope, key) = (entry.id.scope.as_str(), entry.id.key.as_str());
                let sql =
                    "INSERT INTO inbox (scope, key, fingerprint) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
                let enter = sqlx::query(sql).bind(scope).bind(key).bind(entry.fingerprint.as_str());
                assert_eq!(enter.execute(&mut *tx).await.expect("it is entered").rows_affected(), 1);
                write(tx).await;
                let sql = "UPDATE inbox SET outcome = $3 WHERE scope = $1 AND key = $2";
                let record = sqlx::query(sql).bind(scope).bind(key).bind(OUTCOME);
                record.execute(tx).await.expect("it is recorded");
            }
            How::TwoMore => {
                sqlx::query("SELECT 1").execute(&mut *tx).await.expect("a statement");
                write(tx).await;
                sqlx::query("SELECT 1").execute(tx).await.expect("a statement");
            }
            _ => write(tx).await,
        }
    }

    /// As a worker does it. Without a delivery of its own, its queue is elsewhere.
    async fn pay_as_worker(&self, delivery: Option<&Delivery>) {
        let entry = self.entry(delivery);
        let mut tx = self.inbox.begin(&entry).await.expect("it begins");
        let found = self.inbox.enter(&mut tx, &entry).await.expect("it is entered");
        assert_eq!(found, InboxLookup::Fresh);
        write(PostgresInbox::connection(&mut tx)).await;
        let elsewhere = Receipt::new("elsewhere").expect("a receipt");
        let own = if self.how == How::Settled { delivery } else { None };
        let receipt = own.map_or(&elsewhere, |delivery| &delivery.receipt);
        let ended = self.inbox.complete(tx, &entry, outcome(), 86_400_000, receipt).await;
        assert_eq!(ended.expect("it is committed"), own.is_some());
    }
}

fn outcome() -> RecordedOutcome {
    RecordedOutcome::done(Json::parse(OUTCOME).expect("JSON"))
}

/// The business writes of one transaction.
async fn write(db: &mut PgConnection) {
    let account = fastrand::u64(0..ACCOUNTS) as i64;
    let change = sqlx::query("UPDATE account SET cents = cents + 1999 WHERE id = $1").bind(account);
    assert_eq!(change.execute(&mut *db).await.expect("an account").rows_affected(), 1);
    let note = sqlx::query("INSERT INTO journal (account, cents) VALUES ($1, 1999)").bind(account);
    note.execute(db).await.expect("it is noted");
}
