//! The MD5 digests by which AWS SDKs verify that messages arrive unchanged.

use hapax_core::{Attribute, AttributeValue};
use md5::{Digest as _, Md5};

fn hex(digest: impl AsRef<[u8]>) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(32);
    for byte in digest.as_ref() {
        text.push(DIGITS[usize::from(byte >> 4)] as char);
        text.push(DIGITS[usize::from(byte & 15)] as char);
    }
    text
}

/// Digest of a body.
pub(crate) fn of_body(body: &[u8]) -> String {
    hex(Md5::digest(body))
}

/// Digest of attributes, ordered by name; `None` if there are none. Each contributes its name, its type, one byte for
/// the kind of its value, and the value. Name, type and value are preceded by their length.
pub(crate) fn of_attributes<'a>(
    attributes: impl IntoIterator<Item = (&'a str, &'a Attribute)>,
) -> Option<String> {
    let mut md5 = Md5::new();
    let mut any = false;
    let part = |md5: &mut Md5, bytes: &[u8]| {
        md5.update((bytes.len() as u32).to_be_bytes());
        md5.update(bytes);
    };
    for (name, attribute) in attributes {
        any = true;
        part(&mut md5, name.as_bytes());
        part(&mut md5, attribute.data_type.as_bytes());
        match &attribute.value {
            AttributeValue::Text(text) => {
                md5.update([1]);
                part(&mut md5, text.as_bytes());
            }
            AttributeValue::Binary(bytes) => {
                md5.update([2]);
                part(&mut md5, bytes);
            }
        }
    }
    any.then(|| hex(md5.finalize()))
}

#[cfg(test)]
mod tests {
    use hapax_core::Attributes;

    use super::*;

    fn digest(attributes: &Attributes) -> Option<String> {
        of_attributes(attributes.iter().map(|(name, attribute)| (name.as_str(), attribute)))
    }

    /// Digests returned by AWS itself.
    #[test]
    fn digests_are_those_of_aws() {
        assert_eq!(of_body(b"msg"), "6e2baaf3b97dbeef01c0043275f9a0e7");
        let mut attributes = Attributes::new();
        assert_eq!(digest(&attributes), None);
        attributes.insert("Foo".into(), Attribute::text("Bar"));
        assert_eq!(digest(&attributes).unwrap(), "ae7155c6026991b6d54b11589678bf9c");

        let mut attributes = Attributes::new();
        for (name, value) in [("Help.Me", "Me"), ("Hello", "There"), ("General", "Kenobi")] {
            attributes.insert(name.into(), Attribute::text(value));
        }
        assert_eq!(digest(&attributes).unwrap(), "4c360f3fdafd970e05fae2f149d997f5");

        let bytes = b"traceparent\x1e00-774062d6c37081a5a0b9b5b88e30627c-2d2482211f6489da-01";
        let value = AttributeValue::Binary(bytes::Bytes::from_static(bytes));
        let mut attributes = Attributes::new();
        attributes.insert("attr1".into(), Attribute { data_type: "Binary".into(), value });
        assert_eq!(digest(&attributes).unwrap(), "8cbe4db156db8a94db8b801b7addb984");
    }
}
