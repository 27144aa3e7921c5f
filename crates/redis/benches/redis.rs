//! Queues and ledger on Redis beside bare commands of Redis that do the same without leases, fences and counters.
//!
//! `cargo xtask bench redis [--quick] [--deep N]`: contestants take turns of 200 ms on one server, whose file is synced before
//! each answer (`appendfsync always`); a ratio is the median of the rounds' ratios.

use std::time::{Duration, Instant};

use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, Json, Ledger as _, NewMessage, QueueAdmin as _,
    QueueConfig, QueueName, QueueStore as _, Receive, RecordedOutcome, Settle,
};
use hapax_faults::RedisServer;
use hapax_redis::{Durability, Options, RedisStore};
use redis::aio::MultiplexedConnection;

const DURABLE: &[&str] = &["appendonly yes", "appendfsync always"];
const TURN: Duration = Duration::from_millis(200);
const BODY: usize = 256;
/// Messages, and entries, whose memory is measured.
const COUNT: u64 = 10_000;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let rounds = if args.iter().any(|arg| arg == "--quick") { 3 } else { 15 };
    let deep = args.iter().position(|arg| arg == "--deep").and_then(|at| args.get(at + 1)?.parse().ok());
    let deep: u64 = deep.unwrap_or(if rounds == 3 { 5_000 } else { 200_000 });
    let server = RedisServer::start(DURABLE).expect("Redis 7 is installed");
    let bench = Bench::new(&server, rounds).await;
    println!("| | Hapax | bare | ratio |\n|---|--:|--:|--:|");
    bench.lifecycles(10).await;
    bench.lifecycles(1).await;
    bench.claims().await;
    bench.empty_scripts().await;
    bench.depth(deep).await;
    bench.memory(&server).await;
    replicas(rounds).await;
}

fn store_options(prefix: &str, durability: Durability) -> Options {
    Options { prefix: prefix.to_owned(), durability, ..Options::default() }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn row(what: &str, ours: &[f64], bare: &[f64], unit: &str) {
    let ratios = ours.iter().zip(bare).map(|(ours, bare)| ours / bare).collect();
    let (ours, bare) = (median(ours.to_vec()), median(bare.to_vec()));
    println!("| {what} | {ours:.0} {unit} | {bare:.0} {unit} | {:.2} |", median(ratios));
}

fn name(text: &str) -> QueueName {
    text.parse().expect("a queue's name")
}

struct Bench {
    store: RedisStore,
    bare: MultiplexedConnection,
    rounds: usize,
}

async fn connect(server: &RedisServer) -> MultiplexedConnection {
    let client = redis::Client::open(format!("redis://{}", server.address())).expect("a URL");
    // A sync of a disk that others use, too, takes longer than the half second that is the default.
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(20)));
    client.get_multiplexed_async_connection_with_config(&config).await.expect("a connection")
}

/// Calls per second during one turn.
async fn rate<F: Future<Output = ()>>(count: usize, mut call: impl FnMut() -> F) -> f64 {
    let (start, mut done) = (Instant::now(), 0);
    while start.elapsed() < TURN {
        call().await;
        done += count;
    }
    done as f64 / start.elapsed().as_secs_f64()
}

async fn lifecycle(store: &RedisStore, queue: &QueueName, count: usize) {
    let messages = (0..count).map(|_| NewMessage::new(vec![b'x'; BODY])).collect();
    store.send(queue, messages).await.expect("sent");
    let got = store.receive(queue, Receive::up_to(count)).await.expect("received");
    assert_eq!(got.len(), count);
    let acks = got.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
    store.settle(queue, acks).await.expect("acked");
}

async fn stream(bare: &mut MultiplexedConnection, count: usize) {
    let body = [b'x'; BODY];
    let mut sends = redis::pipe();
    for _ in 0..count {
        sends.cmd("XADD").arg("s").arg("*").arg("b").arg(&body[..]);
    }
    let ids: Vec<String> = sends.query_async(bare).await.expect("added");
    let mut read = redis::cmd("XREADGROUP");
    read.arg("GROUP").arg("g").arg("c").arg("COUNT").arg(count).arg("STREAMS").arg("s").arg(">");
    read.query_async::<redis::Value>(bare).await.expect("read");
    let mut ack = redis::pipe();
    ack.cmd("XACK").arg("s").arg("g").arg(&ids).ignore();
    ack.cmd("XDEL").arg("s").arg(&ids).ignore();
    ack.query_async::<()>(bare).await.expect("acked");
}

