//! The comparison of all that was made: it finds each kind of damage, and setting the Network up puts it right.

mod support;

use knit_kernel::addr::Address;
use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::link::{Change, PortFlags};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::{Family, Kernel, Nftables, TableId, Transaction};
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{as_stranger, eventually, in_namespaces};
use knit_kernel::{Handle, Mac, Mtu, Op, owner};
use knit_runtime::{Network, PortMapping, Protocol, Runtime, Survey, Topology};
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

/// Each damage is told and found, belongs to this Network, and setting that up puts it right; another survey finds
/// nothing any more.
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

/// Rules are not read once the kernel has told of all that was done to them, which may take a moment.
async fn not_read(node: &Node) {
    let trusted = async { while node.runtime.survey().await.expect("a survey") != Survey::default() {} };
    tokio::time::timeout(SOON, trusted).await.expect("rules are not read for ever");
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
                tx.create_table(knit_kernel::nft::Table::new(theirs));
                Kernel::open_in(&cluster.a.space).expect("nftables").commit(&tx).expect("a table");
            });
            not_read(&cluster.a).await;
            let links = cluster.a.handle().links(&LinkFilter { owned: true, ..LinkFilter::default() });
            assert!(!links.expect("links").is_empty());
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
