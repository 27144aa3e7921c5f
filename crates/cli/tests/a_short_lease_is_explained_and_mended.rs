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
    let queue =
        report["queues"].as_array().unwrap().iter().find(|queue| queue["name"] == "payments").unwrap();
    let finding =
        queue["findings"].as_array().unwrap().iter().find(|finding| finding["code"] == "leases-expire")?;
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
