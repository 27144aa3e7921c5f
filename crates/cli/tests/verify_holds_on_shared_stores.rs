//! `hapax verify` on stores that several servers share: real servers, faults between them and the store, and a store that is
//! killed. The guarantee holds, and the naive programs beside it are caught. In the long run, also a failover, and 20 minutes
//! of all faults on each store.

mod common;

use std::process::{Command, ExitCode};
use std::time::Duration;

use common::{run, run_within};
use hapax_faults::{PostgresServer, RedisCluster};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;

/// Faults that any store has.
const EVERYWHERE: &str =
    "kill -9 of a worker,kill -9 of a server,relay after publishing,SendMessage: response cut,pause";

/// A test by its name, what it needs, and whether that is there.
type Test = (&'static str, &'static str, fn() -> bool, fn());

const TESTS: &[Test] = &[
    ("verify_holds_on_postgres", "PostgreSQL 15", has_postgres, on_postgres),
    ("verify_holds_on_redis", "Redis 7", has_redis, on_redis),
    ("verify_holds_on_redis_cluster", "Redis 7", has_redis, on_redis_cluster),
    ("verify_holds_when_a_replica_takes_over", LONG_REDIS, is_long_with_redis, on_redis_sentinel),
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

/// Runs verify; it holds, and each of these faults changed something.
fn holds(store: &str, faults: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let chosen = [EVERYWHERE, &faults.join(",")].join(",");
    let args = ["verify", "--json", "--store", store, "--for", "15s", "--seed", "1", "--faults", &chosen];
    let done = run(&folder, &args);
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
}

fn on_postgres() {
    holds("private:postgres", &["kill -9 of the store", "COMMIT: response cut", "partition"]);
}

fn on_redis() {
    holds("private:redis", &["kill -9 of the store", "EVALSHA: response cut", "partition"]);
}

/// The store's master is killed, and a replica takes over.
fn on_redis_sentinel() {
    holds("private:redis-sentinel", &["kill -9 of the store"]);
}

/// Its servers find the nodes by themselves, so no proxy is between.
fn on_redis_cluster() {
    // A node that is slow because of the machine is not taken for dead.
    let settings = ["min-replicas-to-write 1", "cluster-node-timeout 120000", "appendonly yes"];
    let cluster = RedisCluster::start(&settings).unwrap();
    holds(&format!("{}?hapax_durability=replicated", cluster.url()), &["DeleteMessage: response cut"]);
}
