//! The comparison of all that was made: it finds each kind of damage, and setting the Network up puts it
//! right.

mod support;

use knit_kernel::addr::Address;
use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::link::{Change, PortFlags};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{as_stranger, eventually, in_namespaces};
use knit_kernel::{Handle, Mac, Mtu, Op, owner};
use knit_nft::{Element, Family, IfName, L4Proto, Nftables, Port, TableId, Transaction, Vni};
use knit_runtime::{Network, NotKnown, PortMapping, Protocol, Reason, Runtime, Survey, Topology};
use support::{
    Cluster, Node, SOON, Talk, TestPod, blue, default_network, green, ip, name, net, run, udp, udp_via,
};

type Damage = (&'static str, Box<dyn Fn()>);

fn delete_table(space: &NetNs, family: Family) {
    let mut tx = Transaction::new();
    tx.delete_table(&TableId::new(family, "knit"));
    Kernel::open_in(space).expect("nftables").commit(&tx).expect("deleted");
}

/// Takes all rules out of the chain that has the most, and all elements out of the set that has the most.
fn empty(space: &NetNs, family: Family) {
    let id = TableId::new(family, "knit");
    let mut kernel = Kernel::open_in(space).expect("nftables");
    let table = kernel.table(&id).expect("read").expect("a table");
    let mut tx = Transaction::new();
    let chain = table.chains.values().max_by_key(|chain| chain.rules.len()).expect("a chain");
    tx.flush_chain(&id, chain.chain.name.clone());
    let set = table.sets.values().max_by_key(|set| set.elements.len()).expect("a set");
    tx.delete_elements(&id, &set.set, set.elements.values().cloned().collect());
    kernel.commit(&tx).expect("emptied");
}

fn change(space: &NetNs, link: &str, edit: impl FnOnce(&mut Change<'_>)) {
    let mut change = Change::named(name(link));
    edit(&mut change);
    Handle::open(space).expect("a handle").apply(&[change.into()]).expect("changed");
}

fn rename(space: &NetNs, link: &str, to: &str) {
    let handle = Handle::open(space).expect("a handle");
    let index = handle.index_of(&name(link)).expect("a link");
    let change = |up| Change { up: Some(up), ..Change::of(index) };
    let renamed = Change { rename: Some(name(to)), ..change(true) };
    // Kernels before 6.2 rename only what is down.
    handle.apply(&[change(false).into(), renamed.into()]).expect("renamed");
}

fn delete(space: &NetNs, link: &str) {
    let handle = Handle::open(space).expect("a handle");
    handle.delete_link(handle.index_of(&name(link)).expect("a link")).expect("deleted");
}

/// Does something to a namespace and a link in it.
type Kind = Box<dyn Fn(&NetNs, &str)>;

/// What can be done to a namespace of the runtime's, with the host end of a pod in it.
fn damages(space: &NetNs, host: &str, switched: bool) -> Vec<Damage> {
    let mut all: Vec<Damage> = Vec::new();
    let mut add = |what: &'static str, kind: Kind| {
        let (space, host) = (space.try_clone().expect("a clone"), host.to_owned());
        all.push((what, Box::new(move || as_stranger(|| kind(&space, &host)))));
    };
    let family = if switched { Family::Bridge } else { Family::Inet };
    add("the table is deleted", Box::new(|space, _| delete_table(space, Family::Inet)));
    add("chain and set are emptied", Box::new(move |space, _| empty(space, family)));
    add("a host end is down", Box::new(|space, host| change(space, host, |c| c.up = Some(false))));
    add(
        "a host end has another MTU",
        Box::new(|space, host| change(space, host, |c| c.mtu = Mtu::new(700).ok())),
    );
    add("a host end has another name", Box::new(|space, host| rename(space, host, "strange")));
    add("a host end is in no group", Box::new(|space, host| change(space, host, |c| c.group = Some(0))));
    add(
        "a host end has another MAC",
        Box::new(|space, host| change(space, host, |c| c.mac = Some(Mac([2, 0, 0, 0, 0, 9])))),
    );
    add(
        "forwarding is off",
        Box::new(|space, _| {
            Sysctls::of(space).expect("sysctls").set(&Sysctl::ipv4_forwarding(), 0).expect("off");
        }),
    );
    if switched {
        add("the bridge has another name", Box::new(|space, _| rename(space, "bridge", "strange")));
        add("the bridge is gone", Box::new(|space, _| delete(space, "bridge")));
        add("a port is free", Box::new(|space, host| change(space, host, |c| c.master = Some(None))));
        add(
            "a port learns",
            Box::new(|space, host| {
                let flags = PortFlags { learning: true, flood: true, ..PortFlags::default() };
                change(space, host, |c| c.port = Some(flags));
            }),
        );
        add(
            "forwarding entries are gone",
            Box::new(|space, _| {
                let handle = Handle::open(space).expect("a handle");
                let vxlan = handle.index_of(&name("vxlan")).expect("a tunnel");
                let entries = handle.fdb(Some(vxlan)).expect("listed");
                let entry = entries.into_iter().find(|e| !e.learned).expect("an entry");
                handle.remove(entry).expect("removed");
            }),
        );
    } else {
        add(
            "routes are gone",
            Box::new(|space, _| {
                let handle = Handle::open(space).expect("a handle");
                let ours = RouteFilter { protocol: Some(owner::PROTOCOL), ..RouteFilter::default() };
                for route in handle.routes(&ours).expect("routes") {
                    handle.remove(route).expect("removed");
                }
            }),
        );
    }
    add(
        "a neighbour is gone",
        Box::new(|space, _| {
            let handle = Handle::open(space).expect("a handle");
            let ours = NeighbourFilter { protocol: Some(owner::PROTOCOL), ..NeighbourFilter::default() };
            let neighbour = handle.neighbours(&ours).expect("listed").into_iter().next();
            handle.remove(neighbour.expect("a neighbour")).expect("removed");
        }),
    );
    all
}

async fn whole(node: &Node, when: &str) {
    assert_eq!(node.runtime.survey().await.expect("a survey"), Survey::default(), "{when}");
}

/// Each damage is told and found, belongs to this Network, and setting that up puts it right; another survey
/// finds nothing any more.
async fn suffer(node: &Node, network: &Network, all: Vec<Damage>, talks: impl Fn() -> bool) {
    whole(node, "before").await;
    for (what, damage) in all {
        // What was told before is not about this.
        while tokio::time::timeout(support::NEVER, node.runtime.disturbed()).await.is_ok() {}
        damage();
        tokio::time::timeout(SOON, node.runtime.disturbed())
            .await
            .unwrap_or_else(|_| panic!("{what}: not told"));
        let survey = node.runtime.survey().await.expect("a survey");
        assert_eq!(survey.networks.keys().collect::<Vec<_>>(), [&network.name], "{what}: {survey:?}");
        node.setup(network).await;
        whole(node, what).await;
        eventually(what, SOON, &talks);
    }
}

/// Asked more than once: what is sent to a link that has just come up may be lost.
fn answers(from: &NetNs, pod: &TestPod, address: &str) -> bool {
    (0..100).any(|_| udp(from, &pod.space, ip(address), 5000, support::NEVER) != Talk::Silence)
}

#[test]
fn every_damage_of_the_default_network_is_found_and_put_right() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let pod = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let mut all = damages(&cluster.a.space, &pod.attachments[0].host.name, false);
            let tunnel = cluster.a.space.try_clone().expect("a clone");
            if Handle::open(&tunnel).expect("a handle").index_of(&name("vx-1")).is_ok() {
                all.push(("the tunnel is gone", Box::new(move || as_stranger(|| delete(&tunnel, "vx-1")))));
            }
            suffer(&cluster.a, &network, all, || answers(&cluster.a.space, &pod, "10.244.1.5")).await;
        });
    });
}

