//! Who gets which place, without a kernel.

use knit_proxy::model::{EndpointGroup, NodeInfo, ServicePort};
use knit_proxy::view::{NodePorts, View, ViewConfig};

use super::*;
use crate::internal_ports::InternalPorts;

const TUNNEL_PORT: u16 = 4789;
const ROUTER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 192, 6));
const NODE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const OTHER_NODE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

fn ends() -> Ends {
    Ends { router: vec![ROUTER], node: vec![NODE] }
}

fn web(name: &str, created: u64, node_port: u16) -> Service {
    let port = ServicePort::new("", Protocol::Tcp, 80).node_port(node_port);
    let service = Service::new(name).cluster_ip([10, 96, 0, 9].into()).add_port(port);
    Service { created, network: "blue".into(), ..service }
}

/// The one port of a Service, as its router's view has it.
fn resolved(service: &Service) -> (PortKey, Arc<PortView>) {
    let config = ViewConfig {
        network: "blue".into(),
        node_ports: NodePorts::Ranges(vec![IpNet::from(ROUTER)]),
        ..ViewConfig::default()
    };
    let mut view = View::new(config, NodeInfo { addresses: vec![ROUTER], ..NodeInfo::new("a") });
    let mut service = service.clone();
    let _ = InternalPorts::new(vec![(Protocol::Udp, TUNNEL_PORT)]).prepare(&mut service);
    let endpoint = [10, 77, 0, 18].into();
    let mut group =
        EndpointGroup::of_addresses("t/s-1", service.name.as_str(), Protocol::Tcp, 8080, &[endpoint]);
    group.network = "blue".into();
    view.set_group(group);
    view.set_service(service);
    view.take_changes();
    view.current().ports.first_key_value().map(|(k, v)| (k.clone(), Arc::clone(v))).expect("one port")
}

fn put(steering: &mut Steering, network: &'static str, service: &Service) -> PortKey {
    let (key, view) = resolved(service);
    steering.set_port(&network.into(), &key, Some((&view, service)), &ends());
    key
}

fn changes(steering: &mut Steering) -> Vec<String> {
    let text = |(place, to): (Entrance, Option<Steered>)| {
        let to = to.map_or_else(
            || "nowhere".to_owned(),
            |to| {
                let way = match to.to {
                    Way::Router(at) => at.to_string(),
                    Way::Nodes(nodes) => format!("nodes {nodes:?}"),
                    other => format!("{other:?}"),
                };
                let near = to.near.map_or_else(String::new, |near| format!(", near {near:?}"));
                let sources = to.sources.map_or_else(String::new, |sources| format!(" for {sources:?}"));
                format!("{way}{near}{sources}")
            },
        );
        format!("{}:{} -> {to}", place.address, place.port)
    };
    steering.take_changed().into_iter().map(text).collect()
}

#[test]
fn a_node_port_leads_into_the_router() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    let key = put(&mut steering, "blue", &web("t/s", 1, 30080));
    assert_eq!(changes(&mut steering), ["192.0.2.1:30080 -> 169.254.192.6:30080"]);
    put(&mut steering, "blue", &web("t/s", 1, 30080));
    assert_eq!(changes(&mut steering), [] as [String; 0], "the same is no change");
    steering.set_port(&"blue".into(), &key, None, &ends());
    assert_eq!(changes(&mut steering), ["192.0.2.1:30080 -> nowhere"]);
    assert!(steering.claims.is_empty() && steering.by_owner.is_empty());
}

#[test]
fn other_addresses_lead_there_too_for_those_who_may() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    let mut service = web("t/s", 1, 0);
    service.external_ips = Box::new([[203, 0, 113, 1].into()]);
    service.load_balancer_ips = Box::new([[203, 0, 113, 2].into()]);
    service.source_ranges = Some(Box::new(["192.0.2.0/24".parse().expect("a range")]));
    put(&mut steering, "blue", &service);
    let expected = [
        "203.0.113.1:80 -> 169.254.192.6:1024",
        "203.0.113.2:80 -> 169.254.192.6:1024 for [192.0.2.0/24, 203.0.113.2/32]",
    ];
    // The port that was given for it is no port of the node.
    assert_eq!(changes(&mut steering), expected);
    steering.forget_network(&"blue".into());
    assert_eq!(steering.wanted.len(), 0);
}

