//! The admin listener of `hapax proxy`: operators see and decide the keys of a running proxy, and nothing that is for
//! them reaches the service.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

use common::proxied::{Proxy, post, request, service, service_responding};
use common::{Server, hapax, run};
use rustix::process::Signal;
use tempfile::TempDir;

const SCOPE: &str = "http/proxy/anyone/POST /orders";

/// Sends a request to a URL of the banner; the whole answer as text.
fn ask(url: &str, line: &str, headers: &str) -> String {
    request(url.trim_start_matches("http://"), line, headers)
}

/// The command that an answer tells the operator to run, up to its end in backquotes.
fn told(answer: &str) -> String {
    let problem: serde_json::Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    let detail = problem["detail"].as_str().unwrap();
    let command = detail.split_once("with `").and_then(|(_, rest)| rest.split_once("`; if it did"));
    command.unwrap_or_else(|| panic!("no command in {detail}")).0.to_owned()
}

/// Runs a command as it was printed, in a shell that finds this `hapax`.
fn in_shell(folder: &TempDir, command: &str) -> common::Done {
    let binaries = Path::new(env!("CARGO_BIN_EXE_hapax")).parent().unwrap();
    let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
    let output =
        Command::new("sh").args(["-c", command]).current_dir(folder.path()).env("PATH", path).output();
    common::Done::new(output.unwrap())
}

#[test]
fn a_parked_key_is_resolved_by_the_command_in_the_response() {
    // A key that a shell would read as something else, and that looks like a flag.
    for key in ["k", "\"-it's `x` $HOME\""] {
        let folder = tempfile::tempdir().unwrap();
        let (upstream, calls) = service_responding(&[500, 201]);
        let proxy = Proxy::start(&folder, &["--upstream", &format!("http://{upstream}")]);
        let admin = proxy.admin().unwrap_or_else(|| panic!("{:?}", proxy.ready));
        assert!(admin.starts_with("http://127.0.0.1:"), "{admin}");

        let keyed = format!("host: x\r\nidempotency-key: {key}");
        assert!(request(&proxy.address, "POST /orders", &keyed).starts_with("HTTP/1.1 500"));
        let parked = request(&proxy.address, "POST /orders", &keyed);
        assert!(parked.starts_with("HTTP/1.1 409"), "{parked}");

        let listed = run(&folder, &["ledger", "list", "--state", "in_doubt", "--json", "--endpoint", admin]);
        let listed = listed.json();
        assert_eq!(listed[0]["scope"], SCOPE, "{listed}");
        let shown =
            run(&folder, &["ledger", "show", "--endpoint", admin, "--", SCOPE, key.trim_matches('"')]);
        // What `show` suggests works like the command of the answer.
        let shown = shown.stderr;
        let suggested = shown.lines().find_map(|line| line.split_once("then: ")).unwrap().1.to_owned();
        assert!(suggested.contains(&format!("--endpoint {admin}")), "{suggested}");
        for command in [suggested.replace("completed|absent", "maybe"), told(&parked)] {
            let done = in_shell(&folder, &command);
            assert_eq!(done.code, Some(if command.contains("maybe") { 2 } else { 0 }), "{command}: {done:?}");
        }
        assert!(request(&proxy.address, "POST /orders", &keyed).ends_with("call 2"), "{key}");
        assert_eq!(calls.load(Ordering::SeqCst), 2);
        let doctor = run(&folder, &["doctor", "--endpoint", admin, "--json"]).json();
        assert_eq!(doctor["store"]["kind"], "embedded", "{doctor}");
    }
}

