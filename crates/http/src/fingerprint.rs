//! A hash of a request's content: two requests have the same fingerprint only if a service has no reason to distinguish
//! them.

use std::sync::LazyLock;

use blake3::hazmat::{ContextKey, HasherExt as _, hash_derive_key_context};
use hapax_core::Fingerprint;
use http::header::{HOST, HeaderName};
use http::request::Parts;
use http::uri::Authority;

use crate::body::CompleteBody;
use crate::canonical::{Node, hash_part};
use crate::media::MediaType;
use crate::policy::Policy;

/// What the hash is for, hashed once per process: that costs as much as the hash of a small request.
static REQUEST_CONTEXT: LazyLock<ContextKey> = LazyLock::new(|| hash_derive_key_context("hapax request"));
static REQUEST_WITH_EXTRAS_CONTEXT: LazyLock<ContextKey> =
    LazyLock::new(|| hash_derive_key_context("hapax request with headers"));

/// Headers that describe the request beside its body: the type of the body, the conditions of the operation, and the
/// operation itself. Many services read `X_Http_Method` as `X-Http-Method` (CGI, WSGI, Rack).
const ALWAYS_INCLUDED_HEADERS: [&str; 13] = [
    "content-encoding",
    "content-language",
    "content-location",
    "content-range",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "range",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
];

/// Covers method, host, path, query, media type, body and the counted headers. A JSON body counts by its value, without
/// its excluded fields.
pub(crate) fn fingerprint(
    parts: &Parts,
    policy: &Policy,
    media: &MediaType,
    body: &CompleteBody,
    json: Option<Node<'_>>,
) -> Fingerprint {
    let extras = extras(parts, policy, media, body);
    // A request without extras keeps the fingerprint that it had before extras existed.
    let context = if extras.is_empty() { &*REQUEST_CONTEXT } else { &*REQUEST_WITH_EXTRAS_CONTEXT };
    let mut hasher = blake3::Hasher::new_from_context_key(context);
    if !extras.is_empty() {
        hasher.update(&(extras.len() as u64).to_le_bytes());
        for (name, value) in &extras {
            hash_part(&mut hasher, name.as_bytes());
            hash_part(&mut hasher, value);
        }
    }
    hash_part(&mut hasher, parts.method.as_str().as_bytes());
    hash_part(&mut hasher, host(parts).as_bytes());
    hash_part(&mut hasher, parts.uri.path().as_bytes());
    hash_part(&mut hasher, parts.uri.query().unwrap_or_default().as_bytes());
    hash_part(&mut hasher, media.kind.as_bytes());
    match json {
        Some(mut json) => {
            policy.fingerprint_excluded_fields.iter().for_each(|pointer| json.remove(pointer));
            json.hash(&mut hasher);
        }
        None => hash_body(&mut hasher, media, &body.bytes),
    }
    Fingerprint::new(hasher.finalize().to_hex().as_str()).expect("64 hex digits")
}

/// Parts that only some requests have, by name. Names with a colon are not headers.
fn extras(parts: &Parts, policy: &Policy, media: &MediaType, body: &CompleteBody) -> Vec<(String, Vec<u8>)> {
    let mut extras = Vec::new();
    for (name, value) in &parts.headers {
        if let Some(name) = fingerprint_name(name, policy) {
            let folded = name == "content-encoding" || name.contains("method");
            let value = value.as_bytes().trim_ascii();
            extras.push((name, if folded { value.to_ascii_lowercase() } else { value.to_vec() }));
        }
    }
    for (name, value) in media.content_parameters() {
        extras.push((format!("type:{name}"), value.clone().into_bytes()));
    }
    extras.extend(media.unparsed.iter().map(|line| ("type:".to_owned(), line.clone())));
    for (name, value) in body.trailers.iter().flatten() {
        extras.push((format!("trailer:{name}"), value.as_bytes().to_vec()));
    }
    if parts.uri.query() == Some("") {
        extras.push(("query:".to_owned(), Vec::new()));
    }
    // The proxy refuses two hosts; a service behind the layer alone may see both.
    let hosts = parts.headers.get_all(HOST).iter().skip(1).map(|host| host.as_bytes().to_vec());
    extras.extend(hosts.map(|host| ("host:".to_owned(), host)));
    let authority = parts.uri.authority().map(|authority| host_name(authority.as_str()));
    if let Some(authority) = authority.filter(|authority| *authority != host(parts)) {
        extras.push(("authority:".to_owned(), authority.into_bytes()));
    }
    // Lines with the same name keep their order; the order of different names does not matter.
    extras.sort_by(|one, other| one.0.cmp(&other.0));
    extras
}

