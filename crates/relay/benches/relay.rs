//! The outbox and the relay, on a private PostgreSQL server with fsync on. Contestants take turns; a ratio is the median of the
//! rounds' ratios.
//!
//! * writers: a business transaction with a message ÷ the same without, 16 writers;
//! * drain: a backlog published by the relay ÷ by a poller `id > last`, into the same sink;
//! * latency: from the commit to the sink at low load, with an unrelated transaction open and without.

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
/// Messages of one call, for both contestants.
const BATCH: usize = 100;

#[async_trait]
impl Publisher for Counter {
    fn describe(&self) -> SinkDescription {
        let dedup = SinkDedup::None;
        SinkDescription { name: "counter".into(), dedup, delays: false, batch_max: BATCH, warnings: vec![] }
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
}

/// Transactions a second of 16 writers.
async fn write(site: &Site, with_message: bool, time: Duration) -> f64 {
    let until = Instant::now() + time;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let (outbox, mut db) = (site.outbox(), site.connect().await);
        writers.spawn(async move {
            let mut random = fastrand::Rng::with_seed(writer);
            let mut done = 0u64;
            while Instant::now() < until {
                let customer = random.i64(0..10_000);
                let mut tx = db.begin().await.unwrap();
                let sql = "INSERT INTO orders (customer, cents) VALUES ($1, 1999)";
                sqlx::query(sql).bind(customer).execute(&mut *tx).await.unwrap();
                if with_message {
                    let message = NewOutboxMessage::new("orders", BODY).key(format!("customer-{customer}"));
                    outbox.enqueue(&mut tx, &message).await.unwrap();
                }
                tx.commit().await.unwrap();
                done += 1;
            }
            done
        });
    }
    let done: u64 = writers.join_all().await.into_iter().sum();
    done as f64 / time.as_secs_f64()
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

async fn run(rounds: usize, time: Duration, backlog: u64, markdown: bool) {
    let server = PostgresServer::start(&[]).unwrap();
    let mut ratios: [Vec<f64>; 2] = Default::default();
    let mut rates: [Vec<f64>; 4] = Default::default();
    for round in 0..rounds {
        let site = Site::new(&server, &format!("bench_{round}")).await;
        let (plain, with) = if round % 2 == 0 {
            let plain = write(&site, false, time).await;
            (plain, write(&site, true, time).await)
        } else {
            let with = write(&site, true, time).await;
            (write(&site, false, time).await, with)
        };
        let fresh = Site::new(&server, &format!("drain_{round}")).await;
        let (naive, relay) = if round % 2 == 0 {
            let naive = drain_naive(&fresh, backlog).await;
            (naive, drain_relay(&fresh, backlog).await)
        } else {
            let relay = drain_relay(&fresh, backlog).await;
            (drain_naive(&fresh, backlog).await, relay)
        };
        ratios[0].push(with / plain);
        ratios[1].push(relay / naive);
        for (rates, rate) in rates.iter_mut().zip([plain, with, naive, relay]) {
            rates.push(rate);
        }
    }
    let rate = |at: usize| format!("{:.0}", median(rates[at].iter().copied()));
    let ratio = |at: usize| format!("{:.2}", median(ratios[at].iter().copied()));
    let rows = vec![
        vec!["writers, without a message".to_owned(), rate(0), "1".to_owned()],
        vec!["writers, with a message".to_owned(), rate(1), ratio(0)],
        vec!["backlog, poller `id > last`".to_owned(), rate(2), "1".to_owned()],
        vec!["backlog, relay".to_owned(), rate(3), ratio(1)],
    ];
    table(markdown, "Throughput", &["", "a second", "ratio"], &rows);
    let site = Site::new(&server, "latency").await;
    let quiet = latency(&site, "quiet", 100, false).await;
    let woken = latency(&site, "woken", 100, true).await;
    let mut elsewhere = site.connect().await;
    elsewhere.execute("BEGIN; INSERT INTO orders (customer, cents) VALUES (1, 1)").await.unwrap();
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
    let (rounds, time, backlog) = if quick { (1, 1, 5_000) } else { (5, 5, 30_000) };
    let markdown = std::env::args().any(|arg| arg == "--markdown");
    runtime.block_on(run(rounds, Duration::from_secs(time), backlog, markdown));
}
