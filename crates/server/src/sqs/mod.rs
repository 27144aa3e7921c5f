//! The SQS protocol: one model, two codecs (AWS JSON 1.0 and Query), 23 actions. Only the wire format: the store
//! implements the behaviour of queues.

mod attributes;
mod digest;
mod error;
mod form;
mod json;
mod message_attributes;
mod model;
mod names;
mod ops;
mod output;
mod query;
mod xml;

#[cfg(test)]
mod fuzz_tests;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hapax_core::QueueAdmin;
use hapax_core::policy::INTERVAL_MS_MAX;
use hapax_net::body::{Body, BodyError};
use hapax_net::connection::Peer;
use hapax_net::guard::host_of;
use hapax_net::listen::Shutdown;
use hapax_net::tracker::ConnectionBudget;
use hapax_net::unread::{AlwaysSent, SMALL_BYTES_MAX};
use http::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, Method, Request, Response};

use self::error::{ErrorKind, Result, SqsError};
pub(crate) use self::form::{form_pairs, percent_decode};
use self::model::{Action, Call};
pub(crate) use self::names::Names;
use self::ops::{CallContext, Operations};
use self::output::Output;
use self::query::Form;
use crate::auth::{AuthError, Authenticator, SignedRequest};
use crate::config::SqsConfig;
use crate::error::ServerError;

const TARGET: HeaderName = HeaderName::from_static("x-amz-target");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-amzn-requestid");
const QUERY_ERROR: HeaderName = HeaderName::from_static("x-amzn-query-error");
const TRACE_ID: HeaderName = HeaderName::from_static("x-amzn-trace-id");
const JSON_TYPE: HeaderValue = HeaderValue::from_static("application/x-amz-json-1.0");
const XML_TYPE: HeaderValue = HeaderValue::from_static("text/xml");
const QUERY_JSON_TYPE: HeaderValue = HeaderValue::from_static("application/json");

/// Whether a request is for SQS: by its target header, by its form, or by a queue's path `/{account}/{name}`.
pub(crate) fn is_sqs<B>(request: &Request<B>) -> bool {
    let uri = request.uri();
    if request.headers().contains_key(TARGET) {
        return true;
    }
    match queue_path(uri.path()) {
        Some(_) => true,
        None => uri.path() == "/" && (request.method() == Method::POST || names_action(uri)),
    }
}

/// Whether the query names an action. It is decoded in the same way as when the action is executed.
pub(crate) fn names_action(uri: &http::Uri) -> bool {
    uri.query().is_some_and(|query| form_pairs(query).any(|(name, _)| name == "Action"))
}

/// The queue's name in `/{account}/{name}`.
fn queue_path(path: &str) -> Option<&str> {
    let (account, name) = path.strip_prefix('/')?.split_once('/')?;
    let account_like = account.len() == 12 && account.bytes().all(|b| b.is_ascii_digit());
    (account_like && !name.is_empty() && !name.contains('/')).then_some(name)
}

/// The codec that a client uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Json,
    Query,
    /// Query parameters in the request, JSON in the response.
    QueryJson,
}

impl Protocol {
    /// For GET, the Query protocol responds in JSON if the client prefers it.
    fn of_request(parts: &Parts) -> Self {
        let protocol = Self::of(&parts.headers);
        let accept = || parts.headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        match protocol {
            Self::Query if parts.method == Method::GET && prefers_json(accept()) => Self::QueryJson,
            other => other,
        }
    }

    fn of(headers: &HeaderMap) -> Self {
        let json_type = || {
            let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
            value.starts_with("application/x-amz-json") || value.starts_with("application/json")
        };
        if headers.contains_key(TARGET) || json_type() { Self::Json } else { Self::Query }
    }
}

/// Whether `Accept` names JSON before any other acceptable type.
fn prefers_json(accept: &str) -> bool {
    let types = accept.split(',').map(|part| part.split(';').next().unwrap_or_default().trim());
    let known = ["application/json", "application/xml", "text/xml", "*/*"];
    types.into_iter().find(|name| known.contains(name)) == Some(known[0])
}

/// Answers SQS requests.
pub(crate) struct Sqs {
    auth: Arc<Authenticator>,
    operations: Operations,
}