#[test]
fn every_damage_of_routers_is_found_and_put_right() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let one = node.pod(&blue(node), "one", &["10.77.0.18", "fd77::12"]).await;
            let two = node.pod(&green(node), "two", &["10.77.0.34", "fd77::22"]).await;
            for (network, pod, address, uplink) in
                [(blue(node), &one, "10.77.0.18", "up-2"), (green(node), &two, "10.77.0.34", "up-3")]
            {
                let (router, switched) = (node.router(&network.name), network.topology == Topology::Layer2);
                let mut all = damages(&router, &pod.attachments[0].host.name, switched);
                let space = || node.space.try_clone().expect("a clone");
                let inside = || router.try_clone().expect("a clone");
                let mut add = |what: &'static str, damage: Box<dyn Fn()>| {
                    all.push((what, Box::new(move || as_stranger(&damage))));
                };
                let (a, b, c, d) = (space(), space(), inside(), inside());
                add("the uplink is down", Box::new(move || change(&a, uplink, |c| c.up = Some(false))));
                add("the uplink is gone", Box::new(move || delete(&b, uplink)));
                add("the tunnel is gone", Box::new(move || delete(&c, "vxlan")));
                let (a, b, c) = (space(), inside(), inside());
                add("the uplink has another name", Box::new(move || rename(&a, uplink, "strange")));
                add("the tunnel has another name", Box::new(move || rename(&b, "vxlan", "strange")));
                add(
                    "the tunnel is in another group",
                    Box::new(move || change(&c, "vxlan", |c| c.group = Some(7))),
                );
                let a = inside();
                add("the uplink's end has another name", Box::new(move || rename(&a, "uplink", "strange")));
                add(
                    "the uplink has a strange address",
                    Box::new(move || {
                        let handle = Handle::open(&d).expect("a handle");
                        let index = handle.index_of(&name("uplink")).expect("an uplink");
                        let op = Op::create(Address::new(index, net("10.3.3.3/24")));
                        handle.apply(&[op]).expect("added");
                    }),
                );
                suffer(node, &network, all, || answers(&node.space, pod, address)).await;
            }
            // Somebody deletes the whole table of the node: everybody's part of it comes back.
            as_stranger(|| delete_table(&node.space, Family::Inet));
            tokio::time::timeout(SOON, node.runtime.disturbed()).await.expect("told");
            let survey = node.runtime.survey().await.expect("a survey");
            assert_eq!(survey.networks.keys().collect::<Vec<_>>(), ["blue", "default", "green"]);
            for network in [default_network(), blue(node), green(node)] {
                node.setup(&network).await;
            }
            whole(node, "the node's table").await;
        });
    });
}

