//! A queue whose lease is shorter than the work of its consumers, which send no heartbeats: `doctor` and `top` say what happens and
//! what to set, `why` explains one duplicate, and after the change the duplicates stop.

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::Server;
use hapax::{Hapax, MessageId, Receive};
use serde_json::Value;

const MESSAGES: usize = 24;
/// Only failures reach it.
const PATIENCE: Duration = Duration::from_mins(2);

/// Works on messages as a program with an AWS SDK would; returns how often each was worked on.
async fn work(endpoint: &str, held: Duration) -> HashMap<MessageId, usize> {
    let hapax = Hapax::open(endpoint).await.unwrap();
    let runs = Arc::new(Mutex::new(HashMap::new()));
    for number in 0..MESSAGES {
        hapax.queue::<usize>("payments").unwrap().send(&number).await.unwrap();
    }
    let consumer = async |number: usize| {
        let queue = hapax.queue::<usize>("payments").unwrap();
        let start = Instant::now();
        loop {
            let name = Some(format!("consumer-{number}"));
            let receive = Receive { wait_ms: Some(0), consumer: name, ..Receive::default() };
            let Some(received) = queue.receive(receive).await.unwrap().pop() else {
                let stats = hapax.store().stats(&"payments".parse().unwrap()).await.unwrap();
                if stats.ready + stats.delayed + stats.in_flight == 0 {
                    return;
                }
                assert!(start.elapsed() < PATIENCE, "{stats:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            *runs.lock().unwrap().entry(received.delivery().id).or_default() += 1;
            // Every third run is slow; a repetition of it may be fast, so that all ends.
            let slow = fastrand::u32(..3) == 0;
            tokio::time::sleep(if slow { held } else { held / 20 }).await;
            let _ = received.ack().await;
        }
    };
    tokio::join!(consumer(0), consumer(1), consumer(2), consumer(3));
    let runs = runs.lock().unwrap();
    runs.clone()
}

fn about_leases(report: &Value) -> Option<(String, String)> {
    finding(report, "leases-expire")
}

/// A finding about the queue: its message and its remedy.
fn finding(report: &Value, code: &str) -> Option<(String, String)> {
    let queue =
        report["queues"].as_array().unwrap().iter().find(|queue| queue["name"] == "payments").unwrap();
    let finding = queue["findings"].as_array().unwrap().iter().find(|finding| finding["code"] == code)?;
    let text = |name: &str| finding[name].as_str().unwrap().to_owned();
    Some((text("message"), text("remedy")))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_what_to_set_and_that_it_helps() {
    let server = Server::start();
    server.run(&["queue", "create", "payments", "--lease", "1s", "--retry-base", "0"]).ok();
    // The situation is made until it is there: how fast this machine is does not matter.
    let start = Instant::now();
    let (runs, message, remedy) = loop {
        let runs = work(&server.endpoint, Duration::from_millis(1_300)).await;
        if let Some((message, remedy)) = about_leases(&server.run(&["doctor", "--json"]).json()) {
            break (runs, message, remedy);
        }
        assert!(start.elapsed() < PATIENCE, "no advice");
    };
    assert!(message.starts_with("lease 1 s, P99 "), "{message}");
    let lease = remedy.split("--lease ").nth(1).unwrap().split('`').next().unwrap().to_owned();
    let top = server.run(&["top", "--once"]).ok();
    assert!(top.contains("leases-expire") && top.contains(&format!("--lease {lease}")), "{top}");
    let page = common::proxied::request(server.address(), "GET /metrics", "host: localhost");
    assert!(page.contains("hapax_advice_finding{queue=\"payments\",code=\"leases-expire\"} 1\n"), "{page}");

    let duplicate =
        runs.iter().find(|(_, count)| **count > 1).map(|(id, _)| id.to_string()).expect("a duplicate");
    let why = server.run(&["why", "payments", &duplicate]).ok();
    assert!(why.contains("It was delivered ") && why.contains("its lease of 1.0 s ran out"), "{why}");
    let still_at_work = why.contains("was still at work");
    assert_eq!(why.contains("`hapax queue set payments --lease`"), still_at_work, "{why}");
    let life = server.run(&["message", "show", "payments", &duplicate]).ok();
    assert!(life.contains("delivery 1, attempt 1 to consumer-") && life.contains("lease ran out"), "{life}");

    server.run(&["queue", "set", "payments", "--lease", &lease]).ok();
    // A machine that stalls for longer than the rest of the lease may make a duplicate even now.
    loop {
        let runs = work(&server.endpoint, Duration::from_millis(1_300)).await;
        assert_eq!(runs.len(), MESSAGES);
        if runs.values().all(|count| *count == 1)
            && about_leases(&server.run(&["doctor", "--json"]).json()).is_none()
        {
            break;
        }
        assert!(start.elapsed() < 2 * PATIENCE, "with a lease of {lease}: {runs:?}");
    }
    let unknown = server.run(&["why", "payments", "no-such-key"]).failed(1);
    assert!(unknown.contains("nothing is known about no-such-key"), "{unknown}");
}

/// Works on this many messages at once, for `held`, and acks them all.
async fn hold(hapax: &Hapax, queue: &str, count: usize, lease_ms: Option<u64>, held: Duration) {
    let queue = hapax.queue::<usize>(queue).unwrap();
    for number in 0..count {
        queue.send(&number).await.unwrap();
    }
    let mut all = Vec::new();
    while all.len() < count {
        let receive = Receive { max: 10, lease_ms, ..Receive::default() };
        all.extend(queue.receive(receive).await.unwrap());
    }
    tokio::time::sleep(held).await;
    for received in all {
        received.ack().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_outlives_its_lease_is_told_before_it_is_repeated() {
    let server = Server::start();
    server.run(&["queue", "create", "payments", "--lease", "200ms"]).ok();
    let hapax = Hapax::open(&server.endpoint).await.unwrap();
    for _ in 0..20 {
        hold(&hapax, "payments", 1, None, Duration::from_millis(300)).await;
    }
    let report = server.run(&["doctor", "--json"]).json();
    let (message, remedy) = finding(&report, "lease-below-p99").unwrap_or_else(|| panic!("{report}"));
    let evidence = "20 of 20 settles in ";
    assert!(message.starts_with("lease 200 ms, P99 ") && message.contains(evidence), "{message}");
    assert!(remedy.contains("`hapax queue set payments --lease "), "{remedy}");
    let top = server.run(&["top", "--once"]).ok();
    assert!(top.contains("lease-below-p99") && top.contains("hapax queue set payments --lease "), "{top}");
    let page = common::proxied::request(server.address(), "GET /metrics", "host: localhost");
    assert!(page.contains("hapax_advice_finding{queue=\"payments\",code=\"lease-below-p99\"} 1\n"), "{page}");
    let seen = hapax.store().observed(&"payments".parse().unwrap()).await.unwrap().unwrap();
    assert_eq!((seen.settled, seen.overran, seen.expired), (20, 20, 0), "{seen:?}");
}

/// Twenty deliveries took longer than the heartbeats of this worker last: its limit of a run, and 3 s for a settle.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_less_time_than_the_work_takes_says_so_when_it_starts() {
    let server = Server::start();
    server.run(&["queue", "create", "payments", "--lease", "1s"]).ok();
    let work = |run_max: &str| {
        let args =
            ["work", "payments", "--until-empty", "--run-max", run_max, "--kill-after", "0", "--", "true"];
        let done = server.run(&args);
        assert_eq!(done.code, Some(0), "{done:?}");
        done.stderr
    };
    let told = work("1ms");
    assert!(!told.contains("lease-below-p99"), "nothing was observed yet: {told}");
    let hapax = Hapax::open(&server.endpoint).await.unwrap();
    hold(&hapax, "payments", 20, Some(600_000), Duration::from_millis(3_500)).await;
    let told = work("1ms");
    assert!(told.contains("lease-below-p99: a delivery is held for 3 s 1 ms at most"), "{told}");
    let told = work("1h");
    assert!(!told.contains("lease-below-p99"), "{told}");
}
