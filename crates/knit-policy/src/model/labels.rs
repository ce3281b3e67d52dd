//! Labels, and selectors over them.

use std::fmt;

use super::{KnownNamespace, Name, Pod};

/// The labels of an object, sorted by key.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels(Box<[(Name, Name)]>);

/// Which labels an object must have: every requirement holds. Without requirements, every object matches.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector(Box<[Requirement]>);

/// One requirement of a [`Selector`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// The label's key.
    pub key: Name,
    /// How it is compared.
    pub operator: Operator,
    /// With what, sorted; empty for [`Operator::Exists`] and [`Operator::DoesNotExist`].
    pub values: Box<[Name]>,
}

/// How a label is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operator {
    /// It is there, with one of the values.
    In,
    /// It is absent, or has another value (rule 2).
    NotIn,
    /// It is there.
    Exists,
    /// It is absent.
    DoesNotExist,
}

// === impl Labels ===

impl Labels {
    /// The value of a label.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(k, _)| (**k).cmp(key)).ok()?;
        Some(&self.0[at].1)
    }

    /// All of them, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &Name)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    /// These, and one more; one with the same key is replaced.
    #[must_use]
    pub fn with(self, key: impl Into<Name>, value: impl Into<Name>) -> Self {
        let key = key.into();
        let others = self.0.into_iter().filter(|(k, _)| *k != key);
        others.chain(std::iter::once((key.clone(), value.into()))).collect()
    }
}

impl<K: Into<Name>, V: Into<Name>> FromIterator<(K, V)> for Labels {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(labels: I) -> Self {
        let mut list: Vec<(Name, Name)> = labels.into_iter().map(|(k, v)| (k.into(), v.into())).collect();
        list.sort();
        list.dedup_by(|later, earlier| later.0 == earlier.0);
        Self(list.into())
    }
}

// === impl Selector ===

impl Selector {
    /// Matches every object, with or without labels.
    #[must_use]
    pub fn everything() -> Self {
        Self::default()
    }

    /// Matches objects with all of these labels.
    #[must_use]
    pub fn labels<K: Into<Name>, V: Into<Name>>(labels: impl IntoIterator<Item = (K, V)>) -> Self {
        let one = |(key, value): (K, V)| Requirement::new(key, Operator::In, [value]);
        labels.into_iter().map(one).collect()
    }

    /// Whether an object with these labels matches.
    #[must_use]
    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|requirement| requirement.matches(labels))
    }

    /// Whether a pod matches, of which not all labels may be known. `otherwise` is the answer where that
    /// depends on a label that is not known.
    #[must_use]
    pub fn matches_pod(&self, pod: &Pod, otherwise: bool) -> bool {
        self.0.iter().all(|requirement| match pod.knows_label(&requirement.key) {
            true => requirement.matches(&pod.labels),
            false => otherwise,
        })
    }

    /// Whether a namespace matches, of which not all labels may be known; `otherwise` as for pods.
    #[must_use]
    pub fn matches_namespace(&self, namespace: &KnownNamespace<'_>, otherwise: bool) -> bool {
        self.0.iter().all(|requirement| match namespace.knows_label(&requirement.key) {
            true => requirement.matches(&namespace.labels),
            false => otherwise,
        })
    }

    /// Whether it matches every object.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.0.is_empty()
    }

    /// What it asks for.
    #[must_use]
    pub fn requirements(&self) -> &[Requirement] {
        &self.0
    }
}

impl FromIterator<Requirement> for Selector {
    fn from_iter<I: IntoIterator<Item = Requirement>>(requirements: I) -> Self {
        let mut list: Vec<Requirement> = requirements.into_iter().collect();
        // Sorted, so that two ways to write one selector are one selector.
        list.sort();
        list.dedup();
        Self(list.into())
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_everything() {
            return f.write_str("all");
        }
        for (index, requirement) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{requirement}")?;
        }
        Ok(())
    }
}

// === impl Requirement ===

impl Requirement {
    /// A requirement; the order of values means nothing.
    #[must_use]
    pub fn new<V: Into<Name>>(
        key: impl Into<Name>,
        operator: Operator,
        values: impl IntoIterator<Item = V>,
    ) -> Self {
        let mut values: Vec<Name> = values.into_iter().map(Into::into).collect();
        values.sort();
        values.dedup();
        Self { key: key.into(), operator, values: values.into() }
    }

    fn matches(&self, labels: &Labels) -> bool {
        let listed = |value: &str| self.values.binary_search_by(|v| (**v).cmp(value)).is_ok();
        match (self.operator, labels.get(&self.key)) {
            (Operator::In, value) => value.is_some_and(listed),
            (Operator::NotIn, value) => !value.is_some_and(listed),
            (Operator::Exists, value) => value.is_some(),
            (Operator::DoesNotExist, value) => value.is_none(),
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.operator, &*self.values) {
            (Operator::In, [value]) => write!(f, "{}={value}", self.key),
            (Operator::NotIn, [value]) => write!(f, "{}!={value}", self.key),
            (Operator::In, values) => write!(f, "{} in ({})", self.key, values.join(", ")),
            (Operator::NotIn, values) => write!(f, "{} notin ({})", self.key, values.join(", ")),
            (Operator::Exists, _) => write!(f, "{}", self.key),
            (Operator::DoesNotExist, _) => write!(f, "!{}", self.key),
        }
    }
}
