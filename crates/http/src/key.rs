//! The idempotency key of a request: from its header, or from a field of its JSON body.

use hapax_core::IdempotencyKey;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

use crate::canonical::{Node, RepeatedField};

/// The header of draft-ietf-httpapi-idempotency-key-header.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// An alternative header that some clients send.
pub const X_IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("x-idempotency-key");

/// The rule for a key, for error responses.
const KEY_RULE: &str = "send one Idempotency-Key of 1 to 255 characters, as a string of structured fields (\"9f0c…\") or bare \
                    (visible ASCII without quotes, commas, semicolons and backslashes)";

/// Why a key was not accepted: a sentence for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyError(pub(crate) String);

fn key_error(problem: &str) -> KeyError {
    KeyError(format!("{problem}; {KEY_RULE}"))
}

/// The key in the headers, if there is one.
pub(crate) fn from_headers(headers: &HeaderMap) -> Result<Option<IdempotencyKey>, KeyError> {
    let key = single_key(headers, &IDEMPOTENCY_KEY)?;
    let alias = single_key(headers, &X_IDEMPOTENCY_KEY)?;
    match (key, alias) {
        (Some(key), Some(alias)) if key != alias => {
            Err(key_error("Idempotency-Key and X-Idempotency-Key name different keys"))
        }
        (key, alias) => Ok(key.or(alias)),
    }
}

fn single_key(headers: &HeaderMap, name: &HeaderName) -> Result<Option<IdempotencyKey>, KeyError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        // It is unknown which of them the upstream would use, even if they are equal.
        return Err(key_error(&format!("the header {name} came more than once")));
    }
    parse(value).map(Some)
}

fn parse(value: &HeaderValue) -> Result<IdempotencyKey, KeyError> {
    let text = value.to_str().map_err(|_| key_error("the key has characters beyond ASCII"))?.trim();
    let key = if text.starts_with('"') {
        let item = sfv::Parser::new(text).parse::<sfv::Item>();
        let item =
            item.map_err(|error| key_error(&format!("the key is no string of structured fields ({error})")))?;
        // Parameters are ignored, as structured fields require if none are defined.
        let string = item.bare_item.as_string().map(|string| string.as_str().to_owned());
        string.ok_or_else(|| key_error("the key is no string of structured fields"))?
    } else {
        let fits = |byte: u8| byte.is_ascii_graphic() && !br#"",;\"#.contains(&byte);
        if !text.bytes().all(fits) {
            return Err(key_error("the bare key has a character that is not allowed there"));
        }
        text.to_owned()
    };
    new_key(&key)
}

fn new_key(key: &str) -> Result<IdempotencyKey, KeyError> {
    IdempotencyKey::new(key).map_err(|_| match key.len() {
        0 => key_error("the key is empty"),
        length if length > 255 => key_error(&format!("the key has {length} bytes")),
        _ => key_error("the key has a control character"),
    })
}

/// The key in a field of the body: a string, or a number as written.
pub(crate) fn from_body(body: Option<&Node>, pointer: &str) -> Result<Option<IdempotencyKey>, KeyError> {
    let Some(body) = body else { return Ok(None) };
    let found = body
        .at(pointer)
        .map_err(|RepeatedField| key_error(&format!("the body's field {pointer} is there twice")))?;
    match found {
        None | Some(Node::Literal("null")) => Ok(None),
        Some(Node::Text(text)) => match std::str::from_utf8(text) {
            Ok(text) => new_key(text).map(Some),
            Err(_) => Err(key_error(&format!("the body's field {pointer} has half of a surrogate pair"))),
        },
        Some(Node::Number(number)) => new_key(number).map(Some),
        Some(_) => Err(key_error(&format!("the body's field {pointer} is neither a string nor a number"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(value: &str) -> Result<Option<IdempotencyKey>, KeyError> {
        let mut headers = HeaderMap::new();
        headers.insert(IDEMPOTENCY_KEY, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        from_headers(&headers)
    }

    #[test]
    fn both_forms_name_the_same_key() {
        // The draft's own example.
        let uuid = "8e03978e-40d5-43e8-bc93-6894a57f9324";
        assert_eq!(header(&format!("\"{uuid}\"")).unwrap(), header(uuid).unwrap());
        assert_eq!(
            header(r#""a \"quoted\" key, with; all""#).unwrap().unwrap().as_str(),
            r#"a "quoted" key, with; all"#
        );
        assert_eq!(header(r#""clkyoesmbgybucifusbbtdsbohtyuuwz";v=1"#).unwrap().unwrap().as_str().len(), 32);
    }

    #[test]
    fn a_refusal_names_the_rule() {
        let long = "k".repeat(256);
        for value in [
            "",
            "  ",
            "\"\"",
            "\"open",
            "a b",
            "a,b",
            "\"a\", \"b\"",
            "\"a\" b",
            "a\"b",
            "\"ä\"",
            "ä",
            "a;b",
            &long,
        ] {
            let KeyError(why) = header(value).unwrap_err();
            assert!(why.contains("1 to 255"), "{value}: {why}");
        }
        assert!(header(&"k".repeat(255)).is_ok());
    }

    #[test]
    fn two_headers_must_agree() {
        let both = |key: &str, alias: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(IDEMPOTENCY_KEY, key.parse().unwrap());
            headers.insert(X_IDEMPOTENCY_KEY, alias.parse().unwrap());
            from_headers(&headers)
        };
        assert_eq!(both("\"a\"", "a").unwrap().unwrap().as_str(), "a");
        assert!(both("a", "b").is_err());
        let mut twice = HeaderMap::new();
        twice.append(IDEMPOTENCY_KEY, "a".parse().unwrap());
        twice.append(IDEMPOTENCY_KEY, "a".parse().unwrap());
        assert!(from_headers(&twice).is_err());
    }
}
