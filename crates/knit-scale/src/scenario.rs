//! What happens in a run. The same seed gives the same pods on the same nodes in the same order.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A scenario, as in its file.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Scenario {
    /// Where chance begins.
    pub seed: u64,
    /// Sizes of the cluster: one run each.
    pub nodes: Vec<u32>,
    /// So many of the nodes are whole.
    pub whole: u32,
    /// Networks besides the default one.
    pub networks: u32,
    /// Services, each with one EndpointSlice of five endpoints.
    pub services: u32,
    /// NetworkPolicies.
    pub policies: u32,
    /// Pods per second that come while pods come and go; each goes after `podSeconds`.
    pub pods_per_second: u32,
    /// How long a pod stays.
    pub pod_seconds: u32,
    /// How many of a hundred pods are attached to a further Network.
    pub further_percent: u32,
    /// Seconds in which nothing happens but what nodes do by themselves.
    pub quiet_seconds: u32,
    /// Seconds in which pods come and go.
    pub busy_seconds: u32,
    /// Nodes that join within `joinSeconds` after that.
    pub joins: u32,
    /// Seconds in which they join.
    pub join_seconds: u32,
    /// Nodes that fail and are deleted after that.
    pub failures: u32,
    /// Seconds in which the API is away after that.
    pub outage_seconds: u32,
    /// Seconds between two heartbeats in a Node's status; a kubelet does it every 300 s.
    pub heartbeat_seconds: u32,
    /// Seconds between two renewals of a Lease by a node that only writes; an agent does it every 25 s.
    pub lease_seconds: u32,
}

/// A scenario that cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[error("the scenario is not valid: {0}")]
pub struct Invalid(String);

/// A pod that comes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pod {
    /// When.
    pub at: Duration,
    /// Its number: no other has it.
    pub number: u32,
    /// The number of its node.
    pub node: u32,
    /// The number of its further Network, if it has one.
    pub network: Option<u32>,
}

/// Chance that is the same every time (SplitMix64).
#[derive(Clone, Debug)]
pub struct Chance(u64);

/// The most nodes: the default Network has a /24 for each.
const MOST_NODES: u32 = 20_000;

impl Default for Scenario {
    fn default() -> Self {
        Self {
            seed: 1,
            nodes: vec![100, 250, 500],
            whole: 100,
            networks: 10,
            services: 100,
            policies: 50,
            pods_per_second: 20,
            pod_seconds: 5,
            further_percent: 30,
            quiet_seconds: 20,
            busy_seconds: 20,
            joins: 0,
            join_seconds: 10,
            failures: 0,
            outage_seconds: 0,
            heartbeat_seconds: 300,
            lease_seconds: 25,
        }
    }
}

impl Scenario {
    /// Reads a scenario file.
    ///
    /// # Errors
    /// When it is not YAML, names something unknown, or cannot be carried out.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let scenario: Self = serde_saphyr::from_str(text).map_err(|error| Invalid(error.to_string()))?;
        scenario.check()?;
        Ok(scenario)
    }

    /// Whether it can be carried out.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check(&self) -> Result<(), Invalid> {
        let largest = self.nodes.iter().copied().max().unwrap_or(0);
        let wrong = |what: String| Err(Invalid(what));
        if self.nodes.is_empty() || self.nodes.contains(&0) {
            return wrong("nodes must name at least one size, each above 0".into());
        }
        if largest.saturating_add(self.joins) > MOST_NODES {
            return wrong(format!("nodes and joins together must be at most {MOST_NODES}"));
        }
        if self.whole == 0
            || self.further_percent > 100
            || self.heartbeat_seconds == 0
            || self.lease_seconds == 0
        {
            return wrong(
                "whole, heartbeatSeconds and leaseSeconds must be above 0, and furtherPercent at most 100"
                    .into(),
            );
        }
        if self.further_percent > 0 && self.networks == 0 {
            return wrong("furtherPercent needs networks".into());
        }
        if self.failures >= self.nodes.iter().copied().min().unwrap_or(0) {
            return wrong("failures must be fewer than the smallest number of nodes".into());
        }
        Ok(())
    }

    /// How many nodes of so many are whole.
    #[must_use]
    pub fn whole_of(&self, nodes: u32) -> u32 {
        self.whole.min(nodes)
    }

    /// The pods that come and go, in order. Each whole node has its fair share of them, so that what is
    /// measured there is of pods, too.
    #[must_use]
    pub fn pods(&self, nodes: u32) -> Vec<Pod> {
        let mut chance = Chance::new(self.seed ^ u64::from(nodes));
        let count = self.pods_per_second * self.busy_seconds;
        (0..count)
            .map(|number| Pod {
                at: Duration::from_secs(u64::from(self.busy_seconds)) * number / count.max(1),
                number,
                // Every second one on a whole node: few of five thousand are.
                node: if number % 2 == 0 { chance.below(self.whole_of(nodes)) } else { chance.below(nodes) },
                network: (chance.below(100) < self.further_percent).then(|| chance.below(self.networks)),
            })
            .collect()
    }
}

impl Chance {
    /// Chance that begins here.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below this one; 0 if that is 0.
    pub fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let drawn = (z ^ (z >> 31)) % u64::from(end.max(1));
        u32::try_from(drawn).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_run() {
        let scenario = Scenario::default();
        assert_eq!(scenario.pods(500), scenario.pods(500));
        assert_ne!(scenario.pods(500), Scenario { seed: 2, ..scenario.clone() }.pods(500));
        let pods = scenario.pods(500);
        assert_eq!(pods.len(), 400);
        assert!(pods.iter().all(|pod| pod.node < 500 && pod.at < Duration::from_secs(20)));
        assert!(pods.iter().filter(|pod| pod.node < 100).count() >= 200, "whole nodes have pods");
    }

    #[test]
    fn a_file_says_what_is_different_and_nothing_unknown() {
        let scenario = Scenario::parse("nodes: [50, 200]\nwhole: 5\npodsPerSecond: 3\n").expect("a scenario");
        assert_eq!((scenario.nodes.as_slice(), scenario.whole, scenario.networks), (&[50, 200][..], 5, 10));
        for (text, word) in [
            ("nodes: []", "at least one size"),
            ("nodez: [1]", "nodez"),
            ("nodes: [30000]", "at most 20000"),
            ("networks: 0", "furtherPercent needs networks"),
            ("whole: 0", "whole"),
        ] {
            let error = Scenario::parse(text).expect_err(text).to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
