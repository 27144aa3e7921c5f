//! Requests on the wire: the bytes that a caller sends, and those that the upstream receives.
#![cfg(feature = "proxy")]

mod common;

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use common::proxied::{Proxied, with_policy};
use common::raw::{Message, Upstream, Wire};
use common::{Client, Store, soon};
use hapax_http::proxy::ProxyConfig;
use hapax_http::{Policy, Tenant};
use http::Method;
use http_body::Frame;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::rt::TokioExecutor;

async fn proxied(config: ProxyConfig) -> (Store, Proxied, Upstream) {
    let upstream = Upstream::responding("HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok").await;
    let store = Store::new();
    let proxy = Proxied::before(upstream.address, store.ledger(), config).await;
    (store, proxy, upstream)
}

fn every_method() -> ProxyConfig {
    let methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    let methods = methods.map(|method| method.parse().unwrap()).to_vec();
    with_policy(Policy { methods, ..Policy::default() })
}

/// Sends bytes on their own connection.
async fn exchange(proxy: &Proxied, method: &str, bytes: impl AsRef<[u8]>) -> Option<Message> {
    let mut wire = Wire::connect(proxy.address).await;
    wire.send(bytes).await;
    wire.try_response(method).await
}

/// {chunks that are none, a body that ends early} x {keyed, not}: the caller's fault, and the upstream is not blamed.
#[tokio::test]
async fn a_body_that_breaks_off_is_the_callers_fault() {
    let (_store, proxy, upstream) = proxied(every_method()).await;
    for key in ["", "idempotency-key: \"k\"\r\n"] {
        for (framing, ends) in [
            ("transfer-encoding: chunked\r\n\r\n4\r\nbody\r\nxyz\r\n", false),
            ("transfer-encoding: chunked\r\n\r\n4\r\nbodyxx", false),
            ("transfer-encoding: chunked\r\n\r\n9\r\nbody", true),
            ("content-length: 9\r\n\r\nbody", true),
        ] {
            let mut wire = Wire::connect(proxy.address).await;
            wire.send(format!("POST /orders HTTP/1.1\r\nhost: shop\r\n{key}{framing}")).await;
            if ends {
                wire.end().await;
            }
            let answer = wire.answer("POST").await;
            assert_eq!(
                (answer.status(), answer.problem().as_str()),
                (400, "body-incomplete"),
                "{key}{framing}"
            );
            assert!(answer.text().contains("the body could not be read"), "{}", answer.text());
        }
    }
    assert!(upstream.seen().is_empty(), "no whole request reached it: {:?}", upstream.seen());
    // The proxy and its upstream are as good as before.
    let whole = "POST /orders HTTP/1.1\r\nhost: shop\r\ncontent-length: 2\r\n\r\nok";
    assert_eq!(exchange(&proxy, "POST", whole).await.unwrap().status(), 201);
    let counters = proxy.layer.counters();
    assert_eq!((counters.ended_in_doubt, counters.ran), (0, 0), "{counters:?}");
}

/// A body that comes in these parts.
struct InParts(std::collections::VecDeque<Result<Bytes, std::io::Error>>);

impl http_body::Body for InParts {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        Poll::Ready(self.get_mut().0.pop_front().map(|part| part.map(Frame::data)))
    }
}

/// A caller over HTTP/2 resets its stream in the middle of a body; others on its connection are served.
#[tokio::test]
async fn a_reset_in_the_middle_of_a_body_breaks_nothing_else() {
    let (_store, proxy, upstream) = proxied(every_method()).await;
    let pool = Pool::builder(TokioExecutor::new()).http2_only(true).build_http();
    let whole = |body: Result<Bytes, std::io::Error>, key: bool| {
        let body = InParts([Ok(Bytes::from("begin")), body].into());
        let request = http::Request::post(format!("http://{}/orders", proxy.address));
        let request = if key { request.header("idempotency-key", "\"k\"") } else { request };
        request.body(body).unwrap()
    };
    for key in [false, true] {
        let reset = soon(pool.request(whole(Err(std::io::Error::other("gone")), key))).await;
        assert!(reset.is_err(), "{reset:?}");
        let answer = soon(pool.request(whole(Ok(Bytes::from("end")), key))).await.unwrap();
        assert_eq!(answer.status(), 201);
    }
    assert_eq!(upstream.seen().len(), 2, "{:?}", upstream.seen());
    assert_eq!(proxy.layer.counters().ended_in_doubt, 0);
}

