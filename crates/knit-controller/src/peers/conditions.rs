//! The condition that says in the status of a policy what Knit makes of it, for the kinds that have a status:
//! those of the cluster. Other implementations keep theirs beside it.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use knit_api::conditions::policy as reasons;
use knit_objects::{Key, Write};
use knit_policy::kubernetes::{AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy};
use knit_policy::model::{Kind, PolicyName};
use serde_json::{Value, json};

use super::MANAGER;
use super::concerns::Topic;
use crate::plan::condition;

/// A problem may quote what its author wrote.
const MAX_MESSAGE: usize = 2048;

/// What of a policy's object matters for its status.
#[derive(Clone, Debug, Default)]
pub(super) struct StatusFacts {
    pub(super) generation: Option<i64>,
    /// Whether anything of it is used.
    pub(super) is_used: bool,
    /// What is ignored of it.
    pub(super) problems: Vec<String>,
    /// What its status says.
    conditions: Vec<Condition>,
}

impl StatusFacts {
    pub(super) fn new(
        generation: Option<i64>,
        status: Option<&Value>,
        is_used: bool,
        problems: Vec<String>,
    ) -> Self {
        let conditions = status.and_then(|status| status["conditions"].as_array()).into_iter().flatten();
        // What others wrote there is theirs, whatever it is.
        let conditions = conditions.filter_map(|one| serde_json::from_value(one.clone()).ok()).collect();
        Self { generation, is_used, problems, conditions }
    }

    /// The condition that is to be written; nothing if it is there.
    pub(super) fn wanted(
        &self,
        concerns: &[(Topic, &str)],
        is_off: bool,
        now: Timestamp,
    ) -> Option<Condition> {
        let old = self.conditions.iter().find(|one| one.type_ == reasons::ACCEPTED);
        // Where policies are not Knit's, it says nothing, but leaves nothing either that it said before.
        if is_off && old.is_none() {
            return None;
        }
        let (status, reason, mut message) = self.judge(concerns);
        if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
            message.truncate(end);
        }
        let wanted =
            condition(&self.conditions, reasons::ACCEPTED, status, reason, message, self.generation, now);
        (old != Some(&wanted)).then_some(wanted)
    }

    fn judge(&self, concerns: &[(Topic, &str)]) -> (bool, &'static str, String) {
        if let Some((_, what)) = concerns.iter().find(|(topic, _)| *topic == Topic::NotEnforced) {
            return (false, reasons::REASON_NOT_ENFORCED, (*what).to_owned());
        }
        let problems = self.problems.iter().map(String::as_str);
        let all: Vec<&str> = problems.chain(concerns.iter().map(|(_, what)| *what)).collect();
        if !self.is_used {
            return (false, reasons::REASON_INVALID, format!("This policy is not used: {}.", all.join("; ")));
        }
        if !all.is_empty() {
            let message = format!("Part of this policy is ignored: {}.", all.join("; "));
            return (true, reasons::REASON_PARTLY_IGNORED, message);
        }
        (true, reasons::REASON_ACCEPTED, "All of this policy is understood.".to_owned())
    }
}

/// Writes it; nothing for a kind without a status.
pub(super) fn write(policy: &PolicyName, condition: &Condition) -> Option<Write> {
    let (key, status) = (Key::cluster(&*policy.name), json!({ "conditions": [condition] }));
    match policy.kind {
        Kind::Cluster => Some(Write::status::<ClusterNetworkPolicy>(key, &status, MANAGER)),
        Kind::Admin => Some(Write::status::<AdminNetworkPolicy>(key, &status, MANAGER)),
        Kind::BaselineAdmin => Some(Write::status::<BaselineAdminNetworkPolicy>(key, &status, MANAGER)),
        Kind::Network | Kind::Multi => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn facts(is_used: bool, problems: &[&str]) -> StatusFacts {
        let problems = problems.iter().map(|&problem| problem.to_owned()).collect();
        StatusFacts::new(Some(3), None, is_used, problems)
    }

    fn said(facts: &StatusFacts, concerns: &[(Topic, &str)]) -> (String, String, String) {
        let wanted = facts.wanted(concerns, false, at(10)).expect("a condition");
        assert_eq!((wanted.type_.as_str(), wanted.observed_generation), ("knit.dev/Accepted", Some(3)));
        (wanted.status, wanted.reason, wanted.message)
    }

    #[test]
    fn the_condition_says_what_becomes_of_a_policy() {
        let (status, reason, _) = said(&facts(true, &[]), &[]);
        assert_eq!((status.as_str(), reason.as_str()), ("True", "Accepted"));
        let (status, reason, message) =
            said(&facts(true, &["spec.x is unknown"]), &[(Topic::Port, "no port")]);
        assert_eq!((status.as_str(), reason.as_str()), ("True", "PartlyIgnored"));
        assert_eq!(message, "Part of this policy is ignored: spec.x is unknown; no port.");
        let (status, reason, message) = said(&facts(false, &["spec.tier is missing"]), &[]);
        assert_eq!((status.as_str(), reason.as_str()), ("False", "Invalid"));
        assert_eq!(message, "This policy is not used: spec.tier is missing.");
        let left = (Topic::NotEnforced, "Knit does not.");
        let (status, reason, message) = said(&facts(true, &["spec.x is unknown"]), &[left]);
        assert_eq!((status.as_str(), reason.as_str(), message.as_str()), ("False", "NotEnforced", left.1));
    }

    #[test]
    fn a_condition_quotes_little_of_what_its_author_wrote() {
        let long = "\u{e4}".repeat(100_000);
        let (_, _, message) = said(&facts(true, &[&long]), &[(Topic::Port, &long)]);
        assert_eq!(message.chars().count(), MAX_MESSAGE);
    }

    #[test]
    fn what_is_said_already_is_not_written_and_its_time_is_that_of_the_last_change() {
        let mut facts = facts(true, &[]);
        let first = facts.wanted(&[], false, at(10)).expect("a condition");
        let foreign = json!({"type": "Ready-In-Zone-x", "status": "True"});
        let status = json!({"conditions": [foreign, first]});
        facts = StatusFacts::new(Some(3), Some(&status), true, Vec::new());
        assert_eq!(facts.wanted(&[], false, at(20)), None);
        facts.generation = Some(4);
        let next = facts.wanted(&[], false, at(30)).expect("another generation");
        assert_eq!(next.last_transition_time, first.last_transition_time);
        facts.is_used = false;
        let next = facts.wanted(&[], false, at(30)).expect("another status");
        assert_ne!(next.last_transition_time, first.last_transition_time);
    }

    #[test]
    fn where_policies_are_off_only_what_was_said_before_is_taken_back() {
        let left = [(Topic::NotEnforced, "Knit does not.")];
        assert_eq!(facts(true, &[]).wanted(&left, true, at(10)), None);
        let before = facts(true, &[]).wanted(&[], false, at(10)).expect("a condition");
        let status = json!({"conditions": [before]});
        let facts = StatusFacts::new(Some(3), Some(&status), true, Vec::new());
        assert_eq!(facts.wanted(&left, true, at(20)).expect("taken back").status, "False");
    }
}
