//! Why a service is served the way it is: which rule gave which endpoints.
//!
//! Nothing is decided here. An [`Explanation`] holds the decisions and judgements that the view itself made,
//! in words.

use std::fmt;
use std::net::IpAddr;

use crate::model::{Conditions, Family, GroupName, NetworkName, Problem, ServiceName, TrafficPolicy};
use crate::view::{
    Action, Decision, Frontend, FrontendKind, HealthCheck, Judgement, Masquerade, Pool, PortKey, Route,
    Scope, Sources, Target, TopologyHints, View,
};

/// Everything about one service on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The service.
    pub service: ServiceName,
    /// The Network it is in.
    pub network: NetworkName,
    /// The policy for traffic to its cluster IPs.
    pub internal_policy: TrafficPolicy,
    /// The policy for all other traffic.
    pub external_policy: TrafficPolicy,
    /// How long clients stay with their endpoint, if they do.
    pub affinity_seconds: Option<u32>,
    /// The port on which this node says how many ready endpoints it has, and how many those are.
    pub health_check: Option<HealthCheck>,
    /// Addresses of its load balancer that are not served here, because that makes connections of its own.
    pub proxied_ips: Vec<IpAddr>,
    /// Its ports in each family.
    pub ports: Vec<PortExplanation>,
    /// Endpoint groups of a family that it has no cluster IP of.
    pub other_family: Vec<(GroupName, Family)>,
    /// What of it could not be served.
    pub problems: Vec<Problem>,
}

/// Everything about one port in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortExplanation {
    /// Which one.
    pub key: PortKey,
    /// How its endpoints were chosen.
    pub decision: Decision,
    /// Where clients connect to.
    pub frontends: Vec<Frontend>,
    /// Every endpoint, also those that are not used.
    pub endpoints: Vec<EndpointExplanation>,
}

/// Why an endpoint is used, or is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointExplanation {
    /// The endpoint.
    pub target: Target,
    /// The group it comes from.
    pub group: GroupName,
    /// In which state it is.
    pub conditions: Conditions,
    /// Whether it serves traffic for all of the cluster's endpoints.
    pub cluster: Judgement,
    /// Whether it serves traffic for this node's endpoints.
    pub local: Judgement,
}

/// Explains a service; `None` if there is none of this name. The view must have no changes to take.
#[must_use]
pub fn explain(view: &View, service: &str) -> Option<Explanation> {
    let found = view.service(service)?;
    let mut ports = Vec::new();
    for family in Family::ALL {
        for port in &found.ports {
            let key = PortKey {
                service: found.name.clone(),
                port: std::sync::Arc::clone(&port.name),
                protocol: port.protocol,
                family,
            };
            let Some(current) = view.current().ports.get(&key) else { continue };
            let (candidates, decision) = view.candidates(service, port, family);
            let endpoints = candidates.iter().map(|c| EndpointExplanation {
                target: c.target,
                group: c.group.clone(),
                conditions: c.endpoint.conditions,
                cluster: decision.judge_cluster(c, view.node()),
                local: decision.judge_local(c),
            });
            let endpoints = endpoints.collect();
            ports.push(PortExplanation { key, decision, frontends: current.frontends.to_vec(), endpoints });
        }
    }
    Some(Explanation {
        service: found.name.clone(),
        network: found.network.clone(),
        internal_policy: found.internal_policy,
        external_policy: found.external_policy,
        affinity_seconds: found.affinity.map(|a| a.timeout_seconds),
        health_check: view.current().health_checks.get(&found.name).cloned(),
        proxied_ips: found.proxied_ips.to_vec(),
        ports,
        other_family: view
            .groups(service)
            .filter(|group| match group.family {
                Family::V4 => found.cluster_ip_v4.is_none(),
                Family::V6 => found.cluster_ip_v6.is_none(),
            })
            .map(|group| (group.name.clone(), group.family))
            .collect(),
        problems: view.problems().filter(|p| *p.object.name == *service).cloned().collect(),
    })
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Service {} in Network {}", self.service, self.network)?;
        writeln!(
            f,
            "  internal traffic policy {:?}, external {:?}",
            self.internal_policy, self.external_policy
        )?;
        if let Some(seconds) = self.affinity_seconds {
            writeln!(f, "  a client stays with its endpoint for {seconds} s (rule 40)")?;
        }
        if let Some(check) = &self.health_check {
            let ready = Family::ALL.map(|family| format!("{} {family}", check.local_ready.get(family)));
            writeln!(
                f,
                "  health check on port {}: ready endpoints here: {} (rule 54)",
                check.port,
                ready.join(", ")
            )?;
        }
        for address in &self.proxied_ips {
            writeln!(
                f,
                "  load-balancer IP {address} is not served here: its load balancer acts as a \
                proxy, ipMode is not VIP (rule 22)"
            )?;
        }
        for (group, family) in &self.other_family {
            writeln!(
                f,
                "  endpoints of {group} are not used: the Service has no {family} cluster IP (rule 18)"
            )?;
        }
        for problem in &self.problems {
            writeln!(f, "  problem: {}: {}", problem.field, problem.message)?;
        }
        if self.ports.is_empty() {
            writeln!(
                f,
                "  nothing is served: no port, or no cluster IP of a family that is served (rule 18)"
            )?;
        }
        self.ports.iter().try_for_each(|port| write!(f, "{port}"))
    }
}

