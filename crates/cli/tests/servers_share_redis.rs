//! The real binary on Redis: servers and proxies that share it, a server that is killed, TLS, and what `hapax doctor` finds.

mod common;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use common::proxied::{Proxy, post, service, two_proxies_execute_once};
use common::{Server, hapax, run};
use hapax_faults::{RedisCluster, RedisSentinels, RedisServer, RedisTls};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::tempdir;

const DURABLE: &[&str] = &["appendonly yes", "appendfsync always"];
/// A busy machine may be slow to connect.
const PATIENT: &str = "hapax_connect_timeout_ms=30000&hapax_operation_timeout_ms=30000";

/// A test by its name.
type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("two_proxies_with_one_ledger_execute_once_and_outlive_redis", two_proxies),
    ("requests_that_ran_without_their_ledger_are_told", ran_unprotected),
    ("doctor_says_what_redis_cannot_keep", doctor),
    ("keys_that_redis_has_evicted_are_told", evicted),
    ("a_replica_that_nothing_waits_for_is_told", replica_behind),
    ("a_server_that_says_it_is_older_is_refused", too_old),
    ("each_server_tells_why_its_store_refuses_all_calls", each_refuses),
    ("two_servers_serve_the_same_queues_and_outlive_redis", two_servers),
    ("two_servers_tell_one_story", one_story),
    ("a_settle_ends_its_claim_on_a_cluster", worker_on_cluster),
    ("a_store_is_copied_to_redis_and_back", copied),
    ("tls_and_passwords_are_used_and_never_printed", tls),
    ("a_cluster_is_reached_by_tls_alone", tls_of_a_cluster),
    ("sentinels_and_their_master_are_reached_by_tls_alone", tls_of_sentinels),
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
    let (two, calls) = two_proxies_execute_once(&folder, &url);
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

/// A request passes while its ledger is away, as `--on-outage open` asks for; the operator is told as soon as it is back.
fn ran_unprotected() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let (folder, (upstream, calls)) = (tempdir().unwrap(), service());
    let (upstream, url) = (format!("http://{upstream}"), format!("redis://{}", redis.address()));
    let proxy = Proxy::start(&folder, &["--upstream", &upstream, "--ledger", &url, "--on-outage", "open"]);
    let admin = proxy.admin().unwrap();
    let told = || {
        let done = run(&folder, &["doctor", "--json", "--endpoint", admin]);
        let report: Value = serde_json::from_str(&done.stdout).ok()?;
        let found = report["store"]["findings"].as_array()?.iter();
        let found = found.filter(|finding| finding["code"] == "ran-unprotected");
        Some(found.map(|finding| finding["message"].as_str().unwrap().to_owned()).collect::<Vec<_>>())
    };
    assert!(post(&proxy.address, "k").ends_with("call 1"));
    assert_eq!(told(), Some(vec![]));
    redis.kill();
    for call in ["call 2", "call 3"] {
        let ran = post(&proxy.address, "k");
        assert!(ran.starts_with("http/1.1 201") && ran.ends_with(call), "{ran}");
    }
    redis.run().unwrap();
    // The proxy's connections may be broken for some more requests.
    let start = Instant::now();
    let messages = loop {
        match told() {
            Some(messages) => break messages,
            None => assert!(start.elapsed() < common::PATIENCE, "it is not reachable"),
        }
    };
    assert!(
        messages.len() == 1 && messages[0].starts_with("2 requests ran without protection"),
        "{messages:?}"
    );
    assert_eq!(calls.load(Ordering::SeqCst), 3);
}

