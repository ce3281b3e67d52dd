//! Which endpoints serve a service port: merging groups, topology hints, policies, terminating endpoints.
//!
//! First a [`Decision`] is made about the port as a whole, then every endpoint is judged by it. What
//! [`explain`](crate::explain) tells is the same decision and the same judgements, so that it cannot be wrong
//! about what is served.

use std::net::IpAddr;
use std::sync::Arc;

use super::output::Target;
use crate::model::{Conditions, Endpoint, EndpointGroup, Family, GroupName, NodeInfo, Protocol};

/// An endpoint of one service port, after merging.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Where it is, and whether that is on this node.
    pub target: Target,
    /// The endpoint as the group has it.
    pub endpoint: &'a Endpoint,
    /// The group it comes from.
    pub group: &'a GroupName,
}

/// What a service port needs endpoints for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Uses {
    /// Some traffic may go to any endpoint. With an external policy of Local too: pods and the node take the
    /// short way (rules 34, 39).
    pub cluster: bool,
    /// Some traffic may only go to local endpoints.
    pub local: bool,
}

/// How the endpoints of a service port were chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Decision {
    /// What topology hints did to the cluster scope (rule 35).
    pub topology: TopologyHints,
    /// Which endpoints the cluster scope took (rule 30).
    pub cluster: Pool,
    /// Which endpoints the local scope took (rule 30).
    pub local: Pool,
    /// Some endpoint somewhere can answer. If not, all frontends reject (rule 33).
    pub any: bool,
}

/// What topology hints did (rule 35).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TopologyHints {
    /// Only endpoints with a hint for this node.
    SameNode,
    /// Only endpoints with a hint for this node's zone.
    SameZone,
    /// Nothing: there are no ready endpoints, or none has hints.
    NoHints,
    /// Nothing, since not every ready endpoint has a hint.
    HintsMissing,
    /// Nothing, since there are hints, but none for this node or its zone.
    HintsElsewhere,
    /// Nothing, since there are zone hints, and the zone of this node is unknown.
    ZoneUnknown,
}

/// Which endpoints a scope took (rule 30).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pool {
    /// The service has no traffic for this scope.
    Unused,
    /// The ready ones.
    Ready,
    /// None was ready, so those that are terminating and still answer.
    Terminating,
    /// There is none that could be used.
    Empty,
}

/// Why one endpoint is in a scope, or is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Judgement {
    /// In: it is ready.
    Ready,
    /// In: it is terminating, but answers, and no other is ready.
    Terminating,
    /// Out: the service has no traffic for this scope.
    ScopeUnused,
    /// Out: it does not answer.
    NotServing,
    /// Out: it is not ready (and not terminating, so it is no fallback either).
    NotReady,
    /// Out: it is terminating, and others are ready.
    TerminatingOthersReady,
    /// Out: it runs on another node.
    NotLocal,
    /// Out: its hints name other nodes, and there are endpoints for this one.
    HintedToOtherNode,
    /// Out: its hints name other zones, and there are endpoints for this one.
    HintedToOtherZone,
}

impl Judgement {
    /// Whether the endpoint is in the scope.
    #[must_use]
    pub fn is_in(self) -> bool {
        matches!(self, Self::Ready | Self::Terminating)
    }
}

/// All endpoints of one service port in one family, of all its groups, sorted by address and port.
///
/// Ports match by name and protocol, and the number is the group's (rule 11). Where two groups have one
/// address and port, the one that is not terminating counts (rule 9): a pod got the address of one that is
/// still going away.
#[must_use]
pub fn merge<'a>(
    groups: impl Iterator<Item = &'a EndpointGroup>,
    family: Family,
    port: &str,
    protocol: Protocol,
    node: &str,
) -> Vec<Candidate<'a>> {
    let mut found = Vec::new();
    for group in groups.filter(|g| g.family == family) {
        for group_port in group.ports.iter().filter(|p| p.protocol == protocol && *p.name == *port) {
            found.extend(group.endpoints.iter().map(|endpoint| Candidate {
                target: Target {
                    address: endpoint.address,
                    port: group_port.number,
                    local: endpoint.node.as_deref() == Some(node),
                },
                endpoint,
                group: &group.name,
            }));
        }
    }
    // The best of equals first; the group's name only so that the outcome does not depend on the order of
    // events.
    found.sort_by(|a, b| {
        let rank = |c: &Candidate<'a>| {
            let Conditions { ready, serving, terminating } = c.endpoint.conditions;
            (terminating, !ready, !serving, !c.target.local)
        };
        let place = |c: &Candidate<'a>| (c.target.address, c.target.port);
        place(a).cmp(&place(b)).then_with(|| rank(a).cmp(&rank(b))).then_with(|| a.group.cmp(b.group))
    });
    found.dedup_by_key(|c| (c.target.address, c.target.port));
    found
}

