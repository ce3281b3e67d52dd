//! What was found, for people and for files.

use std::collections::BTreeMap;

use knit_runtime::Info;
use serde::Serialize;

use crate::case::{Case, Profile};

/// Everything that was found about one runtime.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Which form this report has.
    pub api_version: &'static str,
    /// What this is.
    pub kind: &'static str,
    /// The version of the suite.
    pub suite_version: &'static str,
    /// The version of KNI.
    pub protocol: &'static str,
    /// The runtime.
    pub runtime: RuntimeReport,
    /// Whether it keeps every promise that it makes.
    pub conformant: bool,
    /// What was found, profile by profile.
    pub profiles: Vec<ProfileReport>,
}

/// Who was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct RuntimeReport {
    /// The runtime's name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// What it announces.
    pub features: Vec<String>,
}

/// One profile.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileReport {
    /// The profile's name.
    pub name: &'static str,
    /// `Passed`, `Failed`, or `Skipped` if the runtime does not announce it or nothing of it could be looked
    /// at.
    pub result: &'static str,
    /// How many cases passed.
    pub passed: usize,
    /// How many failed.
    pub failed: usize,
    /// How many were skipped.
    pub skipped: usize,
    /// The cases.
    pub cases: Vec<CaseReport>,
}

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct CaseReport {
    /// The case's name.
    pub name: &'static str,
    /// What is promised.
    pub promise: &'static str,
    /// `Passed`, `Failed` or `Skipped`.
    pub result: &'static str,
    /// What was seen, unless it passed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// How a case ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The promise is kept.
    Passed,
    /// It is broken: what was seen.
    Failed(String),
    /// It was not looked at, and why.
    Skipped(String),
}

// === impl Outcome ===

impl Outcome {
    /// In one word.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Passed => "Passed",
            Self::Failed(_) => "Failed",
            Self::Skipped(_) => "Skipped",
        }
    }

    /// What was seen, unless it passed.
    #[must_use]
    pub fn message(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::Failed(why) | Self::Skipped(why) => why,
        }
    }
}

// === impl Report ===

impl Report {
    pub(crate) fn new(info: &Info, done: Vec<(Case, Outcome)>) -> Self {
        let mut by_profile: BTreeMap<Profile, Vec<CaseReport>> = BTreeMap::new();
        for (case, outcome) in done {
            by_profile.entry(case.profile).or_default().push(CaseReport {
                name: case.name,
                promise: case.promise,
                result: outcome.word(),
                message: outcome.message().to_owned(),
            });
        }
        let profiles: Vec<ProfileReport> = by_profile.into_iter().map(ProfileReport::new).collect();
        Self {
            api_version: "conformance.knit.dev/v1alpha1",
            kind: "ConformanceReport",
            suite_version: env!("CARGO_PKG_VERSION"),
            protocol: knit_runtime::wire::PROTOCOL_VERSION,
            runtime: RuntimeReport {
                name: info.name.clone(),
                version: info.version.clone(),
                features: info.features.clone(),
            },
            conformant: profiles.iter().all(|p| p.failed == 0),
            profiles,
        }
    }

    /// The cases that failed.
    pub fn failures(&self) -> impl Iterator<Item = &CaseReport> {
        self.profiles.iter().flat_map(|p| &p.cases).filter(|c| c.result == "Failed")
    }
}

impl ProfileReport {
    fn new((profile, cases): (Profile, Vec<CaseReport>)) -> Self {
        let count = |word: &str| cases.iter().filter(|c| c.result == word).count();
        let (passed, failed, skipped) = (count("Passed"), count("Failed"), count("Skipped"));
        let result = match (passed, failed) {
            (_, 1..) => "Failed",
            (0, 0) => "Skipped",
            _ => "Passed",
        };
        Self { name: profile.name(), result, passed, failed, skipped, cases }
    }
}
