//! Which objects of a kind are wanted: namespace, labels, fields. The API server evaluates it; for a folder
//! it is evaluated here, with the same meaning.

use std::collections::BTreeMap;

use knit_types::{LabelRequirement, ParseLabelRequirementError, split_label_selector};
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
    let parsed = split_label_selector(text).map(|part| part.parse().map(expression));
    let expressions = parsed.collect::<Result<Vec<_>, ParseLabelRequirementError>>();
    Ok(Selector::from_iter(expressions.map_err(|problem| wrong(problem.to_string()))?))
}

fn expression(requirement: LabelRequirement) -> Expression {
    match requirement {
        LabelRequirement::In(key, values) => Expression::In(key, values.into_iter().collect()),
        LabelRequirement::NotIn(key, values) => Expression::NotIn(key, values.into_iter().collect()),
        LabelRequirement::Exists(key) => Expression::Exists(key),
        LabelRequirement::NotExists(key) => Expression::DoesNotExist(key),
    }
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