#[test]
fn the_older_service_has_an_address_whatever_its_network() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    let address: IpAddr = [203, 0, 113, 1].into();
    let of = |name: &str, created| Service { external_ips: Box::new([address]), ..web(name, created, 0) };
    put(&mut steering, "blue", &of("t/young", 9));
    assert_eq!(changes(&mut steering), ["203.0.113.1:80 -> 169.254.192.6:1024"]);
    steering.set_default(&of("shop/old", 3), &[]);
    assert_eq!(changes(&mut steering), ["203.0.113.1:80 -> nowhere"], "the default Network's is older");
    put(&mut steering, "green", &of("u/oldest", 1));
    assert_eq!(changes(&mut steering), ["203.0.113.1:80 -> 169.254.192.6:1024"]);
    steering.forget_network(&"green".into());
    steering.forget_default(&"shop/old".into());
    assert_eq!(steering.wanted.len(), 1);
}

fn forbidden() -> Forbidden {
    Forbidden::new(vec!["10.96.0.0/16".parse().expect("a range")], [NODE, OTHER_NODE])
}

#[test]
fn nobody_has_an_address_of_pods_services_or_nodes() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    let dns: IpAddr = [10, 96, 0, 10].into();
    let all = Box::new([dns, NODE, OTHER_NODE]);
    put(&mut steering, "blue", &Service { external_ips: all.clone(), ..web("t/evil", 1, 30080) });
    put(&mut steering, "blue", &Service { load_balancer_ips: all, ..web("t/worse", 1, 0) });
    steering.set_forbidden(forbidden());
    // The node port is the node's, and the Service has it.
    let left: Vec<EntranceAddress> = steering.wanted.keys().copied().collect();
    assert_eq!(left, [EntranceAddress { address: NODE, protocol: Protocol::Tcp, port: 30080 }]);
    let refused = steering.take_refused();
    let [(evil, whys), (worse, more)] = &refused[..] else { panic!("{refused:?}") };
    assert_eq!((evil.as_str(), worse.as_str(), whys.len(), more.len()), ("t/evil", "t/worse", 3, 3));
    assert_eq!(whys[1].why, "192.0.2.1 port 80/TCP: it is an address of a node");
    assert!(more[1].why.contains("spec.services.nodeAddresses"), "{more:?}");
    assert_eq!(steering.take_refused(), []);
}

#[test]
fn a_load_balancer_has_a_nodes_address_only_where_the_network_allows_it() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    steering.set_forbidden(forbidden());
    let service = Service { load_balancer_ips: Box::new([NODE, OTHER_NODE]), ..web("t/lb", 1, 0) };
    put(&mut steering, "blue", &service);
    assert_eq!(steering.wanted.len(), 0);
    steering.set_on_nodes(BTreeSet::from(["blue".into()]));
    assert_eq!(steering.wanted.len(), 2);
    assert!(steering.wanted.values().all(|to| to.chosen == Chosen::OnNode));
    // External IPs never.
    let service = Service { external_ips: Box::new([NODE]), ..web("t/ext", 1, 0) };
    put(&mut steering, "blue", &Service { ports: [service.ports[0].clone()].into(), ..service });
    assert_eq!(steering.wanted.len(), 2);
    steering.set_on_nodes(BTreeSet::new());
    assert_eq!(steering.wanted.len(), 0);
    assert_eq!(steering.take_refused().len(), 2);
}

#[test]
fn nobody_has_the_port_of_the_tunnel() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    let port = ServicePort::new("", Protocol::Udp, TUNNEL_PORT).node_port(TUNNEL_PORT);
    let mut service = web("t/evil", 1, 0);
    service.ports = [port].into();
    service.external_ips = Box::new([[203, 0, 113, 1].into()]);
    put(&mut steering, "blue", &service);
    assert_eq!(steering.wanted.len(), 0);
    assert_eq!(steering.take_refused()[0].1.len(), 2);
}

