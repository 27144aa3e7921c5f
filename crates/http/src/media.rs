//! The media type of a body: its `Content-Type`, parsed so that equivalent spellings are equal.

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};

/// A `Content-Type`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MediaType {
    /// In lower case, without parameters; empty if the header is missing or unreadable.
    pub(crate) kind: String,
    /// Names in lower case, values without quotes; sorted by name.
    pub(crate) parameters: Vec<(String, String)>,
    /// The raw header if it was sent more than once or is unreadable: two such headers are equal only if their bytes
    /// are.
    pub(crate) unparsed: Vec<Vec<u8>>,
    /// The body has a content coding, so its content is unknown here.
    coded: bool,
}

impl MediaType {
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let lines: Vec<&[u8]> = headers.get_all(CONTENT_TYPE).iter().map(HeaderValue::as_bytes).collect();
        let coded = headers.contains_key(CONTENT_ENCODING);
        match lines.as_slice() {
            [] => Self { coded, ..Self::default() },
            [line] => std::str::from_utf8(line).ok().and_then(Self::parse).map_or_else(
                || Self { unparsed: vec![line.to_vec()], coded, ..Self::default() },
                |media| Self { coded, ..media },
            ),
            several => {
                let unparsed = several.iter().map(|line| line.to_vec()).collect();
                Self { unparsed, coded, ..Self::default() }
            }
        }
    }

    fn parse(line: &str) -> Option<Self> {
        let (kind, mut rest) = line.split_once(';').unwrap_or((line, ""));
        let mut parameters = Vec::new();
        loop {
            rest = rest.trim_start_matches([';', ' ', '\t']);
            if rest.is_empty() {
                break;
            }
            let (name, value) = rest.split_once('=')?;
            let name = name.trim().to_ascii_lowercase();
            let (value, after) = if let Some(quoted) = value.strip_prefix('"') {
                unquote(quoted)?
            } else {
                let end = value.find(';').unwrap_or(value.len());
                (value[..end].trim().to_owned(), &value[end..])
            };
            let value = if name == "charset" { value.to_ascii_lowercase() } else { value };
            parameters.push((name, value));
            rest = after;
        }
        parameters.sort_by(|one, other| one.0.cmp(&other.0));
        let kind = kind.trim().to_ascii_lowercase();
        Some(Self { kind, parameters, ..Self::default() })
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        let mut found =
            self.parameters.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str());
        // If there are two, services differ in which one they use.
        found.next().filter(|_| found.next().is_none())
    }

    /// Whether the body is uncoded JSON in UTF-8.
    pub(crate) fn is_json(&self) -> bool {
        let json = self.kind == "application/json" || self.kind.ends_with("+json");
        let utf8 = self.parameters.iter().all(|(name, value)| name != "charset" || value == "utf-8");
        json && utf8 && !self.coded
    }

    /// The boundary of a multipart body.
    pub(crate) fn boundary(&self) -> Option<&str> {
        let multipart = self.kind.starts_with("multipart/") && !self.coded;
        self.parameter("boundary").filter(|boundary| multipart && !boundary.is_empty())
    }

    /// The parameters that describe the body. A boundary only separates parts, and JSON is in UTF-8 with or without a
    /// charset.
    pub(crate) fn content_parameters(&self) -> impl Iterator<Item = &(String, String)> {
        let (boundary, json) = (self.boundary().is_some(), self.is_json());
        self.parameters.iter().filter(move |(name, _)| match name.as_str() {
            "boundary" => !boundary,
            "charset" => !json,
            _ => true,
        })
    }
}

/// The content of a quoted string after its opening quote, and the text behind it.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut content = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => content.push(chars.next()?.1),
            '"' => {
                let after = text[at + 1..].trim_start_matches([' ', '\t']);
                return (after.is_empty() || after.starts_with(';')).then_some((content, after));
            }
            c => content.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn media(lines: &[&str]) -> MediaType {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CONTENT_TYPE, line.parse().unwrap());
        }
        MediaType::of(&headers)
    }

    #[test]
    fn writings_of_one_kind_are_one() {
        let one = media(&["multipart/form-data; charset=utf-8; boundary=a"]);
        for other in [
            "Multipart/Form-Data;Boundary=a;charset=UTF-8",
            "multipart/form-data ; boundary=\"a\" ; charset=\"utf-8\";",
            "multipart/form-data; charset=utf-8; boundary=\"\\a\"",
        ] {
            assert_eq!(media(&[other]), one, "{other}");
        }
        assert_eq!(media(&["multipart/mixed; boundary=\"a;b=c\""]).boundary(), Some("a;b=c"));
        assert_eq!(media(&["text/plain; boundary=a"]).boundary(), None);
        assert_eq!(media(&["multipart/mixed; boundary=a; boundary=b"]).boundary(), None);
    }

    #[test]
    fn an_unparsable_type_is_kept_as_sent() {
        for lines in [&["text/plain; x"][..], &["text/plain; x=\"open"], &["a/b; x=\"1\"2"], &["a/b", "a/b"]]
        {
            let read = media(lines);
            assert_eq!(read.unparsed.len(), lines.len(), "{lines:?}");
            assert!(!read.is_json() && read.boundary().is_none());
        }
    }

    #[test]
    fn json_is_json_in_utf8_and_not_coded() {
        for json in ["application/json", "Application/JSON;charset=UTF-8", "application/problem+json; v=1"] {
            assert!(media(&[json]).is_json(), "{json}");
        }
        for other in ["application/json; charset=utf-16", "text/plain", "application/jsonx"] {
            assert!(!media(&[other]).is_json(), "{other}");
        }
        let coded = [(CONTENT_TYPE, "application/json"), (CONTENT_ENCODING, "gzip")];
        assert!(
            !MediaType::of(&coded.into_iter().map(|(name, value)| (name, value.parse().unwrap())).collect())
                .is_json()
        );
    }
}
