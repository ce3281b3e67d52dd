//! Children that are half made, names that are taken and what is wrong with one, without a kernel.

use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use knit_kernel::addr::Address;
use knit_kernel::link::{Details, PortFlags};
use knit_kernel::links::FakeLinks;
use knit_runtime::{AttachRequest, Block, Dns, NetworkId, Pod, Subnet, Underlay as OnLink};

use super::*;

const EPERM: i32 = 1;
const EBUSY: i32 = 16;

fn name(text: &str) -> IfName {
    IfName::new(text).expect("a name")
}

fn on_link(parent: &str, mode: UnderlayMode) -> OnLink {
    OnLink {
        parent: parent.into(),
        mode,
        kind: UnderlayKind::Macvlan,
        duplicate_check: Duration::from_millis(200),
    }
}

fn network() -> Network {
    Network {
        name: "lan".into(),
        id: NetworkId::new(7).expect("an id"),
        topology: Topology::Underlay,
        subnets: vec![
            Subnet {
                cidr: "10.9.0.0/24".parse().expect("v4"),
                gateway: Some("10.9.0.1".parse().expect("v4")),
            },
            Subnet { cidr: "fd09::/64".parse().expect("v6"), gateway: None },
        ],
        mtu: None,
        primary: false,
        outside: false,
        not_outside: Vec::new(),
        cluster_service_ips: Vec::new(),
        routes: Vec::new(),
        blocks: vec![Block {
            node: "b".into(),
            node_addresses: vec!["192.168.7.2".parse().expect("v4")],
            ipv4: Some("10.9.0.32/28".parse().expect("v4")),
            ipv6: None,
        }],
        router_addresses: Vec::new(),
        announced: Vec::new(),
        underlay: Some(on_link("eth1", UnderlayMode::Bridge)),
        parameters: serde_json::Map::new(),
    }
}

fn facts() -> Facts {
    Facts {
        node: "a".into(),
        addresses: vec!["192.168.7.1".parse().expect("v4")],
        uplink: "eth1".into(),
        mtu: 1500,
        prefixes: Vec::new(),
        vxlan_port: 4789,
    }
}

fn plan() -> Plan {
    let shape = Arc::new(Shape::of(&network(), &facts(), RouterHome::Own).expect("it works"));
    let address = |text: &str| knit_runtime::Address {
        net: IpNet::from(text.parse::<std::net::IpAddr>().expect("an address")),
        gateway: None,
    };
    let request = AttachRequest {
        pod: Pod { sandbox: "one".parse().expect("a sandbox"), namespace: None, name: None, uid: None },
        netns: "/nowhere".into(),
        network: "lan".into(),
        interface: "net1".parse().expect("a name"),
        addresses: vec![address("10.9.0.18"), address("fd09::12")],
        mac: None,
        default_route: true,
        ports: Vec::new(),
        routes: Vec::new(),
        dns: Dns::default(),
    };
    Plan::of(&shape, &request, 42).expect("a plan")
}

/// A node and a pod without a kernel: what is made for the pod is beside the parent.
fn world() -> FakeLinks {
    let links = FakeLinks::new();
    links.add(FakeLinks::bare(name("eth1"), "veth"));
    links
}

fn child(plan: &Plan) -> NewLink<'static> {
    let mut new =
        NewLink::macvlan(name("net1"), Macvlan { parent: 1, mode: MacvlanMode::Bridge, namespace: None });
    new.mac = Some(plan.mark.mac);
    new
}

#[test]
fn a_networks_plan_has_no_tunnel_and_no_router() {
    let shape = Shape::of(&network(), &facts(), RouterHome::Own).expect("it works");
    assert_eq!((shape.mtu, shape.tunnel_source, shape.remotes.len()), (1500, None, 0));
    let ops = Underlay.pod_side(&plan(), 3, Some(AddrGenMode::None));
    let text: String = ops.iter().map(|op| format!("{op}\n")).collect();
    insta::assert_snapshot!(text);
}

#[test]
fn what_cannot_be_on_a_link_of_the_node_is_refused() {
    let refused = |change: fn(&mut Network), home| {
        let mut network = network();
        change(&mut network);
        Shape::of(&network, &facts(), home).expect_err("refused").message
    };
    assert!(refused(|_| {}, RouterHome::Node).contains("only be Layer3"));
    assert!(refused(|network| network.primary = true, RouterHome::Own).contains("primaryFor"));
    assert!(refused(|network| network.underlay = None, RouterHome::Own).contains("spec.underlay.parents"));
    let reflects = |network: &mut Network| {
        let on = on_link("br1", UnderlayMode::Vepa);
        network.underlay = Some(OnLink { kind: UnderlayKind::Bridge, ..on });
    };
    assert!(refused(reflects, RouterHome::Own).contains("no mode Vepa"));
    let slash = |network: &mut Network| {
        network.underlay = Some(on_link("a/b", UnderlayMode::Vepa));
    };
    assert!(refused(slash, RouterHome::Own).contains("a/b"));
    assert!(refused(|network| network.mtu = Some(9000), RouterHome::Own).contains("9000"));
}

