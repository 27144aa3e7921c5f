//! One trace leads from what caused a message to the run of its handler: from a transaction through outbox, relay and queue; and from
//! a request through the proxy and the service behind it. Processes are the real ones, the collector is the test's.

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::process::{ExitCode, Stdio};

use common::collector::{Collector, Span};
use common::postgres::{self, database};
use common::proxied::{Proxy, request};
use common::{Server, hapax, run};
use hapax_faults::{PostgresServer, Process};
use libtest_mimic::{Failed, Trial};
use tempfile::{TempDir, tempdir};

const CALLER: [u8; 8] = [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7];

/// A context of a caller, and its trace.
fn caller(trace: &str, flags: &str) -> (String, Vec<u8>) {
    let bytes = (0..32).step_by(2).map(|at| u8::from_str_radix(&trace[at..at + 2], 16).unwrap()).collect();
    (format!("00-{trace}-00f067aa0ba902b7-{flags}"), bytes)
}

fn main() -> ExitCode {
    let of_request = Trial::test("from_a_request_through_proxy_and_service", || {
        from_a_request_through_proxy_and_service();
        Ok::<_, Failed>(())
    });
    let over_tls = Trial::test("over_grpc_with_tls_to_a_collector_that_is_trusted", || {
        over_grpc_with_tls();
        Ok::<_, Failed>(())
    });
    let tests: &[postgres::Test] = &[
        ("from_a_transaction_through_outbox_and_relay", from_a_transaction),
        ("from_a_transaction_through_a_relay_of_the_server", through_a_relay_of_the_server),
    ];
    postgres::main_with(tests, vec![of_request, over_tls])
}

/// Works on one message and ends; its spans are exported then.
fn work(server: &Server, collector: &Collector, queue: &str) {
    let args = ["work", queue, "--once", "--otlp", &collector.url, "--", "true"];
    let mut worker = hapax(&server.folder, &args);
    worker.env("HAPAX_ENDPOINT", &server.endpoint).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(worker.status().unwrap().success());
}

/// The spans of one message at its consumer are below `parent`: delivery, then claim, run and settle.
fn consumed(collector: &Collector, queue: &str, parent: &Span) {
    let receive = collector
        .wait_for(&format!("receive {queue}"), |span| span.trace == parent.trace && span.parent == parent.id);
    for (name, result) in [("claim", Some("granted")), ("process", None), ("settle", Some("acked"))] {
        let span = collector.wait_for(&format!("{name} {queue}"), |span| span.parent == receive.id);
        assert_eq!(span.trace, parent.trace);
        assert_eq!(span.attributes.get("hapax.result").map(String::as_str), result, "{span:?}");
    }
}

