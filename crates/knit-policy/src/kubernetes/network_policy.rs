//! NetworkPolicy, and MultiNetworkPolicy, which has the same shape.

use ipnet::IpNet;
use k8s_openapi::api::networking::v1 as net;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::limits::limited;
use super::types::{MultiNetworkPolicy, MultiPolicyPeer, MultiPolicyPort, MultiPolicyRule};
use super::{Converted, Problems, policy_name};
use crate::model::{
    Action, AddressRanges, Kind, Name, NamespaceMatch, Peer, Policy, PolicyName, PortMatch, PortRanges,
    Ports, Rule, Scope, Selector, Subject, Tier,
};

/// The annotation of a MultiNetworkPolicy that says for which Networks it is: names, or `*` for every
/// interface.
pub const POLICY_FOR_ANNOTATION: &str = "k8s.v1.cni.cncf.io/policy-for";

/// What the two kinds have in common.
struct Spec<'a> {
    pod_selector: Option<&'a LabelSelector>,
    policy_types: &'a [String],
    ingress: Option<Vec<RuleSpec<'a>>>,
    egress: Option<Vec<RuleSpec<'a>>>,
}

struct RuleSpec<'a> {
    peers: Vec<PeerSpec<'a>>,
    ports: Vec<PortSpec<'a>>,
    unknown: Option<&'a str>,
}

struct PeerSpec<'a> {
    block: Option<(&'a str, &'a [String])>,
    namespaces: Option<&'a LabelSelector>,
    pods: Option<&'a LabelSelector>,
    /// A field that this version does not know: it might have narrowed the peer.
    unknown: Option<&'a str>,
}

struct PortSpec<'a> {
    protocol: Option<&'a str>,
    port: Option<&'a IntOrString>,
    end_port: Option<i32>,
    unknown: Option<&'a str>,
}

/// Reads a NetworkPolicy.
#[must_use]
pub fn network_policy(object: &net::NetworkPolicy) -> Converted<Policy> {
    let name = policy_name(Kind::Network, &object.metadata);
    let spec = object.spec.as_ref();
    let ingress = spec.and_then(|s| s.ingress.as_deref());
    let egress = spec.and_then(|s| s.egress.as_deref());
    let read = Spec {
        pod_selector: spec.and_then(|s| s.pod_selector.as_ref()),
        policy_types: spec.and_then(|s| s.policy_types.as_deref()).unwrap_or_default(),
        ingress: ingress
            .map(|list| list.iter().map(|r| core_rule(r.from.as_deref(), r.ports.as_deref())).collect()),
        egress: egress
            .map(|list| list.iter().map(|r| core_rule(r.to.as_deref(), r.ports.as_deref())).collect()),
    };
    let mut problems = Problems::of_policy(&name);
    let policy = limited(convert(name, Scope::Primary, read, &mut problems), &mut problems);
    problems.into_policy(Some(policy))
}

fn core_rule<'a>(
    peers: Option<&'a [net::NetworkPolicyPeer]>,
    ports: Option<&'a [net::NetworkPolicyPort]>,
) -> RuleSpec<'a> {
    let peer = |p: &'a net::NetworkPolicyPeer| PeerSpec {
        block: p.ip_block.as_ref().map(|b| (b.cidr.as_str(), b.except.as_deref().unwrap_or_default())),
        namespaces: p.namespace_selector.as_ref(),
        pods: p.pod_selector.as_ref(),
        unknown: None,
    };
    let port = |p: &'a net::NetworkPolicyPort| PortSpec {
        protocol: p.protocol.as_deref(),
        port: p.port.as_ref(),
        end_port: p.end_port,
        unknown: None,
    };
    RuleSpec {
        peers: peers.unwrap_or_default().iter().map(peer).collect(),
        ports: ports.unwrap_or_default().iter().map(port).collect(),
        unknown: None,
    }
}

/// Reads a MultiNetworkPolicy.
#[must_use]
pub fn multi_network_policy(object: &MultiNetworkPolicy) -> Converted<Policy> {
    let name = policy_name(Kind::Multi, &object.metadata);
    let mut problems = Problems::of_policy(&name);
    let scope = policy_for(&object.metadata, &mut problems);
    let spec = &object.spec;
    let read = Spec {
        pod_selector: spec.pod_selector.as_ref(),
        policy_types: &spec.policy_types,
        ingress: spec.ingress.as_ref().map(|list| list.iter().map(|r| multi_rule(r, &r.from)).collect()),
        egress: spec.egress.as_ref().map(|list| list.iter().map(|r| multi_rule(r, &r.to)).collect()),
    };
    let policy = limited(convert(name, scope, read, &mut problems), &mut problems);
    problems.into_policy(Some(policy))
}

