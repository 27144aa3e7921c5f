//! `hapax relay --to kafka://…`: publishes into topics of a real broker, and says what is refused.

mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{hapax, run};
use hapax_faults::{KafkaServer, PostgresServer, Process};
use hapax_kafka::compacted;
use hapax_kafka::partition::TopicPartition;
use hapax_kafka::producer::partition_of;
use hapax_kafka::wire::{Cluster, Connect};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

const TESTS: &[common::postgres::Test] = &[("a_relay_publishes_into_kafka", a_relay_publishes_into_kafka)];

fn main() -> ExitCode {
    if let Err(why) = KafkaServer::jars() {
        let ignored = |why| Ok::<_, Failed>(Completion::ignored_with(why));
        let trial = Trial::ignorable_test(TESTS[0].0, move || ignored(why));
        return libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code();
    }
    common::postgres::main(TESTS)
}

fn a_relay_publishes_into_kafka(server: &'static PostgresServer) {
    let broker = KafkaServer::start(&[]).unwrap();
    let (url, name) = common::postgres::database(server);
    let folder = tempfile::tempdir().unwrap();
    run(&folder, &["migrate", "--store", &url]).ok();
    let cluster = Cluster::new(Connect::plain([broker.address().to_string()]));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // A compacted topic, so that the last value of each key can be asked for.
    runtime.block_on(compacted::create(&cluster, "shop.orders", 2)).unwrap().unwrap();

    let to = format!("kafka://{}/shop", broker.address());
    let relay = |to: &str| hapax(&folder, &["relay", "--from", &url, "--to", to, "--lease", "1s"]);
    let mut first = Process::start(&mut relay(&to)).unwrap();
    let line = first.wait_for_line("Relay ");
    assert!(line.contains("a crash repeats nothing for readers of committed transactions"), "{line}");
    let enqueue = |from: u32, to: u32| {
        let sql = format!(
            "SELECT hapax.enqueue('orders', 'key-' || n, n::text) FROM generate_series({from}, {to}) n"
        );
        server.sql(&name, &sql).unwrap();
    };
    enqueue(1, 20);
    until_published(&folder, &url);
    enqueue(21, 40);
    first.kill();
    let mut second = Process::start(&mut relay(&to)).unwrap();
    second.wait_for_line("Relay ");
    until_published(&folder, &url);
    second.kill();
    for number in 1..=40 {
        let key = format!("key-{number}");
        let at = TopicPartition::new("shop.orders", partition_of(key.as_bytes(), 2));
        let wait = Duration::from_mins(1);
        let value = runtime.block_on(compacted::last_value(&cluster, &at, key.as_bytes(), wait)).unwrap();
        assert_eq!(value.as_deref(), Some(number.to_string().as_bytes()), "{key}");
    }

    let refused = |to: &str| run(&folder, &["relay", "--from", &url, "--to", to]).failed(1);
    let error = refused(&format!("{to}?topic=x"));
    assert!(error.contains("\"topic\" is not known"), "{error}");
    let error = run(&folder, &["relay", "--from", &url, "--to", &to, "--queue", "q"]).failed(2);
    assert!(error.contains("only a store or server has one"), "{error}");
}

fn until_published(folder: &tempfile::TempDir, url: &str) {
    let start = Instant::now();
    loop {
        let status = run(folder, &["outbox", "status", "--from", url, "--json"]).json();
        if status.get(0).is_some_and(|route| route["lag"] == 0 && route["held"] == 0) {
            return;
        }
        assert!(start.elapsed() < common::PATIENCE, "{status}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
