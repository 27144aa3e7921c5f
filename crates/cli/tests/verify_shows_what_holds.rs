//! `hapax verify` with real processes and real faults: it catches the controls, and finds nothing in Hapax.

mod common;

use common::{Server, hapax, run};
use serde_json::Value;

fn report(args: &[&str]) -> (tempfile::TempDir, Value) {
    let folder = tempfile::tempdir().unwrap();
    let done = run(&folder, &[&["verify", "--json"], args].concat());
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    assert_eq!(done.code, Some(0), "{}\n{report:#}", done.stderr);
    (folder, report)
}

#[test]
fn quick_holds_on_a_temporary_store() {
    let files = ["--html", "page.html", "--junit", "verify.xml", "--history", "history.jsonl"];
    let (folder, report) = report(&[&["--quick"], &files[..]].concat());
    assert_eq!(report["verdict"], "held", "{report:#}");
    let faulted = report["faulted_operations"].as_u64().unwrap();
    // An unoptimised build on a busy machine does less in the same time.
    let least = if cfg!(debug_assertions) { 200 } else { 1_000 };
    assert!(faulted >= least, "only {faulted} operations were hit by faults");
    for row in report["workloads"].as_array().unwrap() {
        let found = row["counts"].as_object().unwrap().values().map(|count| count.as_u64().unwrap());
        let (found, control) = (found.sum::<u64>(), row["control"] == true);
        assert_eq!(found > 0, control, "the controls are caught, and only they: {row:#}");
    }
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(read("page.html").len() <= 200_000);
    assert!(read("verify.xml").contains("failures=\"0\""), "{}", read("verify.xml"));
    assert!(read("history.jsonl").lines().count() > 1_000);
}

#[test]
fn what_cannot_be_run_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], code, says: &str| {
        let said = run(&folder, &[&["verify"], args].concat());
        assert_eq!(said.code, Some(code), "{said:?}");
        assert!(said.stderr.contains(says), "{said:?}");
    };
    refused(&["--only", "nonsense"], 2, "there is no workload nonsense");
    refused(&["--only", "ack-after"], 2, "is a control");
    refused(&["--tier", "at-most-once"], 2, "no workload is left");
    refused(&["--store", "http://127.0.0.1:1"], 1, "verify starts servers itself");
    refused(&["--upstream", "https://shop.example/charges"], 2, "has to begin with http://");
    refused(&["--upstream", "http://"], 2, "has no host");
    refused(&["--only", "payments", "--upstream", "http://127.0.0.1:1"], 2, "for the workload charges");
    refused(&["--only", "payments", "--handler-cmd", "true"], 2, "for the workload handler");
    refused(
        &["--history", "no/such/folder/history"],
        1,
        "the recorder does not start: no/such/folder/history",
    );
    refused(
        &["--store", "postgres://127.0.0.1:1/shop"],
        1,
        "the store postgres://127.0.0.1:1/shop cannot be reached",
    );
    let listed = run(&folder, &["verify", "--list"]).ok();
    assert!(
        listed.contains("transfers\ttransactional") && listed.contains("kill -9 of a worker"),
        "{listed}"
    );
}

#[test]
fn a_store_in_use_is_refused_and_left_as_it_is() {
    let server = Server::start();
    server.run(&["queue", "create", "orders"]).ok();
    let folder = server.stop();
    let used = ["verify", "--store", "embedded:hapax-data", "--for", "1s"];
    let said = run(&folder, &used);
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stderr.contains("holds 1 queue(s), for example orders"), "{said:?}");
    let queues = hapax(&folder, &["queues", "--endpoint", "embedded:hapax-data"]).output().unwrap();
    assert!(String::from_utf8_lossy(&queues.stdout).contains("orders"), "{queues:?}");
}