impl fmt::Display for PortExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.key.port.is_empty() { "(unnamed)" } else { &*self.key.port };
        writeln!(f, "port {name} {} {}", self.key.protocol, self.key.family)?;
        for frontend in &self.frontends {
            writeln!(
                f,
                "  {frontend} -> {}{}",
                frontend.route,
                why(frontend.kind, frontend.route, self.decision)
            )?;
            let inside = [("this node's pods", frontend.from_pods), ("the node itself", frontend.from_node)];
            for (who, route) in inside.iter().filter_map(|(who, route)| Some((who, (*route)?))) {
                writeln!(f, "    from {who} -> {route} (rule 34)")?;
            }
            if let Sources::Only { ranges, and_itself } = &frontend.sources {
                let list: Vec<String> = ranges.iter().map(ToString::to_string).collect();
                let list = if list.is_empty() { "nobody".to_owned() } else { list.join(", ") };
                let itself = if *and_itself { ", and from its own address (rule 44)" } else { "" };
                writeln!(f, "    only from {list} (rule 43){itself}")?;
            }
        }
        writeln!(f, "  cluster endpoints: {}; {}", self.decision.cluster, self.decision.topology)?;
        writeln!(f, "  local endpoints: {}", self.decision.local)?;
        for e in &self.endpoints {
            let here = if e.target.local { ", here" } else { "" };
            writeln!(f, "  endpoint {} of {}{here}", e.target, e.group)?;
            for (scope, judgement) in [("cluster", e.cluster), ("local", e.local)] {
                if judgement != Judgement::ScopeUnused {
                    writeln!(f, "    {scope}: {judgement}")?;
                }
            }
        }
        if self.endpoints.is_empty() {
            writeln!(f, "  no endpoint group has an endpoint for this port (rule 11: by name and protocol)")?;
        }
        Ok(())
    }
}

/// Why a frontend does what it does.
fn why(kind: FrontendKind, route: Route, decision: Decision) -> &'static str {
    match (route.action, kind) {
        (Action::Reject, _) => " (rule 33: no endpoint anywhere is serving)",
        (Action::Drop, FrontendKind::ClusterIp) => " (rule 31: none is on this node, others are elsewhere)",
        (Action::Drop, _) => " (rule 32: none is on this node, others are elsewhere)",
        (Action::Endpoints(Scope::Local), FrontendKind::ClusterIp) => " (rule 31)",
        (Action::Endpoints(Scope::Local), _) => " (rule 32)",
        (Action::Endpoints(Scope::Cluster), _) => match (decision.cluster, route.masquerade) {
            (Pool::Terminating, _) => " (rule 30)",
            (_, Masquerade::All) if kind != FrontendKind::ClusterIp => " (rule 46)",
            (_, Masquerade::All | Masquerade::NotPods) => " (rule 47)",
            (_, Masquerade::HairpinOnly) => "",
        },
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unused => "not needed (rule 39)",
            Self::Ready => "the ready ones (rule 30)",
            Self::Terminating => "none is ready, so those that are terminating but still serving (rule 30)",
            Self::Empty => "none",
        })
    }
}

impl fmt::Display for TopologyHints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SameNode => "only those hinted to this node (rule 35)",
            Self::SameZone => "only those hinted to this node's zone (rule 35)",
            Self::NoHints => "no topology hints",
            Self::HintsMissing => "topology hints not used: not every ready endpoint has one (rule 35)",
            Self::HintsElsewhere => "topology hints not used: none is for this node or its zone (rule 35)",
            Self::ZoneUnknown => "topology hints not used: this node's zone is not known (rule 35)",
        })
    }
}

