//! What others do to the kernel's state is repaired: one random damage at a time on two nodes with real
//! agents, Services and steering; a whole rule set that is flushed; a program that fights; routers that go.

mod damage;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use knit_nft::{
    Element, Family, IfName as NftName, L4Proto, Nftables, Port, TableId, TableState, Transaction, Vni,
};

use crate::flows::*;
use crate::support::*;
use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::link::{Change, Link};
use knit_kernel::nft::Kernel;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{as_stranger, eventually, in_namespaces};
use knit_kernel::{Handle, IfName, Mtu, NetNs, owner};
use knit_node::agent::Agent;
use knit_node::reconcile::Pass;

const STOP: Duration = Duration::from_secs(5);
const A: &str = "192.168.7.1";
const B: &str = "192.168.7.2";
const ROUTERS: [&str; 2] = ["blue", "green"];

/// A port of the first node that leads to a pod, and the pod's.
const HOST_PORT: (u16, u16) = (8443, 9080);

/// Two nodes with a pod of each Network, a Service of each tenant, and a client outside.
struct Bed {
    nodes: [Node; 2],
    agents: [Agent; 2],
    client: NetNs,
    pods: BTreeMap<&'static str, Pod>,
}

fn with_bed<F: Future<Output = ()>>(scenario: impl FnOnce(Bed) -> F + Send) {
    in_namespaces(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let dir = PathBuf::from("/run/test");
            let (wire, nodes) = nodes(&dir);
            let client = plug(&wire, "client", 99);
            for node in &nodes {
                ["192.168.7.99", "fd07::99"].iter().for_each(|at| default_route(&node.space, ip(at)));
            }
            let objects = dir.join("objects");
            write_objects(&objects);
            for (space, port, number) in [("sky", 30080, 20), ("forest", 30090, 21)] {
                let ports = [("tcp", "TCP", 80, port)];
                ServiceSpec::new(space, "web").ports(&ports).kind("NodePort").ip(number).write(&objects);
            }
            let (a, b) = tokio::join!(nodes[0].start(), nodes[1].start());
            let mut pods = BTreeMap::new();
            for (names, space) in [
                (["plain-a", "plain-b"], "shop"),
                (["sky-a", "sky-b"], "sky"),
                (["forest-a", "forest-b"], "forest"),
            ] {
                let port = (space == "shop").then_some(HOST_PORT);
                let one = nodes[0].pod_with_port(names[0], space, port);
                let (one, two) = tokio::join!(one, nodes[1].pod(names[1], space));
                for pod in [one.0, two.0] {
                    serve_tcp(&pod.space, 9080, pod.name);
                    pods.insert(pod.name, pod);
                }
                if space != "shop" {
                    let endpoints = [(&pods[names[0]], "a"), (&pods[names[1]], "b")];
                    slices(&objects, (space, "web"), &[("tcp", "TCP", 9080)], &endpoints);
                }
            }
            let bed = Bed { nodes, agents: [a, b], client, pods };
            wait("everything works", || bed.works()).await;
            scenario(bed).await;
        });
    });
}

impl Bed {
    /// Pods of a Network reach each other, Services are reached, and nobody gets into another Network.
    fn works(&self) -> Result<(), String> {
        for (from, to) in [("plain-a", "plain-b"), ("sky-b", "sky-a"), ("forest-a", "forest-b")] {
            for address in &self.pods[to].addresses {
                let said = ask_once(&self.pods[from].space, Tcp, (*address, 9080));
                if !matches!(&said, Ok((name, _)) if name == to) {
                    return Err(format!("{from} to {to} at {address}: {said:?}"));
                }
            }
        }
        for (node, port, both) in [(A, 30080, ["sky-a", "sky-b"]), (B, 30090, ["forest-a", "forest-b"])] {
            names_at(&self.client, Tcp, (ip(node), port), &both)?;
        }
        for at in [A, "fd07::1"] {
            names_at(&self.client, Tcp, (ip(at), HOST_PORT.0), &["plain-a"])?;
        }
        let sky = ["sky-a", "sky-b"];
        names_at(&self.pods["sky-a"].space, Tcp, (ip("10.96.0.20"), 80), &sky)?;
        self.apart()
    }

    /// Nobody gets into another Network.
    fn apart(&self) -> Result<(), String> {
        self.apart_but_on(None)
    }