/// The codes that `hapax doctor` finds, and whether it succeeds.
fn found(url: &str) -> (Vec<String>, Option<i32>) {
    let done = run(&tempdir().unwrap(), &["doctor", "--json", "--endpoint", url]);
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
    let refused = run(&tempdir().unwrap(), &["serve", "--listen", "127.0.0.1:0", "--store", &url]).failed(1);
    assert_eq!(refused.matches("allkeys-lru").count(), 1, "it is said once: {refused}");
    redis.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction", "appendonly", "no"]).unwrap();
    assert_eq!(found(&url), (vec!["redis-durability".to_owned()], Some(1)));
    assert_eq!(
        found(&format!("{url}?hapax_durability=process")),
        (vec!["redis-not-durable".to_owned()], Some(0))
    );
    let settings = ["min-replicas-to-write 1", "cluster-node-timeout 120000", "appendonly yes"];
    let cluster = RedisCluster::start(&settings).unwrap();
    let url = format!("{}?hapax_durability=replicated", cluster.url());
    assert_eq!(found(&url), (vec![], Some(0)));
    cluster.nodes[0].cli(&["CONFIG", "SET", "appendonly", "no"]).unwrap();
    assert_eq!(found(&url), (vec!["redis-not-durable".to_owned()], Some(0)));
    let secret = run(&tempdir().unwrap(), &["doctor", "--store", "redis://ann:hunter2@127.0.0.1:1"]);
    assert!(secret.code == Some(1) && !format!("{secret:?}").contains("hunter2"), "{secret:?}");
}

/// Someone has set a policy that evicts, and set it back: what was lost meanwhile is told.
fn evicted() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let url = format!("redis://{}", redis.address());
    let server = Server::start_in(tempdir().unwrap(), &["--store", &url]);
    server.run(&["send", "--create", "jobs", "a"]).ok();
    assert_eq!((found(&url), found(&server.endpoint)), ((vec![], Some(0)), (vec![], Some(0))));
    let fill = "for n = 1, 5000 do redis.call('SET', 'other:' .. n, string.rep('x', 1000), 'EX', 9999) end";
    redis.cli(&["EVAL", fill, "0"]).unwrap();
    redis.cli(&["CONFIG", "SET", "maxmemory-policy", "volatile-random", "maxmemory", "3mb"]).unwrap();
    // A command that needs memory evicts first.
    redis.cli(&["SET", "another", "x"]).unwrap();
    redis.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction", "maxmemory", "0"]).unwrap();
    let info = redis.cli(&["INFO", "stats"]).unwrap();
    let count = info.lines().find_map(|line| line.trim().strip_prefix("evicted_keys:")).unwrap().to_owned();
    assert_ne!(count, "0");
    let of_store = || (vec!["redis-keys-evicted".to_owned()], Some(0));
    assert_eq!(found(&url), of_store());
    let said = run(&tempdir().unwrap(), &["doctor", "--store", &url]).ok();
    assert!(
        said.contains(&format!("{} has evicted {count} keys since it was started", redis.address())),
        "{said}"
    );
    // The server refuses calls until its next look at the settings.
    let start = Instant::now();
    while found(&server.endpoint) != of_store() {
        assert!(start.elapsed() < common::PATIENCE, "{:?}", found(&server.endpoint));
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    redis.cli(&["CONFIG", "RESETSTAT"]).unwrap();
    assert_eq!(found(&url), (vec![], Some(0)));
}

/// A server as it is, but for the version in its answers, which is 6.
fn older(server: &RedisServer) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, target) = (listener.local_addr().unwrap(), server.address());
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(&target).unwrap());
            let (mut answers, mut asked) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut client, &mut asked));
            std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 20];
                while let Ok(length @ 1..) = server.read(&mut buffer) {
                    for name in ["redis_version:", "valkey_version:"] {
                        let answer = &mut buffer[..length];
                        let at = answer.windows(name.len()).position(|part| part == name.as_bytes());
                        if let Some(digit) = at.and_then(|at| answer.get_mut(at + name.len())) {
                            *digit = b'6';
                        }
                    }
                    if answers.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    format!("redis://{address}")
}

/// As far as its answers tell it: no server of that version is started.
fn too_old() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let url = older(&redis);
    assert_eq!(found(&url), (vec!["redis-too-old".to_owned()], Some(1)));
    let told = run(&tempdir().unwrap(), &["doctor", "--store", &url]).stdout;
    assert!(told.contains(" has version 6.") && told.contains("use Redis 7.0 or later, or Valkey"), "{told}");
    let refused = run(&tempdir().unwrap(), &["serve", "--listen", "127.0.0.1:0", "--store", &url]).failed(1);
    assert!(refused.contains(" has version 6."), "{refused}");
    assert_eq!(found(&format!("redis://{}", redis.address())), (vec![], Some(0)));
}

