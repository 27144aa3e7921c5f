//! One connection to one broker: one request at a time.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use kafka_protocol::messages::{ApiVersionsRequest, ApiVersionsResponse, RequestHeader, ResponseHeader};
use kafka_protocol::protocol::{Decodable as _, Encodable as _, HeaderVersion, VersionRange};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use super::{Call, Connect, WireError, bounded, sasl, text};

/// The version of the first request, which every broker since 2.4 knows.
const API_VERSIONS_VERSION: i16 = 3;

/// What a broker supports.
#[derive(Debug, Clone, Default)]
pub struct Versions {
    requests: HashMap<i16, VersionRange>,
    features: HashMap<String, i16>,
}

impl Versions {
    /// The finalised level of a feature of the cluster, for example `transaction.version`. 0: not finalised.
    pub fn feature(&self, name: &str) -> i16 {
        self.features.get(name).copied().unwrap_or(0)
    }

    fn read(response: &ApiVersionsResponse) -> Self {
        let range = |min, max| VersionRange { min, max };
        Self {
            requests: response
                .api_keys
                .iter()
                .map(|api| (api.api_key, range(api.min_version, api.max_version)))
                .collect(),
            features: response
                .finalized_features
                .iter()
                .map(|feature| (feature.name.to_string(), feature.max_version_level))
                .collect(),
        }
    }
}

/// Plain TCP or TLS.
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A connection to a broker, authenticated, with the versions negotiated.
///
/// After an error or a cancelled call it must be dropped: the response may still arrive.
pub struct Connection {
    stream: Stream,
    address: String,
    correlation_id: i32,
    versions: Versions,
    connect: std::sync::Arc<Connect>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects to `address`, within the connect timeout.
    pub async fn open(address: &str, connect: &std::sync::Arc<Connect>) -> Result<Self, WireError> {
        let reason = |reason: String| WireError::Connect { address: address.to_owned(), reason };
        timeout(connect.connect_timeout, Self::open_unbounded(address, connect))
            .await
            .map_err(|_| reason(format!("not within {} ms", connect.connect_timeout.as_millis())))?
            .map_err(|error| match error {
                // During the handshakes no request was sent that matters.
                WireError::Closed { source, .. } => reason(source.to_string()),
                other => other,
            })
    }

    async fn open_unbounded(address: &str, connect: &std::sync::Arc<Connect>) -> Result<Self, WireError> {
        let failed = |source: io::Error| WireError::Connect {
            address: address.to_owned(),
            reason: source.to_string(),
        };
        let tcp = TcpStream::connect(address).await.map_err(failed)?;
        tcp.set_nodelay(true).map_err(failed)?;
        let stream = match &connect.tls {
            None => Stream::Plain(tcp),
            Some(tls) => Stream::Tls(Box::new(tls.handshake(address, tcp).await?)),
        };
        let mut connection = Self {
            stream,
            address: address.to_owned(),
            correlation_id: 0,
            versions: Versions::default(),
            connect: connect.clone(),
        };
        let request = ApiVersionsRequest::default()
            .with_client_software_name(text("hapax"))
            .with_client_software_version(text(env!("CARGO_PKG_VERSION")));
        let response = connection.call_version(&request, API_VERSIONS_VERSION).await?;
        if response.error_code != 0 {
            return Err(connection.invalid(format!("error {} to ApiVersions", response.error_code)));
        }
        connection.versions = Versions::read(&response);
        if let Some(sasl) = &connect.sasl {
            sasl::authenticate(&mut connection, sasl).await?;
        }
        Ok(connection)
    }

    /// The broker's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What the broker supports.
    pub fn versions(&self) -> &Versions {
        &self.versions
    }

    /// Sends a request in the newest version both sides know, but not above `version_max`, and waits for the response,
    /// within the request timeout.
    pub async fn call<R: Call>(
        &mut self,
        request: &R,
        version_max: i16,
    ) -> Result<(R::Answer, i16), WireError> {
        let client = VersionRange { min: R::VERSIONS.min, max: R::VERSIONS.max.min(version_max) };
        let broker = self.versions.requests.get(&R::KEY).copied().unwrap_or(VersionRange { min: 0, max: -1 });
        let both = client.intersect(&broker);
        if both.is_empty() {
            return Err(WireError::Unsupported {
                address: self.address.clone(),
                api: R::KEY,
                broker: broker.to_string(),
                client: client.to_string(),
            });
        }
        let limit = self.connect.request_timeout;
        let response = timeout(limit, self.call_version(request, both.max)).await.map_err(|_| {
            WireError::TimedOut { address: self.address.clone(), limit_ms: limit.as_millis() }
        })??;
        Ok((response, both.max))
    }

    /// One request and its response, without a time limit.
    async fn call_version<R: Call>(&mut self, request: &R, version: i16) -> Result<R::Answer, WireError> {
        self.correlation_id = self.correlation_id.wrapping_add(1);
        let frame = self.encode(request, version).map_err(|error| self.invalid(error.to_string()))?;
        self.stream.write_all(&frame).await.map_err(|source| self.closed(source))?;
        self.stream.flush().await.map_err(|source| self.closed(source))?;
        let mut body = self.read_frame().await?;
        let header_version = <R::Answer as HeaderVersion>::header_version(version);
        let header = ResponseHeader::decode(&mut body, header_version)
            .map_err(|error| self.invalid(error.to_string()))?;
        if header.correlation_id != self.correlation_id {
            let expected = self.correlation_id;
            return Err(
                self.invalid(format!("correlation id {} instead of {expected}", header.correlation_id))
            );
        }
        bounded::decode(body, version).map_err(|error| self.invalid(error))
    }

    fn encode<R: Call>(&self, request: &R, version: i16) -> Result<BytesMut, impl std::fmt::Display> {
        let header = RequestHeader::default()
            .with_request_api_key(R::KEY)
            .with_request_api_version(version)
            .with_correlation_id(self.correlation_id)
            .with_client_id(Some(text(&self.connect.client_id)));
        let mut frame = BytesMut::new();
        frame.put_i32(0);
        header
            .encode(&mut frame, R::header_version(version))
            .and_then(|()| request.encode(&mut frame, version))
            .map(|()| {
                let bytes = u32::try_from(frame.len() - 4).unwrap_or(u32::MAX);
                frame[..4].copy_from_slice(&bytes.to_be_bytes());
                frame
            })
    }

    async fn read_frame(&mut self) -> Result<Bytes, WireError> {
        let bytes = self.stream.read_i32().await.map_err(|source| self.closed(source))?;
        let bytes_max = self.connect.response_bytes_max;
        let length = usize::try_from(bytes).ok().filter(|length| *length <= bytes_max).ok_or_else(|| {
            WireError::TooLarge { address: self.address.clone(), bytes: bytes.into(), bytes_max }
        })?;
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).await.map_err(|source| self.closed(source))?;
        Ok(body.into())
    }

    pub(super) fn invalid(&self, reason: String) -> WireError {
        WireError::Invalid { address: self.address.clone(), reason }
    }

    fn closed(&self, source: io::Error) -> WireError {
        WireError::Closed { address: self.address.clone(), source }
    }
}