#[test]
fn whatever_fails_nothing_of_a_child_is_left() {
    let plan = plan();
    let links = world();
    let refused = |_| Err(Error::new(Reason::Internal, "the pod's side fails"));
    make_child(&links, &links, &plan.mark, &child(&plan), refused).expect_err("the pod's side fails");
    assert_eq!(links.names(), ["eth1"]);

    links.fail("create macvlan", EPERM);
    make_child(&links, &links, &plan.mark, &child(&plan), |_| Ok(())).expect_err("it cannot be made");
    assert_eq!(links.names(), ["eth1"]);

    links.fail("create macvlan", EBUSY);
    let error = make_child(&links, &links, &plan.mark, &child(&plan), |_| Ok(())).expect_err("busy");
    assert!(error.to_string().contains("from its bridge"), "{error}");

    make_child(&links, &links, &plan.mark, &child(&plan), |_| Ok(())).expect("made");
    assert_eq!(links.names(), ["eth1", "net1"]);
}

#[test]
fn a_child_whose_making_was_cut_off_is_told_from_one_of_others() {
    let plan = plan();
    let half = || Link { group: owner::GROUP, ..FakeLinks::bare(name("net1"), "macvlan") };
    let links = world();
    assert_eq!(find_child(&links, &plan.mark, false, || Ok(())).expect("a look"), None);
    links.add(half());
    let error =
        find_child(&links, &plan.mark, true, || Ok(())).expect_err("it is being made by another call");
    assert_eq!(error.reason, Reason::Conflict, "{error}");
    assert_eq!(find_child(&links, &plan.mark, false, || Ok(())).expect("a look"), None);
    assert_eq!(links.names(), ["eth1"], "what was half made is gone");
    for strange in [
        FakeLinks::bare(name("net1"), "macvlan"),
        Link { group: owner::GROUP, ..FakeLinks::bare(name("net1"), "veth") },
        Link { alias: Some("mine".into()), ..half() },
    ] {
        let links = world();
        links.add(strange);
        let error = find_child(&links, &plan.mark, false, || Ok(())).expect_err("it is another's");
        assert!(error.to_string().contains("that Knit did not create: use another name"), "{error}");
        assert_eq!(links.names().len(), 2, "it stays");
        let new = child(&plan);
        let error = make_child(&links, &links, &plan.mark, &new, |_| Ok(())).expect_err("taken");
        assert_eq!(error.reason, Reason::Conflict, "{error}");
    }
}

#[test]
fn a_child_is_found_by_its_mark_whatever_it_is_called() {
    let plan = plan();
    let links = world();
    let other = Mark { network: Some(8), ..plan.mark.clone() };
    let marked = |text: &str, mark: &Mark| Link {
        alias: Some(mark.alias()),
        group: owner::GROUP,
        ..FakeLinks::bare(name(text), "macvlan")
    };
    links.add(marked("net2", &other));
    assert_eq!(
        find_child(&links, &plan.mark, false, || Ok(())).expect("a look"),
        None,
        "it is another Network's"
    );
    links.add(marked("renamed", &plan.mark));
    let (link, mark) = find_child(&links, &plan.mark, false, || Ok(())).expect("a look").expect("found");
    assert_eq!((link.name.as_str(), &mark), ("renamed", &plan.mark));
}

#[test]
fn what_is_wrong_with_a_child_is_said() {
    let plan = plan();
    let good = Link {
        up: true,
        mac: Some(plan.mark.mac),
        link: Some(1),
        details: Details::Macvlan(MacvlanMode::Bridge),
        ..FakeLinks::bare(name("net1"), "macvlan")
    };
    let addresses: Vec<Address> = plan.mark.addresses.iter().map(|net| Address::new(3, *net)).collect();
    let wanted =
        Wanted { kind: Some(UnderlayKind::Macvlan), parent: Some(1), mode: Some(MacvlanMode::Bridge) };
    let wrong = |link: Link| wanted.wrong_with(&link, &plan.mark, &addresses).join("; ");
    assert_eq!(wrong(good.clone()), "");
    assert_eq!(wrong(Link { up: false, ..good.clone() }), "it is down");
    assert_eq!(wrong(Link { name: name("x"), ..good.clone() }), "it is named x");
    assert_eq!(wrong(Link { mac: None, ..good.clone() }), "it has another MAC");
    assert_eq!(wrong(Link { link: Some(2), ..good.clone() }), "it is a child of another link");
    let private = Details::Macvlan(MacvlanMode::Private);
    assert_eq!(wrong(Link { details: private, ..good.clone() }), "its mode is private and not bridge");
    assert_eq!(wanted.wrong_with(&good, &plan.mark, &addresses[1..]), ["it has lost 10.9.0.18/24"]);
    // What the Network is on is not known before it is set up.
    let unknown = Wanted { kind: None, parent: None, mode: None };
    assert!(unknown.wrong_with(&Link { link: Some(2), ..good }, &plan.mark, &addresses).is_empty());
}