/// A store that refuses all calls lists no queues and has no status: the commands say why instead, at every server.
fn each_refuses() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let url = format!("redis://{}", redis.address());
    let servers = [(); 2].map(|()| Server::start_in(tempdir().unwrap(), &["--store", &url]));
    servers[0].run(&["send", "--create", "jobs", "a"]).ok();
    redis.cli(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    for server in &servers {
        let start = Instant::now();
        // It notices at its next look at the settings.
        while server.run(&["queues"]).code == Some(0) {
            assert!(start.elapsed() < common::PATIENCE, "it does not notice");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        for command in [&["doctor"][..], &["top", "--once"]] {
            let told = server.run(command).failed(1);
            assert!(
                told.contains("allkeys-lru") && told.contains("set maxmemory-policy noeviction"),
                "{told}"
            );
        }
        let page = common::proxied::request(server.address(), "GET /metrics", "host: localhost");
        assert!(page.contains("\nhapax_server_store_reachable 0\n"), "{page}");
        let ready = common::proxied::request(server.address(), "GET /readyz", "host: localhost");
        assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("noeviction"), "{ready}");
    }
    redis.cli(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    for server in &servers {
        let start = Instant::now();
        while server.run(&["queues"]).code != Some(0) {
            assert!(start.elapsed() < common::PATIENCE, "it does not recover");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        assert_eq!(found(&server.endpoint), (vec![], Some(0)));
        assert!(server.run(&["top", "--once"]).ok().contains("queue jobs\t1\t"));
    }
}

fn replica_behind() {
    let (redis, replica) = (RedisServer::start(DURABLE).unwrap(), RedisServer::start(DURABLE).unwrap());
    let url = format!("redis://{}", redis.address());
    assert_eq!(found(&url), (vec![], Some(0)));
    let address = redis.address();
    let (host, port) = address.rsplit_once(':').unwrap();
    replica.cli(&["REPLICAOF", host, port]).unwrap();
    let start = Instant::now();
    while !redis.cli(&["INFO", "replication"]).unwrap().contains("state=online") {
        assert!(start.elapsed() < common::PATIENCE, "the replica does not follow");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let behind = || (vec!["redis-replica-behind".to_owned()], Some(0));
    assert_eq!(found(&url), behind(), "the level `local` does not wait for it");
    let replicated = format!("{url}?hapax_durability=replicated");
    assert_eq!(found(&replicated), behind(), "alone, the master accepts what no replica has");
    redis.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]).unwrap();
    assert_eq!(found(&replicated), (vec![], Some(0)));
}

fn bodies(received: &Value) -> Vec<String> {
    received.as_array().unwrap().iter().map(|item| item["body"].as_str().unwrap().to_owned()).collect()
}

fn two_servers() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let url = format!("redis://{}", redis.address());
    let serve = || Server::start_in(tempdir().unwrap(), &["--store", &url]);
    let (mut one, two) = (serve(), serve());
    one.run(&["send", "--create", "jobs", "a"]).ok();
    two.run(&["send", "jobs", "b"]).ok();
    let received = two.run(&["receive", "jobs", "--max", "2", "--ack", "--json"]).json();
    assert_eq!(bodies(&received).into_iter().collect::<BTreeSet<_>>(), ["a".into(), "b".into()].into());
    assert_eq!(one.run(&["queues", "--json"]).json()[0]["stats"]["ready"], 0);
    // A long poll at one server gets what arrives through the other.
    let (folder, endpoint) = (tempdir().unwrap(), &one.endpoint);
    let args = ["receive", "jobs", "--wait", "20s", "--ack", "--json", "--endpoint", endpoint];
    let poll = std::thread::scope(|scope| {
        let poll = scope.spawn(|| run(&folder, &args));
        two.run(&["send", "jobs", "c"]).ok();
        poll.join().unwrap()
    });
    assert_eq!(bodies(&poll.json()), ["c"]);
    // Operators reach the queues without a server too.
    run(&folder, &["send", "jobs", "d", "--endpoint", &url]).ok();
    one.signal(Signal::KILL);
    one.wait();
    redis.kill();
    let refused = two.run(&["send", "jobs", "e"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("unavailable"), "{refused:?}");
    redis.run().unwrap();
    let mut received = two.run(&["receive", "jobs", "--wait", "5s", "--ack", "--json"]);
    while received.code != Some(0) {
        assert!(received.stderr.contains("unavailable"), "{received:?}");
        received = two.run(&["receive", "jobs", "--wait", "5s", "--ack", "--json"]);
    }
    assert_eq!(bodies(&received.json()), ["d"], "what was accepted is there");
    let refused = run(&folder, &["migrate", "--store", &url]).failed(2);
    assert!(refused.contains("nothing has to be migrated"), "{refused}");
    let refused =
        run(&folder, &["serve", "--listen", "127.0.0.1:0", "--store", &url, "--store-messages-max", "7"]);
    assert!(refused.stderr.contains("store.embedded.messages_max: only the embedded store"), "{refused:?}");
}

fn one_story() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let url = format!("redis://{}", redis.address());
    common::told::servers_tell_one_story(|| Server::start_in(tempdir().unwrap(), &["--store", &url]));
}

