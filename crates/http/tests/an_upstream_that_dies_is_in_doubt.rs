//! Upstreams that are absent, die, hang, or disconnect: known results are reported, unknown ones are in doubt.
#![cfg(feature = "proxy")]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::proxied::Proxied;
use common::{Client, Store, until};
use hapax_core::{EntryFilter, EntryState, Ledger, OnDoubt, Resolution};
use hapax_embedded::{Embedded, Options};
use hapax_http::proxy::{ProxyConfig, ProxyLimits};
use hapax_http::{OnOutage, Policy};
use http::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// An upstream that reads each request's head and body and then follows the test's script.
struct Raw {
    address: SocketAddr,
    heads: Arc<std::sync::Mutex<Vec<String>>>,
}

impl Raw {
    async fn serve(script: &'static [&'static str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let heads = Arc::new(std::sync::Mutex::new(Vec::new()));
        let seen = heads.clone();
        let next = AtomicUsize::new(0);
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let Some(head) = read_request(&mut stream).await else { continue };
                seen.lock().unwrap().push(head);
                let step = script[next.fetch_add(1, Ordering::SeqCst).min(script.len() - 1)];
                if step == "hang" {
                    tokio::spawn(async move {
                        let _open = stream;
                        std::future::pending::<()>().await;
                    });
                    continue;
                }
                // After each step the connection ends.
                let _ = stream.write_all(step.as_bytes()).await;
            }
        });
        Self { address, heads }
    }

    fn requests(&self) -> usize {
        self.heads.lock().unwrap().len()
    }
}

/// Reads a request of this test, whose body is two bytes.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"{}") {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    Some(String::from_utf8_lossy(&bytes).to_lowercase())
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\ndone";
const LONG: Duration = Duration::from_mins(2);
const CUT: &str = "HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\nonly the beginning";

/// How long an upstream that hangs is waited for. One that responds has minutes, however busy the machine is.
const SHORT: Duration = Duration::from_millis(300);

fn config(on_doubt: OnDoubt, response_timeout: Duration) -> ProxyConfig {
    let limits = ProxyLimits { response_timeout, connect_timeout: LONG, ..ProxyLimits::default() };
    let policy = Policy { on_doubt, ..Policy::default() };
    ProxyConfig { policy, limits, ..ProxyConfig::default() }
}

#[tokio::test]
async fn one_that_is_not_there_leaves_the_key_free() {
    let store = Store::new();
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = nobody.local_addr().unwrap();
    drop(nobody);
    let proxy = Proxied::before(address, store.ledger(), config(OnDoubt::Park, LONG)).await;
    let client = Client::new();
    for _ in 0..2 {
        let answer = client.post(proxy.address, "/orders", "k", "{}").await;
        assert_eq!(
            (answer.status, answer.problem().as_str()),
            (StatusCode::BAD_GATEWAY, "upstream-unreachable")
        );
        assert!(answer.headers.contains_key("retry-after"));
    }
    assert_eq!(proxy.layer.counters().ended_in_doubt, 0, "nothing was sent");
    let listener = TcpListener::bind(address).await.unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        stream.write_all(OK.as_bytes()).await.unwrap();
    });
    let answer = client.post(proxy.address, "/orders", "k", "{}").await;
    assert_eq!((answer.status, answer.text().as_str()), (StatusCode::OK, "done"));
}