fn entry(n: u64) -> EntryId {
    EntryId::new("bench".parse().expect("a scope"), n.to_string().parse().expect("a key"))
}

async fn claim(store: &RedisStore, n: u64) {
    let request = ClaimRequest::new(entry(n), "ann".parse().expect("an owner"), 60_000);
    let Ok(Claim::Granted(grant)) = store.claim(vec![request]).await.expect("claimed").remove(0) else {
        panic!("a new key is granted")
    };
    let outcome = RecordedOutcome::done(Json::of("paid").expect("JSON"));
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 3_600_000 };
    let end = EndClaim { id: entry(n), token: grant.token, ending };
    store.end(vec![end]).await.expect("ended").remove(0).expect("completed");
}

/// What a claim and its completion are without a ledger.
async fn two_sets(mut bare: MultiplexedConnection, n: u64) {
    let key = format!("k{n}");
    let mut set = redis::cmd("SET");
    set.arg(&key).arg("held").arg("NX").arg("PX").arg(60_000);
    set.query_async::<()>(&mut bare).await.expect("set");
    let mut set = redis::cmd("SET");
    set.arg(&key).arg("paid").arg("PX").arg(3_600_000);
    set.query_async::<()>(&mut bare).await.expect("set");
}

impl Bench {
    async fn new(server: &RedisServer, rounds: usize) -> Self {
        let url = format!("redis://{}", server.address());
        let store = RedisStore::open(&url, store_options("bench", Durability::Local)).await.expect("opened");
        let mut bare = connect(server).await;
        let mut group = redis::cmd("XGROUP");
        group.arg("CREATE").arg("s").arg("g").arg("0").arg("MKSTREAM");
        group.query_async::<()>(&mut bare).await.expect("a group");
        store.create_queue(&name("jobs"), QueueConfig::sqs()).await.expect("created");
        Self { store, bare, rounds }
    }

    async fn lifecycles(&self, count: usize) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let queue = name("jobs");
        for _ in 0..self.rounds {
            ours.push(rate(count, || lifecycle(&self.store, &queue, count)).await);
            theirs.push(
                rate(count, || async {
                    stream(&mut self.bare.clone(), count).await;
                })
                .await,
            );
        }
        row(&format!("lifecycles, {count} a call; XADD, XREADGROUP, XACK, XDEL"), &ours, &theirs, "/s");
    }

    /// Latency of claim and completion, one caller.
    async fn claims(&self) {
        let (mut ours, mut theirs, mut n) = (Vec::new(), Vec::new(), 0);
        for _ in 0..self.rounds {
            let latency = |rate: f64| 1_000_000.0 / rate;
            let own = rate(1, || {
                n += 1;
                claim(&self.store, n)
            });
            ours.push(latency(own.await));
            let bare = rate(1, || {
                n += 1;
                two_sets(self.bare.clone(), n)
            });
            theirs.push(latency(bare.await));
        }
        row("claim and complete, one caller; SET NX, SET", &ours, &theirs, "µs");
    }

    /// The floor of a claim and its completion: two scripts that do nothing, with as many keys and arguments.
    async fn empty_scripts(&self) {
        let (keys, args) = (["bench:{12}:entries"; 9], ["an argument of it"; 11]);
        let mut load = redis::cmd("SCRIPT");
        load.arg("LOAD").arg("#!lua\nredis.call('SET', KEYS[1], ARGV[1])\nreturn 1");
        let sha: String = load.query_async(&mut self.bare.clone()).await.expect("loaded");
        let (mut ours, mut theirs, mut n) = (Vec::new(), Vec::new(), 0);
        for _ in 0..self.rounds {
            let empty = rate(1, || {
                let mut bare = self.bare.clone();
                let mut call = redis::cmd("EVALSHA");
                call.arg(&sha).arg(keys.len()).arg(&keys).arg(&args);
                async move {
                    for _ in 0..2 {
                        call.query_async::<()>(&mut bare).await.expect("called");
                    }
                }
            });
            ours.push(1_000_000.0 / empty.await);
            let bare = rate(1, || {
                n += 1;
                two_sets(self.bare.clone(), n)
            });
            theirs.push(1_000_000.0 / bare.await);
        }
        row("two scripts that set one key; SET NX, SET", &ours, &theirs, "µs");
    }

    /// Lifecycles of a queue with this number of messages that wait behind, and of one with a thousand.
    async fn depth(&self, deep: u64) {
        let (small, large) = (name("small"), name("large"));
        for (queue, count) in [(&small, 1_000), (&large, deep)] {
            self.store.create_queue(queue, QueueConfig::sqs()).await.expect("created");
            for _ in 0..count / 100 {
                let batch = (0..100).map(|_| NewMessage::new(vec![b'x'; BODY])).collect();
                self.store.send(queue, batch).await.expect("sent");
            }
        }
        let (mut shallow, mut deeper) = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            deeper.push(rate(10, || lifecycle(&self.store, &large, 10)).await);
            shallow.push(rate(10, || lifecycle(&self.store, &small, 10)).await);
        }
        row(&format!("lifecycles in tens at depth {deep}; at depth 1000"), &shallow, &deeper, "/s");
    }

    /// Bytes of memory for each message and each entry.
    async fn memory(&self, server: &RedisServer) {
        let used = || {
            let info = server.cli(&["INFO", "memory"]).expect("INFO");
            let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
            used.and_then(|used| used.trim().parse::<f64>().ok()).expect("used_memory")
        };
        for (what, tier) in [
            ("standard", hapax_core::Tier::AtLeastOnce),
            ("effectively-once", hapax_core::Tier::EffectivelyOnce),
        ] {
            let queue = name(what);
            let config = QueueConfig { tier, ..QueueConfig::sqs() };
            self.store.create_queue(&queue, config).await.expect("created");
            let before = used();
            for _ in 0..COUNT / 100 {
                let batch = (0..100).map(|_| NewMessage::new(vec![b'x'; BODY])).collect();
                self.store.send(&queue, batch).await.expect("sent");
            }
            println!(
                "memory for each message of {BODY} bytes, {what}: {:.0} bytes",
                (used() - before) / COUNT as f64
            );
        }
        let before = used();
        for n in 0..COUNT {
            claim(&self.store, 1_000_000_000 + n).await;
        }
        println!("memory for each entry of the ledger: {:.0} bytes", (used() - before) / COUNT as f64);
    }
}

