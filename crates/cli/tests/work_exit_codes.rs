//! `hapax work`: the exit code of a command determines the end of its delivery.

mod common;

use std::process::Stdio;

use common::{Done, Server, hapax};
use serde_json::Value;

/// Runs `hapax work` to its end; returns one JSON line per delivery.
fn work(server: &Server, args: &[&str]) -> Vec<Value> {
    let done = server.run(&[&["work", "--json"], args].concat());
    let text = done.ok();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn sh<'a>(args: &[&'a str], script: &'a str) -> Vec<&'a str> {
    [&["jobs", "--until-empty"], args, &["--", "sh", "-c", script]].concat()
}

fn jobs(tier: &str) -> Server {
    let server = Server::start();
    server.run(&["queue", "create", "dead"]).ok();
    // Retries without delay, because --until-empty does not wait for delayed messages.
    let policy = ["--tier", tier, "--dead-letter", "dead", "--max-attempts", "3", "--retry-base", "0s"];
    server.run(&[&["queue", "create", "jobs"][..], &policy].concat()).ok();
    server
}

fn entry(server: &Server, key: &str) -> Value {
    server.run(&["ledger", "show", "--queue", "jobs", key, "--json"]).json()
}

#[test]
fn the_output_of_the_command_is_the_outcome() {
    let server = jobs("effectively-once");
    for (key, script, expected) in [
        ("json", "printf '{\"charge\": %s}\\n' \"$(cat)\"", serde_json::json!({ "charge": 7 })),
        ("text", "echo paid; echo twice", "paid\ntwice".into()),
        ("nothing", "true", Value::Null),
    ] {
        server.run(&["send", "jobs", "7", "--key", key]).ok();
        let lines = work(&server, &sh(&[], script));
        assert_eq!((&lines[0]["ended"], &lines[0]["key"]), (&"done".into(), &key.into()));
        let entry = entry(&server, key);
        assert_eq!(entry["state"], "completed");
        assert_eq!(entry["outcome"]["value"], expected, "{entry}");
    }
    // The limit is 1 MiB: of a larger outcome only a marker is kept, and the command is not run again.
    server.run(&["send", "jobs", "7", "--key", "large"]).ok();
    let lines = work(&server, &sh(&[], "head -c 3000000 /dev/zero | tr '\\0' x"));
    assert_eq!(lines[0]["ended"], "done");
    assert!(lines[0]["detail"].as_str().unwrap().contains("2.9 MiB is too large"), "{lines:?}");
    let entry = entry(&server, "large");
    assert_eq!((&entry["state"], &entry["outcome"]["value"]), (&"completed".into(), &Value::Null));
}

/// Something that the command started has left its process group and holds its output open: what was read so far must not
/// pass for all of it.
#[test]
fn output_that_does_not_end_with_its_command_is_not_recorded_as_whole() {
    let server = jobs("effectively-once");
    server.run(&["send", "jobs", "7", "--key", "open"]).ok();
    // The command ends once the other process has left its group; before, it would be killed with it.
    let folder = tempfile::tempdir().unwrap();
    let left = folder.path().join("left").display().to_string();
    let script = format!(
        "printf 1; setsid sh -c 'touch {left}; sleep 8' & while [ ! -e {left} ]; do sleep 0.01; done; exit 0"
    );
    let lines = work(&server, &sh(&[], &script));
    assert_eq!(lines[0]["ended"], "done", "{lines:?}");
    assert!(lines[0]["detail"].as_str().unwrap().contains("holds its output open"), "{lines:?}");
    let entry = entry(&server, "open");
    assert_eq!((&entry["state"], &entry["outcome"]["value"]), (&"completed".into(), &Value::Null), "{entry}");
}

