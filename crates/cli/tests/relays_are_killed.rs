//! `hapax relay` and `hapax outbox`, with the real binary.

mod common;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{hapax, run};
use hapax::Hapax;
use hapax::core::{Receive, Settle};
use hapax_faults::{PostgresServer, Process, RedisServer};
use libtest_mimic::{Completion, Failed, Trial};
use serde_json::Value;
use tempfile::TempDir;

const TESTS: &[common::postgres::Test] = &[
    ("killed_and_paused_relays_publish_everything_once", killed_and_paused_relays_publish_everything_once),
    ("an_operator_decides_about_parked_messages", an_operator_decides_about_parked_messages),
    ("a_server_runs_relays", a_server_runs_relays),
    ("a_relay_shows_figures_and_readiness", a_relay_shows_figures_and_readiness),
    ("an_sqs_endpoint_accepts_the_signature", an_sqs_endpoint_accepts_the_signature),
    ("what_is_wrong_is_said_at_the_start", what_is_wrong_is_said_at_the_start),
];

fn main() -> ExitCode {
    let on_redis = Trial::ignorable_test("killed_relays_publish_into_redis_once", || {
        let server = common::postgres::shared().map_err(|why| format!("PostgreSQL 15: {why}"));
        match (server, RedisServer::start(&["appendonly yes", "appendfsync always"])) {
            (Ok(server), Ok(redis)) => {
                storm(&Shop::new(server), server, &format!("redis://{}", redis.address()));
                Ok::<_, Failed>(Completion::Completed)
            }
            (server, redis) => {
                let missing: Vec<String> = [server.err(), redis.err()].into_iter().flatten().collect();
                Ok(Completion::ignored_with(format!("needs {}", missing.join(" and "))))
            }
        }
    });
    common::postgres::main_with(TESTS, vec![on_redis])
}

const PATIENCE: Duration = Duration::from_mins(1);

struct Shop {
    folder: TempDir,
    url: String,
    name: String,
}

impl Shop {
    fn new(server: &'static PostgresServer) -> Self {
        let (url, name) = common::postgres::database(server);
        let folder = tempfile::tempdir().unwrap();
        run(&folder, &["migrate", "--store", &url]).ok();
        Self { folder, url, name }
    }

    fn relay(&self, args: &[&str]) -> Process {
        self.relay_to(&self.url, args)
    }

    fn relay_to(&self, to: &str, args: &[&str]) -> Process {
        let mut command = hapax(&self.folder, &["relay", "--from", &self.url, "--to", to]);
        let relay = Process::start(command.args(args)).unwrap();
        relay.wait_for_line("Relay ");
        relay
    }

    fn outbox(&self, args: &[&str]) -> Value {
        let all = [&["outbox"], args, &["--from", &self.url, "--json"]].concat();
        run(&self.folder, &all).json()
    }

    /// Waits until everything is published.
    fn until_published(&self) {
        self.until(|status| status["lag"] == 0 && status["held"] == 0);
    }

    fn until(&self, holds: impl Fn(&Value) -> bool) {
        let start = Instant::now();
        loop {
            let status = self.outbox(&["status"]);
            if status.get(0).is_some_and(&holds) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{status}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn drain(&self, queue: &str) -> BTreeMap<String, Vec<u64>> {
        Self::drain_at(&self.url, queue)
    }

    /// Everything in a queue, by key, in order.
    fn drain_at(url: &str, queue: &str) -> BTreeMap<String, Vec<u64>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = Hapax::open(url).await.unwrap().store().clone();
            let queue = queue.parse().unwrap();
            let mut got: BTreeMap<String, Vec<u64>> = BTreeMap::new();
            loop {
                let deliveries = store.receive(&queue, Receive::up_to(1_000)).await.unwrap();
                if deliveries.is_empty() {
                    return got;
                }
                let mut settles = Vec::new();
                for delivery in deliveries {
                    let key = delivery.attributes["hapax-key"].as_text().unwrap().to_owned();
                    let number = String::from_utf8_lossy(&delivery.body).parse().unwrap();
                    got.entry(key).or_default().push(number);
                    settles.push(Settle::ack(delivery.receipt));
                }
                for settled in store.settle(&queue, settles).await.unwrap() {
                    settled.unwrap();
                }
            }
        })
    }
}

fn killed_and_paused_relays_publish_everything_once(server: &'static PostgresServer) {
    let shop = Shop::new(server);
    storm(&shop, server, &shop.url);
}

