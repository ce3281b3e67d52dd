//! One measured value, next to its peer and its target.

use serde::Serialize;

/// One line of a benchmark's result.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The benchmark.
    pub bench: String,
    /// What was done, for example `add, 500 pods present`.
    pub case: String,
    /// What was measured, for example `cpu` or `p50`.
    pub metric: String,
    /// Our value.
    pub value: f64,
    /// Its unit.
    pub unit: String,
    /// Who did the same in the same run.
    pub peer: Option<String>,
    /// The peer's value.
    pub peer_value: Option<f64>,
    /// The peer's value divided by ours.
    pub ratio: Option<f64>,
    /// What we want, in words.
    pub target: Option<String>,
    /// Whether we have it.
    pub met: Option<bool>,
}

/// What is wanted of a value.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "each benchmark uses the one that fits")]
pub enum Goal {
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
    /// The peer's value is at least this many times ours.
    Ratio(f64),
}

#[allow(dead_code, reason = "each benchmark uses what it needs")]
impl Row {
    /// A value alone.
    pub fn new(bench: &str, case: impl Into<String>, metric: &str, value: f64, unit: &str) -> Self {
        Self {
            bench: bench.into(),
            case: case.into(),
            metric: metric.into(),
            value,
            unit: unit.into(),
            peer: None,
            peer_value: None,
            ratio: None,
            target: None,
            met: None,
        }
    }

    /// The same thing done by somebody else in the same run.
    #[must_use]
    pub fn peer(mut self, name: &str, value: f64) -> Self {
        self.peer = Some(name.into());
        self.peer_value = Some(value);
        self.ratio = (self.value > 0.0).then(|| value / self.value);
        self
    }

    /// What is wanted. A ratio needs the peer first.
    #[must_use]
    pub fn goal(mut self, goal: Goal) -> Self {
        let unit = &self.unit;
        let (words, met) = match goal {
            Goal::AtMost(limit) => (format!("<= {limit} {unit}"), Some(self.value <= limit)),
            Goal::AtLeast(limit) => (format!(">= {limit} {unit}"), Some(self.value >= limit)),
            Goal::Ratio(limit) => (format!("peer / ours >= {limit}"), self.ratio.map(|r| r >= limit)),
        };
        self.target = Some(words);
        self.met = met;
        self
    }
}
