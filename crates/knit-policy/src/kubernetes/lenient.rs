//! Reading policies of which a part has another form than it should: only that part is not understood, and it
//! is kept as such. An object that could not be read as a whole would be ignored, and a policy that is
//! ignored isolates nobody.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// The name of a field that stands for what could not be read.
pub(super) const UNREADABLE: &str = "unreadable";

/// What there is in place of something that could not be read.
pub(super) trait Unreadable: DeserializeOwned {
    fn unreadable(value: &Value, why: String) -> Self;

    fn read(value: &Value) -> Self {
        Self::deserialize(value).unwrap_or_else(|error| Self::unreadable(value, error.to_string()))
    }
}

/// A list, or nothing.
pub(super) fn some_list<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Unreadable,
{
    Ok(match Value::deserialize(deserializer)? {
        Value::Null => None,
        Value::Array(items) => Some(items.iter().map(T::read).collect()),
        other => Some(vec![T::unreadable(&other, "it is not a list".to_owned())]),
    })
}

/// A list; nothing is an empty one.
pub(super) fn list<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Unreadable,
{
    some_list(deserializer).map(Option::unwrap_or_default)
}

/// Something that is there or not.
pub(super) fn part<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Unreadable + Default,
{
    Ok(match Value::deserialize(deserializer)? {
        Value::Null => T::default(),
        value => T::read(&value),
    })
}

/// What may be left out may also be nothing.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// A selector. One that has more in it than is known is not valid: it might select less than what is known.
pub(super) fn selector<'de, D: Deserializer<'de>>(deserializer: D) -> Result<LabelSelector, D::Error> {
    some_selector(deserializer).map(Option::unwrap_or_default)
}

/// A selector, or nothing.
pub(super) fn some_selector<'de, D>(deserializer: D) -> Result<Option<LabelSelector>, D::Error>
where
    D: Deserializer<'de>,
{
    Ok(match Value::deserialize(deserializer)? {
        Value::Null => None,
        value => Some(strict_selector(&value).unwrap_or_else(invalid_selector)),
    })
}

fn strict_selector(value: &Value) -> Option<LabelSelector> {
    let only = |value: &Value, known: &[&str]| {
        value.as_object().is_some_and(|object| object.keys().all(|key| known.contains(&key.as_str())))
    };
    let expressions = value.get("matchExpressions").and_then(Value::as_array);
    let mut expressions = expressions.into_iter().flatten();
    let is_known = only(value, &["matchLabels", "matchExpressions"])
        && expressions.all(|expression| only(expression, &["key", "operator", "values"]));
    is_known.then(|| LabelSelector::deserialize(value).ok()).flatten()
}

/// A selector that nobody takes for a valid one.
fn invalid_selector() -> LabelSelector {
    let expression = LabelSelectorRequirement { operator: UNREADABLE.to_owned(), ..Default::default() };
    LabelSelector { match_expressions: Some(vec![expression]), ..LabelSelector::default() }
}

/// A word; anything else is none.
pub(super) fn word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Value::deserialize(deserializer)?.as_str().unwrap_or_default().to_owned())
}

/// Words; anything else is read as it is written.
pub(super) fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    Ok(match Value::deserialize(deserializer)? {
        Value::Null => Vec::new(),
        Value::Array(items) => items.iter().map(word).collect(),
        other => vec![word(&other)],
    })
}

/// A priority; what is none is the last.
pub(super) fn priority<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    let value = Value::deserialize(deserializer)?;
    Ok(match value {
        Value::Null => 0,
        value => number(&value).map_or(i32::MAX, |number| {
            i32::try_from(number).unwrap_or(if number < 0 { i32::MIN } else { i32::MAX })
        }),
    })
}

/// A whole number.
pub(super) fn number(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX))
}
