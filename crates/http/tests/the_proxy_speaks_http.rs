//! HTTP/2, TLS, forwarding headers, hosts, upgrades, paths.
#![cfg(feature = "proxy")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use bytes::Bytes;
use common::proxied::Proxied;
use common::{Client, Gate, Store, TestResponse, post, soon};
use hapax_http::proxy::{HostPolicy, Proxy, ProxyConfig, ProxyLimits, TlsFiles};
use http::{Request, StatusCode, Version};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio_rustls::rustls;
use tokio_rustls::rustls::pki_types::ServerName;

/// Returns the request that it received.
fn mirror() -> Router {
    Router::new().fallback(any(|request: axum::extract::Request| async move {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let headers: Vec<(String, String)> = parts
            .headers
            .iter()
            .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            .collect();
        serde_json::json!({
            "method": parts.method.as_str(),
            "uri": parts.uri.to_string(),
            "headers": headers,
            "body": String::from_utf8_lossy(&body),
        })
        .to_string()
    }))
}

fn mirrored(answer: &TestResponse) -> serde_json::Value {
    serde_json::from_slice(&answer.body).unwrap_or_else(|error| panic!("{error}: {}", answer.text()))
}

fn header<'a>(seen: &'a serde_json::Value, name: &str) -> Vec<&'a str> {
    let headers = seen["headers"].as_array().unwrap().iter();
    headers.filter(|pair| pair[0] == name).map(|pair| pair[1].as_str().unwrap()).collect()
}

#[tokio::test]
async fn http2_without_tls() {
    let (store, gate) = (Store::new(), Gate::closed());
    let held = gate.clone();
    let app = Router::new().fallback(any(move || async move { held.pass().await.to_string() }));
    let proxy = Proxied::router(app, store.ledger(), ProxyConfig::default()).await;
    // Fifty streams on one connection.
    let client = Client::http2();
    let to = proxy.address;
    let calls: Vec<_> = (0..50)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.post(to, "/orders", "k", "{}").await })
        })
        .collect();
    gate.wait(1).await;
    gate.open();
    for call in calls {
        assert_eq!(soon(call).await.unwrap().text(), "1");
    }
    assert_eq!(gate.arrived(), 1);
}

