//! The queues that take turns: Hapax, one table with SKIP LOCKED, and a table with visibility times as pgmq has it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::{
    Extend, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receipt, Receive, Settle,
};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{PgConnection, Row as _};
use tokio::task::JoinSet;

use crate::server::Server;

const BODY_BYTES: usize = 256;
/// Messages in a queue before the first turn.
pub const SHALLOW: u64 = 1_000;
/// Hapax with `sync_receives` off.
pub const UNSYNCED: &str = "Hapax, receives not synced";

/// What each of them does to a message: the loop that is written first, with a partial index on what is ready.
const SKIP_LOCKED: Sql = Sql {
    tables: "CREATE TABLE job (id bigserial PRIMARY KEY, state smallint NOT NULL DEFAULT 0, due timestamptz NOT NULL DEFAULT now(), \
               attempts int NOT NULL DEFAULT 0, deadline timestamptz, body bytea NOT NULL); \
             CREATE INDEX job_ready ON job (id) WHERE state = 0; \
             ALTER TABLE job SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0)",
    send: "INSERT INTO job (body) SELECT unnest($1::bytea[])",
    receive: "UPDATE job SET state = 1, attempts = attempts + 1, deadline = clock_timestamp() + $2 * interval '1 ms' WHERE id IN \
                (SELECT id FROM job WHERE state = 0 AND due <= statement_timestamp() ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED) \
              RETURNING id, body",
    extend: "UPDATE job SET deadline = clock_timestamp() + interval '30 s' WHERE id = ANY($1) AND state = 1",
    ack: "DELETE FROM job WHERE id = ANY($1)",
    sweep: "UPDATE job SET state = 0 WHERE id IN (SELECT id FROM job WHERE state = 1 AND deadline < clock_timestamp() \
              LIMIT 200 FOR UPDATE SKIP LOCKED)",
};

/// As pgmq 1.x does it: an index on the visibility time, an UPDATE per read, a DELETE per message. Written by us.
const PGMQ_STYLE: Sql = Sql {
    tables: "CREATE TABLE q (msg_id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, read_ct int NOT NULL DEFAULT 0, \
               enqueued_at timestamptz NOT NULL DEFAULT now(), vt timestamptz NOT NULL, message bytea NOT NULL); \
             CREATE INDEX q_vt ON q (vt); \
             ALTER TABLE q SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0)",
    send: "INSERT INTO q (vt, message) SELECT clock_timestamp(), unnest($1::bytea[])",
    receive: "WITH cte AS (SELECT msg_id FROM q WHERE vt <= clock_timestamp() ORDER BY msg_id LIMIT $1 FOR UPDATE SKIP LOCKED) \
              UPDATE q m SET vt = clock_timestamp() + $2 * interval '1 ms', read_ct = read_ct + 1 FROM cte WHERE m.msg_id = cte.msg_id \
              RETURNING m.msg_id, m.message",
    extend: "UPDATE q SET vt = clock_timestamp() + interval '30 s' WHERE msg_id = ANY($1)",
    ack: "DELETE FROM q WHERE msg_id = ANY($1)",
    sweep: "SELECT 1",
};

/// The statements of a queue that is only SQL.
#[derive(Clone, Copy)]
struct Sql {
    tables: &'static str,
    send: &'static str,
    receive: &'static str,
    extend: &'static str,
    ack: &'static str,
    /// Returns what was leased for too long.
    sweep: &'static str,
}

/// A queue.
pub struct Contestant {
    pub name: &'static str,
    pub database: String,
    kind: Kind,
}

enum Kind {
    /// Its clients are spread over the stores; each store is what one process has.
    Hapax { stores: Vec<PostgresStore>, queue: QueueName },
    /// As many connections as clients.
    Sql { sql: Sql, connections: Vec<PgConnection> },
}

/// What the clients do in a turn.
#[derive(Clone, Copy)]
pub struct Load {
    pub clients: usize,
    /// Messages of each call.
    pub batch: usize,
    pub time: Duration,
    /// Some leases are extended, and some are left to end.
    pub troubled: bool,
}

/// One client's way to its queue.
enum Client {
    Hapax { store: PostgresStore, queue: QueueName },
    Sql { sql: Sql, connection: PgConnection },
}

enum Taken {
    Hapax(Vec<Receipt>),
    Sql(Vec<i64>),
}

impl Taken {
    fn len(&self) -> usize {
        match self {
            Self::Hapax(receipts) => receipts.len(),
            Self::Sql(ids) => ids.len(),
        }
    }
}