/// {chunked, length, none} x every method x {keyed, not}: the same body arrives, with one framing.
#[tokio::test]
async fn bodies_arrive_whatever_their_method_and_framing() {
    let (_store, proxy, upstream) = proxied(every_method()).await;
    let framings = [
        ("transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n", "body"),
        ("transfer-encoding: chunked\r\n\r\n2\r\nbo\r\n2;ext=1\r\ndy\r\n0\r\nx-trailer: 1\r\n\r\n", "body"),
        ("content-length: 4\r\n\r\nbody", "body"),
        ("transfer-encoding: chunked\r\n\r\n0\r\n\r\n", ""),
        ("content-length: 0\r\n\r\n", ""),
        ("\r\n", ""),
    ];
    let mut sent = 0;
    for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        for (at, (framing, body)) in framings.into_iter().enumerate() {
            for keyed in [false, true] {
                let key = if keyed { format!("idempotency-key: {method}-{at}\r\n") } else { String::new() };
                let request = format!("{method} /a HTTP/1.1\r\nhost: shop\r\n{key}{framing}");
                let answer = exchange(&proxy, method, request).await.expect("an answer");
                assert_eq!(answer.status(), 201, "{method} {framing:?} {keyed}");
                sent += 1;
                let seen = upstream.seen();
                assert_eq!(seen.len(), sent, "{method} {framing:?} {keyed}");
                let seen = seen.last().unwrap();
                assert_eq!(seen.text(), body, "{method} {framing:?} {keyed}: {seen:?}");
                let framed =
                    !seen.all("content-length").is_empty() || !seen.all("transfer-encoding").is_empty();
                if ["POST", "PUT", "PATCH"].contains(&method) || !body.is_empty() {
                    assert!(framed, "without a length: {method} {framing:?} {keyed}: {seen:?}");
                }
            }
        }
    }
}

/// HTTP/2 needs no length for an empty body; HTTP/1 does.
#[tokio::test]
async fn bodies_of_http2_arrive_too() {
    let (_store, proxy, upstream) = proxied(every_method()).await;
    let client = Client::http2();
    for method in [Method::POST, Method::PUT, Method::PATCH] {
        for key in [None, Some("k")] {
            let mut request =
                http::Request::builder().method(&method).uri(format!("http://{}/", proxy.address));
            if let Some(key) = key {
                request = request.header("idempotency-key", key);
            }
            assert_eq!(client.send(request.body(Full::default()).unwrap()).await.status, 201);
            let seen = upstream.seen().pop().unwrap();
            assert_eq!(seen.all("content-length"), ["0"], "{method} {key:?}: {seen:?}");
        }
    }
    // A body of unknown length with methods that rarely have one.
    let pool = Pool::builder(TokioExecutor::new()).http2_only(true).build_http();
    for method in [Method::GET, Method::DELETE] {
        for key in [None, Some("k")] {
            let mut request =
                http::Request::builder().method(&method).uri(format!("http://{}/", proxy.address));
            if let Some(key) = key {
                request = request.header("idempotency-key", key);
            }
            let request = request.body(Pieces(vec!["dy", "bo"])).unwrap();
            let answer = soon(pool.request(request)).await.unwrap();
            assert_eq!(answer.status(), 201);
            soon(answer.into_body().collect()).await.unwrap();
            assert_eq!(upstream.seen().pop().unwrap().text(), "body", "{method} {key:?}");
        }
    }
}

/// A body of unknown length; its pieces are in reverse order.
struct Pieces(Vec<&'static str>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop().map(|text| Ok(Frame::data(Bytes::from(text)))))
    }
}

