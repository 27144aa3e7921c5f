//! `hapax verify` on stores that several servers share: real servers, faults between them and the store, and a store that is
//! killed. The guarantee holds, and the naive programs beside it are caught. In the long run, also a failover, and 20 minutes
//! of all faults on each store.

mod common;

use std::process::{Command, ExitCode};
use std::time::Duration;

use common::run_within;
use hapax_faults::{PatroniCluster, PostgresServer, RedisCluster};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;

/// Faults that any store has. Each workload is reached by one of them for certain: the proxy's by the last one, which a kill of
/// one of two servers reaches only by chance.
const EVERYWHERE: &str = "kill -9 of a worker,kill -9 of a server,relay after publishing,SendMessage: response cut,pause,\
                          request through the proxy: response cut";

/// A test by its name, what it needs, and whether that is there.
type Test = (&'static str, &'static str, fn() -> bool, fn());

const TESTS: &[Test] = &[
    ("verify_holds_on_postgres", "PostgreSQL 15", has_postgres, on_postgres),
    ("verify_holds_on_redis", "Redis 7", has_redis, on_redis),
    ("verify_holds_on_redis_cluster", "Redis 7", has_redis, on_redis_cluster),
    ("verify_holds_when_a_replica_takes_over", LONG_REDIS, is_long_with_redis, on_redis_sentinel),
    ("verify_holds_when_a_master_of_a_cluster_is_lost", LONG_REDIS, is_long_with_redis, on_failing_cluster),
    ("verify_holds_when_a_standby_takes_over", LONG_PATRONI, is_long_with_patroni, on_patroni),
    ("verify_runs_a_failover_command", "Redis 7", has_redis, with_a_failover_command),
    ("verify_holds_for_20_minutes_on_the_embedded_store", LONG, is_long, || holds_long("embedded:store")),
    ("verify_holds_for_20_minutes_on_postgres", LONG_POSTGRES, is_long_with_postgres, || {
        holds_long("private:postgres");
    }),
    ("verify_holds_for_20_minutes_on_redis", LONG_REDIS, is_long_with_redis, || holds_long("private:redis")),
];

fn main() -> ExitCode {
    let trial = |&(name, needs, is_there, test): &Test| {
        Trial::ignorable_test(name, move || {
            if !is_there() {
                let is_short = needs.starts_with(LONG) && !is_long();
                let kind = if is_short { "long: " } else { "" };
                return Ok::<_, Failed>(Completion::ignored_with(format!("{kind}needs {needs}")));
            }
            test();
            Ok(Completion::Completed)
        })
    };
    let mut args = Arguments::from_args();
    // A run has a dozen processes.
    args.test_threads = Some(1);
    libtest_mimic::run(&args, TESTS.iter().map(trial).collect()).exit_code()
}

fn has_postgres() -> bool {
    PostgresServer::programs().join("psql").exists()
}

fn has_redis() -> bool {
    Command::new("redis-server").arg("--version").output().is_ok()
}

const LONG: &str = "the long run";
const LONG_POSTGRES: &str = "the long run and PostgreSQL 15";
const LONG_PATRONI: &str = "the long run, PostgreSQL 15, Patroni and etcd";
const LONG_REDIS: &str = "the long run and Redis 7";

fn is_long() -> bool {
    std::env::var_os("HAPAX_LONG").is_some()
}

fn is_long_with_postgres() -> bool {
    is_long() && has_postgres()
}

fn is_long_with_redis() -> bool {
    is_long() && has_redis()
}

fn is_long_with_patroni() -> bool {
    is_long_with_postgres() && PatroniCluster::programs().is_ok()
}

/// All faults for 20 minutes; start, drain and check come on top.
fn holds_long(store: &str) {
    let folder = tempfile::tempdir().unwrap();
    let args = ["verify", "--json", "--store", store, "--for", "20m"];
    let done = run_within(Duration::from_mins(28), &folder, &args);
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    let seed = &report["seed"];
    assert_eq!(report["verdict"], "held", "seed {seed}: {}\n{report:#}", done.stderr);
}

/// Runs verify for 15 s; it holds.
fn holds(store: &str, faults: &[&str]) -> Value {
    let chosen = [EVERYWHERE, &faults.join(",")].join(",");
    holds_for("15s", store, &["--faults", &chosen])
}