/// Two relays into a FIFO queue of a store, killed and paused while messages are written.
fn storm(shop: &Shop, server: &'static PostgresServer, to: &str) {
    let args = ["--queue", "orders.fifo", "--lease", "1s", "--log-level", "error"];
    let ended = Arc::new(AtomicBool::new(false));
    let writer = {
        let (ended, name) = (ended.clone(), shop.name.clone());
        std::thread::spawn(move || {
            let mut number = 0;
            while !ended.load(Ordering::Relaxed) {
                let (from, to) = (number + 1, number + 10);
                let sql = format!(
                    "SELECT hapax.enqueue('orders', 'key-' || n % 7, n::text) FROM generate_series({from}, {to}) n"
                );
                server.sql(&name, &sql).unwrap();
                number = to;
            }
            number
        })
    };
    let mut relays = vec![shop.relay_to(to, &args), shop.relay_to(to, &args)];
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..12 {
        std::thread::sleep(Duration::from_millis(random.u64(20..400)));
        let victim = random.usize(0..2);
        if round % 4 == 3 {
            // It is stopped for longer than its lease: the other one takes over, and it finds its buckets gone.
            relays[victim].pause();
            std::thread::sleep(Duration::from_millis(1_500));
            relays[victim].resume();
        } else {
            relays[victim].kill();
            relays[victim] = shop.relay_to(to, &args);
        }
    }
    ended.store(true, Ordering::Relaxed);
    let count: u64 = writer.join().unwrap();
    shop.until_published();
    drop(relays);
    let got = Shop::drain_at(to, "orders.fifo");
    let total: usize = got.values().map(Vec::len).sum();
    assert_eq!(total as u64, count, "each message once");
    for (key, numbers) in got {
        assert!(numbers.windows(2).all(|pair| pair[0] + 7 == pair[1]), "{key}: {numbers:?}");
    }
}

fn an_operator_decides_about_parked_messages(server: &'static PostgresServer) {
    let shop = Shop::new(server);
    // More attributes than a queue takes.
    let headers = "(SELECT jsonb_object_agg('h' || n, 'x') FROM generate_series(1, 200) n)";
    let sql =
        format!("SELECT hapax.enqueue('orders', 'a', '1', {headers}), hapax.enqueue('orders', 'a', '2')");
    server.sql(&shop.name, &sql).unwrap();
    let mut relay = shop.relay(&["--queue", "orders"]);
    shop.until(|status| status["parked"] == 1 && status["held"] == 2);
    server.sql(&shop.name, "SELECT hapax.enqueue('orders', 'b', '3')").unwrap();
    shop.until(|status| status["lag"] == 0);
    let parked = shop.outbox(&["parked"]);
    assert_eq!(parked.as_array().unwrap().len(), 1);
    assert_eq!(
        (&parked[0]["message"]["body"], &parked[0]["route"]),
        (&Value::from("1"), &Value::from("default"))
    );
    let id = parked[0]["message"]["id"].as_str().unwrap().to_owned();
    assert_eq!(shop.outbox(&["parked", "--all"]).as_array().unwrap().len(), 2, "one waits behind it");
    let doctor = run(&shop.folder, &["doctor", "--store", &shop.url, "--json"]);
    let sick: Value = serde_json::from_str(&doctor.stdout).unwrap();
    let relay_fact = sick["store"]["relay default"].as_str().unwrap_or_default();
    assert!(relay_fact.contains("queue orders") && relay_fact.contains("repeats nothing"), "{sick}");
    assert_eq!(shop.outbox(&["retry", &id])["retried"], 1);
    shop.until(|status| status["parked"] == 1);
    assert_eq!(shop.outbox(&["skip", &id, "--yes"])["skipped"], id);
    shop.until_published();
    let failed = run(&shop.folder, &["outbox", "skip", &id, "--yes", "--from", &shop.url]).failed(1);
    assert!(failed.contains(&id), "{failed}");
    let failed = run(&shop.folder, &["outbox", "forget", "default", "--yes", "--from", &shop.url]).failed(1);
    assert!(failed.contains("stop it first"), "{failed}");
    // It stops in order, and leaves its buckets at once.
    relay.signal(rustix::process::Signal::TERM);
    assert!(relay.wait().success());
    shop.until(|status| status["relays"] == 0);
    server.sql(&shop.name, "SELECT hapax.enqueue('orders', 'c', '4')").unwrap();
    assert_eq!(shop.outbox(&["list"])[0]["body"], "4");
    assert_eq!(shop.outbox(&["forget", "default", "--yes"])["forgotten"], "default");
    assert_eq!(shop.outbox(&["status"]).as_array().unwrap().len(), 0);
    let got = shop.drain("orders");
    assert_eq!(got.values().flatten().sum::<u64>(), 5, "2 and 3");
}