#[test]
fn a_router_that_was_unmounted_is_mounted_again_and_its_pods_do_not_notice() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let network = blue(&cluster.a);
            let pod = cluster.a.pod(&network, "one", &["10.77.0.18", "fd77::12"]).await;
            let id = cluster.a.router("blue").id();
            NetNs::delete(cluster.a.routers.join("blue")).expect("unmounted");
            assert!(answers(&cluster.a.space, &pod, "10.77.0.18"), "it lives as long as the runtime does");
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list").len(), 1, "nothing is lost");
            let survey = cluster.a.runtime.survey().await.expect("a survey");
            assert_eq!(survey.networks["blue"][0].kind, "namespace", "{survey:?}");
            cluster.a.setup(&network).await;
            whole(&cluster.a, "mounted").await;
            assert_eq!(cluster.a.router("blue").id(), id);
            cluster.a.restart();
            assert!(answers(&cluster.a.space, &pod, "10.77.0.18"), "it outlives the runtime");
        });
    });
}

#[test]
fn a_lost_link_and_a_closed_port_are_what_attaching_again_puts_right() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let pod = TestPod::new("one");
            let mut request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 7000, container_port: 5000, host_ip }];
            let pod = pod.attached(&cluster.a, request.clone()).await;
            whole(&cluster.a, "before").await;
            let one = (request.pod.sandbox.clone(), request.interface.clone());
            as_stranger(|| delete_table(&cluster.a.space, Family::Inet));
            cluster.a.setup(&network).await;
            let survey = cluster.a.runtime.survey().await.expect("a survey");
            assert_eq!(survey, Survey { attachments: [one.clone()].into(), ..Survey::default() });
            cluster.a.runtime.attach(&request).await.expect("attached again");
            whole(&cluster.a, "the port").await;
            let at = std::net::SocketAddr::new(ip("192.168.7.1"), 7000);
            assert_ne!(udp_via(&cluster.outside, &pod.space, at, 5000, SOON), Talk::Silence);

            as_stranger(|| delete(&cluster.a.space, &pod.attachments[0].host.name));
            let survey = cluster.a.runtime.survey().await.expect("a survey");
            assert!(survey.attachments.contains(&one), "{survey:?}");
            cluster.a.runtime.attach(&request).await.expect("attached again");
            cluster.a.setup(&network).await;
            whole(&cluster.a, "the link").await;
        });
    });
}