#[test]
fn a_duplicate_is_replayed_without_running_the_command() {
    let server = jobs("effectively-once");
    server.run(&["send", "jobs", "7", "--key", "order-7"]).ok();
    let lines = work(&server, &sh(&[], "echo ran >> runs; echo '\"receipt\"'"));
    assert_eq!(lines[0]["ended"], "done");
    for _ in 0..3 {
        server.run(&["send", "jobs", "7", "--key", "order-7"]).ok();
    }
    let lines = work(&server, &sh(&["--concurrency", "4"], "echo ran >> runs"));
    let ended: Vec<_> = lines.iter().map(|line| (&line["ended"], &line["ran"])).collect();
    assert_eq!(ended, [(&"replayed".into(), &false.into()); 3]);
    let runs = std::fs::read_to_string(server.folder.path().join("runs")).unwrap();
    assert_eq!(runs, "ran\n");
    assert_eq!(server.run(&["queues"]).ok().lines().next().unwrap(), "dead\t0\t0\t0\t0\t0\t-");
}

#[test]
fn a_duplicate_of_what_runs_here_is_not_put_back_for_a_whole_lease() {
    let server = jobs("effectively-once");
    for _ in 0..2 {
        server.run(&["send", "jobs", "7", "--key", "order-7"]).ok();
    }
    // Both are received at the same time; the second finds the key in progress and waits for the first to end.
    let lines = work(&server, &sh(&["--concurrency", "2", "--lease", "1h"], "sleep 0.2; echo ran >> runs"));
    let ended: Vec<_> = lines.iter().map(|line| line["ended"].as_str().unwrap()).collect();
    assert_eq!(ended, ["done", "replayed"], "{lines:?}");
    assert_eq!(std::fs::read_to_string(server.folder.path().join("runs")).unwrap(), "ran\n");
}

#[test]
fn seventy_five_says_that_nothing_happened_and_is_retried() {
    let server = jobs("effectively-once");
    server.run(&["send", "jobs", "x", "--key", "k"]).ok();
    let script =
        "test $HAPAX_TAKEOVER = 0 || exit 1; test $HAPAX_ATTEMPT = 2 && exit 0; echo busy >&2; exit 75";
    let lines = work(&server, &sh(&[], script));
    let ended: Vec<_> = lines.iter().map(|line| (&line["ended"], &line["attempt"])).collect();
    assert_eq!(ended, [(&"retried".into(), &1.into()), (&"done".into(), &2.into())], "{lines:?}");
    assert_eq!(lines[0]["detail"], "busy", "the command's own words");
}

#[test]
fn sixty_five_rejects_at_once_and_duplicates_are_rejected_too() {
    let server = jobs("effectively-once");
    for _ in 0..2 {
        server.run(&["send", "jobs", "x", "--key", "k"]).ok();
    }
    let lines = work(&server, &sh(&[], "echo ran >> runs; echo no such account >&2; exit 65"));
    // The second may arrive while the first is being recorded; then it is deferred briefly.
    let ended = lines.iter().filter(|line| line["ended"] != "deferred");
    let ended: Vec<_> = ended.map(|line| (&line["ended"], &line["ran"])).collect();
    assert_eq!(ended, [(&"rejected".into(), &true.into()), (&"rejected".into(), &false.into())], "{lines:?}");
    let dead = server.run(&["dead", "list", "dead", "--json"]).json();
    assert_eq!(dead.as_array().unwrap().len(), 2);
    assert_eq!(dead[0]["dead"]["error"], "no such account");
    assert_eq!(std::fs::read_to_string(server.folder.path().join("runs")).unwrap(), "ran\n");
    assert_eq!(entry(&server, "k")["state"], "failed");
}

#[test]
fn what_was_rejected_and_parked_runs_again_once_it_is_released() {
    let server = Server::start();
    let policy = ["--tier", "effectively-once", "--retry-base", "0s"];
    server.run(&[&["queue", "create", "jobs"][..], &policy].concat()).ok();
    server.run(&["send", "jobs", "x", "--key", "k"]).ok();
    let lines = work(&server, &sh(&[], "exit 65"));
    assert_eq!((&lines[0]["ended"], &lines[0]["ran"]), (&"rejected".into(), &true.into()), "{lines:?}");
    assert_eq!(entry(&server, "k")["state"], "failed");
    server.run(&["parked", "release", "jobs", "--all"]).ok();
    let lines = work(&server, &sh(&[], "exit 0"));
    assert_eq!((&lines[0]["ended"], &lines[0]["ran"]), (&"done".into(), &true.into()), "{lines:?}");
    assert_eq!(entry(&server, "k")["state"], "completed");
}

