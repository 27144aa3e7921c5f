//! Conversion between a response and an outcome in the ledger.
//!
//! The name `http_response` distinguishes a stored response from any other JSON: an operator who resolves a doubt by
//! hand writes the same form. Example:
//! `{"http_response": {"status": 201, "headers": [["location", "/orders/7"]], "body": {"text": "paid"}}}`

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use hapax_core::ledger::OUTCOME_BYTES_MAX;
use hapax_core::{Json, RecordedOutcome, Resolution, Scope};
use hapax_observe::trace::SpanContext;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, DATE, HeaderName, HeaderValue, SET_COOKIE};
use http::{HeaderMap, Method, Response, StatusCode, response};
use serde::{Deserialize, Serialize};

use crate::body::{Body, CompleteBody};
use crate::headers::is_hop_by_hop;
use crate::span::FirstRun;

/// Marks a replayed response.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The recorded JSON: a response under its name.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<T> {
    http_response: T,
}

/// A stored response.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredResponse {
    status: u16,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    headers: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    body: Option<StoredBody>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    trailers: Vec<(String, String)>,
    /// Why the body is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    omitted: Option<String>,
    /// The span of the run, if it was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredBody {
    Text(String),
    Base64(String),
    /// For responses written by hand: `application/json`, unless a header names another type.
    Json(Json),
}

/// Why an outcome cannot be the response to an HTTP request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OutcomeError(String);

/// Checks the response for duplicates of an HTTP request before it is recorded by hand. Outcomes of other scopes pass.
///
/// ```
/// use hapax_core::{Json, RecordedOutcome, Resolution, Scope};
/// let scope = Scope::new("http/shop/anyone/POST /orders").unwrap();
/// let completed = |json: &str| Resolution::Completed {
///     outcome: RecordedOutcome::done(Json::parse(json).unwrap()),
///     ttl_ms: 1000,
/// };
/// let answer = r#"{"http_response": {"status": 201, "body": {"json": {"charge": "ch_1"}}}}"#;
/// assert!(hapax_http::check_resolution(&scope, &completed(answer)).is_ok());
/// assert!(hapax_http::check_resolution(&scope, &completed("null")).is_err());
/// assert!(hapax_http::check_resolution(&scope, &completed(r#"{"status": 201}"#)).is_err());
/// ```
pub fn check_resolution(scope: &Scope, resolution: &Resolution) -> Result<(), OutcomeError> {
    let Resolution::Completed { outcome, .. } = resolution else { return Ok(()) };
    if !is_http_scope(scope) {
        return Ok(());
    }
    let refused = |problem: String| {
        OutcomeError(format!(
            "{scope} is a scope of HTTP requests, and its outcome is the response that duplicates get: {problem}; write \
             {{\"http_response\": {{\"status\": 201, \"headers\": [[\"location\", \"/orders/7\"]], \"body\": {{\"json\": …}}}}}}, \
             with \"text\" or \"base64\" for other bodies, or with \"omitted\": \"why\" instead of a body where the response \
             is not known"
        ))
    };
    let Some(json) = &outcome.value else { return Err(refused("it is missing".into())) };
    let Envelope { http_response: stored } =
        json.get::<Envelope<StoredResponse>>().map_err(|error| refused(error.to_string()))?;
    let status = StatusCode::from_u16(stored.status).ok().filter(|status| !status.is_informational());
    if status.is_none() {
        return Err(refused(format!("{} is no status of a final response", stored.status)));
    }
    if stored.omitted.is_none() && to_response(&stored).is_none() {
        return Err(refused("a header or the body cannot be sent".into()));
    }
    Ok(())
}

/// Whether [`scope`](crate::scope::scope) makes scopes of this form.
fn is_http_scope(scope: &Scope) -> bool {
    let mut parts = scope.as_str().splitn(4, '/');
    let (Some("http"), Some(_), Some(_), Some(operation)) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let method = operation.split([' ', ':']).next().unwrap_or_default();
    method.len() < operation.len() && Method::from_bytes(method.as_bytes()).is_ok()
}

/// The result for a duplicate.
pub(crate) enum Replay {
    /// The recorded response.
    Response(Box<Response<Body>>),
    /// The response was too large to store, or a stream: its status, if known, and the reason.
    Omitted { status: Option<u16>, why: String },
}

