//! The normal form of a path, used to find its route.

use std::borrow::Cow;

/// Normalises a path in the way most services read it: `//payments`, `/payments/`, `/./payments`, `/x/../payments` and
/// `/%70ayments` become `/payments`. If a policy were looked up by the path as written, a caller could bypass it with
/// another spelling.
///
/// The normal form is only used to find the route: the service gets the path as sent, and the fingerprint covers that.
pub(crate) fn normalize(path: &str) -> Cow<'_, str> {
    if !path.starts_with('/') || is_normal(path.as_bytes()) {
        return Cow::Borrowed(path);
    }
    Cow::Owned(rewritten(path))
}

fn rewritten(path: &str) -> String {
    let decoded = decode_unreserved(path);
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    format!("/{}", segments.join("/"))
}

/// Whether a path that starts with a slash is clearly in its normal form, as nearly all are. `/.well-known` is, too, but
/// that is left to the complete check.
fn is_normal(path: &[u8]) -> bool {
    let odd = |pair: &[u8]| pair[0] == b'/' && matches!(pair[1], b'/' | b'.');
    let ends_well = path.len() == 1 || !path.ends_with(b"/");
    ends_well && !path.contains(&b'%') && !path.windows(2).any(odd)
}

/// Decodes characters that need no encoding (RFC 3986, 6.2.2) and writes the other hex digits in upper case. `%2F`
/// stays, because most services do not treat it as a slash.
fn decode_unreserved(path: &str) -> String {
    let mut decoded = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        let (before, escape) = rest.split_at(at);
        decoded.push_str(before);
        let digits = escape.get(1..3).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let Some(digits) = digits else {
            decoded.push('%');
            rest = &escape[1..];
            continue;
        };
        let byte = u8::from_str_radix(digits, 16).expect("two hex digits");
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            decoded.push(char::from(byte));
        } else {
            decoded.push('%');
            decoded.push_str(&digits.to_ascii_uppercase());
        }
        rest = &escape[3..];
    }
    decoded.push_str(rest);
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_path_are_one_route() {
        for written in [
            "/payments",
            "/payments/",
            "//payments",
            "///payments//",
            "/./payments",
            "/x/../payments",
            "/x/%2e%2E/payments",
            "/../payments/.",
            "/%70ayments",
            "/%70%61yments/",
        ] {
            assert_eq!(normalize(written), "/payments", "{written}");
        }
        for (written, kept) in [
            ("/", "/"),
            ("//", "/"),
            ("*", "*"),
            ("", ""),
            ("/a%2fb", "/a%2Fb"),
            ("/a%", "/a%"),
            ("/a%zz", "/a%zz"),
            ("/a%2", "/a%2"),
            ("/Payments", "/Payments"),
            ("/orders/{id}/", "/orders/{id}"),
            ("/a b/ä", "/a b/ä"),
            ("/%25%37%30", "/%2570"),
        ] {
            assert_eq!(normalize(written), kept, "{written}");
        }
    }

    #[test]
    fn a_path_that_is_left_as_it_is_was_normal() {
        let mut paths = vec![String::from("/")];
        for _ in 0..5 {
            let longer = |path: &String| ["/", ".", "%", "2", "e"].map(|more| format!("{path}{more}"));
            let longer: Vec<_> = paths.iter().flat_map(longer).collect();
            paths.extend(longer);
        }
        for path in &paths {
            assert_eq!(normalize(path), rewritten(path), "{path}");
        }
        let kept = paths.iter().filter(|path| is_normal(path.as_bytes())).count();
        assert!(kept > 1, "some are left as they are");
    }
}
