//! JSON in a canonical form: the order of keys and white space do not matter, everything else does.
//!
//! Numbers stay as written. Parsed as floats, two different large numbers could become equal, and a request would get
//! another request's response.

/// Maximum nesting depth of a parsed body, as in `serde_json`.
const DEPTH_MAX: usize = 128;

/// A JSON value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Node<'a> {
    /// `true`, `false`, `null`.
    Literal(&'a str),
    /// As written.
    Number(&'a str),
    /// Without escapes, in WTF-8: an unpaired surrogate, which UTF-8 cannot represent, gets bytes that no other text
    /// has.
    Text(Vec<u8>),
    /// In order.
    Array(Vec<Node<'a>>),
    /// By key. A repeated key stays, in order, because servers differ in which value they use.
    Object(Vec<(Vec<u8>, Node<'a>)>),
}

impl<'a> Node<'a> {
    /// Parses a text; `None` if it is not JSON or is nested too deeply.
    pub(crate) fn parse(text: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        // serde_json validates the text, so the reader below may rely on it.
        serde_json::from_str::<serde::de::IgnoredAny>(text).ok()?;
        let mut reader = Reader { text, at: 0 };
        reader.value(0)
    }

    /// The value at a JSON pointer (RFC 6901). Fails for a repeated field, because services differ in which one they
    /// use.
    pub(crate) fn at(&self, pointer: &str) -> Result<Option<&Self>, RepeatedField> {
        let mut node = self;
        for token in pointer.split('/').skip(1) {
            let token = unescape(token);
            let next = match node {
                Self::Object(fields) => {
                    let mut found = fields.iter().filter(|(key, _)| key == token.as_bytes());
                    let first = found.next().map(|(_, value)| value);
                    if found.next().is_some() {
                        return Err(RepeatedField);
                    }
                    first
                }
                Self::Array(items) => token.parse::<usize>().ok().and_then(|at| items.get(at)),
                _ => None,
            };
            let Some(next) = next else { return Ok(None) };
            node = next;
        }
        Ok(Some(node))
    }

    /// Removes the value at a JSON pointer, if it exists.
    pub(crate) fn remove(&mut self, pointer: &str) {
        let Some((path, last)) = pointer.rsplit_once('/') else { return };
        let mut node = self;
        for token in path.split('/').skip(1) {
            let token = unescape(token);
            let next = match node {
                Self::Object(fields) => {
                    fields.iter_mut().find(|(key, _)| key == token.as_bytes()).map(|(_, value)| value)
                }
                Self::Array(items) => token.parse::<usize>().ok().and_then(|at| items.get_mut(at)),
                _ => None,
            };
            let Some(next) = next else { return };
            node = next;
        }
        let last = unescape(last);
        match node {
            Self::Object(fields) => fields.retain(|(key, _)| key != last.as_bytes()),
            Self::Array(items) => {
                // Blanked, not removed: the later items keep their positions.
                if let Some(item) = last.parse::<usize>().ok().and_then(|at| items.get_mut(at)) {
                    *item = Self::Literal("");
                }
            }
            _ => {}
        }
    }

    /// Hashes the value: each part with its kind and length, so that different values never give the same input.
    pub(crate) fn hash(&self, into: &mut blake3::Hasher) {
        match self {
            Self::Literal(text) => hash_value(into, b'l', text.as_bytes()),
            Self::Number(text) => hash_value(into, b'n', text.as_bytes()),
            Self::Text(text) => hash_value(into, b's', text),
            Self::Array(items) => {
                hash_length(into, b'a', items.len());
                for item in items {
                    item.hash(into);
                }
            }
            Self::Object(fields) => {
                hash_length(into, b'o', fields.len());
                for (key, value) in fields {
                    hash_value(into, b'k', key);
                    value.hash(into);
                }
            }
        }
    }
}

fn hash_length(into: &mut blake3::Hasher, kind: u8, length: usize) {
    into.update(&[kind]);
    into.update(&(length as u64).to_le_bytes());
}

fn hash_value(into: &mut blake3::Hasher, kind: u8, text: &[u8]) {
    into.update(&[kind]);
    hash_part(into, text);
}

/// Hashes a part with its length, so that different divisions into parts never give the same hash.
pub(crate) fn hash_part(into: &mut blake3::Hasher, bytes: &[u8]) {
    into.update(&(bytes.len() as u64).to_le_bytes());
    into.update(bytes);
}

/// A field occurs twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RepeatedField;

fn unescape(token: &str) -> String {
    token.replace("~1", "/").replace("~0", "~")
}

/// Reads text that is known to be JSON.
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn peek(&mut self) -> Option<u8> {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| b" \t\r\n".contains(byte)).count();
        self.text.as_bytes().get(self.at).copied()
    }

    /// Skips the next byte if it is `byte`.
    fn skip(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    fn value(&mut self, depth: usize) -> Option<Node<'a>> {
        if depth > DEPTH_MAX {
            return None;
        }
        match self.peek()? {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => self.string().map(Node::Text),
            b't' | b'f' | b'n' => Some(Node::Literal(self.plain())),
            _ => Some(Node::Number(self.plain())),
        }
    }

    fn object(&mut self, depth: usize) -> Option<Node<'a>> {
        self.skip(b'{');
        let mut fields = Vec::new();
        while !self.skip(b'}') {
            self.peek();
            let key = self.string()?;
            self.skip(b':');
            fields.push((key, self.value(depth + 1)?));
            self.skip(b',');
        }
        fields.sort_by(|a, b| a.0.cmp(&b.0));
        Some(Node::Object(fields))
    }

    fn array(&mut self, depth: usize) -> Option<Node<'a>> {
        self.skip(b'[');
        let mut items = Vec::new();
        while !self.skip(b']') {
            items.push(self.value(depth + 1)?);
            self.skip(b',');
        }
        Some(Node::Array(items))
    }

    fn string(&mut self) -> Option<Vec<u8>> {
        let start = self.at + 1;
        let bytes = self.text.as_bytes();
        let mut end = start;
        while *bytes.get(end)? != b'"' {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        self.at = end + 1;
        without_escapes(self.text.get(start..end)?)
    }

    /// A number or a literal: up to the next delimiter or space.
    fn plain(&mut self) -> &'a str {
        let rest = &self.text[self.at..];
        let length = rest.bytes().take_while(|byte| !b",]} \t\r\n".contains(byte)).count();
        self.at += length;
        &rest[..length]
    }
}

