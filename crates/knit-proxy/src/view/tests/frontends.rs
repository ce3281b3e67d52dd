//! Frontends: families, kinds, masquerading, source ranges, conflicts. Rules 18 to 24, 27, 34, 40 to 49, 54.

use std::num::NonZeroU16;

use super::*;
use crate::model::{Affinity, Conditions, PerFamily, TrafficPolicy};

fn shown(view: &PortView) -> Vec<String> {
    view.frontends.iter().map(ToString::to_string).collect()
}

fn pods_known() -> ViewConfig {
    ViewConfig {
        local_traffic: LocalTraffic::Sources(vec!["10.1.0.0/16".parse().unwrap()]),
        ..ViewConfig::default()
    }
}

fn one_local() -> EndpointGroup {
    group(&[Endpoint::new(ip("10.1.0.1")).on("here")])
}

#[test]
fn rules_18_19_families_are_apart() {
    let mut service = everywhere().cluster_ip(ip("fd00::1"));
    service.external_ips = Box::new([ip("203.0.113.1"), ip("2001:db8:1::1")]);
    let groups = [
        group(&[Endpoint::new(ip("10.1.0.1"))]),
        EndpointGroup { name: "ns/svc-6".into(), ..group(&[Endpoint::new(ip("fd01::1"))]) },
    ];
    let view = view_of(ViewConfig::default(), service.clone(), &groups);
    let v4 = &view.current().ports[&key("", Protocol::Tcp, Family::V4)];
    let v6 = &view.current().ports[&key("", Protocol::Tcp, Family::V6)];
    assert_eq!(
        shown(v4),
        [
            "cluster IP 10.0.0.1:80",
            "load-balancer IP 203.0.113.2:80",
            "external IP 203.0.113.1:80",
            "node port 30080"
        ]
    );
    assert_eq!(shown(v6), ["cluster IP [fd00::1]:80", "external IP [2001:db8:1::1]:80", "node port 30080"]);
    assert_eq!(
        (text(&v4.cluster), text(&v6.cluster)),
        (vec!["10.1.0.1:8080".into()], vec!["[fd01::1]:8080".into()])
    );

    // Without a cluster IP of a family there is nothing of it, whatever else is there.
    service.cluster_ip_v6 = None;
    let view = view_of(ViewConfig::default(), service.clone(), &groups);
    assert_eq!(view.current().ports.keys().map(|k| k.family).collect::<Vec<_>>(), [Family::V4]);
    // A family that is switched off is not there.
    let off = ViewConfig { families: PerFamily { v4: false, v6: true }, ..ViewConfig::default() };
    assert!(view_of(off, service, &groups).current().ports.is_empty());
}

#[test]
fn rule_20_one_number_on_three_protocols_is_three_ports() {
    let service = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
        .into_iter()
        .fold(Service::new("ns/svc").cluster_ip(ip("10.0.0.1")), |s, protocol| s.port(protocol, 53));
    let view = view_of(ViewConfig::default(), service, &[]);
    assert_eq!(view.current().ports.len(), 3);
    assert_eq!(view.current().cluster_ips[&ip("10.0.0.1")], 3);
}

#[test]
fn rule_21_external_ips_can_be_switched_off() {
    let config = ViewConfig { external_ips: false, ..ViewConfig::default() };
    let view = view_of(config, everywhere(), &[one_local()]);
    assert!(port(&view).frontends.iter().all(|f| f.kind != FrontendKind::ExternalIp));
}

#[test]
fn rule_24_node_port_addresses() {
    let mut here = node();
    here.host_addresses = vec![ip("127.0.0.1"), ip("192.0.2.7"), ip("198.51.100.1"), ip("2001:db8::1")];
    let resolve = |node_ports| {
        let config = ViewConfig { node_ports, ..ViewConfig::default() };
        let mut view = View::new(config, here.clone());
        view.take_changes();
        view.current().node.node_ports.clone()
    };
    let only = |list: &[&str]| NodePortMatch::Only(list.iter().map(|a| ip(a)).collect());
    let ranges = |list: &[&str]| NodePorts::Ranges(list.iter().map(|r| r.parse().unwrap()).collect());
    assert_eq!(
        resolve(NodePorts::Primary),
        PerFamily { v4: only(&["198.51.100.1"]), v6: only(&["2001:db8::1"]) }
    );
    assert_eq!(
        resolve(NodePorts::All),
        PerFamily { v4: NodePortMatch::AnyLocal, v6: NodePortMatch::AnyLocal }
    );
    // A family without a range answers everywhere.
    assert_eq!(
        resolve(ranges(&["192.0.2.0/24"])),
        PerFamily { v4: only(&["192.0.2.7"]), v6: NodePortMatch::AnyLocal }
    );
    // Rule 25: loopback is never answered.
    assert_eq!(resolve(ranges(&["127.0.0.0/8", "192.0.2.0/24"])).v4, only(&["192.0.2.7"]));
    assert_eq!(resolve(ranges(&["127.0.0.0/8"])).v4, only(&[]));
    assert_eq!(resolve(ranges(&["0.0.0.0/0"])).v4, NodePortMatch::AnyLocal);
}

