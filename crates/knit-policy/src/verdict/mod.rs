//! The verdict function: may this packet pass, by which rule of which object, or why not.
//!
//! [`Cluster::judge`] goes through the tiers of both sides rule by rule, as their APIs describe it, and keeps
//! a record of what it saw. It works on the objects themselves and knows nothing of the [sets](crate::sets),
//! so that each can be checked against the other.

mod matching;
mod reason;

use std::net::IpAddr;
use std::sync::Arc;

use crate::cluster::{AddressOwner, Cluster};
use crate::model::{
    Action, AliasEndpoint, DEFAULT_NETWORK, Direction, Name, Pod, PodKey, Policy, PolicyName, Tier, Traffic,
};
use matching::Remote;

pub use reason::{Reason, RuleRef};

/// A packet as the router of a Network sees it: after service addresses were translated (rules 19 and 29),
/// before source addresses are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// The Network whose router sees it.
    pub network: Name,
    /// Where it comes from.
    pub source: IpAddr,
    /// Where it goes to.
    pub destination: IpAddr,
    /// What it carries.
    pub traffic: Traffic,
    /// Which part of a connection it is.
    pub state: State,
}

/// Which part of a connection a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum State {
    /// Its first: this is what policies judge.
    #[default]
    New,
    /// A later one of a connection that was let pass, in either direction (rule 22).
    Established,
    /// An ICMP error about such a connection (rule 22).
    Related,
}

/// What becomes of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// What the policies of the pod say that sends it.
    pub egress: Side,
    /// What the policies of the pod say that receives it.
    pub ingress: Side,
}

/// The verdict of one side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    /// Which one.
    pub direction: Direction,
    /// The pod whose policies were asked, if it is one.
    pub pod: Option<PodKey>,
    /// Whether the packet may pass.
    pub allowed: bool,
    /// The reason, as a code.
    pub reason: Reason,
    /// What each tier said, as far as they were asked.
    pub tiers: Vec<TierTrace>,
    /// The endpoint of a cluster service that was judged in place of the service's address (rule 38).
    pub endpoint: Option<AliasEndpoint>,
}

/// What one tier said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierTrace {
    /// `Admin`, `NetworkPolicy` or `Baseline`.
    pub tier: &'static str,
    /// What came of it; nothing if no policy of this tier selects the pod in this direction.
    pub decision: Option<Action>,
    /// The policies of this tier that select the pod in this direction.
    pub policies: Vec<PolicyTrace>,
}

/// One policy, as far as it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyTrace {
    /// The policy.
    pub policy: PolicyName,
    /// Its rules of this direction.
    pub rules: Vec<RuleTrace>,
}

/// One rule, and whether it matched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleTrace {
    /// Its place in the list, from 0.
    pub index: usize,
    /// Its own name, if it has one.
    pub name: Option<Name>,
    /// What it does.
    pub action: Action,
    /// Whether it matched.
    pub outcome: RuleOutcome,
}

/// Whether a rule matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleOutcome {
    /// It did.
    Matched,
    /// No peer of it is the other side.
    NoPeer,
    /// A peer is, and no port.
    NoPort,
    /// Another rule had decided before.
    NotReached,
}

impl Verdict {
    /// Whether both sides let it pass (rule 8).
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.egress.allowed && self.ingress.allowed
    }
}

impl Cluster {
    /// Judges a packet.
    #[must_use]
    pub fn judge(&self, flow: &Flow) -> Verdict {
        let side = |direction| self.judge_side(flow, direction);
        Verdict { egress: side(Direction::Egress), ingress: side(Direction::Ingress) }
    }

    fn judge_side(&self, flow: &Flow, direction: Direction) -> Side {
        let (own, other) = match direction {
            Direction::Egress => (flow.source, flow.destination),
            Direction::Ingress => (flow.destination, flow.source),
        };
        let pod = match self.owner(&flow.network, own) {
            AddressOwner::Pod(pod) => pod,
            AddressOwner::Node(_) => return Side::passes(direction, None, Reason::Node),
            AddressOwner::Nobody => return Side::passes(direction, None, Reason::NotAPod),
        };
        let passes = |reason| Side::passes(direction, Some(&pod), reason);
        if flow.traffic.always_passes() {
            return passes(Reason::NeighbourDiscovery);
        }
        if flow.state != State::New {
            return passes(Reason::Connection);
        }
        let owner = self.owner(&flow.network, other);
        if direction == Direction::Ingress
            && matches!(owner, AddressOwner::Node(_))
            && self.is_address_of_node(other, &pod.node)
        {
            return passes(Reason::OwnNode);
        }
        let Some(attachment) = pod.attachment(&flow.network, own) else {
            return passes(Reason::NotAPod);
        };
        let policies = self.policies_on(&pod, &flow.network, attachment.primary);
        let acting: Vec<_> = policies.into_iter().filter(|p| p.acts_on(direction)).collect();
        if acting.is_empty() {
            return passes(Reason::NotSelected);
        }
        if direction == Direction::Egress
            && let Some(alias) = self.alias(&flow.network, other, flow.traffic)
        {
            return self.judge_alias(alias, &pod, &acting);
        }
        let remote = self.remote(other, owner, own == other);
        judge_tiers(direction, &pod, &acting, &remote, flow.traffic)
    }