fn a_server_runs_relays(server: &'static PostgresServer) {
    let shop = Shop::new(server);
    let toml = format!(
        "[store]\nurl = \"{}\"\n[[relay]]\nname = \"orders\"\nqueue = \"orders\"\ntopics = [\"ord*\"]\n",
        shop.url
    );
    std::fs::write(shop.folder.path().join("hapax.toml"), toml).unwrap();
    server
        .sql(&shop.name, "SELECT hapax.enqueue('orders', 'a', '1'), hapax.enqueue('other', 'a', '2')")
        .unwrap();
    let mut command = hapax(&shop.folder, &["serve", "--listen", "127.0.0.1:0", "--config", "hapax.toml"]);
    let mut running = Process::start(&mut command).unwrap();
    let line = running.wait_for_line("Relay ");
    assert!(line.contains("orders") && line.contains("repeats nothing"), "{line}");
    shop.until_published();
    running.signal(rustix::process::Signal::TERM);
    assert!(running.wait().success());
    assert_eq!(shop.drain("orders"), BTreeMap::from([("a".to_owned(), vec![1])]));
    let printed = run(&shop.folder, &["serve", "--config", "hapax.toml", "--print-config"]).ok();
    assert!(printed.contains("[[relay]]"), "{printed}");
}

/// Status and body of a GET.
fn get(address: &str, path: &str) -> (u16, String) {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), body.to_owned())
}

