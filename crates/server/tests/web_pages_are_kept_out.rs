//! A server without keys serves every local client, but not requests that a web page makes a browser send.

mod support;

use bytes::Bytes;
use hapax_server::ServerConfig;
use http::Request;
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use support::Running;

const BROWSER: (&str, &str) = ("user-agent", "Mozilla/5.0 (Macintosh) Version/15.0 Safari/605.1.15");

struct Case {
    what: &'static str,
    path: &'static str,
    /// In HTTP/2 the first `host` becomes `:authority`; further ones are header fields.
    headers: &'static [(&'static str, &'static str)],
    status: u16,
}

const fn case(
    what: &'static str,
    path: &'static str,
    headers: &'static [(&'static str, &'static str)],
    status: u16,
) -> Case {
    Case { what, path, headers, status }
}

const ACT: &str = "/000000000000/q?Action=GetQueueUrl&QueueName=q";

const CASES: &[Case] = &[
    // Host checks.
    case("its own name", ACT, &[("host", "localhost:9324")], 200),
    case("its own name in capitals", ACT, &[("host", "LOCALHOST")], 200),
    case("its own name with the final dot", ACT, &[("host", "localhost.:9324")], 200),
    case("its own address", ACT, &[("host", "127.0.0.1:9324")], 200),
    case("its own address, IPv6", ACT, &[("host", "[::1]:9324")], 200),
    case("a name below localhost", ACT, &[("host", "sqs.localhost")], 200),
    case("another name", ACT, &[("host", "evil.example")], 403),
    case("another name that begins with its own", ACT, &[("host", "localhost.evil.example")], 403),
    case("another name that ends in its own", ACT, &[("host", "evillocalhost")], 403),
    case("credentials before another name", ACT, &[("host", "127.0.0.1:80@evil.example")], 403),
    case("credentials before its own name", ACT, &[("host", "evil.example@127.0.0.1")], 403),
    case("a port that is no number", ACT, &[("host", "localhost:evil")], 403),
    case("an address without its bracket", ACT, &[("host", "[::1")], 403),
    case("words behind the bracket", ACT, &[("host", "[::1]evil.example")], 403),
    case("the same host twice", ACT, &[("host", "localhost"), ("host", "localhost")], 403),
    case("two hosts, its own first", ACT, &[("host", "localhost"), ("host", "evil.example")], 403),
    case("two hosts, its own last", ACT, &[("host", "evil.example"), ("host", "localhost")], 403),
    // Query checks: GET requests from a browser that does not name the requesting site.
    case("a browser that acts", ACT, &[("host", "localhost"), BROWSER], 403),
    case("a program that acts", ACT, &[("host", "localhost"), ("user-agent", "curl/8.0")], 200),
    case(
        "an action in disguise",
        "/000000000000/q?%41ction=GetQueueUrl&QueueName=q",
        &[("host", "localhost"), BROWSER],
        403,
    ),
    case(
        "an action all in disguise",
        "/?QueueName=q&%41%63%74%69%6f%6e=GetQueueUrl",
        &[("host", "localhost"), BROWSER],
        403,
    ),
    case("a browser that looks", "/healthz", &[("host", "localhost"), BROWSER], 200),
    case("a browser with words alike", "/healthz?x=Action=1", &[("host", "localhost"), BROWSER], 200),
    // Site checks.
    case("another site", ACT, &[("host", "localhost"), ("sec-fetch-site", "cross-site")], 403),
    case("a sibling site", ACT, &[("host", "localhost"), ("sec-fetch-site", "same-site")], 403),
    case("a site of unknown form", ACT, &[("host", "localhost"), ("sec-fetch-site", "x")], 403),
    case(
        "two sites",
        ACT,
        &[("host", "localhost"), ("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")],
        403,
    ),
    case("the same site", ACT, &[("host", "localhost"), ("sec-fetch-site", "same-origin")], 200),
    case("typed by hand", ACT, &[("host", "localhost"), ("sec-fetch-site", "none"), BROWSER], 200),
    // Origin checks.
    case("another origin", ACT, &[("host", "localhost:9324"), ("origin", "https://evil.example")], 403),
    case("another port", ACT, &[("host", "localhost:9324"), ("origin", "http://localhost:3000")], 403),
    case("no origin in so many words", ACT, &[("host", "localhost:9324"), ("origin", "null")], 403),
    case(
        "an origin with credentials",
        ACT,
        &[("host", "localhost:9324"), ("origin", "http://evil@localhost:9324")],
        403,
    ),
    case("its own origin", ACT, &[("host", "localhost:9324"), ("origin", "http://localhost:9324")], 200),
    case(
        "two origins",
        ACT,
        &[
            ("host", "localhost:9324"),
            ("origin", "http://localhost:9324"),
            ("origin", "https://evil.example"),
        ],
        403,
    ),
];

async fn server() -> Running {
    let server = Running::start(ServerConfig::default()).await;
    assert_eq!(server.json("CreateQueue", r#"{"QueueName":"q"}"#).await.status, 200);
    server
}

#[tokio::test]
async fn hostile_requests_over_http1() {
    let server = server().await;
    let mut wrong = Vec::new();
    for Case { what, path, headers, status } in CASES {
        let lines: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let lines = lines.concat();
        let answer = server.send(&format!("GET {path} HTTP/1.1\r\n{lines}connection: close\r\n\r\n")).await;
        if answer.status != *status {
            wrong.push(format!("{what}: {} instead of {status}", answer.status));
        }
    }
    // An absolute target: its host is the one that counts (RFC 9112, 3.2.2), and it must not differ from the header.
    for (target, host, status) in [
        ("http://evil.example/healthz", "localhost", 403),
        ("http://localhost/healthz", "evil.example", 403),
        ("http://localhost/healthz", "localhost", 200),
    ] {
        let request = format!("GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let answer = server.send(&request).await;
        if answer.status != status {
            wrong.push(format!("{target} with host {host}: {} instead of {status}", answer.status));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn hostile_requests_over_http2() {
    let server = server().await;
    let io = TokioIo::new(server.connect().await);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let mut wrong = Vec::new();
    for Case { what, path, headers, status } in CASES {
        let authority = headers.iter().find(|(name, _)| *name == "host").unwrap().1;
        // This client cannot send an invalid authority.
        let Ok(mut request) =
            Request::get(format!("http://{authority}{path}")).body(Full::<Bytes>::default())
        else {
            continue;
        };
        let mut hosts = 0;
        for (name, value) in *headers {
            hosts += usize::from(*name == "host");
            if *name != "host" || hosts > 1 {
                request.headers_mut().append(*name, value.parse().unwrap());
            }
        }
        // A further field equal to `:authority` does not count as a second host.
        let same_again =
            hosts == 2 && headers.iter().all(|(name, value)| *name != "host" || *value == authority);
        let status = if same_again { 200 } else { *status };
        let answer = sender.send_request(request).await.unwrap();
        if answer.status() != status {
            wrong.push(format!("{what}: {} instead of {status}", answer.status()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
