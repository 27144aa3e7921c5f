//! A worker, and a proxy whose ledger is a server, show their counters and whether they can work.

mod common;

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::proxied::{Proxy, post, request, service};
use common::{Server, hapax, run};
use rustix::process::Signal;

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(2);

fn get(address: &str, path: &str) -> (bool, String) {
    let answer = request(address, &format!("GET {path}"), &format!("host: {address}"));
    (answer.starts_with("HTTP/1.1 200"), answer)
}

#[track_caller]
fn until(what: &str, reached: impl Fn() -> bool) {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < PATIENCE, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A running `hapax work jobs -- true`, and the address of its metrics.
struct Worker {
    child: Child,
    address: String,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn work(server: &Server) -> Worker {
    let args = ["work", "jobs", "--metrics", "127.0.0.1:0", "--", "true"];
    let mut command = hapax(&server.folder, &args);
    command.env("HAPAX_ENDPOINT", &server.endpoint).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.find(|line| line.starts_with("metrics at http://")).expect("it says where");
    std::thread::spawn(move || lines.for_each(drop));
    let address = line.trim_start_matches("metrics at http://").trim_end_matches("/metrics").to_owned();
    Worker { child, address }
}

#[test]
fn a_worker_counts_and_is_ready_while_it_can_receive() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs", "--dead-letters"]).ok();
    let worker = work(&server);
    let ready = || get(&worker.address, "/readyz").0;
    until("it is ready", ready);
    assert!(get(&worker.address, "/healthz").0);
    server.run(&["send", "jobs", "one"]).ok();
    until("it has worked", || {
        get(&worker.address, "/metrics").1.contains("hapax_worker_done_total{queue=\"jobs\"} 1\n")
    });
    let (ok, answer) = get(&worker.address, "/elsewhere");
    assert!(!ok && answer.starts_with("HTTP/1.1 404"), "{answer}");

    server.run(&["queue", "pause", "jobs"]).ok();
    let (ok, answer) = get(&worker.address, "/readyz");
    assert!(!ok && answer.contains("queue jobs is paused"), "{answer}");
    server.run(&["queue", "resume", "jobs"]).ok();
    assert!(ready());
    // The server's own page has what it saw of the deliveries.
    let (_, page) = get(server.address(), "/metrics");
    assert!(page.contains("hapax_delivery_consumers_started_total{queue=\"jobs\"} 1\n"), "{page}");
    server.stop();
    let (ok, answer) = get(&worker.address, "/readyz");
    assert!(!ok && answer.contains("HTTP/1.1 503"), "{answer}");
    assert!(get(&worker.address, "/healthz").0, "it lives and waits");
}

#[test]
fn counters_are_shown_beyond_loopback_only_if_that_is_said() {
    let server = Server::start();
    server.run(&["queue", "create", "jobs"]).ok();
    let refused = server.run(&["work", "jobs", "--metrics", "0.0.0.0:0", "--", "true"]);
    assert!(refused.code == Some(1) && refused.stderr.contains("without keys"), "{refused:?}");
}

#[test]
fn a_proxy_whose_ledger_is_a_server_counts() {
    let server = Server::start();
    let (upstream, _) = service();
    let upstream = format!("http://{upstream}");
    let [admin] = hapax_faults::free_ports();
    let admin = format!("127.0.0.1:{admin}");
    let args = ["--upstream", &upstream, "--ledger", &server.endpoint, "--admin-listen", &admin];
    let proxy = Proxy::start(&server.folder, &args);
    assert!(
        post(&proxy.address, "\"k\"").contains("call 1") && post(&proxy.address, "\"k\"").contains("call 1")
    );
    until("it listens", || std::net::TcpStream::connect(&admin).is_ok());
    let (_, page) = get(&admin, "/metrics");
    let counted = |name: &str| page.lines().any(|line| line.starts_with(name) && line.ends_with("} 1"));
    assert!(counted("hapax_http_ran_total") && counted("hapax_http_replayed_total"), "{page}");
    assert!(get(&admin, "/readyz").0);
    assert!(!get(&admin, "/v1/claims").0, "the ledger's own server is for operators");
    server.stop();
    let (ok, answer) = get(&admin, "/readyz");
    assert!(!ok && answer.contains("HTTP/1.1 503"), "{answer}");
    assert_eq!(proxy.end(Signal::TERM), Some(0));
    let folder = tempfile::tempdir().unwrap();
    let args = [
        "proxy",
        "--upstream",
        &upstream,
        "--ledger",
        "http://127.0.0.1:1",
        "--admin-listen",
        "0.0.0.0:9326",
    ];
    let refused = run(&folder, &args);
    assert!(refused.code == Some(1) && refused.stderr.contains("on loopback alone"), "{refused:?}");
}
