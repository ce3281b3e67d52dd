//! The comparison of all that was made: it finds each kind of damage, and setting the Network up puts it
//! right.

#[path = "survey/elements.rs"]
mod elements;
#[path = "survey/rules.rs"]
mod rules;
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
use knit_runtime::{
    Network, NetworkName, NotKnown, PortMapping, Protocol, Reason, Runtime, Survey, Topology,
};
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

/// Rules are not read once the kernel has told of all that was done to them, which may take a moment.
async fn not_read(node: &Node) {
    let trusted = async { while node.runtime.survey().await.expect("a survey") != Survey::default() {} };
    tokio::time::timeout(SOON, trusted).await.expect("rules are not read forever");
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