#[test]
fn the_admin_listener_serves_operators_and_passes_nothing_on() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, calls) = service();
    let proxy = Proxy::start(&folder, &["--upstream", &format!("http://{upstream}")]);
    let admin = proxy.admin().unwrap();
    for (line, host, status) in [
        ("GET /healthz", "localhost", 200),
        ("GET /readyz", "localhost", 200),
        ("GET /v1/ledger", "localhost", 200),
        ("GET /v1/claims", "127.0.0.1", 200),
        ("GET /v1/status", "localhost", 200),
        ("GET /v1/examine", "localhost", 200),
        ("GET /v1/queues", "localhost", 200),
        ("GET /v1/openapi.json", "localhost", 200),
        ("GET /v1/claims/s/k", "localhost", 404),
        // A web page that reaches this machine through a name of its own.
        ("GET /v1/ledger", "evil.example", 403),
        // What is not for operators of a ledger is not there.
        ("PUT /v1/claims/s/k", "localhost", 405),
        ("POST /v1/claims/s/k/complete", "localhost", 404),
        ("PUT /v1/queues/q", "localhost", 404),
        ("POST /v1/queues/q/messages", "localhost", 404),
        ("GET /v1/documents", "localhost", 404),
        ("GET /v1/nothing", "localhost", 404),
        ("GET /000000000000/q?Action=PurgeQueue", "localhost", 404),
        ("POST /000000000000/q", "localhost", 404),
        ("GET /?Action=ListQueues", "localhost", 404),
        ("POST /", "localhost", 404),
        ("POST /orders", "localhost", 404),
        ("GET /", "localhost", 404),
    ] {
        let answer = ask(admin, line, &format!("host: {host}\r\nidempotency-key: k"));
        // A refusal because of the host may come from either check.
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line} as {host}: {answer}");
        if status >= 400 {
            assert!(answer.contains("application/problem+json"), "{line}: {answer}");
        }
    }
    let sqs = ask(admin, "POST /", "host: localhost\r\nx-amz-target: AmazonSQS.ListQueues");
    assert!(sqs.starts_with("HTTP/1.1 404"), "{sqs}");
    assert_eq!(calls.load(Ordering::SeqCst), 0, "nothing reached the service");
}

#[test]
fn on_the_public_address_the_admin_paths_are_the_services() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, calls) = service();
    let proxy = Proxy::start(&folder, &["--upstream", &format!("http://{upstream}")]);
    let lines =
        ["GET /v1/ledger", "GET /v1/claims", "DELETE /v1/claims/s/k", "GET /healthz", "POST /v1/backup"];
    for (at, line) in lines.iter().enumerate() {
        let answer = request(&proxy.address, line, "host: x");
        assert!(
            answer.starts_with("HTTP/1.1 201") && answer.ends_with(&format!("call {}", at + 1)),
            "{answer}"
        );
    }
    assert_eq!(calls.load(Ordering::SeqCst), lines.len());
}

#[test]
fn a_store_in_use_names_the_address_of_its_holder_now() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, _) = service();
    let upstream = format!("http://{upstream}");
    // After `kill -9` the lock file still holds what the dead process wrote.
    for signal in [Signal::KILL, Signal::TERM] {
        let proxy = Proxy::start(&folder, &["--upstream", &upstream]);
        let admin = proxy.admin().unwrap();
        let store = "embedded:./hapax-proxy-data";
        for args in [
            &["ledger", "list", "--endpoint", store][..],
            &["proxy", "--listen", "127.0.0.1:0", "--upstream", &upstream],
            &["serve", "--listen", "127.0.0.1:0", "--store", store],
            &["backup", "copy.db", "--endpoint", store],
        ] {
            let error = run(&folder, args).failed(1);
            assert!(error.contains("in use by process"), "{args:?}: {error}");
            assert!(error.contains(&format!("--endpoint {admin}")), "{args:?}: {error}");
            assert_eq!(args[0] == "proxy", error.contains("--ledger embedded:PATH"), "{args:?}: {error}");
        }
        let doctor = run(&folder, &["doctor", "--store", store]);
        assert!(doctor.stderr.contains(&format!("hapax doctor --endpoint {admin}")), "{doctor:?}");
        proxy.end(signal);
    }
    assert_eq!(run(&folder, &["ledger", "list", "--endpoint", "embedded:./hapax-proxy-data"]).ok(), "");
}

#[test]
fn a_server_s_store_in_use_names_the_server() {
    let server = Server::start();
    let error = run(&server.folder, &["queues", "--endpoint", "embedded:./hapax-data"]).failed(1);
    assert!(error.contains(&format!("--endpoint {}", server.endpoint)), "{error}");
}