impl fmt::Display for Judgement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "used: it is ready",
            Self::Terminating => "used: it is terminating but still serving, and no other is ready (rule 30)",
            Self::ScopeUnused => "not used: no traffic needs this",
            Self::NotServing => "not used: it is not serving (rule 30)",
            Self::NotReady => "not used: it is not ready (rule 30)",
            Self::TerminatingOthersReady => "not used: it is terminating, and others are ready (rule 30)",
            Self::NotLocal => "not used: it is on another node",
            Self::HintedToOtherNode => "not used: hinted to another node (rule 35)",
            Self::HintedToOtherZone => "not used: hinted to another zone (rule 35)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Endpoint, EndpointGroup, NodeInfo, Protocol, Service, ServicePort};
    use crate::view::ViewConfig;

    fn view() -> View {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut service = Service::new("shop/web")
            .cluster_ip(ip("10.0.0.1"))
            .add_port(ServicePort::new("http", Protocol::Tcp, 80).node_port(30080));
        service.external_policy = TrafficPolicy::Local;
        let mut group = EndpointGroup::of_addresses("shop/web-1", "shop/web", Protocol::Tcp, 8080, &[]);
        group.ports[0].name = "http".into();
        group.endpoints = Box::new([
            Endpoint::new(ip("10.1.0.1")).on("here").hints(&[], &["z2"]),
            Endpoint::new(ip("10.1.0.2")).on("there").hints(&[], &["z1"]),
            Endpoint::new(ip("10.1.0.3")).on("there").state(Conditions::SERVING_TERMINATING),
        ]);
        let mut view =
            View::new(ViewConfig::default(), NodeInfo { zone: Some("z1".into()), ..NodeInfo::new("here") });
        view.set_service(service);
        view.set_group(group);
        view.take_changes();
        view
    }

    #[test]
    fn it_tells_what_the_view_did() {
        let view = view();
        let explanation = explain(&view, "shop/web").unwrap();
        let expected = "\
Service shop/web in Network default
  internal traffic policy Cluster, external Local
port http TCP IPv4
  cluster IP 10.0.0.1:80 -> cluster endpoints
  node port 30080 -> local endpoints (rule 32)
    from the node itself -> cluster endpoints, masqueraded (rule 34)
  cluster endpoints: the ready ones (rule 30); only those hinted to this node's zone (rule 35)
  local endpoints: the ready ones (rule 30)
  endpoint 10.1.0.1:8080 of shop/web-1, here
    cluster: not used: hinted to another zone (rule 35)
    local: used: it is ready
  endpoint 10.1.0.2:8080 of shop/web-1
    cluster: used: it is ready
    local: not used: it is on another node
  endpoint 10.1.0.3:8080 of shop/web-1
    cluster: not used: it is terminating, and others are ready (rule 30)
    local: not used: it is on another node
";
        assert_eq!(explanation.to_string(), expected);
        // What it calls used is what the backend gets.
        let port = view.current().ports.values().next().unwrap();
        let used = |judge: fn(&EndpointExplanation) -> Judgement| -> Vec<Target> {
            explanation.ports[0].endpoints.iter().filter(|e| judge(e).is_in()).map(|e| e.target).collect()
        };
        assert_eq!(used(|e| e.cluster), *port.cluster);
        assert_eq!(used(|e| e.local), *port.local);
    }

    #[test]
    fn what_is_left_out_is_said_too() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut service = Service::new("shop/web").cluster_ip(ip("10.0.0.1")).port(Protocol::Tcp, 80);
        service.external_policy = TrafficPolicy::Local;
        service.health_check_port = std::num::NonZeroU16::new(32000);
        service.proxied_ips = Box::new([ip("198.51.100.7")]);
        let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
        view.set_service(service);
        let addresses = [ip("fd00::1")];
        let group = EndpointGroup::of_addresses("shop/web-6", "shop/web", Protocol::Tcp, 8080, &addresses);
        view.set_group(group);
        view.take_changes();
        let text = explain(&view, "shop/web").unwrap().to_string();
        for line in [
            "  health check on port 32000: ready endpoints here: 0 IPv4, 0 IPv6 (rule 54)",
            "  load-balancer IP 198.51.100.7 is not served here: its load balancer acts as a proxy, \
            ipMode is not VIP (rule 22)",
            "  endpoints of shop/web-6 are not used: the Service has no IPv6 cluster IP (rule 18)",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\nin\n{text}");
        }
    }

    #[test]
    fn a_service_that_is_not_there_is_not_explained() {
        assert_eq!(explain(&view(), "shop/none"), None);
    }
}
