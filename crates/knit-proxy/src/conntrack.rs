//! Which UDP flows are stale after a change (rules 51, 52).
//!
//! A kernel remembers where it sent a UDP flow, and goes on sending it there as long as packets come, also
//! when the endpoint is gone. So after a change somebody has to look through the flows and delete those that
//! lead nowhere. TCP and SCTP notice by themselves and are never touched.
//!
//! This is the pure part: [`Cleanup`] says what to list, and which of the listed flows to delete, in constant
//! time each. A list that is cut short does no harm: what was not seen now is seen after the next change.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::model::{Family, PerFamily, Protocol};
use crate::view::{Changes, FrontendKind, NodePortMatch, NodeView, PortChange, PortKey, PortView, Target};

/// A UDP flow as connection tracking has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Where the client sent it: the destination of the original direction.
    pub original_destination: SocketAddr,
    /// Who answers: the source of the reply direction.
    pub reply_source: SocketAddr,
}

/// What to list. Flows that match any one of the filters are wanted; all are UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DumpFilter {
    /// The family.
    pub family: Family,
    /// The destination of the original direction, if the kernel can filter by it.
    pub address: Option<IpAddr>,
    /// The destination port of the original direction, likewise.
    pub port: Option<u16>,
}

/// Knows which flows are stale.
#[derive(Debug, Clone, Default)]
pub struct Cleanup {
    /// Frontends with an address, and who may answer there.
    addresses: HashMap<SocketAddr, Arc<HashSet<SocketAddr>>>,
    /// Node ports, and who may answer there.
    node_ports: PerFamily<HashMap<u16, Arc<HashSet<SocketAddr>>>>,
    /// Where node ports answer.
    node_addresses: PerFamily<NodePortMatch>,
}

impl Cleanup {
    /// After changes: if one of them is about a UDP port that some flow may lead to in vain now, every UDP
    /// port, and what the changed ones had before. Nothing otherwise.
    ///
    /// Every one, because a flow that came up while an earlier change was made may have been missed then, and
    /// one that never ends by itself would stay.
    #[must_use]
    pub fn after(changes: &Changes, state: &NodeView) -> Self {
        let matters = |change: &&PortChange| {
            let (old, new) = (change.old.as_ref(), change.new.as_ref());
            let same = old
                .zip(new)
                .is_some_and(|(old, new)| old.serving == new.serving && old.frontends == new.frontends);
            change.key.protocol == Protocol::Udp && !same
        };
        let mut changed = changes.ports.iter().filter(matters).peekable();
        if changed.peek().is_none() {
            return Self::default();
        }
        let mut cleanup = Self::full(state);
        for change in changed {
            // What the port had and nobody has now has no endpoints.
            for place in change.old.iter().flat_map(|old| places(old)).filter(|p| p.ip().is_some()) {
                cleanup.add(change.key.family, place, &Arc::default(), true);
            }
        }
        cleanup
    }

    /// After a full sync: every UDP port.
    #[must_use]
    pub fn full(state: &NodeView) -> Self {
        let mut cleanup = Self::at(state);
        for (key, view) in state.ports.iter().filter(|(key, _)| key.protocol == Protocol::Udp) {
            cleanup.port(key, view);
        }
        cleanup
    }

    fn at(state: &NodeView) -> Self {
        Self { node_addresses: state.node.node_ports.clone(), ..Self::default() }
    }

    fn port(&mut self, key: &PortKey, view: &PortView) {
        let serving: Arc<HashSet<SocketAddr>> = Arc::new(view.serving.iter().map(Target::socket).collect());
        for place in places(view) {
            self.add(key.family, place, &serving, false);
        }
    }

    fn add(
        &mut self,
        family: Family,
        place: FlowDestination,
        serving: &Arc<HashSet<SocketAddr>>,
        keep: bool,
    ) {
        match place {
            FlowDestination::Address(address) if keep => {
                self.addresses.entry(address).or_insert_with(|| Arc::clone(serving));
            }
            FlowDestination::Address(address) => {
                self.addresses.insert(address, Arc::clone(serving));
            }
            // A node port is matched by its number, and other traffic may have the same: where nobody serves
            // it there is nothing to tell the two apart, and nothing is deleted (rule 51).
            FlowDestination::NodePort(port) if !serving.is_empty() => {
                self.node_ports.get_mut(family).insert(port, Arc::clone(serving));
            }
            FlowDestination::NodePort(_) => {}
        }
    }

