//! Where clients are led whose Network has no router here, without a kernel.

use knit_proxy::model::{Affinity, EndpointGroup, Protocol, ServicePort, TrafficPolicy};

use super::*;

const NODE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

fn absent() -> Absent {
    let node = NodeInfo { addresses: vec![NODE], ..NodeInfo::new("n1") };
    Absent::new(&"blue".into(), node, vec![(Protocol::Udp, 4789)])
}

fn web(node_port: u16) -> Service {
    let port = ServicePort::new("", Protocol::Tcp, 80).node_port(node_port);
    let service = Service::new("t/web").cluster_ip([10, 96, 0, 9].into()).add_port(port);
    Service { network: "blue".into(), ..service }
}

/// One endpoint on each of these nodes.
fn group(nodes: &[&str]) -> Event {
    let addresses: Vec<IpAddr> = (0..nodes.len()).map(|n| [10, 77, 0, 18 + n as u8].into()).collect();
    let mut group = EndpointGroup::of_addresses("t/web-1", "t/web", Protocol::Tcp, 8080, &addresses);
    group.network = "blue".into();
    for (endpoint, node) in group.endpoints.iter_mut().zip(nodes) {
        endpoint.node = Some((*node).into());
    }
    Event::SetGroup(Box::new(group))
}

fn set(absent: &mut Absent, service: Service) -> bool {
    absent.take(&Event::SetService(Box::new(service)))
}

/// n7 is at 192.0.2.7; only nine of them are known.
fn address(name: &str, family: Family) -> Option<IpAddr> {
    let number: u8 = name.strip_prefix('n')?.parse().ok()?;
    (family == Family::V4 && number < 10).then(|| [192, 0, 2, number].into())
}

/// Each place with where it leads; nothing for ports that have none any more.
fn places(absent: &mut Absent) -> Vec<String> {
    let changes = absent.changes(&address);
    let found = changes.into_iter().filter_map(|(_, found)| found).flat_map(|(places, _)| places);
    let text = |(place, kind, to): Place| {
        let near = to.near.map_or_else(String::new, |near| format!(" near {near:?}"));
        format!("{kind:?} {}:{} {:?}{near}", place.address, place.port, to.to)
    };
    found.map(text).collect()
}

#[test]
fn a_node_port_leads_to_nodes_with_endpoints() {
    let mut absent = absent();
    assert!(set(&mut absent, web(30080)), "its endpoints are still to be told");
    assert_eq!(places(&mut absent), ["NodePort 192.0.2.1:30080 Rejected"], "nobody answers anywhere");
    // One is on this node, one on a node that nobody knows.
    absent.take(&group(&["n3", "n3", "n1", "n12"]));
    assert_eq!(places(&mut absent), ["NodePort 192.0.2.1:30080 Nodes([192.0.2.3:30080])"]);
    absent.take(&group(&["n12"]));
    assert_eq!(places(&mut absent), ["NodePort 192.0.2.1:30080 Rejected"]);
    assert!(!set(&mut absent, web(30081)));
    absent.take(&group(&["n4"]));
    assert_eq!(places(&mut absent), ["NodePort 192.0.2.1:30081 Nodes([192.0.2.4:30081])"]);
    // The same node, at another address.
    let moved = absent.moved(&BTreeSet::from(["n4"]), &|_, _| Some([198, 51, 100, 4].into()));
    let (places, _) = moved[0].1.as_ref().expect("places");
    assert_eq!(places[0].2.to, Way::Nodes(Box::new(["198.51.100.4:30081".parse().expect("a place")])));
    assert!(absent.moved(&BTreeSet::from(["n9"]), &address).is_empty(), "no endpoint is there");
    // Nobody outside reaches it any more: it is left out, with its endpoints.
    assert!(!set(&mut absent, web(0)));
    assert_eq!(
        absent.changes(&address).iter().map(|(_, found)| found.is_some()).collect::<Vec<_>>(),
        [false]
    );
    assert!(absent.nodes.is_empty() && absent.view.orphans().next().is_none());
}

#[test]
fn at_most_four_nodes_and_one_where_clients_come_back() {
    let nodes = ["n2", "n3", "n4", "n5", "n6", "n7"];
    let count = |affinity: Option<Affinity>| {
        let mut absent = absent();
        set(&mut absent, Service { affinity, ..web(30080) });
        absent.take(&group(&nodes));
        let changes = absent.changes(&address);
        let (places, _) = changes[0].1.clone().expect("places");
        match &places[0].2.to {
            Way::Nodes(nodes) => nodes.len(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((count(None), count(Some(Affinity { timeout_seconds: 60 }))), (4, 1));
}

#[test]
fn the_policy_local_leads_only_this_node_and_its_pods_elsewhere() {
    let mut absent = absent();
    let mut service = Service { external_policy: TrafficPolicy::Local, ..web(30080) };
    service.health_check_port = std::num::NonZeroU16::new(32000);
    service.load_balancer_ips = Box::new([[203, 0, 113, 2].into()]);
    service.source_ranges = Some(Box::new(["198.51.100.0/24".parse().expect("a range")]));
    set(&mut absent, service.clone());
    absent.take(&group(&["n2"]));
    let expected = [
        "LoadBalancerIp 203.0.113.2:80 Dropped near [192.0.2.2:30080]",
        "NodePort 192.0.2.1:30080 Dropped near [192.0.2.2:30080]",
    ];
    assert_eq!(places(&mut absent), expected);
    let check = absent.health.check("t/web", Family::V4, Instant::now()).expect("a check");
    assert_eq!((check.local_endpoints, check.ok()), (0, false));
    // Cluster: everybody is led there, and no check is answered.
    let cluster = Service { external_policy: TrafficPolicy::Cluster, health_check_port: None, ..service };
    set(&mut absent, cluster);
    let expected = [
        "LoadBalancerIp 203.0.113.2:80 Nodes([192.0.2.2:30080])",
        "NodePort 192.0.2.1:30080 Nodes([192.0.2.2:30080])",
    ];
    assert_eq!(places(&mut absent), expected);
    assert!(absent.health.check("t/web", Family::V4, Instant::now()).is_none());
}

#[test]
fn without_a_node_port_a_router_of_this_node_must_lead_there() {
    use crate::entrances::must_have_router;
    let reserved = vec![(Protocol::Udp, 4789)];
    let needs = |service: &Service| must_have_router(service, true, &reserved, |ip| ip == NODE);
    let mut service = web(0);
    assert!(!needs(&service), "nobody outside reaches it");
    service.external_ips = Box::new([[203, 0, 113, 1].into()]);
    assert!(needs(&service));
    assert!(!must_have_router(&service, false, &reserved, |_| false), "its Network does not allow them");
    let mut service = Service { external_ips: service.external_ips, ..web(30080) };
    assert!(!needs(&service));
    // A node port that no Service has is none.
    service.ports[0].protocol = Protocol::Udp;
    service.ports[0].node_port = std::num::NonZeroU16::new(4789);
    assert!(needs(&service));
    let mut absent = absent();
    set(&mut absent, service);
    absent.take(&group(&["n2"]));
    assert_eq!(places(&mut absent), [] as [String; 0], "nothing leads to the tunnels");
    // The other node would look at this node's address, not at the client's.
    let mut service = Service { load_balancer_ips: Box::new([NODE]), ..web(80) };
    assert!(!needs(&service));
    service.source_ranges = Some(Box::new([]));
    assert!(needs(&service));
}