/// The outcome of a response with its complete body.
pub(crate) fn outcome_with_body(
    method: &Method,
    parts: &response::Parts,
    read: &CompleteBody,
    run: Option<SpanContext>,
) -> RecordedOutcome {
    let body = match std::str::from_utf8(&read.bytes) {
        Ok("") => None,
        Ok(text) => Some(StoredBody::Text(text.to_owned())),
        Err(_) => Some(StoredBody::Base64(BASE64_STANDARD.encode(&read.bytes))),
    };
    // A length without a body is information of its own; otherwise it follows from the body.
    let keep_length = *method == Method::HEAD || parts.status == StatusCode::NOT_MODIFIED;
    let stored = StoredResponse {
        status: parts.status.as_u16(),
        headers: header_pairs(&parts.headers, keep_length),
        body,
        trailers: read.trailers.as_ref().map(|trailers| header_pairs(trailers, false)).unwrap_or_default(),
        omitted: None,
        traceparent: run.map(|run| run.to_string()),
    };
    let json = Json::of(&Envelope { http_response: stored }).expect("strings and numbers are JSON");
    if json.as_str().len() > OUTCOME_BYTES_MAX {
        let bytes = read.bytes.len();
        return outcome_without_body(parts, &format!("its body of {bytes} bytes was too large to keep"));
    }
    outcome(parts.status, json)
}

/// The outcome of a response whose body is not stored.
pub(crate) fn outcome_without_body(parts: &response::Parts, why: &str) -> RecordedOutcome {
    let stored = StoredResponse {
        status: parts.status.as_u16(),
        headers: Vec::new(),
        body: None,
        trailers: Vec::new(),
        omitted: Some(why.to_owned()),
        traceparent: None,
    };
    outcome(
        parts.status,
        Json::of(&Envelope { http_response: stored }).expect("strings and numbers are JSON"),
    )
}

fn outcome(status: StatusCode, json: Json) -> RecordedOutcome {
    let failed = status.is_client_error() || status.is_server_error();
    if failed { RecordedOutcome::failed(json) } else { RecordedOutcome::done(json) }
}

fn header_pairs(headers: &HeaderMap, keep_length: bool) -> Vec<(String, String)> {
    let listed = crate::headers::names_in_connection_header(headers);
    let kept = |name: &HeaderName| {
        let dropped = [SET_COOKIE, DATE].contains(name) || (*name == CONTENT_LENGTH && !keep_length);
        !dropped && !is_hop_by_hop(name) && !listed.contains(name)
    };
    let pairs = headers.iter().filter(|(name, _)| kept(name));
    pairs.map(|(name, value)| (name.as_str().to_owned(), latin1(value.as_bytes()))).collect()
}

/// Header values are bytes; each byte becomes the character with that number, so that all values fit into JSON.
fn latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| char::from(*byte)).collect()
}

fn header_map(pairs: &[(String, String)]) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        let bytes: Vec<u8> =
            value.chars().map(|c| u8::try_from(u32::from(c))).collect::<Result<_, _>>().ok()?;
        let (name, value) = (HeaderName::try_from(name).ok()?, HeaderValue::from_bytes(&bytes).ok()?);
        headers.try_append(name, value).ok()?;
    }
    Some(headers)
}

/// The result for a duplicate of a recorded outcome.
pub(crate) fn replay(outcome: &RecordedOutcome) -> Replay {
    let json = match &outcome.value {
        None => return Replay::Omitted { status: None, why: "its response was not kept".into() },
        // Resolved by hand, bypassing `check_resolution`: it is only known that the request ran.
        Some(json) if json.as_str() == "null" => {
            let why = "it was decided that it has run, and no response was recorded with that";
            return Replay::Omitted { status: None, why: why.into() };
        }
        Some(json) => json,
    };
    let Some(stored) = stored_response(json) else {
        return Replay::Response(Box::new(operator_response(outcome, json)));
    };
    if let Some(why) = stored.omitted {
        return Replay::Omitted { status: Some(stored.status), why };
    }
    to_response(&stored).map_or_else(
        || Replay::Omitted { status: Some(stored.status), why: "its record cannot be read".into() },
        |response| Replay::Response(Box::new(response)),
    )
}

