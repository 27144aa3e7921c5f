//! An HTTP endpoint as a sink.
//!
//! Each message is one POST with its body. `Idempotency-Key` is the message's id; `webhook-id`, `webhook-timestamp` and
//! `webhook-signature` follow Standard Webhooks: the signature is `v1,` and the base64 of HMAC-SHA256 over
//! `id.timestamp.body`. A receiver checks it with [`verify`], or with any library for that format.
//!
//! | answer | meaning |
//! |---|---|
//! | 2xx | published |
//! | 408, 409, 425, 5xx, no answer in time | this message is tried again, others go on |
//! | 429, 502, 503, 504, no connection | nothing is sent for a while |
//! | other 4xx, 3xx | refused: the message is parked |

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax_core::outbox::{OutboxMessage, PublishAnswer, Publisher, SinkDedup, SinkDescription};
use http::{HeaderName, HeaderValue, Request, Uri};
use http_body_util::Full;
use ring::hmac;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::SinkError;
use super::http_client::{Http, NoResponse, excerpt};

/// How much the clocks of relay and receiver may differ: 5 minutes.
pub const TOLERANCE_S: u64 = 300;

/// How a secret begins that is given in base64.
const SECRET_PREFIX: &str = "whsec_";

/// Options of a [`WebhookSink`].
#[derive(Clone)]
pub struct WebhookOptions {
    /// The secret of the signature: `whsec_` and base64, or any text. Default none: requests are not signed.
    pub secret: Option<String>,
    /// Time limit of a request. Default 10 s.
    pub timeout: Duration,
    /// Maximum count of requests at the same time. Messages of one key are always sent one after the other. Default 16.
    pub concurrency: usize,
}

impl Default for WebhookOptions {
    fn default() -> Self {
        Self { secret: None, timeout: Duration::from_secs(10), concurrency: 16 }
    }
}

impl fmt::Debug for WebhookOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (timeout, concurrency) = (self.timeout, self.concurrency);
        write!(f, "WebhookOptions {{ timeout: {timeout:?}, concurrency: {concurrency}, .. }}")
    }
}

/// An HTTP endpoint.
pub struct WebhookSink {
    endpoint: Arc<Endpoint>,
    concurrency: usize,
    name: String,
}

struct Endpoint {
    http: Http,
    uri: Uri,
    key: Option<hmac::Key>,
}

impl WebhookSink {
    /// An endpoint by its URL, `http://…` or `https://…`.
    pub fn new(url: &str, options: &WebhookOptions) -> Result<Self, SinkError> {
        let uri: Uri = url.parse().map_err(|error| SinkError(format!("the webhook's URL: {error}")))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            return Err(SinkError("the webhook's URL is not http://HOST/… or https://HOST/…".to_owned()));
        }
        let http = Http::new(&uri, options.timeout)?;
        let key = options.secret.as_deref().map(signing_key).transpose()?;
        // Without the query, which may hold a secret.
        let host =
            uri.authority().map_or("", |authority| authority.as_str().rsplit('@').next().unwrap_or(""));
        let name = format!("webhook {}://{host}{}", uri.scheme_str().unwrap_or_default(), uri.path());
        Ok(Self {
            endpoint: Arc::new(Endpoint { http, uri, key }),
            concurrency: options.concurrency.max(1),
            name,
        })
    }
}

fn signing_key(secret: &str) -> Result<hmac::Key, SinkError> {
    let bytes = match secret.strip_prefix(SECRET_PREFIX) {
        Some(base64) => STANDARD.decode(base64).map_err(|_| {
            SinkError(format!("the webhook's secret: what follows {SECRET_PREFIX} is not base64"))
        })?,
        None => secret.as_bytes().to_vec(),
    };
    Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes))
}

fn signed_text(id: &str, timestamp_s: u64, body: &[u8]) -> Vec<u8> {
    [format!("{id}.{timestamp_s}.").as_bytes(), body].concat()
}

/// Why a webhook's request is not to be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// `webhook-id`, `webhook-timestamp` or `webhook-signature` is missing or unreadable.
    #[error("the request has no signature")]
    Unsigned,
    /// It was signed more than 5 minutes ago, or in the future: it may be a copy.
    #[error("the request's time differs by more than 5 minutes")]
    TooOld,
    /// It was changed, or signed with another secret.
    #[error("the signature does not match")]
    Mismatch,
}