fn body() -> Vec<u8> {
    let mut body = vec![b'x'; BODY_BYTES];
    fastrand::fill(&mut body);
    body
}

impl Contestant {
    /// Hapax, in a database that is made if need be.
    pub async fn hapax(
        server: &mut Server,
        name: &'static str,
        database: &str,
        queue: &str,
        stores: usize,
    ) -> Self {
        let exists = "SELECT 1 FROM pg_database WHERE datname = $1";
        let mut admin = server.connect("postgres").await;
        if sqlx::query(exists).bind(database).fetch_optional(&mut admin).await.expect("databases").is_none() {
            server.create(database, "SELECT 1").await;
        }
        let queue: QueueName = queue.parse().expect("a name");
        let mut opened = Vec::new();
        for _ in 0..stores {
            let options = Options { migrate: true, sync_receives: name != UNSYNCED, ..Options::default() };
            opened.push(PostgresStore::open(&server.url(database), options).await.expect("the store opens"));
        }
        opened[0].create_queue(&queue, QueueConfig::default()).await.expect("a queue is made");
        Self { name, database: database.to_owned(), kind: Kind::Hapax { stores: opened, queue } }
    }

    pub async fn skip_locked(server: &mut Server, database: &str) -> Self {
        Self::sql(server, "SKIP LOCKED", database, SKIP_LOCKED).await
    }

    pub async fn pgmq_style(server: &mut Server, database: &str) -> Self {
        Self::sql(server, "pgmq style", database, PGMQ_STYLE).await
    }

    async fn sql(server: &mut Server, name: &'static str, database: &str, sql: Sql) -> Self {
        server.create(database, sql.tables).await;
        Self { name, database: database.to_owned(), kind: Kind::Sql { sql, connections: Vec::new() } }
    }

    async fn clients(&mut self, server: &Server, count: usize) -> Vec<Client> {
        match &mut self.kind {
            Kind::Hapax { stores, queue } => {
                let client =
                    |store: &PostgresStore| Client::Hapax { store: store.clone(), queue: queue.clone() };
                stores.iter().cycle().take(count).map(client).collect()
            }
            Kind::Sql { sql, connections } => {
                while connections.len() < count {
                    connections.push(server.connect(&self.database).await);
                }
                let client = |connection| Client::Sql { sql: *sql, connection };
                connections.split_off(connections.len() - count).into_iter().map(client).collect()
            }
        }
    }

    fn take_back(&mut self, client: Client) {
        if let (Kind::Sql { connections, .. }, Client::Sql { connection, .. }) = (&mut self.kind, client) {
            connections.push(connection);
        }
    }

    /// Sends messages that stay in the queue.
    pub async fn fill(&mut self, server: &Server, count: u64) {
        let mut client = self.clients(server, 1).await.remove(0);
        let mut left = count;
        while left > 0 {
            let batch = left.min(1_000);
            client.send(batch as usize).await;
            left -= batch;
        }
        self.take_back(client);
    }

    /// Lets clients work for a time; gives the count of messages that were acked and the seconds that it took.
    pub async fn turn(&mut self, server: &Server, load: Load) -> (u64, f64) {
        let clients = self.clients(server, load.clients).await;
        let (start, mut running) = (Instant::now(), JoinSet::new());
        for client in clients {
            running.spawn(client.work(start + load.time, load));
        }
        let mut done = 0;
        let ended = running.join_all().await;
        let secs = start.elapsed().as_secs_f64();
        for (client, count) in ended {
            self.take_back(client);
            done += count;
        }
        (done, secs)
    }

    /// Returns what was leased for too long. Hapax does that by itself.
    pub async fn sweep(&mut self, server: &Server) {
        let mut client = self.clients(server, 1).await.remove(0);
        if let Client::Sql { sql, connection } = &mut client {
            sqlx::query(sql.sweep).execute(connection).await.expect("leases end");
        }
        self.take_back(client);
    }

    /// Times of single receives; each message is acked and replaced, which is not measured.
    pub async fn receives(&mut self, server: &Server, count: usize) -> Vec<Duration> {
        let mut client = self.clients(server, 1).await.remove(0);
        let mut times = Vec::new();
        for _ in 0..count {
            let start = Instant::now();
            let taken = client.receive(1, 30_000).await;
            times.push(start.elapsed());
            client.ack(taken).await;
            client.send(1).await;
        }
        self.take_back(client);
        times
    }

