//! `cargo xtask bench claims`: what it costs to have a claim prepared and attached, next to the same Network
//! by annotation in the same run; and what serving claims costs an agent.
//!
//! As in `bench attach`, with the agent's door for kubelet (`--dra`) and claims that are allocated already:
//! a scheduler and an API server have no part in it.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use knit_api::kubelet::v1::dra_plugin_client::DraPluginClient;
use knit_api::kubelet::v1::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use knit_kernel::testing::{cpu_time, eventually};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};

use super::attach::{Cost, Node, Pod, measure, ms, programs_in_namespaces, settle};
use super::{Goal, Row};

const BENCH: &str = "claims";
const KUBELET: &str = "/run/kubelet";
const PODS: usize = 100;
const WARM: usize = 5;
const PARALLEL: usize = 8;
/// The Networks of one claim.
const NETWORKS: [&str; 4] = ["n1", "n2", "n3", "n4"];

/// Kubelet's side.
struct Kubelet {
    runtime: Runtime,
    channel: Channel,
}

/// Pods of one measurement, and the Networks that each has a claim for.
struct Round {
    prefix: &'static str,
    pods: usize,
    networks: &'static [&'static str],
}

const ONE: Round = Round { prefix: "one", pods: WARM + PODS, networks: &["n1"] };
const FOUR: Round = Round { prefix: "four", pods: WARM + PODS, networks: &NETWORKS };
const TOGETHER: Round = Round { prefix: "together", pods: PODS, networks: &["n1"] };

pub fn run(program: Option<&Path>) -> Result<Vec<Row>> {
    let programs = programs_in_namespaces(program)?;
    let objects: Vec<Value> = [ONE, FOUR, TOGETHER].iter().flat_map(objects).collect();
    let mut node = Node::start(&programs, &objects)?;
    let mut rows = Vec::new();
    let without = node.memory("RssAnon:")?;
    std::fs::create_dir_all(format!("{KUBELET}/plugins_registry"))?;
    let dra = ["--dra", "--pod-uid=bench", "--cdi-dir=/run/cdi"];
    node.restart(&[&dra[..], &["--kubelet-dir", KUBELET]].concat())?;
    let kubelet = Kubelet::new()?;
    let with = node.memory("RssAnon:")?;
    let more =
        Row::new(BENCH, "agent that serves claims, to one that does not", "rss, own", with - without, "MiB");
    rows.push(more.goal(Goal::AtMost(5.0)));

    let cpu = || -> Result<Duration> { Ok(cpu_time().1 + node.cpu()?) };
    let (mut prepared, mut added, mut annotated) = (Vec::new(), Vec::new(), Vec::new());
    for round in [&ONE, &FOUR] {
        let pods = round.make()?;
        let (warm, measured) = pods.split_at(WARM);
        for pod in warm {
            kubelet.prepare(&pod.id)?;
            node.add(pod, "")?;
            node.del(pod)?;
            kubelet.release(&pod.id)?;
        }
        settle()?;
        prepared.push(measure(measured, || node.cpu(), |pod| kubelet.prepare(&pod.id))?);
        added.push(measure(measured, cpu, |pod| node.add(pod, ""))?);
        for pod in measured {
            node.del(pod)?;
        }
        let freed = measure(measured, || node.cpu(), |pod| kubelet.release(&pod.id))?;
        rows.push(Row::new(BENCH, round.case("unprepare"), "p50", freed.p50, "ms"));
        discard(&pods)?;

        // Pods that nobody has heard of, with the same Networks.
        let plain = plain_pods(&format!("{}-plain", round.prefix), PODS)?;
        settle()?;
        annotated.push(measure(&plain, cpu, |pod| node.add(pod, &round.networks.join(",")))?);
        for pod in &plain {
            node.del(pod)?;
        }
        discard(&plain)?;
    }
    let per = |cost: &Cost, what: &str, round: &Round| {
        let row = |metric, value| Row::new(BENCH, round.case(what), metric, value, "ms");
        [row("min", cost.min), row("p50", cost.p50), row("p99", cost.p99), row("cpu", cost.cpu)]
    };
    for (n, round) in [&ONE, &FOUR].into_iter().enumerate() {
        let [min, p50, p99, cpu] = per(&prepared[n], "prepare", round);
        match n {
            0 => rows.extend([min, p50.goal(Goal::AtMost(2.0)), p99, cpu.goal(Goal::AtMost(1.0))]),
            _ => rows.extend([min, p50, p99, cpu]),
        }
        let peer = |row: Row, value| row.peer("by annotation", value);
        let [min, p50, p99, cpu] = per(&added[n], "add", round);
        let by = &annotated[n];
        rows.extend([peer(min, by.min), peer(p50, by.p50), peer(p99, by.p99), peer(cpu, by.cpu)]);
        let more =
            Row::new(BENCH, round.case("add, more than by annotation"), "p50", added[n].p50 - by.p50, "ms");
        rows.push(if n == 0 { more.goal(Goal::AtMost(0.3)) } else { more });
    }
    let ratio = |costs: &[Cost]| costs[1].p50 / costs[0].p50;
    rows.push(Row::new(BENCH, "prepare, four networks to one", "p50 ratio", ratio(&prepared), "x"));
    let four = Row::new(BENCH, "add, four networks to one", "p50 ratio", ratio(&added), "x");
    rows.push(four.goal(Goal::AtMost(2.5)));
    rows.push(together(&node, &kubelet)?);
    Ok(rows)
}

