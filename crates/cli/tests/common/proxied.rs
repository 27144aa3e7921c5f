//! `hapax proxy` before a small service.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{hapax, run};

/// Answers each request with its number, and counts them.
pub fn service() -> (SocketAddr, Arc<AtomicUsize>) {
    service_responding(&[201])
}

/// The same, with these statuses; the last one from then on.
pub fn service_responding(statuses: &'static [u16]) -> (SocketAddr, Arc<AtomicUsize>) {
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
            let before = counted.fetch_add(1, Ordering::SeqCst);
            let status = statuses[before.min(statuses.len() - 1)];
            let body = format!("call {}", before + 1);
            let answer = format!(
                "HTTP/1.1 {status} Answer\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, calls)
}

/// Sends a request without a body, with these header lines; the whole answer as text.
pub fn request(to: &str, line: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    let head = format!("{line} HTTP/1.1\r\n{headers}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// POSTs with a key; the whole answer as text, in lower case.
pub fn post(to: &str, key: &str) -> String {
    request(to, "POST /orders", &format!("host: x\r\nidempotency-key: {key}")).to_lowercase()
}

/// Two proxies with one ledger: duplicates through both have one effect, and operators reach the ledger through each proxy and
/// without one. The first proxy is killed then. Returns the other, and the counter of the service.
pub fn two_proxies_execute_once(folder: &TempDir, ledger: &str) -> (Proxy, Arc<AtomicUsize>) {
    let (upstream, calls) = service();
    let args = ["--upstream", &format!("http://{upstream}"), "--ledger", ledger];
    let (one, two) = (Proxy::start(folder, &args), Proxy::start(folder, &args));
    let answers: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8)
            .map(|number| if number % 2 == 0 { &one } else { &two })
            .map(|proxy| scope.spawn(|| post(&proxy.address, "k")))
            .collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|answer| answer.ends_with("call 1")), "{answers:?}");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    for endpoint in [one.admin().unwrap(), two.admin().unwrap(), ledger] {
        let shown = run(folder, &["ledger", "list", "--json", "--endpoint", endpoint]).ok();
        assert!(shown.contains("http/proxy/anyone/POST /orders"), "{endpoint}: {shown}");
    }
    one.end(Signal::KILL);
    (two, calls)
}

/// A running `hapax proxy`.
pub struct Proxy {
    child: Child,
    pub address: String,
    /// The lines of its banner.
    pub ready: Vec<String>,
}

impl Proxy {
    pub fn start(folder: &TempDir, args: &[&str]) -> Self {
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
        let line = ready.iter().find_map(|line| line.strip_prefix("  Proxy ")?.split_once("://"));
        let address = line.unwrap_or_else(|| panic!("{ready:?}")).1.split(' ').next().unwrap().to_owned();
        Self { child, address, ready }
    }

    /// The URL that the banner names for operators.
    pub fn admin(&self) -> Option<&str> {
        self.ready.iter().find_map(|line| line.strip_prefix("  Admin ")?.split(' ').next())
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    pub fn end(mut self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        self.wait()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
