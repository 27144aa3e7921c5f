//! A user's transaction alone, with its ledger entry, and with the settle of its message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hapax_core::{
    AsyncInbox as _, Delivery, EntryId, InboxEntry, InboxLookup, Json, NewMessage, QueueAdmin as _,
    QueueConfig, QueueName, QueueStore as _, Receive, RecordedOutcome, Settle, Tier,
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
     CREATE TABLE journal (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account bigint NOT NULL, cents bigint NOT NULL)";
/// More messages than a turn needs.
const READY: u64 = 4_000;
const SEND_BATCH: u64 = 100;
const RECEIVE_BATCH: usize = 10;

/// What is done beside the business writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Nothing: the writes are committed.
    Plain,
    /// The key is entered and its outcome recorded.
    Entered,
    /// A message was received, and is acked after the commit.
    ThenAck,
    /// As `Entered`; a message was received, and is acked after the commit.
    EnteredThenAck,
    /// As `Entered`; a message was received, and is settled in the transaction.
    Settled,
}

impl How {
    pub const ALL: [Self; 5] =
        [Self::Plain, Self::Entered, Self::ThenAck, Self::EnteredThenAck, Self::Settled];

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "transaction",
            Self::Entered => "transaction with enter and record",
            Self::ThenAck => "transaction, then ack",
            Self::EnteredThenAck => "transaction with enter and record, then ack",
            Self::Settled => "transaction with enter, record and settle",
        }
    }

    pub fn database(self) -> &'static str {
        match self {
            Self::Plain => "tx_plain",
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
        Self { how, store, inbox, queue, keys: Arc::default(), url }
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
        let mut connections = Vec::new();
        for _ in 0..clients {
            connections.push(PgConnection::connect(&self.url).await.expect("a connection"));
        }
        let (start, mut running) = (Instant::now(), JoinSet::new());
        for mut db in connections {
            let this = self.clone();
            running.spawn(async move {
                let mut done = 0;
                while start.elapsed() < time {
                    done += this.pay_some(&mut db).await;
                }
                done
            });
        }
        let done: u64 = running.join_all().await.into_iter().sum();
        (done, start.elapsed().as_secs_f64())
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
        if self.how.enters()
            && let Some(delivery) = delivery
        {
            self.pay_as_worker(delivery).await;
        } else {
            let mut tx = db.begin().await.expect("it begins");
            if self.how.enters() {
                let entry = self.entry(None);
                let found = self.inbox.enter_on(&mut tx, &entry).await;
                assert_eq!(found.expect("it is entered"), InboxLookup::Fresh);
                write(&mut tx).await;
                self.inbox.record_on(&mut tx, &entry, outcome(), 86_400_000).await.expect("it is recorded");
            } else {
                write(&mut tx).await;
            }
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

    async fn pay_as_worker(&self, delivery: &Delivery) {
        let entry = self.entry(Some(delivery));
        let mut tx = self.inbox.begin(&entry).await.expect("it begins");
        let found = self.inbox.enter(&mut tx, &entry).await.expect("it is entered");
        assert_eq!(found, InboxLookup::Fresh);
        write(PostgresInbox::connection(&mut tx)).await;
        self.inbox.record(&mut tx, &entry, outcome(), 86_400_000).await.expect("it is recorded");
        if self.how == How::Settled {
            assert!(self.inbox.settle(&mut tx, &delivery.receipt).await.expect("it is settled"));
        }
        self.inbox.commit(tx).await.expect("it is committed");
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