#[test]
fn what_a_load_balancer_gave_comes_before_what_a_tenant_wrote() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    let address: IpAddr = [203, 0, 113, 1].into();
    put(&mut steering, "green", &Service { external_ips: Box::new([address]), ..web("u/old", 1, 0) });
    let to = |steering: &Steering| steering.wanted.values().map(|to| to.chosen).collect::<Vec<_>>();
    assert_eq!(to(&steering), [Chosen::ByTenant]);
    let lb = Service { load_balancer_ips: Box::new([address]), ..web("t/young", 9, 0) };
    let key = put(&mut steering, "blue", &lb);
    assert_eq!(to(&steering), [Chosen::ByProvider]);
    assert_eq!(
        steering.take_refused()[0].1[0].why,
        "203.0.113.1 port 80/TCP: Service t/young already uses it"
    );
    steering.set_port(&"blue".into(), &key, None, &ends());
    assert_eq!(to(&steering), [Chosen::ByTenant]);
    assert_eq!(steering.take_refused(), [("u/old".into(), Vec::new())]);
}

#[test]
fn a_node_port_that_is_also_the_load_balancers_place_keeps_the_list_of_who_may_come() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    steering.set_forbidden(forbidden());
    let mut service = web("t/s", 1, 30080);
    service.ports[0].port = 30080;
    service.load_balancer_ips = Box::new([NODE]);
    service.source_ranges = Some(Box::new(["198.51.100.0/24".parse().expect("a range")]));
    put(&mut steering, "blue", &service);
    let sources = |steering: &Steering| {
        steering.wanted.values().map(|to| to.sources.as_ref().map_or(0, |s| s.len())).collect::<Vec<_>>()
    };
    assert_eq!(sources(&steering), [1]);
    steering.set_on_nodes(BTreeSet::from(["blue".into()]));
    assert_eq!(sources(&steering), [1]);
    assert_eq!(steering.take_refused().iter().map(|(_, whys)| whys.len()).sum::<usize>(), 0);
}

#[test]
fn a_node_port_of_the_default_network_is_not_taken_by_a_younger_load_balancer() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    steering.set_forbidden(forbidden());
    steering.set_on_nodes(BTreeSet::from(["blue".into()]));
    steering.set_default(&web("shop/web", 1, 30080), &[NODE]);
    let mut service = web("t/lb", 9, 0);
    service.ports[0].port = 30080;
    service.load_balancer_ips = Box::new([NODE]);
    put(&mut steering, "blue", &service);
    assert_eq!(steering.wanted.len(), 0);
    steering.forget_default(&"shop/web".into());
    assert_eq!(steering.wanted.len(), 1);
}

#[test]
fn an_external_ip_of_a_node_is_refused_to_the_default_network_too_and_its_load_balancer_keeps_it() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    steering.set_forbidden(Forbidden::new([], [NODE]));
    let addresses = Box::new([NODE]);
    let external = Service { external_ips: addresses.clone(), ..web("shop/grab", 1, 30080) };
    steering.set_default(&external, &[]);
    let balanced = Service { load_balancer_ips: addresses, ..web("shop/lb", 2, 30081) };
    steering.set_default(&balanced, &[]);
    let refused = steering.take_refused();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(refused[0].0, "shop/grab".into());
    assert_eq!(refused[0].1[0].why, "192.0.2.1 port 80/TCP: it is an address of a node");
    // The node leaves: it is nobody's now.
    steering.set_forbidden(Forbidden::default());
    assert!(steering.take_refused().iter().all(|(_, whys)| whys.is_empty()));
}

#[test]
fn an_external_ip_that_the_router_was_not_told_of_is_refused_with_the_reason() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    steering.set_forbidden(Forbidden::new([], [NODE]));
    let written = Service { external_ips: Box::new([NODE]), ..web("sky/grab", 1, 30080) };
    let told = web("sky/grab", 1, 30080);
    let (key, view) = resolved(&told);
    steering.set_port(&"blue".into(), &key, Some((&view, &written)), &ends());
    let refused = steering.take_refused();
    assert_eq!(refused[0].1[0].why, "192.0.2.1 port 80/TCP: it is an address of a node");
}

