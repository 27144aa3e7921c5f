//! `hapax doctor`, and the findings about a tier that `queue create`, `queue set` and `serve`
//! print.

mod common;

use std::time::{Duration, SystemTime};

use common::relay::relay;
use common::{Done, Server, run};
use serde_json::Value;

/// The codes found for a queue, or for the store.
fn codes(section: &Value) -> Vec<&str> {
    section["findings"].as_array().unwrap().iter().map(|item| item["code"].as_str().unwrap()).collect()
}

fn report(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"))
}

#[test]
fn a_queue_in_good_order_is_called_sound() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let lines = server.run(&["doctor"]).ok();
    assert!(lines.lines().any(|line| line == "queue jobs\tat-least-once\tsound"), "{lines}");
    assert!(lines.contains(&format!("store\t-\tfact\tplace\t{}\n", server.endpoint)), "{lines}");
    let report = server.run(&["doctor", "--json"]).json();
    assert_eq!((&report["refusals"], &report["warnings"]), (&0.into(), &0.into()));
    assert_eq!(report["store"]["server_version"], env!("CARGO_PKG_VERSION"));
    // A server reports the same about its machine as a direct check of the folder.
    let here = run(&server.folder, &["doctor", "--store", "embedded:./hapax-data", "--json"]);
    let here = self::report(&here);
    assert!(here["store"]["file_system"].is_string(), "{here}");
    assert_eq!(report["store"]["file_system"], here["store"]["file_system"]);
    for fact in ["free_bytes", "database_bytes", "log_bytes", "clock_ms"] {
        assert!(report["store"][fact].is_u64() && here["store"][fact].is_u64(), "{fact}: {report} {here}");
    }
    assert_eq!(codes(&report["store"]), codes(&here["store"]));
}

#[test]
fn a_refusal_has_a_code_a_remedy_and_a_page_and_ends_with_code_1() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs", "--lease", "0"]).ok();
    let done = server.run(&["doctor"]);
    assert_eq!(done.code, Some(1), "{done:?}");
    let line = done.stdout.lines().find(|line| line.contains("lease-zero")).unwrap();
    let cells: Vec<_> = line.split('\t').collect();
    assert_eq!(cells[..4], ["queue jobs", "at-least-once", "refusal", "lease-zero"]);
    assert!(cells[5].contains("auto") && cells[6] == "docs/errors/lease-zero.md", "{line}");
    assert!(done.stderr.contains("error: 1 refusal"), "{done:?}");
    let json = report(&server.run(&["doctor", "--json"]));
    assert_eq!((&json["refusals"], codes(&json["queues"][0])), (&1.into(), vec!["lease-zero"]));
    assert_eq!(json["queues"][0]["findings"][0]["page"], "docs/errors/lease-zero.md");
    server.run(&["queue", "set", "jobs", "--lease", "30s"]).ok();
    server.run(&["doctor"]).ok();
}

#[test]
fn doubts_are_warned_of_and_what_is_not_known_is_said() {
    let server = Server::start();
    server.run(&["queue", "create", "dead"]).ok();
    server.run(&["queue", "create", "pay", "--tier", "transactional", "--dead-letter", "dead"]).ok();
    server.run(&["queue", "create", "orders.fifo", "--key-pointer", "/id"]).ok();
    server.run(&["queue", "create", "ship", "--tier", "effectively-once", "--key-pointer", "/id"]).ok();
    let done = server.run(&["doctor", "--json", "--producer-retry", "1h"]);
    let json = report(&done);
    let named = |name: &str| {
        let mut queues = json["queues"].as_array().unwrap().iter();
        codes(queues.find(|queue| queue["name"] == name).unwrap())
    };
    let none: [&str; 0] = [];
    assert_eq!(named("ship"), none, "the store has a ledger, which knows a repeated key for days");
    let expected = ["key-is-message-id", "dead-letters-short-lived", "dedup-window-short"];
    assert_eq!(named("pay"), expected);
    assert_eq!(named("orders.fifo"), ["dedup-window-short"]);
    assert_eq!(json["refusals"], 0);
    assert!(!json["not_known"].as_array().unwrap().is_empty());
    let done = server.run(&["doctor"]);
    assert!(done.stderr.contains("for how long its heartbeats extend a lease"), "{done:?}");
}

