//! A collector gets the spans of one message: its send, the delivery to a worker that is killed, and, in a trace of their own that
//! is linked to the send, the second delivery with its claim, run and settle.

mod common;

use std::process::Stdio;

use common::collector::{Collector, Span};
use common::{Server, hapax};

#[test]
fn send_crash_redelivery_claim_run_and_settle() {
    let collector = Collector::start();
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start_in(folder, &["--otlp", &collector.url, "--traces-per-mille", "1000"]);
    let create =
        ["queue", "create", "pay", "--tier", "effectively-once", "--lease", "1s", "--retry-base", "0"];
    server.run(&create).ok();
    server.run(&["send", "pay", "one"]).ok();
    let send = collector.wait_for("send pay", |_| true);
    assert!(send.parent.is_empty() && send.kind == 4 && send.end_ns >= send.start_ns, "{send:?}");
    assert_eq!(send.attributes["messaging.system"], "hapax");
    let id = send.attributes["messaging.message.id"].clone();

    let work = |command: &str| {
        let args = ["work", "pay", "--once", "--otlp", &collector.url, "--", "sh", "-c", command];
        let mut child = hapax(&server.folder, &args);
        child.env("HAPAX_ENDPOINT", &server.endpoint).stdout(Stdio::piped()).stderr(Stdio::null());
        child.spawn().unwrap()
    };
    let mut killed = work("sleep 600");
    let first = collector.wait_for("receive pay", |span| span.trace == send.trace);
    assert_eq!((&first.parent, &first.attributes["hapax.delivery"]), (&send.id, &"1".to_owned()));
    let claim = collector.wait_for("claim pay", |span| span.trace == send.trace);
    assert_eq!((&claim.parent, &claim.attributes["hapax.result"]), (&first.id, &"granted".to_owned()));
    killed.kill().unwrap();
    killed.wait().unwrap();

    let mut second = work("echo $HAPAX_ATTR_TRACEPARENT");
    assert!(second.wait().unwrap().success());
    let again = collector.wait_for("receive pay", |span| span.attributes["hapax.delivery"] == "2");
    assert_ne!(again.trace, send.trace, "a trace of its own");
    assert!(again.parent.is_empty() && again.links == [(send.trace.clone(), send.id.clone())], "{again:?}");
    assert_eq!(again.attributes["messaging.message.id"], id);
    let is_child = |span: &Span| span.trace == again.trace && span.parent == again.id;
    let has = |span: &Span, result: &str| is_child(span) && span.attributes["hapax.result"] == result;
    collector.wait_for("claim pay", |span| has(span, "taken over"));
    collector.wait_for("settle pay", |span| has(span, "acked"));
    let run = collector.wait_for("process pay", is_child);
    assert!(
        run.kind == 5 && run.end_ns > run.start_ns && run.attributes["messaging.message.id"] == id,
        "{run:?}"
    );
}

/// A sender that is instrumented decides: its context stays in the message, and its choice not to record is kept.
#[test]
fn the_context_of_the_sender_is_kept() {
    let collector = Collector::start();
    let server = Server::start_in(tempfile::tempdir().unwrap(), &["--otlp", &collector.url]);
    server.run(&["queue", "create", "pay"]).ok();
    let context =
        |flags: &str| format!("traceparent=00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
    server.run(&["send", "pay", "quiet", "--attribute", &context("00")]).ok();
    server.run(&["send", "pay", "traced", "--attribute", &context("01")]).ok();
    server.run(&["receive", "pay", "--max", "10", "--ack"]).ok();
    let parent = vec![0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7];
    let send = collector.wait_for("send pay", |_| true);
    let received = collector.wait_for("receive pay", |_| true);
    assert_eq!((&send.parent, &received.parent), (&parent, &parent));
    assert_eq!((send.trace[0], &received.trace), (0x4b, &send.trace));
    collector.wait_for("settle pay", |span| span.parent == received.id);
    let sends = collector.spans.lock().unwrap().iter().filter(|span| span.name == "send pay").count();
    assert_eq!(sends, 1, "the other sender did not record");
}