/// Changes elements of sets of the node's table, as another program: takes away those of a set that `gone`
/// says, and adds others.
fn edit(space: &NetNs, set: &str, gone: impl Fn(&Element) -> bool, more: Vec<Element>) {
    let id = TableId::new(Family::Inet, "knit");
    as_stranger(|| {
        let mut kernel = Kernel::open_in(space).expect("nftables");
        let table = kernel.table(&id).expect("read").expect("a table");
        let there = &table.sets[set];
        let mut tx = Transaction::new();
        let gone: Vec<Element> = there.elements.values().filter(|element| gone(element)).cloned().collect();
        if !gone.is_empty() {
            tx.delete_elements(&id, &there.set, gone);
        }
        if !more.is_empty() {
            tx.add_elements(&id, &there.set, more);
        }
        kernel.commit(&tx).expect("changed");
    });
}

#[test]
fn a_host_port_that_somebody_closed_was_taken_for_open_while_anything_of_it_was_left() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let (node, network) = (&cluster.a, default_network());
            node.setup(&network).await;
            let pod = TestPod::new("one");
            let mut request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let mapping = |protocol, host_port, host_ip| PortMapping {
                protocol,
                host_port,
                container_port: 5000,
                host_ip,
            };
            request.ports = vec![
                mapping(Protocol::Udp, 7000, None),
                mapping(Protocol::Tcp, 7001, None),
                mapping(Protocol::Udp, 7002, Some(ip("192.168.7.1"))),
            ];
            let pod = pod.attached(node, request.clone()).await;
            let one = (request.pod.sandbox.clone(), request.interface.clone());
            let host = pod.attachments[0].host.name.clone();
            let key = |port| (L4Proto::UDP, Port(port));
            let to = |port| (std::net::Ipv4Addr::new(10, 244, 1, 5), Port(port));
            let (udp_7000, all) = (Element::new(&key(7000)), |_: &Element| true);
            let is_7000 = |element: &Element| element.key == udp_7000.key;
            let none = |_: &Element| false;
            let elsewhere = || Element::new(&key(7000)).value(&to(22)).comment(&host);
            let more = || Element::new(&key(7009)).value(&to(5000)).comment(&host);
            type Damage<'a> = Box<dyn Fn() + 'a>;
            let damages: [(&str, Damage<'_>); 6] = [
                ("one is closed", Box::new(|| edit(&node.space, "host-ports4", is_7000, Vec::new()))),
                ("all of a family are", Box::new(|| edit(&node.space, "host-ports6", all, Vec::new()))),
                ("that of an address is", Box::new(|| edit(&node.space, "host-ports-at4", all, Vec::new()))),
                ("it cannot reach itself", Box::new(|| edit(&node.space, "hairpin4", all, Vec::new()))),
                (
                    "one leads elsewhere",
                    Box::new(|| {
                        edit(&node.space, "host-ports4", is_7000, Vec::new());
                        edit(&node.space, "host-ports4", none, vec![elsewhere()]);
                    }),
                ),
                ("there is one more", Box::new(|| edit(&node.space, "host-ports4", none, vec![more()]))),
            ];
            for (what, damage) in damages {
                whole(node, what).await;
                not_read(node).await;
                damage();
                let survey = node.runtime.survey().await.expect("a survey");
                assert_eq!(
                    survey,
                    Survey { attachments: [one.clone()].into(), ..Survey::default() },
                    "{what}"
                );
                node.runtime.attach(&request).await.expect("attached again");
                whole(node, what).await;
                let at = std::net::SocketAddr::new(ip("192.168.7.1"), 7000);
                let talk = udp_via(&cluster.outside, &pod.space, at, 5000, SOON);
                assert_ne!(talk, Talk::Silence, "{what}");
            }
        });
    });
}