/// The price of a confirmation by a replica.
async fn replicas(rounds: usize) {
    let master = RedisServer::start(DURABLE).expect("Redis 7 is installed");
    let (_, port) = master
        .address()
        .split_once(':')
        .map(|(host, port)| (host.to_owned(), port.to_owned()))
        .expect("a port");
    let follow = format!("replicaof 127.0.0.1 {port}");
    let _replica = RedisServer::start(&[DURABLE, &[&follow]].concat()).expect("a replica");
    let start = Instant::now();
    while !master.cli(&["INFO", "replication"]).is_ok_and(|info| info.contains("state=online")) {
        assert!(start.elapsed() < Duration::from_mins(1), "the replica does not follow");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let url = format!("redis://{}", master.address());
    let local = RedisStore::open(&url, store_options("local", Durability::Local)).await.expect("opened");
    let safe = RedisStore::open(&url, store_options("safe", Durability::Replicated)).await.expect("opened");
    for store in [&local, &safe] {
        store.create_queue(&name("jobs"), QueueConfig::sqs()).await.expect("created");
    }
    let (mut waited, mut not, queue) = (Vec::new(), Vec::new(), name("jobs"));
    for _ in 0..rounds {
        waited.push(rate(10, || lifecycle(&safe, &queue, 10)).await);
        not.push(rate(10, || lifecycle(&local, &queue, 10)).await);
    }
    row("lifecycles in tens with WAIT for one replica; without", &waited, &not, "/s");
    confirmations(&master, rounds).await;
}

/// Latency of one `SET` with each kind of confirmation, and without.
async fn confirmations(master: &RedisServer, rounds: usize) {
    let bare = connect(master).await;
    let kinds: [&[&str]; 3] = [&["WAIT", "1", "0"], &["WAITAOF", "1", "0", "0"], &["WAITAOF", "1", "1", "0"]];
    for kind in kinds {
        let confirm = |confirmed: bool| {
            let mut pipe = redis::pipe();
            pipe.cmd("SET").arg("k").arg("v").ignore();
            if confirmed {
                pipe.cmd(kind[0]).arg(&kind[1..]).ignore();
            }
            let mut bare = bare.clone();
            async move { pipe.query_async::<()>(&mut bare).await }
        };
        if let Err(error) = confirm(true).await {
            println!("{}: {error}", kind.join(" "));
            continue;
        }
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            with.push(1_000_000.0 / rate(1, || async { confirm(true).await.expect("set") }).await);
            without.push(1_000_000.0 / rate(1, || async { confirm(false).await.expect("set") }).await);
        }
        row(&format!("SET and {}; SET", kind.join(" ")), &with, &without, "µs");
    }
}
