//! The client commands against a running server.

mod common;

use std::io::Write as _;
use std::process::Stdio;

use common::relay::relay;
use common::{Done, Server, hapax, run};

#[test]
fn a_sent_message_is_received_and_gone_once_acked() {
    let server = Server::start();
    assert_eq!(server.run(&["queue", "create", "jobs"]).ok(), "jobs created\n");
    let id = server.run(&["send", "jobs", "hello", "--attribute", "kind=greeting", "--priority", "3"]).ok();
    let received = server.run(&["receive", "jobs", "--ack"]).ok();
    assert_eq!(received, format!("{}\t1\thello\n", id.trim()));
    assert_eq!(server.run(&["receive", "jobs"]).ok(), "");
    assert_eq!(server.run(&["queues"]).ok(), "jobs\t0\t0\t0\t0\t0\t-\n");
}

#[test]
fn everything_that_prints_data_prints_json() {
    let server = Server::start();
    let json = |args: &[&str]| server.run(&[args, &["--json"]].concat()).json();
    assert_eq!(json(&["queue", "create", "jobs", "--lease", "2m"])["created"], true);
    assert_eq!(json(&["queue", "show", "jobs"])["config"]["lease_ms"], 120_000);
    assert_eq!(json(&["queue", "set", "jobs", "--lease", "3m"])["config"]["lease_ms"], 180_000);
    let sent = json(&["send", "jobs", "hello", "--key", "order-7", "--dedup", "d"]);
    assert_eq!(json(&["send", "jobs", "hello", "--dedup", "d"])["duplicate"], true);
    assert_eq!(json(&["queues"])[0]["stats"]["ready"], 1);
    let received = json(&["receive", "jobs"]);
    assert_eq!((&received[0]["id"], &received[0]["body"]), (&sent["id"], &"hello".into()));
    assert_eq!(json(&["dead", "list", "jobs"]), serde_json::json!([]));
    assert_eq!(json(&["dead", "redrives", "jobs"]), serde_json::json!([]));
    assert_eq!(json(&["parked", "list", "jobs"])["messages"], serde_json::json!([]));
    assert_eq!(json(&["queue", "purge", "jobs", "--yes"])["purged"], 1);
    assert_eq!(json(&["queue", "delete", "jobs", "--yes"])["deleted"], true);
    let bench = json(&["bench", "--connections", "2", "--time", "200ms"]);
    assert!(
        bench["messages"].as_u64() > Some(0) && bench["steps"]["ack"]["p99_ms"].as_f64() > Some(0.0),
        "{bench}"
    );
    assert_eq!(json(&["queues"]), serde_json::json!([]), "the bench cleans up");
}

#[test]
fn each_line_of_a_file_is_a_message_and_a_body_may_come_from_a_pipe() {
    let server = Server::start();
    let lines: Vec<String> = (0..25).map(|n| format!("line {n}")).collect();
    std::fs::write(server.folder.path().join("lines"), lines.join("\n")).unwrap();
    let sent = server.run(&["send", "jobs.fifo", "--create", "--group", "g", "--file", "lines"]);
    assert_eq!(sent.code, Some(1), "a FIFO queue without deduplication by content wants ids: {sent:?}");
    server.run(&["queue", "set", "jobs.fifo", "--dedup-content"]).ok();
    let sent = server.run(&["send", "jobs.fifo", "--group", "g", "--file", "lines", "--json"]).json();
    assert_eq!(sent["sent"], 25);
    let again = server.run(&["send", "jobs.fifo", "--group", "g", "--file", "lines", "--json"]).json();
    assert_eq!(again["duplicates"], 25);

    let mut command =
        hapax(&server.folder, &["send", "pipe", "--create", "-", "--endpoint", &server.endpoint]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"one\ntwo\x1b[31m").unwrap();
    Done::new(child.wait_with_output().unwrap()).ok();
    let received = server.run(&["receive", "pipe", "--ack"]).ok();
    assert!(received.ends_with("\tone\\ntwo\\u{1b}[31m\n"), "escaped, on one line: {received}");
}

#[test]
fn lines_that_are_refused_are_named_and_the_others_are_sent() {
    let server = Server::start();
    let large = "x".repeat(2000);
    let lines = ["a", &large, "b", "c", "d", "e", &large, "f"].join("\n");
    std::fs::write(server.folder.path().join("lines"), lines).unwrap();
    server.run(&["queue", "create", "jobs", "--message-bytes-max", "1024"]).ok();
    let error = server.run(&["send", "jobs", "--file", "lines"]).failed(1);
    assert!(error.contains("lines 2, 7 were refused (the message has 2000 bytes"), "{error}");
    assert!(error.contains("all other lines up to 8 are sent"), "{error}");
    assert_eq!(server.run(&["receive", "jobs", "--max", "10"]).ok().lines().count(), 6);
}