#[test]
fn rule_27_active_cluster_ips_and_service_ranges() {
    let mut view = View::new(ViewConfig::default(), node());
    view.set_service_ranges("kubernetes", vec!["10.0.0.0/16".parse().unwrap()]);
    let mut two = service();
    two.ports =
        Box::new([ServicePort::new("a", Protocol::Tcp, 80), ServicePort::new("b", Protocol::Tcp, 81)]);
    view.set_service(two.clone());
    let changes = view.take_changes();
    assert!(changes.node);
    assert_eq!(view.current().node.service_ranges.len(), 1);
    assert_eq!(changes.cluster_ips_added, [ip("10.0.0.1")]);

    // One port less: the address is still there.
    two.ports = Box::new([ServicePort::new("a", Protocol::Tcp, 80)]);
    view.set_service(two);
    let changes = view.take_changes();
    assert_eq!((changes.cluster_ips_added, changes.cluster_ips_removed), (vec![], vec![]));

    // The address goes over to another service: it did not change for the node.
    view.delete_service(&"ns/svc".into());
    view.set_service(Service::new("ns/next").cluster_ip(ip("10.0.0.1")).port(Protocol::Tcp, 80));
    let changes = view.take_changes();
    assert_eq!((changes.cluster_ips_added, changes.cluster_ips_removed), (vec![], vec![]));

    view.delete_service(&"ns/next".into());
    view.delete_service_ranges("kubernetes");
    let changes = view.take_changes();
    assert_eq!(changes.cluster_ips_removed, [ip("10.0.0.1")]);
    assert!(changes.node && view.current().node.service_ranges.is_empty());
}

#[test]
fn rule_34_inside_traffic_takes_the_short_way() {
    let mut service = everywhere();
    service.external_policy = TrafficPolicy::Local;
    let elsewhere = group(&[Endpoint::new(ip("10.1.0.2")).on("elsewhere")]);
    let view = view_of(pods_known(), service.clone(), std::slice::from_ref(&elsewhere));
    for kind in [FrontendKind::NodePort, FrontendKind::ExternalIp, FrontendKind::LoadBalancerIp] {
        let frontend = frontend(port(&view), kind);
        assert_eq!(frontend.route, Route { action: Action::Drop, masquerade: Masquerade::HairpinOnly });
        let cluster = Action::Endpoints(Scope::Cluster);
        assert_eq!(frontend.from_pods, Some(Route { action: cluster, masquerade: Masquerade::HairpinOnly }));
        assert_eq!(frontend.from_node, Some(Route { action: cluster, masquerade: Masquerade::All }));
    }
    assert_eq!(frontend(port(&view), FrontendKind::ClusterIp).from_pods, None);
    // Without a way to tell pods, only the node's own traffic is known to come from inside.
    let view = view_of(ViewConfig::default(), service.clone(), &[elsewhere]);
    assert_eq!(frontend(port(&view), FrontendKind::NodePort).from_pods, None);
    assert!(frontend(port(&view), FrontendKind::NodePort).from_node.is_some());
    // No endpoints at all: rejected for everybody.
    let view = view_of(pods_known(), service, &[]);
    let frontend = frontend(port(&view), FrontendKind::NodePort);
    assert_eq!(frontend.route.action, Action::Reject);
    assert_eq!(frontend.from_pods.map(|r| r.action), Some(Action::Reject));
    assert_eq!(frontend.from_node.map(|r| r.action), Some(Action::Reject));
}