/// Waits until a page has this.
fn until_shown(address: &str, path: &str, holds: impl Fn(u16, &str) -> bool) {
    let start = Instant::now();
    loop {
        let (status, body) = get(address, path);
        if holds(status, &body) {
            return;
        }
        assert!(start.elapsed() < 2 * PATIENCE, "{path}: {status} {body}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A webhook's receiver that is not there: the relay counts and says so, alone and as a part of a server.
fn a_relay_shows_figures_and_readiness(server: &'static PostgresServer) {
    let shop = Shop::new(server);
    // A port on which nothing listens.
    let [gone] = hapax_faults::free_ports();
    let to = format!("webhook+http://127.0.0.1:{gone}/");
    server.sql(&shop.name, "SELECT hapax.enqueue('orders', 'a', '1')").unwrap();
    let address = |line: &str| {
        let after = line.split("127.0.0.1:").nth(1).unwrap();
        format!("127.0.0.1:{}", after.chars().take_while(char::is_ascii_digit).collect::<String>())
    };
    let mut alone = hapax(&shop.folder, &["relay", "--from", &shop.url, "--to", &to, "--name", "alone"]);
    let alone = Process::start(alone.args(["--listen", "127.0.0.1:0", "--stalled", "2s"])).unwrap();
    let alone_at = address(&alone.wait_for_line("Metrics "));
    let file = format!(
        "[store]\nurl = \"{}\"\n[[relay]]\nname = \"beside\"\nto = \"{to}\"\nstalled_ms = 2000\n",
        shop.url
    );
    std::fs::write(shop.folder.path().join("relay.toml"), file).unwrap();
    let beside = Process::start(&mut hapax(
        &shop.folder,
        &["serve", "--listen", "127.0.0.1:0", "--config", "relay.toml"],
    ))
    .unwrap();
    let beside_at = address(&beside.wait_for_line("http://127.0.0.1:"));
    beside.wait_for_line("Relay ");
    for (at, route) in [(&alone_at, "alone"), (&beside_at, "beside")] {
        until_shown(at, "/metrics", |_, page| {
            let has = |line: String| page.lines().any(|of| of.starts_with(&line));
            has(format!("hapax_outbox_lag{{route=\"{route}\"}} 1"))
                && has(format!("hapax_outbox_oldest_timestamp_seconds{{route=\"{route}\"}}"))
                && has(format!("hapax_outbox_parked{{route=\"{route}\"}} 0"))
                && has(format!("hapax_relay_published_total{{route=\"{route}\"}} 0"))
                && has(format!("hapax_relay_duplicates_total{{route=\"{route}\"}} 0"))
                && !has(format!("hapax_relay_unavailable_total{{route=\"{route}\"}} 0"))
        });
        until_shown(at, "/readyz", |status, why| {
            status == 503 && why.contains(&format!("route {route}: nothing published"))
        });
        until_shown(at, "/metrics", |_, page| {
            page.contains(&format!("hapax_relay_ready{{route=\"{route}\"}} 0"))
        });
        assert_eq!(get(at, "/healthz").0, 200);
    }
    assert_eq!(get(&alone_at, "/").0, 404);
    // The receiver is there now.
    let receiver = std::net::TcpListener::bind(("127.0.0.1", gone)).unwrap();
    std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        for stream in receiver.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
    });
    for (at, route) in [(&alone_at, "alone"), (&beside_at, "beside")] {
        until_shown(at, "/readyz", |status, _| status == 200);
        until_shown(at, "/metrics", |_, page| {
            page.contains(&format!("hapax_relay_ready{{route=\"{route}\"}} 1"))
                && page.contains(&format!("hapax_relay_published_total{{route=\"{route}\"}} 1"))
                && page.contains(&format!("hapax_outbox_lag{{route=\"{route}\"}} 0"))
        });
    }
    let refused =
        run(&shop.folder, &["relay", "--from", &shop.url, "--to", &to, "--listen", "0.0.0.0:0"]).failed(2);
    assert!(refused.contains("--insecure"), "{refused}");
}

fn an_sqs_endpoint_accepts_the_signature(server: &'static PostgresServer) {
    const SECRET: &str = "a-secret-of-some-length-0123456789";
    let shop = Shop::new(server);
    let mut serve = hapax(&shop.folder, &["serve", "--listen", "127.0.0.1:0", "--key-id", "AKRELAY"]);
    let sqs = Process::start(serve.env("HAPAX_KEY_SECRET", SECRET)).unwrap();
    let line = sqs.wait_for_line("http://127.0.0.1:");
    let port: String =
        line.split("127.0.0.1:").nth(1).unwrap().chars().take_while(char::is_ascii_digit).collect();
    let endpoint = format!("http://127.0.0.1:{port}");
    let client = |args: &[&str]| {
        let mut command = hapax(&shop.folder, args);
        command.args(["--endpoint", &endpoint]).env("HAPAX_TOKEN", format!("AKRELAY:{SECRET}"));
        common::Done::new(command.output().unwrap()).ok()
    };
    client(&["queue", "create", "orders.fifo"]);
    server
        .sql(&shop.name, "SELECT hapax.enqueue('orders', 'a b', n::text) FROM generate_series(1, 25) n")
        .unwrap();
    let to = format!("sqs+{endpoint}/000000000000/orders.fifo");
    let relay = |secret: &str| {
        let mut command = hapax(&shop.folder, &["relay", "--from", &shop.url, "--to", &to]);
        command
            .env("AWS_ACCESS_KEY_ID", "AKRELAY")
            .env("AWS_SECRET_ACCESS_KEY", secret)
            .env("AWS_REGION", "us-east-1");
        Process::start(&mut command).unwrap()
    };
    let mut wrong = relay("another");
    let start = Instant::now();
    while !wrong.log().contains("the sink takes nothing") {
        assert!(start.elapsed() < PATIENCE, "{}", wrong.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    wrong.kill();
    let _right = relay(SECRET);
    shop.until_published();
    let mut bodies = Vec::new();
    while bodies.len() < 25 {
        let received = client(&["receive", "orders.fifo", "--ack", "--json"]);
        for line in received.lines() {
            let received: Value = serde_json::from_str(line).unwrap();
            let all = received.as_array().cloned().unwrap_or_else(|| vec![received]);
            bodies
                .extend(all.iter().map(|message| message["body"].as_str().unwrap().parse::<u32>().unwrap()));
        }
        assert!(start.elapsed() < 2 * PATIENCE, "{bodies:?}");
    }
    assert_eq!(bodies, (1..=25).collect::<Vec<_>>());
}

fn what_is_wrong_is_said_at_the_start(server: &'static PostgresServer) {
    let shop = Shop::new(server);
    let relay = |args: &[&str], code| {
        let all = [&["relay", "--from", shop.url.as_str()], args].concat();
        run(&shop.folder, &all).failed(code)
    };
    assert!(relay(&["--to", &shop.url], 2).contains("queue"));
    assert!(relay(&["--to", "webhook+http://127.0.0.1:1/", "--queue", "q"], 2).contains("queue"));
    assert!(relay(&["--to", "webhook+ftp://x"], 1).contains("webhook"));
    assert!(relay(&["--to", "sqs+http://127.0.0.1:1/1/q"], 1).contains("AWS_ACCESS_KEY_ID"));
    let missing = run(&shop.folder, &["outbox", "status"]).failed(2);
    assert!(missing.contains("--from"), "{missing}");
    std::fs::write(shop.folder.path().join("bad.toml"), "[[relay]]\nlease_ms = 1\n").unwrap();
    let bad = run(&shop.folder, &["serve", "--config", "bad.toml"]);
    assert!(bad.stderr.contains("bad.toml:2") && bad.stderr.contains("lease_ms"), "{}", bad.stderr);
    assert!(bad.stderr.contains("has no outbox") && bad.stderr.contains("queue"), "{}", bad.stderr);
}