    /// Whether there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty() && self.node_ports.v4.is_empty() && self.node_ports.v6.is_empty()
    }

    /// What to list. Up to `max` places are named one by one, which spares the kernel copying all flows;
    /// beyond that there is one filter for each family.
    #[must_use]
    pub fn filters(&self, max: usize) -> Vec<DumpFilter> {
        let mut filters: Vec<DumpFilter> = (self.addresses.keys())
            .map(|a| DumpFilter { family: Family::of(a.ip()), address: Some(a.ip()), port: Some(a.port()) })
            .chain(Family::ALL.into_iter().flat_map(|family| {
                let ports = self.node_ports.get(family).keys();
                ports.map(move |port| DumpFilter { family, address: None, port: Some(*port) })
            }))
            .collect();
        if filters.len() > max {
            filters.iter_mut().for_each(|f| (f.address, f.port) = (None, None));
        }
        filters.sort_unstable();
        filters.dedup();
        filters
    }

    /// Whether a flow leads to nobody who answers for the place it was sent to. Policies do not count, nor
    /// whether the endpoint is terminating: who can answer may go on.
    #[must_use]
    pub fn is_stale(&self, flow: &Flow) -> bool {
        let to = flow.original_destination;
        if let Some(serving) = self.addresses.get(&to) {
            return !serving.contains(&flow.reply_source);
        }
        let family = Family::of(to.ip());
        let here = match self.node_addresses.get(family) {
            NodePortMatch::AnyLocal => true,
            NodePortMatch::Only(addresses) => addresses.contains(&to.ip()),
        };
        here && self.node_ports.get(family).get(&to.port()).is_some_and(|s| !s.contains(&flow.reply_source))
    }

    /// The flows to delete.
    pub fn plan<'a>(&'a self, flows: impl IntoIterator<Item = Flow> + 'a) -> impl Iterator<Item = Flow> + 'a {
        flows.into_iter().filter(|flow| self.is_stale(flow))
    }
}

/// Where clients send to.
#[derive(Clone, Copy)]
enum FlowDestination {
    Address(SocketAddr),
    NodePort(u16),
}

impl FlowDestination {
    fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Address(address) => Some(address.ip()),
            Self::NodePort(_) => None,
        }
    }
}