#[test]
fn rules_46_47_48_49_masquerading() {
    let masquerade = |config: ViewConfig, kind| {
        let view = view_of(config, everywhere(), &[one_local()]);
        frontend(port(&view), kind).route.masquerade
    };
    let all = ViewConfig { masquerade_all: true, ..pods_known() };
    assert_eq!(masquerade(ViewConfig::default(), FrontendKind::ClusterIp), Masquerade::HairpinOnly);
    assert_eq!(masquerade(pods_known(), FrontendKind::ClusterIp), Masquerade::NotPods);
    assert_eq!(masquerade(all, FrontendKind::ClusterIp), Masquerade::All);
    for kind in [FrontendKind::NodePort, FrontendKind::ExternalIp, FrontendKind::LoadBalancerIp] {
        assert_eq!(masquerade(pods_known(), kind), Masquerade::All);
    }
    // Each way of telling pods counts, for the families it can tell.
    let known = |local_traffic, node: NodeInfo| {
        let mut view = View::new(ViewConfig { local_traffic, ..ViewConfig::default() }, node);
        view.take_changes();
        let settings = &view.current().node;
        (settings.knows_pods(Family::V4), settings.knows_pods(Family::V6))
    };
    assert_eq!(known(LocalTraffic::Unknown, node()), (false, false));
    assert_eq!(known(LocalTraffic::Sources(vec!["fd01::/64".parse().unwrap()]), node()), (false, true));
    let with_range = NodeInfo { pod_ranges: vec!["10.1.0.0/24".parse().unwrap()], ..node() };
    assert_eq!(known(LocalTraffic::NodePodRanges, with_range), (true, false));
    assert_eq!(known(LocalTraffic::Bridge("br0".into()), node()), (true, true));
    assert_eq!(known(LocalTraffic::InterfacePrefix("veth".into()), node()), (true, true));
}

#[test]
fn rules_40_42_affinity_is_carried_and_can_change() {
    let mut service = service();
    service.affinity = Some(Affinity::default());
    let mut view = view_of(ViewConfig::default(), service.clone(), &[one_local()]);
    assert_eq!(port(&view).affinity_seconds, Some(10_800));
    service.affinity = Some(Affinity { timeout_seconds: 10 });
    view.set_service(service.clone());
    assert_eq!(view.take_changes().ports.len(), 1);
    service.affinity = None;
    view.set_service(service);
    assert_eq!(view.take_changes().ports.len(), 1);
    assert_eq!(port(&view).affinity_seconds, None);
}

#[test]
fn rules_43_44_source_ranges_are_for_load_balancer_ips_only() {
    let sources = |ranges: Option<&[&str]>| {
        let mut service = everywhere();
        service.source_ranges = ranges.map(|list| list.iter().map(|r| r.parse().unwrap()).collect());
        let view = view_of(ViewConfig::default(), service, &[one_local()]);
        for kind in [FrontendKind::ClusterIp, FrontendKind::NodePort, FrontendKind::ExternalIp] {
            assert_eq!(frontend(port(&view), kind).sources, Sources::Any);
        }
        frontend(port(&view), FrontendKind::LoadBalancerIp).sources.clone()
    };
    let only = |list: &[&str], and_itself| Sources::Only {
        ranges: list.iter().map(|r| r.parse().unwrap()).collect(),
        and_itself,
    };
    assert_eq!(sources(None), Sources::Any);
    assert_eq!(sources(Some(&["192.0.2.0/24"])), only(&["192.0.2.0/24"], false));
    // The node's own address is 198.51.100.1.
    assert_eq!(sources(Some(&["198.51.100.0/24"])), only(&["198.51.100.0/24"], true));
    assert_eq!(sources(Some(&["192.0.2.0/24", "0.0.0.0/0"])), Sources::Any);
    // Ranges of the other family say nothing about this one (rule 19).
    assert_eq!(sources(Some(&["2001:db8::/64"])), Sources::Any);
    // A restriction of which nothing could be understood lets nobody in.
    assert_eq!(sources(Some(&[])), only(&[], false));
}