/// Runs verify; it holds, and most faults changed something. Returns the report.
fn holds_for(time: &str, store: &str, more: &[&str]) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let args = ["verify", "--json", "--store", store, "--for", time, "--seed", "1"];
    let done = run_within(Duration::from_mins(10), &folder, &[&args, more].concat());
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    assert_eq!((done.code, &report["verdict"]), (Some(0), &"held".into()), "{}\n{report:#}", done.stderr);
    let injected = report["faults"].as_array().unwrap();
    let bit = injected.iter().filter(|fault| fault["bit"] == true).count();
    assert!(bit * 2 > injected.len(), "only {bit} of {} faults bit: {}", injected.len(), done.stderr);
    for row in report["workloads"].as_array().unwrap() {
        if row["control"] == false && row["workload"] != "claims" {
            let (accepted, effects) = (row["accepted"].as_u64(), row["effects"].as_u64());
            assert!(effects >= accepted, "what was accepted took effect: {row:#}");
        }
    }
    println!("{}", done.stderr);
    report
}

/// Each of these faults was injected, and changed something.
fn bit(report: &Value, faults: &[&str]) {
    for name in faults {
        let mut injected = report["faults"].as_array().unwrap().iter();
        let bit = |fault: &Value| {
            let named = fault["fault"].as_str().unwrap().contains(name);
            named && fault["bit"] == true && fault["faulted"].as_u64() > Some(0)
        };
        assert!(injected.any(bit), "{name} did not bite: {:#}", report["faults"]);
    }
}

fn on_postgres() {
    let _ = holds("private:postgres", &["kill -9 of the store", "COMMIT: response cut", "partition"]);
}

fn on_redis() {
    let _ = holds("private:redis", &["kill -9 of the store", "EVALSHA: response cut", "partition"]);
}

/// Faults of a store with replicas.
const REPLICAS: [&str; 3] = [
    "failover: kill -9 of the store's leader",
    "failover: pause of the store's leader",
    "replica of the store",
];

/// The leader is killed and paused, and a replica takes over and is cut off, each several times.
fn survives_failovers(store: &str, time: &str) {
    let chosen = [REPLICAS.join(","), "kill -9 of a worker,SendMessage: response cut".to_owned()].join(",");
    let report = holds_for(time, store, &["--faults", &chosen]);
    bit(&report, &REPLICAS);
}

fn on_redis_sentinel() {
    survives_failovers("private:redis-sentinel", "1m");
}

fn on_failing_cluster() {
    survives_failovers("private:redis-cluster", "2m");
}

/// Patroni takes 20 s and more for each failover.
fn on_patroni() {
    survives_failovers("private:postgres-patroni", "4m");
}

/// A store of the user's own, whose failover is the user's command.
fn with_a_failover_command() {
    let settings = ["min-replicas-to-write 1", "cluster-node-timeout 120000", "appendonly yes"];
    let cluster = RedisCluster::start(&settings).unwrap();
    let folder = tempfile::tempdir().unwrap();
    // The master of the first pair, and its replica, change their parts with each call.
    let nodes = [0, 3].map(|node: usize| cluster.nodes[node].address().replace("127.0.0.1:", ""));
    let script = format!(
        "for port in {} {}; do if redis-cli -p $port ROLE | head -1 | grep -q slave; then \
         redis-cli -e -p $port CLUSTER FAILOVER && for n in $(seq 300); do \
         redis-cli -p $port ROLE | head -1 | grep -q master && exit 0; sleep 0.1; done; exit 1; fi; done; exit 1",
        nodes[0], nodes[1]
    );
    let file = folder.path().join("failover.sh");
    std::fs::write(&file, script).unwrap();
    let command = format!("sh {}", file.display());
    let store = format!("{}?hapax_durability=replicated", cluster.url());
    let faults = "failover,kill -9 of a worker";
    let report =
        holds_for("10s", &store, &["--only", "payments", "--faults", faults, "--failover-cmd", &command]);
    let injected = report["faults"].as_array().unwrap();
    let by_command = |fault: &&Value| fault["fault"] == "failover by your command";
    let hits = injected.iter().filter(by_command).filter(|fault| fault["hits"] == 1).count();
    assert!(hits > 0, "{injected:#?}");
    assert!(report["command"].as_str().unwrap().contains("--failover-cmd 'sh "), "{report:#}");
}

/// Its servers find the nodes by themselves, so no proxy is between.
fn on_redis_cluster() {
    // A node that is slow because of the machine is not taken for dead.
    let settings = ["min-replicas-to-write 1", "cluster-node-timeout 120000", "appendonly yes"];
    let cluster = RedisCluster::start(&settings).unwrap();
    let url = format!("{}?hapax_durability=replicated", cluster.url());
    let _ = holds(&url, &["DeleteMessage: response cut"]);
}
