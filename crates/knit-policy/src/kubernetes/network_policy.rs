//! NetworkPolicy, and MultiNetworkPolicy, which has the same shape.

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::lenient::{UNREADABLE, number};
use super::limits::limited;
use super::types::{
    MultiNetworkPolicy, NamespacePolicyPeer, NamespacePolicyPort, NamespacePolicyRule, NamespacePolicySpec,
    NetworkPolicy, Unknown,
};
use super::{Converted, Problems, policy_name};
use crate::model::{
    Action, AddressRanges, Kind, Name, NamespaceMatch, Peer, Policy, PolicyName, PortMatch, PortRanges,
    Ports, Rule, Scope, Selector, Subject, Tier,
};

/// The annotation of a MultiNetworkPolicy that says for which Networks it is: names, or `*` for every
/// interface.
pub const POLICY_FOR_ANNOTATION: &str = "k8s.v1.cni.cncf.io/policy-for";

/// Reads a NetworkPolicy.
#[must_use]
pub fn network_policy(object: &NetworkPolicy) -> Converted<Policy> {
    let name = policy_name(Kind::Network, &object.metadata);
    let problems = Problems::of_policy(&name);
    read(name, Scope::Primary, &object.spec, problems)
}

/// Reads a MultiNetworkPolicy.
#[must_use]
pub fn multi_network_policy(object: &MultiNetworkPolicy) -> Converted<Policy> {
    let name = policy_name(Kind::Multi, &object.metadata);
    let mut problems = Problems::of_policy(&name);
    let scope = policy_for(&object.metadata, &mut problems);
    read(name, scope, &object.spec, problems)
}

fn read(
    name: PolicyName,
    scope: Scope,
    spec: &NamespacePolicySpec,
    mut problems: Problems,
) -> Converted<Policy> {
    let policy = limited(convert(name, scope, spec, &mut problems), &mut problems);
    problems.into_policy(Some(policy))
}