#[test]
fn what_another_program_added_to_the_nodes_table_was_never_taken_away() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let network = default_network();
            let pod = TestPod::new("one");
            let mut request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 7000, container_port: 5000, host_ip }];
            let _pod = pod.attached(node, request).await;
            let tenant = node.pod(&blue(node), "two", &["10.77.0.18", "fd77::12"]).await;
            let v4 = |text: &str| text.parse::<std::net::Ipv4Addr>().expect("an address");
            let (pod, other) = (v4("10.244.1.5"), v4("10.244.1.9"));
            let led = |port: u16| Element::new(&(L4Proto::UDP, Port(port))).value(&(pod, Port(53)));
            let foreign: [(&str, Element); 8] = [
                ("uplinks", Element::new(&IfName::new("eth0"))),
                ("uplinks", Element::new(&IfName::new("up-999"))),
                ("uplinks-outside", Element::new(&IfName::new("up-x"))),
                ("uplink-services4", Element::new(&(IfName::new("up-999"), pod))),
                ("host-ports4", led(7001)),
                ("host-ports4", led(7001).comment("knitaaaaaaaaaaa")),
                ("hairpin4", Element::new(&(other, other))),
                ("tunnel-hosts44", Element::new(&(Vni(999), v4("192.168.7.2"), other))),
            ];
            for (set, element) in foreign {
                let what = format!("{set}: {element:?}");
                whole(node, &what).await;
                not_read(node).await;
                edit(&node.space, set, |_| false, vec![element]);
                let survey = node.runtime.survey().await.expect("a survey");
                assert!(survey.attachments.is_empty(), "{what}: {survey:?}");
                let damaged: Vec<&String> = survey.networks.keys().collect();
                assert_eq!(damaged, [&network.name], "{what}");
                node.setup(&network).await;
                whole(node, &what).await;
            }
            // What belongs to somebody is there: another Network's part, and the pod's port.
            let peer = cluster.b.pod(&blue(&cluster.b), "three", &["10.77.0.34", "fd77::22"]).await;
            let talk = udp(&tenant.space, &peer.space, ip("10.77.0.34"), 80, SOON);
            assert_ne!(talk, Talk::Silence);
        });
    });
}

/// Rules are not read once the kernel has told of all that was done to them, which may take a moment.
async fn not_read(node: &Node) {
    let trusted = async { while node.runtime.survey().await.expect("a survey") != Survey::default() {} };
    tokio::time::timeout(SOON, trusted).await.expect("rules are not read forever");
}

#[test]
fn rules_that_nobody_else_touched_are_not_read() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            whole(&cluster.a, "read once").await;
            // As ours, so that nobody is told: a survey that reads the rules would find it.
            delete_table(&cluster.a.space, Family::Arp);
            cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            not_read(&cluster.a).await;
            // Somebody else's table is none of ours.
            let theirs = TableId::new(Family::Inet, "theirs");
            as_stranger(|| {
                let mut tx = Transaction::new();
                tx.create_table(knit_nft::Table::new(theirs));
                Kernel::open_in(&cluster.a.space).expect("nftables").commit(&tx).expect("a table");
            });
            not_read(&cluster.a).await;
            let links = cluster.a.handle().links(&LinkFilter { owned: true, ..LinkFilter::default() });
            assert!(!links.expect("links").is_empty());
        });
    });
}

