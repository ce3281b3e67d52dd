//! `cargo xtask bench datapath`: what packets of pods cost, next to a bare veth pair, a bridge and routes
//! with connection tracking, and rules in kube-proxy's shape, in the same run.
//!
//! Everything happens in namespaces of its own. Rounds of all cases take turns, so that all see the same
//! machine; a row is the median of its rounds. The CPU is that of both ends and of all in between.

mod cpu;
mod knit;
mod services;
mod shapes;
mod traffic;
mod tunnel_check;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use knit_kernel::NetNs;
use knit_kernel::testing::program_in_namespaces;

use self::cpu::SoftIrqThreads;
use self::knit::{Cluster, NETWORKS};
use self::services::TARGET;
use self::shapes::Pair;
use self::traffic::{Ends, Load, Round};
use super::{Goal, Row};

const BENCH: &str = "datapath";
const ROUNDS: usize = 7;
const FAMILIES: [&str; 2] = ["IPv4", "IPv6"];
/// Each load, and how often it is done in a round: about a third of a second.
const LOADS: [(Load, usize); 4] =
    [(Load::Exchange, 5000), (Load::Connect, 2500), (Load::Datagram, 5000), (Load::Stream, 3000)];
const BARE: &str = "bare veth pair";
const ROUTED: &str = "routed, conntrack";
const KUBE_PROXY: &str = "kube-proxy's shape";

/// One way between two pods.
struct Case<'a> {
    name: String,
    client: &'a NetNs,
    server: &'a NetNs,
    to: SocketAddr,
    /// Who did the same, and what is wanted of us.
    peer: Option<(&'static str, Option<Goal>)>,
    /// Through a Service: streams are those of its pods.
    is_service: bool,
}

pub fn run() -> Result<Vec<Row>> {
    let (_runtime, cluster) = start()?;
    let peers =
        [(BARE, shapes::bare()?), ("bridge, conntrack", shapes::bridged()?), (ROUTED, shapes::routed()?)];
    let mut cases = Vec::new();
    for (name, pair) in &peers {
        cases.extend(plain(name, pair));
    }
    cases.extend(on_networks(&cluster));
    cases.extend(through_services(&cluster, &peers[2].1)?);

    let threads = SoftIrqThreads::find()?;
    let mut rounds = BTreeMap::<(Load, usize), Vec<Round>>::new();
    for _ in 0..ROUNDS {
        for (load, count) in LOADS {
            for (at, case) in cases.iter().enumerate().filter(|(_, case)| case.has(load)) {
                let (client, server, to) = (case.client, case.server, case.to);
                let ends = Ends { client, server, to, port: TARGET, threads: &threads };
                let round = ends.round(load, count).with_context(|| case.name.clone())?;
                rounds.entry((load, at)).or_default().push(round);
            }
        }
    }
    let mut rows = rows(&cases, &rounds);
    rows.extend(tunnel_check::rows(&cluster, &threads)?);
    Ok(rows)
}

/// The rows of one question only: with the others they take half an hour.
pub fn run_tunnel_check() -> Result<Vec<Row>> {
    let (_runtime, cluster) = start()?;
    tunnel_check::rows(&cluster, &SoftIrqThreads::find()?)
}

/// The nodes and their pods, in namespaces that this process is moved to, with what runs in the background.
fn start() -> Result<(tokio::runtime::Runtime, Cluster)> {
    if let Some(status) = program_in_namespaces().context("cannot run in namespaces of its own")? {
        // The inner process has printed; this one only passes on how it went.
        std::process::exit(status.code().unwrap_or(1));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let cluster = runtime.block_on(Cluster::start())?;
    Ok((runtime, cluster))
}

fn plain<'a>(name: &str, pair: &'a Pair) -> Vec<Case<'a>> {
    let case = |family: usize| Case {
        name: format!("{name}, {}", FAMILIES[family]),
        client: &pair.client,
        server: &pair.server,
        to: SocketAddr::new(pair.addresses[family], TARGET),
        peer: (name != BARE).then_some((BARE, None)),
        is_service: false,
    };
    vec![case(0), case(1)]
}