#[test]
fn proxies_with_nothing_configured_start_beside_each_other() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (upstream, _) = service();
    let args = ["--upstream", &format!("http://{upstream}")];
    let (first, second) = (Proxy::start(&one, &args), Proxy::start(&two, &args));
    let (first_admin, second_admin) = (first.admin().unwrap(), second.admin().unwrap());
    assert_ne!(first_admin, second_admin);
    for admin in [first_admin, second_admin] {
        assert!(ask(admin, "GET /v1/status", "host: localhost").starts_with("HTTP/1.1 200"));
    }
}

#[test]
fn an_address_that_was_asked_for_is_used_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, _) = service();
    let upstream = format!("http://{upstream}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let args = ["proxy", "--listen", "127.0.0.1:0", "--upstream", &upstream, "--admin-listen", &address];
    let error = run(&folder, &args).failed(1);
    assert!(error.contains(&address) && error.contains("--admin-listen"), "{error}");
    drop(taken);
    let proxy = Proxy::start(&folder, &["--upstream", &upstream, "--admin-listen", &address]);
    assert_eq!(proxy.admin(), Some(format!("http://{address}").as_str()));
}

#[test]
fn without_an_admin_listener_nothing_claims_that_there_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, _) = service_responding(&[500, 201]);
    let args = ["--upstream", &format!("http://{upstream}"), "--admin-listen", "none"];
    let proxy = Proxy::start(&folder, &args);
    assert!(!proxy.ready.iter().any(|line| line.contains("http://127.0.0.1:9326")), "{:?}", proxy.ready);
    assert!(proxy.ready.iter().any(|line| line.starts_with("  Admin none")), "{:?}", proxy.ready);
    post(&proxy.address, "k");
    let parked = request(&proxy.address, "POST /orders", "host: x\r\nidempotency-key: k");
    assert!(told(&parked).starts_with("hapax ledger resolve") && !parked.contains("--endpoint"), "{parked}");
    let error = run(&folder, &["ledger", "list", "--endpoint", "embedded:./hapax-proxy-data"]).failed(1);
    assert!(error.contains("in use by process") && !error.contains("--endpoint"), "{error}");
    // What was decided offline holds.
    proxy.end(Signal::TERM);
    let store = "embedded:./hapax-proxy-data";
    run(&folder, &["ledger", "resolve", SCOPE, "k", "--as", "absent", "--endpoint", store]).ok();
}

#[test]
fn a_ledger_elsewhere_is_looked_into_there() {
    let server = Server::start();
    let (upstream, _) = service_responding(&[500, 201]);
    let upstream = format!("http://{upstream}");
    let args = ["--upstream", &upstream, "--ledger", &server.endpoint];
    let proxy = Proxy::start(&server.folder, &args);
    assert_eq!(proxy.admin(), Some(server.endpoint.as_str()), "{:?}", proxy.ready);
    post(&proxy.address, "k");
    let parked = request(&proxy.address, "POST /orders", "host: x\r\nidempotency-key: k");
    in_shell(&server.folder, &told(&parked)).ok();
    let asked = [&["proxy", "--admin-listen", "0.0.0.0:0", "--listen", "127.0.0.1:0"][..], &args].concat();
    let refused = run(&server.folder, &asked).failed(1);
    assert!(refused.contains("admin.listen") && refused.contains("--ledger"), "{refused}");
}

#[test]
fn a_proxy_beside_the_server_is_looked_into_there() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, _) = service_responding(&[500, 201]);
    let config = format!("[[proxy]]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://{upstream}\"\n");
    std::fs::write(folder.path().join("hapax.toml"), config).unwrap();
    let mut server = Server::start_in(folder, &["--config", "hapax.toml"]);
    let line = server.line("  Proxy ");
    let address = line.trim_start_matches("  Proxy http://").split(' ').next().unwrap().to_owned();
    post(&address, "k");
    let parked = request(&address, "POST /orders", "host: x\r\nidempotency-key: k");
    let command = told(&parked);
    assert!(command.contains(&format!("--endpoint {}", server.endpoint)), "{command}");
    in_shell(&server.folder, &command).ok();
}