/// Checks the signature of a request, for receivers. `now_s` is the time in seconds since 1970. Returns the message's id.
pub fn verify<'h>(
    secret: &str,
    headers: &'h http::HeaderMap,
    body: &[u8],
    now_s: u64,
) -> Result<&'h str, VerifyError> {
    let header =
        |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).ok_or(VerifyError::Unsigned);
    let (id, timestamp, signatures) =
        (header("webhook-id")?, header("webhook-timestamp")?, header("webhook-signature")?);
    let timestamp_s: u64 = timestamp.parse().map_err(|_| VerifyError::Unsigned)?;
    if timestamp_s.abs_diff(now_s) > TOLERANCE_S {
        return Err(VerifyError::TooOld);
    }
    let key = signing_key(secret).map_err(|_| VerifyError::Mismatch)?;
    let text = signed_text(id, timestamp_s, body);
    let given =
        signatures.split(' ').filter_map(|signature| STANDARD.decode(signature.strip_prefix("v1,")?).ok());
    if given.into_iter().any(|signature| hmac::verify(&key, &text, &signature).is_ok()) {
        Ok(id)
    } else {
        Err(VerifyError::Mismatch)
    }
}

/// Headers of a message that are not passed on: HTTP's own, and those that the sink sets.
fn is_reserved(name: &HeaderName) -> bool {
    const RESERVED: [&str; 9] = [
        "connection",
        "content-length",
        "host",
        "idempotency-key",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let name = name.as_str();
    RESERVED.contains(&name)
        || name.starts_with("webhook-")
        || name.starts_with("hapax-")
        || name.starts_with("proxy-")
}

impl Endpoint {
    fn request(&self, message: &OutboxMessage, now_s: u64) -> Result<Request<Full<bytes::Bytes>>, String> {
        let mut request = Request::post(self.uri.clone())
            .header("idempotency-key", format!("\"{}\"", message.id))
            .header("webhook-id", &message.id)
            .header("webhook-timestamp", now_s);
        if let Some(key) = &self.key {
            let tag = hmac::sign(key, &signed_text(&message.id, now_s, &message.body));
            request = request.header("webhook-signature", format!("v1,{}", STANDARD.encode(tag)));
        }
        let own =
            BTreeMap::from([("hapax-topic", Some(&message.topic)), ("hapax-key", message.key.as_ref())]);
        for (name, value) in own {
            if let Some(value) = value {
                let value =
                    HeaderValue::from_bytes(value.as_bytes()).map_err(|error| format!("{name}: {error}"))?;
                request = request.header(name, value);
            }
        }
        let mut has_type = false;
        for (name, value) in &message.headers {
            let name = HeaderName::try_from(name).map_err(|error| format!("header {name:?}: {error}"))?;
            let value =
                HeaderValue::from_bytes(value.as_bytes()).map_err(|error| format!("{name}: {error}"))?;
            if !is_reserved(&name) {
                has_type |= name == http::header::CONTENT_TYPE;
                request = request.header(name, value);
            }
        }
        if !has_type {
            let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(&message.body).is_ok();
            let kind = if is_json { "application/json" } else { "application/octet-stream" };
            request = request.header(http::header::CONTENT_TYPE, kind);
        }
        request.body(Full::new(message.body.clone())).map_err(|error| error.to_string())
    }

    async fn send(&self, message: &OutboxMessage) -> PublishAnswer {
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let request = match self.request(message, now_s) {
            Ok(request) => request,
            Err(problem) => return PublishAnswer::Refused(problem),
        };
        match self.http.send(request).await {
            Ok((status, _)) if status.is_success() => PublishAnswer::Published,
            Ok((status, body)) => {
                let answer = format!("the receiver answered {status}: {}", excerpt(&body));
                match status.as_u16() {
                    429 | 502..=504 => PublishAnswer::Unavailable(answer),
                    408 | 409 | 425 | 500.. => PublishAnswer::Failed(answer),
                    _ => PublishAnswer::Refused(answer),
                }
            }
            Err(NoResponse::Unreachable(why)) => PublishAnswer::Unavailable(why),
            Err(NoResponse::Lost(why)) => PublishAnswer::Failed(why),
        }
    }
}

#[async_trait]
impl Publisher for WebhookSink {
    fn describe(&self) -> SinkDescription {
        let mut warnings = Vec::new();
        if self.endpoint.key.is_none() {
            warnings.push(
                "requests are not signed: the receiver cannot tell who sent them; set a secret".to_owned(),
            );
        }
        SinkDescription {
            name: self.name.clone(),
            dedup: SinkDedup::ByReceiver,
            delays: false,
            batch_max: self.concurrency * 8,
            calls_max: 1,
            warnings,
        }
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        let mut answers = vec![PublishAnswer::NotTried; batch.len()];
        // One chain for each key; a message without a key is a chain of its own.
        let mut chains: Vec<Vec<(usize, OutboxMessage)>> = Vec::new();
        let mut of_key: BTreeMap<&str, usize> = BTreeMap::new();
        for (index, message) in batch.iter().enumerate() {
            let chain = message.ordered_key().map(|key| *of_key.entry(key).or_insert(chains.len()));
            match chain {
                Some(chain) if chain < chains.len() => chains[chain].push((index, message.clone())),
                _ => chains.push(vec![(index, message.clone())]),
            }
        }
        let permits = Arc::new(Semaphore::new(self.concurrency));
        let mut tasks = JoinSet::new();
        for chain in chains {
            let (permits, endpoint) = (permits.clone(), self.endpoint.clone());
            tasks.spawn(async move {
                let mut answers = Vec::new();
                for (index, message) in chain {
                    // It is closed when the receiver takes nothing.
                    let Ok(_permit) = permits.acquire().await else { break };
                    let answer = endpoint.send(&message).await;
                    let is_published = answer == PublishAnswer::Published;
                    if matches!(answer, PublishAnswer::Unavailable(_)) {
                        permits.close();
                    }
                    answers.push((index, answer));
                    if !is_published {
                        break;
                    }
                }
                answers
            });
        }
        while let Some(done) = tasks.join_next().await {
            // A task does not panic; if it did, its messages were not tried.
            for (index, answer) in done.unwrap_or_default() {
                answers[index] = answer;
            }
        }
        answers
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;

    fn signed(secret: &str, now_s: u64) -> Request<Full<bytes::Bytes>> {
        let options = WebhookOptions { secret: Some(secret.to_owned()), ..WebhookOptions::default() };
        let sink = WebhookSink::new("http://127.0.0.1:1/hook?token=x", &options).unwrap();
        assert_eq!(sink.describe().name, "webhook http://127.0.0.1:1/hook");
        sink.endpoint.request(&sample(7, Some("käse")), now_s).unwrap()
    }

    #[test]
    fn a_receiver_checks_the_signature_and_the_time() {
        for secret in ["plain", "whsec_c2VjcmV0IGtleQ=="] {
            let request = signed(secret, 1_000);
            let (headers, body) = (request.headers(), b"body 7");
            let check =
                |secret: &str, body: &[u8], now_s| verify(secret, headers, body, now_s).map(str::to_owned);
            assert_eq!(check(secret, body, 1_300), Ok(sample(7, None).id));
            assert_eq!(check(secret, body, 1_301), Err(VerifyError::TooOld));
            assert_eq!(check(secret, body, 699), Err(VerifyError::TooOld));
            assert_eq!(check(secret, b"body 8", 1_000), Err(VerifyError::Mismatch));
            assert_eq!(check("other", body, 1_000), Err(VerifyError::Mismatch));
            assert_eq!(verify(secret, &http::HeaderMap::new(), body, 1_000), Err(VerifyError::Unsigned));
        }
    }

    /// The example of the Standard Webhooks specification.
    #[test]
    fn the_signature_is_that_of_standard_webhooks() {
        let key = signing_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let body = br#"{"test": 2432232314}"#;
        let tag = hmac::sign(&key, &signed_text("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body));
        assert_eq!(STANDARD.encode(tag), "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn a_message_cannot_change_the_request() {
        let options = WebhookOptions::default();
        let sink = WebhookSink::new("http://127.0.0.1:1/", &options).unwrap();
        let mut message = sample(1, None);
        for (name, value) in
            [("Host", "evil"), ("webhook-id", "x"), ("tenant", "north"), ("Content-Length", "0")]
        {
            message.headers.insert(name.into(), value.into());
        }
        let request = sink.endpoint.request(&message, 1).unwrap();
        assert_eq!(request.headers()["tenant"], "north");
        assert_eq!(request.headers()["webhook-id"], message.id.as_str());
        assert!(!request.headers().contains_key("host") && !request.headers().contains_key("content-length"));
        message.headers.insert("bad name".into(), "x".into());
        assert!(sink.endpoint.request(&message, 1).is_err(), "it is parked");
    }
}