#[test]
fn rule_54_health_checks_count_distinct_local_ready_addresses() {
    let mut service = service();
    service.ports =
        Box::new([ServicePort::new("a", Protocol::Tcp, 80), ServicePort::new("b", Protocol::Tcp, 81)]);
    service.health_check_port = NonZeroU16::new(32000);
    let endpoints = [
        Endpoint::new(ip("10.1.0.1")).on("here"),
        Endpoint::new(ip("10.1.0.2")).on("here").state(Conditions::SERVING_TERMINATING),
        Endpoint::new(ip("10.1.0.3")).on("elsewhere"),
    ];
    let ports = [("a", Protocol::Tcp, 8080), ("b", Protocol::Tcp, 8081)];
    let mut view = view_of(ViewConfig::default(), service, &[named_group("ns/a", &ports, &endpoints)]);
    let check = |view: &View| view.current().health_checks["ns/svc"].local_ready;
    assert_eq!(check(&view), PerFamily { v4: 1, v6: 0 });
    // Only terminating ones left: none counts, though they still get traffic.
    view.set_group(named_group("ns/a", &ports, &endpoints[1..]));
    assert_eq!(view.take_changes().health_checks, ["ns/svc".into()]);
    assert_eq!(check(&view).v4, 0);
    view.delete_service(&"ns/svc".into());
    assert_eq!(view.take_changes().health_checks, ["ns/svc".into()]);
    assert!(view.current().health_checks.is_empty());
}

#[test]
fn of_two_services_with_one_external_ip_the_older_has_it() {
    let make = |name: &str, created, cluster: &str| {
        let mut service = Service::new(name).cluster_ip(ip(cluster)).port(Protocol::Tcp, 80);
        service.created = created;
        service.external_ips = Box::new([ip("203.0.113.9")]);
        service
    };
    let mut view = View::new(ViewConfig::default(), node());
    view.set_service(make("ns/young", 200, "10.0.0.1"));
    assert!(view.take_changes().problems.is_empty());
    // An older one comes later: it takes the address, and the young one keeps the rest.
    view.set_service(make("ns/old", 100, "10.0.0.2"));
    let changes = view.take_changes();
    assert_eq!(changes.ports.len(), 2);
    assert_eq!(changes.problems.len(), 1);
    let problem = changes.problems[0].to_string();
    assert!(
        problem.starts_with("Service ns/young: spec.externalIPs: external IP 203.0.113.9:80 TCP"),
        "{problem}"
    );
    assert!(problem.contains("ns/old"), "{problem}");
    let frontends = |view: &View, name: &str| {
        let key = PortKey { service: name.into(), ..key("", Protocol::Tcp, Family::V4) };
        shown(&view.current().ports[&key])
    };
    assert_eq!(frontends(&view, "ns/young"), ["cluster IP 10.0.0.1:80"]);
    assert_eq!(frontends(&view, "ns/old"), ["cluster IP 10.0.0.2:80", "external IP 203.0.113.9:80"]);
    // The same problem is told once.
    view.set_group(EndpointGroup { service: "ns/young".into(), ..one_local() });
    assert!(view.take_changes().problems.is_empty());
    assert_eq!(view.problems().count(), 1);
    // It goes, and the young one moves up.
    view.delete_service(&"ns/old".into());
    view.take_changes();
    assert_eq!(frontends(&view, "ns/young"), ["cluster IP 10.0.0.1:80", "external IP 203.0.113.9:80"]);
    assert_eq!(view.problems().count(), 0);
}

#[test]
fn nobody_takes_a_cluster_ip_away() {
    let mut thief = Service::new("ns/thief").cluster_ip(ip("10.0.0.66")).port(Protocol::Tcp, 80);
    thief.external_ips = Box::new([ip("10.0.0.1")]);
    let mut victim = service();
    victim.created = 999;
    let mut view = View::new(ViewConfig::default(), node());
    view.set_service(thief);
    view.set_service(victim);
    let changes = view.take_changes();
    assert_eq!(changes.problems.len(), 1);
    assert_eq!(&*changes.problems[0].object.name, "ns/thief");
    assert_eq!(shown(port(&view)), ["cluster IP 10.0.0.1:80"]);
}

#[test]
fn an_address_listed_as_two_kinds_is_one_frontend() {
    let mut service = everywhere();
    service.external_ips = Box::new([ip("203.0.113.2"), ip("203.0.113.2"), ip("10.0.0.1")]);
    let view = view_of(ViewConfig::default(), service, &[one_local()]);
    assert_eq!(
        shown(port(&view)),
        ["cluster IP 10.0.0.1:80", "load-balancer IP 203.0.113.2:80", "node port 30080"]
    );
    assert_eq!(view.problems().count(), 0);
}

