//! Message attributes: their validation, and the selection of those that a receive requests.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax_core::{Attribute, AttributeValue, Attributes, TRACE_ATTRIBUTE};

use super::error::{ErrorKind, Result, SqsError};
use super::model::{AttributeInput, AttributeInputs, Text};
use super::xml::is_xml;

/// The system attribute that senders may set. It is stored among the ordinary ones as [`TRACE_ATTRIBUTE`], which no
/// client can use, because `AWS.` is reserved.
pub(crate) const TRACE_HEADER: &str = "AWSTraceHeader";
const ATTRIBUTES_MAX: usize = 10;
const NAME_BYTES_MAX: usize = 256;

const CHARACTERS: &str = "Invalid characters found. Valid unicode characters are #x9 | #xA | #xD | #x20 to #xD7FF | \
     #xE000 to #xFFFD | #x10000 to #x10FFFF";

/// Whether a text contains only characters that SQS accepts: those of XML.
fn is_text(text: &str) -> bool {
    // Most texts are ASCII and pass the first test. It has no early exit, so it can check many bytes at once.
    let plain = |b: u8| matches!(b, b' '..=0x7f | b'\t' | b'\n' | b'\r');
    text.bytes().fold(true, |all, b| all & plain(b)) || text.chars().all(is_xml)
}

/// Checks the characters of a body.
pub(crate) fn check_text(text: &str) -> Result<()> {
    if is_text(text) { Ok(()) } else { Err(SqsError::new(ErrorKind::InvalidMessageContents, CHARACTERS)) }
}

/// Checks the characters of an attribute's type or value; AWS has a different error code for them.
fn check_attribute_text(text: &str) -> Result<()> {
    if is_text(text) { Ok(()) } else { Err(SqsError::invalid(CHARACTERS)) }
}

/// Checks and converts the attributes of a message.
pub(crate) fn user(attributes: Option<&AttributeInputs<'_>>) -> Result<Attributes> {
    let Some(attributes) = attributes else { return Ok(Attributes::new()) };
    if attributes.len() > ATTRIBUTES_MAX {
        return Err(SqsError::invalid(format!(
            "Number of message attributes [{}] exceeds the allowed maximum [{ATTRIBUTES_MAX}].",
            attributes.len()
        )));
    }
    attributes
        .iter()
        .map(|(name, attribute)| {
            check_name(name.as_str())?;
            Ok((name.as_str().to_owned(), convert(name.as_str(), attribute)?))
        })
        .collect()
}

/// Checks and converts the system attributes of a message: only the trace header may be set.
pub(crate) fn system(attributes: Option<&AttributeInputs<'_>>) -> Result<Option<Attribute>> {
    let mut trace = None;
    for (name, attribute) in attributes.into_iter().flatten() {
        if name.as_str() != TRACE_HEADER {
            return Err(SqsError::invalid(format!(
                "Message system attribute name '{}' is invalid. Reason: only {TRACE_HEADER} can be set.",
                hapax_core::policy::truncate(name.as_str(), NAME_BYTES_MAX)
            )));
        }
        let attribute = convert(TRACE_HEADER, attribute)?;
        if attribute.data_type != "String" {
            return Err(SqsError::invalid(format!(
                "Message system attribute {TRACE_HEADER} must be of type String."
            )));
        }
        trace = Some(attribute);
    }
    Ok(trace)
}

fn check_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(SqsError::invalid("Message (user) attribute names must not be empty."));
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(SqsError::invalid("Message (user) attribute names must be shorter than 256 Bytes"));
    }
    // Letters and digits of any script, as in AWS.
    if !name.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c)) {
        return Err(SqsError::invalid(
            "Message (user) attributes name can only contain upper and lower score characters, digits, periods, \
             hyphens and underscores.",
        ));
    }
    let lower = name.to_ascii_lowercase();
    let reserved = lower.starts_with("aws.") || lower.starts_with("amazon.");
    if reserved || name.starts_with('.') || name.ends_with('.') || name.contains("..") {
        return Err(SqsError::invalid(
            "You can't use message attribute names beginning with 'AWS.' or 'Amazon.'. These strings are reserved \
             for internal use. Additionally, they cannot start or end with '.', or have periods in succession.",
        ));
    }
    Ok(())
}

fn convert(name: &str, attribute: &AttributeInput<'_>) -> Result<Attribute> {
    let used = |list: &Option<serde_json::Value>| match list {
        None | Some(serde_json::Value::Null) => false,
        Some(serde_json::Value::Array(items)) => !items.is_empty(),
        Some(_) => true,
    };
    if used(&attribute.string_list_values) || used(&attribute.binary_list_values) {
        let text = "Message attribute list values in SendMessage operation are not supported.";
        return Err(SqsError::new(ErrorKind::UnsupportedOperation, text));
    }
    let data_type = attribute.data_type.as_ref().map(Text::as_str).filter(|text| !text.is_empty());
    let data_type = data_type.ok_or_else(|| {
        SqsError::invalid(format!(
            "The message attribute '{name}' must contain non-empty message attribute type."
        ))
    })?;
    if data_type.len() > NAME_BYTES_MAX {
        return Err(SqsError::invalid("Message (user) attribute types must be shorter than 256 Bytes"));
    }
    check_attribute_text(data_type)?;
    let value = match data_type.split('.').next() {
        Some("String") => AttributeValue::Text(text_value(name, "String", attribute)?.to_owned()),
        Some("Number") => {
            let text = text_value(name, "Number", attribute)?;
            if !is_number(text) {
                return Err(SqsError::invalid(format!(
                    "Can't cast the value of message (user) attribute '{name}' to a number."
                )));
            }
            AttributeValue::Text(text.to_owned())
        }
        Some("Binary") => AttributeValue::Binary(binary_value(name, attribute)?.into()),
        _ => {
            return Err(SqsError::invalid(format!(
                "The message attribute '{name}' has an invalid message attribute type, the set of supported type \
                 prefixes is Binary, Number, and String."
            )));
        }
    };
    Ok(Attribute { data_type: data_type.to_owned(), value })
}