/// The host end of a plan's pair, as it is when the pod's end gets its mark.
fn host_end(plan: &Plan) -> Link {
    Link {
        alias: Some(port::alias(7, &plan.host)),
        group: owner::GROUP,
        up: true,
        master: Some(1),
        port: Some(PortFlags::default()),
        ..FakeLinks::bare(plan.host.clone(), "veth")
    }
}

#[test]
fn a_pair_changes_neither_mac_nor_mtu_of_the_bridge() {
    let plan = plan();
    let pod = NetNs::current().expect("a namespace");
    let new = port::new_pair(&plan, 1, &pod, Some(AddrGenMode::None)).expect("a pair");
    assert_eq!(new.mac.expect("a MAC").octets()[0], 0xfe, "above all others");
    assert_eq!(new.mtu.map(Mtu::get), Some(Mtu::MAX), "not the least of the ports'");
    assert_eq!((new.name.as_str(), new.master), (plan.host.as_str(), Some(1)));
    new.validate().expect("it can be made");
    let owner = owner::of_alias(new.alias.as_deref().expect("an alias")).expect("ours");
    assert_eq!(Mark::parse(owner), None, "it is nobody's attachment: the pod's end is");
}

#[test]
fn what_is_left_of_a_pair_goes_and_links_of_others_stay() {
    let plan = plan();
    for left in [
        host_end(&plan),
        // Killed even before it said whose it is.
        Link { alias: None, ..host_end(&plan) },
    ] {
        let links = world();
        links.add(left);
        port::clear(&links, 7, &plan.host).expect("cleared");
        assert_eq!(links.names(), ["eth1"]);
        port::clear(&links, 7, &plan.host).expect("nothing is there");
    }
    for others in [
        Link { alias: Some(port::alias(8, &plan.host)), ..host_end(&plan) },
        Link { alias: Some(plan.mark.alias()), ..host_end(&plan) },
        Link { alias: None, group: 0, ..host_end(&plan) },
    ] {
        let links = world();
        links.add(others);
        let error = port::clear(&links, 7, &plan.host).expect_err("it is another's");
        assert_eq!(error.reason, Reason::Conflict, "{error}");
        assert_eq!(links.names().len(), 2, "it stays");
        assert!(port::host_ends(&links, 7).expect("a list").is_empty());
    }
    let links = world();
    links.add(host_end(&plan));
    let there = port::host_ends(&links, 7).expect("a list");
    port::collect(&links, &there, &[plan.host.to_string()].into()).expect("it is somebody's");
    assert_eq!(links.names().len(), 2);
    port::collect(&links, &there, &Default::default()).expect("it is nobody's");
    assert_eq!(links.names(), ["eth1"]);
}

#[test]
fn a_forged_mark_does_not_make_another_link_the_port_of_a_bridge() {
    let plan = plan();
    assert!(port::is_host_end(&host_end(&plan), &plan.mark));
    // The pod says that its interface is called like its first one, whose host end has that mark.
    let forged = Mark { interface: "eth0".parse().expect("a name"), ..plan.mark.clone() };
    let name = forged.host();
    let of_eth0 = Link { alias: Some(forged.alias()), ..FakeLinks::bare(name, "veth") };
    assert!(!port::is_host_end(&of_eth0, &forged));
}

#[test]
fn what_is_wrong_with_a_port_of_a_bridge_is_said() {
    let mut network = network();
    let wrong = |network: &Network, link: Link| port::like(network, 1).fix(&link).map(|(_, wrong)| wrong);
    assert_eq!(wrong(&network, host_end(&plan())), None);
    for damaged in [
        Link { master: None, ..host_end(&plan()) },
        Link { master: Some(2), ..host_end(&plan()) },
        Link { port: Some(PortFlags { isolated: true, ..PortFlags::default() }), ..host_end(&plan()) },
    ] {
        assert!(wrong(&network, damaged).expect("it is wrong").contains("no longer a port of its bridge"));
    }
    network.underlay.as_mut().expect("underlay").mode = UnderlayMode::Private;
    assert!(wrong(&network, host_end(&plan())).is_some(), "pods reach each other");
}

#[test]
fn a_pods_end_of_the_other_kind_is_made_again() {
    let plan = plan();
    let pair =
        Link { up: true, mac: Some(plan.mark.mac), link: Some(9), ..FakeLinks::bare(name("net1"), "veth") };
    let addresses: Vec<Address> = plan.mark.addresses.iter().map(|net| Address::new(3, *net)).collect();
    let wrong = |kind| {
        let wanted = Wanted { kind: Some(kind), parent: Some(1), mode: Some(MacvlanMode::Bridge) };
        wanted.wrong_with(&pair, &plan.mark, &addresses).join("; ")
    };
    assert_eq!(wrong(UnderlayKind::Bridge), "");
    assert_eq!(wrong(UnderlayKind::Macvlan), "it is a veth and not a macvlan");
}