    /// Waits with this many receives until the handle that is returned is dropped.
    pub fn poll(&self, polls: usize, queues: &[QueueName]) -> JoinSet<()> {
        let Kind::Hapax { stores, .. } = &self.kind else { panic!("only Hapax has long polls") };
        let mut waiting = JoinSet::new();
        for (at, queue) in queues.iter().cycle().take(polls).enumerate() {
            let (store, queue) = (stores[at % stores.len()].clone(), queue.clone());
            waiting.spawn(async move {
                let ask = Receive { wait_ms: Some(20_000), ..Receive::up_to(10) };
                while store.receive(&queue, ask.clone()).await.is_ok() {}
            });
        }
        waiting
    }

    /// Makes queues without messages.
    pub async fn make_queues(&self, count: usize) -> Arc<[QueueName]> {
        let Kind::Hapax { stores, .. } = &self.kind else { panic!("only Hapax has queues") };
        let mut names = Vec::new();
        for number in 0..count {
            let name: QueueName = format!("idle-{number}").parse().expect("a name");
            stores[0].create_queue(&name, QueueConfig::default()).await.expect("a queue is made");
            names.push(name);
        }
        names.into()
    }
}

impl Client {
    async fn work(mut self, until: Instant, load: Load) -> (Self, u64) {
        let mut done = 0;
        while Instant::now() < until {
            self.send(load.batch).await;
            let lapses = load.troubled && fastrand::u8(..) < 13;
            let taken = self.receive(load.batch, if lapses { 1_000 } else { 30_000 }).await;
            if lapses {
                continue;
            }
            if load.troubled && fastrand::u8(..) < 64 {
                self.extend(&taken).await;
            }
            done += taken.len() as u64;
            self.ack(taken).await;
        }
        (self, done)
    }

    async fn send(&mut self, batch: usize) {
        match self {
            Self::Hapax { store, queue } => {
                let messages = (0..batch).map(|_| NewMessage::new(body())).collect();
                let sent = store.send(queue, messages).await.expect("it is sent");
                assert!(sent.iter().all(Result::is_ok), "{sent:?}");
            }
            Self::Sql { sql, connection } => {
                let bodies: Vec<Vec<u8>> = (0..batch).map(|_| body()).collect();
                sqlx::query(sql.send).bind(bodies).execute(connection).await.expect("it is sent");
            }
        }
    }

    /// At least one message.
    async fn receive(&mut self, max: usize, lease_ms: u64) -> Taken {
        loop {
            let taken = match self {
                Self::Hapax { store, queue } => {
                    let ask =
                        Receive { lease_ms: Some(lease_ms), wait_ms: Some(1_000), ..Receive::up_to(max) };
                    let deliveries = store.receive(queue, ask).await.expect("it is received");
                    assert!(deliveries.iter().all(|delivery| delivery.body.len() == BODY_BYTES));
                    Taken::Hapax(deliveries.into_iter().map(|delivery| delivery.receipt).collect())
                }
                Self::Sql { sql, connection } => {
                    let receive = sqlx::query(sql.receive).bind(max as i64).bind(lease_ms as f64);
                    let rows = receive.fetch_all(connection).await.expect("it is received");
                    assert!(rows.iter().all(|row| row.get::<&[u8], _>(1).len() == BODY_BYTES));
                    Taken::Sql(rows.iter().map(|row| row.get(0)).collect())
                }
            };
            if taken.len() > 0 {
                return taken;
            }
        }
    }

    async fn extend(&mut self, taken: &Taken) {
        match (self, taken) {
            (Self::Hapax { store, queue }, Taken::Hapax(receipts)) => {
                let extend = |receipt: &Receipt| Extend {
                    receipt: receipt.clone(),
                    lease_ms: 30_000,
                    own_lease: false,
                };
                let extended = store.extend(queue, receipts.iter().map(extend).collect()).await;
                assert!(extended.expect("they are extended").iter().all(Result::is_ok));
            }
            (Self::Sql { sql, connection }, Taken::Sql(ids)) => {
                sqlx::query(sql.extend).bind(ids).execute(connection).await.expect("they are extended");
            }
            _ => unreachable!("a client acks what it received"),
        }
    }

    async fn ack(&mut self, taken: Taken) {
        match (self, taken) {
            (Self::Hapax { store, queue }, Taken::Hapax(receipts)) => {
                let settled = store.settle(queue, receipts.into_iter().map(Settle::ack).collect()).await;
                assert!(settled.expect("they are acked").iter().all(Result::is_ok));
            }
            (Self::Sql { sql, connection }, Taken::Sql(ids)) => {
                let acked =
                    sqlx::query(sql.ack).bind(&ids).execute(connection).await.expect("they are acked");
                assert_eq!(acked.rows_affected(), ids.len() as u64);
            }
            _ => unreachable!("a client acks what it received"),
        }
    }
}