    /// Nobody gets into another Network, but perhaps on this node.
    fn apart_but_on(&self, node: Option<&str>) -> Result<(), String> {
        let pairs = [
            ("plain-a", "sky-a"),
            ("plain-b", "forest-b"),
            ("plain-b", "sky-b"),
            ("sky-a", "plain-a"),
            ("forest-b", "plain-b"),
        ];
        let counts = |(from, _): &&(&str, &str)| node.is_none_or(|node| !from.ends_with(&format!("-{node}")));
        // At the same time: each waits for an answer that must not come.
        let crossed = std::thread::scope(|scope| {
            let asked = pairs.iter().filter(counts).map(|(from, to)| {
                let (from, to) = (&self.pods[from], &self.pods[to]);
                scope.spawn(move || match ask(&from.space, Tcp, (to.addresses[0], 9080)) {
                    Ok((name, _)) if name == to.name => Some(format!("{} reaches {name}", from.name)),
                    _ => None,
                })
            });
            let asked: Vec<_> = asked.collect();
            asked.into_iter().find_map(|asked| asked.join().expect("asked"))
        });
        crossed.map_or(Ok(()), Err)
    }

    /// The namespaces that Knit works in, with their names.
    fn spaces(&self) -> Vec<(String, NetNs)> {
        let mut all = Vec::new();
        for node in &self.nodes {
            all.push((node.name.to_owned(), node.space.try_clone().expect("a clone")));
            for router in ROUTERS {
                let path = node.dir.join("run").join("netns").join(router);
                // One that is not mounted is missing in what is compared.
                all.extend(NetNs::open(path).ok().map(|space| (format!("{}/{router}", node.name), space)));
            }
        }
        all
    }

    /// All that Knit made, in words that are the same when it is made again.
    fn state(&self) -> BTreeSet<String> {
        self.spaces().into_iter().flat_map(|(name, space)| words(&name, &space)).collect()
    }

    async fn pass(&self) {
        for agent in &self.agents {
            agent.core().reconcile(&Pass::default()).await;
        }
    }

    async fn stop(self) {
        for agent in self.agents {
            agent.stop(STOP).await;
        }
    }
}

/// What is ours in a namespace.
fn words(name: &str, space: &NetNs) -> Vec<String> {
    let handle = Handle::open(space).expect("a handle");
    let links = handle.links(&LinkFilter::default()).expect("links");
    let of = |index: u32| links.iter().find(|l| l.index == index).map_or("?", |l| l.name.as_str());
    let mut all = Vec::new();
    for Link { name, up, mtu, mac, group, alias, port, master, .. } in &links {
        if alias.is_some() || port.is_some() {
            let master = master.map(of);
            all.push(format!("link {name} {up} {mtu} {mac:?} {group} {alias:?} {port:?} {master:?}"));
        }
    }
    let ours = RouteFilter { protocol: Some(owner::PROTOCOL), ..RouteFilter::default() };
    for route in handle.routes(&ours).expect("routes") {
        let link = route.interface.map(of);
        all.push(format!("route {} {:?} {link:?} {:?}", route.destination, route.gateway, route.source));
    }
    let ours = NeighbourFilter { protocol: Some(owner::PROTOCOL), ..NeighbourFilter::default() };
    for neighbour in handle.neighbours(&ours).expect("neighbours") {
        all.push(format!("neighbour {} {} {:?}", of(neighbour.interface), neighbour.address, neighbour.mac));
    }
    for entry in handle.fdb(None).expect("forwarding entries").into_iter().filter(|e| !e.learned) {
        all.push(format!("fdb {} {:?} {:?}", of(entry.interface), entry.mac, entry.place));
    }
    for mut table in tables(space) {
        // What packets put into a set comes back with packets.
        table.sets.values_mut().filter(|set| set.set.dynamic).for_each(|set| set.elements.clear());
        // What a proxy gave numbers to may have others when it was made again; that it works is seen by its
        // Services.
        if table.id().name.starts_with("knit-proxy") {
            all.push(format!("table {}", table.id()));
        } else {
            all.push(format!("{:?}", table.without_handles()));
        }
    }
    for sysctl in [Sysctl::ipv4_forwarding(), Sysctl::ipv6_forwarding()] {
        let value = Sysctls::of(space).and_then(|s| s.get(&sysctl)).expect("a sysctl");
        all.push(format!("{sysctl} {value}"));
    }
    all.into_iter().map(|word| format!("{name}: {word}")).collect()
}

