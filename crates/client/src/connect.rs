use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::{Capabilities, LedgerCapabilities, StoreError};
use http::StatusCode;
use thiserror::Error;

use crate::transport::{Effect, Failure, Transport};
use crate::wire::{BackupBody, BackupResponse, ServerStatus};

/// A bearer token, `ID:SECRET` of one of the server's keys. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub(crate) String);

impl Token {
    /// Wraps `ID:SECRET`.
    pub fn new(token: impl Into<String>) -> Self {
        Self(token.into())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(redacted)")
    }
}

/// The options of a client.
#[derive(Debug, Clone)]
pub struct Options {
    /// The key to authenticate with. Default none, which a server without keys accepts on loopback.
    pub token: Option<Token>,
    /// Timeout for opening a connection. Default 5 s.
    pub connect_timeout: Duration,
    /// Timeout for a response, in addition to the wait time of a receive. Default 30 s.
    pub timeout: Duration,
    /// How long an idle connection is kept; must be less than on the server (120 s). Default 60 s.
    pub idle_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            token: None,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_mins(1),
        }
    }
}

/// Why a client could not be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The endpoint is not valid.
    #[error("{endpoint:?} is not an endpoint: {problem}; use http://HOST:PORT or https://HOST:PORT")]
    Endpoint {
        /// The given text, without its secret.
        endpoint: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The token contains characters that are not allowed in a header.
    #[error("the token cannot be sent: it holds characters that are not allowed in a header")]
    Token,
    /// No connection could be opened.
    #[error(
        "nothing answers at {endpoint} ({why}); start a server there with `hapax serve`, or name another"
    )]
    Unreachable {
        /// The endpoint, without its secret.
        endpoint: String,
        /// The cause.
        why: String,
    },
    /// The server refused the request, or its response is not that of a Hapax server.
    #[error("{endpoint}: {error}")]
    Server {
        /// The endpoint, without its secret.
        endpoint: String,
        /// The refusal, or the problem with the response.
        error: StoreError,
    },
}

impl ConnectError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Endpoint { .. } | Self::Token => "invalid",
            Self::Unreachable { .. } => "unavailable",
            Self::Server { error, .. } => error.code(),
        }
    }
}

fn connect_error(transport: &Transport, failure: Failure) -> ConnectError {
    let endpoint = transport.endpoint().to_owned();
    let error = match failure {
        Failure::Unreachable(why) => {
            // The message names the endpoint already.
            let why = why.strip_prefix(&format!("{endpoint}: ")).unwrap_or(&why).to_owned();
            return ConnectError::Unreachable { endpoint, why };
        }
        Failure::Refused(StatusCode::UNAUTHORIZED, _) => StoreError::Invalid(if transport.has_token() {
            "the server wants a token and does not take this one; check HAPAX_TOKEN, ID:SECRET of one of its keys".to_owned()
        } else {
            "the server wants a token; put ID:SECRET of one of its keys into HAPAX_TOKEN".to_owned()
        }),
        failure => match failure.into_store_error(Effect::None) {
            StoreError::Invalid(why) => {
                StoreError::Invalid(format!("this does not respond as a Hapax server: {why}"))
            }
            error => error,
        },
    };
    ConnectError::Server { endpoint, error }
}

/// A Hapax server as a store. Clones are cheap and share their connections.
#[derive(Clone)]
pub struct Client {
    pub(crate) transport: Arc<Transport>,
    capabilities: Arc<Capabilities>,
    ledger: Arc<LedgerCapabilities>,
    waiting: Arc<AtomicUsize>,
}

impl Client {
    /// Connects to a server and reads its store's features. The token may also be part of the endpoint:
    /// `https://ID:SECRET@queues.example`.
    pub async fn connect(endpoint: &str, token: Option<Token>) -> Result<Self, ConnectError> {
        Self::connect_with(endpoint, Options { token, ..Options::default() }).await
    }

    /// Connects with the given options.
    pub async fn connect_with(endpoint: &str, options: Options) -> Result<Self, ConnectError> {
        let transport = Transport::new(endpoint, options)?;
        let status = transport.get::<ServerStatus>("/v1/status").await;
        let status = status.map_err(|failure| connect_error(&transport, failure))?;
        // An older server has no ledger: it answers claims with "no such path".
        let name = format!("{} (no ledger)", status.capabilities.name);
        let no_ledger = LedgerCapabilities { name, durable: false, fence: false, may_evict: true };
        Ok(Self {
            transport: Arc::new(transport),
            capabilities: Arc::new(status.capabilities),
            ledger: Arc::new(status.ledger.unwrap_or(no_ledger)),
            waiting: Arc::default(),
        })
    }

    /// The server's address, without the secret.
    pub fn endpoint(&self) -> &str {
        self.transport.endpoint()
    }

    /// Lets the server write a backup of its store to `to`: the name of a new file in its folder for backups, or its absolute
    /// path. Returns the path.
    pub async fn backup(&self, to: &str) -> Result<String, StoreError> {
        let body = BackupBody { to: to.to_owned() };
        // Copying a large store may take hours.
        let timeout = Duration::from_hours(24);
        let answer = self.transport.post_within::<_, BackupResponse>("/v1/backup", &body, timeout).await;
        answer.map(|answer| answer.path).map_err(|failure| failure.into_store_error(Effect::Change))
    }

    /// Number of running calls that may wait: receives (including those being cancelled) and claims.
    pub fn waiting_calls(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    pub(crate) fn count_call(&self) -> CallGuard {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        CallGuard(self.waiting.clone())
    }

    pub(crate) fn cached_ledger_capabilities(&self) -> LedgerCapabilities {
        (*self.ledger).clone()
    }

    pub(crate) fn cached_capabilities(&self) -> Capabilities {
        (*self.capabilities).clone()
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("endpoint", &self.endpoint()).finish_non_exhaustive()
    }
}

/// Counts one running call until it is dropped.
pub(crate) struct CallGuard(Arc<AtomicUsize>);

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_missing_a_wrong_token_and_a_server_that_is_down_are_told_apart() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().await.unwrap();
                assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
                let answer = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                stream.write_all(answer).await.unwrap();
            }
        });
        let missing = Client::connect(&endpoint, None).await.unwrap_err().to_string();
        assert!(missing.contains("wants a token") && missing.contains("into HAPAX_TOKEN"), "{missing}");
        let wrong = Client::connect(&endpoint, Some(Token::new("a:b"))).await.unwrap_err().to_string();
        assert!(wrong.contains("does not take this one; check HAPAX_TOKEN"), "{wrong}");
        server.await.unwrap();
        let down = Client::connect(&endpoint, None).await.unwrap_err();
        assert!(matches!(down, ConnectError::Unreachable { .. }), "{down:?}");
        let down = down.to_string();
        assert!(
            down.contains(&format!("nothing answers at {endpoint}")) && down.contains("hapax serve"),
            "{down}"
        );
    }
}
