//! Label and field selectors.

use serde_json::Value;

use super::kinds::Kind;
use super::object::{Object, at};
use super::status::{ApiError, Result};

/// One requirement on labels.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    NotExists(String),
}

/// A label selector and a field selector together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    labels: Vec<Requirement>,
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
            Requirement::In(key, values) => label(key).is_some_and(|v| values.iter().any(|w| w == v)),
            Requirement::NotIn(key, values) => label(key).is_none_or(|v| values.iter().all(|w| w != v)),
            Requirement::Exists(key) => label(key).is_some(),
            Requirement::NotExists(key) => label(key).is_none(),
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

fn parse_labels(text: &str) -> Result<Vec<Requirement>, String> {
    let mut requirements = Vec::new();
    for part in split_outside_parentheses(text) {
        let part = part.trim();
        if part.is_empty() {
            continue;
        }
        requirements.push(parse_label(part)?);
    }
    Ok(requirements)
}

fn parse_label(part: &str) -> Result<Requirement, String> {
    let key = |text: &str| {
        let text = text.trim();
        let ok = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
        if ok { Ok(text.to_owned()) } else { Err(format!("invalid label key {text:?}")) }
    };
    if let Some(open) = part.find('(') {
        let inner = part[open + 1..].strip_suffix(')').ok_or_else(|| format!("{part:?}: ')' is missing"))?;
        let values = inner.split(',').map(|value| value.trim().to_owned()).collect();
        let mut words = part[..open].split_whitespace();
        return match (words.next(), words.next(), words.next()) {
            (Some(name), Some("in"), None) => Ok(Requirement::In(key(name)?, values)),
            (Some(name), Some("notin"), None) => Ok(Requirement::NotIn(key(name)?, values)),
            _ => Err(format!("{part:?}: write `key in (a, b)` or `key notin (a, b)`")),
        };
    }
    if let Some((name, value)) = part.split_once("!=") {
        return Ok(Requirement::NotIn(key(name)?, vec![value.trim().to_owned()]));
    }
    if let Some((name, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return Ok(Requirement::In(key(name)?, vec![value.trim().to_owned()]));
    }
    match part.strip_prefix('!') {
        Some(name) => Ok(Requirement::NotExists(key(name)?)),
        None => Ok(Requirement::Exists(key(part)?)),
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_usize, 0);
    for (index, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
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