fn tables(space: &NetNs) -> Vec<TableState> {
    let mut kernel = Kernel::open_in(space).expect("nftables");
    let all = kernel.tables().expect("tables").into_iter().filter(|id| id.name.starts_with("knit"));
    all.collect::<Vec<_>>().iter().filter_map(|id| kernel.table(id).expect("read")).collect()
}

fn flush(space: &NetNs) {
    as_stranger(|| {
        let mut tx = Transaction::new();
        for table in tables(space) {
            tx.delete_table(table.id());
        }
        Kernel::open_in(space).expect("nftables").commit(&tx).expect("flushed");
    });
}

#[test]
fn a_flushed_rule_set_is_back_without_a_pass_and_networks_are_apart_again() {
    with_bed(|bed| async move {
        let before = bed.state();
        // No pass of a minute is waited for: the kernel tells.
        for (name, space) in bed.spaces() {
            flush(&space);
            let there = || bed.state() == before;
            eventually(&format!("{name}: the rules are back"), Duration::from_secs(20), there);
            bed.apart().expect("Networks are apart");
        }
        wait("Services are back", || bed.works()).await;
        let text = bed.agents[0].core().metrics_text();
        assert!(text.contains("knit_node_repairs_total{what=\"rules\"}"), "{text}");
        assert!(repairs(&bed.agents[0], "services") > 0, "{text}");
        bed.stop().await;
    });
}

/// How often something was repaired, by the agent's numbers.
fn repairs(agent: &Agent, what: &str) -> u64 {
    let line = format!("knit_node_repairs_total{{what=\"{what}\"}} ");
    let text = agent.core().metrics_text();
    text.lines().find_map(|l| l.strip_prefix(line.as_str())).map_or(0, |n| n.parse().expect("a number"))
}

#[test]
fn a_program_that_fights_is_limited_and_reported_and_holds_nobody_up() {
    with_bed(|bed| async move {
        let router = NetNs::open(bed.nodes[0].dir.join("run").join("netns").join("blue")).expect("a router");
        fight(&bed, router, ("blue", 1), |other| {
            let forest = ["forest-a", "forest-b"];
            names_at(&other.space, Tcp, (ip("10.96.0.21"), 80), &forest).expect("Services of others");
        })
        .await;
        bed.stop().await;
    });
}

#[test]
fn a_program_that_fights_in_the_nodes_own_table_is_limited_and_reported_and_holds_nobody_up() {
    with_bed(|bed| async move {
        let node = bed.nodes[0].space.try_clone().expect("a clone");
        // All three Networks have a part in it, and each is limited.
        fight(&bed, node, ("default", 3), |_| {}).await;
        bed.apart().expect("Networks are apart afterwards");
        bed.stop().await;
    });
}

/// Deletes a table of ours on the first node again and again until that is reported; meanwhile a pod is made
/// there. Everything works afterwards. So many Networks have a part in the table, this one among them.
async fn fight(bed: &Bed, space: NetNs, (network, parts): (&str, u64), meanwhile: impl FnOnce(&Pod)) {
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let fight = std::thread::spawn(move || {
        let mut rounds = 0_u64;
        as_stranger(|| {
            let mut kernel = Kernel::open_in(&space).expect("nftables");
            while stopped.try_recv().is_err() {
                let mut tx = Transaction::new();
                tx.delete_table(&TableId::new(Family::Inet, "knit"));
                rounds += u64::from(kernel.commit(&tx).is_ok());
                std::thread::yield_now();
            }
        });
        rounds
    });
    let status = bed.nodes[0].dir.join("status");
    let told = || {
        let files = std::fs::read_dir(&status).into_iter().flatten().flatten();
        let mut texts = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
        texts.any(|text| text.contains("KnitIsDisturbed") && text.contains(&format!("Network {network}")))
    };
    wait("it is reported", || if told() { Ok(()) } else { Err("no event".into()) }).await;
    // Meanwhile somebody else gets a pod on the same node.
    let (other, _) = bed.nodes[0].pod("forest-c", "forest").await;
    meanwhile(&other);
    stop.send(()).expect("it fights");
    let rounds = fight.join().expect("it ended");
    let limited = repairs(&bed.agents[0], "rules");
    let most = (parts * (rounds + 1)).min(parts * 60);
    assert!(limited <= most, "{limited} repairs for {rounds} blows");
    wait("all is well afterwards", || bed.works()).await;
}