#[test]
fn services_that_somebody_else_serves_all_the_same_are_not_said_to_be_refused() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    steering.set_forbidden(forbidden());
    steering.set_own(HashSet::from([[198, 51, 100, 9].into()]));
    let addresses = Box::new([NODE, [198, 51, 100, 9].into()]);
    let service = Service { external_ips: addresses.clone(), ..web("shop/grab", 1, 30080) };
    steering.set_default(&service, &[NODE]);
    let whys = |steering: &mut Steering| -> usize {
        steering.take_refused().iter().map(|(_, whys)| whys.len()).sum()
    };
    assert_eq!(whys(&mut steering), 2, "this agent does not serve them");
    assert!(steering.set_left_to_others(true));
    assert_eq!(whys(&mut steering), 0, "kube-proxy does");
    // A tenant's are this agent's, whoever serves the default Network.
    put(&mut steering, "blue", &Service { external_ips: addresses, ..web("t/evil", 2, 0) });
    assert_eq!(steering.take_refused()[0].1.len(), 2);
    assert!(!steering.set_left_to_others(true));
}

#[test]
fn the_port_of_the_tunnels_is_refused_to_every_service_and_the_event_says_what_to_do() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    // Even where somebody else serves them: what goes to that port is not translated by anybody.
    steering.set_left_to_others(true);
    let mut service = web("shop/vx", 1, 0);
    service.ports = [ServicePort::new("", Protocol::Udp, 80).node_port(TUNNEL_PORT)].into();
    steering.set_default(&service, &[NODE]);
    let refused = steering.take_refused();
    let [(name, whys)] = &refused[..] else { panic!("{refused:?}") };
    assert_eq!(name.as_str(), "shop/vx");
    let expected = "192.0.2.1 port 4789/UDP: UDP port 4789 is reserved for the VXLAN tunnels between nodes; \
                    give the Service another nodePort";
    assert_eq!(whys[0].why, expected);
    service.ports = [ServicePort::new("", Protocol::Udp, TUNNEL_PORT)].into();
    service.load_balancer_ips = Box::new([[203, 0, 113, 1].into()]);
    service.external_ips = Box::new([[203, 0, 113, 2].into()]);
    steering.set_default(&service, &[NODE]);
    let whys = steering.take_refused().remove(0).1;
    assert_eq!(whys.len(), 2);
    assert!(whys.iter().all(|refusal| refusal.why.ends_with("give the Service another port")), "{whys:?}");
    // A tenant's too, of which its router was not told; what else it has leads there.
    let mut service = web("t/vx", 1, 0);
    service.ports = [ServicePort::new("", Protocol::Udp, 80).node_port(TUNNEL_PORT)].into();
    service.load_balancer_ips = Box::new([[203, 0, 113, 3].into()]);
    put(&mut steering, "blue", &service);
    assert_eq!(changes(&mut steering), ["203.0.113.3:80 -> 169.254.192.6:1024"]);
    assert_eq!(steering.take_refused()[0].1[0].why, expected);
}

#[test]
fn an_address_that_this_node_has_and_no_node_lists_is_refused_here() {
    let mut steering = Steering::new(vec![(Protocol::Udp, TUNNEL_PORT)]);
    let address: IpAddr = [198, 51, 100, 9].into();
    let external = |name| Service { external_ips: Box::new([address]), ..web(name, 1, 0) };
    steering.set_default(&external("shop/vip"), &[NODE]);
    put(&mut steering, "blue", &external("t/vip"));
    assert_eq!(steering.take_refused().len(), 1, "the default Network's has it");
    steering.set_own(HashSet::from([address]));
    let refused = steering.take_refused();
    let [(_, ours), (_, tenants)] = &refused[..] else { panic!("{refused:?}") };
    assert!(ours[0].only_here && ours[0].why.contains("nodeAddresses: Allow"), "{ours:?}");
    assert!(tenants[0].only_here && !tenants[0].why.contains("Allow"), "{tenants:?}");
    assert_eq!(steering.wanted.len(), 0);
    // The operator of the default Network may allow it: an address that moves between nodes, for example.
    steering.set_on_nodes(BTreeSet::from([NetworkName::default()]));
    let refused = steering.take_refused();
    assert!(refused.iter().all(|(name, whys)| name.as_str() != "shop/vip" || whys.is_empty()), "{refused:?}");
    steering.set_own(HashSet::new());
    assert_eq!(steering.wanted.len(), 0, "the default Network's is as old, and comes first by its name");
}