#[test]
fn dead_letters_are_listed_shown_redriven_and_purged() {
    let server = Server::start();
    server.run(&["queue", "create", "dead"]).ok();
    server.run(&["queue", "create", "jobs", "--dead-letter", "dead", "--max-attempts", "1"]).ok();
    server.run(&["send", "jobs", "poison"]).ok();
    server.run(&["receive", "jobs", "--lease", "0"]).ok();
    assert_eq!(server.run(&["receive", "jobs"]).ok(), "", "out of attempts");
    let dead = server.run(&["dead", "list", "dead", "--json"]).json();
    assert_eq!((&dead[0]["dead"]["source"], &dead[0]["body"]), (&"jobs".into(), &"poison".into()));
    let id = dead[0]["id"].as_str().unwrap();
    let shown = server.run(&["dead", "show", "dead", id]).ok();
    assert!(shown.contains("came from\tjobs") && shown.contains("body\tpoison"), "{shown}");
    assert_eq!(server.run(&["dead", "redrive", "dead"]).ok(), "1 moved, 0 left\n");
    assert!(server.run(&["receive", "jobs", "--lease", "0"]).ok().contains("poison"));
    assert_eq!(server.run(&["receive", "jobs"]).ok(), "");
    let asked = server.run(&["dead", "purge", "dead"]).failed(2);
    assert!(asked.contains("--yes"), "{asked}");
    assert_eq!(server.run(&["dead", "purge", "dead", "--yes"]).ok(), "1 message deleted\n");
}

#[test]
fn a_backup_is_restored_paused_and_resumed() {
    let server = Server::start();
    server.run(&["send", "jobs", "--create", "kept"]).ok();
    let written = server.run(&["backup", "copy.db", "--json"]).json();
    let error = server.run(&["backup", "copy.db"]).failed(1);
    assert!(error.contains("exists"), "{error}");
    let folder = server.stop();
    let file = written["to"].as_str().unwrap();
    run(&folder, &["restore", file, "--store", "embedded:./restored"]).ok();
    let mut server = Server::start_in(folder, &["--store", "embedded:./restored"]);
    server.line("The store is paused");
    let error = server.run(&["receive", "jobs"]).failed(1);
    assert!(error.contains("paused"), "{error}");
    server.run(&["resume"]).ok();
    assert!(server.run(&["receive", "jobs"]).ok().contains("kept"));
}

#[test]
fn destructive_commands_need_yes_without_a_terminal() {
    let server = Server::start();
    server.run(&["send", "jobs", "--create", "kept"]).ok();
    for args in [["queue", "delete", "jobs"], ["queue", "purge", "jobs"]] {
        let error = server.run(&args).failed(2);
        assert!(error.contains("1 message") && error.contains("add --yes"), "{error}");
    }
    assert!(server.run(&["receive", "jobs"]).ok().contains("kept"));
}

#[test]
fn failures_say_what_happened_and_what_to_do_in_one_line() {
    let server = Server::start();
    let error = server.run(&["send", "nowhere", "x"]).failed(1);
    assert!(
        error.contains("queue nowhere does not exist; --create makes it, `hapax queues` lists"),
        "{error}"
    );
    let cases: [&[&str]; 4] = [
        &["queue", "delete", "nope", "--yes"],
        &["queue", "show", "nope"],
        &["receive", "nope"],
        &["dead", "list", "nope"],
    ];
    for args in cases {
        let error = server.run(args).failed(1);
        assert_eq!(
            error, "error: queue nope does not exist; `hapax queues` lists those that do\n",
            "{args:?}"
        );
    }
    let error = server.run(&["queue", "create", "jobs", "--lease", "13h"]).failed(1);
    assert!(error.contains("lease: 13h is out of range; use 0 to 12h"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let error = run(&folder, &["queues", "--endpoint", "http://127.0.0.1:1"]).failed(1);
    assert!(error.contains("nothing answers at http://127.0.0.1:1 "), "{error}");
    assert_eq!(error.matches("http://127.0.0.1:1").count(), 1, "said once: {error}");
}

#[test]
fn a_client_command_makes_no_store() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [&[&str]; 3] = [&["queues"], &["send", "jobs", "--create", "x"], &["backup", "copy.db"]];
    for args in cases {
        let error = run(&folder, &[args, &["--endpoint", "embedded:./typo"]].concat()).failed(1);
        let expected = "no store in ./typo; `hapax serve --store embedded:./typo` makes one";
        assert!(error.contains(expected), "{args:?}: {error}");
        assert!(!folder.path().join("typo").exists());
    }
    let folder = Server::start().stop();
    run(&folder, &["send", "jobs", "--create", "x", "--endpoint", "embedded:./hapax-data"]).ok();
}

#[test]
fn a_server_with_keys_asks_for_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let config = "[[auth.keys]]\nid = \"AK\"\nsecret = \"hunter2\"\n";
    std::fs::write(folder.path().join("hapax.toml"), config).unwrap();
    let server = Server::start_in(folder, &["--config", "hapax.toml"]);
    let error = server.run(&["queues"]).failed(1);
    assert!(error.contains("wants a token") && error.contains("HAPAX_TOKEN"), "{error}");
}

