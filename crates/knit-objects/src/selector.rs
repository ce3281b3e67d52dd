//! Which objects of a kind are wanted: namespace, labels, fields. The API server evaluates it; for a folder
//! it is evaluated here, with the same meaning.

use std::collections::BTreeMap;

use kube::core::{Expression, Selector, SelectorExt};
use serde_json::Value;

use crate::error::{Error, Result};

/// Which objects of a kind are wanted; everything by default.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Only those of this namespace.
    pub namespace: Option<String>,
    /// Only those whose labels match, in kubectl's words: `app=web,tier in (a,b),!old`.
    pub labels: Option<String>,
    /// Only those whose fields match, in kubectl's words: `spec.nodeName=node-1`.
    pub fields: Option<String>,
}

/// A selection that can be evaluated here.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    namespace: Option<String>,
    labels: Selector,
    fields: Vec<FieldRule>,
}

#[derive(Clone, Debug)]
struct FieldRule {
    pointer: String,
    equal: bool,
    value: String,
}

const LABEL_EXAMPLE: &str = "app=web,tier in (front,back),!legacy";
const FIELD_EXAMPLE: &str = "metadata.name=web,spec.nodeName!=node-1";

// === impl Filter ===

impl Filter {
    /// Understands the texts of a selection, or says what is wrong with them.
    pub(crate) fn parse(selection: &Selection) -> Result<Self> {
        Ok(Self {
            namespace: selection.namespace.clone(),
            labels: selection.labels.as_deref().map(parse_labels).transpose()?.unwrap_or_default(),
            fields: selection.fields.as_deref().map(parse_fields).transpose()?.unwrap_or_default(),
        })
    }

    /// Whether the object is wanted.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        let meta = object.get("metadata");
        if let Some(wanted) = &self.namespace
            && meta.and_then(|m| m.get("namespace")).and_then(Value::as_str) != Some(wanted)
        {
            return false;
        }
        if !self.labels.selects_all() {
            let labels: BTreeMap<String, String> = meta
                .and_then(|m| m.get("labels"))
                .and_then(Value::as_object)
                .into_iter()
                .flatten()
                .filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())))
                .collect();
            if !self.labels.matches(&labels) {
                return false;
            }
        }
        self.fields.iter().all(|rule| {
            let value = match object.pointer(&rule.pointer) {
                Some(Value::String(text)) => text.clone(),
                None | Some(Value::Null) => String::new(),
                Some(other) => other.to_string(),
            };
            (value == rule.value) == rule.equal
        })
    }
}

/// kubectl's label selector.
pub(crate) fn parse_labels(text: &str) -> Result<Selector> {
    let wrong = |problem: String| Error::Selector {
        what: "label",
        text: text.to_owned(),
        problem,
        example: LABEL_EXAMPLE,
    };
    let mut expressions = Vec::new();
    for part in split_outside_parentheses(text) {
        expressions.push(parse_requirement(part.trim()).map_err(&wrong)?);
    }
    Ok(Selector::from_iter(expressions))
}

fn parse_requirement(part: &str) -> Result<Expression, String> {
    if part.is_empty() {
        return Err("nothing between two commas".into());
    }
    if let Some(key) = part.strip_prefix('!') {
        return Ok(Expression::DoesNotExist(label_key(key)?));
    }
    if let Some((left, values)) = part.split_once('(') {
        let values =
            values.strip_suffix(')').ok_or_else(|| format!("{part:?} has no closing parenthesis"))?;
        let values = values.split(',').map(|v| v.trim().to_owned()).collect();
        let mut words = left.split_whitespace();
        return match (words.next(), words.next(), words.next()) {
            (Some(key), Some("in"), None) => Ok(Expression::In(label_key(key)?, values)),
            (Some(key), Some("notin"), None) => Ok(Expression::NotIn(label_key(key)?, values)),
            _ => Err(format!("{part:?} is neither KEY in (...) nor KEY notin (...)")),
        };
    }
    if let Some((key, value)) = part.split_once("!=") {
        return Ok(Expression::NotEqual(label_key(key)?, value.trim().to_owned()));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return Ok(Expression::Equal(label_key(key)?, value.trim().to_owned()));
    }
    Ok(Expression::Exists(label_key(part)?))
}

fn label_key(text: &str) -> Result<String, String> {
    let key = text.trim();
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if key.is_empty() || !key.chars().all(fits) {
        return Err(format!("{key:?} is not a valid label key"));
    }
    Ok(key.to_owned())
}

fn parse_fields(text: &str) -> Result<Vec<FieldRule>> {
    let wrong = |problem: String| Error::Selector {
        what: "field",
        text: text.to_owned(),
        problem,
        example: FIELD_EXAMPLE,
    };
    text.split(',')
        .map(|part| {
            let (path, value, equal) = if let Some((path, value)) = part.split_once("!=") {
                (path, value, false)
            } else if let Some((path, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
                (path, value, true)
            } else {
                return Err(wrong(format!("{part:?} has no comparison")));
            };
            let path = path.trim();
            if path.is_empty() {
                return Err(wrong(format!("{part:?} does not name a field")));
            }
            Ok(FieldRule {
                pointer: format!("/{}", path.replace('.', "/")),
                equal,
                value: value.trim().to_owned(),
            })
        })
        .collect()
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_u32, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn filter(labels: &str, fields: &str) -> Filter {
        Filter::parse(&Selection {
            namespace: None,
            labels: (!labels.is_empty()).then(|| labels.to_owned()),
            fields: (!fields.is_empty()).then(|| fields.to_owned()),
        })
        .expect("a selection")
    }

    #[test]
    fn labels_mean_what_they_mean_to_kubectl() {
        let object = json!({"metadata": {"labels": {"app": "web", "tier": "front"}}});
        for (text, expected) in [
            ("app=web", true),
            ("app==web", true),
            ("app=web,tier in (front, back)", true),
            ("tier notin (front)", false),
            ("other notin (front)", true),
            ("app", true),
            ("!app", false),
            ("!other,app!=db", true),
            ("other!=x", true),
            ("other=x", false),
        ] {
            assert_eq!(filter(text, "").matches(&object), expected, "{text}");
        }
    }

    #[test]
    fn fields_are_paths_and_a_missing_one_is_empty() {
        let object = json!({"metadata": {"name": "a", "namespace": "n"}, "spec": {"nodeName": "n1",
            "hostNetwork": true}});
        for (text, expected) in [
            ("spec.nodeName=n1", true),
            ("spec.nodeName!=n1", false),
            ("spec.none=", true),
            ("spec.hostNetwork=true,metadata.name=a", true),
            ("metadata.namespace==n", true),
        ] {
            assert_eq!(filter("", text).matches(&object), expected, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_an_example() {
        for text in ["a in (x", "a in x,", "=b", "a b", ",", "a within (x)"] {
            let error = parse_labels(text).expect_err(text).to_string();
            assert!(error.contains(LABEL_EXAMPLE), "{error}");
        }
        assert!(parse_fields("spec.nodeName").is_err());
        assert!(parse_fields("=x").is_err());
    }
}