fn places(view: &PortView) -> impl Iterator<Item = FlowDestination> + '_ {
    view.frontends.iter().map(|f| match (f.kind, f.address) {
        (FrontendKind::NodePort, _) | (_, None) => FlowDestination::NodePort(f.port),
        (_, Some(address)) => FlowDestination::Address(SocketAddr::new(address, f.port)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Conditions, Endpoint, EndpointGroup, NodeInfo, Service, ServicePort, TrafficPolicy};
    use crate::view::{View, ViewConfig};

    fn flow(to: &str, by: &str) -> Flow {
        Flow { original_destination: to.parse().unwrap(), reply_source: by.parse().unwrap() }
    }

    fn group(port: u16, endpoints: &[(&str, Conditions)]) -> EndpointGroup {
        let mut group = EndpointGroup::of_addresses("ns/dns-1", "ns/dns", Protocol::Udp, port, &[]);
        group.endpoints =
            endpoints.iter().map(|(a, c)| Endpoint::new(a.parse().unwrap()).on("there").state(*c)).collect();
        group
    }

    fn dns() -> Service {
        let mut service = Service::new("ns/dns")
            .cluster_ip("10.0.0.10".parse().unwrap())
            .add_port(ServicePort::new("", Protocol::Udp, 53).node_port(30053));
        service.external_ips = Box::new(["203.0.113.1".parse().unwrap()]);
        service.load_balancer_ips = Box::new(["203.0.113.2".parse().unwrap()]);
        // Nothing is local: policies would forbid every endpoint, and must not count.
        service.internal_policy = TrafficPolicy::Local;
        service.external_policy = TrafficPolicy::Local;
        service
    }

    fn view() -> View {
        let node = NodeInfo { addresses: vec!["192.0.2.1".parse().unwrap()], ..NodeInfo::new("here") };
        let mut view = View::new(ViewConfig::default(), node);
        view.set_service(dns());
        view.set_group(group(
            5353,
            &[
                ("10.1.0.1", Conditions::READY),
                ("10.1.0.2", Conditions::SERVING_TERMINATING),
                ("10.1.0.3", Conditions::TERMINATING),
            ],
        ));
        view
    }

    #[test]
    fn rule_51_flows_to_endpoints_that_do_not_serve_are_stale() {
        let mut view = view();
        let changes = view.take_changes();
        for cleanup in [Cleanup::after(&changes, view.current()), Cleanup::full(view.current())] {
            for to in ["10.0.0.10:53", "203.0.113.1:53", "203.0.113.2:53", "192.0.2.1:30053"] {
                assert!(!cleanup.is_stale(&flow(to, "10.1.0.1:5353")), "{to}: ready");
                assert!(!cleanup.is_stale(&flow(to, "10.1.0.2:5353")), "{to}: terminating, but serving");
                assert!(cleanup.is_stale(&flow(to, "10.1.0.3:5353")), "{to}: not serving");
                assert!(cleanup.is_stale(&flow(to, "10.1.0.9:5353")), "{to}: gone");
                // Rule 52: the port counts too.
                assert!(cleanup.is_stale(&flow(to, "10.1.0.1:5354")), "{to}: another port");
            }
            // A flow that was there before the service, and was not translated.
            assert!(cleanup.is_stale(&flow("10.0.0.10:53", "10.0.0.10:53")));
            // Not ours: another port, another address, and the number of a node port elsewhere.
            assert!(!cleanup.is_stale(&flow("10.0.0.10:54", "10.1.0.9:5353")));
            assert!(!cleanup.is_stale(&flow("10.0.0.11:53", "10.1.0.9:5353")));
            assert!(!cleanup.is_stale(&flow("198.51.100.7:30053", "198.51.100.7:30053")));
        }
    }

    #[test]
    fn rule_51_without_serving_endpoints_all_flows_go_but_those_of_node_ports() {
        let mut view = view();
        view.take_changes();
        view.set_group(group(5353, &[("10.1.0.1", Conditions::NOT_READY)]));
        let changes = view.take_changes();
        let cleanup = Cleanup::after(&changes, view.current());
        assert!(cleanup.is_stale(&flow("10.0.0.10:53", "10.1.0.1:5353")));
        assert!(!cleanup.is_stale(&flow("192.0.2.1:30053", "10.1.0.1:5353")));
    }

    #[test]
    fn a_deleted_service_leaves_no_flows_unless_another_has_its_address() {
        let mut view = view();
        view.take_changes();
        view.delete_service(&"ns/dns".into());
        let changes = view.take_changes();
        let cleanup = Cleanup::after(&changes, view.current());
        assert!(cleanup.is_stale(&flow("10.0.0.10:53", "10.1.0.1:5353")));

        let mut view = self::view();
        view.take_changes();
        view.delete_service(&"ns/dns".into());
        view.set_service(Service { name: "ns/other".into(), ..dns() });
        view.set_group(EndpointGroup {
            service: "ns/other".into(),
            ..group(5353, &[("10.1.0.1", Conditions::READY)])
        });
        let changes = view.take_changes();
        let cleanup = Cleanup::after(&changes, view.current());
        assert!(!cleanup.is_stale(&flow("10.0.0.10:53", "10.1.0.1:5353")));
        assert!(cleanup.is_stale(&flow("10.0.0.10:53", "10.1.0.2:5353")));
    }

    #[test]
    fn rules_52_63_other_protocols_are_never_cleaned() {
        for protocol in [Protocol::Tcp, Protocol::Sctp] {
            let mut view = View::new(ViewConfig::default(), NodeInfo::new("here"));
            view.set_service(
                Service::new("ns/web").cluster_ip("10.0.0.1".parse().unwrap()).port(protocol, 80),
            );
            let changes = view.take_changes();
            assert!(Cleanup::after(&changes, view.current()).is_empty());
            assert!(Cleanup::full(view.current()).is_empty());
        }
    }

    #[test]
    fn a_change_that_does_not_matter_to_flows_looks_for_nothing() {
        let mut view = view();
        view.take_changes();
        view.set_service(Service { affinity: Some(crate::model::Affinity::default()), ..dns() });
        let changes = view.take_changes();
        assert_eq!(changes.ports.len(), 1);
        assert!(Cleanup::after(&changes, view.current()).is_empty());
    }

    #[test]
    fn rule_51_a_change_of_one_udp_port_finds_what_an_earlier_one_missed() {
        let mut view = view();
        let other = |addresses: &[&str]| {
            let addresses: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
            EndpointGroup::of_addresses("ns/statsd-1", "ns/statsd", Protocol::Udp, 8125, &addresses)
        };
        let ip = "10.0.0.11".parse().unwrap();
        view.set_service(Service::new("ns/statsd").cluster_ip(ip).port(Protocol::Udp, 8125));
        view.set_group(other(&["10.1.0.7"]));
        view.take_changes();
        // A flow to an endpoint of dns that was gone before was not seen then; only statsd changes now.
        view.set_group(other(&["10.1.0.8"]));
        let changes = view.take_changes();
        let cleanup = Cleanup::after(&changes, view.current());
        assert!(cleanup.is_stale(&flow("10.0.0.11:8125", "10.1.0.7:8125")));
        assert!(cleanup.is_stale(&flow("10.0.0.10:53", "10.1.0.9:5353")));
        assert!(!cleanup.is_stale(&flow("10.0.0.10:53", "10.1.0.1:5353")));
    }

    #[test]
    fn filters_name_few_places_or_all() {
        let mut view = view();
        view.take_changes();
        let cleanup = Cleanup::full(view.current());
        assert_eq!(cleanup.filters(16).len(), 4);
        let all = DumpFilter { family: Family::V4, address: None, port: None };
        assert_eq!(cleanup.filters(3), [all]);
    }

    #[test]
    fn rule_52_each_flow_is_looked_at_once() {
        let mut view = view();
        view.take_changes();
        let cleanup = Cleanup::full(view.current());
        let mut looked = 0;
        let flows = (0..100_000u32).map(|n| {
            looked += 1;
            flow("10.0.0.10:53", if n % 1000 == 0 { "10.1.0.9:5353" } else { "10.1.0.1:5353" })
        });
        assert_eq!(cleanup.plan(flows).count(), 100);
        assert_eq!(looked, 100_000);
    }
}
