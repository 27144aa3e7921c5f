//! Form encoding: `name=value&name=value`, in a query or a body.

use std::borrow::Cow;

/// The pairs of a form, decoded; bytes that are not UTF-8 are replaced.
pub(crate) fn form_pairs(form: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    form.split('&').filter(|part| !part.is_empty()).map(|part| {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        (decode(name), decode(value))
    })
}

fn decode(text: &str) -> Cow<'_, str> {
    match percent_decode(text) {
        Cow::Borrowed(bytes) => String::from_utf8_lossy(bytes),
        Cow::Owned(bytes) => match String::from_utf8(bytes) {
            Ok(text) => Cow::Owned(text),
            Err(error) => Cow::Owned(String::from_utf8_lossy(error.as_bytes()).into_owned()),
        },
    }
}

/// Resolves `%XX` and `+`. A `%` without two digits after it stays as it is.
pub(crate) fn percent_decode(text: &str) -> Cow<'_, [u8]> {
    let bytes = text.as_bytes();
    if !bytes.iter().any(|b| matches!(b, b'%' | b'+')) {
        return Cow::Borrowed(bytes);
    }
    let digit = |at: usize| bytes.get(at).and_then(|b| (*b as char).to_digit(16)).map(|d| d as u8);
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match (bytes[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                decoded.push(high << 4 | low);
                at += 2;
            }
            (b'+', ..) => decoded.push(b' '),
            (other, ..) => decoded.push(other),
        }
        at += 1;
    }
    Cow::Owned(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_decode() {
        let pairs: Vec<_> = form_pairs("a=1&b=x+y%20z&&c&%C3%A4=%ZZ%4").collect();
        let expected = [("a", "1"), ("b", "x y z"), ("c", ""), ("ä", "%ZZ%4")];
        assert_eq!(pairs.len(), expected.len());
        for ((name, value), (n, v)) in pairs.iter().zip(expected) {
            assert_eq!((name.as_ref(), value.as_ref()), (n, v));
        }
    }
}
