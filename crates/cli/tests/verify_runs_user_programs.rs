//! `hapax verify` with programs of the user's: a handler (`--handler-cmd`, or the library's trait) and a service behind the
//! proxy (`--upstream`).

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{proxied, run};
use hapax::{Cx, HandlerOutcome};
use hapax_faults::example_program;
use hapax_verify::check::Anomaly;
use hapax_verify::fault::{Fault, Target};
use hapax_verify::report::{Report, Row, Verdict};
use hapax_verify::{Effects, Handler, Options, Payment, verify_in_test};
use serde_json::Value;

/// How the handler of these tests is told to leave the key out.
const NO_KEY: &str = "VERIFY_TEST_NO_KEY";

/// Runs verify for one workload; returns its verdict and the workload's row.
fn verify(workload: &str, faults: &str, more: &[&str]) -> (Value, Value) {
    let folder = tempfile::tempdir().unwrap();
    // Long enough for each fault of a round.
    let args = ["verify", "--json", "--for", "10s", "--seed", "1", "--only", workload, "--faults", faults];
    let done = run(&folder, &[&args, more].concat());
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    let rows = report["workloads"].as_array().unwrap();
    let row = rows.iter().find(|row| row["workload"] == workload).unwrap();
    println!("{row:#}\n{}", done.stderr);
    (report["verdict"].clone(), row.clone())
}

/// The command that runs [`handler`] in a process of its own.
fn handler_command(variable: &str) -> String {
    let program = std::env::current_exe().unwrap();
    format!("{variable}=1 '{}' --exact handler --nocapture --test-threads=1", program.display())
}

/// Not a test of its own: the handler of the others.
#[test]
fn handler() {
    let Ok(sink) = std::env::var("HAPAX_VERIFY_SINK") else { return };
    let (host, path) = sink.trim_start_matches("http://").split_once('/').unwrap();
    let mut body = String::new();
    std::io::stdin().read_to_string(&mut body).unwrap();
    let key = match std::env::var_os(NO_KEY) {
        Some(_) => String::new(),
        None => format!("idempotency-key: {}\r\n", std::env::var("HAPAX_DERIVED_KEY").unwrap()),
    };
    let head =
        format!("POST /{path} HTTP/1.1\r\nhost: {host}\r\n{key}content-length: {}\r\n\r\n", body.len());
    let mut stream = TcpStream::connect(host).unwrap();
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    if !key.is_empty() {
        return;
    }
    // Most of its time is between the effect and its end, so a kill falls there.
    std::thread::sleep(Duration::from_millis(300));
}

#[test]
fn a_handler_that_passes_its_key_on_takes_effect_once() {
    let command = handler_command("VERIFY_TEST_KEY");
    let (verdict, row) = verify("handler", "kill -9 of a worker", &["--handler-cmd", &command]);
    assert_eq!(verdict, "held");
    assert!(row["effects"].as_u64() >= row["accepted"].as_u64(), "{row:#}");
}

#[test]
fn a_handler_that_ignores_its_key_is_caught() {
    let command = handler_command(NO_KEY);
    let (verdict, row) = verify("handler", "kill -9 of a worker", &["--handler-cmd", &command]);
    assert_eq!(verdict, "violated");
    assert!(row["counts"]["effect-twice"].as_u64() > Some(0), "{row:#}");
}

#[test]
fn a_program_that_never_has_an_effect_is_told_apart_from_a_fault() {
    let folder = tempfile::tempdir().unwrap();
    for (only, more, says) in [
        (
            "handler",
            ["--handler-cmd", "no-such-command"],
            "your handler had no effect in 30 s, without any fault",
        ),
        (
            "charges",
            ["--upstream", "http://127.0.0.1:1/x"],
            "your service had no effect in 30 s, without any fault",
        ),
    ] {
        let said = run(&folder, &[&["verify", "--for", "1s", "--only", only], &more[..]].concat());
        let why =
            if only == "handler" { "no-such-command" } else { "http://127.0.0.1:1/x: Connection refused" };
        assert_eq!(said.code, Some(1), "{said:?}");
        assert!(said.stderr.contains(says) && said.stderr.contains(why), "{said:?}");
    }
}