fn worker_on_cluster() {
    let cluster = RedisCluster::start(&["cluster-node-timeout 120000"]).unwrap();
    let url = format!("{}?hapax_durability=replicated&{PATIENT}", cluster.url());
    let folder = tempdir().unwrap();
    let on = |args: &[&str]| run(&folder, &[args, &["--endpoint", &url]].concat());
    on(&["queue", "create", "jobs", "--tier", "effectively-once"]).ok();
    for key in ["order-7", "order-7", "order-8"] {
        on(&["send", "jobs", key, "--key", key]).ok();
    }
    let args =
        ["work", "--endpoint", &url, "jobs", "--until-empty", "--", "sh", "-c", "cat >> done; echo >> done"];
    let worked = run(&folder, &args);
    assert_eq!(worked.code, Some(0), "{worked:?}");
    let done = std::fs::read_to_string(folder.path().join("done")).unwrap();
    let mut done: Vec<&str> = done.lines().collect();
    done.sort_unstable();
    assert_eq!(done, ["order-7", "order-8"], "the duplicate has not run");
    let listed = on(&["ledger", "list", "--json"]).ok();
    assert!(listed.matches("completed").count() >= 2, "{listed}");
    assert_eq!(on(&["queues", "--json"]).json()[0]["stats"]["ready"], 0);
}