#[test]
fn leases_that_ran_out_are_counted() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs", "--retry-base", "0", "--dead-letters"]).ok();
    server.run(&["send", "jobs", "slow"]).ok();
    server.run(&["send", "jobs", "slow"]).ok();
    for _ in 0..20 {
        assert!(server.run(&["receive", "jobs", "--lease", "0", "--wait", "5s"]).ok().contains("slow"));
    }
    // The last lease runs out by itself.
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    let json = loop {
        let json = server.run(&["doctor", "--json"]).json();
        if codes(&json["queues"][0]).contains(&"leases-expire") {
            break json;
        }
        assert!(std::time::Instant::now() < deadline, "{json}");
    };
    let message = json["queues"][0]["findings"][0]["message"].as_str().unwrap();
    // The last lease of each message is not followed by a delivery.
    assert!(
        message.starts_with("90.0% of deliveries were repeated because their lease ran out (18 of 20"),
        "{message}"
    );
}

#[test]
fn a_store_without_a_server_is_looked_at_with_its_machine() {
    let server = Server::start();
    server.run(&["send", "jobs", "--create", "kept"]).ok();
    let folder = server.stop();
    let json = run(&folder, &["doctor", "--store", "embedded:./hapax-data", "--json"]).json();
    let store = &json["store"];
    assert!(store["file_system"].is_string() && store["free_bytes"].as_u64() > Some(0), "{store}");
    assert!(store["database_bytes"].as_u64() > Some(0), "{store}");
    assert_eq!((&store["messages"], &json["queues"][0]["name"]), (&1.into(), &"jobs".into()));
    // The same with the flag of the other commands.
    run(&folder, &["doctor", "--endpoint", "embedded:./hapax-data"]).ok();
    // The store was not changed.
    let server = Server::start_in(folder, &[]);
    assert!(server.run(&["receive", "jobs"]).ok().contains("kept"));
}

#[test]
fn a_clock_that_was_set_back_is_found() {
    let server = Server::start();
    let folder = server.stop();
    let database =
        std::fs::File::options().append(true).open(folder.path().join("hapax-data/hapax.db")).unwrap();
    database.set_modified(SystemTime::now() + Duration::from_hours(1)).unwrap();
    let json = run(&folder, &["doctor", "--store", "embedded:./hapax-data", "--json"]).json();
    assert!(codes(&json["store"]).contains(&"clock-behind"), "{json}");
}

#[test]
fn a_store_in_use_is_not_opened_and_its_server_is_named() {
    let server = Server::start();
    let done = run(&server.folder, &["doctor", "--store", "embedded:./hapax-data", "--json"]);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(report(&done)["store"]["file_system"].is_string(), "{done:?}");
    let expected = ["the queues were not checked", "in use by process", "hapax doctor --endpoint"];
    assert!(expected.iter().all(|part| done.stderr.contains(part)), "{done:?}");
    server.run(&["queues"]).ok();
}

#[test]
fn a_paused_store_is_named_once() {
    let server = Server::start();
    let written = server.run(&["backup", "copy.db", "--json"]).json();
    let folder = server.stop();
    run(&folder, &["restore", written["to"].as_str().unwrap(), "--store", "embedded:./restored"]).ok();
    let json = run(&folder, &["doctor", "--store", "embedded:./restored", "--json"]).json();
    let paused: Vec<_> =
        codes(&json["store"]).into_iter().filter(|code| code.starts_with("store-")).collect();
    assert_eq!(paused, ["store-paused"]);
}

