//! Whether one rule matches one packet.

use std::net::IpAddr;

use super::RuleOutcome;
use crate::cluster::AddressOwner;
use crate::model::{Action, Direction, KnownNamespace, Peer, Pod, PortMatch, Rule, Traffic};

/// The other side of a connection, seen from the pod whose policies are asked.
pub(super) struct Remote<'a> {
    pub(super) address: IpAddr,
    pub(super) owner: AddressOwner,
    /// The namespace of the pod that it is.
    pub(super) namespace: Option<KnownNamespace<'a>>,
    /// It is that pod itself, through a Service (rule 28).
    pub(super) itself: bool,
}

pub(super) fn outcome(
    rule: &Rule,
    direction: Direction,
    subject: &Pod,
    remote: &Remote<'_>,
    traffic: Traffic,
) -> RuleOutcome {
    let (mut anyone, mut as_pod) = (rule.peers.is_none(), rule.peers.is_none());
    for peer in rule.peers.iter().flatten() {
        if matches_peer(peer, remote, rule.action) {
            anyone = true;
            as_pod |= matches!(peer, Peer::Pods(_));
        }
    }
    if !anyone {
        return RuleOutcome::NoPeer;
    }
    let Some(ports) = &rule.ports else { return RuleOutcome::Matched };
    let fits = |port: &PortMatch| match port {
        PortMatch::Numbers(numbers) => numbers.contains(traffic),
        PortMatch::Named(name, protocol) => {
            // The name means what the destination says, and only a pod says something (rule 21).
            let destination = match (direction, &remote.owner) {
                (Direction::Ingress, _) => Some(subject),
                (Direction::Egress, AddressOwner::Pod(pod)) if as_pod => Some(&**pod),
                (Direction::Egress, _) => None,
            };
            destination
                .is_some_and(|pod| pod.named(name, *protocol).any(|(p, n)| Traffic::Port(p, n) == traffic))
        }
    };
    if ports.iter().any(fits) { RuleOutcome::Matched } else { RuleOutcome::NoPort }
}

fn matches_peer(peer: &Peer, remote: &Remote<'_>, action: Action) -> bool {
    match (peer, &remote.owner) {
        (Peer::Addresses(ranges), _) => ranges.contains(remote.address),
        (Peer::Pods(pods), AddressOwner::Pod(pod)) => {
            remote.namespace.as_ref().is_some_and(|namespace| pods.matches_peer(namespace, pod, action))
        }
        (Peer::Nodes(selector), AddressOwner::Node(node)) => selector.matches(&node.labels),
        (Peer::Pods(_) | Peer::Nodes(_), _) => false,
    }
}
