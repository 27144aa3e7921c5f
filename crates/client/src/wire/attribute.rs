//! Attributes: usually a plain string; an object if the type is not `String` or the value is binary.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax_core::{Attribute, AttributeValue};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An attribute in JSON: `"text"`, `{"type": "Number", "text": "7"}` or `{"type": "Binary", "base64": "AAE="}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttributeItem(pub Attribute);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TypedAttribute {
    #[serde(rename = "type")]
    data_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
}

impl Serialize for AttributeItem {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let data_type = Some(self.0.data_type.clone());
        match &self.0.value {
            AttributeValue::Text(text) if self.0.data_type == "String" => to.serialize_str(text),
            AttributeValue::Text(text) => {
                TypedAttribute { data_type, text: Some(text.clone()), base64: None }.serialize(to)
            }
            AttributeValue::Binary(bytes) => {
                TypedAttribute { data_type, text: None, base64: Some(STANDARD.encode(bytes)) }.serialize(to)
            }
        }
    }
}

impl<'de> Deserialize<'de> for AttributeItem {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AttributeVisitor)
    }
}

struct AttributeVisitor;

impl<'de> Visitor<'de> for AttributeVisitor {
    type Value = AttributeItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, or an object with type and text or base64")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<AttributeItem, E> {
        Ok(AttributeItem(Attribute::text(text)))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<AttributeItem, A::Error> {
        let typed = TypedAttribute::deserialize(MapAccessDeserializer::new(map))?;
        let (usual, value) = match (typed.text, typed.base64) {
            (Some(text), None) => ("String", AttributeValue::Text(text)),
            (None, Some(base64)) => {
                let bytes = STANDARD.decode(base64).map_err(A::Error::custom)?;
                ("Binary", AttributeValue::Binary(bytes.into()))
            }
            _ => return Err(A::Error::custom("an attribute has either text or base64")),
        };
        let data_type = typed.data_type.unwrap_or_else(|| usual.to_owned());
        Ok(AttributeItem(Attribute { data_type, value }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_survives_json() {
        for json in
            [r#""plain""#, r#"{"type":"Number","text":"7"}"#, r#"{"type":"Binary.x","base64":"AAE="}"#]
        {
            let item: AttributeItem = serde_json::from_str(json).unwrap();
            assert_eq!(serde_json::to_string(&item).unwrap(), json);
        }
        for bad in ["7", "{}", r#"{"text":"a","base64":"AAE="}"#, r#"{"base64":"?"}"#, r#"{"txt":"a"}"#] {
            assert!(serde_json::from_str::<AttributeItem>(bad).is_err(), "{bad}");
        }
    }
}
