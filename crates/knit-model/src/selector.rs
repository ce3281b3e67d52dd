//! Selectors of labels, read by the rules of Kubernetes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use kube::core::{Selector, SelectorExt};

use crate::Labels;

/// What is wrong with a selector.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SelectorError {
    /// Values are missing.
    #[error("the operator {operator} of {key:?} needs values: add at least one")]
    NeedsValues {
        /// The operator.
        operator: String,
        /// The label.
        key: String,
    },
    /// Values that mean nothing.
    #[error("the operator {operator} of {key:?} takes no values: leave them out")]
    TakesNoValues {
        /// The operator.
        operator: String,
        /// The label.
        key: String,
    },
    /// No operator.
    #[error("{operator:?} of {key:?} is not an operator: write In, NotIn, Exists or DoesNotExist")]
    UnknownOperator {
        /// As it was written.
        operator: String,
        /// The label.
        key: String,
    },
    /// A key or a value that no label has.
    #[error(
        "{text:?} is not the {part} of any label: write letters, digits, '-', '_' and '.', at most 63 of \
         them, and before a key perhaps a domain and '/'"
    )]
    NotOfALabel {
        /// `key` or `value`.
        part: &'static str,
        /// As it was written.
        text: String,
    },
    /// Something else.
    #[error("it cannot be read: {0}")]
    Other(String),
}

/// Namespaces that an object selects by their labels.
#[derive(Clone, Debug)]
pub enum NamespaceSelector {
    /// It can be read.
    Readable(Selector),
    /// It cannot.
    Unreadable {
        /// What is wrong with it.
        error: SelectorError,
        /// What of it can be read; none if that is nothing.
        rest: Option<Selector>,
    },
}

// === impl NamespaceSelector ===

impl NamespaceSelector {
    /// Reads one.
    #[must_use]
    pub fn of(selector: &LabelSelector) -> Self {
        match read(selector) {
            Ok(selector) => Self::Readable(selector),
            Err(error) => Self::Unreadable { error, rest: readable_part(selector) },
        }
    }

    /// Whether it selects a namespace with these labels.
    ///
    /// # Errors
    /// When it cannot be read, and so may have meant the namespace or not.
    pub fn selects(&self, labels: &Labels) -> Result<bool, &SelectorError> {
        match self {
            Self::Readable(selector) => Ok(selector.matches(labels)),
            Self::Unreadable { error, .. } => Err(error),
        }
    }
}

/// Reads a selector.
///
/// # Errors
/// When it cannot be read: in words, with what to write.
pub fn read(selector: &LabelSelector) -> Result<Selector, SelectorError> {
    selector.match_expressions.iter().flatten().try_for_each(check)?;
    Selector::try_from(selector.clone()).map_err(|error| SelectorError::Other(error.to_string()))
}

/// Reads a selector of nodes. The scheduler is shown it too, by an object that the API server refuses where a
/// key or a value is not a label's.
///
/// # Errors
/// When it cannot be read, or cannot be shown.
pub fn read_for_nodes(selector: &LabelSelector) -> Result<Selector, SelectorError> {
    let labels =
        selector.match_labels.iter().flatten().map(|(key, value)| (key, std::slice::from_ref(value)));
    let expressions = selector.match_expressions.iter().flatten();
    let expressions = expressions.map(|e| (&e.key, e.values.as_deref().unwrap_or_default()));
    for (key, values) in labels.chain(expressions) {
        if !is_key(key) {
            return Err(SelectorError::NotOfALabel { part: "key", text: key.clone() });
        }
        if let Some(value) = values.iter().find(|value| !value.is_empty() && !is_name(value)) {
            return Err(SelectorError::NotOfALabel { part: "value", text: value.clone() });
        }
    }
    read(selector)
}

/// Whether a label may have this key.
fn is_key(text: &str) -> bool {
    let Some((domain, name)) = text.split_once('/') else { return is_name(text) };
    let is_part = |part: &str| {
        let inside = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !part.is_empty() && part.bytes().all(inside) && !part.starts_with('-') && !part.ends_with('-')
    };
    domain.len() <= 253 && domain.split('.').all(is_part) && is_name(name)
}

/// Whether this is what a label's value may be, or a key behind its domain.
fn is_name(text: &str) -> bool {
    let inside = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63 && text.bytes().all(inside) && end(bytes.first()) && end(bytes.last())
}