#[test]
fn wrong_stores_are_refused_and_none_is_made() {
    let folder = tempfile::tempdir().unwrap();
    run(&folder, &["doctor", "--store", "mysql://x"]).failed(2);
    let error = run(&folder, &["doctor", "--store", "embedded:./typo"]).failed(1);
    assert!(error.contains("no store in ./typo"), "{error}");
    assert!(!folder.path().join("typo").exists());
}

#[test]
fn creating_or_changing_a_queue_warns_about_its_tier() {
    let server = Server::start();
    let done = server.run(&["queue", "create", "pay", "--tier", "transactional", "--max-attempts", "0"]);
    let expected = "warning: queue pay: no-attempt-limit: the queue has no limit on attempts";
    assert!(
        done.stderr.contains(expected) && done.stderr.contains("docs/errors/no-attempt-limit.md"),
        "{done:?}"
    );
    assert_eq!(done.ok(), "pay created\n");
    let done = server.run(&["queue", "set", "pay", "--lease", "0"]);
    assert!(done.stderr.contains("its tier cannot hold here: lease-zero"), "{done:?}");
    assert_eq!(server.run(&["queue", "create", "plain"]).stderr, "", "nothing to tell of a plain queue");
}

#[test]
fn a_server_logs_what_its_declared_queues_lack() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hapax.toml"), "[[queue]]\nname = \"pay\"\nlease_ms = 0\n").unwrap();
    let mut server = Server::start_in(folder, &["--config", "hapax.toml"]);
    server.signal(rustix::process::Signal::TERM);
    server.wait();
    let log = server.log();
    assert!(
        log.contains("WARN") && log.contains("queue pay: its tier cannot hold here: lease-zero"),
        "{log}"
    );
}

#[test]
fn doctor_and_worker_agree_that_a_lease_of_zero_is_refused() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs", "--lease", "0", "--dead-letters"]).ok();
    server.run(&["send", "jobs", "one"]).ok();
    assert!(server.run(&["doctor"]).stdout.contains("\trefusal\tlease-zero\t"));
    let work = |args: &[&str]| {
        let done = ["work", "jobs", "--once"].iter().chain(args).chain(&["--", "cat"]).copied();
        server.run(&done.collect::<Vec<_>>())
    };
    let refused = work(&[]);
    assert!(refused.code == Some(1) && refused.stderr.contains("lease-zero"), "{refused:?}");
    let done = work(&["--lease", "10s"]);
    assert_eq!(done.code, Some(0), "a worker's own lease is another matter: {done:?}");
}

/// A key for some queues does not learn how much is in the store, and is told so instead of being shown zeros.
#[test]
fn hidden_facts_are_reported_as_not_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let key = |id: &str, rights: &str| format!("[[auth.keys]]\nid = \"{id}\"\nsecret = \"s\"\n{rights}\n");
    let config = key("ALL", "")
        + &key("SOME", "queues = [\"jobs\"]")
        + &key("FEW", "queues = [\"jobs\"]\nactions = [\"ListQueues\"]");
    std::fs::write(folder.path().join("hapax.toml"), config).unwrap();
    let server = Server::start_in(folder, &["--config", "hapax.toml"]);
    let as_key = |id: &str, args: &[&str]| {
        let mut command = common::hapax(&server.folder, args);
        command.env("HAPAX_ENDPOINT", &server.endpoint).env("HAPAX_TOKEN", format!("{id}:s"));
        Done::new(command.output().unwrap())
    };
    as_key("ALL", &["queue", "create", "jobs"]).ok();
    as_key("ALL", &["send", "jobs", "x"]).ok();
    assert!(as_key("ALL", &["doctor"]).ok().contains("store\t-\tfact\tmessages\t1\n"));
    for (id, counters) in [("SOME", true), ("FEW", false)] {
        let done = as_key(id, &["doctor"]);
        assert_eq!(done.code, Some(0), "{done:?}");
        assert!(done.stdout.contains("store\t-\tfact\tmessages\tnot allowed to see\n"), "{done:?}");
        assert!(done.stderr.contains("not allowed to see the store's figures and warnings"), "{done:?}");
        assert_eq!(done.stdout.contains("queue jobs\tat-least-once\tsound\n"), counters, "{done:?}");
        // Without its counters a queue is not called sound.
        let unknown = "queue jobs\tat-least-once\tnothing found\tnot allowed to see: its counters (";
        assert_eq!(done.stdout.contains(unknown), !counters, "{done:?}");
        let json = as_key(id, &["doctor", "--json"]).json();
        assert!(json["store"]["messages"].is_null(), "{json}");
        assert_eq!(json["store"]["status_withheld"], true, "{json}");
        assert_eq!(json["queues"][0]["not_seen"].as_array().unwrap().len(), usize::from(!counters), "{json}");
    }
    let json = as_key("ALL", &["doctor", "--json"]).json();
    assert_eq!((&json["store"]["messages"], &json["store"]["status_withheld"]), (&1.into(), &false.into()));
}