#[test]
fn other_codes_are_in_doubt_unless_told_otherwise() {
    // A doubt is retried, and the next run is a takeover.
    let server = jobs("effectively-once");
    server.run(&["send", "jobs", "x", "--key", "k"]).ok();
    let script = "test $HAPAX_TAKEOVER = 1 && exit 0; echo half done >&2; exit 3";
    let lines = work(&server, &sh(&[], script));
    let ended: Vec<_> = lines.iter().map(|line| &line["ended"]).collect();
    assert_eq!(ended, ["retried", "done"], "{lines:?}");
    assert_eq!(lines[0]["detail"], "exit code 3: half done");

    // Or the message is parked until an operator decides.
    server.run(&["send", "jobs", "x", "--key", "parked"]).ok();
    let lines = work(&server, &sh(&["--on-doubt", "park"], "exit 3"));
    assert_eq!(lines[0]["ended"], "parked");
    assert_eq!(entry(&server, "parked")["state"], "in_doubt");
    server.run(&["ledger", "resolve", "--queue", "jobs", "parked", "--as", "absent"]).ok();
    let lines = work(&server, &sh(&["--on-doubt", "park"], "exit 0"));
    assert_eq!(lines[0]["ended"], "done", "released by the decision");

    // The exit code may be declared to mean that nothing happened.
    server.run(&["send", "jobs", "x", "--key", "retry"]).ok();
    let script = "test $HAPAX_TAKEOVER = 0 || exit 65; test $HAPAX_ATTEMPT = 2 && exit 0; exit 3";
    let lines = work(&server, &sh(&["--on-error", "retry"], script));
    assert_eq!(lines.last().unwrap()["ended"], "done", "{lines:?}");
    server.run(&["send", "jobs", "x", "--key", "reject"]).ok();
    let lines = work(&server, &sh(&["--on-error", "reject"], "exit 3"));
    assert_eq!(lines[0]["ended"], "rejected");
}

#[test]
fn a_command_that_is_killed_leaves_doubt_and_dies_by_its_attempts() {
    let server = jobs("effectively-once");
    server.run(&["send", "jobs", "x", "--key", "k"]).ok();
    // Even if every exit code is declared to mean that nothing happened.
    let lines = work(&server, &sh(&["--on-error", "retry"], "echo $HAPAX_TAKEOVER >> runs; kill -9 $$"));
    let ended: Vec<_> = lines.iter().map(|line| &line["ended"]).collect();
    assert_eq!(ended, ["retried", "retried", "dead"], "{lines:?}");
    assert!(lines.iter().all(|line| line["detail"] == "killed by signal 9"), "{lines:?}");
    assert_eq!(std::fs::read_to_string(server.folder.path().join("runs")).unwrap(), "0\n1\n1\n");
    let dead = server.run(&["dead", "list", "dead", "--json"]).json();
    assert_eq!(dead[0]["dead"]["attempts"], 3, "a crash-looping message reaches the dead letters: {dead}");
}

#[test]
fn a_large_body_causes_no_deadlock() {
    let server = jobs("at-least-once");
    let body = "x".repeat(1 << 20);
    for script in [
        // Reads nothing, writes nothing.
        "exit 0",
        // Writes much output before it reads.
        "head -c 2000000 /dev/zero; head -c 2000000 /dev/zero >&2; test $(wc -c) = 1048576",
        // Closes its input and continues.
        "exec <&-; sleep 0.1",
    ] {
        std::fs::write(server.folder.path().join("body"), &body).unwrap();
        let mut command = hapax(&server.folder, &["send", "jobs", "-", "--endpoint", &server.endpoint]);
        command.stdin(std::fs::File::open(server.folder.path().join("body")).unwrap());
        Done::new(command.output().unwrap()).ok();
        let lines = work(&server, &sh(&["--on-error", "reject", "--run-max", "20s"], script));
        assert_eq!(lines[0]["ended"], "done", "{script}: {lines:?}");
    }
}