fn check(requirement: &LabelSelectorRequirement) -> Result<(), SelectorError> {
    let (key, operator) = (requirement.key.clone(), requirement.operator.clone());
    let values = requirement.values.as_ref().is_some_and(|values| !values.is_empty());
    match (operator.as_str(), values) {
        ("In" | "NotIn", true) | ("Exists" | "DoesNotExist", false) => Ok(()),
        ("In" | "NotIn", false) => Err(SelectorError::NeedsValues { operator, key }),
        ("Exists" | "DoesNotExist", true) => Err(SelectorError::TakesNoValues { operator, key }),
        _ => Err(SelectorError::UnknownOperator { operator, key }),
    }
}

fn readable_part(selector: &LabelSelector) -> Option<Selector> {
    let expressions = selector.match_expressions.iter().flatten();
    let good: Vec<_> = expressions.filter(|requirement| check(requirement).is_ok()).cloned().collect();
    let labels = selector.match_labels.clone().filter(|labels| !labels.is_empty());
    if good.is_empty() && labels.is_none() {
        return None;
    }
    Selector::try_from(LabelSelector { match_expressions: Some(good), match_labels: labels }).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn requirement() -> impl Strategy<Value = LabelSelectorRequirement> {
        let operator = prop::sample::select(vec!["In", "NotIn", "Exists", "DoesNotExist", "Equals"]);
        (prop::sample::select(vec!["a", "b"]), operator, prop::collection::vec("[xy]", 0..3)).prop_map(
            |(key, operator, values)| LabelSelectorRequirement {
                key: key.into(),
                operator: operator.into(),
                values: (!values.is_empty()).then_some(values),
            },
        )
    }

    /// What Kubernetes says of one requirement; none if it takes no such requirement.
    fn expected(requirement: &LabelSelectorRequirement, labels: &Labels) -> Option<bool> {
        let (value, values) = (labels.get(&requirement.key), requirement.values.as_deref().unwrap_or(&[]));
        match (requirement.operator.as_str(), values.is_empty()) {
            ("In", false) => Some(value.is_some_and(|value| values.contains(value))),
            ("NotIn", false) => Some(value.is_none_or(|value| !values.contains(value))),
            ("Exists", true) => Some(value.is_some()),
            ("DoesNotExist", true) => Some(value.is_none()),
            _ => None,
        }
    }

    #[test]
    fn a_selector_of_nodes_has_keys_and_values_that_labels_may_have() {
        let with = |key: &str, value: &str| LabelSelector {
            match_labels: Some([(key.to_owned(), value.to_owned())].into()),
            match_expressions: None,
        };
        let long = "a".repeat(64);
        for (key, value) in
            [("rack", "a"), ("example.com/rack", ""), ("a_b.c-D", "1.2_3-x"), ("k", &long[..63])]
        {
            read_for_nodes(&with(key, value)).expect(key);
        }
        for key in ["", "a b", "/rack", "Example.com/rack", "a/b/c", "-a", "a.", "-a.com/x", long.as_str()] {
            let error = read_for_nodes(&with(key, "")).expect_err(key);
            assert!(matches!(error, SelectorError::NotOfALabel { part: "key", .. }), "{error}");
        }
        for value in ["a b", "_a", long.as_str()] {
            let error = read_for_nodes(&with("rack", value)).expect_err(value);
            assert!(matches!(error, SelectorError::NotOfALabel { part: "value", .. }), "{error}");
        }
        read_for_nodes(&LabelSelector::default()).expect("all nodes");
    }

    proptest! {
        #[test]
        fn a_selector_selects_what_all_of_its_parts_select(
            requirements in prop::collection::vec(requirement(), 0..4),
            equal in prop::collection::btree_map("[ab]", "[xy]", 0..2),
            labels in prop::collection::btree_map("[abc]", "[xyz]", 0..3),
        ) {
            let selector = LabelSelector {
                match_expressions: Some(requirements.clone()),
                match_labels: Some(equal.clone()),
            };
            let parts: Vec<Option<bool>> = requirements.iter().map(|r| expected(r, &labels)).collect();
            let same = equal.iter().all(|(key, value)| labels.get(key) == Some(value));
            let read = NamespaceSelector::of(&selector);
            if parts.iter().all(Option::is_some) {
                let all = same && parts.iter().all(|part| *part == Some(true));
                prop_assert_eq!(read.selects(&labels), Ok(all));
            } else {
                prop_assert!(read.selects(&labels).is_err());
                let NamespaceSelector::Unreadable { rest, .. } = read else { panic!("{read:?}") };
                // What cannot be read may have meant anything; the rest is as good as ever.
                let all = same && parts.iter().all(|part| part.is_none_or(|part| part));
                let nothing = equal.is_empty() && parts.iter().all(Option::is_none);
                prop_assert_eq!(rest.map(|rest| rest.matches(&labels)), (!nothing).then_some(all));
            }
        }
    }
}