#[test]
fn beyond_loopback_it_needs_keys_and_with_keys_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, _) = service();
    let text = |keys: &str| {
        let proxy = format!("[[proxy]]\nupstream = \"http://{upstream}\"\nlisten = \"127.0.0.1:0\"\n");
        format!("[admin]\nlisten = \"0.0.0.0:0\"\n{keys}{proxy}")
    };
    let file = folder.path().join("proxy.toml");
    std::fs::write(&file, text("")).unwrap();
    let refused = run(&folder, &["proxy", "--config", "proxy.toml"]).failed(1);
    assert!(refused.contains("proxy.toml:2: ") && refused.contains("admin.keys"), "{refused}");
    assert!(!folder.path().join("hapax-proxy-data").exists());

    std::fs::write(&file, text("[[admin.keys]]\nid = \"OPS\"\nsecret = \"hunter2\"\n")).unwrap();
    let proxy = Proxy::start(&folder, &["--config", "proxy.toml"]);
    let admin = proxy.admin().unwrap();
    let refused = run(&folder, &["ledger", "list", "--endpoint", admin]).failed(1);
    assert!(refused.contains("unauthenticated") || refused.contains("token"), "{refused}");
    let mut allowed = hapax(&folder, &["ledger", "list", "--endpoint", admin]);
    assert!(allowed.env("HAPAX_TOKEN", "OPS:hunter2").output().unwrap().status.success());
    let printed = run(&folder, &["proxy", "--config", "proxy.toml", "--print-config"]).ok();
    assert!(!printed.contains("hunter2") && printed.contains("OPS"), "{printed}");
}

#[test]
fn its_configuration_is_checked_with_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("proxy.toml");
    let rest = "[[proxy]]\nupstream = \"http://x\"\nlisten = \"127.0.0.1:7001\"\n";
    for (admin, says) in [
        ("[admin]\nlisen = \"none\"\n", "proxy.toml:2: unknown key `lisen`; did you mean `listen`?"),
        ("[admin]\nlisten = \"off\"\n", "proxy.toml:2: admin.listen: \"off\""),
        ("[admin]\nlisten = \"127.0.0.1:7001\"\n", "7001 is listened on twice"),
        ("[[admin.keys]]\nid = \"a\"\nsecret_env = \"HAPAX_NOT_SET\"\n", "HAPAX_NOT_SET is not set"),
        ("[admin.tls]\ncert_file = \"no.pem\"\nkey_file = \"no.pem\"\n", "no.pem"),
        ("ledger = \"http://127.0.0.1:1\"\n[admin]\nlisten = \"0.0.0.0:0\"\n", "admin.listen"),
    ] {
        std::fs::write(&file, format!("{admin}{rest}")).unwrap();
        let error = run(&folder, &["proxy", "--config", "proxy.toml"]).failed(1);
        assert!(error.contains(says) && error.contains("proxy.toml:"), "{admin}: {error}");
        assert!(!folder.path().join("hapax-proxy-data").exists(), "{admin} left something behind");
    }
    let wrong = run(&folder, &["proxy", "--upstream", "http://x", "--admin-listen", "9326"]);
    assert!(wrong.code == Some(2) && wrong.stderr.contains("none"), "{wrong:?}");
    for listen in ["auto", "none", "127.0.0.1:7002"] {
        let args = ["proxy", "--print-config", "--upstream", "http://x", "--admin-listen", listen];
        let printed = run(&folder, &args).ok();
        assert!(printed.contains(&format!("[admin]\nlisten = \"{listen}\"")), "{printed}");
        std::fs::write(&file, &printed).unwrap();
        assert_eq!(run(&folder, &["proxy", "--print-config", "--config", "proxy.toml"]).ok(), printed);
    }
}

