//! TLS with rustls over HTTP/1.1 and HTTP/2, and HTTP/2 without TLS.

mod support;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use hapax_server::ServerConfig;
use hapax_server::config::TlsConfig;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use support::{Running, exchange, json};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

async fn tls_server() -> Running {
    let tls = TlsConfig { cert_file: fixture("localhost.crt"), key_file: fixture("localhost.key") };
    Running::start(ServerConfig { tls: Some(tls), ..ServerConfig::default() }).await
}

fn connector(protocol: &[u8]) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(fixture("localhost.crt")).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.to_vec()];
    TlsConnector::from(Arc::new(config))
}

async fn over_http2<S>(stream: S, scheme: &str) -> String
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::post(format!("{scheme}://localhost/"))
        .header("x-amz-target", "AmazonSQS.CreateQueue")
        .body(Full::new(Bytes::from_static(br#"{"QueueName":"q"}"#)))
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn https_with_http1_gives_https_urls() {
    let server = tls_server().await;
    let name = ServerName::try_from("localhost").unwrap();
    let stream = connector(b"http/1.1").connect(name, server.connect().await).await.unwrap();
    let answer = exchange(stream, &json("CreateQueue", r#"{"QueueName":"q"}"#)).await;
    assert_eq!(answer.body, r#"{"QueueUrl":"https://localhost/000000000000/q"}"#);
}

#[tokio::test]
async fn https_with_http2() {
    let server = tls_server().await;
    let name = ServerName::try_from("localhost").unwrap();
    let stream = connector(b"h2").connect(name, server.connect().await).await.unwrap();
    assert_eq!(over_http2(stream, "https").await, r#"{"QueueUrl":"https://localhost/000000000000/q"}"#);
}

#[tokio::test]
async fn http2_without_tls() {
    let server = Running::start(ServerConfig::default()).await;
    let answer = over_http2(server.connect().await, "http").await;
    assert_eq!(answer, r#"{"QueueUrl":"http://localhost/000000000000/q"}"#);
}