#[test]
fn a_port_that_is_there_twice_is_named() {
    let view = view_of(ViewConfig::default(), service().port(Protocol::Tcp, 81), &[one_local()]);
    assert_eq!(shown(port(&view)), ["cluster IP 10.0.0.1:80"]);
    assert_eq!(view.problems().next().unwrap().field, "spec.ports");
}

#[test]
fn exempt_addresses_are_left_alone() {
    let config = ViewConfig { exempt_vips: vec![ip("10.0.0.1")], ..ViewConfig::default() };
    let mut view = view_of(config, everywhere(), &[one_local()]);
    assert!(port(&view).frontends.iter().all(|f| f.address != Some(ip("10.0.0.1"))));
    assert_eq!(*view.current().node.exempt, [ip("10.0.0.1")]);
    assert!(view.current().cluster_ips.is_empty());
    view.set_exempt_vips(vec![]);
    let changes = view.take_changes();
    assert!(changes.node);
    assert_eq!(changes.cluster_ips_added, [ip("10.0.0.1")]);
}

#[test]
fn objects_of_another_network_are_left_alone() {
    let blue = |mut s: Service| {
        s.network = "blue".into();
        s
    };
    let mut view = view_of(ViewConfig::default(), blue(service()), &[one_local()]);
    assert!(view.current().ports.is_empty());
    view.set_service(service());
    view.take_changes();
    assert_eq!(port(&view).cluster.len(), 1);
    // It goes over to the other Network: gone here, there there.
    view.set_service(blue(service()));
    view.set_group(EndpointGroup { network: "blue".into(), ..one_local() });
    view.take_changes();
    assert!(view.current().ports.is_empty());
    let config = ViewConfig { network: "blue".into(), ..ViewConfig::default() };
    let group = EndpointGroup { network: "blue".into(), ..one_local() };
    assert_eq!(port(&view_of(config, blue(service()), &[group])).cluster.len(), 1);
}

fn named(name: &str, created: u64, last: u8) -> Service {
    Service { created, ..Service::new(name).cluster_ip([10, 0, 0, last].into()) }
}

fn of<'a>(view: &'a View, service: &str) -> &'a PortView {
    let key = PortKey { service: service.into(), ..key("", Protocol::Tcp, Family::V4) };
    &view.current().ports[&key]
}

#[test]
fn rules_21_24_an_older_external_ip_took_another_ones_node_port_or_load_balancer() {
    let node_port = |created| {
        named("ns/a", created, 2).add_port(ServicePort::new("", Protocol::Tcp, 80).node_port(30080))
    };
    let balanced = |created| Service {
        load_balancer_ips: Box::new([ip("198.51.100.1")]),
        ..named("ns/a", created, 2).port(Protocol::Tcp, 30080)
    };
    let external = |created| Service {
        external_ips: Box::new([ip("198.51.100.1")]),
        ..named("other/b", created, 3).port(Protocol::Tcp, 30080)
    };
    for (a, b) in [(1, 2), (2, 1)] {
        for given in [node_port(a), balanced(a)] {
            let mut view = View::new(ViewConfig::default(), node());
            view.set_service(external(b));
            view.set_service(given);
            view.take_changes();
            assert_eq!((of(&view, "ns/a").frontends.len(), of(&view, "other/b").frontends.len()), (2, 1));
            assert_eq!(view.problems().count(), 1);
            // The winner goes, and the other has it.
            view.delete_service(&"ns/a".into());
            view.take_changes();
            assert_eq!(of(&view, "other/b").frontends.len(), 2);
            assert_eq!(view.problems().count(), 0);
        }
    }
}

#[test]
fn rules_21_24_a_node_port_and_a_load_balancer_on_one_address_go_to_the_older() {
    for (a, b) in [(1, 2), (2, 1)] {
        let port = ServicePort::new("", Protocol::Tcp, 80).node_port(30080);
        let mut view = View::new(ViewConfig::default(), node());
        view.set_service(Service {
            load_balancer_ips: Box::new([ip("198.51.100.1")]),
            ..named("other/b", b, 3).port(Protocol::Tcp, 30080)
        });
        view.set_service(named("ns/a", a, 2).add_port(port));
        view.take_changes();
        let (winner, loser) = if a < b { ("ns/a", "other/b") } else { ("other/b", "ns/a") };
        assert_eq!((of(&view, winner).frontends.len(), of(&view, loser).frontends.len()), (2, 1));
    }
}