#[test]
fn it_answers_while_requests_under_way_are_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let upstream = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", upstream.local_addr().unwrap());
    let mut proxy = Proxy::start(&folder, &["--upstream", &url]);
    let admin = proxy.admin().unwrap().to_owned();
    let address = proxy.address.clone();
    let caller = std::thread::spawn(move || post(&address, "k"));
    let (mut held, _) = upstream.accept().unwrap();
    proxy.signal(Signal::TERM);
    // It has begun to stop when it accepts no more.
    let begun = std::time::Instant::now();
    while TcpStream::connect(&proxy.address).is_ok() {
        assert!(begun.elapsed() < std::time::Duration::from_mins(1), "the proxy still accepts");
        std::thread::yield_now();
    }
    let shown = run(&folder, &["ledger", "show", SCOPE, "k", "--json", "--endpoint", &admin]).json();
    assert_eq!(shown["state"], "processing");
    held.write_all(b"HTTP/1.1 201 Created\r\ncontent-length: 4\r\nconnection: close\r\n\r\ndone").unwrap();
    let _ = held.read(&mut [0; 4096]);
    assert!(caller.join().unwrap().ends_with("done"));
    assert_eq!(proxy.wait(), Some(0));
}

#[test]
fn a_proxy_with_tls_has_a_plain_admin_listener_on_loopback() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(folder.path().join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(folder.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    let (upstream, _) = service();
    let upstream = format!("http://{upstream}");
    let args = ["--upstream", &upstream, "--tls-cert", "cert.pem", "--tls-key", "key.pem"];
    let proxy = Proxy::start(&folder, &args);
    assert!(proxy.ready.iter().any(|line| line.starts_with("  Proxy https://")), "{:?}", proxy.ready);
    let admin = proxy.admin().unwrap();
    assert!(ask(admin, "GET /v1/ledger", "host: localhost").starts_with("HTTP/1.1 200"), "{admin}");
}

#[test]
fn with_a_certificate_the_admin_listener_speaks_https_only() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(folder.path().join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(folder.path().join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    let (upstream, _) = service_responding(&[500]);
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\ntls = {{ cert_file = \"cert.pem\", key_file = \"key.pem\" }}\n\
         [[admin.keys]]\nid = \"OPS\"\nsecret = \"s\"\n[[proxy]]\nupstream = \"http://{upstream}\"\n"
    );
    std::fs::write(folder.path().join("proxy.toml"), text).unwrap();
    let proxy = Proxy::start(&folder, &["--config", "proxy.toml"]);
    let admin = proxy.admin().unwrap();
    assert!(admin.starts_with("https://127.0.0.1:"), "{admin}");
    post(&proxy.address, "k");
    let list = |endpoint: &str, certificates: &str| {
        let mut command = hapax(&folder, &["ledger", "list", "--json", "--endpoint", endpoint]);
        command.env("HAPAX_TOKEN", "OPS:s").env("SSL_CERT_FILE", folder.path().join(certificates));
        common::Done::new(command.output().unwrap())
    };
    assert_eq!(list(admin, "cert.pem").json()[0]["scope"], SCOPE);
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(folder.path().join("other.pem"), other.cert.pem()).unwrap();
    let untrusted = list(admin, "other.pem").failed(1);
    assert!(untrusted.contains("certificate"), "{untrusted}");
    list(&admin.replacen("https", "http", 1), "cert.pem").failed(1);
}

#[test]
fn a_restored_ledger_is_let_go_there() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, calls) = service();
    let upstream = format!("http://{upstream}");
    let proxy = Proxy::start(&folder, &["--upstream", &upstream]);
    assert!(post(&proxy.address, "k").ends_with("call 1"));
    let admin = proxy.admin().unwrap();
    let copy = run(&folder, &["backup", "copy.db", "--endpoint", admin, "--json"]).json();
    proxy.end(Signal::TERM);
    let copy = copy["to"].as_str().unwrap();
    run(&folder, &["restore", copy, "--store", "embedded:./restored"]).ok();

    let args = ["--upstream", &upstream, "--ledger", "embedded:./restored"];
    let proxy = Proxy::start(&folder, &args);
    let admin = proxy.admin().unwrap();
    assert!(post(&proxy.address, "new").contains("ledger-unavailable"), "a restored store is paused");
    assert!(proxy.ready.iter().any(|line| line.contains("paused")), "{:?}", proxy.ready);
    run(&folder, &["resume", "--endpoint", admin]).ok();
    assert!(post(&proxy.address, "k").contains("idempotent-replayed: true"));
    assert!(post(&proxy.address, "new").ends_with("call 2"));
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}