/// Attempts to make two parties see two requests: each is refused, or reaches the upstream as one request.
#[tokio::test]
async fn one_request_stays_one_request() {
    let (_store, proxy, upstream) = proxied(ProxyConfig::default()).await;
    let smuggled = "GET /smuggled HTTP/1.1\r\nhost: shop\r\n\r\n";
    let length = smuggled.len();
    let refused = [
        format!("content-length: 0\r\ncontent-length: {length}\r\n\r\n{smuggled}"),
        format!("content-length: 0, {length}\r\n\r\n{smuggled}"),
        format!("content-length: +{length}\r\n\r\n{smuggled}"),
        format!("content-length: 0x1\r\n\r\n{smuggled}"),
        format!("content-length: 1\r\n 0\r\n\r\n{smuggled}"),
        format!("content-length : {length}\r\n\r\n{smuggled}"),
        format!("x-folded: a\r\n b\r\ncontent-length: {length}\r\n\r\n{smuggled}"),
        format!("transfer-encoding: xchunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("transfer-encoding: \u{b}chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("transfer-encoding: chunked\r\n\r\n0 \n\r\n{smuggled}"),
        "transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n".to_owned(),
        format!("transfer-encoding: chunked\r\n\r\n1\r\nxx0\r\n\r\n{smuggled}"),
        format!("x-nul: a\0b\r\ncontent-length: {length}\r\n\r\n{smuggled}"),
        format!("x-cr: a\rb: c\r\ncontent-length: {length}\r\n\r\n{smuggled}"),
        format!("host: other\r\ncontent-length: {length}\r\n\r\n{smuggled}"),
    ];
    for rest in &refused {
        for key in ["", "idempotency-key: refused\r\n"] {
            let request = format!("POST /first HTTP/1.1\r\nhost: shop\r\n{key}{rest}");
            let answer = exchange(&proxy, "POST", &request).await;
            let status = answer.as_ref().map(Message::status);
            // Broken chunking of a streamed body is found only when the request is already being forwarded.
            assert!(status.is_none_or(|status| [400, 501, 502].contains(&status)), "{request:?}: {answer:?}");
            let paths: Vec<String> = upstream.seen().into_iter().map(|seen| seen.first_line).collect();
            assert!(paths.is_empty(), "{request:?} reached the upstream: {paths:?}");
        }
    }
    // Both framings: the coding wins, the connection ends, and the following bytes are not read as a request (RFC 9112,
    // 6.1).
    for both in [
        format!("content-length: {length}\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("transfer-encoding: chunked\r\ncontent-length: {length}\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("transfer-encoding: chunked\r\ncontent-length: nonsense\r\n\r\n0\r\n\r\n{smuggled}"),
    ] {
        for key in ["", "idempotency-key: both\r\n"] {
            let before = upstream.seen().len();
            let mut wire = Wire::connect(proxy.address).await;
            wire.send(format!("POST /first HTTP/1.1\r\nhost: shop\r\n{key}{both}")).await;
            assert_eq!(wire.answer("POST").await.status(), 201, "{both:?}");
            assert_eq!(wire.rest().await, b"", "the connection went on: {both:?}");
            let seen = upstream.seen();
            assert!(seen.len() <= before + 1, "{both:?}: {seen:?}");
            assert!(seen.iter().all(|seen| !seen.first_line.contains("smuggled")), "{both:?}: {seen:?}");
        }
    }
    // Harmless forms: the same length twice, and lines that end in LF alone.
    for (at, request) in [
        "POST /a HTTP/1.1\r\nhost: shop\r\ncontent-length: 4\r\ncontent-length: 4\r\n\r\nbody",
        "POST /a HTTP/1.1\nhost: shop\ncontent-length: 4\n\nbody",
        "\r\nPOST /a HTTP/1.1\r\nhost: shop\r\ncontent-length: 4\r\n\r\nbody",
    ]
    .into_iter()
    .enumerate()
    {
        for keyed in [false, true] {
            let key = format!("host: shop\r\nidempotency-key: harmless-{at}");
            let request = if keyed { request.replacen("host: shop", &key, 1) } else { request.to_owned() };
            let answer = exchange(&proxy, "POST", &request).await.expect("an answer");
            assert_eq!(answer.status(), 201, "{request:?}");
            let seen = upstream.seen().pop().unwrap();
            assert_eq!(
                (seen.text().as_str(), seen.all("content-length")),
                ("body", vec!["4"]),
                "{request:?}"
            );
        }
    }
}

/// An absolute target must agree with `Host`, and the upstream gets a path.
#[tokio::test]
async fn a_target_names_one_host() {
    let (_store, proxy, upstream) = proxied(ProxyConfig::default()).await;
    for (target, host, status) in [
        ("http://shop/a", "host: shop\r\n", 201),
        ("http://shop/a", "host: SHOP:80\r\n", 201),
        ("http://shop/a", "", 201),
        ("http://evil/a", "host: shop\r\n", 400),
        ("http://user@shop/a", "host: shop\r\n", 400),
        ("/a", "host: shop\r\nhost: shop\r\n", 400),
        ("/a", "host: shop\r\nhost: evil\r\n", 400),
        ("/a", "", 400),
        ("shop:80", "host: shop:80\r\n", 400),
    ] {
        for key in ["", "idempotency-key: k\r\n"] {
            let before = upstream.seen().len();
            let request = format!("POST {target} HTTP/1.1\r\n{host}{key}content-length: 2\r\n\r\n{{}}");
            let answer = exchange(&proxy, "POST", &request).await.expect("an answer");
            assert_eq!(answer.status(), status, "{request:?}: {}", answer.text());
            let seen = upstream.seen();
            if status == 400 {
                assert_eq!(seen.len(), before, "{request:?} reached the upstream");
            } else if let Some(seen) = seen.get(before) {
                assert_eq!(seen.first_line, "POST /a HTTP/1.1", "{request:?}");
                assert!(seen.all("host")[0].to_lowercase().starts_with("shop"), "{seen:?}");
            }
        }
    }
    // HTTP/1.0 has no host.
    let answer = exchange(&proxy, "POST", "POST /a HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}").await;
    assert_eq!(answer.expect("an answer").status(), 201);
}

/// The caller is told to continue once its body is needed, and only then.
#[tokio::test]
async fn a_caller_that_waits_to_be_told_to_continue() {
    let policy = Policy { request_bytes_max: 10, ..Policy::default() };
    let (_store, proxy, upstream) = proxied(with_policy(policy)).await;
    let head = |key: &str, length: usize| {
        format!(
            "POST /a HTTP/1.1\r\nhost: shop\r\nexpect: 100-continue\r\n{key}content-length: {length}\r\n\r\n"
        )
    };
    for (key, replay) in [("", false), ("idempotency-key: k\r\n", false), ("idempotency-key: k\r\n", true)] {
        let mut wire = Wire::connect(proxy.address).await;
        wire.send(head(key, 4)).await;
        assert_eq!(wire.head().await.unwrap().status(), 100, "{key}");
        wire.send("body").await;
        let answer = wire.answer("POST").await;
        assert_eq!((answer.status(), answer.is_replay()), (201, replay));
        let seen = upstream.seen().pop().unwrap();
        assert!(seen.all("expect").is_empty() && seen.text() == "body", "{seen:?}");
    }
    // Refused because of its key or its size: it is not told to continue, and the proxy does not wait for the body.
    for (key, length, status) in
        [("idempotency-key: a,b\r\n", 4, 400), ("idempotency-key: large\r\n", 11, 413)]
    {
        let mut wire = Wire::connect(proxy.address).await;
        wire.send(head(key, length)).await;
        assert_eq!(wire.head().await.unwrap().status(), status, "{key}");
    }
    // A body sent without waiting is also read.
    let mut wire = Wire::connect(proxy.address).await;
    wire.send(head("idempotency-key: at-once\r\n", 4) + "body").await;
    assert_eq!(wire.answer("POST").await.status(), 201);
    assert_eq!(upstream.seen().len(), 3);
}

/// Cookies in one field or in several, over HTTP/1 or HTTP/2, identify the same caller.
#[tokio::test]
async fn cookies_in_pieces_are_the_same_caller() {
    for tenant in ["credentials", "cookie:session"] {
        let config = ProxyConfig { tenant: tenant.parse::<Tenant>().unwrap(), ..ProxyConfig::default() };
        let (_store, proxy, upstream) = proxied(config).await;
        let ways: [(&str, &[&str]); 6] = [
            ("2", &["a=1", "session=x", "b=2"]),
            ("1", &["a=1; session=x; b=2"]),
            ("1", &["a=1;session=x;b=2"]),
            ("1", &["a=1", "session=x; b=2"]),
            ("2", &["a=1; session=x; b=2"]),
            ("2", &["a=1; session=x", "b=2"]),
        ];
        for (at, (version, fields)) in ways.into_iter().enumerate() {
            let client = if version == "2" { Client::http2() } else { Client::new() };
            let mut request = common::post(proxy.address, "/orders", "k", "{}");
            for field in fields {
                request.headers_mut().append("cookie", field.parse().unwrap());
            }
            let answer = client.send(request).await;
            assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, at > 0), "{tenant}: {fields:?}");
            let seen = upstream.seen();
            assert_eq!((seen.len(), seen[0].all("cookie")), (1, vec!["a=1; session=x; b=2"]));
        }
        // Another session is another caller.
        let mut other = common::post(proxy.address, "/orders", "k", "{}");
        other.headers_mut().append("cookie", "a=1; session=y; b=2".parse().unwrap());
        assert!(!Client::new().send(other).await.is_replay());
    }
}