#[test]
fn rule_24_a_node_port_keeps_the_addresses_that_nobody_else_has() {
    let config = ViewConfig {
        node_ports: NodePorts::Ranges(vec!["198.51.100.0/24".parse().unwrap()]),
        ..ViewConfig::default()
    };
    let mut info = node();
    info.host_addresses = vec![ip("198.51.100.7"), ip("198.51.100.8")];
    let mut view = View::new(config.clone(), info.clone());
    view.set_service(Service {
        load_balancer_ips: Box::new([ip("198.51.100.7")]),
        ..named("other/b", 1, 3).port(Protocol::Tcp, 30080)
    });
    let port = ServicePort::new("", Protocol::Tcp, 80).node_port(30080);
    view.set_service(named("ns/a", 2, 2).add_port(port));
    view.take_changes();
    let expected = ["cluster IP 10.0.0.2:80", "node port 198.51.100.1:30080", "node port 198.51.100.8:30080"];
    assert_eq!(shown(of(&view, "ns/a")), expected);
    // The node has another address now: who has what is worked out again.
    info.host_addresses = vec![ip("198.51.100.8")];
    view.set_node(info.clone());
    view.take_changes();
    assert_eq!(shown(of(&view, "ns/a")), ["cluster IP 10.0.0.2:80", "node port 30080"]);
    // On all addresses there is one rule for all, and what is more exact comes before it.
    let mut view = View::new(ViewConfig { node_ports: NodePorts::All, ..config }, info);
    view.set_service(Service {
        external_ips: Box::new([ip("198.51.100.8")]),
        ..named("other/b", 1, 3).port(Protocol::Tcp, 30080)
    });
    let port = ServicePort::new("", Protocol::Tcp, 80).node_port(30080);
    view.set_service(named("ns/a", 2, 2).add_port(port));
    view.take_changes();
    assert_eq!(shown(of(&view, "ns/a")), ["cluster IP 10.0.0.2:80", "node port 30080"]);
    assert_eq!(
        shown(of(&view, "other/b")),
        ["cluster IP 10.0.0.3:30080"],
        "what is given comes before what is written"
    );
}

#[test]
fn rule_43_a_load_balancers_address_that_is_the_nodes_keeps_its_source_ranges() {
    let mut service =
        named("ns/a", 1, 2).add_port(ServicePort::new("", Protocol::Tcp, 30080).node_port(30080));
    service.load_balancer_ips = Box::new([ip("198.51.100.1")]);
    service.source_ranges = Some(Box::new(["192.0.2.0/24".parse().unwrap()]));
    let mut view = View::new(ViewConfig::default(), node());
    view.set_service(service);
    view.take_changes();
    let shown = shown(of(&view, "ns/a"));
    assert_eq!(shown, ["cluster IP 10.0.0.2:30080", "load-balancer IP 198.51.100.1:30080"]);
    assert_eq!(view.problems().count(), 0);
}

#[test]
fn on_a_port_that_somebody_else_has_only_the_cluster_ip_is_served() {
    let config = ViewConfig { reserved: vec![(Protocol::Udp, 4789)], ..ViewConfig::default() };
    let kinds = |protocol, port: u16, node_port: u16| {
        let mut view = View::new(config.clone(), NodeInfo::new("here"));
        let mut service = Service::new("shop/vx")
            .cluster_ip([10, 96, 0, 1].into())
            .add_port(ServicePort::new("", protocol, port).node_port(node_port));
        service.external_ips = Box::new([[203, 0, 113, 1].into()]);
        service.load_balancer_ips = Box::new([[203, 0, 113, 2].into()]);
        view.set_service(service);
        view.take_changes();
        let (_, view) = view.current().ports.first_key_value().expect("a port");
        view.frontends.iter().map(|frontend| frontend.kind).collect::<Vec<_>>()
    };
    use FrontendKind::{ClusterIp, ExternalIp, LoadBalancerIp, NodePort};
    assert_eq!(kinds(Protocol::Udp, 4789, 30080), [ClusterIp, NodePort]);
    assert_eq!(kinds(Protocol::Udp, 80, 4789), [ClusterIp, LoadBalancerIp, ExternalIp]);
    assert_eq!(kinds(Protocol::Tcp, 4789, 4789), [ClusterIp, LoadBalancerIp, ExternalIp, NodePort]);
}
