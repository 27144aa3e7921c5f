//! `queue pause`, `queue resume`, `queue discard`, `send --deliver-at` and `receive --max`: what they do, and what they say
//! to wrong input.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, SystemTime};

use common::{Server, run};
use serde_json::json;

/// A time this many seconds from now, as people write it.
fn in_seconds(seconds: u64) -> String {
    let at = SystemTime::now() + Duration::from_secs(seconds);
    let at = i64::try_from(at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()).unwrap();
    let days = at.div_euclid(86_400);
    // Days to a date, counted from 1 March of year 0.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let second = at.rem_euclid(86_400);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[test]
fn a_paused_queue_hands_out_nothing_until_it_is_resumed() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let paused = server.run(&["queue", "pause", "jobs", "--reason", "upgrade"]).ok();
    assert_eq!(paused, "jobs is paused\n");
    assert_eq!(
        server.run(&["queue", "pause", "jobs", "--json"]).json(),
        json!({"name": "jobs", "paused": true})
    );
    server.run(&["send", "jobs", "x"]).ok();
    let received = server.run(&["receive", "jobs"]);
    assert!(received.stdout.is_empty(), "{received:?}");
    assert!(received.stderr.contains("jobs is paused"), "an empty answer is explained: {received:?}");
    assert!(server.run(&["queue", "show", "jobs"]).ok().contains("paused\tsince "));
    let listed = server.run(&["queues", "--json"]).json();
    assert!(listed[0]["paused"].is_object(), "{listed}");
    // Through a restart, and with the store itself while no server runs.
    let folder = server.stop();
    let store = ["--endpoint", "embedded:./hapax-data"];
    let shown = run(&folder, &[&["queue", "show", "jobs"][..], &store].concat()).ok();
    assert!(shown.contains("paused\tsince "), "{shown}");
    let server = Server::start_in(folder, &[]);
    assert_eq!(server.run(&["receive", "jobs"]).ok(), "");
    assert_eq!(server.run(&["queue", "resume", "jobs"]).ok(), "jobs hands out messages\n");
    assert!(server.run(&["receive", "jobs"]).ok().contains('x'));
    assert!(server.run(&["queue", "show", "jobs"]).ok().contains("paused\tno\n"));
}

#[test]
fn pausing_and_resuming_say_what_is_wrong() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    for verb in ["pause", "resume"] {
        let error = server.run(&["queue", verb, "nowhere"]).failed(1);
        assert!(error.contains("queue nowhere does not exist; `hapax queues` lists"), "{error}");
        let error = server.run(&["queue", verb, "not a name"]);
        assert!(error.code == Some(2) && error.stderr.contains("not a name"), "{error:?}");
    }
    let long = "x".repeat(100_000);
    let error = server.run(&["queue", "pause", "jobs", "--reason", &long]);
    assert!(error.code == Some(2) && error.stderr.contains("use at most 1000"), "{:?}", error.code);
    // The server does not trust its clients with that.
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let body = json!({"reason": long}).to_string();
    let head = "POST /v1/queues/jobs/pause HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("use at most 1000"), "{answer}");
    assert!(server.run(&["queue", "show", "jobs"]).ok().contains("paused\tno\n"));
    // A queue that is not paused stays as it is.
    server.run(&["queue", "resume", "jobs"]).ok();
}

#[test]
fn discarding_deletes_what_waits_and_says_what_it_left() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let id = |body: &str| server.run(&["send", "jobs", body]).ok().trim().to_owned();
    let (first, second) = (id("first"), id("second"));
    let asked = server.run(&["queue", "discard", "jobs", &first]).failed(2);
    assert!(asked.contains("1 message") && asked.contains("--yes"), "{asked}");
    assert_eq!(server.run(&["queue", "discard", "jobs", &first, "--yes"]).ok(), "1 message deleted\n");
    assert!(server.run(&["receive", "jobs"]).ok().contains("second"));
    // It is in flight now: left, and said so.
    let left = server.run(&["queue", "discard", "jobs", &second, "--yes"]);
    assert_eq!(left.stdout, "0 messages deleted\n", "{left:?}");
    assert!(left.stderr.contains(&format!("message {second} is in flight and was left")), "{left:?}");
    let json = server.run(&["queue", "discard", "jobs", &second, "--yes", "--json"]).json();
    assert_eq!(json, json!({"name": "jobs", "discarded": 0, "in_flight": [second]}));
    // What is not there is told apart from what was deleted.
    let missing = server.run(&["queue", "discard", "jobs", &first, "--yes"]);
    assert!(missing.stderr.contains("1 message was not found"), "{missing:?}");
}