/// Headers that determine the caller cannot be hidden from the upstream, and hidden headers determine nothing.
#[tokio::test]
async fn connection_takes_out_nothing_that_decides_the_tenant() {
    let by_header: Tenant = "header:x-account".parse().unwrap();
    let by_function = Tenant::function(|parts| {
        Some(parts.headers.get("x-account").map_or("nobody", |value| value.to_str().unwrap()).to_owned())
    });
    for (tenant, kept, names) in [
        (Tenant::Credentials, true, &["authorization", "x-api-key", "cookie"][..]),
        (by_header, true, &["x-account"]),
        ("cookie:s".parse().unwrap(), true, &["cookie"]),
        (by_function, false, &["x-account"]),
    ] {
        for name in names {
            let config = ProxyConfig { tenant: tenant.clone(), ..ProxyConfig::default() };
            let (_store, proxy, upstream) = proxied(config).await;
            let send = |value: &str, hidden: bool| {
                let hide = if hidden { format!("connection: {name}, keep-alive\r\n") } else { String::new() };
                let head = format!(
                    "POST /a HTTP/1.1\r\nhost: shop\r\nidempotency-key: k\r\n{name}: {value}\r\n{hide}"
                );
                exchange(&proxy, "POST", head + "content-length: 2\r\n\r\n{}")
            };
            assert!(!send("s=1", false).await.unwrap().is_replay());
            let hidden = send("s=1", true).await.unwrap();
            assert_eq!(hidden.is_replay(), kept, "{tenant} {name}: {hidden:?}");
            let other = send("s=2", true).await.unwrap();
            let seen = upstream.seen().pop().unwrap();
            if kept {
                assert!(!other.is_replay(), "{tenant} {name}");
                assert_eq!(seen.all(name), ["s=2"], "{tenant}: the service does not see who is calling");
            } else {
                // Hidden from both the upstream and the function: both see a caller without a name.
                assert!(other.is_replay() && seen.all(name).is_empty(), "{tenant} {name}: {seen:?}");
            }
        }
    }
}