fn multi_rule<'a>(rule: &'a MultiPolicyRule, peers: &'a [MultiPolicyPeer]) -> RuleSpec<'a> {
    let peer = |p: &'a MultiPolicyPeer| PeerSpec {
        block: p.ip_block.as_ref().map(|b| (b.cidr.as_str(), b.except.as_slice())),
        namespaces: p.namespace_selector.as_ref(),
        pods: p.pod_selector.as_ref(),
        unknown: p.unknown.keys().next().map(String::as_str),
    };
    let port = |p: &'a MultiPolicyPort| PortSpec {
        protocol: p.protocol.as_deref(),
        port: p.port.as_ref(),
        end_port: p.end_port,
        unknown: p.unknown.keys().next().map(String::as_str),
    };
    RuleSpec {
        peers: peers.iter().map(peer).collect(),
        ports: rule.ports.iter().map(port).collect(),
        unknown: rule.unknown.keys().next().map(String::as_str),
    }
}

/// For which Networks a MultiNetworkPolicy is.
fn policy_for(metadata: &ObjectMeta, problems: &mut Problems) -> Scope {
    let field = format!("metadata.annotations[{POLICY_FOR_ANNOTATION}]");
    let text = metadata.annotations.as_ref().and_then(|a| a.get(POLICY_FOR_ANNOTATION));
    let names: Vec<&str> =
        text.map(|t| t.split(',').map(str::trim).filter(|n| !n.is_empty()).collect()).unwrap_or_default();
    if names.contains(&"*") {
        return Scope::Every;
    }
    if names.is_empty() {
        problems.add(
            field,
            "no Network is named: the policy has no effect; write names, or \"*\" for every interface",
        );
    }
    let mut names: Vec<Name> = names.into_iter().map(Name::from).collect();
    names.sort();
    names.dedup();
    Scope::Networks(names.into())
}

fn convert(name: PolicyName, scope: Scope, spec: Spec<'_>, problems: &mut Problems) -> Policy {
    let selector = match spec.pod_selector {
        Some(selector) => problems.selector(selector, "spec.podSelector"),
        None => Some(Selector::everything()),
    };
    let mut types = Types { ingress: false, egress: false };
    for (i, text) in spec.policy_types.iter().enumerate() {
        match text.as_str() {
            "Ingress" => types.ingress = true,
            "Egress" => types.egress = true,
            other => {
                let message = format!("{other:?} must be Ingress or Egress; it is ignored");
                problems.add(format!("spec.policyTypes[{i}]"), message);
            }
        }
    }
    // As an API server fills it in (rule 3).
    if spec.policy_types.is_empty() {
        types = Types { ingress: true, egress: spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()) };
    }
    let namespace = &name.namespace;
    let mut rules = |list: Option<Vec<RuleSpec<'_>>>, direction: &str, peers: &str| -> Box<[Rule]> {
        let list = list.unwrap_or_default();
        // Whose policy it is cannot be known: the pods that it could mean are isolated, and nothing is
        // allowed by it.
        if selector.is_none() {
            return Box::default();
        }
        let (list, _) = problems.limited(&list, &format!("spec.{direction}"));
        let field = |i: usize| format!("spec.{direction}[{i}]");
        list.iter().enumerate().map(|(i, r)| rule(r, namespace, &field(i), peers, problems)).collect()
    };
    let ingress = types.ingress.then(|| rules(spec.ingress, "ingress", "from"));
    let egress = types.egress.then(|| rules(spec.egress, "egress", "to"));
    if selector.is_none() {
        problems.add(
            "spec.podSelector",
            "it is not valid, so every pod of the namespace is isolated and nothing is allowed: correct it",
        );
    }
    let subject = Subject {
        namespaces: NamespaceMatch::Named(name.namespace.clone()),
        pods: selector.unwrap_or_default(),
    };
    Policy { name, tier: Tier::Namespace, scope, subject, ingress, egress }
}

struct Types {
    ingress: bool,
    egress: bool,
}

