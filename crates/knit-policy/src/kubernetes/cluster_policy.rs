//! ClusterNetworkPolicy, and what AdminNetworkPolicy shares with it.

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::lenient::UNREADABLE;
use super::types::{
    ClusterNetworkPolicy, ClusterRule, NamespacedPods, NamespacedSubject, PolicyPeer, ProtocolMatch,
};
use super::{Converted, Problems, policy_name};
use crate::model::{
    Action, AddressRanges, Direction, Kind, NamespaceMatch, Peer, Policy, PortMatch, Protocol, Rule, Scope,
    Selector, Subject, Tier,
};

/// A part of a rule that this version cannot understand: the rule fails closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotUnderstood;

/// Reads a ClusterNetworkPolicy.
#[must_use]
pub fn cluster_network_policy(object: &ClusterNetworkPolicy) -> Converted<Policy> {
    let name = policy_name(Kind::Cluster, &object.metadata);
    let mut problems = Problems::of_policy(&name);
    let spec = &object.spec;
    let tier = match spec.tier.as_str() {
        "Admin" => Tier::Admin(spec.priority),
        "Baseline" => Tier::Baseline(spec.priority),
        other => {
            problems.add("spec.tier", format!("{other:?} must be Admin or Baseline: the policy is not used"));
            return problems.into_policy(None);
        }
    };
    priority(spec.priority, &mut problems);
    let Some(subject) = subject(&spec.subject, &mut problems) else { return problems.into_policy(None) };
    let mut rules = |list: &[ClusterRule], direction: Direction| {
        let (list, whole) = problems.limited(list, &format!("spec.{direction}"));
        let list = list.iter().enumerate();
        let rules =
            list.map(|(i, r)| cluster_rule(r, direction, &format!("spec.{direction}[{i}]"), &mut problems));
        // What is left out might have denied.
        rules.chain((!whole).then(|| Rule::all(Action::Deny))).collect()
    };
    let ingress = Some(rules(&spec.ingress, Direction::Ingress));
    let egress = Some(rules(&spec.egress, Direction::Egress));
    problems.into_policy(Some(Policy { name, tier, scope: Scope::Primary, subject, ingress, egress }))
}

pub(super) fn priority(priority: i32, problems: &mut Problems) {
    if !(0..=1000).contains(&priority) {
        problems.add("spec.priority", format!("{priority} is not between 0 and 1000; it is used unchanged"));
    }
}

/// The pods that a policy of the cluster acts on. Without knowing them, the policy cannot be used.
pub(super) fn subject(spec: &NamespacedSubject, problems: &mut Problems) -> Option<Subject> {
    let found = match (&spec.namespaces, &spec.pods) {
        (Some(selector), None) if spec.unknown.is_empty() => {
            of_namespaces(selector, "spec.subject.namespaces", problems)
        }
        (None, Some(pods)) if spec.unknown.is_empty() => of_pods(pods, "spec.subject.pods", problems),
        _ => Err(NotUnderstood),
    };
    if found.is_err() {
        problems.add(
            "spec.subject",
            "write either namespaces or pods, with valid selectors: the policy is not used",
        );
    }
    found.ok()
}

fn of_namespaces(
    selector: &LabelSelector,
    field: &str,
    problems: &mut Problems,
) -> Result<Subject, NotUnderstood> {
    let selector = problems.selector(selector, field).ok_or(NotUnderstood)?;
    Ok(Subject { namespaces: NamespaceMatch::Selected(selector), pods: Selector::everything() })
}

fn of_pods(pods: &NamespacedPods, field: &str, problems: &mut Problems) -> Result<Subject, NotUnderstood> {
    if !pods.unknown.is_empty() {
        return Err(NotUnderstood);
    }
    let namespaces = problems.selector(&pods.namespace_selector, &format!("{field}.namespaceSelector"));
    let pods = problems.selector(&pods.pod_selector, &format!("{field}.podSelector"));
    match (namespaces, pods) {
        (Some(namespaces), Some(pods)) => {
            Ok(Subject { namespaces: NamespaceMatch::Selected(namespaces), pods })
        }
        _ => Err(NotUnderstood),
    }
}

fn cluster_rule(rule: &ClusterRule, direction: Direction, field: &str, problems: &mut Problems) -> Rule {
    let action = match rule.action.as_str() {
        "Accept" => Some(Action::Accept),
        "Deny" => Some(Action::Deny),
        "Pass" => Some(Action::Pass),
        _ => None,
    };
    let ports = if rule.protocols.is_empty() {
        Ok(None)
    } else {
        let (list, whole) = problems.limited(&rule.protocols, &format!("{field}.protocols"));
        let list = list.iter().enumerate();
        let ports: Result<Vec<PortMatch>, _> =
            list.map(|(i, p)| protocol(p, &format!("{field}.protocols[{i}]"), problems)).collect();
        ports.map(Some).and_then(|ports| if whole { Ok(ports) } else { Err(NotUnderstood) })
    };
    let (peers, misplaced) = match direction {
        Direction::Ingress => (&rule.from, (!rule.to.is_empty()).then_some("to")),
        Direction::Egress => (&rule.to, (!rule.from.is_empty()).then_some("from")),
    };
    let parts = Parts {
        name: rule.name.as_deref(),
        action,
        peers,
        ports,
        unknown: rule.unknown.keys().next().map(String::as_str).or(misplaced),
    };
    parts.into_rule(direction, field, problems)
}