/// Pods with claims that start at once, prepared and added, next to the same pods with an annotation.
fn together(node: &Node, kubelet: &Kubelet) -> Result<Row> {
    let pods = TOGETHER.make()?;
    settle()?;
    let ours = at_once(&pods, &|pod| {
        kubelet.prepare(&pod.id)?;
        node.add(pod, "")
    })?;
    at_once(&pods, &|pod| {
        node.del(pod)?;
        kubelet.release(&pod.id)
    })?;
    discard(&pods)?;
    let plain = plain_pods("together-plain", PODS)?;
    settle()?;
    let theirs = at_once(&plain, &|pod| node.add(pod, &TOGETHER.networks.join(",")))?;
    at_once(&plain, &|pod| node.del(pod))?;
    discard(&plain)?;
    let case = format!("{PODS} pods, prepare and add, {PARALLEL} in parallel");
    Ok(Row::new(BENCH, case, "all", ms(ours), "ms").peer("by annotation", ms(theirs)))
}

/// Does something for each pod from several threads; how long it took.
fn at_once(pods: &[Pod], each: &(dyn Fn(&Pod) -> Result<()> + Sync)) -> Result<Duration> {
    let (next, start) = (AtomicUsize::new(0), Instant::now());
    let work = || -> Result<()> {
        while let Some(pod) = pods.get(next.fetch_add(1, Ordering::Relaxed)) {
            each(pod)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let workers: Vec<_> = (0..PARALLEL).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    Ok(start.elapsed())
}

fn plain_pods(prefix: &str, count: usize) -> Result<Vec<Pod>> {
    (0..count).map(|number| Pod::new(&format!("{prefix}{number}"))).collect()
}

fn discard(pods: &[Pod]) -> Result<()> {
    pods.iter().try_for_each(Pod::discard)
}

// === impl Round ===

impl Round {
    fn make(&self) -> Result<Vec<Pod>> {
        plain_pods(self.prefix, self.pods)
    }

    fn case(&self, what: &str) -> String {
        match self.networks.len() {
            1 => format!("{what}, one claim"),
            networks => format!("{what}, one claim of {networks} networks"),
        }
    }
}

/// The pods of a round, with their claims as the scheduler allocated them.
fn objects(round: &Round) -> Vec<Value> {
    let of = |number: usize| {
        let id = format!("{}{number}", round.prefix);
        let result = |(n, network): (usize, &&str)| {
            let request = format!("r{n}");
            json!({"request": request, "driver": "knit.dev", "pool": "knit-networks", "device": network})
        };
        let results: Vec<Value> = round.networks.iter().enumerate().map(result).collect();
        let metadata = |name: &str, uid: &str| json!({"name": name, "namespace": "shop", "uid": uid});
        let by = json!({"resource": "pods", "name": id, "uid": format!("u-{id}")});
        [
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata(&id, &format!("u-{id}")),
                "spec": {"nodeName": "node", "containers": [],
                    "resourceClaims": [{"name": "net", "resourceClaimName": format!("c-{id}")}]}}),
            json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": {},
                "metadata": metadata(&format!("c-{id}"), &format!("c-u-{id}")),
                "status": {"allocation": {"devices": {"results": results}}, "reservedFor": [by]}}),
        ]
    };
    (0..round.pods).flat_map(of).collect()
}

// === impl Kubelet ===

impl Kubelet {
    fn new() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let socket = format!("{KUBELET}/plugins/knit.dev/dra-bench.sock");
        let there = || Path::new(&socket).exists();
        eventually("the agent serves claims", Duration::from_secs(20), there);
        let channel = {
            let _entered = runtime.enter();
            Endpoint::from_shared(format!("unix://{socket}"))?.connect_lazy()
        };
        Ok(Self { runtime, channel })
    }

    fn prepare(&self, pod: &str) -> Result<()> {
        let request = NodePrepareResourcesRequest { claims: vec![claim(pod)] };
        let mut client = DraPluginClient::new(self.channel.clone());
        let answer = self.runtime.block_on(client.node_prepare_resources(request))?.into_inner();
        let answer = answer.claims.into_values().next().context("no answer")?;
        ensure!(answer.error.is_empty(), "the claim of {pod} is not prepared: {}", answer.error);
        Ok(())
    }

    fn release(&self, pod: &str) -> Result<()> {
        let request = NodeUnprepareResourcesRequest { claims: vec![claim(pod)] };
        let mut client = DraPluginClient::new(self.channel.clone());
        let answer = self.runtime.block_on(client.node_unprepare_resources(request))?.into_inner();
        let answer = answer.claims.into_values().next().context("no answer")?;
        ensure!(answer.error.is_empty(), "the claim of {pod} is not released: {}", answer.error);
        Ok(())
    }
}

fn claim(pod: &str) -> Claim {
    Claim { namespace: "shop".into(), name: format!("c-{pod}"), uid: format!("c-u-{pod}") }
}
