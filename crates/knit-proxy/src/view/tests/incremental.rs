//! The view after any events is the view of the state they lead to, and work follows the change.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::model::{Conditions, NetworkName, TrafficPolicy};

#[derive(Debug, Clone)]
enum Step {
    Service(Box<Service>),
    NoService(u8),
    Group(EndpointGroup),
    NoGroup(u8),
    Zone(Option<u8>),
    Exempt(Vec<IpAddr>),
    RelistServices(Vec<Service>),
    RelistGroups(Vec<EndpointGroup>),
    Take,
}

fn service_name(n: u8) -> String {
    format!("ns/s{n}")
}

fn a_service() -> impl Strategy<Value = Service> {
    let policy = || prop_oneof![Just(TrafficPolicy::Cluster), Just(TrafficPolicy::Local)];
    (
        0u8..4,
        0u64..3,
        (1u8..6, any::<bool>(), 0u8..3, 0u8..3),
        policy(),
        policy(),
        any::<bool>(),
        any::<bool>(),
        0u8..8,
    )
        .prop_map(|(n, created, (vip, v6, ext, lb), internal, external, udp, node_port, network)| {
            let protocol = if udp { Protocol::Udp } else { Protocol::Tcp };
            let mut port = ServicePort::new("p", protocol, 80);
            if node_port {
                port = port.node_port(30000);
            }
            let mut service = Service::new(&*service_name(n))
                .cluster_ip(ip(&format!("10.0.0.{vip}")))
                .add_port(port)
                .add_port(ServicePort::new("q", Protocol::Tcp, 81));
            if v6 {
                service = service.cluster_ip(ip(&format!("fd00::{vip}")));
            }
            if network == 0 {
                service.network = NetworkName::from("blue");
            }
            service.created = created;
            // Few addresses, so that services want the same, some of them cluster IPs of others.
            service.external_ips = (0..ext).map(|i| ip(&format!("10.0.0.{}", 5 + i))).collect();
            service.load_balancer_ips = (0..lb).map(|i| ip(&format!("10.0.0.{}", 6 + i))).collect();
            service.internal_policy = internal;
            service.external_policy = external;
            service.health_check_port = std::num::NonZeroU16::new(u16::from(ext));
            service
        })
}