fn rule(
    spec: &RuleSpec<'_>,
    namespace: &Name,
    field: &str,
    peers_field: &str,
    problems: &mut Problems,
) -> Rule {
    if let Some(unknown) = spec.unknown {
        problems.add(format!("{field}.{unknown}"), "unknown field: the rule allows nothing");
        return Rule::nothing(Action::Accept);
    }
    let (peers, _) = problems.limited(&spec.peers, &format!("{field}.{peers_field}"));
    let (ports, _) = problems.limited(&spec.ports, &format!("{field}.ports"));
    // A list, even if nothing of it could be used, is not the absence of a list (rules 10 and 11).
    let converted = peers.iter().enumerate();
    let converted: Vec<Peer> = converted
        .filter_map(|(i, p)| peer(p, namespace, &format!("{field}.{peers_field}[{i}]"), problems))
        .collect();
    let numbers = ports.iter().enumerate();
    let matches: Vec<PortMatch> =
        numbers.filter_map(|(i, p)| port(p, &format!("{field}.ports[{i}]"), problems)).collect();
    Rule {
        name: None,
        action: Action::Accept,
        peers: (!spec.peers.is_empty()).then(|| converted.into()),
        ports: (!spec.ports.is_empty()).then(|| matches.into()),
    }
}

fn peer(spec: &PeerSpec<'_>, namespace: &Name, field: &str, problems: &mut Problems) -> Option<Peer> {
    if let Some(unknown) = spec.unknown {
        problems.add(format!("{field}.{unknown}"), "unknown field: the peer is ignored");
        return None;
    }
    match (spec.block, spec.namespaces, spec.pods) {
        (None, None, None) => {
            problems.add(field, "a peer needs ipBlock, namespaceSelector or podSelector; it is ignored");
            None
        }
        (Some((cidr, except)), None, None) => block(cidr, except, field, problems),
        (Some(_), ..) => {
            problems.add(
                field,
                "ipBlock cannot be combined with a selector: write two peers; this \
            one is ignored",
            );
            None
        }
        (None, namespaces, pods) => {
            let left_out = |problems: &mut Problems| {
                problems.add(field, "its selector is not valid: the peer is ignored");
            };
            let namespaces =
                match namespaces.map(|s| problems.selector(s, &format!("{field}.namespaceSelector"))) {
                    None => NamespaceMatch::Named(namespace.clone()),
                    Some(Some(selector)) => NamespaceMatch::Selected(selector),
                    Some(None) => {
                        left_out(problems);
                        return None;
                    }
                };
            let pods = match pods.map(|s| problems.selector(s, &format!("{field}.podSelector"))) {
                None => Selector::everything(),
                Some(Some(selector)) => selector,
                Some(None) => {
                    left_out(problems);
                    return None;
                }
            };
            Some(Peer::Pods(Subject { namespaces, pods }))
        }
    }
}

fn block(cidr: &str, except: &[String], field: &str, problems: &mut Problems) -> Option<Peer> {
    let cidr = problems.net(cidr, || format!("{field}.ipBlock.cidr"))?;
    let (except, whole) = problems.limited(except, &format!("{field}.ipBlock.except"));
    let mut holes: Vec<IpNet> = Vec::new();
    for (i, text) in except.iter().enumerate() {
        match problems.net(text, || format!("{field}.ipBlock.except[{i}]")) {
            Some(hole) => {
                if !cidr.contains(&hole) || cidr == hole {
                    let message = format!("{hole} is not strictly inside {cidr}");
                    problems.add(format!("{field}.ipBlock.except[{i}]"), message);
                }
                holes.push(hole);
            }
            // Without its exception the block would allow more than was meant.
            None => {
                problems.add(field, "an exception is not valid: the whole block is ignored");
                return None;
            }
        }
    }
    whole.then(|| Peer::Addresses(AddressRanges::block(cidr, &holes)))
}

fn port(spec: &PortSpec<'_>, field: &str, problems: &mut Problems) -> Option<PortMatch> {
    if let Some(unknown) = spec.unknown {
        problems.add(format!("{field}.{unknown}"), "unknown field: the port is ignored");
        return None;
    }
    let protocol = problems.protocol(spec.protocol, || format!("{field}.protocol"))?;
    match (spec.port, spec.end_port) {
        (None, None) => Some(PortMatch::Numbers(Ports::of(protocol, PortRanges::all()))),
        (Some(IntOrString::Int(number)), end) => {
            let ports =
                problems.range(protocol, *number, end.unwrap_or(*number), || format!("{field}.port"))?;
            Some(PortMatch::Numbers(ports))
        }
        (Some(IntOrString::String(name)), None) if !name.is_empty() => {
            Some(PortMatch::Named(name.as_str().into(), Some(protocol)))
        }
        _ => {
            problems.add(field, "endPort requires a numeric port (rule 20); it matches nothing");
            None
        }
    }
}