#[tokio::test]
async fn http2_headers_become_those_of_http1() {
    let store = Store::new();
    let proxy = Proxied::router(mirror(), store.ledger(), ProxyConfig::default()).await;
    let mut request = post(proxy.address, "/a%20b?c=%2F", "k", "{}");
    request.headers_mut().append("cookie", "a=1".parse().unwrap());
    request.headers_mut().append("cookie", "b=2".parse().unwrap());
    let seen = mirrored(&Client::http2().send(request).await);
    assert_eq!(seen["uri"], "/a%20b?c=%2F");
    assert_eq!(header(&seen, "host"), [proxy.address.to_string()]);
    assert_eq!(header(&seen, "cookie"), ["a=1; b=2"]);
    assert_eq!(header(&seen, "x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(seen["body"], "{}");
}

#[tokio::test]
async fn the_upstream_sees_the_caller() {
    let store = Store::new();
    let upstream = common::serve(mirror()).await;
    let config = ProxyConfig { host: HostPolicy::Upstream, ..ProxyConfig::default() };
    let proxy = Proxied::before(upstream, store.ledger(), config).await;
    let request = Request::builder()
        .method("DELETE")
        .uri(format!("http://{}/x", proxy.address))
        .header("host", "shop.example")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .header("te", "trailers")
        .header("proxy-authorization", "Basic x")
        .header("x-forwarded-for", "6.6.6.6")
        .header("forwarded", "for=6.6.6.6")
        .header("hapax-fence", "7")
        .header("idempotency-key", "passes-as-it-is")
        .header("accept", "text/plain")
        .body(Full::new(Bytes::from_static(b"body")))
        .unwrap();
    let seen = mirrored(&Client::new().send(request).await);
    assert_eq!((seen["method"].as_str(), seen["body"].as_str()), (Some("DELETE"), Some("body")));
    assert_eq!(header(&seen, "host"), [upstream.to_string()]);
    assert_eq!(header(&seen, "x-forwarded-host"), ["shop.example"]);
    assert_eq!(header(&seen, "x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(header(&seen, "x-forwarded-proto"), ["http"]);
    assert_eq!(header(&seen, "forwarded"), ["for=127.0.0.1;proto=http;host=\"shop.example\""]);
    assert_eq!(header(&seen, "te"), ["trailers"]);
    assert_eq!(header(&seen, "idempotency-key"), ["passes-as-it-is"]);
    for gone in ["connection", "x-hop", "proxy-authorization", "hapax-fence"] {
        assert!(header(&seen, gone).is_empty(), "{gone}: {seen}");
    }
}

#[tokio::test]
async fn other_protocols_are_refused_and_an_offer_of_http2_is_ignored() {
    let store = Store::new();
    let proxy = Proxied::router(mirror(), store.ledger(), ProxyConfig::default()).await;
    let ask = |upgrade: &str| {
        let request = Request::get(format!("http://{}/", proxy.address));
        request.header("connection", "upgrade").header("upgrade", upgrade).body(Full::default()).unwrap()
    };
    let client = Client::new();
    let answer = client.send(ask("websocket")).await;
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (501, "upgrade-not-supported"));
    let answer = client.send(ask("h2c")).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(header(&mirrored(&answer), "upgrade").is_empty());
}

/// A self-signed certificate for 127.0.0.1, and a client that trusts it.
fn certificate(folder: &std::path::Path) -> (TlsFiles, Arc<rustls::ClientConfig>) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let files = TlsFiles { cert_file: folder.join("cert.pem"), key_file: folder.join("key.pem") };
    std::fs::write(&files.cert_file, made.cert.pem()).unwrap();
    std::fs::write(&files.key_file, made.signing_key.serialize_pem()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    client.alpn_protocols = vec![b"h2".to_vec()];
    (files, Arc::new(client))
}

#[tokio::test]
async fn http2_over_tls() {
    let store = Store::new();
    let (files, tls) = certificate(store.folder.path());
    let upstream = common::serve(mirror()).await;
    let config = ProxyConfig { tls: Some(files), ..ProxyConfig::default() };
    let proxy = Proxied::before(upstream, store.ledger(), config).await;
    let tcp = soon(tokio::net::TcpStream::connect(proxy.address)).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let stream = soon(tokio_rustls::TlsConnector::from(tls).connect(name, tcp)).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let io = TokioIo::new(stream);
    let (mut sender, connection) =
        soon(hyper::client::conn::http2::handshake(TokioExecutor::new(), io)).await.unwrap();
    tokio::spawn(connection);
    for replayed in [false, true] {
        let request = Request::post("https://localhost/orders").header("idempotency-key", "k");
        let request = request.body(Full::new(Bytes::from_static(b"x"))).unwrap();
        let response = soon(sender.send_request(request)).await.unwrap();
        assert_eq!((response.version(), response.status()), (Version::HTTP_2, StatusCode::OK));
        assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
        let body = soon(response.into_body().collect()).await.unwrap().to_bytes();
        let seen: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(header(&seen, "x-forwarded-proto"), ["https"]);
        assert_eq!(header(&seen, "host"), ["localhost"]);
    }
}

#[tokio::test]
async fn an_open_address_needs_tls_or_consent_and_bad_files_are_named() {
    let store = Store::new();
    let start = |config: ProxyConfig| {
        let config = ProxyConfig { upstream: "http://127.0.0.1:1".into(), ..config };
        Proxy::new(config, store.ledger()).map(drop).map_err(|error| error.to_string())
    };
    let open = ProxyConfig { listen: "0.0.0.0:0".parse().unwrap(), ..ProxyConfig::default() };
    assert!(start(open.clone()).unwrap_err().contains("insecure"));
    assert!(start(ProxyConfig { insecure: true, ..open.clone() }).is_ok());
    let (files, _) = certificate(store.folder.path());
    assert!(start(ProxyConfig { tls: Some(files.clone()), ..open }).is_ok());
    let missing = TlsFiles { key_file: "/nowhere.pem".into(), ..files };
    assert!(
        start(ProxyConfig { tls: Some(missing), ..ProxyConfig::default() })
            .unwrap_err()
            .contains("/nowhere.pem")
    );
}

#[tokio::test]
async fn a_connection_that_says_nothing_does_not_hold_up_a_shutdown() {
    let limits = ProxyLimits { shutdown_timeout: Duration::from_mins(10), ..ProxyLimits::default() };
    let store = Store::new();
    let config = ProxyConfig { limits, ..ProxyConfig::default() };
    let proxy = Proxied::router(Router::new(), store.ledger(), config).await;
    let _silent = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    // The next connection is accepted after it.
    let plain = http::Request::get(format!("http://{}/", proxy.address)).body(Full::default()).unwrap();
    assert_eq!(Client::new().send(plain).await.status, 404);
    proxy.stop().await;
}

/// Input that is not HTTP gets a response before the connection closes; so does a last request followed by more bytes.
#[tokio::test]
async fn bad_requests_and_last_requests_get_a_response() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let store = Store::new();
    let proxy = Proxied::router(mirror(), store.ledger(), ProxyConfig::default()).await;
    let twice = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde";
    let last = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\nGET /more HTTP/1.1\r\nhost: a\r\n\r\n";
    for (sent, status) in [(twice, "HTTP/1.1 400"), (last, "HTTP/1.1 200")] {
        let mut stream = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        let read = soon(stream.read_exact(&mut head)).await;
        assert!(read.is_ok(), "hung up without an answer: {sent:?}");
        assert_eq!(head, status.as_bytes(), "{sent:?}");
    }
}