/// The response in an outcome, if it contains one.
fn stored_response(json: &Json) -> Option<StoredResponse> {
    if let Ok(Envelope { http_response }) = json.get::<Envelope<StoredResponse>>() {
        return Some(http_response);
    }
    // Recorded before responses had a name of their own. JSON with only a status could be anything written by hand.
    let stored = json.get::<StoredResponse>().ok()?;
    let more = stored.body.is_some() || stored.omitted.is_some() || !stored.headers.is_empty();
    more.then_some(stored)
}

fn to_response(stored: &StoredResponse) -> Option<Response<Body>> {
    let bytes = match &stored.body {
        None => Bytes::new(),
        Some(StoredBody::Text(text)) => Bytes::from(text.clone()),
        Some(StoredBody::Base64(text)) => BASE64_STANDARD.decode(text).ok()?.into(),
        Some(StoredBody::Json(json)) => Bytes::from(json.as_str().to_owned()),
    };
    let trailers = header_map(&stored.trailers)?;
    let trailers = (!trailers.is_empty()).then_some(trailers);
    let mut response = Response::new(Body::from_complete(CompleteBody { bytes, trailers }));
    *response.status_mut() = StatusCode::from_u16(stored.status).ok()?;
    *response.headers_mut() = header_map(&stored.headers)?;
    if matches!(stored.body, Some(StoredBody::Json(_))) {
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().entry(CONTENT_TYPE).or_insert(json);
    }
    response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    if let Some(run) = stored.traceparent.as_deref().and_then(SpanContext::parse) {
        response.extensions_mut().insert(FirstRun(run));
    }
    Some(response)
}

