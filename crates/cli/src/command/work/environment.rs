//! The environment variables that describe a delivery to its command.

use std::ffi::OsString;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hapax::Cx;
use hapax::core::{AttributeValue, Attributes};

/// Maximum total length of attribute values in variables; attributes beyond it are left out.
const ATTRIBUTES_BYTES_MAX: usize = 64 * 1024;
/// Prefix of the variables of attributes.
const ATTRIBUTE_PREFIX: &str = "HAPAX_ATTR_";
/// Set only for some deliveries, so an inherited value would be mistaken for the delivery's own.
const OPTIONAL_VARIABLES: [&str; 1] = ["HAPAX_GROUP"];

/// The variables of a delivery.
pub fn variables(cx: &Cx) -> Vec<(OsString, OsString)> {
    let deadline = SystemTime::now() + cx.remaining();
    let deadline_ms = deadline.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis();
    let mut variables: Vec<(String, String)> = [
        ("HAPAX_QUEUE", cx.queue().to_string()),
        ("HAPAX_MESSAGE_ID", cx.message_id().to_string()),
        ("HAPAX_ATTEMPT", cx.attempt().to_string()),
        ("HAPAX_IDEMPOTENCY_KEY", cx.idempotency_key().to_string()),
        ("HAPAX_DERIVED_KEY", cx.derived_key("").to_string()),
        ("HAPAX_FENCE", cx.fence().to_string()),
        ("HAPAX_TAKEOVER", u8::from(cx.is_takeover()).to_string()),
        ("HAPAX_LEASE_DEADLINE", deadline_ms.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    if let Some(group) = cx.group() {
        variables.push(("HAPAX_GROUP".to_owned(), group.to_string()));
    }
    variables.extend(attributes(cx.attributes()));
    variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// Variables of `hapax work` that a command must not inherit.
pub fn stale() -> Vec<OsString> {
    let ours = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with(ATTRIBUTE_PREFIX) || OPTIONAL_VARIABLES.contains(&&*name)
    };
    std::env::vars_os().map(|(name, _)| name).filter(ours).collect()
}

/// Text attributes as variables; binary values are left out.
fn attributes(attributes: &Attributes) -> Vec<(String, String)> {
    let texts = attributes.iter().filter_map(|(name, attribute)| match &attribute.value {
        AttributeValue::Text(text) => Some((name.as_str(), text.as_str())),
        AttributeValue::Binary(_) => None,
    });
    text_variables(texts)
}

/// Texts as variables: letters of the name in upper case, all characters except letters and digits as `_`. If two names
/// become the same variable, the first one is kept; text that no variable can hold is left out.
pub fn text_variables<'t>(texts: impl IntoIterator<Item = (&'t str, &'t str)>) -> Vec<(String, String)> {
    let mut room = ATTRIBUTES_BYTES_MAX;
    let mut variables: Vec<(String, String)> = Vec::new();
    for (name, text) in texts {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
        let name = format!("{ATTRIBUTE_PREFIX}{}", name.chars().map(plain).collect::<String>());
        let bytes = name.len() + text.len();
        if text.contains('\0') || bytes > room || variables.iter().any(|(taken, _)| *taken == name) {
            continue;
        }
        room -= bytes;
        variables.push((name, text.to_owned()));
    }
    variables
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use hapax::Attribute;

    use super::*;

    #[test]
    fn attributes_become_variables_that_any_shell_can_name() {
        let large = "x".repeat(ATTRIBUTES_BYTES_MAX);
        let given = [
            ("trace.id", Attribute::text("7")),
            ("trace-id", Attribute::text("6")),
            ("PATH=", Attribute::text("/evil")),
            ("nul", Attribute::text("a\0b")),
            ("large", Attribute::text(large)),
            ("bytes", Attribute { data_type: "Binary".into(), value: AttributeValue::Binary(Bytes::new()) }),
        ];
        let given = given.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let variables = attributes(&given);
        let shown: Vec<_> = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(shown, ["HAPAX_ATTR_PATH_=/evil", "HAPAX_ATTR_TRACE_ID=6"]);
    }
}
