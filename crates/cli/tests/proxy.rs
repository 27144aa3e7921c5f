//! `hapax proxy` and `[[proxy]]` of `hapax serve`: the real binary before a small service.

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Server, hapax, run};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Answers each request with its number, and counts them.
fn service() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            if lines.by_ref().take_while(|line| !line.is_empty()).count() == 0 {
                continue;
            }
            let body = format!("call {}", counted.fetch_add(1, Ordering::SeqCst) + 1);
            let answer = format!(
                "HTTP/1.1 201 Created\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, calls)
}

/// POSTs with a key; the whole answer as text.
fn post(to: &str, key: &str) -> String {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    let request = format!(
        "POST /orders HTTP/1.1\r\nhost: x\r\nidempotency-key: {key}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.to_lowercase()
}

/// A running `hapax proxy`.
struct Proxy {
    child: Child,
    address: String,
    ready: Vec<String>,
}

impl Proxy {
    fn start(folder: &TempDir, args: &[&str]) -> Self {
        let mut command = hapax(folder, &["proxy", "--listen", "127.0.0.1:0"]);
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut ready = Vec::new();
        for line in lines {
            let last = line.starts_with("  Data  ");
            ready.push(line);
            if last {
                break;
            }
        }
        let line = ready.iter().find_map(|line| line.strip_prefix("  Proxy http://"));
        let address = line.unwrap_or_else(|| panic!("{ready:?}")).split(' ').next().unwrap().to_owned();
        Self { child, address, ready }
    }

    fn end(mut self, signal: Signal) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        self.child.wait().unwrap().code()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_request_sent_twice_reaches_the_service_once_also_after_kill_9() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, calls) = service();
    let upstream = format!("http://{upstream}");
    let proxy = Proxy::start(&folder, &["--upstream", &upstream]);
    assert!(
        proxy.ready[1].contains(&upstream) && proxy.ready[2].contains("hapax-proxy-data"),
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
    // Two proxies before one service share what they know.
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
         [[proxy.route]]\npath = \"/orders\"\nrequired = true\n"
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
fn what_cannot_be_meant_is_refused_before_anything_is_made() {
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
fn what_is_printed_means_the_same_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["proxy", "--print-config", "--upstream", "http://x", "--required", "--released", "429,503"];
    let printed = run(&folder, &args).ok();
    for expected in
        ["required = true", "released = [429, 503]", "on_doubt = \"park\"", "tenant = \"credentials\""]
    {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    std::fs::write(folder.path().join("proxy.toml"), &printed).unwrap();
    assert_eq!(run(&folder, &["proxy", "--print-config", "--config", "proxy.toml"]).ok(), printed);
}
