//! The real binary with its ledger in Redis: proxies that share it, a server that is killed, and what `hapax doctor` finds.

mod common;

use std::process::ExitCode;
use std::sync::atomic::Ordering;

use common::proxied::{Proxy, post, service};
use common::run;
use hapax_faults::{RedisCluster, RedisServer};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::tempdir;

const DURABLE: &[&str] = &["appendonly yes", "appendfsync always"];

/// A test by its name.
type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("two_proxies_with_one_ledger_execute_once_and_outlive_redis", two_proxies),
    ("doctor_says_what_redis_cannot_keep", doctor),
    ("a_server_has_no_queues_in_redis", no_queues),
];

fn main() -> ExitCode {
    let missing = std::process::Command::new("redis-server").arg("--version").output().err();
    let missing = missing.map(|error| format!("needs Redis 7: {error}"));
    let trial = |&(name, test): &Test| {
        let missing = missing.clone();
        Trial::ignorable_test(name, move || match missing {
            None => {
                test();
                Ok::<_, Failed>(Completion::Completed)
            }
            Some(why) => Ok(Completion::ignored_with(why)),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), TESTS.iter().map(trial).collect()).exit_code()
}

fn two_proxies() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let (folder, url) = (tempdir().unwrap(), format!("redis://{}", redis.address()));
    let (upstream, calls) = service();
    let args = ["--upstream", &format!("http://{upstream}"), "--ledger", &url];
    let (one, two) = (Proxy::start(&folder, &args), Proxy::start(&folder, &args));
    let answers: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8)
            .map(|number| if number % 2 == 0 { &one } else { &two })
            .map(|proxy| scope.spawn(|| post(&proxy.address, "k")))
            .collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|answer| answer.ends_with("call 1")), "{answers:?}");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    // Operators reach the ledger through each proxy, and without one.
    for endpoint in [one.admin().unwrap(), two.admin().unwrap(), &url] {
        let shown = run(&folder, &["ledger", "list", "--json", "--endpoint", endpoint]).ok();
        assert!(shown.contains("http/proxy/anyone/POST /orders"), "{endpoint}: {shown}");
    }
    one.end(Signal::KILL);
    redis.kill();
    let closed = post(&two.address, "other");
    assert!(closed.starts_with("http/1.1 503"), "without its ledger, the proxy refuses: {closed}");
    redis.run().unwrap();
    // The proxy's connection may be broken for one more request.
    let mut again = post(&two.address, "k");
    while again.starts_with("http/1.1 503") {
        again = post(&two.address, "k");
    }
    assert!(again.contains("idempotent-replayed: true") && again.ends_with("call 1"), "{again}");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

/// The codes that `hapax doctor` finds, and whether it succeeds.
fn found(url: &str) -> (Vec<String>, Option<i32>) {
    let done = run(&tempdir().unwrap(), &["doctor", "--json", "--store", url]);
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    let findings = report["store"]["findings"].as_array().unwrap();
    (findings.iter().map(|finding| finding["code"].as_str().unwrap().to_owned()).collect(), done.code)
}

fn doctor() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let url = format!("redis://{}", redis.address());
    assert_eq!(found(&url), (vec![], Some(0)));
    redis.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    assert_eq!(found(&url), (vec!["redis-may-evict".to_owned()], Some(1)));
    redis.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction", "appendonly", "no"]).unwrap();
    assert_eq!(found(&url), (vec!["redis-durability".to_owned()], Some(1)));
    assert_eq!(
        found(&format!("{url}?hapax_durability=process")),
        (vec!["redis-not-durable".to_owned()], Some(0))
    );
    let cluster = RedisCluster::start(&["min-replicas-to-write 1", "cluster-node-timeout 120000"]).unwrap();
    assert_eq!(found(&format!("{}?hapax_durability=replicated", cluster.url())), (vec![], Some(0)));
    let secret = run(&tempdir().unwrap(), &["doctor", "--store", "redis://ann:hunter2@127.0.0.1:1"]);
    assert!(secret.code == Some(1) && !format!("{secret:?}").contains("hunter2"), "{secret:?}");
}

fn no_queues() {
    let folder = tempdir().unwrap();
    let refused =
        run(&folder, &["serve", "--listen", "127.0.0.1:0", "--store", "redis://ann:hunter2@db"]).failed(1);
    assert!(refused.contains("no queues") && !refused.contains("hunter2"), "{refused}");
    let refused = run(&folder, &["migrate", "--store", "redis://db"]).failed(2);
    assert!(refused.contains("nothing has to be migrated"), "{refused}");
}
