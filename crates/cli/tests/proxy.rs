//! `hapax proxy` and `[[proxy]]` of `hapax serve`: the real binary in front of a small service.

mod common;

use std::sync::atomic::Ordering;

use common::proxied::{Proxy, post, service};
use common::{Server, run};
use rustix::process::Signal;

#[test]
fn a_request_sent_twice_reaches_the_service_once_also_after_kill_9() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, calls) = service();
    let upstream = format!("http://{upstream}");
    let proxy = Proxy::start(&folder, &["--upstream", &upstream]);
    assert!(
        proxy.ready[1].contains(&upstream) && proxy.ready[3].contains("hapax-proxy-data"),
        "{:?}",
        proxy.ready
    );
    let first = post(&proxy.address, "k");
    assert!(first.starts_with("http/1.1 201") && first.ends_with("call 1"), "{first}");
    assert!(!first.contains("idempotent-replayed"), "{first}");
    let again = post(&proxy.address, "k");
    assert!(again.contains("idempotent-replayed: true") && again.ends_with("call 1"), "{again}");
    proxy.end(Signal::KILL);
    let proxy = Proxy::start(&folder, &["--upstream", &upstream]);
    assert!(post(&proxy.address, "k").contains("idempotent-replayed: true"));
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert_eq!(proxy.end(Signal::TERM), Some(0), "a shutdown in good order");
}

#[test]
fn a_server_is_its_ledger() {
    let server = Server::start();
    let (upstream, calls) = service();
    let args = ["--upstream", &format!("http://{upstream}"), "--ledger", &server.endpoint];
    let (one, two) = (Proxy::start(&server.folder, &args), Proxy::start(&server.folder, &args));
    assert!(post(&one.address, "k").ends_with("call 1"));
    // Two proxies in front of one service share the ledger.
    assert!(post(&two.address, "k").contains("idempotent-replayed: true"));
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let shown = server.run(&["ledger", "list", "--json"]).ok();
    assert!(shown.contains("http/proxy/anyone/POST /orders"), "{shown}");
}

#[test]
fn a_proxy_beside_the_server_uses_its_store() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, calls) = service();
    let config = format!(
        "[[proxy]]\nname = \"shop\"\nlisten = \"127.0.0.1:0\"\nupstream = \"http://{upstream}\"\n\
         [[proxy.route]]\npath = \"/orders\"\nkey_required = true\n"
    );
    std::fs::write(folder.path().join("hapax.toml"), config).unwrap();
    let mut server = Server::start_in(folder, &["--config", "hapax.toml"]);
    let line = server.line("  Proxy ");
    let address = line.trim_start_matches("  Proxy http://").split(' ').next().unwrap().to_owned();
    assert!(post(&address, "k").ends_with("call 1"));
    assert!(post(&address, "k").contains("idempotent-replayed: true"));
    assert!(post(&address, "\"open").contains("key-invalid"));
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    server.signal(Signal::TERM);
    assert!(server.wait().success());
}

#[test]
fn invalid_configurations_are_refused_before_anything_is_created() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], code: i32, says: &str| {
        let error = run(&folder, args).failed(code);
        assert!(error.contains(says), "{args:?}: {error}");
        assert!(!folder.path().join("hapax-proxy-data").exists(), "{args:?} left something behind");
    };
    refused(&["proxy"], 2, "--upstream is missing");
    refused(&["proxy", "--upstream", "ftp://x"], 1, "neither http:// nor https://");
    refused(&["proxy", "--upstream", "http://x", "--listen", "0.0.0.0:0"], 1, "insecure");
    refused(&["proxy", "--upstream", "http://x", "--wait", "1h"], 1, "wait_ms");
    let file = folder.path().join("proxy.toml");
    for (text, says) in [
        ("leger = \"x\"\n", "did you mean `ledger`?"),
        ("[[proxy]]\nupsteam = \"http://x\"\n", "did you mean `upstream`?"),
        ("[[proxy]]\nupstream = \"http://x\"\n[proxy.policy]\nwait = 1\n", "did you mean `wait_ms`?"),
        (
            "[[proxy]]\nupstream = \"http://x\"\n[[proxy.route]]\npath = \"/a\"\non_dout = \"park\"\n",
            "did you mean `on_doubt`?",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        refused(&["proxy", "--config", "proxy.toml"], 1, says);
    }
}

#[test]
fn a_printed_configuration_reads_back_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let args = [
        "proxy",
        "--print-config",
        "--upstream",
        "http://x",
        "--key-required",
        "--released-statuses",
        "429,503",
    ];
    let printed = run(&folder, &args).ok();
    for expected in [
        "key_required = true",
        "released_statuses = [429, 503]",
        "on_doubt = \"park\"",
        "tenant = \"credentials\"",
    ] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    std::fs::write(folder.path().join("proxy.toml"), &printed).unwrap();
    assert_eq!(run(&folder, &["proxy", "--print-config", "--config", "proxy.toml"]).ok(), printed);
}