fn from_a_transaction(postgres: &'static PostgresServer) {
    let collector = Collector::start();
    let (url, name) = database(postgres);
    let folder: TempDir = tempdir().unwrap();
    run(&folder, &["migrate", "--store", &url]).ok();
    // It traces nothing by itself: every span below comes from the transaction's context.
    let server = Server::start_in(tempdir().unwrap(), &["--otlp", &collector.url, "--traces-per-mille", "0"]);
    server.run(&["queue", "create", "orders", "--tier", "effectively-once"]).ok();
    let to = ["--to", &server.endpoint, "--queue", "orders", "--otlp", &collector.url];
    let mut command = hapax(&folder, &["relay", "--from", &url]);
    let relay = Process::start(command.args(to)).unwrap();
    relay.wait_for_line("Relay ");

    let (context, trace) = caller("4bf92f3577b34da6a3ce929d0e0e4736", "01");
    let (quiet, _) = caller("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "00");
    for context in [quiet, context] {
        let enqueue = format!(
            "SELECT hapax.enqueue('orders.placed', 'order-7', 'seven'::text, p_traceparent => '{context}')"
        );
        postgres.sql(&name, &enqueue).unwrap();
    }
    published_and_consumed(&server, &collector, &trace);
    let spans = collector.spans.lock().unwrap();
    assert!(
        spans.iter().all(|span| span.trace == trace),
        "the other transaction is not recorded: {spans:#?}"
    );
}

/// Two messages were enqueued, one of them in this trace: it is published, sent and consumed in it.
fn published_and_consumed(server: &Server, collector: &Collector, trace: &Vec<u8>) {
    let publish = collector.wait_for("publish orders.placed", |_| true);
    assert_eq!((&publish.trace, &publish.parent[..]), (trace, &CALLER[..]), "{publish:?}");
    assert_eq!(publish.attributes["hapax.result"], "published");
    assert!(publish.attributes["hapax.outbox.waited_ms"].parse::<u64>().is_ok());
    let send = collector.wait_for("send orders", |_| true);
    assert_eq!((&send.trace, &send.parent), (trace, &publish.id), "{send:?}");
    for _ in 0..2 {
        work(server, collector, "orders");
    }
    consumed(collector, "orders", &publish);
}

/// Outbox, relay and queue are in one process and one database.
fn through_a_relay_of_the_server(postgres: &'static PostgresServer) {
    let collector = Collector::start();
    let (url, name) = database(postgres);
    let folder: TempDir = tempdir().unwrap();
    run(&folder, &["migrate", "--store", &url]).ok();
    run(&folder, &["queue", "create", "orders", "--tier", "effectively-once", "--endpoint", &url]).ok();
    let toml = format!("[store]\nurl = \"{url}\"\n[[relay]]\nname = \"orders\"\nqueue = \"orders\"\n");
    std::fs::write(folder.path().join("hapax.toml"), toml).unwrap();
    let args = ["--config", "hapax.toml", "--otlp", &collector.url, "--traces-per-mille", "0"];
    let server = Server::start_in(folder, &args);
    let (context, trace) = caller("4bf92f3577b34da6a3ce929d0e0e4736", "01");
    let (quiet, _) = caller("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "00");
    for context in [quiet, context] {
        let enqueue = format!(
            "SELECT hapax.enqueue('orders.placed', 'order-7', 'seven'::text, p_traceparent => '{context}')"
        );
        postgres.sql(&name, &enqueue).unwrap();
    }
    published_and_consumed(&server, &collector, &trace);
    let spans = collector.spans.lock().unwrap();
    assert!(spans.iter().all(|span| span.trace == trace), "{spans:#?}");
}

/// A collector with a certificate that this machine does not know gets nothing.
fn over_grpc_with_tls() {
    let server = Server::start();
    server.run(&["queue", "create", "emails"]).ok();
    let (collector, cert) = Collector::start_grpcs(server.folder.path());
    let (stranger, _) = Collector::start_grpcs(tempdir().unwrap().path());
    let (context, trace) = caller("4bf92f3577b34da6a3ce929d0e0e4736", "01");
    let attribute = format!("traceparent={context}");
    let work = |collector: &Collector| {
        server.run(&["send", "emails", "paid", "--attribute", &attribute]).ok();
        let args = ["work", "emails", "--once", "--otlp", &collector.url, "--", "true"];
        let mut worker = hapax(&server.folder, &args);
        worker.env("HAPAX_ENDPOINT", &server.endpoint).env("SSL_CERT_FILE", &cert);
        let done = worker.output().unwrap();
        assert!(done.status.success(), "{done:?}");
        String::from_utf8(done.stderr).unwrap()
    };
    let told = work(&stranger);
    assert!(told.contains("traces cannot be exported"), "{told}");
    work(&collector);
    let run = collector.wait_for("process emails", |_| true);
    assert_eq!((&run.trace, &run.parent[..]), (&trace, &CALLER[..]), "{run:?}");
    assert!(stranger.spans.lock().unwrap().is_empty());
}

/// A service that sends a message on behalf of each request, with the context that it got.
fn service(server: &Server) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, endpoint) = (listener.local_addr().unwrap(), server.endpoint.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let found = head.iter().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case("traceparent").then(|| format!("traceparent={}", value.trim()))
            });
            let Some(context) = found else { continue };
            let args = ["send", "emails", "paid", "--endpoint", &endpoint, "--attribute", &context];
            run(&tempdir().unwrap(), &args).ok();
            stream
                .write_all(b"HTTP/1.1 201 Created\r\ncontent-length: 4\r\nconnection: close\r\n\r\npaid")
                .unwrap();
        }
    });
    format!("http://{address}")
}

fn from_a_request_through_proxy_and_service() {
    let collector = Collector::start();
    let server = Server::start_in(tempdir().unwrap(), &["--otlp", &collector.url, "--traces-per-mille", "0"]);
    server.run(&["queue", "create", "emails", "--tier", "effectively-once"]).ok();
    let (folder, upstream) = (tempdir().unwrap(), service(&server));
    let traced = ["--otlp", &collector.url, "--traces-per-mille", "0"];
    let proxy = Proxy::start(&folder, &[&["--upstream", &upstream][..], &traced].concat());
    let pay = |context: &str, key: &str| {
        let headers = format!("host: x\r\nidempotency-key: {key}\r\ntraceparent: {context}");
        request(&proxy.address, "POST /payments?card=secret", &headers)
    };
    let (quiet, _) = caller("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "00");
    assert!(pay(&quiet, "order-6").ends_with("paid"));
    let (first, trace) = caller("4bf92f3577b34da6a3ce929d0e0e4736", "01");
    assert!(pay(&first, "order-7").ends_with("paid"));

    let run = collector.wait_for("POST", |span| span.trace == trace);
    assert_eq!((run.kind, &run.parent[..]), (2, &CALLER[..]), "{run:?}");
    let attributes = |span: &Span| {
        let named = ["url.path", "http.response.status_code", "hapax.replayed"];
        named.map(|name| span.attributes[name].clone())
    };
    assert_eq!(attributes(&run), ["/payments", "201", "false"]);
    let send = collector.wait_for("send emails", |_| true);
    assert_eq!((&send.trace, &send.parent), (&trace, &run.id), "{send:?}");
    for _ in 0..2 {
        work(&server, &collector, "emails");
    }
    consumed(&collector, "emails", &run);

    // A retry of the caller is a trace of its own, with a link to the run whose response it got.
    let (second, other) = caller("0af7651916cd43dd8448eb211c80319c", "01");
    assert!(pay(&second, "order-7").to_lowercase().contains("idempotent-replayed: true"));
    let replay = collector.wait_for("POST", |span| span.trace == other);
    assert_eq!(attributes(&replay), ["/payments", "201", "true"]);
    assert_eq!((&replay.parent[..], &replay.links), (&CALLER[..], &vec![(run.trace, run.id)]), "{replay:?}");
    let spans = collector.spans.lock().unwrap();
    let recorded = spans.iter().all(|span| span.trace == trace || span.trace == other);
    assert!(recorded && spans.iter().filter(|span| span.name == "POST").count() == 2, "{spans:#?}");
}