/// The text of a string, in WTF-8.
fn without_escapes(written: &str) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(written.len());
    let mut rest = written;
    while let Some((before, escape)) = rest.split_once('\\') {
        text.extend_from_slice(before.as_bytes());
        let kind = *escape.as_bytes().first()?;
        rest = escape.get(1..)?;
        match kind {
            b'b' => text.push(8),
            b'f' => text.push(12),
            b'n' => text.push(b'\n'),
            b'r' => text.push(b'\r'),
            b't' => text.push(b'\t'),
            b'u' => {
                let high = unit(rest)?;
                rest = rest.get(4..)?;
                let low =
                    rest.strip_prefix("\\u").and_then(unit).filter(|low| (0xdc00..0xe000).contains(low));
                match low {
                    Some(low) if (0xd800..0xdc00).contains(&high) => {
                        push(&mut text, 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00));
                        rest = rest.get(6..)?;
                    }
                    _ => push(&mut text, high),
                }
            }
            plain => text.push(plain),
        }
    }
    text.extend_from_slice(rest.as_bytes());
    Some(text)
}

/// The value of four hex digits.
fn unit(text: &str) -> Option<u32> {
    u32::from_str_radix(text.get(..4)?, 16).ok()
}

/// Appends a code point; an unpaired surrogate is encoded in the way of UTF-8.
fn push(text: &mut Vec<u8>, point: u32) {
    match char::from_u32(point) {
        Some(c) => text.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        None => text.extend([
            0xe0 | (point >> 12) as u8,
            0x80 | (point >> 6 & 0x3f) as u8,
            0x80 | (point & 0x3f) as u8,
        ]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(text: &str) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        Node::parse(text.as_bytes()).unwrap().hash(&mut hasher);
        hasher.finalize()
    }

    #[test]
    fn order_and_space_do_not_matter() {
        let written = r#"{"a":1,"b":[true,{"c":"x\u0041","d":null}]}"#;
        let other = "{ \"b\" : [ true , { \"d\" : null,\n\"c\":\"xA\"} ]\t, \"a\" : 1 }";
        assert_eq!(hash(written), hash(other));
    }

    #[test]
    fn everything_else_does() {
        let values = [
            "1",
            "1.0",
            "\"1\"",
            "[1]",
            "[[1]]",
            "[1,1]",
            "{}",
            "[]",
            "null",
            "true",
            "\"\"",
            "[\"a\",\"b\"]",
            "[\"ab\"]",
            "[\"b\",\"a\"]",
            r#"{"a":1}"#,
            r#"{"a":{"b":1}}"#,
            r#"{"a":{},"b":1}"#,
            r#"{"a":1,"a":2}"#,
            r#"{"a":2,"a":1}"#,
            "12345678901234567890123",
            "12345678901234567890124",
        ];
        for (at, a) in values.iter().enumerate() {
            for b in &values[at + 1..] {
                assert_ne!(hash(a), hash(b), "{a} and {b}");
            }
        }
    }

    #[test]
    fn fields_are_found_and_taken_out() {
        let mut node = Node::parse(br#"{"order":{"id":"o-7","at":1},"a/b":[5,6]}"#).unwrap();
        assert_eq!(node.at("/order/id"), Ok(Some(&Node::Text(b"o-7".to_vec()))));
        assert_eq!(node.at("/a~1b/1"), Ok(Some(&Node::Number("6"))));
        assert_eq!(node.at("/order/nope"), Ok(None));
        assert_eq!(Node::parse(br#"{"a":1,"a":2}"#).unwrap().at("/a"), Err(RepeatedField));
        node.remove("/order/at");
        node.remove("/nope/at");
        assert_eq!(node, Node::parse(br#"{"order":{"id":"o-7"},"a/b":[5,6]}"#).unwrap());
    }

    #[test]
    fn invalid_or_too_deep_json_is_not_parsed() {
        for text in ["", "{", "nul", "{\"a\":1,}", "1 2", "\u{7f}"] {
            assert_eq!(Node::parse(text.as_bytes()), None, "{text}");
        }
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert_eq!(Node::parse(deep.as_bytes()), None);
    }

    #[test]
    fn escapes_are_undone_and_half_a_pair_is_itself() {
        let text = |written: &str| match Node::parse(written.as_bytes()) {
            Some(Node::Text(text)) => text,
            other => panic!("{written}: {other:?}"),
        };
        assert_eq!(text(r#""\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00""#), "\"\\/\u{8}\u{c}\n\r\té😀".as_bytes());
        assert_eq!(text(r#""\ud800""#), [0xed, 0xa0, 0x80]);
        assert_eq!(text(r#""\uDFFFx""#), [0xed, 0xbf, 0xbf, b'x']);
        assert_eq!(text(r#""\ud800\ud83d\ude00""#), [&[0xed, 0xa0, 0x80][..], "😀".as_bytes()].concat());
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            "\\PC{0,8}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::vec(("\\PC{0,4}", inner), 0..4)
                    .prop_map(|fields| serde_json::Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Two values have the same hash exactly if they are equal, regardless of their formatting.
        #[test]
        fn the_hash_is_the_value(a in json(), b in json()) {
            let (plain, pretty) = (a.to_string(), serde_json::to_string_pretty(&a).unwrap());
            prop_assert_eq!(hash(&plain), hash(&pretty));
            prop_assert_eq!(a == b, hash(&plain) == hash(&b.to_string()));
        }

        /// Reading arbitrary bytes terminates.
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Node::parse(&bytes);
        }
    }
}
