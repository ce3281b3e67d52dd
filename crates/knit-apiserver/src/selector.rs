//! Label and field selectors.

use knit_types::{LabelRequirement, ParseLabelRequirementError, split_label_selector};
use serde_json::Value;

use super::kinds::Kind;
use super::object::{Object, at};
use super::status::{ApiError, Result};

/// A label selector and a field selector together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    labels: Vec<LabelRequirement>,
    fields: Vec<(String, String, bool)>,
}

impl Selector {
    /// Parses both selectors as they stand in a query; `kind` decides which fields can be selected by.
    pub fn parse(kind: &Kind, labels: &str, fields: &str) -> Result<Self> {
        let labels = parse_labels(labels)
            .map_err(|why| ApiError::bad_request(format!("unable to parse requirement: {why}")))?;
        let mut parsed = Vec::new();
        for part in fields.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (key, value, equal) = if let Some((key, value)) = part.split_once("!=") {
                (key, value, false)
            } else if let Some((key, value)) = part.split_once("==") {
                (key, value, true)
            } else if let Some((key, value)) = part.split_once('=') {
                (key, value, true)
            } else {
                let why = format!("invalid field selector {part:?}: can't understand it, write field=value");
                return Err(ApiError::bad_request(why));
            };
            if !kind.selectable_fields().iter().any(|field| field == key) {
                return Err(ApiError::bad_request(format!(
                    "field label not supported: {key}; supported: {}",
                    kind.selectable_fields().join(", ")
                )));
            }
            parsed.push((key.to_owned(), value.to_owned(), equal));
        }
        Ok(Self { labels, fields: parsed })
    }

    /// Whether everything matches.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// The name that a `metadata.name=` requirement asks for.
    pub fn name(&self) -> Option<&str> {
        self.fields
            .iter()
            .find(|(key, _, equal)| *equal && key == "metadata.name")
            .map(|(_, value, _)| value.as_str())
    }

    /// Whether the object matches.
    pub fn matches(&self, object: &Object) -> bool {
        let labels = &object.value["metadata"]["labels"];
        let label = |key: &str| labels.get(key).and_then(Value::as_str);
        self.labels.iter().all(|requirement| match requirement {
            LabelRequirement::In(key, values) => label(key).is_some_and(|v| values.iter().any(|w| w == v)),
            LabelRequirement::NotIn(key, values) => label(key).is_none_or(|v| values.iter().all(|w| w != v)),
            LabelRequirement::Exists(key) => label(key).is_some(),
            LabelRequirement::NotExists(key) => label(key).is_none(),
        }) && self.fields.iter().all(|(key, wanted, equal)| (field(&object.value, key) == *wanted) == *equal)
    }
}

/// A field as selectors see it: a string, empty where it is missing.
fn field(value: &Value, path: &str) -> String {
    let path = path.strip_prefix('.').unwrap_or(path);
    let mut found = at(value, path);
    if found.is_none() {
        // The two kinds of events name the object differently, and selectors of either work on both.
        found = path.strip_prefix("regarding.").and_then(|rest| at(value, &format!("involvedObject.{rest}")));
    }
    match found {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => match path {
            "spec.unschedulable" | "spec.hostNetwork" => "false".to_owned(),
            _ => String::new(),
        },
        Some(other) => other.to_string(),
    }
}

fn parse_labels(text: &str) -> Result<Vec<LabelRequirement>, ParseLabelRequirementError> {
    split_label_selector(text).filter(|part| !part.is_empty()).map(str::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn labels_match(selector: &str, labels: &Value) -> bool {
        let object = Object::new(json!({"metadata": {"name": "x", "labels": labels}}), 1);
        Selector { labels: parse_labels(selector).unwrap(), fields: Vec::new() }.matches(&object)
    }

    #[test]
    fn label_selectors() {
        let labels = json!({"app": "web", "tier": "front"});
        for (selector, expected) in [
            ("app=web", true),
            ("app==web,tier!=back", true),
            ("app in (web, db),tier", true),
            ("app notin (web)", false),
            ("!app", false),
            ("!other", true),
            ("other!=x", true),
            ("", true),
            ("other", false),
        ] {
            assert_eq!(labels_match(selector, &labels), expected, "{selector}");
        }
        assert!(parse_labels("a b").is_err());
        assert!(parse_labels("a in (x").is_err());
    }
}
