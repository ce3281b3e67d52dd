//! Tests of what follows from a Network and the node's facts.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_runtime::{Block, Network, NetworkId, Reason, Route, Subnet, Topology};

use super::*;
use crate::topology::routed_remote_entries as remote_entries;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn net(text: &str) -> IpNet {
    text.parse().expect("a prefix")
}

fn facts() -> Facts {
    Facts {
        node: "a".into(),
        addresses: vec![ip("192.168.7.1"), ip("fd07::1")],
        uplink: "eth0".into(),
        mtu: 1500,
        prefixes: vec![net("192.168.7.1/24"), net("fd07::1/64")],
        vxlan_port: 4789,
    }
}

fn block(node: &str, addresses: &[&str], v4: &str, v6: &str) -> Block {
    Block {
        node: node.into(),
        node_addresses: addresses.iter().map(|text| ip(text)).collect(),
        ipv4: v4.parse().ok(),
        ipv6: v6.parse().ok(),
    }
}

fn network() -> Network {
    Network {
        name: "default".into(),
        id: NetworkId::new(7).expect("an id"),
        topology: Topology::Layer3,
        subnets: vec![
            Subnet { cidr: net("10.244.0.0/16"), gateway: Some(ip("10.244.0.1")) },
            Subnet { cidr: net("fd44::/64"), gateway: Some(ip("fd44::1")) },
        ],
        mtu: None,
        primary: true,
        outside: true,
        not_outside: vec![],
        cluster_service_ips: vec![],
        routes: vec![],
        blocks: vec![
            block("a", &["192.168.7.1", "fd07::1"], "10.244.1.0/24", "fd44::100/120"),
            block("near", &["192.168.7.2", "fd07::2"], "10.244.2.0/24", "fd44::200/120"),
            block("far", &["192.168.8.3", "fd08::3"], "10.244.3.0/24", "fd44::300/120"),
        ],
        router_addresses: vec![],
        announced: Vec::new(),
        underlay: None,
        parameters: serde_json::Map::new(),
    }
}

fn lines(shape: &Shape) -> String {
    let entries = remote_entries(shape, "eth0", "vx-7");
    entries.iter().map(|entry| format!("{entry}\n")).collect()
}

