//! Label selectors as kubectl writes them: `app=web,tier in (a,b),!old`.

use std::str::FromStr;

/// One requirement of a selector. A missing label is in no list, and so satisfies [`NotIn`](Self::NotIn).
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum LabelRequirement {
    /// The label has one of these values: `key in (a, b)`, `key=a`.
    In(String, Vec<String>),
    /// It has none of them: `key notin (a, b)`, `key!=a`.
    NotIn(String, Vec<String>),
    /// It is there: `key`.
    Exists(String),
    /// It is missing: `!key`.
    NotExists(String),
}

/// A text that is not a requirement on labels.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ParseLabelRequirementError {
    /// There is nothing.
    #[error("nothing between two commas")]
    Empty,
    /// A list of values does not end.
    #[error("{0:?} has no closing parenthesis")]
    Open(String),
    /// What is before a list of values is not known.
    #[error("{0:?} is neither KEY in (...) nor KEY notin (...)")]
    Operator(String),
    /// No label has such a key.
    #[error("{0:?} is not a valid label key")]
    Key(String),
}

/// The requirements of a selector, each as text; commas in lists of values separate none. Empty ones are
/// among them.
pub fn split_label_selector(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    let parts = text.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim)
}

// === impl LabelRequirement ===

impl FromStr for LabelRequirement {
    type Err = ParseLabelRequirementError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text.is_empty() {
            return Err(ParseLabelRequirementError::Empty);
        }
        if let Some(missing) = text.strip_prefix('!') {
            return Ok(Self::NotExists(key(missing)?));
        }
        if let Some((left, values)) = text.split_once('(') {
            let values = values.strip_suffix(')');
            let values = values.ok_or_else(|| ParseLabelRequirementError::Open(text.to_owned()))?;
            let values = values.split(',').map(|value| value.trim().to_owned()).collect();
            let mut words = left.split_whitespace();
            return match (words.next(), words.next(), words.next()) {
                (Some(name), Some("in"), None) => Ok(Self::In(key(name)?, values)),
                (Some(name), Some("notin"), None) => Ok(Self::NotIn(key(name)?, values)),
                _ => Err(ParseLabelRequirementError::Operator(text.to_owned())),
            };
        }
        let one = |value: &str| vec![value.trim().to_owned()];
        if let Some((name, value)) = text.split_once("!=") {
            return Ok(Self::NotIn(key(name)?, one(value)));
        }
        if let Some((name, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            return Ok(Self::In(key(name)?, one(value)));
        }
        Ok(Self::Exists(key(text)?))
    }
}

fn key(text: &str) -> Result<String, ParseLabelRequirementError> {
    let key = text.trim();
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    if key.is_empty() || !key.chars().all(fits) {
        return Err(ParseLabelRequirementError::Key(key.to_owned()));
    }
    Ok(key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_read_as_kubectl_writes_them() {
        let of =
            |key: &str, values: &[&str]| (key.to_owned(), values.iter().map(|v| (*v).to_owned()).collect());
        let within = |key, values| {
            let (key, values) = of(key, values);
            LabelRequirement::In(key, values)
        };
        let without = |key, values| {
            let (key, values) = of(key, values);
            LabelRequirement::NotIn(key, values)
        };
        for (text, wanted) in [
            ("app=web", within("app", &["web"])),
            ("app == web", within("app", &["web"])),
            ("app!=web", without("app", &["web"])),
            ("app=", within("app", &[""])),
            ("tier in (front, back)", within("tier", &["front", "back"])),
            ("tier notin (front)", without("tier", &["front"])),
            ("example.com/app", LabelRequirement::Exists("example.com/app".into())),
            ("!old", LabelRequirement::NotExists("old".into())),
        ] {
            assert_eq!(text.parse(), Ok(wanted), "{text}");
        }
        for text in ["", " ", "a in (x", "a in x", "=b", "a b", "a within (x)", "in (x)", "!a=b"] {
            text.parse::<LabelRequirement>().expect_err(text);
        }
    }

    #[test]
    fn commas_separate_requirements_but_not_within_a_list() {
        let parts = |text| split_label_selector(text).collect::<Vec<_>>();
        assert_eq!(parts("a in (b,c), !d,,e"), ["a in (b,c)", "!d", "", "e"]);
        assert_eq!(parts(""), [""]);
    }
}
