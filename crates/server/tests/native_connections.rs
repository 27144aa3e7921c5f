//! Failures that a network adds to a store: broken connections, wrong keys, servers that disappear.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, ConnectError, Token};
use hapax_core::{NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, StoreError};
use hapax_embedded::{Embedded, Options};
use hapax_server::config::{AuthConfig, KeyConfig, Secret};
use hapax_server::native::Native;
use hapax_server::{Server, ServerConfig};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

struct Running {
    _folder: tempfile::TempDir,
    address: SocketAddr,
    native: Native,
    stop: oneshot::Sender<()>,
    serving: tokio::task::JoinHandle<()>,
}

async fn serve(keys: Vec<KeyConfig>) -> Running {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path(), Options::default()).unwrap());
    let config = ServerConfig {
        listen: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))],
        auth: AuthConfig { keys, ..AuthConfig::default() },
        ..ServerConfig::default()
    };
    let server = Server::new(config, store.clone()).unwrap();
    let native = Native::new(store, server.shutdown(), None);
    let server = server.with_router(native.router(), &[]);
    let listeners = server.bind().await.unwrap();
    let address = listeners[0].local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(server.run(listeners, async { drop(stopped.await) }));
    Running { _folder: folder, address, native, stop, serving }
}

impl Running {
    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    async fn receives(&self, count: usize) {
        let reached = async {
            while self.native.waiting_calls() != count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), reached)
            .await
            .expect("the receives are there, or gone");
    }
}

fn jobs() -> QueueName {
    QueueName::new("jobs").unwrap()
}

fn patient() -> Receive {
    Receive { wait_ms: Some(20_000), ..Receive::default() }
}

#[tokio::test]
async fn a_closed_connection_takes_its_receive_with_it() {
    let running = serve(Vec::new()).await;
    let client = Client::connect(&running.endpoint(), None).await.unwrap();
    client.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    let mut raw = TcpStream::connect(running.address).await.unwrap();
    let body = r#"{"wait_ms":20000}"#;
    let head = format!(
        "POST /v1/queues/jobs/receive HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    raw.write_all(head.as_bytes()).await.unwrap();
    running.receives(1).await;
    drop(raw);
    running.receives(0).await;
    client.send(&jobs(), vec![NewMessage::new("x")]).await.unwrap();
    assert_eq!(client.receive(&jobs(), patient()).await.unwrap()[0].attempt, 1);
}

#[tokio::test]
async fn a_dropped_receive_is_cancelled_at_the_server() {
    let running = serve(Vec::new()).await;
    let client = Client::connect(&running.endpoint(), None).await.unwrap();
    client.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.receive(&jobs(), patient()).await }
    });
    running.receives(1).await;
    waiting.abort();
    running.receives(0).await;
    client.send(&jobs(), vec![NewMessage::new("x")]).await.unwrap();
    assert_eq!(client.receive(&jobs(), patient()).await.unwrap()[0].attempt, 1);
}

#[tokio::test]
async fn a_server_that_goes_answers_long_polls_and_is_unavailable_afterwards() {
    let running = serve(Vec::new()).await;
    let client = Client::connect(&running.endpoint(), None).await.unwrap();
    client.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.receive(&jobs(), patient()).await }
    });
    running.receives(1).await;
    drop(running.stop);
    assert_eq!(waiting.await.unwrap(), Ok(Vec::new()));
    running.serving.await.unwrap();
    let sent = client.send(&jobs(), vec![NewMessage::new("x")]).await;
    assert!(matches!(sent, Err(StoreError::Unavailable(_))), "{sent:?}");
    let status = client.status().await;
    assert!(matches!(status, Err(StoreError::Unavailable(_))), "{status:?}");
    // A closed client does not retry, and says that it is closed.
    client.close().await.unwrap();
    let sent = client.send(&jobs(), vec![NewMessage::new("x")]).await.unwrap_err().to_string();
    assert!(sent.contains("the client is closed"), "{sent}");
}

#[tokio::test]
async fn a_key_is_needed_where_there_are_keys() {
    let key = KeyConfig {
        id: "AK".into(),
        secret: Some(Secret::new("s3cret")),
        secret_file: None,
        secret_env: None,
        queues: vec!["jobs".into()],
        actions: vec!["*".into()],
    };
    let running = serve(vec![key]).await;
    for wrong in [None, Some(Token::new("AK:wrong")), Some(Token::new("XX:s3cret"))] {
        let refused = Client::connect(&running.endpoint(), wrong).await;
        assert!(
            matches!(refused, Err(ConnectError::Server { error: StoreError::Invalid(_), .. })),
            "{refused:?}"
        );
    }
    let endpoint = format!("http://AK:s3cret@{}", running.address);
    let client = Client::connect(&endpoint, None).await.unwrap();
    assert!(!format!("{client:?}").contains("s3cret"));
    client.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    let other = client.create_queue(&QueueName::new("other").unwrap(), QueueConfig::sqs()).await;
    assert!(other.unwrap_err().to_string().contains("no right to CreateQueue"));
}
