//! What happens in a run. The same seed gives the same pods on the same nodes in the same order.

use std::net::Ipv4Addr;
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
    /// Pods that are there all the time, spread over all nodes.
    pub pods: u32,
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
    /// Nodes that fail and are deleted after that; none of them is whole.
    pub failures: u32,
    /// Seconds that are looked at after they failed.
    pub fail_seconds: u32,
    /// Seconds in which the API is away after that.
    pub outage_seconds: u32,
    /// Seconds between two heartbeats in a Node's status; a kubelet does it every 300 s.
    pub heartbeat_seconds: u32,
    /// Seconds between two renewals of a Lease by a node that only writes; an agent does it every 25 s.
    pub lease_seconds: u32,
    /// How long such a Lease holds; an agent's holds 100 s.
    pub lease_hold_seconds: u32,
}

/// When pods come and go.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Churn {
    /// While nothing else happens.
    Alone,
    /// While nodes join.
    Joining,
}

/// A scenario that cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[error("the scenario is not valid: {0}")]
pub struct Invalid(String);

/// A pod that comes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Pod {
    /// When the pod is created, from the beginning of the phase.
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
/// The most pods of a node, as its Node says.
pub(crate) const PODS_PER_NODE: u32 = 110;
/// The most pods that come and go: each has a number, and what is found of each is kept.
const MOST_PODS: u64 = 1_000_000;
/// The most further Networks: a whole node may follow the blocks of each, with a watch for each.
const MOST_NETWORKS: u32 = 1000;
/// Addresses of a further Network for each node: what docs/scale.md tells users to set.
const ADDRESSES_PER_NODE: u32 = 16;

impl Default for Scenario {
    fn default() -> Self {
        Self {
            seed: 1,
            nodes: vec![100, 250, 500],
            whole: 100,
            pods: 0,
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
            fail_seconds: 10,
            outage_seconds: 0,
            heartbeat_seconds: 300,
            lease_seconds: 25,
            lease_hold_seconds: 100,
        }
    }
}