/// The outcome that an operator recorded for a doubt: the response's body, as JSON.
fn operator_response(outcome: &RecordedOutcome, json: &Json) -> Response<Body> {
    let mut response = Response::new(Body::complete(Bytes::from(json.as_str().to_owned())));
    *response.status_mut() = if outcome.failed { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::OK };
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use proptest::prelude::*;

    use super::*;

    async fn round_trip(parts: &response::Parts, bytes: &[u8]) -> (response::Parts, Bytes) {
        let read = CompleteBody { bytes: Bytes::copy_from_slice(bytes), trailers: None };
        let outcome = outcome_with_body(&Method::POST, parts, &read, None);
        let Replay::Response(response) = replay(&outcome.without_oversize_value()) else { panic!("omitted") };
        let (parts, body) = response.into_parts();
        (parts, body.collect().await.unwrap().to_bytes())
    }

    fn parts(status: u16, headers: &[(&str, &[u8])]) -> response::Parts {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, HeaderValue::from_bytes(value).unwrap());
        }
        response.body(()).unwrap().into_parts().0
    }

    #[tokio::test]
    async fn headers_of_one_connection_or_one_caller_are_not_replayed() {
        let original = parts(
            201,
            &[
                ("content-type", b"text/plain"),
                ("x-odd", b"caf\xe9"),
                ("set-cookie", b"session=secret"),
                ("connection", b"x-hop"),
                ("x-hop", b"1"),
                ("keep-alive", b"1"),
                ("transfer-encoding", b"chunked"),
                ("date", b"Thu, 01 Jan 1970 00:00:00 GMT"),
                ("link", b"<a>"),
                ("link", b"<b>"),
            ],
        );
        let (replayed, body) = round_trip(&original, b"hi").await;
        assert_eq!((replayed.status.as_u16(), &body[..]), (201, &b"hi"[..]));
        let names: Vec<&str> = replayed.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(names.len(), 4, "{names:?}");
        assert_eq!(replayed.headers["x-odd"].as_bytes(), b"caf\xe9");
        assert_eq!(replayed.headers.get_all("link").iter().count(), 2);
        assert_eq!(replayed.headers[IDEMPOTENT_REPLAYED], "true");
    }

    #[test]
    fn an_operators_outcome_is_replayed_as_a_response() {
        let outcome = RecordedOutcome::done(Json::parse(r#"{"charged":true}"#).unwrap());
        let Replay::Response(response) = replay(&outcome) else { panic!("omitted") };
        assert_eq!(response.status(), StatusCode::OK);
        let nothing = RecordedOutcome { failed: false, value: None, omitted_bytes: None };
        assert!(matches!(replay(&nothing), Replay::Omitted { status: None, .. }));
        let null = RecordedOutcome::done(Json::parse("null").unwrap());
        assert!(matches!(replay(&null), Replay::Omitted { status: None, .. }));
    }

    /// A field named `status` does not make an outcome a response; a response recorded before the name existed is one.
    #[tokio::test]
    async fn a_stored_response_is_recognised_by_its_name() {
        let answer = |json: &str| match replay(&RecordedOutcome::done(Json::parse(json).unwrap())) {
            Replay::Response(response) => *response,
            Replay::Omitted { why, .. } => panic!("{json}: {why}"),
        };
        for json in [r#"{"status":201}"#, r#"{"status":404,"charged":true}"#, r#"{"status":7,"headers":[]}"#]
        {
            let response = answer(json);
            assert_eq!(response.status(), StatusCode::OK, "{json}");
            assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), json.as_bytes());
        }
        let old = answer(r#"{"status":201,"headers":[["x-a","1"]],"body":{"text":"paid"}}"#);
        assert_eq!((old.status().as_u16(), &old.headers()["x-a"]), (201, &HeaderValue::from_static("1")));
        let by_hand = answer(r#"{"http_response":{"status":202,"body":{"json":{"charge":7}}}}"#);
        assert_eq!(
            (by_hand.status().as_u16(), by_hand.headers()[CONTENT_TYPE].as_bytes()),
            (202, &b"application/json"[..])
        );
        assert_eq!(by_hand.into_body().collect().await.unwrap().to_bytes(), &br#"{"charge":7}"#[..]);
    }

    #[test]
    fn an_outcome_that_is_no_response_is_refused_before_it_is_recorded() {
        let check = |scope: &str, json: &str| {
            let outcome = RecordedOutcome::done(Json::parse(json).unwrap());
            let resolution = Resolution::Completed { outcome, ttl_ms: 1000 };
            check_resolution(&Scope::new(scope).unwrap(), &resolution).map_err(|error| error.to_string())
        };
        let http = "http/shop/anyone/POST /orders";
        for json in [
            r#"{"http_response":{"status":204}}"#,
            r#"{"http_response":{"status":201,"headers":[["location","/orders/7"]],"body":{"text":"ok"}}}"#,
            r#"{"http_response":{"status":200,"omitted":"seen in the bank's log"}}"#,
        ] {
            assert_eq!(check(http, json), Ok(()), "{json}");
        }
        for json in [
            "null",
            "7",
            r#"{"status":201}"#,
            r#"{"http_response":{}}"#,
            r#"{"http_response":{"status":101}}"#,
            r#"{"http_response":{"status":9999}}"#,
            r#"{"http_response":{"status":200,"boddy":"x"}}"#,
            r#"{"http_response":{"status":200},"more":1}"#,
            r#"{"http_response":{"status":200,"headers":[["bad name","x"]]}}"#,
            r#"{"http_response":{"status":200,"headers":[["x","a\nb"]]}}"#,
            r#"{"http_response":{"status":200,"body":{"base64":"%"}}}"#,
        ] {
            for scope in [http, "http/shop/0123/POST:0123456789abcdef"] {
                let refused = check(scope, json).unwrap_err();
                assert!(refused.contains("http_response") && refused.contains(scope), "{json}: {refused}");
            }
            // Outcomes of other scopes are not checked.
            for scope in ["queue/orders", "http", "http/orders", "http/a/b/c", "tenant/http/a/POST /x"] {
                assert_eq!(check(scope, json), Ok(()), "{scope} {json}");
            }
        }
        assert_eq!(check_resolution(&Scope::new(http).unwrap(), &Resolution::Absent), Ok(()));
    }

    #[test]
    fn a_response_too_large_for_the_ledger_keeps_its_status() {
        let read = CompleteBody { bytes: Bytes::from(vec![0xff; OUTCOME_BYTES_MAX]), trailers: None };
        let outcome =
            outcome_with_body(&Method::POST, &parts(200, &[]), &read, None).without_oversize_value();
        assert!(matches!(replay(&outcome), Replay::Omitted { status: Some(200), .. }));
    }

    proptest! {
        #[test]
        fn every_body_comes_back_byte_for_byte(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let (_, body) = runtime.block_on(round_trip(&parts(200, &[]), &bytes));
            prop_assert_eq!(&body[..], &bytes[..]);
        }
    }
}