fn protocol(spec: &ProtocolMatch, field: &str, problems: &mut Problems) -> Result<PortMatch, NotUnderstood> {
    let (protocol, transport) = match (&spec.tcp, &spec.udp, &spec.sctp, &spec.destination_named_port) {
        _ if !spec.unknown.is_empty() => return Err(NotUnderstood),
        (Some(tcp), None, None, None) => (Protocol::Tcp, tcp),
        (None, Some(udp), None, None) => (Protocol::Udp, udp),
        (None, None, Some(sctp), None) => (Protocol::Sctp, sctp),
        (None, None, None, Some(name)) if !name.is_empty() => {
            return Ok(PortMatch::Named(name.as_str().into(), None));
        }
        _ => return Err(NotUnderstood),
    };
    let Some(port) = transport.destination_port.as_ref().filter(|_| transport.unknown.is_empty()) else {
        return Err(NotUnderstood);
    };
    let (first, last) = match (port.number, &port.range) {
        (Some(number), None) if port.unknown.is_empty() => (number, number),
        (None, Some(range)) if port.unknown.is_empty() => (range.start, range.end),
        _ => return Err(NotUnderstood),
    };
    problems.range(protocol, first, last, || field.to_owned()).map(PortMatch::Numbers).ok_or(NotUnderstood)
}

/// The parts of a rule of either kind.
pub(super) struct Parts<'a> {
    pub(super) name: Option<&'a str>,
    pub(super) action: Option<Action>,
    pub(super) peers: &'a [PolicyPeer],
    pub(super) ports: Result<Option<Vec<PortMatch>>, NotUnderstood>,
    pub(super) unknown: Option<&'a str>,
}

impl Parts<'_> {
    /// The rule; one that is not understood fails closed, as the API asks for: if it would accept, it matches
    /// nothing, or else it denies everything.
    pub(super) fn into_rule(self, direction: Direction, field: &str, problems: &mut Problems) -> Rule {
        let name = self.name.map(Into::into);
        let peers_field = match direction {
            Direction::Ingress => "from",
            Direction::Egress => "to",
        };
        let accepts = self.action == Some(Action::Accept);
        let fail = |problems: &mut Problems, what: String| {
            let becomes = if accepts { "the rule matches nothing" } else { "the rule denies everything" };
            problems.add(field, format!("{what} is not valid, so {becomes}"));
            let closed = if accepts { Rule::nothing(Action::Accept) } else { Rule::all(Action::Deny) };
            Rule { name: name.clone(), ..closed }
        };
        let Some(action) = self.action else { return fail(problems, "the action".to_owned()) };
        if let Some(unknown) = self.unknown {
            return match unknown {
                UNREADABLE => fail(problems, "a value in it".to_owned()),
                unknown => fail(problems, format!("the field {unknown}")),
            };
        }
        let (list, whole) = problems.limited(self.peers, &format!("{field}.{peers_field}"));
        if list.is_empty() || !whole {
            return fail(problems, format!("a list {peers_field} like this"));
        }
        let mut peers = Vec::new();
        for (i, spec) in list.iter().enumerate() {
            match peer(spec, direction, accepts, &format!("{field}.{peers_field}[{i}]"), problems) {
                Ok(peer) => peers.extend(peer),
                Err(NotUnderstood) => return fail(problems, format!("{peers_field}[{i}]")),
            }
        }
        let Ok(ports) = self.ports else { return fail(problems, "a protocol or port".to_owned()) };
        Rule { name, action, peers: Some(peers.into()), ports: ports.map(Into::into) }
    }
}

/// One peer; none if it is known and can never match.
fn peer(
    spec: &PolicyPeer,
    direction: Direction,
    accepts: bool,
    field: &str,
    problems: &mut Problems,
) -> Result<Option<Peer>, NotUnderstood> {
    let egress = direction == Direction::Egress;
    match (&spec.namespaces, &spec.pods, &spec.nodes, &spec.networks, &spec.domain_names) {
        _ if !spec.unknown.is_empty() => Err(NotUnderstood),
        (Some(selector), None, None, None, None) => {
            Ok(Some(Peer::Pods(of_namespaces(selector, &format!("{field}.namespaces"), problems)?)))
        }
        (None, Some(pods), None, None, None) => {
            Ok(Some(Peer::Pods(of_pods(pods, &format!("{field}.pods"), problems)?)))
        }
        (None, None, Some(selector), None, None) if egress => {
            let selector = problems.selector(selector, &format!("{field}.nodes")).ok_or(NotUnderstood)?;
            Ok(Some(Peer::Nodes(selector)))
        }
        (None, None, None, Some(networks), None) if egress => {
            let (list, _) = problems.limited(networks, &format!("{field}.networks"));
            let nets = list.iter().enumerate();
            let nets: Vec<IpNet> = nets
                .filter_map(|(i, text)| problems.net(text, || format!("{field}.networks[{i}]")))
                .collect();
            // A block that is missing means less accepted, but also less denied.
            if nets.len() < networks.len() && !accepts {
                return Err(NotUnderstood);
            }
            let blocks: Vec<AddressRanges> =
                nets.into_iter().map(|net| AddressRanges::block(net, &[])).collect();
            Ok(Some(Peer::Addresses(AddressRanges::union(&blocks))))
        }
        (None, None, None, None, Some(_)) if egress && accepts => {
            problems.add(
                format!("{field}.domainNames"),
                "domain names are not resolved: this peer \
            matches nothing",
            );
            Ok(None)
        }
        _ => Err(NotUnderstood),
    }
}