/// The upstream first breaks as scripted, then responds well; checks what a retry sees under either policy.
async fn breaks(script: &'static [&'static str], status: u16, code: &str) {
    let client = Client::new();
    let timeout = if script[0] == "hang" { SHORT } else { LONG };
    let (store, upstream) = (Store::new(), Raw::serve(script).await);
    let parking = Proxied::before(upstream.address, store.ledger(), config(OnDoubt::Park, timeout)).await;
    let first = client.post(parking.address, "/orders", "k", "{}").await;
    assert_eq!((first.status.as_u16(), first.problem().as_str()), (status, code));
    let parked = client.post(parking.address, "/orders", "k", "{}").await;
    assert_eq!((parked.status.as_u16(), parked.problem().as_str()), (409, "in-doubt"));
    until("the first run was seen", || upstream.requests() > 0).await;
    assert_eq!(upstream.requests(), 1, "a parked request was sent again");

    let (store, upstream) = (Store::new(), Raw::serve(script).await);
    let breaking = Proxied::before(upstream.address, store.ledger(), config(OnDoubt::Retry, timeout)).await;
    let first = client.post(breaking.address, "/orders", "k", "{}").await;
    assert_eq!((first.status.as_u16(), first.problem().as_str()), (status, code));
    until("the first run was seen", || upstream.requests() == 1).await;
    let retrying = Proxied::before(upstream.address, store.ledger(), config(OnDoubt::Retry, LONG)).await;
    let second = client.post(retrying.address, "/orders", "k", "{}").await;
    assert_eq!((second.status.as_u16(), second.text().as_str()), (200, "done"));
    assert!(client.post(retrying.address, "/orders", "k", "{}").await.is_replay());
    until("both runs were seen", || upstream.requests() == 2).await;
    let heads = upstream.heads.lock().unwrap().clone();
    let header = |head: &str, name: &str| {
        head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")).map(str::to_owned))
    };
    // The second run is told that it is a takeover; both have the same derived key, and the fence has grown.
    let takeovers: Vec<_> = heads.iter().map(|head| header(head, "hapax-takeover")).collect();
    assert_eq!(takeovers, [None, Some("true".to_owned())]);
    assert!(header(&heads[0], "idempotency-key").unwrap().starts_with("\"hapax-"));
    assert_eq!(header(&heads[0], "idempotency-key"), header(&heads[1], "idempotency-key"));
    let fence = |head: &str| header(head, "hapax-fence").unwrap().parse::<u64>().unwrap();
    assert!(fence(&heads[0]) < fence(&heads[1]));
}

#[tokio::test]
async fn killed_before_its_response() {
    breaks(&["", OK], 502, "upstream-interrupted").await;
}

#[tokio::test]
async fn killed_within_its_response() {
    breaks(&[CUT, OK], 502, "run-interrupted").await;
}

#[tokio::test]
async fn hanging() {
    breaks(&["hang", OK], 504, "upstream-timeout").await;
}

#[tokio::test]
async fn a_run_that_takes_too_long_is_cut_off() {
    let (store, upstream) = (Store::new(), Raw::serve(&["hang"]).await);
    let policy = Policy { run_max: Duration::from_millis(100), ..Policy::default() };
    let proxy =
        Proxied::before(upstream.address, store.ledger(), ProxyConfig { policy, ..ProxyConfig::default() })
            .await;
    let answer = Client::new().post(proxy.address, "/orders", "k", "{}").await;
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (504, "run-too-long"));
    assert_eq!(proxy.layer.counters().ended_in_doubt, 1);
}

/// Each broken request leaves a key in doubt. At the bound of its scope a new key is turned away before it reaches the
/// upstream, also where requests may pass while the ledger is down; another caller is not affected.
#[tokio::test]
async fn a_long_outage_stops_the_route_that_it_hits_and_no_other() {
    const MAX: usize = 3;
    let client = Client::new();
    for on_outage in [OnOutage::Closed, OnOutage::Open] {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { in_doubt_per_scope_max: MAX as u64, ..Options::default() };
        let ledger: Arc<dyn Ledger> = Arc::new(Embedded::open(folder.path(), options).unwrap());
        let upstream = Raw::serve(&["", "", "", OK]).await;
        let mut config = config(OnDoubt::Park, LONG);
        config.policy.on_outage = on_outage;
        let proxy = Proxied::before(upstream.address, ledger.clone(), config).await;
        for n in 0..MAX {
            let broken = client.post(proxy.address, "/orders", &format!("k{n}"), "{}").await;
            assert_eq!(broken.problem(), "upstream-interrupted");
        }
        let answer = client.post(proxy.address, "/orders", "new", "{}").await;
        assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (503, "too-many-in-doubt"));
        assert!(
            answer.headers.contains_key("retry-after") && answer.text().contains("3 requests"),
            "{answer:?}"
        );
        assert_eq!(upstream.requests(), MAX, "it was not sent");
        let parked = client.post(proxy.address, "/orders", "k0", "{}").await;
        assert_eq!(parked.problem(), "in-doubt", "a known key still gets its own answer");

        let other = http::Request::post(format!("http://{}/orders", proxy.address))
            .header("idempotency-key", "new")
            .header("authorization", "Bearer another");
        let other = client.send(other.body(http_body_util::Full::from("{}")).unwrap()).await;
        assert_eq!((other.status.as_u16(), other.text().as_str()), (200, "done"), "another caller");

        let filter = EntryFilter { state: Some(EntryState::InDoubt), limit: 1, ..EntryFilter::default() };
        let in_doubt = ledger.entries(filter).await.unwrap().items.remove(0);
        ledger.resolve(&in_doubt.id, Resolution::Absent, "ann").await.unwrap();
        let answer = client.post(proxy.address, "/orders", "new", "{}").await;
        assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "done"), "there is room again");
    }
}