#[test]
fn rules_that_were_made_just_now_are_not_read_back_unless_somebody_touched_them() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let (network, tenant) = (default_network(), green(&cluster.a));
            cluster.a.setup(&network).await;
            cluster.a.setup(&tenant).await;
            let (space, router) = (&cluster.a.space, cluster.a.router(&tenant.name));
            // As ours, so that nobody is told: a survey that reads the rules would find it.
            delete_table(space, Family::Arp);
            delete_table(&router, Family::Arp);
            not_read(&cluster.a).await;
            touch(space);
            assert!(wrong_rules(&cluster.a).await.contains(&network.name), "touched: it is read");
            touch(&router);
            assert!(wrong_rules(&cluster.a).await.contains(&tenant.name), "touched: it is read");
            cluster.a.setup(&network).await;
            cluster.a.setup(&tenant).await;
            whole(&cluster.a, "put right").await;
            // Made anew while a pod is there whose port of the node is in the table, too.
            let pod = TestPod::new("web");
            let mut request = pod.request(&tenant, &["10.77.0.34", "fd77::22"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 7000, container_port: 5000, host_ip }];
            let _pod = pod.attached(&cluster.a, request).await;
            as_stranger(|| delete_table(space, Family::Inet));
            cluster.a.setup(&network).await;
            cluster.a.setup(&tenant).await;
            let survey = cluster.a.runtime.survey().await.expect("a survey");
            assert_eq!(survey.attachments.len(), 1, "its port is closed, and that is seen: {survey:?}");
        });
    });
}

#[test]
fn the_first_network_that_is_set_up_again_closes_the_uplinks_of_all() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let tenant = node.pod(&blue(node), "one", &["10.77.0.18", "fd77::12"]).await;
            let other = node.pod(&default_network(), "two", &["10.244.1.5", "fd44::1:5"]).await;
            // One way: answers have rules of their own.
            let bind = |space: &NetNs, at: &str| {
                let socket = space.run(|| std::net::UdpSocket::bind(at)).expect("a visit").expect("a socket");
                socket.set_read_timeout(Some(support::NEVER)).expect("a timeout");
                socket
            };
            let (from, to) = (bind(&other.space, "0.0.0.0:0"), bind(&tenant.space, "10.77.0.18:5000"));
            let gets_in = || {
                from.send_to(b"hello", "10.77.0.18:5000").expect("sent");
                to.recv_from(&mut [0; 16]).is_ok()
            };
            assert!(!gets_in(), "before");
            as_stranger(|| delete_table(&node.space, Family::Inet));
            eventually("nothing is closed without rules", SOON, gets_in);
            node.setup(&default_network()).await;
            assert!(!gets_in(), "the default Network is set up again, blue is not yet");
        });
    });
}

/// Attaches and detaches pods at one address of a Network over and over.
async fn churn(runtime: knit_linux::LinuxRuntime, network: Network, addresses: [String; 2], rounds: usize) {
    for round in 0..rounds {
        let pod = TestPod::new(&format!("{}-{}-{round}", network.name, addresses[0]));
        let request = pod.request(&network, &addresses.each_ref().map(String::as_str));
        runtime.attach(&request).await.expect("attached");
        if round % 3 == 2 {
            // The namespace goes first, and the link with it.
            NetNs::delete(&pod.path).expect("deleted");
            drop(pod);
        }
        runtime.detach(&request.pod, None).await.expect("detached");
    }
}

#[test]
fn pods_that_come_and_go_are_not_damage_and_damage_is_found_among_them() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let standing = node.pod(&blue(node), "standing", &["10.77.0.18", "fd77::12"]).await;
            let mut tasks = tokio::task::JoinSet::new();
            for host in 19..=22 {
                let tenant = [format!("10.77.0.{host}"), format!("fd77::{host:x}")];
                tasks.spawn(churn(node.runtime.clone(), blue(node), tenant, 12));
                let tenant = [format!("10.77.0.{}", host + 16), format!("fd77::{:x}", host + 16)];
                tasks.spawn(churn(node.runtime.clone(), green(node), tenant, 12));
                let plain = [format!("10.244.1.{host}"), format!("fd44::1:{host:x}")];
                tasks.spawn(churn(node.runtime.clone(), default_network(), plain, 12));
            }
            let (mut surveys, mut unknown) = (0, 0);
            while !tasks.is_empty() {
                // Rules, too, are compared each time.
                touch(&node.space);
                touch(&node.router("blue"));
                let survey = node.runtime.survey().await.expect("a survey");
                assert!(survey.networks.is_empty(), "churn is taken for damage: {survey:?}");
                surveys += 1;
                unknown += usize::from(survey.unknown.values().any(|why| *why == NotKnown::Moving));
                while let Some(done) = tasks.try_join_next() {
                    done.expect("a pod's life");
                }
                if surveys == 5 {
                    as_stranger(|| {
                        change(&node.router("blue"), &standing.attachments[0].host.name, |c| {
                            c.group = Some(0);
                        });
                    });
                    let survey = node.runtime.survey().await.expect("a survey");
                    assert_eq!(survey.networks.keys().collect::<Vec<_>>(), ["blue"], "{survey:?}");
                    node.setup(&blue(node)).await;
                }
            }
            assert!(surveys > 5 && unknown > 0, "{surveys} surveys, {unknown} of them among changes");
            whole(node, "afterwards").await;
        });
    });
}