/// The name under which a header counts, or `None` if it does not count.
fn fingerprint_name(name: &HeaderName, policy: &Policy) -> Option<String> {
    let name = name.as_str();
    if policy.fingerprint_headers.iter().any(|counted| counted.eq_ignore_ascii_case(name)) {
        return Some(name.to_owned());
    }
    let always = ALWAYS_INCLUDED_HEADERS.iter().find(|always| is_spelt(name, always))?;
    Some((*always).to_owned())
}

/// Whether a header's name is `known`, perhaps with underscores for its dashes.
fn is_spelt(name: &str, known: &str) -> bool {
    let same = |(one, other): (u8, u8)| one == other || (one == b'_' && other == b'-');
    name.len() == known.len() && name.bytes().zip(known.bytes()).all(same)
}

/// The requested host name without its port. A service may distinguish its tenants by it: the same key at another host
/// name is refused, so neither gets the other's response, and the request does not run twice.
fn host(parts: &Parts) -> String {
    let header = parts.headers.get(HOST).map(|value| String::from_utf8_lossy(value.as_bytes()));
    match (header, parts.uri.authority()) {
        (Some(header), _) => host_name(&header),
        (None, authority) => host_name(authority.map_or("", Authority::as_str)),
    }
}

fn host_name(authority: &str) -> String {
    let name = authority.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
    name.map_or(authority, |(name, _)| name).to_ascii_lowercase()
}

/// Hashes a body that is not JSON. A multipart body is hashed part by part, without its delimiter, because clients
/// choose a new one for every attempt. Each part is preceded by its length, so that no content looks like a delimiter.
fn hash_body(hasher: &mut blake3::Hasher, media: &MediaType, body: &[u8]) {
    let Some(boundary) = media.boundary() else { return hash_part(hasher, body) };
    let delimiter = format!("--{boundary}");
    let delimiter = delimiter.as_bytes();
    let (mut piece, mut at) = (0, 0);
    while at < body.len() {
        // Only a whole line is a delimiter; elsewhere the same bytes are content.
        let starts_line = at == 0 || body[..at].ends_with(b"\r\n");
        let delimits =
            body[at..].strip_prefix(delimiter).is_some_and(|rest| starts_line && ends_delimiter(rest));
        if delimits {
            hash_part(hasher, &body[piece..at]);
            at += delimiter.len();
            piece = at;
        } else {
            at = body[at..].iter().position(|byte| *byte == b'\n').map_or(body.len(), |line| at + line + 1);
        }
    }
    hash_part(hasher, &body[piece..]);
}