fn a_group() -> impl Strategy<Value = EndpointGroup> {
    let endpoint = (1u8..6, 0u8..4, any::<bool>(), 0u8..3).prop_map(|(n, state, local, hint)| {
        let state = [
            Conditions::READY,
            Conditions::SERVING_TERMINATING,
            Conditions::TERMINATING,
            Conditions::NOT_READY,
        ][usize::from(state)];
        let endpoint = Endpoint::new(ip(&format!("10.1.0.{n}"))).on(if local { "here" } else { "there" });
        let endpoint = endpoint.state(state);
        if hint == 0 { endpoint } else { endpoint.hints(&[], &[&format!("zone-{hint}")]) }
    });
    (0u8..6, 0u8..4, any::<bool>(), prop::collection::vec(endpoint, 0..5)).prop_map(
        |(n, service, q, endpoints)| {
            let ports: &[(&str, Protocol, u16)] = if q {
                &[("p", Protocol::Tcp, 8080), ("q", Protocol::Tcp, 8081)]
            } else {
                &[("p", Protocol::Udp, 8080)]
            };
            EndpointGroup {
                service: (&*service_name(service)).into(),
                ..named_group(&format!("ns/g{n}"), ports, &endpoints)
            }
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => a_service().prop_map(|s| Step::Service(Box::new(s))),
        2 => (0u8..4).prop_map(Step::NoService),
        6 => a_group().prop_map(Step::Group),
        2 => (0u8..6).prop_map(Step::NoGroup),
        1 => prop::option::of(1u8..3).prop_map(Step::Zone),
        1 => prop::collection::vec((1u8..8).prop_map(|n| ip(&format!("10.0.0.{n}"))),
            0..2).prop_map(Step::Exempt),
        1 => prop::collection::vec(a_service(), 0..4).prop_map(Step::RelistServices),
        1 => prop::collection::vec(a_group(), 0..4).prop_map(Step::RelistGroups),
        3 => Just(Step::Take),
    ]
}

/// The state that steps lead to, kept the simple way.
#[derive(Default)]
struct Truth {
    services: BTreeMap<String, Service>,
    groups: BTreeMap<String, EndpointGroup>,
    zone: Option<u8>,
    exempt: Vec<IpAddr>,
}

impl Truth {
    fn node(&self) -> NodeInfo {
        NodeInfo { zone: self.zone.map(|z| format!("zone-{z}").into()), ..node() }
    }

    fn fresh(&self) -> View {
        let config = ViewConfig { exempt_vips: self.exempt.clone(), ..ViewConfig::default() };
        let mut view = View::new(config, self.node());
        self.services.values().rev().for_each(|s| view.set_service(s.clone()));
        self.groups.values().rev().for_each(|g| view.set_group(g.clone()));
        view.take_changes();
        view
    }
}

/// What a follower knows who only sees changes.
#[derive(Default)]
struct Follower {
    ports: BTreeMap<PortKey, std::sync::Arc<PortView>>,
    cluster_ips: std::collections::BTreeSet<IpAddr>,
}

impl Follower {
    fn follow(&mut self, changes: &Changes) {
        for change in &changes.ports {
            assert_ne!(change.old, change.new, "a change that is none: {}", change.key);
            assert_eq!(self.ports.get(&change.key), change.old.as_ref());
            match &change.new {
                Some(new) => self.ports.insert(change.key.clone(), new.clone()),
                None => self.ports.remove(&change.key),
            };
        }
        changes.cluster_ips_removed.iter().for_each(|a| assert!(self.cluster_ips.remove(a)));
        changes.cluster_ips_added.iter().for_each(|a| assert!(self.cluster_ips.insert(*a)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Rules 8 to 10, 37, 57: whatever came in whichever order, the view is that of the final state; and who
    /// only follows the changes knows the same.
    #[test]
    fn incremental_is_from_scratch(steps in prop::collection::vec(step(), 0..40)) {
        let mut truth = Truth::default();
        let mut view = View::new(ViewConfig::default(), truth.node());
        let mut follower = Follower::default();
        for step in steps {
            match step {
                Step::Service(s) => {
                    truth.services.insert(s.name.to_string(), (*s).clone());
                    view.set_service(*s);
                }
                Step::NoService(n) => {
                    truth.services.remove(&service_name(n));
                    view.delete_service(&(&*service_name(n)).into());
                }
                Step::Group(g) => {
                    truth.groups.insert(g.name.to_string(), g.clone());
                    view.set_group(g);
                }
                Step::NoGroup(n) => {
                    truth.groups.remove(&format!("ns/g{n}"));
                    view.delete_group(&(&*format!("ns/g{n}")).into());
                }
                Step::Zone(zone) => {
                    truth.zone = zone;
                    view.set_node(truth.node());
                }
                Step::Exempt(exempt) => {
                    truth.exempt.clone_from(&exempt);
                    view.set_exempt_vips(exempt);
                }
                Step::RelistServices(list) => {
                    truth.services = list.iter().map(|s| (s.name.to_string(), s.clone())).collect();
                    view.list_start(ListKind::Services);
                    list.into_iter().for_each(|s| view.set_service(s));
                    view.list_done(ListKind::Services);
                }
                Step::RelistGroups(list) => {
                    truth.groups = list.iter().map(|g| (g.name.to_string(), g.clone())).collect();
                    view.list_start(ListKind::Groups);
                    list.into_iter().for_each(|g| view.set_group(g));
                    view.list_done(ListKind::Groups);
                }
                Step::Take => follower.follow(&view.take_changes()),
            }
        }
        follower.follow(&view.take_changes());
        let fresh = truth.fresh();
        prop_assert_eq!(view.current(), fresh.current());
        prop_assert_eq!(view.problems().collect::<Vec<_>>(), fresh.problems().collect::<Vec<_>>());
        prop_assert_eq!(&follower.ports, &fresh.current().ports);
        prop_assert!(follower.cluster_ips.iter().eq(fresh.current().cluster_ips.keys()));
    }
}

#[test]
fn one_changed_group_is_work_for_its_service_only() {
    let mut view = View::new(ViewConfig::default(), node());
    for n in 0..100 {
        let name = format!("ns/s{n}");
        view.set_service(Service::new(&*name).cluster_ip(ip(&format!("10.0.1.{n}"))).port(Protocol::Tcp, 80));
        let addresses = [ip(&format!("10.1.1.{n}"))];
        view.set_group(EndpointGroup::of_addresses(&*name, &*name, Protocol::Tcp, 8080, &addresses));
    }
    assert_eq!(view.take_changes().ports.len(), 100);
    let before = view.current().clone();
    let addresses = [ip("10.1.2.1")];
    view.set_group(EndpointGroup::of_addresses("ns/s7", "ns/s7", Protocol::Tcp, 8080, &addresses));
    let changes = view.take_changes();
    assert_eq!(changes.ports.iter().map(|c| c.key.service.as_str()).collect::<Vec<_>>(), ["ns/s7"]);
    // All others are the very same objects, not equal copies.
    for (key, view) in view.current().ports.iter().filter(|(k, _)| k.service.as_str() != "ns/s7") {
        assert!(std::sync::Arc::ptr_eq(view, &before.ports[key]));
    }
}

#[test]
fn the_same_again_is_no_change() {
    let mut view = view_of(ViewConfig::default(), everywhere(), &[group(&[Endpoint::new(ip("10.1.0.1"))])]);
    view.set_service(everywhere());
    view.set_group(group(&[Endpoint::new(ip("10.1.0.1"))]));
    view.set_node(node());
    assert!(!view.is_dirty());
    assert!(view.take_changes().is_empty());
}

#[test]
fn a_group_that_goes_over_to_another_service() {
    let mut view = view_of(ViewConfig::default(), service(), &[group(&[Endpoint::new(ip("10.1.0.1"))])]);
    view.set_service(Service::new("ns/two").cluster_ip(ip("10.0.0.2")).port(Protocol::Tcp, 80));
    view.set_group(EndpointGroup { service: "ns/two".into(), ..group(&[Endpoint::new(ip("10.1.0.1"))]) });
    view.take_changes();
    assert!(port(&view).cluster.is_empty());
    let two = PortKey { service: "ns/two".into(), ..key("", Protocol::Tcp, Family::V4) };
    assert_eq!(view.current().ports[&two].cluster.len(), 1);
}

#[test]
fn a_group_without_its_service_waits_for_it() {
    let mut view = View::new(ViewConfig::default(), node());
    view.set_group(group(&[Endpoint::new(ip("10.1.0.1"))]));
    assert!(view.take_changes().ports.is_empty());
    assert_eq!(view.orphans().count(), 1);
    view.set_service(service());
    view.take_changes();
    assert_eq!(port(&view).cluster.len(), 1);
    view.delete_service(&"ns/svc".into());
    view.take_changes();
    assert_eq!(view.orphans().count(), 1);
}

#[test]
fn a_hundred_thousand_endpoints_in_one_service() {
    let address = |n: u32| IpAddr::from(std::net::Ipv4Addr::from(0x0a01_0000 + n));
    let endpoints: Vec<Endpoint> = (0..100_000).map(|n| Endpoint::new(address(n))).collect();
    let groups: Vec<EndpointGroup> = endpoints
        .chunks(1000)
        .enumerate()
        .map(|(i, chunk)| named_group(&format!("ns/g{i}"), &[("", Protocol::Tcp, 8080)], chunk))
        .collect();
    let view = view_of(ViewConfig::default(), service(), &groups);
    assert_eq!(port(&view).cluster.len(), 100_000);
    assert!(port(&view).cluster.is_sorted());
}
