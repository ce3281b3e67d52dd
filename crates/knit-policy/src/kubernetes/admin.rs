//! AdminNetworkPolicy and BaselineAdminNetworkPolicy: the engine is that of ClusterNetworkPolicy.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::cluster_policy::{NotUnderstood, Parts, priority, subject};
use super::types::{AdminNetworkPolicy, AdminPolicySpec, AdminPort, AdminRule, BaselineAdminNetworkPolicy};
use super::{Converted, Problems, policy_name};
use crate::model::{Action, Direction, Kind, Policy, PortMatch, Rule, Scope, Tier};

/// Reads an AdminNetworkPolicy.
#[must_use]
pub fn admin_network_policy(object: &AdminNetworkPolicy) -> Converted<Policy> {
    convert(Kind::Admin, &object.metadata, &object.spec)
}

/// Reads a BaselineAdminNetworkPolicy. It is asked after every ClusterNetworkPolicy of the Baseline tier.
#[must_use]
pub fn baseline_admin_network_policy(object: &BaselineAdminNetworkPolicy) -> Converted<Policy> {
    convert(Kind::BaselineAdmin, &object.metadata, &object.spec)
}

fn convert(kind: Kind, metadata: &ObjectMeta, spec: &AdminPolicySpec) -> Converted<Policy> {
    let name = policy_name(kind, metadata);
    let mut problems = Problems::of_policy(&name);
    let tier = if kind == Kind::Admin {
        priority(spec.priority, &mut problems);
        Tier::Admin(spec.priority)
    } else {
        if &*name.name != "default" {
            problems.add("metadata.name", "there is one baseline, named default: this one is not used");
            return problems.into_policy(None);
        }
        Tier::Baseline(i32::MAX)
    };
    let Some(subject) = subject(&spec.subject, &mut problems) else { return problems.into_policy(None) };
    let mut rules = |list: &[AdminRule], direction: Direction| {
        let (list, whole) = problems.limited(list, &format!("spec.{direction}"));
        let list = list.iter().enumerate();
        let rules =
            list.map(|(i, r)| rule(r, kind, direction, &format!("spec.{direction}[{i}]"), &mut problems));
        // What is left out might have denied.
        rules.chain((!whole).then(|| Rule::all(Action::Deny))).collect()
    };
    let ingress = Some(rules(&spec.ingress, Direction::Ingress));
    let egress = Some(rules(&spec.egress, Direction::Egress));
    problems.into_policy(Some(Policy { name, tier, scope: Scope::Primary, subject, ingress, egress }))
}

fn rule(rule: &AdminRule, kind: Kind, direction: Direction, field: &str, problems: &mut Problems) -> Rule {
    let action = match rule.action.as_str() {
        "Allow" => Some(Action::Accept),
        "Deny" => Some(Action::Deny),
        "Pass" if kind == Kind::Admin => Some(Action::Pass),
        _ => None,
    };
    let ports = if rule.ports.is_empty() {
        Ok(None)
    } else {
        let (list, whole) = problems.limited(&rule.ports, &format!("{field}.ports"));
        let list = list.iter().enumerate();
        let ports: Result<Vec<PortMatch>, _> =
            list.map(|(i, p)| port(p, &format!("{field}.ports[{i}]"), problems)).collect();
        ports.map(Some).and_then(|ports| if whole { Ok(ports) } else { Err(NotUnderstood) })
    };
    let (peers, misplaced) = match direction {
        Direction::Ingress => (&rule.from, (!rule.to.is_empty()).then_some("to")),
        Direction::Egress => (&rule.to, (!rule.from.is_empty()).then_some("from")),
    };
    let unknown = rule.unknown.keys().next().map(String::as_str).or(misplaced);
    Parts { name: rule.name.as_deref(), action, peers, ports, unknown }.into_rule(direction, field, problems)
}

fn port(spec: &AdminPort, field: &str, problems: &mut Problems) -> Result<PortMatch, NotUnderstood> {
    let (protocol, first, last) = match (&spec.port_number, &spec.named_port, &spec.port_range) {
        _ if !spec.unknown.is_empty() => return Err(NotUnderstood),
        (Some(port), None, None) => (port.protocol.as_deref(), port.port, port.port),
        (None, None, Some(range)) => (range.protocol.as_deref(), range.start, range.end),
        (None, Some(name), None) if !name.is_empty() => {
            return Ok(PortMatch::Named(name.as_str().into(), None));
        }
        _ => return Err(NotUnderstood),
    };
    let protocol = problems.protocol(protocol, || format!("{field}.protocol")).ok_or(NotUnderstood)?;
    problems.range(protocol, first, last, || field.to_owned()).map(PortMatch::Numbers).ok_or(NotUnderstood)
}