fn copied() {
    let redis = RedisServer::start(DURABLE).unwrap();
    let (folder, address) = (tempdir().unwrap(), redis.address());
    let (first, last) =
        (format!("redis://{address}?hapax_prefix=first"), format!("redis://{address}?hapax_prefix=last"));
    let between = "embedded:./between";
    let on = |endpoint: &str, args: &[&str]| run(&folder, &[args, &["--endpoint", endpoint]].concat());
    let bodies_in = |endpoint: &str| -> BTreeSet<String> {
        let received = on(endpoint, &["receive", "jobs", "--max", "10", "--ack", "--json"]);
        bodies(&received.json()).into_iter().collect()
    };
    for number in 0..5 {
        on(&first, &["send", "--create", "jobs", &format!("m{number}")]).ok();
    }
    run(&folder, &["copy", "--from", &first, "--to", between]).ok();
    let refused = on(&first, &["send", "jobs", "late"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("embedded:"), "{refused:?}");
    on(between, &["send", "jobs", "new"]).ok();
    run(&folder, &["copy", "--from", between, "--to", &last]).ok();
    let refused = on(between, &["send", "jobs", "late"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("redis://"), "{refused:?}");
    let all = ["m0", "m1", "m2", "m3", "m4", "new"].map(str::to_owned);
    assert_eq!(bodies_in(&last), all.clone().into());
    run(&folder, &["copy", "--release", "--from", &first]).ok();
    assert_eq!(bodies_in(&first), all[..5].iter().cloned().collect(), "open again, it has what it had");
}

fn tls() {
    const SECRET: &str = "hunter2";
    let (folder, tls) = (tempdir().unwrap(), RedisTls::new().unwrap());
    let redis = RedisServer::start(&[DURABLE, &tls.settings()].concat()).unwrap();
    redis.cli(&["ACL", "SETUSER", "ann", "on", &format!(">{SECRET}"), "~*", "&*", "+@all"]).unwrap();
    let url = format!("rediss://ann@{}?{PATIENT}", redis.tls_address());
    let send = |url: &str, trusts: bool, password: &str| {
        let mut command = hapax(&folder, &["send", "--create", "jobs", "a", "--endpoint", url]);
        if trusts {
            command.env("SSL_CERT_FILE", tls.authority());
        }
        let output = command.env("REDISCLI_AUTH", password).output().unwrap();
        let said = format!("{output:?}");
        assert!(!said.contains(SECRET), "{said}");
        (output.status.success(), said)
    };
    let (accepted, said) = send(&url, true, SECRET);
    assert!(accepted, "{said}");
    let (accepted, said) = send(&url, true, "wrong");
    assert!(!accepted && said.contains("authentication failed"), "{said}");
    let (accepted, said) = send(&url, false, SECRET);
    assert!(!accepted, "an unknown certificate is refused: {said}");
    assert_eq!(redis.cli(&["--scan", "--pattern", "*:q:jobs:m"]).unwrap().lines().count(), 1);
}

/// Sends to several queues by a URL with TLS, and receives from them; without the authority's certificate, and without TLS at
/// the same ports, that is refused.
fn sends_and_receives_by_tls(tls: &RedisTls, url: &str) {
    let folder = tempdir().unwrap();
    let call = |url: &str, trusts: bool, command: &[&str]| {
        let mut call = hapax(&folder, &[command, &["--endpoint", url]].concat());
        if trusts {
            call.env("SSL_CERT_FILE", tls.authority());
        }
        let output = call.output().unwrap();
        (output.status.success(), format!("{output:?}"))
    };
    assert!(url.starts_with("rediss+"), "{url}");
    let patient = format!("{url}?{PATIENT}");
    for n in 0..3 {
        let (queue, body) = (format!("jobs-{n}"), format!("body {n}"));
        let (accepted, said) = call(&patient, true, &["send", "--create", &queue, &body]);
        assert!(accepted, "{said}");
        let (received, said) = call(&patient, true, &["receive", &queue, "--ack"]);
        assert!(received && said.contains(&body), "{said}");
    }
    let (accepted, said) = call(url, false, &["send", "jobs-0", "a"]);
    assert!(!accepted, "an unknown certificate is refused: {said}");
    let (accepted, said) = call(&url.replacen("rediss", "redis", 1), true, &["send", "jobs-0", "a"]);
    assert!(!accepted, "these ports serve nothing without TLS: {said}");
}

fn tls_of_a_cluster() {
    let tls = RedisTls::new().unwrap();
    let settings = [DURABLE, &tls.settings(), &["cluster-node-timeout 120000"]].concat();
    let cluster = RedisCluster::start(&settings).unwrap();
    sends_and_receives_by_tls(&tls, &cluster.url());
    // The nodes name each other by the port for TLS, so that others than the first one are reached.
    let has_data = |master: &&RedisServer| master.cli(&["DBSIZE"]).unwrap() != "0";
    assert!(cluster.nodes[..3].iter().filter(has_data).count() > 1);
}

fn tls_of_sentinels() {
    let tls = RedisTls::new().unwrap();
    let settings = [DURABLE, &tls.settings()].concat();
    let all = RedisSentinels::start(&settings, std::time::Duration::from_mins(1)).unwrap();
    sends_and_receives_by_tls(&tls, &all.url());
}