fn empty(name: &str, kind: &str) -> SqsError {
    SqsError::invalid(format!(
        "Message (user) attribute '{name}' must contain a non-empty value of type '{kind}'."
    ))
}

fn text_value<'t>(name: &str, kind: &str, attribute: &'t AttributeInput<'_>) -> Result<&'t str> {
    let text = attribute.string_value.as_ref().map(Text::as_str).filter(|text| !text.is_empty());
    let text = text.ok_or_else(|| empty(name, kind))?;
    check_attribute_text(text)?;
    Ok(text)
}

fn binary_value(name: &str, attribute: &AttributeInput<'_>) -> Result<Vec<u8>> {
    let text = attribute.binary_value.as_ref().map(Text::as_str).filter(|text| !text.is_empty());
    let text = text.ok_or_else(|| empty(name, "Binary"))?;
    STANDARD.decode(text).map_err(|_| {
        SqsError::invalid(format!("The value of message (user) attribute '{name}' is not base64."))
    })
}

/// A decimal number with up to 38 digits and an optional exponent.
fn is_number(text: &str) -> bool {
    let text = text.trim();
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let unsigned = mantissa.strip_prefix(['+', '-']).unwrap_or(mantissa);
    let digits = unsigned.bytes().filter(u8::is_ascii_digit).count();
    let dots = unsigned.bytes().filter(|b| *b == b'.').count();
    (1..=38).contains(&digits)
        && dots <= 1
        && digits + dots == unsigned.len()
        && exponent.parse::<i32>().is_ok_and(|exponent| (-128..=126).contains(&exponent))
}

/// Keeps the attributes that a receive requests: by name, by `prefix.*`, or all of them.
pub(crate) fn select(attributes: Attributes, names: &[Text<'_>]) -> Attributes {
    let wanted = |name: &str| {
        names.iter().map(Text::as_str).any(|wanted| match wanted {
            "All" | ".*" | "*" => true,
            prefix if prefix.ends_with(".*") => name.starts_with(&prefix[..prefix.len() - 2]),
            exact => exact == name,
        })
    };
    attributes.into_iter().filter(|(name, _)| name != TRACE_ATTRIBUTE && wanted(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str, data_type: &str, value: &str) -> Result<Attributes> {
        let mut json = serde_json::json!({ name: { "DataType": data_type } });
        let field = if data_type.starts_with("Binary") { "BinaryValue" } else { "StringValue" };
        json[name][field] = value.into();
        let text = json.to_string();
        let attributes: AttributeInputs<'_> = serde_json::from_str(&text).unwrap();
        user(Some(&attributes))
    }

    #[test]
    fn types_and_labels() {
        for (data_type, value) in [
            ("String", "x"),
            ("String.uuid", "x"),
            ("Number", "-12.5e3"),
            ("Number.int", "7"),
            ("Binary", "AAE="),
            ("Binary.png", "AAE="),
        ] {
            let attributes = one("a.b-c_1", data_type, value).unwrap();
            assert_eq!(attributes["a.b-c_1"].data_type, data_type);
        }
        for (data_type, value) in [
            ("", "x"),
            ("Text", "x"),
            ("String", ""),
            ("Number", "seven"),
            ("Number", "."),
            ("Binary", "!"),
            ("Stringy", "x"),
        ] {
            assert_eq!(
                one("a", data_type, value).unwrap_err().kind,
                ErrorKind::InvalidParameterValue,
                "{data_type}"
            );
        }
        assert_eq!(one("a", "String", "\u{1}").unwrap_err().kind, ErrorKind::InvalidParameterValue);
    }

    #[test]
    fn names() {
        assert!(one("attr.1øßä-名", "String", "x").is_ok());
        for bad in ["", "a§b", "AWS.x", "amazon.y", ".a", "a.", "a..b", "a b", &"n".repeat(257)] {
            assert!(one(bad, "String", "x").is_err(), "{bad}");
        }
    }

    #[test]
    fn characters_outside_xml_are_refused() {
        for good in ["", "tab\tline\nend\r", "\u{20}\u{d7ff}\u{e000}\u{fffd}\u{10000}\u{10ffff}"] {
            assert!(check_text(good).is_ok(), "{good:?}");
        }
        for bad in ["\u{0}", "a\u{b}", "\u{1f}", "\u{fffe}", "x\u{ffff}"] {
            assert!(check_text(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_receive_selects_by_name_and_prefix() {
        let attributes: Attributes = ["General", "Hello", "Help.Me", TRACE_ATTRIBUTE]
            .into_iter()
            .map(|name| (name.to_owned(), Attribute::text("x")))
            .collect();
        let select = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| Text((*name).into())).collect();
            super::select(attributes.clone(), &names).into_keys().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(select(&["All"]), "General Hello Help.Me");
        assert_eq!(select(&[".*"]), "General Hello Help.Me");
        assert_eq!(select(&["Hel.*"]), "Hello Help.Me");
        assert_eq!(select(&["Hello", "Foo"]), "Hello");
        assert_eq!(select(&[]), "");
        assert_eq!(select(&["AWS."]), "");
    }
}