/// A field that is not known.
fn unknown(fields: &Unknown) -> Option<&str> {
    fields.keys().next().map(String::as_str)
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

fn convert(name: PolicyName, scope: Scope, spec: &NamespacePolicySpec, problems: &mut Problems) -> Policy {
    let selector = match &spec.pod_selector {
        Some(selector) => problems.selector(selector, "spec.podSelector"),
        None => Some(Selector::everything()),
    };
    let mut types = Types { ingress: false, egress: false };
    for (i, text) in spec.policy_types.iter().enumerate() {
        match text.as_str() {
            "Ingress" => types.ingress = true,
            "Egress" => types.egress = true,
            other => {
                let message =
                    format!("{other:?} must be Ingress or Egress: pods are isolated in both directions");
                problems.add(format!("spec.policyTypes[{i}]"), message);
                types = Types { ingress: true, egress: true };
            }
        }
    }
    // As an API server fills it in (rule 3).
    if spec.policy_types.is_empty() {
        types = Types { ingress: true, egress: spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()) };
    }
    let unknown = unknown(&spec.unknown);
    match unknown {
        Some(UNREADABLE) => {
            types = Types { ingress: true, egress: true };
            problems.add(
                "spec",
                "it cannot be read, so every pod of the namespace is isolated in both directions, and \
                 nothing is allowed: correct it",
            );
        }
        Some(unknown) => problems.add(
            format!("spec.{unknown}"),
            "unknown field: the pods that the policy selects are isolated, and it allows nothing",
        ),
        None => {}
    }
    let namespace = &name.namespace;
    let mut rules = |list: Option<&[NamespacePolicyRule]>, direction: &str, peers: PeersOf| -> Box<[Rule]> {
        let list = list.unwrap_or_default();
        // Whose policy it is cannot be known: the pods that it could mean are isolated, and nothing is
        // allowed by it.
        if selector.is_none() || unknown.is_some() {
            return Box::default();
        }
        let (list, _) = problems.limited(list, &format!("spec.{direction}"));
        let field = |i: usize| format!("spec.{direction}[{i}]");
        list.iter().enumerate().map(|(i, r)| rule(r, namespace, &field(i), peers, problems)).collect()
    };
    let ingress = types.ingress.then(|| rules(spec.ingress.as_deref(), "ingress", PeersOf::From));
    let egress = types.egress.then(|| rules(spec.egress.as_deref(), "egress", PeersOf::To));
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

/// Where a rule has its peers.
#[derive(Clone, Copy)]
enum PeersOf {
    From,
    To,
}

struct Types {
    ingress: bool,
    egress: bool,
}

fn rule(
    spec: &NamespacePolicyRule,
    namespace: &Name,
    field: &str,
    peers: PeersOf,
    problems: &mut Problems,
) -> Rule {
    let (peers_field, peers, others, misplaced) = match peers {
        PeersOf::From => ("from", &spec.from, &spec.to, "to"),
        PeersOf::To => ("to", &spec.to, &spec.from, "from"),
    };
    match unknown(&spec.unknown).or((!others.is_empty()).then_some(misplaced)) {
        Some(UNREADABLE) => {
            problems.add(field, "a value in it is not of the right type: the rule allows nothing");
            return Rule::nothing(Action::Accept);
        }
        Some(unknown) => {
            problems.add(format!("{field}.{unknown}"), "unknown field: the rule allows nothing");
            return Rule::nothing(Action::Accept);
        }
        None => {}
    }
    let (some_peers, _) = problems.limited(peers, &format!("{field}.{peers_field}"));
    let (ports, _) = problems.limited(&spec.ports, &format!("{field}.ports"));
    // A list, even if nothing of it could be used, is not the absence of a list (rules 10 and 11).
    let converted = some_peers.iter().enumerate();
    let converted: Vec<Peer> = converted
        .filter_map(|(i, p)| peer(p, namespace, &format!("{field}.{peers_field}[{i}]"), problems))
        .collect();
    let numbers = ports.iter().enumerate();
    let matches: Vec<PortMatch> =
        numbers.filter_map(|(i, p)| port(p, &format!("{field}.ports[{i}]"), problems)).collect();
    Rule {
        name: None,
        action: Action::Accept,
        peers: (!peers.is_empty()).then(|| converted.into()),
        ports: (!spec.ports.is_empty()).then(|| matches.into()),
    }
}

fn peer(spec: &NamespacePolicyPeer, namespace: &Name, field: &str, problems: &mut Problems) -> Option<Peer> {
    if let Some(unknown) = unknown(&spec.unknown) {
        problems.add(format!("{field}.{unknown}"), "unknown field: the peer is ignored");
        return None;
    }
    match (&spec.ip_block, &spec.namespace_selector, &spec.pod_selector) {
        (None, None, None) => {
            problems.add(field, "a peer needs ipBlock, namespaceSelector or podSelector; it is ignored");
            None
        }
        (Some(spec), None, None) => block(&spec.cidr, &spec.except, field, problems),
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
            let namespaces = match namespaces
                .as_ref()
                .map(|s| problems.selector(s, &format!("{field}.namespaceSelector")))
            {
                None => NamespaceMatch::Named(namespace.clone()),
                Some(Some(selector)) => NamespaceMatch::Selected(selector),
                Some(None) => {
                    left_out(problems);
                    return None;
                }
            };
            let pods = match pods.as_ref().map(|s| problems.selector(s, &format!("{field}.podSelector"))) {
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

fn port(spec: &NamespacePolicyPort, field: &str, problems: &mut Problems) -> Option<PortMatch> {
    if let Some(unknown) = unknown(&spec.unknown) {
        problems.add(format!("{field}.{unknown}"), "unknown field: the port is ignored");
        return None;
    }
    let protocol = problems.protocol(spec.protocol.as_deref(), || format!("{field}.protocol"))?;
    match (&spec.port, &spec.end_port) {
        (None, None) => Some(PortMatch::Numbers(Ports::of(protocol, PortRanges::all()))),
        (Some(Value::String(name)), None) if !name.is_empty() => {
            Some(PortMatch::Named(name.as_str().into(), Some(protocol)))
        }
        (Some(first), last) => {
            let (Some(first), Some(last)) = (number(first), number(last.as_ref().unwrap_or(first))) else {
                problems.add(
                    field,
                    "port must be a number or a name, and endPort a number that requires a numeric port \
                     (rule 20); it matches nothing",
                );
                return None;
            };
            problems.range(protocol, first, last, || format!("{field}.port")).map(PortMatch::Numbers)
        }
        (None, Some(_)) => {
            problems.add(field, "endPort requires a numeric port (rule 20); it matches nothing");
            None
        }
    }
}
