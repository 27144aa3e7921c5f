//! The outbox and the relay, on a private PostgreSQL server with fsync on. Contestants take turns; a ratio is the median of the
//! rounds' ratios.
//!
//! * writers: a business transaction with a message ÷ the same without, 16 writers;
//! * drain: a backlog published by the relay ÷ by a poller `id > last`, into the same sink;
//! * latency: from the commit to the sink at low load, with an unrelated transaction open and without;
//! * rotation: writers' p99 while tables are emptied every two seconds ÷ while they are not, and how large the tables become,
//!   with a transaction of the outbox held open. The clock of the database runs 300 times as fast: an hour takes 12 s.

#[path = "../../embedded/benches/shared/measure.rs"]
mod measure;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hapax_core::outbox::{
    NewOutboxMessage, OutboxMessage, OutboxStore as _, PublishAnswer, Publisher, SinkDedup, SinkDescription,
};
use hapax_faults::PostgresServer;
use hapax_postgres::{Options, PostgresOutbox, PostgresStore};
use hapax_relay::{Relay, RelayOptions};
use measure::{median, table};
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

const WRITERS: u64 = 16;
const BODY: &[u8] = &[b'x'; 256];

/// A sink that counts, and says when a message came. A call costs what a round trip to a near server does.
#[derive(Default)]
struct Counter {
    count: AtomicU64,
    came: Mutex<Vec<(String, Instant)>>,
}

/// A call of the sink.
const CALL: Duration = Duration::from_millis(1);
/// Calls at the same time, as a queue takes them. The poller has one order for everything, so it makes one at a time.
const CALLS: usize = 4;
/// Messages of one call, for both contestants.
const BATCH: usize = 100;

#[async_trait]
impl Publisher for Counter {
    fn describe(&self) -> SinkDescription {
        let dedup = SinkDedup::None;
        SinkDescription {
            name: "counter".into(),
            dedup,
            delays: false,
            batch_max: BATCH,
            calls_max: CALLS,
            warnings: vec![],
        }
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        tokio::time::sleep(CALL).await;
        let now = Instant::now();
        self.came.lock().unwrap().extend(batch.iter().map(|message| (message.id.clone(), now)));
        self.count.fetch_add(batch.len() as u64, Ordering::Relaxed);
        vec![PublishAnswer::Published; batch.len()]
    }
}

struct Site {
    url: String,
    store: PostgresStore,
}

impl Site {
    async fn new(server: &PostgresServer, name: &str) -> Self {
        server
            .sql("postgres", &format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'"))
            .unwrap();
        let url = server.url(name);
        let store = PostgresStore::open(&url, Options { migrate: true, ..Options::default() }).await.unwrap();
        let mut db = PgConnection::connect(&url).await.unwrap();
        db.execute(
            "CREATE TABLE orders (id bigserial PRIMARY KEY, customer bigint NOT NULL, cents bigint NOT NULL);
             CREATE TABLE naive (id bigserial PRIMARY KEY, key text NOT NULL, body bytea NOT NULL);
             CREATE TABLE naive_position (last bigint NOT NULL); INSERT INTO naive_position VALUES (0)",
        )
        .await
        .unwrap();
        Self { url, store }
    }

    fn outbox(&self) -> PostgresOutbox {
        self.store.outbox().unwrap()
    }

    async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    /// One for each writer.
    async fn connections(&self) -> Vec<PgConnection> {
        let mut all = Vec::new();
        for _ in 0..WRITERS {
            all.push(self.connect().await);
        }
        all
    }
}

/// What a writer's transaction has beside its business write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// A statement that does nothing: the round trip that any outbox takes.
    EmptyStatement,
    /// A row in a table of one's own, with a number and without buckets and checks. Its readers lose messages.
    RowByHand,
    Message,
}

impl Beside {
    const ALL: [Self; 4] = [Self::Nothing, Self::EmptyStatement, Self::RowByHand, Self::Message];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "writers, without a message",
            Self::EmptyStatement => "writers, with an empty statement",
            Self::RowByHand => "writers, with a row in a table by hand",
            Self::Message => "writers, with a message",
        }
    }
}

/// Transactions a second of 16 writers. Their connections are as those of a pool that has been in use: each has written to
/// every bucket, and has its plans.
async fn write(site: &Site, beside: Beside, time: Duration) -> f64 {
    let (warm, _) = transactions(site, site.connections().await, beside, time / 4).await;
    let (_, done) = transactions(site, warm, beside, time).await;
    done.len() as f64 / time.as_secs_f64()
}