impl Decision {
    /// Decides how the endpoints of a port are chosen on a node.
    #[must_use]
    pub fn make(candidates: &[Candidate<'_>], uses: Uses, node: &NodeInfo) -> Self {
        let pool = |used: bool, local_only: bool| {
            if !used {
                return Pool::Unused;
            }
            let mut terminating = false;
            for c in candidates.iter().filter(|c| !local_only || c.target.local) {
                if c.endpoint.conditions.ready {
                    return Pool::Ready;
                }
                terminating |= is_fallback(c.endpoint.conditions);
            }
            if terminating { Pool::Terminating } else { Pool::Empty }
        };
        Self {
            topology: if uses.cluster { topology(candidates, node) } else { TopologyHints::NoHints },
            cluster: pool(uses.cluster, false),
            local: pool(uses.local, true),
            any: candidates.iter().any(|c| c.endpoint.conditions.ready || is_fallback(c.endpoint.conditions)),
        }
    }

    /// Whether an endpoint is in the cluster scope, and why.
    #[must_use]
    pub fn judge_cluster(&self, candidate: &Candidate<'_>, node: &NodeInfo) -> Judgement {
        let judgement = judge(self.cluster, candidate.endpoint.conditions);
        if judgement != Judgement::Ready {
            return judgement;
        }
        match self.topology {
            TopologyHints::SameNode if !hints_node(candidate.endpoint, node) => Judgement::HintedToOtherNode,
            TopologyHints::SameZone if !hints_zone(candidate.endpoint, node) => Judgement::HintedToOtherZone,
            _ => judgement,
        }
    }

    /// Whether an endpoint is in the local scope, and why. Hints do not count here (rule 35).
    #[must_use]
    pub fn judge_local(&self, candidate: &Candidate<'_>) -> Judgement {
        match self.local {
            Pool::Unused => Judgement::ScopeUnused,
            _ if !candidate.target.local => Judgement::NotLocal,
            pool => judge(pool, candidate.endpoint.conditions),
        }
    }

    /// The endpoints of both scopes.
    #[must_use]
    pub fn sets(&self, candidates: &[Candidate<'_>], node: &NodeInfo) -> (Arc<[Target]>, Arc<[Target]>) {
        let cluster: Arc<[Target]> = collect(candidates, |c| self.judge_cluster(c, node).is_in());
        let local: Arc<[Target]> = collect(candidates, |c| self.judge_local(c).is_in());
        if cluster == local {
            // One list for both, which is what a service has whose endpoints are all here.
            return (Arc::clone(&cluster), cluster);
        }
        (cluster, local)
    }
}

fn collect(candidates: &[Candidate<'_>], keep: impl Fn(&Candidate<'_>) -> bool) -> Arc<[Target]> {
    candidates.iter().filter(|c| keep(c)).map(|c| c.target).collect()
}

/// The addresses of endpoints that can answer, whatever the policies say (rule 51).
pub(super) fn serving(candidates: &[Candidate<'_>]) -> Arc<[Target]> {
    collect(candidates, |c| c.endpoint.conditions.serving)
}

/// The addresses of local ready endpoints (rule 54).
pub(super) fn local_ready<'a>(candidates: &'a [Candidate<'_>]) -> impl Iterator<Item = IpAddr> + 'a {
    candidates.iter().filter(|c| c.target.local && c.endpoint.conditions.ready).map(|c| c.target.address)
}

/// Terminating, but still answering: to be used where nothing is ready.
fn is_fallback(conditions: Conditions) -> bool {
    conditions.serving && conditions.terminating
}

fn judge(pool: Pool, conditions: Conditions) -> Judgement {
    match (pool, conditions) {
        (Pool::Unused, _) => Judgement::ScopeUnused,
        (Pool::Ready, c) if c.ready => Judgement::Ready,
        (Pool::Terminating, c) if is_fallback(c) => Judgement::Terminating,
        (Pool::Ready, c) if is_fallback(c) => Judgement::TerminatingOthersReady,
        (_, c) if !c.serving => Judgement::NotServing,
        _ => Judgement::NotReady,
    }
}

fn hints_node(endpoint: &Endpoint, node: &NodeInfo) -> bool {
    endpoint.hints.as_ref().is_some_and(|h| h.nodes.contains(&node.name))
}

fn hints_zone(endpoint: &Endpoint, node: &NodeInfo) -> bool {
    let Some(zone) = &node.zone else { return false };
    endpoint.hints.as_ref().is_some_and(|h| h.zones.contains(zone))
}

/// Hints count only where every ready endpoint has them and one is for us: otherwise a service would lose
/// endpoints to hints that are half written or out of date (rule 35).
fn topology(candidates: &[Candidate<'_>], node: &NodeInfo) -> TopologyHints {
    let ready = || candidates.iter().map(|c| c.endpoint).filter(|e| e.conditions.ready);
    let has_nodes = |e: &Endpoint| e.hints.as_ref().is_some_and(|h| !h.nodes.is_empty());
    let has_zones = |e: &Endpoint| e.hints.as_ref().is_some_and(|h| !h.zones.is_empty());
    if !ready().any(|e| has_nodes(e) || has_zones(e)) {
        return TopologyHints::NoHints;
    }
    let all_nodes = ready().all(has_nodes);
    if all_nodes && ready().any(|e| hints_node(e, node)) {
        return TopologyHints::SameNode;
    }
    let all_zones = ready().all(has_zones);
    if all_zones && node.zone.is_none() {
        return TopologyHints::ZoneUnknown;
    }
    if all_zones && ready().any(|e| hints_zone(e, node)) {
        return TopologyHints::SameZone;
    }
    if all_nodes || all_zones { TopologyHints::HintsElsewhere } else { TopologyHints::HintsMissing }
}