/// Somebody else adds a chain to our table and takes it away again.
fn touch(space: &NetNs) {
    as_stranger(|| {
        let id = TableId::new(Family::Inet, "knit");
        let mut kernel = Kernel::open_in(space).expect("nftables");
        let mut tx = Transaction::new();
        tx.add_chain(&id, knit_nft::Chain::regular("strange"));
        kernel.commit(&tx).expect("added");
        let mut tx = Transaction::new();
        tx.delete_chain(&id, "strange");
        kernel.commit(&tx).expect("deleted");
    });
}

/// What is wrong with the rules of Networks, by the survey.
async fn wrong_rules(node: &Node) -> Vec<String> {
    let survey = node.runtime.survey().await.expect("a survey");
    let wrong = survey.networks.into_iter().filter(|(_, all)| all.iter().any(|d| d.kind == "rules"));
    wrong.map(|(network, _)| network).collect()
}

#[test]
fn rules_are_compared_and_put_right_while_the_nodes_address_is_not_to_be_found() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            whole(node, "before").await;
            as_stranger(|| {
                let eth0 = node.handle().index_of(&name("eth0")).expect("eth0");
                for address in node.handle().addresses(Some(eth0)).expect("addresses") {
                    node.handle().remove(address).expect("removed");
                }
            });
            let survey = node.runtime.survey().await.expect("what can be compared is compared");
            assert!(survey.networks.is_empty(), "{survey:?}");
            for network in ["default", "blue", "green"] {
                let why = &survey.unknown[network];
                assert!(matches!(why, NotKnown::Failed(why) if why.contains("192.168.7.1")), "{why:?}");
            }
            as_stranger(|| delete_table(&node.space, Family::Inet));
            as_stranger(|| delete_table(&node.router("blue"), Family::Bridge));
            assert_eq!(wrong_rules(node).await, ["blue", "default", "green"]);
            for network in [default_network(), blue(node), green(node)] {
                let error = node.runtime.setup_network(&network).await.expect_err("no address");
                assert_eq!(error.reason, Reason::NotReady, "{error}");
            }
            assert!(wrong_rules(node).await.is_empty(), "rules are in force again all the same");
        });
    });
}

#[test]
fn rules_are_compared_and_put_right_while_the_mtu_does_not_fit() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let network = Network { mtu: Some(1450), ..blue(node) };
            node.setup(&network).await;
            whole(node, "before").await;
            as_stranger(|| change(&node.space, "eth0", |c| c.mtu = Mtu::new(1400).ok()));
            let survey = node.runtime.survey().await.expect("a survey");
            let kinds: Vec<_> = survey.networks["blue"].iter().map(|damage| damage.kind).collect();
            assert_eq!(kinds, ["node"], "{survey:?}");
            as_stranger(|| delete_table(&node.router("blue"), Family::Inet));
            assert_eq!(wrong_rules(node).await, ["blue"]);
            let error = node.runtime.setup_network(&network).await.expect_err("it does not fit");
            assert!(error.to_string().contains("does not fit"), "{error}");
            assert!(wrong_rules(node).await.is_empty(), "rules are in force again all the same");
        });
    });
}

#[test]
fn a_new_agent_that_cannot_find_its_address_lays_rules_down_all_the_same() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let before = (support::tables(&cluster.a), support::tables_in(&cluster.a.router("blue")));
            cluster.a.restart_with(|config| config.addresses = vec![ip("192.168.7.77")]);
            as_stranger(|| delete_table(&cluster.a.space, Family::Arp));
            for network in [default_network(), blue(&cluster.a)] {
                cluster.a.runtime.setup_network(&network).await.expect_err("no such address");
            }
            let now = (support::tables(&cluster.a), support::tables_in(&cluster.a.router("blue")));
            assert_eq!(now.0.len(), before.0.len());
            assert_eq!((&now.0[0], &now.1), (&before.0[0], &before.1), "what was there stays as it was");
        });
    });
}