/// A handler that passes its key on, or forgets it.
struct Charge {
    with_key: bool,
}

impl Handler for Charge {
    type Outcome = HandlerOutcome<u64>;

    async fn handle(&self, payment: Payment, cx: Cx, effects: Effects) -> HandlerOutcome<u64> {
        let key = self.with_key.then(|| cx.derived_key("charge"));
        let called = effects.call(&payment, key.as_ref()).await;
        // Most of its time is between the effect and its end, so a kill falls there.
        tokio::time::sleep(Duration::from_millis(100)).await;
        match called {
            Ok(receipt) => HandlerOutcome::Done(receipt),
            Err(error) => HandlerOutcome::in_doubt(error),
        }
    }
}

/// Runs a handler in Rust under faults; returns the report and its row.
fn verify_charge(test: &str, with_key: bool) -> (Report, Row) {
    let options = Options {
        faults: vec![Fault::Kill(Target::Worker), Fault::Pause],
        time: Duration::from_secs(4),
        seed: 1,
        ..Options::for_handler(env!("CARGO_BIN_EXE_hapax"))
    };
    let report = verify_in_test(test, Charge { with_key }, &options).unwrap();
    let row = report.workloads.iter().find(|row| row.workload == "handler").unwrap().clone();
    println!("{}", report.to_text());
    (report, row)
}

#[test]
fn a_handler_in_rust_takes_effect_once() {
    let (report, row) = verify_charge("a_handler_in_rust_takes_effect_once", true);
    assert_eq!(report.verdict, Verdict::Held, "{}", report.to_text());
    assert!(row.findings.effects >= row.findings.accepted && row.findings.effects > 0, "{row:#?}");
    assert!(row.findings.suppressed > 0, "duplicates were suppressed: {row:#?}");
}

#[test]
fn a_handler_in_rust_without_its_key_is_caught() {
    let (report, row) = verify_charge("a_handler_in_rust_without_its_key_is_caught", false);
    assert_eq!(report.verdict, Verdict::Violated, "{}", report.to_text());
    assert!(row.findings.counts.contains_key(&Anomaly::EffectTwice), "{row:#?}");
}

#[test]
fn the_example_of_a_handler_holds() {
    let done =
        Command::new(example_program("own_handler")).arg(env!("CARGO_BIN_EXE_hapax")).output().unwrap();
    let (said, noted) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{said}\n{noted}");
    let row = said.lines().find(|line| line.starts_with("handler ")).unwrap_or_default();
    assert!(row.ends_with(" held"), "{said}\n{noted}");
    assert!(said.contains(", Hapax = 0\n") && !said.contains("naive = 0"), "{said}\n{noted}");
    assert!(said.contains("\nheld: "), "{said}\n{noted}");
    // Without the program of `hapax` it says what to do.
    let done = Command::new(example_program("own_handler")).arg("/no/such/program").output().unwrap();
    let noted = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && noted.contains("install it, or name it"), "{noted}");
}

#[test]
fn a_service_behind_the_proxy_is_called_once_for_each_request() {
    let (service, calls) = proxied::service();
    let url = format!("http://{service}/charges");
    let (verdict, row) = verify("charges", "proxies,kill -9 of a worker", &["--upstream", &url]);
    assert_eq!(verdict, "held");
    // The service's own count is that of the report, but for what was under way at its end: one request of each account.
    let (effects, calls) = (row["effects"].as_u64().unwrap(), calls.load(Ordering::SeqCst) as u64);
    assert!((effects..=effects + 3).contains(&calls), "{calls} calls, {effects} effects");
    assert!(row["suppressed"].as_u64() > Some(0), "{row:#}");
}