/// Dead letters of a queue have nowhere to go once their queue is deleted: that is found, whatever else is.
#[test]
fn a_dead_letter_queue_that_was_deleted_is_missed() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs", "--dead-letters"]).ok();
    server.run(&["queue", "create", "orders.fifo", "--dead-letters", "--lease", "0"]).ok();
    assert!(server.run(&["doctor"]).stdout.contains("queue jobs\tat-least-once\tsound\n"));
    for dead in ["jobs-dead", "orders-dead.fifo"] {
        server.run(&["queue", "delete", dead, "--yes"]).ok();
    }
    let check = |done: Done| {
        let json = report(&done);
        assert_eq!(codes(&json["queues"][0]), ["dead-letter-queue-missing"], "{json}");
        assert_eq!(codes(&json["queues"][1]), ["lease-zero", "dead-letter-queue-missing"], "{json}");
        for (at, dead) in [(0, "jobs-dead"), (1, "orders-dead.fifo")] {
            let findings = json["queues"][at]["findings"].as_array().unwrap();
            let found = findings.last().unwrap();
            assert!(found["message"].as_str().unwrap().contains(dead), "{found}");
            assert_eq!(json["queues"][at]["not_seen"].as_array().unwrap().len(), 0, "{json}");
        }
    };
    check(server.run(&["doctor", "--json"]));
    let lines = server.run(&["doctor"]).stdout;
    assert!(!lines.contains("not allowed"), "{lines}");
    let folder = server.stop();
    check(run(&folder, &["doctor", "--store", "embedded:./hapax-data", "--json"]));
    // What the remedy says helps.
    let server = Server::start_in(folder, &[]);
    server.run(&["queue", "create", "jobs-dead", "--retention", "14d"]).ok();
    assert!(server.run(&["doctor"]).stdout.contains("queue jobs\tat-least-once\tsound\n"));
}