#[test]
fn a_body_that_is_too_large_is_not_called_a_batch() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    for bytes in [2 << 20, 9 << 20] {
        std::fs::write(server.folder.path().join("body"), vec![b'x'; bytes]).unwrap();
        let mut command = hapax(&server.folder, &["send", "jobs", "-", "--endpoint", &server.endpoint]);
        command.stdin(std::fs::File::open(server.folder.path().join("body")).unwrap());
        let error = Done::new(command.output().unwrap()).failed(1);
        assert!(
            error.contains(&format!("the message has {bytes} bytes, the queue allows 1048576")),
            "{error}"
        );
    }
}

#[test]
fn wrong_usage_ends_with_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [&[&str]; 7] = [
        &["no-such-command"],
        &["queue", "create", "bad name"],
        &["receive", "jobs", "--wait", "30"],
        &["send", "jobs", "x", "--priority", "10"],
        &["parked", "release", "jobs"],
        &["serve", "--listen", "localhost"],
        &["serve", "--key-secret-file", "x"],
    ];
    for args in cases {
        let done = run(&folder, args);
        assert_eq!(done.code, Some(2), "{args:?}: {done:?}");
    }
}

#[test]
fn completions_are_generated_for_each_shell() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&folder, &["completions", shell]).ok();
        assert!(script.contains("hapax") && script.contains("redrive"), "{shell}");
    }
}

#[test]
fn one_command_makes_a_queue_and_the_one_for_its_dead_letters() {
    let server = Server::start();
    for (queue, dead) in [("mails", "mails-dead"), ("orders.fifo", "orders-dead.fifo")] {
        let made = server.run(&["queue", "create", queue, "--dead-letters"]);
        assert_eq!(made.stderr, "", "our own example has no warning");
        assert_eq!(made.ok(), format!("{queue} created; its dead letters go to {dead}\n"));
        let again = server.run(&["queue", "create", queue, "--dead-letters", "--json"]).json();
        assert_eq!(again, serde_json::json!({ "name": queue, "created": false, "dead_letters": dead }));
        let config = server.run(&["queue", "show", queue, "--json"]).json()["config"].clone();
        assert_eq!(config["dead_letter"]["queue"], dead);
        let kept = server.run(&["queue", "show", dead, "--json"]).json()["config"]["retention_ms"].clone();
        assert_eq!(kept, 1_209_600_000);
    }
    let error = server.run(&["queue", "create", "mails", "--dead-letters", "--lease", "7s"]).failed(1);
    assert!(error.contains("its lease_ms differs") && error.contains("hapax queue set mails"), "{error}");
    let doctor = server.run(&["doctor"]).ok();
    assert!(!doctor.contains("warning\t"), "{doctor}");
}

/// Messages that were received are shown, and acked if asked for, even if a later request of the same command fails.
#[test]
fn messages_received_before_a_failure_are_not_lost() {
    let server = Server::start();
    let bodies: Vec<String> = (0..150).map(|number| format!("body-{number}.")).collect();
    std::fs::write(server.folder.path().join("bodies"), bodies.join("\n")).unwrap();
    for (queue, args, in_flight) in [
        ("shown", &[][..], 100),
        ("shown-json", &["--json"], 100),
        ("acked", &["--ack"], 0),
        ("acked-json", &["--ack", "--json"], 0),
    ] {
        server.run(&["send", queue, "--create", "--file", "bodies"]).ok();
        let mut receives = 0;
        let endpoint = relay(&server, move |line| {
            receives += usize::from(line.contains("/receive "));
            line.contains("/receive ") && receives > 1
        });
        let all = [&["receive", queue, "--max", "150", "--endpoint", &endpoint], args].concat();
        let done = run(&server.folder, &all);
        let shown = bodies.iter().filter(|body| done.stdout.contains(*body)).count();
        assert_eq!(shown, 100, "{queue}: {done:?}");
        let error = done.failed(1);
        assert!(error.contains("overloaded"), "{error}");
        let stats = server.run(&["queue", "show", queue, "--json"]).json()["stats"].clone();
        assert_eq!(
            (&stats["ready"], &stats["in_flight"]),
            (&50.into(), &in_flight.into()),
            "{queue}: {stats}"
        );
    }
    // Without anything received there is nothing to show, in either form.
    let endpoint = relay(&server, |line| line.contains("/receive "));
    for args in [&[][..], &["--json"]] {
        let done = run(&server.folder, &[&["receive", "shown", "--endpoint", &endpoint], args].concat());
        assert_eq!(done.stdout, "", "{args:?}");
        assert!(done.failed(1).contains("overloaded"));
    }
}