    /// A cluster service may be reached if each of its endpoints may, at its own port (rule 38).
    fn judge_alias(&self, alias: &crate::model::Alias, pod: &Arc<Pod>, acting: &[Arc<Policy>]) -> Side {
        let mut verdict = None;
        for endpoint in &alias.endpoints {
            let owner = self.owner(DEFAULT_NETWORK, endpoint.address);
            let remote = self.remote(endpoint.address, owner, false);
            let traffic = Traffic::Port(alias.protocol, endpoint.port);
            let side = judge_tiers(Direction::Egress, pod, acting, &remote, traffic);
            let side = Side { endpoint: Some(*endpoint), ..side };
            if !side.allowed {
                return side;
            }
            verdict.get_or_insert(side);
        }
        verdict.unwrap_or_else(|| Side {
            allowed: false,
            ..Side::passes(Direction::Egress, Some(pod), Reason::NoEndpoints)
        })
    }

    fn remote(&self, address: IpAddr, owner: AddressOwner, itself: bool) -> Remote<'_> {
        let namespace = match &owner {
            AddressOwner::Pod(pod) => Some(self.known_namespace(&pod.key.namespace)),
            AddressOwner::Node(_) | AddressOwner::Nobody => None,
        };
        Remote { address, owner, namespace, itself }
    }
}

/// Asks the tiers in their order. `acting` are the policies that act on this direction, in order.
fn judge_tiers(
    direction: Direction,
    pod: &Arc<Pod>,
    acting: &[Arc<Policy>],
    remote: &Remote<'_>,
    traffic: Traffic,
) -> Side {
    let mut side = Side::passes(direction, Some(pod), Reason::NothingDecided);
    let matches = |rule: &crate::model::Rule| matching::outcome(rule, direction, pod, remote, traffic);
    for tier in [Tier::Admin(0), Tier::Namespace, Tier::Baseline(0)] {
        let same = |p: &&Arc<Policy>| std::mem::discriminant(&p.tier) == std::mem::discriminant(&tier);
        let policies: Vec<&Arc<Policy>> = acting.iter().filter(same).collect();
        let (trace, decided) = match tier {
            Tier::Namespace => union(direction, &policies, remote.itself, matches),
            Tier::Admin(_) | Tier::Baseline(_) => first_match(tier, direction, &policies, matches),
        };
        side.tiers.push(trace);
        if let Some((allowed, reason)) = decided {
            (side.allowed, side.reason) = (allowed, reason);
            return side;
        }
    }
    side
}

/// The tiers of the cluster: the first rule that matches decides, or leaves it to the next tier.
fn first_match(
    tier: Tier,
    direction: Direction,
    policies: &[&Arc<Policy>],
    matches: impl Fn(&crate::model::Rule) -> RuleOutcome,
) -> (TierTrace, Option<(bool, Reason)>) {
    let mut trace = TierTrace::new(tier);
    let (mut reached, mut decided) = (true, None);
    for policy in policies {
        let mut rules = Vec::new();
        for (index, rule) in policy.rules(direction).unwrap_or_default().iter().enumerate() {
            let outcome = if reached { matches(rule) } else { RuleOutcome::NotReached };
            rules.push(RuleTrace { index, name: rule.name.clone(), action: rule.action, outcome });
            if outcome == RuleOutcome::Matched {
                reached = false;
                trace.decision = Some(rule.action);
                if rule.action != Action::Pass {
                    let by = RuleRef { policy: policy.name.clone(), index, name: rule.name.clone() };
                    decided = Some((rule.action == Action::Accept, Reason::Rule(by)));
                }
            }
        }
        trace.policies.push(PolicyTrace { policy: policy.name.clone(), rules });
    }
    (trace, decided)
}

/// The tier of namespaces: a pod that a policy selects is isolated, and what any rule allows may pass (rule
/// 7).
fn union(
    direction: Direction,
    policies: &[&Arc<Policy>],
    itself: bool,
    matches: impl Fn(&crate::model::Rule) -> RuleOutcome,
) -> (TierTrace, Option<(bool, Reason)>) {
    let mut trace = TierTrace::new(Tier::Namespace);
    if policies.is_empty() {
        return (trace, None);
    }
    let mut by = None;
    for policy in policies {
        let mut rules = Vec::new();
        for (index, rule) in policy.rules(direction).unwrap_or_default().iter().enumerate() {
            let outcome = matches(rule);
            rules.push(RuleTrace { index, name: rule.name.clone(), action: rule.action, outcome });
            if outcome == RuleOutcome::Matched {
                let this = RuleRef { policy: policy.name.clone(), index, name: rule.name.clone() };
                by.get_or_insert(this);
            }
        }
        trace.policies.push(PolicyTrace { policy: policy.name.clone(), rules });
    }
    let decided = match by {
        Some(by) => (true, Reason::Rule(by)),
        None if itself => (true, Reason::Itself),
        None => (false, Reason::Isolated(policies.iter().map(|p| p.name.clone()).collect())),
    };
    trace.decision = Some(if decided.0 { Action::Accept } else { Action::Deny });
    (trace, Some(decided))
}

// === impl Side ===

impl Side {
    fn passes(direction: Direction, pod: Option<&Arc<Pod>>, reason: Reason) -> Self {
        let pod = pod.map(|p| p.key.clone());
        Self { direction, pod, allowed: true, reason, tiers: Vec::new(), endpoint: None }
    }
}

// === impl TierTrace ===

impl TierTrace {
    fn new(tier: Tier) -> Self {
        let tier = match tier {
            Tier::Admin(_) => "Admin",
            Tier::Namespace => "NetworkPolicy",
            Tier::Baseline(_) => "Baseline",
        };
        Self { tier, decision: None, policies: Vec::new() }
    }
}