#[test]
fn setting_up_a_network_reads_no_rules_that_nobody_else_touched() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            // As ours, so that nobody is told: a set-up that reads the tables would put them back.
            delete_table(&node.space, Family::Arp);
            delete_table(&node.router("green"), Family::Arp);
            let is_gone = |space: &NetNs| {
                let table = TableId::new(Family::Arp, "knit");
                Kernel::open_in(space).expect("nftables").table(&table).expect("read").is_none()
            };
            let mut network = green(node);
            network.cluster_service_ips = vec![ip("10.96.0.9")];
            node.setup(&network).await;
            assert!(is_gone(&node.space) && is_gone(&node.router("green")), "all was read");
            let text = support::tables(node).concat() + &support::tables_in(&node.router("green")).concat();
            assert_eq!(text.matches("10.96.0.9").count(), 2, "{text}");
            assert!(!text.contains("\"up-3\" . 10.96.0.1"), "what was before is gone: {text}");
            assert!(text.contains("\"up-2\" . 10.96.0.1"), "others keep theirs: {text}");
            node.runtime.remove_network("blue").await.expect("removed");
            assert!(is_gone(&node.space), "all was read");
            let text = support::tables(node).concat();
            assert!(!text.contains("up-2") && text.contains("up-3"), "{text}");
            touch(&node.space);
            node.setup(&network).await;
            assert!(!is_gone(&node.space), "somebody else touched them: they are read");
        });
    });
}

#[test]
fn what_a_survey_finds_wrong_is_put_right_although_nobody_was_heard_to_touch_it() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            // What an agent finds, it does not trust as it does what it made.
            cluster.a.restart();
            let node = &cluster.a;
            for network in [default_network(), blue(node), green(node)] {
                node.setup(&network).await;
            }
            // As ours, so that nobody is told: a set-up that goes by what it remembers leaves them out.
            delete_table(&node.space, Family::Arp);
            delete_table(&node.router("green"), Family::Arp);
            assert!(wrong_rules(node).await.contains(&"green".to_owned()));
            for network in [default_network(), blue(node), green(node)] {
                node.setup(&network).await;
            }
            whole(node, "after").await;
        });
    });
}

#[test]
fn a_part_that_somebody_else_took_away_comes_back_although_another_network_was_set_up_first() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            node.pod(&default_network(), "one", &["10.244.1.5", "fd44::1:5"]).await;
            whole(node, "before").await;
            as_stranger(|| delete_table(&node.space, Family::Inet));
            for network in [green(node), default_network(), blue(node), green(node)] {
                node.setup(&network).await;
            }
            whole(node, "after").await;
        });
    });
}

#[test]
fn what_was_seen_while_comparing_is_what_a_list_would_say() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let _pods = [
                node.pod(&default_network(), "one", &["10.244.1.5", "fd44::1:5"]).await,
                node.pod(&blue(node), "two", &["10.77.0.20", "fd77::14"]).await,
                node.pod(&green(node), "three", &["10.77.0.36", "fd77::24"]).await,
            ];
            let sandboxes = async |node: &Node| {
                let (survey, seen) = node.runtime.survey_and_list().await.expect("a survey");
                assert_eq!(survey, Survey::default());
                let mut all =
                    [seen.expect("it is read along"), node.runtime.list(None).await.expect("a list")];
                all.iter_mut().for_each(|all| all.sort_by_key(|one| one.pod.sandbox.to_string()));
                assert_eq!(all[0], all[1]);
                all[0].len()
            };
            assert_eq!(sandboxes(node).await, 3);
            // An agent that was replaced knows only the Networks that it has set up: others have pods, too.
            cluster.a.restart();
            cluster.a.setup(&default_network()).await;
            assert_eq!(sandboxes(&cluster.a).await, 3);
        });
    });
}