/// A key that may not see the dead-letter queue is not told that there is none, and other findings do not hide that.
#[test]
fn a_dead_letter_queue_of_another_key_is_not_called_missing() {
    let folder = tempfile::tempdir().unwrap();
    let config = "[[auth.keys]]\nid = \"ALL\"\nsecret = \"s\"\n\
                  [[auth.keys]]\nid = \"SOME\"\nsecret = \"s\"\nqueues = [\"jobs\"]\n";
    std::fs::write(folder.path().join("hapax.toml"), config).unwrap();
    let server = Server::start_in(folder, &["--config", "hapax.toml"]);
    let as_key = |id: &str, args: &[&str]| {
        let mut command = common::hapax(&server.folder, args);
        command.env("HAPAX_ENDPOINT", &server.endpoint).env("HAPAX_TOKEN", format!("{id}:s"));
        Done::new(command.output().unwrap())
    };
    as_key("ALL", &["queue", "create", "jobs", "--dead-letters"]).ok();
    let hidden = "not allowed to see: its dead-letter queue jobs-dead";
    let lines = as_key("SOME", &["doctor"]).ok();
    assert!(lines.contains(&format!("queue jobs\tat-least-once\tnothing found\t{hidden} (")), "{lines}");
    as_key("ALL", &["queue", "set", "jobs", "--lease", "0"]).ok();
    for exists in [true, false] {
        let done = as_key("SOME", &["doctor"]);
        assert!(done.stdout.contains("\tlease-zero\t"), "{exists}: {done:?}");
        let line = format!("queue jobs\tat-least-once\tnot seen\t{hidden} (");
        assert!(done.stdout.contains(&line), "{exists}: {done:?}");
        let json = report(&as_key("SOME", &["doctor", "--json"]));
        assert_eq!(codes(&json["queues"][0]), ["lease-zero"], "{exists}: {json}");
        let not_seen = json["queues"][0]["not_seen"].as_array().unwrap();
        assert!(not_seen.len() == 1 && not_seen[0].as_str().unwrap().starts_with(hidden), "{exists}: {json}");
        if exists {
            as_key("ALL", &["queue", "delete", "jobs-dead", "--yes"]).ok();
        }
    }
}

#[test]
fn an_outage_is_not_reported_as_not_allowed() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let endpoint = relay(&server, |line| line.contains("/stats") || line.contains("/advice"));
    let done = run(&server.folder, &["doctor", "--endpoint", &endpoint]);
    let expected = "queue jobs\tat-least-once\tnothing found\tcould not look at: its counters (";
    assert!(done.stdout.contains(expected) && done.stdout.contains("overloaded"), "{done:?}");
    assert!(!done.stdout.contains("not allowed"), "{done:?}");
}

#[test]
fn the_queues_of_our_own_examples_are_sound() {
    let server = Server::start();
    let help = server.run(&["queue", "create", "--help"]).ok();
    let examples: Vec<_> = help.lines().filter_map(|line| line.strip_prefix("  hapax ")).collect();
    assert!(examples.len() > 3, "{help}");
    for example in &examples {
        server.run(&example.split_whitespace().collect::<Vec<_>>()).ok();
    }
    let said = server.run(&["doctor"]).ok();
    let about = |line: &&str| line.starts_with("queue ") && !line.contains("\tcost\t");
    let queues: Vec<_> = said.lines().filter(about).collect();
    assert!(queues.len() >= examples.len() && queues.iter().all(|line| line.ends_with("\tsound")), "{said}");
}

#[test]
fn what_a_tier_costs_is_told_with_its_page() {
    let server = Server::start();
    for tier in ["at-least-once", "effectively-once"] {
        server.run(&["queue", "create", tier, "--tier", tier]).ok();
    }
    let said = server.run(&["doctor"]).ok();
    let costs: Vec<_> = said.lines().filter(|line| line.contains("\tcost\t")).collect();
    assert_eq!(costs.len(), 1, "the others are compared with at-least-once: {said}");
    let cells: Vec<_> = costs[0].split('\t').collect();
    assert_eq!((cells[0], cells[4]), ("queue effectively-once", "docs/tiers.md"), "{cells:?}");
    assert_eq!(
        cells[3],
        "2.8 times the processor time, 5.6 times the bytes and 1.5 times the syncs of at-least-once (3.0 syncs for a message \
         alone; messages in flight share them)"
    );
    let json = server.run(&["doctor", "--json"]).json();
    for queue in json["queues"].as_array().unwrap() {
        let costs_more = queue["cost"]["bytes"].as_f64().is_some_and(|times| times > 1.0);
        assert_eq!(costs_more, queue["tier"] == "effectively-once", "{queue}");
        assert_eq!(queue["cost"]["syncs_alone"].as_f64(), costs_more.then_some(3.0), "{queue}");
    }
}