#[test]
fn discarding_says_what_is_wrong() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let id = server.run(&["send", "jobs", "x"]).ok();
    let error = server.run(&["queue", "discard", "nowhere", id.trim(), "--yes"]).failed(1);
    assert!(error.contains("queue nowhere does not exist"), "{error}");
    let error = server.run(&["queue", "discard", "jobs", "7", "--yes"]);
    assert!(error.code == Some(2) && error.stderr.contains("'7'"), "{error:?}");
    assert_eq!(server.run(&["queue", "discard", "jobs", "--yes"]).code, Some(2));
    assert!(server.run(&["receive", "jobs"]).ok().contains('x'), "nothing was deleted");
}

#[test]
fn a_message_for_later_is_delayed_until_then() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    server.run(&["send", "jobs", "later", "--deliver-at", &in_seconds(3600)]).ok();
    assert_eq!(server.run(&["receive", "jobs"]).ok(), "");
    assert_eq!(server.run(&["queues", "--json"]).json()[0]["stats"]["delayed"], 1);
    // A time that has passed means at once; so does one that comes while the receive waits.
    server.run(&["send", "jobs", "past", "--deliver-at", "2020-01-01T00:00:00Z"]).ok();
    assert!(server.run(&["receive", "jobs", "--ack"]).ok().contains("past"));
    server.run(&["send", "jobs", "soon", "--deliver-at", &in_seconds(2)]).ok();
    assert!(server.run(&["receive", "jobs", "--wait", "20s"]).ok().contains("soon"));
}

#[test]
fn a_delivery_time_that_cannot_be_is_refused() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    server.run(&["queue", "create", "orders.fifo"]).ok();
    let send = |queue: &str, at: &str, more: &[&str]| {
        server.run(&[&["send", queue, "x", "--deliver-at", at][..], more].concat())
    };
    for at in ["tomorrow", "2026-13-01T00:00:00Z", "2026-12-24", "2026-12-24T18:00:00", "1798135200000", ""] {
        let error = send("jobs", at, &[]);
        let says = "write it as 2026-12-24T18:00:00Z";
        assert!(error.code == Some(2) && error.stderr.contains(says), "{at}: {error:?}");
    }
    let error = send("jobs", &in_seconds(367 * 86_400), &[]).failed(1);
    assert!(error.contains("366 days") || error.contains("366d"), "{error}");
    let error = send("orders.fifo", &in_seconds(60), &["--group", "g", "--dedup", "d"]).failed(1);
    assert!(error.contains("FIFO"), "{error}");
    let error = send("jobs", &in_seconds(60), &["--delay", "5m"]);
    assert!(error.code == Some(2) && error.stderr.contains("--delay"), "{error:?}");
    assert_eq!(server.run(&["queues", "--json"]).json()[0]["stats"]["delayed"], 0);
}

#[test]
fn a_receive_takes_as_many_as_asked_for_within_its_limit() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let lines = "a line\n".repeat(2100);
    std::fs::write(server.folder.path().join("lines.txt"), lines).unwrap();
    server.run(&["send", "jobs", "--file", "lines.txt"]).ok();
    assert_eq!(server.run(&["receive", "jobs", "--max", "2000", "--ack"]).ok().lines().count(), 2000);
    assert_eq!(server.run(&["receive", "jobs", "--max", "2000", "--ack"]).ok().lines().count(), 100);
    for max in ["0", "10001", "18446744073709551615", "-1", "many"] {
        let error = server.run(&["receive", "jobs", "--max", max]);
        assert_eq!(error.code, Some(2), "{max}: {error:?}");
        assert!(error.stderr.contains("10000") || max == "-1" || max == "many", "{max}: {error:?}");
    }
}