impl Scenario {
    /// How long the Lease of a node that only writes holds.
    #[must_use]
    pub fn lease_holds(&self) -> Duration {
        Duration::from_secs(self.lease_hold_seconds.into())
    }

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
        let smallest = self.nodes.iter().copied().min().unwrap_or(0);
        let wrong = |what: String| Err(Invalid(what));
        if smallest < 2 {
            return wrong("nodes must name at least one size, and each must be at least 2".into());
        }
        if largest.saturating_add(self.joins) > MOST_NODES {
            return wrong(format!("nodes and joins together must be at most {MOST_NODES}"));
        }
        for (name, value) in [
            ("whole", self.whole),
            ("podSeconds", self.pod_seconds),
            ("heartbeatSeconds", self.heartbeat_seconds),
            ("leaseSeconds", self.lease_seconds),
            ("leaseHoldSeconds", self.lease_hold_seconds),
        ] {
            if value == 0 {
                return wrong(format!("{name} must be above 0"));
            }
        }
        if self.further_percent > 100 {
            return wrong("furtherPercent must be at most 100".into());
        }
        if self.networks > MOST_NETWORKS {
            return wrong(format!("networks must be at most {MOST_NETWORKS}"));
        }
        if self.further_percent > 0 && self.networks == 0 && self.pods_per_second > 0 {
            return wrong(
                "furtherPercent needs networks: there are no additional Networks to attach pods to".into(),
            );
        }
        let coming = u64::from(self.pods_per_second)
            * (u64::from(self.busy_seconds) + u64::from(self.joining_seconds()));
        if coming + u64::from(self.pods) > MOST_PODS {
            return wrong(format!(
                "{} pods would be created in total, more than {MOST_PODS}: lower pods, podsPerSecond or \
                 busySeconds",
                coming + u64::from(self.pods)
            ));
        }
        for nodes in &self.nodes {
            // Half of the pods that come are on nodes with an agent, and twice as many by chance on one.
            let at_once = u64::from(self.pods_per_second) * u64::from(self.pod_seconds);
            let agents = u64::from(self.served_of(*nodes));
            let on_one = u64::from(self.pods.div_ceil(*nodes))
                + at_once.div_ceil(2 * agents)
                + at_once.div_ceil(2 * u64::from(*nodes));
            if on_one > u64::from(PODS_PER_NODE) {
                return wrong(format!(
                    "a node of {nodes} would have about {on_one} pods at once, and can have {PODS_PER_NODE}: \
                     lower pods, podsPerSecond or podSeconds, or raise whole"
                ));
            }
            if self.failures > nodes + self.joins - self.served_of(*nodes) {
                return wrong(format!(
                    "failures must be at most {} with {nodes} nodes: nodes with an agent do not fail",
                    nodes + self.joins - self.served_of(*nodes)
                ));
            }
        }
        Ok(())
    }

    /// How many nodes of so many are whole: never all of them.
    #[must_use]
    pub fn whole_of(&self, nodes: u32) -> u32 {
        self.whole.min(nodes.saturating_sub(1))
    }

    /// How many nodes of so many have an agent: the whole ones, and one whose agent may have a process of its
    /// own. They are the first ones, and do not fail.
    #[must_use]
    pub fn served_of(&self, nodes: u32) -> u32 {
        self.whole_of(nodes) + 1
    }

    /// The pods that come and go, in order. Each node with an agent has its fair share of them, so that what
    /// is measured there is of pods, too.
    #[must_use]
    pub fn coming(&self, nodes: u32, churn: Churn) -> Vec<Pod> {
        let (seconds, first, salt) = match churn {
            Churn::Alone => (self.busy_seconds, 0, 0),
            Churn::Joining => (self.joining_seconds(), self.pods_per_second * self.busy_seconds, 1 << 32),
        };
        let mut chance = Chance::new(self.seed ^ u64::from(nodes) ^ salt);
        let count = self.pods_per_second * seconds;
        (0..count)
            .map(|place| Pod {
                at: Duration::from_secs(u64::from(seconds)) * place / count.max(1),
                number: first + place,
                // Every second one on a node with an agent: few of five thousand are.
                node: if place % 2 == 0 { chance.below(self.served_of(nodes)) } else { chance.below(nodes) },
                network: (chance.below(100) < self.further_percent).then(|| chance.below(self.networks)),
            })
            .collect()
    }

    /// Seconds in which nodes join, if any do.
    fn joining_seconds(&self) -> u32 {
        if self.joins > 0 { self.join_seconds } else { 0 }
    }

    /// The pods that are there all the time: of the default Network, as many on each node.
    pub fn standing(&self, nodes: u32) -> impl Iterator<Item = Pod> + use<> {
        let first = self.pods_per_second * (self.busy_seconds + self.joining_seconds());
        (0..self.pods).map(move |place| Pod {
            at: Duration::ZERO,
            number: first + place,
            node: place % nodes.max(1),
            network: None,
        })
    }

    /// The subnet of a further Network: large enough for a block on every node. Those of two Networks overlap
    /// where the range has not room for all, as tenants' do.
    #[must_use]
    pub fn subnet(&self, network: u32, nodes: u32) -> String {
        const RANGE: u32 = 1 << 20;
        let wanted = nodes.saturating_add(self.joins).saturating_mul(ADDRESSES_PER_NODE);
        let size = wanted.next_power_of_two().clamp(1 << 12, RANGE);
        let base = u32::from(Ipv4Addr::new(172, 16, 0, 0));
        let start = base + network.wrapping_mul(size) % RANGE;
        format!("{}/{}", Ipv4Addr::from(start), 32 - size.trailing_zeros())
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
        let of = |scenario: &Scenario| scenario.coming(500, Churn::Alone);
        assert_eq!(of(&scenario), of(&scenario));
        assert_ne!(of(&scenario), of(&Scenario { seed: 2, ..scenario.clone() }));
        let pods = of(&scenario);
        assert_eq!(pods.len(), 400);
        assert!(pods.iter().all(|pod| pod.node < 500 && pod.at < Duration::from_secs(20)));
        let served = pods.iter().filter(|pod| pod.node < scenario.served_of(500)).count();
        assert!(served >= 200, "nodes with an agent have pods");
    }

    #[test]
    fn no_two_pods_have_a_number() {
        let scenario = Scenario { pods: 30, joins: 5, ..Scenario::default() };
        let mut numbers: Vec<u32> = [Churn::Alone, Churn::Joining]
            .into_iter()
            .flat_map(|churn| scenario.coming(100, churn))
            .chain(scenario.standing(100))
            .map(|pod| pod.number)
            .collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!((numbers.len(), count), (400 + 200 + 30, 400 + 200 + 30));
    }

    #[test]
    fn a_network_has_room_for_a_block_on_every_node() {
        let scenario = Scenario::default();
        assert_eq!(scenario.subnet(0, 100), "172.16.0.0/20");
        assert_eq!(scenario.subnet(17, 100), "172.17.16.0/20");
        assert_eq!(scenario.subnet(1, 5000), "172.18.0.0/15");
        assert_eq!(scenario.subnet(8, 5000), "172.16.0.0/15", "there are eight of them");
    }

    #[test]
    fn a_file_says_what_is_different_and_nothing_unknown() {
        let text = "nodes: [50, 200]\nwhole: 5\npodsPerSecond: 3\n";
        let scenario = Scenario::parse(text).expect("a scenario");
        assert_eq!((scenario.nodes.as_slice(), scenario.whole, scenario.networks), (&[50, 200][..], 5, 10));
        for (text, word) in [
            ("nodes: []", "at least one size"),
            ("nodes: [1]", "each must be at least 2"),
            ("nodez: [1]", "nodez"),
            ("nodes: [30000]", "at most 20000"),
            ("networks: 0", "furtherPercent needs networks"),
            ("whole: 0", "whole"),
            ("failures: 400", "at most 0 with 100 nodes"),
            ("{nodes: [10], pods: 5000}", "about 510 pods at once"),
            ("podsPerSecond: 4000000000", "pods would be created"),
        ] {
            let error = Scenario::parse(text).expect_err(text).to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