/// `Connection` can remove hop-by-hop headers, but nothing that belongs to the request.
#[tokio::test]
async fn connection_takes_out_what_it_lists() {
    let (_store, proxy, upstream) =
        proxied(ProxyConfig { trust_forwarded: true, ..ProxyConfig::default() }).await;
    let request = "POST /a HTTP/1.1\r\nhost: shop\r\nconnection: x-hop, content-type, host, x-forwarded-for, content-length\r\n\
                   connection: te, X-Other\r\nx-hop: 1\r\nx-other: 1\r\nx-end: 1\r\ncontent-type: text/plain\r\n\
                   x-forwarded-for: 10.0.0.1\r\nte: gzip, trailers\r\nkeep-alive: 1\r\ntrailer: x\r\n\
                   proxy-connection: close\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}";
    assert_eq!(exchange(&proxy, "POST", request).await.unwrap().status(), 201);
    let seen = upstream.seen().pop().unwrap();
    for gone in ["connection", "x-hop", "x-other", "keep-alive", "proxy-connection", "upgrade"] {
        assert!(seen.all(gone).is_empty(), "{gone}: {seen:?}");
    }
    for (name, value) in
        [("host", "shop"), ("content-type", "text/plain"), ("te", "trailers"), ("x-end", "1")]
    {
        assert_eq!(seen.all(name), [value], "{seen:?}");
    }
    assert_eq!(seen.all("x-forwarded-for"), ["10.0.0.1, 127.0.0.1"]);
}