#[test]
fn a_delivery_is_described_in_the_environment() {
    let server = jobs("effectively-once");
    let attributes = ["--attribute", "trace.id=7", "--attribute", "Kind=a b", "--key", "order-7"];
    let sent = server.run(&[&["send", "jobs", "x"], &attributes[..]].concat()).ok();
    let mut command = hapax(
        &server.folder,
        &[
            "work",
            "jobs",
            "--until-empty",
            "--lease",
            "1m",
            "--endpoint",
            &server.endpoint,
            "--",
            "sh",
            "-c",
            "env | grep ^HAPAX_ | sort > env",
        ],
    );
    command.env("HAPAX_GROUP", "inherited").env("HAPAX_ATTR_OLD", "inherited").stdout(Stdio::null());
    let before_ms = now_ms();
    Done::new(command.output().unwrap()).ok();
    let env = std::fs::read_to_string(server.folder.path().join("env")).unwrap();
    let value = |name: &str| {
        let of = |line: &'static str| line.split_once('=').filter(|(found, _)| *found == name);
        let found = env.clone().leak().lines().find_map(of).map(|(_, value)| value);
        found.unwrap_or_else(|| panic!("{name}: {env}"))
    };
    assert_eq!(value("HAPAX_MESSAGE_ID"), sent.trim());
    assert_eq!((value("HAPAX_QUEUE"), value("HAPAX_IDEMPOTENCY_KEY")), ("jobs", "order-7"));
    assert_eq!((value("HAPAX_ATTEMPT"), value("HAPAX_TAKEOVER")), ("1", "0"));
    assert_eq!((value("HAPAX_ATTR_TRACE_ID"), value("HAPAX_ATTR_KIND")), ("7", "a b"));
    assert!(value("HAPAX_DERIVED_KEY").starts_with("hapax-"));
    assert_eq!(
        value("HAPAX_FENCE").parse::<u64>().unwrap(),
        entry(&server, "order-7")["fence"].as_u64().unwrap()
    );
    let deadline_ms: u64 = value("HAPAX_LEASE_DEADLINE").parse().unwrap();
    assert!((before_ms + 30_000..=now_ms() + 60_000).contains(&deadline_ms), "{deadline_ms}");
    assert!(!env.contains("inherited"), "{env}");
}

fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_millis() as u64
}

#[test]
fn a_tier_that_cannot_hold_is_refused_by_its_code_before_anything_is_received() {
    let server = jobs("at-least-once");
    server.run(&["send", "jobs", "x"]).ok();
    let error = server.run(&["work", "jobs", "--tier", "transactional", "--", "true"]).failed(1);
    assert!(error.contains("the tier cannot hold: ") && error.contains("docs/errors/"), "{error}");
    let code = error.split("cannot hold: ").nth(1).unwrap().split(':').next().unwrap();
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/errors/{code}.md"));
    assert!(page.exists(), "{code}");
    assert!(server.run(&["receive", "jobs", "--json"]).json()[0]["attempt"] == 1);
}

#[test]
fn each_tier_runs_the_command() {
    for tier in ["at-most-once", "at-least-once", "effectively-once"] {
        let server = jobs(tier);
        server.run(&["send", "jobs", "x"]).ok();
        let line = server.run(&["work", "jobs", "--once", "--", "true"]).ok();
        assert!(line.starts_with("done\t"), "{tier}: {line}");
        assert_eq!(server.run(&["work", "jobs", "--until-empty", "--", "true"]).ok(), "");
    }
}
