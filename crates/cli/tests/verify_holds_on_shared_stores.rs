//! `hapax verify` on stores that several servers share: real servers, faults between them and the store, and a store that is
//! killed. The guarantee holds, and the naive programs beside it are caught.

mod common;

use std::process::{Command, ExitCode};

use common::run;
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
];

fn main() -> ExitCode {
    let trial = |&(name, needs, is_there, test): &Test| {
        Trial::ignorable_test(name, move || {
            if !is_there() {
                return Ok::<_, Failed>(Completion::ignored_with(format!("needs {needs}")));
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

/// Its servers find the nodes by themselves, so no proxy is between.
fn on_redis_cluster() {
    // A node that is slow because of the machine is not taken for dead.
    let settings = ["min-replicas-to-write 1", "cluster-node-timeout 120000", "appendonly yes"];
    let cluster = RedisCluster::start(&settings).unwrap();
    holds(&format!("{}?hapax_durability=replicated", cluster.url()), &["DeleteMessage: response cut"]);
}