impl Sqs {
    pub(crate) fn new(
        config: &SqsConfig,
        store: Arc<dyn QueueAdmin>,
        auth: Arc<Authenticator>,
        shutdown: Shutdown,
    ) -> std::result::Result<Self, ServerError> {
        let names = Names::new(&config.account, &config.region)?;
        for (field, interval_ms) in [
            ("sqs.purge_interval_ms", config.purge_interval_ms),
            ("sqs.recreate_interval_ms", config.recreate_interval_ms),
        ] {
            if interval_ms > INTERVAL_MS_MAX {
                let problem = format!("{interval_ms} is out of range; use 0 to {INTERVAL_MS_MAX}");
                return Err(ServerError::Config { field: field.to_owned(), problem });
            }
        }
        Ok(Self { auth, operations: Operations::new(config, names, store, shutdown) })
    }

    /// Answers one request whose body has arrived.
    pub(crate) async fn handle(
        &self,
        parts: &Parts,
        body: &Bytes,
        peer: Peer,
        budget: &ConnectionBudget,
    ) -> Response<Body> {
        let protocol = Protocol::of_request(parts);
        let mut action = None;
        let result = self.execute(protocol, parts, body, (peer, budget), &mut action).await;
        tracing::debug!(
            address = %peer.address,
            action = action.map_or("?", Action::name),
            error = result.as_ref().err().map(|error| error.kind.wire().code),
            "request"
        );
        respond(protocol, action, &result)
    }

    async fn execute(
        &self,
        protocol: Protocol,
        parts: &Parts,
        body: &Bytes,
        (peer, budget): (Peer, &ConnectionBudget),
        action: &mut Option<Action>,
    ) -> Result<Output> {
        if !matches!(parts.method, Method::POST | Method::GET) {
            let text = format!("The HTTP method {} is not supported; use POST or GET.", parts.method);
            return Err(SqsError::new(ErrorKind::UnsupportedOperation, text));
        }
        let signed = SignedRequest { method: &parts.method, uri: &parts.uri, headers: &parts.headers, body };
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let identity = self.auth.sigv4(&signed, now_s)?;
        let path_queue = queue_path(parts.uri.path());
        let form;
        let call = match protocol {
            Protocol::Json => {
                let found = json_action(&parts.headers)?;
                *action = Some(found);
                Call::from_json(found, body)?
            }
            Protocol::Query | Protocol::QueryJson => {
                form = query_form(parts, body)?;
                let found = query_action(&form, parts.method == Method::GET && path_queue.is_some())?;
                if path_queue.is_some() && matches!(found, Action::CreateQueue | Action::ListQueues) {
                    return Err(unknown_action(found.name()));
                }
                *action = Some(found);
                Call::from_form(found, &form)?
            }
        };
        let context = CallContext {
            identity,
            peer,
            budget,
            host: host_of(&parts.headers, &parts.uri).unwrap_or("localhost"),
            path_queue,
            trace: parts.headers.get(TRACE_ID).and_then(|value| value.to_str().ok()),
        };
        self.operations.call(&context, call).await
    }

    /// The response to a request whose body did not arrive.
    pub(crate) fn unreadable(headers: &HeaderMap, error: BodyError) -> Response<Body> {
        let error = match error {
            BodyError::TooLarge => {
                SqsError::new(ErrorKind::RequestTooLarge, "The request body is too large.")
            }
            BodyError::Timeout => {
                SqsError::new(ErrorKind::RequestTimeout, "The request body did not arrive in time.")
            }
            BodyError::Overloaded => SqsError::new(
                ErrorKind::RequestThrottled,
                "The server is reading too many large requests; retry with backoff.",
            ),
            BodyError::Broken => {
                SqsError::new(ErrorKind::Serialization, "The request body could not be read.")
            }
        };
        respond(Protocol::of(headers), None, &Err(error))
    }

    /// The response to a request refused because it may come from another site's web page.
    pub(crate) fn refused(headers: &HeaderMap, reason: &'static str) -> Response<Body> {
        respond(Protocol::of(headers), None, &Err(SqsError::new(ErrorKind::AccessDenied, reason)))
    }

    /// The response to a request without a known key.
    pub(crate) fn unauthenticated(headers: &HeaderMap, error: AuthError) -> Response<Body> {
        respond(Protocol::of(headers), None, &Err(error.into()))
    }

