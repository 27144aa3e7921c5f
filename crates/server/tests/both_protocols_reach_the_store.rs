//! A message's lifecycle over real sockets and a real store, in both protocols; and requests that are not SQS.

mod support;

use hapax_server::ServerConfig;
use hapax_server::config::{AuthConfig, KeyConfig, Secret};
use support::Running;

fn field(body: &str, name: &str) -> String {
    let json: serde_json::Value = serde_json::from_str(body).unwrap();
    json["Messages"][0][name].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn json_sends_receives_and_deletes() {
    let server = Running::start(ServerConfig::default()).await;
    let created = server.json("CreateQueue", r#"{"QueueName":"q"}"#).await;
    assert_eq!(created.body, r#"{"QueueUrl":"http://localhost/000000000000/q"}"#);
    let sent = server.json("SendMessage", r#"{"QueueUrl":"q","MessageBody":"h\u00e4llo"}"#).await;
    assert!(sent.body.contains("MD5OfMessageBody"), "{}", sent.body);
    let received = server.json("ReceiveMessage", r#"{"QueueUrl":"q"}"#).await;
    assert_eq!(field(&received.body, "Body"), "hällo");
    let receipt = field(&received.body, "ReceiptHandle");
    let body = serde_json::json!({ "QueueUrl": "q", "ReceiptHandle": receipt }).to_string();
    assert_eq!(server.json("DeleteMessage", &body).await.body, "{}");
    let purged = server.query("/000000000000/q", "Action=GetQueueAttributes&AttributeName.1=All").await;
    assert!(
        purged.body.contains("<Name>ApproximateNumberOfMessages</Name><Value>0</Value>"),
        "{}",
        purged.body
    );
}

#[tokio::test]
async fn query_works_on_the_queue_s_own_path() {
    let server = Running::start(ServerConfig::default()).await;
    server
        .query("/", "Action=CreateQueue&QueueName=q&Attribute.1.Name=DelaySeconds&Attribute.1.Value=0")
        .await;
    let sent = server.query("/000000000000/q", "Action=SendMessage&MessageBody=a%26b").await;
    assert!(sent.body.contains("<SendMessageResult><MessageId>"), "{}", sent.body);
    let get =
        "GET /000000000000/q?Action=ReceiveMessage HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let received = server.send(get).await;
    assert!(received.body.contains("<Body>a&amp;b</Body>"), "{}", received.body);
}

#[tokio::test]
async fn health_and_readiness_are_told() {
    let server = Running::start(ServerConfig::default()).await;
    for path in ["/healthz", "/readyz"] {
        let get = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        assert_eq!(server.send(&get).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn a_foreign_host_or_site_is_refused_in_aws_s_shape() {
    let server = Running::start(ServerConfig::default()).await;
    let rebound = support::json("ListQueues", "{}").replace("host: localhost", "host: evil.example");
    let cross = support::json("ListQueues", "{}").replace("host:", "origin: https://evil.example\r\nhost:");
    for request in [rebound, cross] {
        let answer = server.send(&request).await;
        assert_eq!(answer.status, 403);
        assert!(answer.body.contains("AccessDeniedException"), "{}", answer.body);
    }
}

#[tokio::test]
async fn an_address_beyond_loopback_needs_keys() {
    let folder = tempfile::tempdir().unwrap();
    let store = hapax_embedded::Embedded::open(folder.path(), hapax_embedded::Options::default()).unwrap();
    let store = std::sync::Arc::new(store);
    let config = ServerConfig { listen: vec!["0.0.0.0:0".parse().unwrap()], ..ServerConfig::default() };
    let error = hapax_server::Server::new(config.clone(), store.clone()).unwrap().bind().await.unwrap_err();
    assert_eq!(error.code(), "exposed-without-keys");
    let auth = AuthConfig { insecure: true, ..AuthConfig::default() };
    let config = ServerConfig { auth, ..config };
    assert!(hapax_server::Server::new(config, store).unwrap().bind().await.is_ok());
}

#[tokio::test]
async fn the_router_is_reached_with_a_bearer_token_only() {
    let key = KeyConfig {
        id: "AK".into(),
        secret: Some(Secret::new("s")),
        secret_file: None,
        secret_env: None,
        queues: vec!["*".into()],
        actions: vec!["*".into()],
    };
    let auth = AuthConfig { keys: vec![key], ..AuthConfig::default() };
    let router = axum::Router::new()
        .route(
            "/v1/who",
            axum::routing::get(|identity: axum::Extension<hapax_server::auth::Identity>| async move {
                identity.name().to_owned()
            }),
        )
        .route("/assets/x", axum::routing::get(|| async { "public" }));
    let config = ServerConfig { auth, ..ServerConfig::default() };
    let server = Running::start_with(config, |server| server.with_router(router, &["/assets/"])).await;
    let get = |path: &str, extra: &str| {
        format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{extra}\r\n")
    };
    let refused = server.send(&get("/v1/who", "")).await;
    assert_eq!(refused.status, 401);
    assert!(refused.head.contains("application/problem+json"), "{}", refused.head);
    assert!(refused.body.contains("\"code\":\"unauthenticated\""), "{}", refused.body);
    assert_eq!(server.send(&get("/v1/who", "authorization: Bearer AK:no\r\n")).await.status, 401);
    assert_eq!(server.send(&get("/v1/who", "authorization: Bearer AK:s\r\n")).await.body, "AK");
    assert_eq!(server.send(&get("/assets/x", "")).await.body, "public");
    let unsigned = server.json("ListQueues", "{}").await;
    assert!(unsigned.body.contains("MissingAuthenticationToken"), "{}", unsigned.body);
}