/// Pods of each Network, on one node and across.
fn on_networks(cluster: &Cluster) -> Vec<Case<'_>> {
    let mut cases = Vec::new();
    for network in NETWORKS {
        let pods = cluster.pods_of(network);
        for (server, place) in [(pods[1], "one node"), (pods[2], "across nodes")] {
            for (family, word) in FAMILIES.iter().enumerate() {
                cases.push(Case {
                    name: format!("Knit {network}, {place}, {word}"),
                    client: &pods[0].namespace,
                    server: &server.namespace,
                    to: SocketAddr::new(server.addresses[family], TARGET),
                    // The goal is what a plain router of the node takes, with all of our checks.
                    peer: (server.node == 0).then_some((ROUTED, Some(Goal::Ratio(1.0)))),
                    is_service: false,
                });
            }
        }
    }
    cases
}

/// A cluster IP from a pod, and a node port from outside; and the cluster IP in kube-proxy's shape.
fn through_services<'a>(cluster: &'a Cluster, routed: &'a Pair) -> Result<Vec<Case<'a>>> {
    let pods = cluster.pods_of("default");
    let node = &cluster.nodes[0];
    let fronts = services::knit(node, pods[1].addresses[0])?;
    let case = |name: &str, client: &'a NetNs, to: SocketAddr, peer| Case {
        name: format!("{name}, IPv4"),
        client,
        server: &pods[1].namespace,
        to,
        peer,
        is_service: true,
    };
    let node_port = SocketAddr::new(node.addresses[0], fronts.node_port);
    let mut cases = vec![
        case("Knit default, cluster IP", &pods[0].namespace, fronts.cluster, Some((KUBE_PROXY, None))),
        case("Knit default, node port from outside", &cluster.outside, node_port, None),
    ];
    if services::has_nft() {
        let fronts = services::kube_proxy(routed.between()?, routed.addresses[0])?;
        cases.push(Case { server: &routed.server, ..case(KUBE_PROXY, &routed.client, fronts.cluster, None) });
    } else {
        eprintln!("`nft` is not installed: measured without kube-proxy's rule set");
    }
    Ok(cases)
}

impl Case<'_> {
    fn has(&self, load: Load) -> bool {
        !self.is_service || matches!(load, Load::Exchange | Load::Connect)
    }

    fn family(&self) -> &str {
        self.name.rsplit(' ').next().unwrap_or_default()
    }
}

fn rows(cases: &[Case<'_>], rounds: &BTreeMap<(Load, usize), Vec<Round>>) -> Vec<Row> {
    let summary = |load: Load, at: usize| rounds.get(&(load, at)).map(|rounds| summed(rounds));
    let mut rows = Vec::new();
    for (load, _) in LOADS {
        let (what, metric, unit, cpu) = match load {
            Load::Exchange => ("1 byte there and back, TCP", "p50", "us", "cpu"),
            Load::Connect => ("connect, 1 byte, close", "p50", "us", "cpu"),
            Load::Datagram => ("1 byte there and back, UDP", "p50", "us", "cpu"),
            Load::Stream => ("one stream", "rate", "Gbit/s", "cpu for 64 KiB"),
        };
        for (at, case) in cases.iter().enumerate() {
            let Some(ours) = summary(load, at) else { continue };
            let mut value = Row::new(BENCH, format!("{}: {what}", case.name), metric, ours.value, unit);
            let mut spent = Row::new(BENCH, format!("{}: {what}", case.name), cpu, ours.cpu, "us");
            if let Some((peer, goal)) = case.peer {
                let name = format!("{peer}, {}", case.family());
                let theirs = cases.iter().position(|case| case.name == name).and_then(|at| summary(load, at));
                if let Some(theirs) = theirs {
                    value = value.peer(peer, theirs.value);
                    spent = spent.peer(peer, theirs.cpu);
                    if let (Some(goal), Load::Exchange | Load::Connect) = (goal, load) {
                        value = value.goal(goal);
                    }
                }
            }
            rows.extend([value, spent]);
        }
    }
    rows
}

/// The medians of what was measured.
fn summed(rounds: &[Round]) -> Round {
    let median = |of: fn(&Round) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Round { value: median(|round| round.value), cpu: median(|round| round.cpu) }
}