    /// The response to a request for whose response there is no space.
    pub(crate) fn overloaded(headers: &HeaderMap) -> Response<Body> {
        let text = "Too many responses wait to be read by their clients; retry with backoff.";
        let mut response =
            respond(Protocol::of(headers), None, &Err(SqsError::new(ErrorKind::ServiceUnavailable, text)));
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(1 + fastrand::u64(0..=4)));
        response
    }

    /// Whether a response was made by SQS.
    pub(crate) fn is_sqs_response(answer: &Response<Body>) -> bool {
        answer.headers().contains_key(REQUEST_ID)
    }

    /// The response if the store took too long.
    pub(crate) fn timed_out(headers: &HeaderMap) -> Response<Body> {
        tracing::warn!("a request took too long and was given up");
        let error = SqsError::new(
            ErrorKind::ServiceUnavailable,
            "The request took too long; its outcome is unknown.",
        );
        respond(Protocol::of(headers), None, &Err(error))
    }
}

fn unknown_action(name: &str) -> SqsError {
    let name = hapax_core::policy::truncate(name, 100);
    SqsError::new(ErrorKind::InvalidAction, format!("The action {name} is not valid for this endpoint."))
}

fn json_action(headers: &HeaderMap) -> Result<Action> {
    let Some(target) = headers.get(TARGET) else {
        return Err(SqsError::new(
            ErrorKind::MissingAction,
            "The request must contain the header X-Amz-Target.",
        ));
    };
    let target = target.to_str().unwrap_or("?");
    target.strip_prefix("AmazonSQS.").and_then(Action::from_name).ok_or_else(|| unknown_action(target))
}

fn query_form<'a>(parts: &'a Parts, body: &'a [u8]) -> Result<Form<'a>> {
    let body = std::str::from_utf8(body)
        .map_err(|_| SqsError::new(ErrorKind::Serialization, "The request body is not form-encoded text."))?;
    Form::read(parts.uri.query().unwrap_or_default(), body)
}

/// The action in a form. AWS treats a GET of a queue's URL without an action as no operation at all.
fn query_action(form: &Form<'_>, is_queue_page: bool) -> Result<Action> {
    let name = form.get("Action").filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| {
        let kind = if is_queue_page { ErrorKind::UnknownOperation } else { ErrorKind::MissingAction };
        SqsError::new(kind, "The request must contain the parameter Action.")
    })?;
    Action::from_name(name).ok_or_else(|| unknown_action(name))
}

fn respond(protocol: Protocol, action: Option<Action>, result: &Result<Output>) -> Response<Body> {
    let id = request_id();
    let unknown = result.as_ref().is_err_and(|error| error.kind == ErrorKind::UnknownOperation);
    let protocol = if unknown { Protocol::Query } else { protocol };
    let body = match (protocol, result, action) {
        (Protocol::Json, Ok(output), _) => json::encode(output),
        (Protocol::Query, Ok(output), Some(action)) => xml::encode(action, output, &id),
        (Protocol::QueryJson, Ok(output), Some(action)) => json::encode_query(action, output, &id),
        (Protocol::Query | Protocol::QueryJson, Ok(_), None) => Vec::new(),
        (Protocol::Json, Err(error), _) => json::encode_error(error),
        (Protocol::Query, Err(error), _) => xml::encode_error(error, &id),
        (Protocol::QueryJson, Err(error), _) => json::encode_query_error(error, &id),
    };
    let must_be_sent = body.len() > SMALL_BYTES_MAX && matches!(result, Ok(Output::Messages(_)));
    let mut response = Response::new(Body::complete(body.into()));
    if must_be_sent {
        // The messages are leased, and the receive has checked that they fit.
        response.extensions_mut().insert(AlwaysSent);
    }
    let headers = response.headers_mut();
    headers.reserve(4);
    let content_type = match protocol {
        Protocol::Json => JSON_TYPE,
        Protocol::Query => XML_TYPE,
        Protocol::QueryJson => QUERY_JSON_TYPE,
    };
    headers.insert(CONTENT_TYPE, content_type);
    if let Ok(id) = HeaderValue::try_from(id) {
        headers.insert(REQUEST_ID, id);
    }
    if let Err(error) = result {
        let wire = error.kind.wire();
        if protocol == Protocol::Json
            && let Ok(value) = HeaderValue::try_from(format!("{};{}", wire.code, wire.fault()))
        {
            headers.insert(QUERY_ERROR, value);
        }
        *response.status_mut() = wire.status;
    }
    response
}

/// A random identifier in the form of a UUID.
fn request_id() -> String {
    hapax_core::MessageId(fastrand::u128(..)).to_string()
}
