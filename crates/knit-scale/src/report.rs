//! What was found: one report per size of the cluster, one part per phase.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::meter::{Count, Counts, Group, sum};
use crate::process::Usage;
use crate::scenario::Scenario;

/// What was found in all runs of a scenario.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// What was asked for.
    pub scenario: Scenario,
    /// One run per size.
    pub sizes: Vec<Size>,
}

/// What was found in a cluster of one size.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Size {
    /// How many nodes there were.
    pub nodes: u32,
    /// How many of them were whole.
    pub whole: u32,
    /// Seconds until every node had its block and every whole agent was up.
    pub start_seconds: f64,
    /// What was found in each phase.
    pub phases: Vec<Phase>,
    /// Nodes that were closed to new pods at any time.
    pub tainted: usize,
    /// How long the controller's slowest plan took until then, in seconds, where one is known.
    pub start_plan_seconds: Option<f64>,
    /// What went wrong with the simulation itself: what is missing in the report, and why.
    pub errors: Vec<String>,
}

/// What was found in one phase.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Phase {
    /// Which one.
    pub name: &'static str,
    /// How long it took.
    pub seconds: f64,
    /// What went over the API.
    #[serde(serialize_with = "named")]
    pub counts: Counts,
    /// What one whole agent got and wrote, on average.
    pub per_agent: PerAgent,
    /// Writes per second of everybody who is Knit.
    pub writes_per_second: f64,
    /// Pods that came.
    pub pods: u32,
    /// Those of them that were on whole nodes.
    pub on_whole: u32,
    /// Those of them that were attached to a further Network, too.
    pub further: u32,
    /// Those of these that were on whole nodes.
    pub further_whole: u32,
    /// Pods that could not be attached.
    pub failed: u32,
    /// Seconds from a pod's being scheduled to its being attached, on whole nodes.
    pub attached: Option<Quantiles>,
    /// And until another node's kernel knew the way to it.
    pub reachable: Option<Quantiles>,
    /// Seconds that the agent in a process of its own took to attach a pod.
    pub added: Option<Quantiles>,
    /// Nodes that could not join.
    pub refused: u32,
    /// Seconds from a node's joining until every whole agent knew the way to it.
    pub followed: Option<Quantiles>,
    /// Nodes that joined and that some whole agent did not hear of in time.
    pub unfollowed: u32,
    /// How often whole nodes set a Network up again, in all.
    pub set_ups: usize,
    /// How long the controller's slowest plan took, in seconds, where one is known.
    pub slowest_plan_seconds: Option<f64>,
    /// How often the controller ceased to lead.
    pub ceased_to_lead: u32,
    /// The controller's process, where it has one: share of a processor, and memory.
    pub controller: Option<Load>,
    /// The process of one agent, where it has one.
    pub agent: Option<Load>,
}

/// What a process took.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    /// Share of one processor.
    pub cpu: f64,
    /// Resident memory at the end, in bytes.
    pub memory_bytes: u64,
}

/// The middle and the slow end of some times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Quantiles {
    /// How many there were.
    pub count: usize,
    /// Half of them took at most this.
    pub p50: f64,
    /// All but one in a hundred took at most this.
    pub p99: f64,
}

/// Who is Knit.
const KNIT: [Group; 4] = [Group::Agents, Group::Probe, Group::Writers, Group::Controller];

fn named<S: serde::Serializer>(counts: &Counts, serializer: S) -> Result<S::Ok, S::Error> {
    let words: BTreeMap<String, &BTreeMap<String, Count>> =
        counts.iter().map(|(group, kinds)| (format!("{group:?}").to_lowercase(), kinds)).collect();
    words.serialize(serializer)
}

// === impl Quantiles ===

impl Quantiles {
    /// Of these seconds; nothing if there are none.
    #[must_use]
    pub fn of(mut seconds: Vec<f64>) -> Option<Self> {
        seconds.sort_by(f64::total_cmp);
        let at = |percent: usize| {
            let place = (seconds.len() * percent).div_ceil(100).saturating_sub(1);
            seconds.get(place).copied()
        };
        Some(Self { count: seconds.len(), p50: at(50)?, p99: at(99)? })
    }
}

// === impl Load ===

impl Load {
    /// Between two looks.
    #[must_use]
    pub fn between(before: Usage, after: Usage, seconds: f64) -> Self {
        let time = std::time::Duration::from_secs_f64(seconds);
        Self { cpu: after.share_since(before, time), memory_bytes: after.memory_bytes }
    }
}

// === impl Phase ===

impl Phase {
    /// What went to one whole agent, on average.
    #[must_use]
    pub fn per_agent(&self, whole: u32) -> PerAgent {
        let all = sum(&self.counts, Group::Agents);
        let each = |number: u64| number as f64 / f64::from(whole.max(1)) / self.seconds.max(0.001);
        PerAgent { events: each(all.events), bytes: each(all.bytes), writes: each(all.writes) }
    }

    /// Writes per second of everybody who is Knit: agents, those that only write, and the controller.
    #[must_use]
    pub fn knit_writes(&self) -> f64 {
        let all: u64 = KNIT.into_iter().map(|group| sum(&self.counts, group).writes).sum();
        all as f64 / self.seconds.max(0.001)
    }

    /// The same with the rates that follow from the counts.
    #[must_use]
    pub fn with_rates(mut self, whole: u32) -> Self {
        (self.per_agent, self.writes_per_second) = (self.per_agent(whole), self.knit_writes());
        self
    }
}

/// What one agent gets and writes, per second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PerAgent {
    /// Events of its watches.
    pub events: f64,
    /// Bytes of answers.
    pub bytes: f64,
    /// Writes.
    pub writes: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        assert_eq!(Quantiles::of(Vec::new()), None);
        let found = Quantiles::of((1..=200).rev().map(f64::from).collect()).expect("some");
        assert_eq!((found.count, found.p50, found.p99), (200, 100.0, 198.0));
        assert_eq!(Quantiles::of(vec![3.0]).expect("one").p99, 3.0);
    }

    #[test]
    fn the_report_is_json_with_groups_by_name() {
        let kinds = BTreeMap::from([("leases".to_owned(), Count { writes: 20, ..Count::default() })]);
        let phase = Phase {
            name: "quiet",
            seconds: 10.0,
            counts: Counts::from([(Group::Writers, kinds)]),
            ..Phase::default()
        };
        assert_eq!(phase.knit_writes(), 2.0);
        let text = serde_json::to_string(&phase).expect("JSON");
        assert!(text.contains("\"writers\":{\"leases\":{\"gets\":0"), "{text}");
    }
}