/// The time of each transaction of the writers of these connections, in milliseconds.
async fn transactions(
    site: &Site,
    connections: Vec<PgConnection>,
    beside: Beside,
    time: Duration,
) -> (Vec<PgConnection>, Vec<f64>) {
    let until = Instant::now() + time;
    let mut writers = tokio::task::JoinSet::new();
    for (writer, mut db) in connections.into_iter().enumerate() {
        let outbox = site.outbox();
        writers.spawn(async move {
            let mut random = fastrand::Rng::with_seed(writer as u64);
            let mut done = Vec::new();
            while Instant::now() < until {
                let start = Instant::now();
                let customer = random.i64(0..10_000);
                let mut tx = db.begin().await.unwrap();
                let sql = "INSERT INTO orders (customer, cents) VALUES ($1, 1999)";
                sqlx::query(sql).bind(customer).execute(&mut *tx).await.unwrap();
                match beside {
                    Beside::Nothing => {}
                    Beside::EmptyStatement => drop(sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap()),
                    Beside::RowByHand => {
                        let insert = sqlx::query("INSERT INTO naive (key, body) VALUES ($1, $2)");
                        let insert = insert.bind(format!("customer-{customer}")).bind(BODY);
                        insert.execute(&mut *tx).await.unwrap();
                    }
                    Beside::Message => {
                        let message =
                            NewOutboxMessage::new("orders", BODY).key(format!("customer-{customer}"));
                        outbox.enqueue(&mut tx, &message).await.unwrap();
                    }
                }
                tx.commit().await.unwrap();
                done.push(start.elapsed().as_secs_f64() * 1000.0);
            }
            (db, done)
        });
    }
    let (connections, done): (_, Vec<_>) = writers.join_all().await.into_iter().unzip();
    (connections, done.concat())
}

/// What a period of load shows.
struct Period {
    p99_ms: f64,
    p999_ms: f64,
    rotated: u64,
    /// The largest size of the tables, and the bytes that one period has written, in MB.
    largest_mb: f64,
    written_mb: f64,
}

