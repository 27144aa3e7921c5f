//! kill -9 of the proxy between the claim and the response; then the caller tries again.
//!
//! The proxy is this test binary, started again with an environment variable, on the embedded ledger.
#![cfg(feature = "proxy")]

mod common;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use common::{Client, Gate, Store, serve, soon};
use hapax_core::{ManualClock, OnDoubt};
use hapax_embedded::{Embedded, Options};
use hapax_faults::{Process, rerun_test};
use hapax_http::proxy::{Proxy, ProxyConfig};
use hapax_http::{IDEMPOTENCY_KEY, Policy};

const AS_PROXY: &str = "HAPAX_TEST_PROXY";
/// No time passes while a proxy runs, so it keeps its claim however slow the machine is.
const LEASE: Duration = Duration::from_mins(1);

/// Not a test: the code that the started process runs.
#[tokio::test]
async fn the_proxy_itself() {
    let Ok(settings) = std::env::var(AS_PROXY) else { return };
    let [folder, upstream, on_doubt, turn] = settings.split('|').collect::<Vec<_>>().try_into().unwrap();
    let first = turn == "first";
    let on_doubt = if on_doubt == "park" { OnDoubt::Park } else { OnDoubt::Retry };
    let config = ProxyConfig {
        listen: "127.0.0.1:0".parse().unwrap(),
        upstream: format!("http://{upstream}"),
        policy: Policy { on_doubt, lease: LEASE, ..Policy::default() },
        ..ProxyConfig::default()
    };
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let options = Options { clock: clock.clone(), ..Options::default() };
    let ledger = Arc::new(Embedded::open(Path::new(folder), options).unwrap());
    if !first {
        // The lease of the killed proxy has ended. No time passes in either of them.
        clock.advance_ms(2 * LEASE.as_millis() as u64);
    }
    let proxy = Proxy::new(config, ledger).unwrap();
    let listener = proxy.bind().await.unwrap();
    println!("\nlistening on {}", listener.local_addr().unwrap());
    proxy.run(listener, std::future::pending()).await;
}

fn start(folder: &Path, upstream: SocketAddr, on_doubt: &str, turn: &str) -> (Process, SocketAddr) {
    let settings = format!("{}|{upstream}|{on_doubt}|{turn}", folder.display());
    let process = Process::start(rerun_test("the_proxy_itself").env(AS_PROXY, settings)).unwrap();
    let address = process.wait_for_prefix("listening on").parse().unwrap();
    (process, address)
}

/// Kills the proxy while the service works. Returns the response of the next proxy to the next request with the key.
async fn killed(on_doubt: &str) -> (common::TestResponse, usize, Vec<http::HeaderMap>) {
    let store = tempfile::tempdir().unwrap();
    let gate = Gate::closed();
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (held, heads) = (gate.clone(), seen.clone());
    let app = move |headers: http::HeaderMap| async move {
        heads.lock().unwrap().push(headers);
        format!("call {}", held.pass().await)
    };
    let upstream = serve(Router::new().fallback(any(app))).await;
    let (mut first, address) = start(store.path(), upstream, on_doubt, "first");
    let call =
        tokio::spawn(
            async move { Client::new().try_send(common::post(address, "/orders", "k", "{}")).await },
        );
    gate.wait(1).await;
    first.kill();
    assert!(soon(call).await.unwrap().is_err(), "the caller sees a broken connection");
    gate.open();
    let (_second, address) = start(store.path(), upstream, on_doubt, "second");
    let answer = Client::new().post(address, "/orders", "k", "{}").await;
    let heads = seen.lock().unwrap().clone();
    (answer, gate.arrived(), heads)
}

#[tokio::test]
async fn parked_it_never_runs_twice() {
    let (answer, runs, _) = killed("park").await;
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (409, "in-doubt"));
    assert_eq!(runs, 1);
}

#[tokio::test]
async fn retried_it_runs_again_and_is_told_so() {
    let (answer, runs, heads) = killed("retry").await;
    assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "call 2"));
    assert_eq!(runs, 2);
    assert_eq!(heads[1]["hapax-takeover"], "true");
    assert_eq!(heads[0][IDEMPOTENCY_KEY], heads[1][IDEMPOTENCY_KEY]);
    let fence = |headers: &http::HeaderMap| headers["hapax-fence"].to_str().unwrap().parse::<u64>().unwrap();
    assert!(fence(&heads[0]) < fence(&heads[1]));
}

#[tokio::test]
async fn killed_after_the_response_it_is_replayed() {
    let store = Store::new();
    let folder = store.folder.path().join("proxy");
    let gate = Gate::opened();
    let held = gate.clone();
    let upstream =
        serve(Router::new().fallback(any(move || async move { format!("call {}", held.pass().await) })))
            .await;
    let (mut first, address) = start(&folder, upstream, "park", "first");
    assert_eq!(Client::new().post(address, "/orders", "k", "{}").await.text(), "call 1");
    first.kill();
    let (_second, address) = start(&folder, upstream, "park", "second");
    let again = Client::new().post(address, "/orders", "k", "{}").await;
    assert!(again.is_replay(), "{again:?}");
    assert_eq!((again.text().as_str(), gate.arrived()), ("call 1", 1));
}