/// Whether a delimiter may end here: after the last part's two dashes, white space, and the end of the line.
fn ends_delimiter(rest: &[u8]) -> bool {
    let rest = rest.strip_prefix(b"--").unwrap_or(rest);
    let blank = rest.iter().take_while(|byte| b" \t".contains(byte)).count();
    rest[blank..].is_empty() || rest[blank..].starts_with(b"\r\n")
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderMap, Request};
    use proptest::prelude::*;

    use super::*;

    /// A request as text: a first line, headers, and its body.
    #[derive(Clone, Debug)]
    struct Sent {
        method: &'static str,
        uri: &'static str,
        headers: Vec<(&'static str, &'static str)>,
        body: &'static str,
        trailers: Vec<(&'static str, &'static str)>,
    }

    impl Sent {
        fn new(headers: &[(&'static str, &'static str)], body: &'static str) -> Self {
            Self { method: "POST", uri: "/orders?x=1", headers: headers.to_vec(), body, trailers: Vec::new() }
        }

        fn print(&self, policy: &Policy) -> Fingerprint {
            let mut request = Request::builder().method(self.method).uri(self.uri);
            for (name, value) in &self.headers {
                request = request.header(*name, *value);
            }
            let parts = request.body(()).unwrap().into_parts().0;
            let trailers: HeaderMap = self
                .trailers
                .iter()
                .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
                .collect();
            let trailers = (!trailers.is_empty()).then_some(trailers);
            let read = CompleteBody { bytes: Bytes::from(self.body), trailers };
            let media = MediaType::of(&parts.headers);
            let json = media.is_json().then(|| Node::parse(&read.bytes)).flatten();
            fingerprint(&parts, policy, &media, &read, json)
        }
    }

    fn policy() -> Policy {
        Policy {
            fingerprint_excluded_fields: vec!["/at".into()],
            fingerprint_headers: vec!["X-Api-Version".into()],
            ..Policy::default()
        }
    }

    #[track_caller]
    fn all_differ(sent: &[Sent]) {
        let prints: Vec<Fingerprint> = sent.iter().map(|sent| sent.print(&policy())).collect();
        for (at, print) in prints.iter().enumerate() {
            for (other, later) in prints.iter().enumerate().skip(at + 1) {
                assert_ne!(print, later, "{:?}\n{:?}", sent[at], sent[other]);
            }
        }
    }

    #[track_caller]
    fn all_equal(sent: &[Sent]) {
        for other in &sent[1..] {
            assert_eq!(sent[0].print(&policy()), other.print(&policy()), "{:?}\n{other:?}", sent[0]);
        }
    }

    const JSON: (&str, &str) = ("content-type", "application/json");
    const TEXT: (&str, &str) = ("content-type", "text/plain");

    #[test]
    fn requests_that_a_service_can_distinguish_differ() {
        let json = |body| Sent::new(&[JSON], body);
        let with = |name, value| Sent::new(&[JSON, (name, value)], "{}");
        let typed = |kind| Sent::new(&[("content-type", kind)], "{}");
        let base = json("{}");
        all_differ(&[
            base.clone(),
            Sent { method: "PUT", ..base.clone() },
            Sent { uri: "/orders", ..base.clone() },
            Sent { uri: "/orders?", ..base.clone() },
            Sent { uri: "/orders?x=2", ..base.clone() },
            Sent { uri: "/orders/?x=1", ..base.clone() },
            Sent { uri: "//orders?x=1", ..base.clone() },
            Sent { uri: "/%6frders?x=1", ..base.clone() },
            Sent { uri: "/Orders?x=1", ..base.clone() },
            Sent { uri: "/orders?x=%31", ..base.clone() },
            with("host", "a.example"),
            with("host", "b.example"),
            Sent::new(&[JSON, ("host", "a.example"), ("host", "b.example")], "{}"),
            Sent { uri: "http://b.example/orders?x=1", ..with("host", "a.example") },
            Sent::new(&[], "{}"),
            typed("application/json; charset=utf-16"),
            typed("application/json; v=2"),
            typed("application/json; V=\"3\""),
            typed("application/vnd.shop+json"),
            typed("text/plain"),
            typed("text/plain; charset=utf-8"),
            typed("text/plain; charset=latin1"),
            typed("text/plain; x"),
            typed("text/plain; y"),
            Sent::new(&[JSON, TEXT], "{}"),
            Sent::new(&[TEXT, JSON], "{}"),
            with("content-encoding", "gzip"),
            with("content-encoding", "br"),
            with("content-language", "de"),
            with("content-range", "bytes 0-1/2"),
            with("if-match", "\"1\""),
            with("if-match", "\"2\""),
            with("if-none-match", "\"1\""),
            with("if-unmodified-since", "Thu, 01 Jan 1970 00:00:00 GMT"),
            with("x-http-method-override", "DELETE"),
            with("x-http-method-override", "PATCH"),
            with("x-http-method", "DELETE"),
            with("x-method-override", "DELETE"),
            with("x-api-version", "1"),
            with("x-api-version", "2"),
            Sent { trailers: vec![("x-sum", "1")], ..base.clone() },
            Sent { trailers: vec![("x-sum", "2")], ..base.clone() },
            json(""),
            json("[]"),
            json(r#"{"a":1}"#),
            json(r#"{"a":1.0}"#),
            json(r#"{"a":"1"}"#),
            json(r#"{"a":1,"a":2}"#),
            json(r#"{"a":2,"a":1}"#),
            json(r#"{"a":"\ud800"}"#),
            json(r#"{"a":"\ud801"}"#),
            json(r#"{"a":"\ufffd"}"#),
            json(r#"{"a":"\\ud800"}"#),
            json(r#"{"a":"\"\\ud800\""}"#),
            json(r#"{"a":"\udc00\ud800"}"#),
            json(r#"{"a":"\ud800\udc00"}"#),
            json(r#"{"\ud800":1}"#),
            json(r#"{"\"\\ud800\"":1}"#),
            json("{broken"),
            json("{broken "),
        ]);
    }

    #[test]
    fn requests_that_no_service_can_distinguish_are_equal() {
        let json = |kind, body| Sent::new(&[("content-type", kind)], body);
        all_equal(&[
            json("application/json", r#"{"a":"\u0041","b":[1]}"#),
            json("Application/JSON", r#"{ "b" : [ 1 ], "a":"A" }"#),
            json("application/json; charset=utf-8", r#"{"b":[1],"a":"A"}"#),
            json("application/json;charset=\"UTF-8\"", r#"{"b":[1],"a":"A","at":5}"#),
            Sent::new(&[("accept", "*/*"), JSON, ("user-agent", "x")], r#"{"a":"A","b":[1]}"#),
        ]);
        all_equal(&[
            json("application/json", r#"["\ud800\u0041"]"#),
            json("application/json", r#"["\uD800A"]"#),
        ]);
        all_equal(&[
            Sent::new(&[TEXT, ("if-match", "\"1\""), ("range", "bytes=0-1")], "x"),
            Sent::new(&[("range", "bytes=0-1"), ("if-match", "\"1\""), TEXT], "x"),
        ]);
        all_equal(&[
            Sent::new(&[TEXT, ("x-http-method-override", "delete")], "x"),
            Sent::new(&[TEXT, ("X_HTTP_Method_Override", "DELETE")], "x"),
        ]);
        all_equal(&[Sent::new(&[TEXT, ("host", "a:80")], "x"), Sent::new(&[TEXT, ("host", "A")], "x")]);
        all_equal(&[
            Sent::new(&[("content-type", "text/plain; charset=UTF-8; format=flowed")], "x"),
            Sent::new(&[("content-type", "Text/Plain;format=flowed;charset=\"utf-8\"")], "x"),
        ]);
    }

    fn form(kind: &'static str, body: &'static str) -> Sent {
        Sent::new(&[("content-type", kind)], body)
    }

    const A: &str = "--abc\r\ncontent-disposition: form-data; name=a\r\n\r\nx\r\n--abc--\r\n";

    #[test]
    fn a_new_boundary_is_the_same_form() {
        let other = "--xyz\r\ncontent-disposition: form-data; name=a\r\n\r\nx\r\n--xyz--\r\n";
        all_equal(&[
            form("multipart/form-data; boundary=abc", A),
            form("multipart/form-data; boundary=xyz", other),
            form("Multipart/Form-Data; Boundary=\"xyz\"", other),
            form("MULTIPART/FORM-DATA;boundary=abc", A),
        ]);
    }

    #[test]
    fn content_that_looks_like_a_delimiter_is_content() {
        let kind = "multipart/form-data; boundary=abc";
        all_differ(&[
            form(kind, A),
            form(kind, "--abc\r\nname: a\r\n\r\nx\r\n--abc\r\nname: b\r\n\r\ny\r\n--abc--\r\n"),
            form(kind, "--abc\r\nname: a\r\n\r\nx\r\n--\r\nname: b\r\n\r\ny\r\n--abc--\r\n"),
            // A longer word at the start of a line is content, so every byte of it counts.
            form(kind, "--abc\r\n\r\n\r\n--abcd\r\n--abc--\r\n"),
            form("multipart/form-data; boundary=xyz", "--xyz\r\n\r\n\r\n--xyzd\r\n--xyz--\r\n"),
            // Outside of multipart types, the boundary is an ordinary parameter.
            form("text/plain; boundary=abc", A),
            form("text/plain; boundary=xyz", A),
        ]);
    }

    proptest! {
        /// A body that is not JSON and differs in one byte is another request; so is any other JSON value.
        #[test]
        fn every_byte_of_a_body_counts(body in "[ -~]{1,40}", at in 0_usize..40, byte in "[ -~]") {
            let print = |body: &str| {
                let mut request = Request::post("/");
                request = request.header("content-type", "text/plain");
                let parts = request.body(()).unwrap().into_parts().0;
                let read = CompleteBody { bytes: Bytes::from(body.to_owned()), trailers: None };
                fingerprint(&parts, &policy(), &MediaType::of(&parts.headers), &read, None)
            };
            let at = at % body.len();
            let changed = format!("{}{byte}{}", &body[..at], &body[at + 1..]);
            prop_assert_eq!(print(&body) == print(&changed), body == changed);
            prop_assert_ne!(print(&body), print(&format!("{body}{byte}")));
            prop_assert_ne!(print(&body), print(&body[1..]));
        }
    }
}