/// Writers beside a relay under a clock that runs 300 times as fast, while a transaction of the outbox stays open.
async fn rotation(server: &PostgresServer, name: &str, rotate: Duration, time: Duration) -> Period {
    let site = Site::new(server, name).await;
    let (mut db, mut slow) = (site.connect().await, site.connect().await);
    let fast = "CREATE OR REPLACE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS
        'SELECT (extract(epoch FROM clock_timestamp()) * 1000000 * 300)::bigint'";
    db.execute(fast).await.unwrap();
    let outbox = site.outbox();
    slow.execute("BEGIN").await.unwrap();
    outbox.enqueue(&mut slow, &NewOutboxMessage::new("orders", BODY).key("open")).await.unwrap();
    let sink = Arc::new(Counter::default());
    let options = RelayOptions { rotate, lease: Duration::from_hours(1), ..RelayOptions::route("bench") };
    let relay = Relay::new(Arc::new(outbox), sink.clone(), options);
    let watch = relay.watch();
    let (tell, told) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(async move { relay.run(async { drop(told.await) }).await.unwrap() });
    let ended = Arc::new(AtomicU64::new(0));
    let sizes = {
        let ended = ended.clone();
        tokio::spawn(async move {
            let sql = "SELECT sum(pg_total_relation_size(oid))::float8 / 1e6 FROM pg_class WHERE relkind = 'r' AND relname ~ '^outbox_'";
            let mut largest: f64 = 0.0;
            while ended.load(Ordering::Relaxed) == 0 {
                largest = largest.max(sqlx::query_scalar(sql).fetch_one(&mut db).await.unwrap());
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            let bytes: Option<f64> = sqlx::query_scalar(
                "SELECT avg(pg_column_size(x.*))::float8 FROM (SELECT * FROM hapax.outbox_00_0 UNION ALL SELECT * FROM hapax.outbox_00_1) x",
            )
            .fetch_one(&mut db)
            .await
            .unwrap();
            (largest, bytes.unwrap_or(0.0))
        })
    };
    let (_, done) = transactions(&site, site.connections().await, Beside::Message, time).await;
    ended.store(1, Ordering::Relaxed);
    let (largest_mb, row_bytes) = sizes.await.unwrap();
    drop(tell);
    running.await.unwrap();
    let periods = time.as_secs_f64() / 2.0;
    Period {
        p99_ms: quantile(&done, 0.99),
        p999_ms: quantile(&done, 0.999),
        rotated: watch.counts().rotated,
        largest_mb,
        written_mb: done.len() as f64 * row_bytes / periods / 1e6,
    }
}

/// Messages a second of the relay, from a backlog.
async fn drain_relay(site: &Site, count: u64) -> f64 {
    let sql = "SELECT count(hapax.enqueue('orders', 'key-' || n % 1000, $2)) FROM generate_series(1, $1) n";
    sqlx::query(sql).bind(count as i64).bind(BODY).execute(&mut site.connect().await).await.unwrap();
    let sink = Arc::new(Counter::default());
    let options = RelayOptions::route("bench");
    let relay = Relay::new(Arc::new(site.outbox()), sink.clone(), options);
    let start = Instant::now();
    let finished = async {
        while sink.count.load(Ordering::Relaxed) < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    relay.run(finished).await.unwrap();
    assert_eq!(sink.count.load(Ordering::Relaxed), count, "none lost, none twice");
    count as f64 / start.elapsed().as_secs_f64()
}

/// The same of a poller that remembers the last id.
async fn drain_naive(site: &Site, count: u64) -> f64 {
    let mut db = site.connect().await;
    let sql = "INSERT INTO naive (key, body) SELECT 'key-' || n % 1000, $2 FROM generate_series(1, $1) n";
    sqlx::query(sql).bind(count as i64).bind(BODY).execute(&mut db).await.unwrap();
    let sink = Counter::default();
    let start = Instant::now();
    while sink.count.load(Ordering::Relaxed) < count {
        let sql = "SELECT id, key, body FROM naive WHERE id > (SELECT last FROM naive_position) ORDER BY id LIMIT $1";
        let rows = sqlx::query(sql).bind(BATCH as i64).fetch_all(&mut db).await.unwrap();
        let batch: Vec<OutboxMessage> = rows
            .iter()
            .map(|row| OutboxMessage {
                bucket: 0,
                number: row.get::<i64, _>(0) as u64,
                id: String::new(),
                topic: "orders".into(),
                key: Some(row.get(1)),
                body: row.get::<Vec<u8>, _>(2).into(),
                headers: std::collections::BTreeMap::new(),
                deliver_at_ms: None,
                enqueued_ms: 0,
            })
            .collect();
        sink.publish(&batch).await;
        let last: i64 = rows.last().unwrap().get(0);
        sqlx::query("UPDATE naive_position SET last = $1").bind(last).execute(&mut db).await.unwrap();
    }
    count as f64 / start.elapsed().as_secs_f64()
}

/// Milliseconds from the commit to the sink, of each message, at 20 a second.
async fn latency(site: &Site, route: &str, count: u32, wake: bool) -> Vec<f64> {
    let (outbox, mut db, sink) = (site.outbox(), site.connect().await, Arc::new(Counter::default()));
    let relay = Relay::new(Arc::new(outbox.clone()), sink.clone(), RelayOptions::route(route));
    let write = async {
        // The backlog of other parts, and the relay's start.
        while sink.count.load(Ordering::Relaxed) == 0
            || outbox.status().await.unwrap().iter().any(|r| r.route == route && r.lag > 0)
        {
            outbox.enqueue(&mut db, &NewOutboxMessage::new("orders", BODY)).await.unwrap();
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        sink.came.lock().unwrap().clear();
        let mut committed = Vec::new();
        for number in 0..count {
            let message = NewOutboxMessage::new("orders", BODY).key(format!("key-{number}"));
            let id = outbox.enqueue(&mut db, &message).await.unwrap();
            committed.push((id, Instant::now()));
            if wake {
                outbox.wake();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        while sink.came.lock().unwrap().len() < count as usize {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        committed
    };
    let (result, committed) = {
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let run = relay.run(async { drop(told.await) });
        let write = async {
            let committed = write.await;
            drop(tell);
            committed
        };
        tokio::join!(run, write)
    };
    result.unwrap();
    let came = sink.came.lock().unwrap();
    let ms = |(id, at): &(String, Instant)| {
        let arrived = came.iter().find(|(of, _)| of == id).unwrap().1;
        arrived.saturating_duration_since(*at).as_secs_f64() * 1000.0
    };
    committed.iter().map(ms).collect()
}

fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// How long each part takes.
struct Times {
    rounds: usize,
    write: Duration,
    backlog: u64,
    rotate: Duration,
    /// How long the unrelated transaction is open before the latency beside it is measured.
    open: Duration,
}

async fn rotations(server: &PostgresServer, times: &Times, markdown: bool) {
    let mut rows = Vec::new();
    let row = |name: &str, it: &Period| {
        let number = |value: f64| format!("{value:.1}");
        let (p99, p999) = (number(it.p99_ms), number(it.p999_ms));
        vec![name.to_owned(), p99, p999, it.rotated.to_string(), number(it.largest_mb), number(it.written_mb)]
    };
    for round in 0..times.rounds.div_ceil(2) {
        let never = rotation(server, &format!("never_{round}"), Duration::from_hours(1), times.rotate).await;
        let often =
            rotation(server, &format!("often_{round}"), Duration::from_millis(200), times.rotate).await;
        rows.push(row("tables are not emptied", &never));
        rows.push(row("tables are emptied", &often));
        rows.push(vec!["ratio".to_owned(), format!("{:.2}", often.p99_ms / never.p99_ms)]);
        rows.last_mut().unwrap().resize(6, String::new());
    }
    let columns = ["", "p99 ms", "p99.9 ms", "tables emptied", "largest MB", "MB a period"];
    table(
        markdown,
        "Writers while tables are emptied, a transaction of the outbox held open",
        &columns,
        &rows,
    );
}

async fn run(times: &Times, markdown: bool, writers_only: bool) {
    let server = PostgresServer::start(&[]).unwrap();
    let Times { rounds, write: time, backlog, .. } = *times;
    let mut writers: [Vec<f64>; Beside::ALL.len()] = Default::default();
    let mut drains: [Vec<f64>; 2] = Default::default();
    for round in 0..rounds {
        let site = Site::new(&server, &format!("bench_{round}")).await;
        for turn in 0..Beside::ALL.len() {
            let at = (turn + round) % Beside::ALL.len();
            writers[at].push(write(&site, Beside::ALL[at], time).await);
        }
        if writers_only {
            continue;
        }
        let fresh = Site::new(&server, &format!("drain_{round}")).await;
        let (naive, relay) = if round % 2 == 0 {
            let naive = drain_naive(&fresh, backlog).await;
            (naive, drain_relay(&fresh, backlog).await)
        } else {
            let relay = drain_relay(&fresh, backlog).await;
            (drain_naive(&fresh, backlog).await, relay)
        };
        drains[0].push(naive);
        drains[1].push(relay);
    }
    let row = |name: &str, rates: &[f64], base: &[f64]| {
        let ratio = median(rates.iter().zip(base).map(|(rate, base)| rate / base));
        vec![name.to_owned(), format!("{:.0}", median(rates.iter().copied())), format!("{ratio:.2}")]
    };
    let mut rows: Vec<_> = Beside::ALL
        .iter()
        .zip(&writers)
        .map(|(beside, rates)| row(beside.name(), rates, &writers[0]))
        .collect();
    if !writers_only {
        rows.push(row("backlog, poller `id > last`", &drains[0], &drains[0]));
        rows.push(row("backlog, relay", &drains[1], &drains[0]));
    }
    table(markdown, "Throughput", &["", "a second", "ratio"], &rows);
    if writers_only {
        return;
    }
    let site = Site::new(&server, "latency").await;
    let quiet = latency(&site, "quiet", 100, false).await;
    let woken = latency(&site, "woken", 100, true).await;
    let mut elsewhere = site.connect().await;
    elsewhere.execute("BEGIN; INSERT INTO orders (customer, cents) VALUES (1, 1)").await.unwrap();
    let opened = Instant::now();
    rotations(&server, times, markdown).await;
    tokio::time::sleep_until((opened + times.open).into()).await;
    let beside = latency(&site, "beside", 100, false).await;
    let row = |name: &str, values: &[f64]| {
        let ms = |share| format!("{:.1}", quantile(values, share));
        vec![name.to_owned(), ms(0.5), ms(0.99)]
    };
    let rows = vec![
        row("commit to sink", &quiet),
        row("commit to sink, woken", &woken),
        row("commit to sink, an unrelated transaction open", &beside),
    ];
    table(markdown, "Latency at 20 messages a second", &["milliseconds", "p50", "p99"], &rows);
}

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let seconds = Duration::from_secs;
    let times = if quick {
        Times { rounds: 1, write: seconds(1), backlog: 5_000, rotate: seconds(5), open: seconds(1) }
    } else {
        Times { rounds: 5, write: seconds(4), backlog: 30_000, rotate: seconds(12), open: seconds(60) }
    };
    let markdown = std::env::args().any(|arg| arg == "--markdown");
    let writers_only = std::env::args().any(|arg| arg == "--writers");
    runtime.block_on(run(&times, markdown, writers_only));
}