#[test]
fn limits_of_connection_tracking_that_somebody_changed_are_set_again() {
    with_bed(|bed| async move {
        let limit = Sysctl::new("net/netfilter/nf_conntrack_tcp_timeout_established").expect("a sysctl");
        let value = |space: &NetNs| Sysctls::of(space).and_then(|s| s.get(&limit)).expect("a value");
        for (name, space) in bed.spaces().into_iter().filter(|(name, _)| name.starts_with('a')) {
            assert_eq!(value(&space), "86400", "{name}: as a proxy sets it");
            Sysctls::of(&space).expect("sysctls").set(&limit, 77).expect("changed");
            eventually(&format!("{name}: it is as it was"), SOON, || value(&space) == "86400");
        }
        assert!(repairs(&bed.agents[0], "sysctls") >= 3, "{}", bed.agents[0].core().metrics_text());
        bed.stop().await;
    });
}

#[test]
fn a_pod_that_flaps_or_deletes_its_own_link_costs_nobody_else_and_is_told() {
    with_bed(|bed| async move {
        let agent = &bed.agents[0];
        let all = ["rules", "links", "routes", "sysctls", "attachment"];
        let count = || all.map(|what| repairs(agent, what)).iter().sum::<u64>();
        let before = count();
        let inside = Handle::open(&bed.pods["sky-a"].space).expect("a handle");
        let eth0 = IfName::new("eth0").expect("a name");
        for up in [false, true].repeat(100) {
            let change = Change { up: Some(up), ..Change::named(eth0.clone()) };
            inside.apply(&[change.into()]).expect("flapped");
        }
        bed.pass().await;
        assert_eq!(count(), before, "nothing of ours was changed");
        // It loses its default route by that, as anywhere; it deletes the interface, and has it back with
        // all.
        let state = bed.state();
        as_stranger(|| {
            let inside = Handle::open(&bed.pods["sky-a"].space).expect("a handle");
            inside.delete_link(inside.index_of(&eth0).expect("eth0")).expect("deleted");
        });
        wait("it has its interface back", || bed.works()).await;
        assert_eq!(bed.state(), state);
        assert!(repairs(agent, "attachment") >= 1);
        let status = bed.nodes[0].dir.join("status");
        let told = || {
            let files = std::fs::read_dir(&status).into_iter().flatten().flatten();
            let mut texts = files.filter_map(|file| std::fs::read_to_string(file.path()).ok());
            texts.any(|text| text.contains("InterfaceMadeAgain") && text.contains("sky-a"))
        };
        wait("the pod's events say so", || if told() { Ok(()) } else { Err("no event".into()) }).await;
        bed.stop().await;
    });
}

#[test]
fn pods_of_a_router_that_is_gone_get_their_interfaces_back_with_their_addresses() {
    with_bed(|mut bed| async move {
        let before = bed.state();
        let [a, b] = bed.agents;
        a.stop(STOP).await;
        // With the agent away nothing holds the namespace: it is gone, with all ends in it.
        for router in ROUTERS {
            NetNs::delete(bed.nodes[0].dir.join("run").join("netns").join(router)).expect("deleted");
        }
        let sky = Handle::open(&bed.pods["sky-a"].space).expect("a handle");
        let gone = || sky.links(&LinkFilter::default()).is_ok_and(|links| links.len() == 1);
        eventually("the interface is gone", SOON, gone);
        let a = bed.nodes[0].start().await;
        bed.agents = [a, b];
        wait("all pods have their networks", || bed.works()).await;
        eventually("all is as it was", SOON, || bed.state() == before);
        bed.stop().await;
    });
}

#[test]
fn a_host_port_that_was_closed_while_the_agent_was_away_is_open_again() {
    with_bed(|mut bed| async move {
        let before = bed.state();
        let [a, b] = bed.agents;
        a.stop(STOP).await;
        let id = TableId::new(Family::Inet, "knit");
        let mut kernel = Kernel::open_in(&bed.nodes[0].space).expect("nftables");
        let table = kernel.table(&id).expect("read").expect("a table");
        let ports = &table.sets["host-ports6"];
        let mut tx = Transaction::new();
        tx.delete_elements(&id, &ports.set, ports.elements.values().cloned().collect());
        kernel.commit(&tx).expect("deleted");
        bed.agents = [bed.nodes[0].start().await, b];
        wait("all is as it was", || if bed.state() == before { Ok(()) } else { Err("it is not".into()) })
            .await;
        wait("the port is open", || bed.works()).await;
        bed.stop().await;
    });
}