#[test]
fn nodes_on_the_segment_are_reached_directly_and_others_by_tunnel() {
    let shape = Shape::of(&network(), &facts(), RouterHome::Node).expect("it works");
    insta::assert_snapshot!(lines(&shape), @r"
    eth0: route to 10.244.2.0/24 via 192.168.7.2
    vx-7: route to 10.244.3.0/24 via 192.168.8.3
    eth0: route to fd44::200/120 via fd07::2
    vx-7: route to fd44::300/120 via fe80::c0a8:803
    vx-7: neighbor 192.168.8.3 is 06:76:c0:a8:08:03
    vx-7: neighbor fe80::c0a8:803 is 06:76:c0:a8:08:03
    vx-7: 06:76:c0:a8:08:03 is at 192.168.8.3
    ");
    assert_eq!(shape.mtu, 1450, "one tunnel is enough");
    assert_eq!(shape.tunnel_source, Some(ip("192.168.7.1")));
}

#[test]
fn without_tunnels_nothing_is_taken_off_the_mtu() {
    let mut network = network();
    network.blocks.pop();
    let shape = Shape::of(&network, &facts(), RouterHome::Node).expect("it works");
    assert_eq!((shape.mtu, shape.tunnel_source), (1500, None));
    // Another Network crosses nodes by tunnel, wherever they are.
    let shape = Shape::of(&network, &facts(), RouterHome::Own).expect("it works");
    assert_eq!(shape.mtu, 1450);
    assert!(shape.remotes.iter().flat_map(|remote| &remote.ranges).all(|(_, path)| *path == Path::Tunnel));
}

#[test]
fn tunnels_are_of_ipv6_where_a_node_has_nothing_else() {
    let mut network = network();
    network.blocks[2].node_addresses.remove(0);
    let shape = Shape::of(&network, &facts(), RouterHome::Own).expect("it works");
    assert_eq!((shape.mtu, shape.tunnel_source), (1430, Some(ip("fd07::1"))));
    insta::assert_snapshot!(lines(&shape), @r"
    vx-7: route to 10.244.2.0/24 via fd07::2
    vx-7: route to 10.244.3.0/24 via fd08::3
    vx-7: route to fd44::200/120 via fd07::2
    vx-7: route to fd44::300/120 via fd08::3
    vx-7: neighbor fd07::2 is 16:db:06:bc:bc:0f
    vx-7: neighbor fd08::3 is 16:35:3b:0b:7d:19
    vx-7: 16:35:3b:0b:7d:19 is at fd08::3
    vx-7: 16:db:06:bc:bc:0f is at fd07::2
    ");
    assert_eq!(shape.complaint(), None);
}

#[test]
fn a_node_that_no_tunnel_reaches_is_named_and_the_others_work() {
    let mut network = network();
    network.blocks[1].node_addresses.remove(1);
    network.blocks[2].node_addresses.remove(0);
    let shape = Shape::of(&network, &facts(), RouterHome::Own).expect("the rest works");
    let complaint = shape.complaint().expect("a complaint");
    assert!(complaint.contains("far") && !complaint.contains("near"), "{complaint}");
}

#[test]
fn an_mtu_that_does_not_fit_is_refused_with_the_one_that_does() {
    let mut network = network();
    network.mtu = Some(1500);
    let error = Shape::of(&network, &facts(), RouterHome::Own).expect_err("too much");
    assert_eq!(error.reason, Reason::Invalid);
    for word in ["1500", "eth0", "1450"] {
        assert!(error.message.contains(word), "{error}");
    }
    network.mtu = Some(1400);
    assert_eq!(Shape::of(&network, &facts(), RouterHome::Own).expect("it fits").mtu, 1400);
    network.mtu = Some(1000);
    let error = Shape::of(&network, &facts(), RouterHome::Own).expect_err("too little for IPv6");
    assert!(error.message.contains("1280"), "{error}");
}

#[test]
fn what_cannot_work_is_refused() {
    let refused = |change: fn(&mut Network)| {
        let mut network = network();
        change(&mut network);
        let error = Shape::of(&network, &facts(), RouterHome::Own).expect_err("refused");
        assert_eq!(error.reason, Reason::Invalid);
        error.message
    };
    assert!(refused(|network| network.subnets.clear()).contains("no subnet"));
    assert!(refused(|network| network.subnets[0].gateway = Some(ip("10.1.1.1"))).contains("10.1.1.1"));
    assert!(refused(|network| network.subnets[1] = network.subnets[0]).contains("two subnets"));
    let route = |network: &mut Network| {
        network.routes.push(Route { destination: net("10.9.0.0/16"), via: Some(ip("10.244.1.9")) });
    };
    assert!(refused(route).contains("10.244.0.1"));
    let wish = |network: &mut Network| {
        network.parameters.insert("path".into(), "direct".into());
    };
    assert!(refused(wish).contains("only for the default Network"));
}

/// Blocks of four, and a router's own address, so that all of it can be read.
fn small(topology: Topology) -> Shape {
    let mut network = network();
    network.topology = topology;
    network.blocks = vec![
        block("a", &["192.168.7.1"], "10.244.1.0/30", "fd44::100/126"),
        block("near", &["192.168.7.2"], "10.244.2.0/30", "fd44::200/126"),
    ];
    network.router_addresses = vec![ip("10.244.1.1"), ip("fd44::101")];
    Shape::of(&network, &facts(), RouterHome::Own).expect("it works")
}

fn plan(shape: &Shape) -> String {
    let place = crate::uplink::UplinkSlot::choose(shape.id(), |_| false).expect("a place");
    let entries = crate::router::router_entries(shape, &facts(), place, &[]);
    entries.iter().map(|entry| format!("{entry}\n")).collect()
}

#[test]
fn a_routed_networks_plan() {
    insta::assert_snapshot!(plan(&small(Topology::Layer3)));
}

#[test]
fn a_switched_networks_plan() {
    insta::assert_snapshot!(plan(&small(Topology::Layer2)));
}

#[test]
fn pods_get_their_routes() {
    let mut network = network();
    network.routes.push(Route { destination: net("172.16.0.0/12"), via: None });
    let routes = |shape: &Shape, default| {
        let routes = shape.pod_routes(default, &[Route { destination: net("fd99::/64"), via: None }]);
        let text = |route: &Route| format!("{} {}", route.destination, route.via.expect("a gateway"));
        routes.iter().map(text).collect::<Vec<_>>()
    };
    let shape = Shape::of(&network, &facts(), RouterHome::Node).expect("it works");
    assert_eq!(
        routes(&shape, true),
        ["0.0.0.0/0 10.244.0.1", "::/0 fd44::1", "172.16.0.0/12 10.244.0.1", "fd99::/64 fd44::1"]
    );
    assert_eq!(
        routes(&shape, false),
        [
            "10.244.0.0/16 10.244.0.1",
            "192.168.7.1/32 10.244.0.1",
            "fd44::/64 fd44::1",
            "fd07::1/128 fd44::1",
            "172.16.0.0/12 10.244.0.1",
            "fd99::/64 fd44::1"
        ]
    );
    network.topology = Topology::Layer2;
    let shape = Shape::of(&network, &facts(), RouterHome::Own).expect("it works");
    assert_eq!(routes(&shape, false), ["172.16.0.0/12 10.244.0.1", "fd99::/64 fd44::1"]);
    assert_eq!(shape.network.pod_address(ip("10.244.1.5")).expect("inside").net, net("10.244.1.5/16"));
    assert_eq!(shape.network.pod_address(ip("10.1.1.5")), None);
}

#[test]
fn what_was_announced_has_its_own_way_and_its_own_mac() {
    let announced = |node: &str, at: &str, addresses: &[&str]| knit_runtime::Announced {
        node: node.into(),
        node_addresses: vec![ip(at)],
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        mac: "02:00:5e:00:00:09".parse().expect("a MAC"),
    };
    let mut network = network();
    network.announced = vec![
        announced("near", "192.168.7.2", &["10.244.200.9"]),
        announced("far", "192.168.8.3", &["10.244.200.10"]),
        // Its own is no news, and what is in the node's block is reached by that.
        announced("a", "192.168.7.1", &["10.244.200.11"]),
        announced("near", "192.168.7.2", &["10.244.2.7"]),
    ];
    let shape = Shape::of(&network, &facts(), RouterHome::Node).expect("a shape");
    let text: Vec<String> = remote_entries(&shape, "eth0", "vx").iter().map(ToString::to_string).collect();
    let route = |what: &str| text.iter().filter(|line| line.contains(&format!("route to {what}"))).count();
    assert!(text.contains(&"eth0: route to 10.244.200.9/32 via 192.168.7.2".to_owned()), "{text:?}");
    assert!(text.iter().any(|line| line.starts_with("vx: route to 10.244.200.10/32")), "{text:?}");
    assert_eq!((route("10.244.200.11"), route("10.244.2.7")), (0, 0), "{text:?}");

    network.name = "blue".into();
    network.topology = Topology::Layer2;
    let shape = Shape::of(&network, &facts(), RouterHome::Own).expect("a shape");
    let text: Vec<String> =
        shape.driver().router_entries(&shape, &facts()).iter().map(ToString::to_string).collect();
    for wanted in [
        "bridge: neighbor 10.244.200.9 is 02:00:5e:00:00:09",
        "bridge: neighbor 10.244.2.7 is 02:00:5e:00:00:09",
        "vxlan: 02:00:5e:00:00:09 is behind this port",
    ] {
        assert!(text.iter().any(|line| line == wanted), "{wanted}: {text:?}");
    }
    let neighbours = text.iter().filter(|line| line.contains("neighbor 10.244.2.7 ")).count();
    assert_eq!(neighbours, 1, "an address has one MAC");
}
