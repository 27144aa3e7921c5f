//! `hapax relay` and `hapax outbox`, with the real binary.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{hapax, run};
use hapax::core::{QueueStore as _, Receive, Settle};
use hapax::postgres::{Options, PostgresStore};
use hapax_faults::{PostgresServer, Process};
use serde_json::Value;
use tempfile::TempDir;

on_postgres!(
    killed_and_paused_relays_publish_everything_once,
    an_operator_decides_about_parked_messages,
    a_server_runs_relays,
    an_sqs_endpoint_accepts_the_signature,
    what_is_wrong_is_said_at_the_start,
);

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
        let mut command = hapax(&self.folder, &["relay", "--from", &self.url, "--to", &self.url]);
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

    /// Everything in a queue, by key, in order.
    fn drain(&self, queue: &str) -> BTreeMap<String, Vec<u64>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = PostgresStore::open(&self.url, Options::default()).await.unwrap();
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
    let mut relays = vec![shop.relay(&args), shop.relay(&args)];
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
            relays[victim] = shop.relay(&args);
        }
    }
    ended.store(true, Ordering::Relaxed);
    let count: u64 = writer.join().unwrap();
    shop.until_published();
    drop(relays);
    let got = shop.drain("orders.fifo");
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
