//! `cargo xtask bench attach`: what it costs to give a pod its networks through the shim, next to the
//! containernetworking plugins in the same run.
//!
//! Everything happens in namespaces of its own: a node with an uplink, the real agent (`knit node`, built as
//! it is shipped) on a folder of objects, the real static shim, and namespaces for pods, which are made
//! beforehand and not counted. The peers are run the same way, in another namespace. CPU is that of the shim
//! and of all threads of the agent.

mod node;
mod peers;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use knit_kernel::link::{NewLink, Peer as VethPeer};
use knit_kernel::testing::{cpu_time, eventually, program_in_namespaces};
use knit_kernel::{Handle, IfName, NetNs};

use super::{Goal, Row};
pub use node::{Node, Pod, uplink};
use peers::Peer;

const BENCH: &str = "attach";
/// Pods per measurement of ours, and of a peer, which takes much longer.
const OURS: usize = 100;
const THEIRS: usize = 20;
const PRESENT: usize = 500;
const PARALLEL: usize = 8;

/// The programs that are measured.
pub struct Programs {
    pub knit: PathBuf,
    shim: PathBuf,
    /// The directory of the peer's plugins, if there are any.
    plugins: Option<PathBuf>,
}

/// What one kind of operation took, in milliseconds. On a machine that others use too, the least and the CPU
/// tell more than the median.
#[derive(Clone, Debug)]
pub struct Cost {
    pub min: f64,
    pub p50: f64,
    pub p99: f64,
    pub cpu: f64,
}

pub fn run(program: Option<&Path>) -> Result<Vec<Row>> {
    let programs = programs_in_namespaces(program)?;
    let theirs = match &programs.plugins {
        Some(plugins) => Some(peers::measure_all(plugins, THEIRS)?),
        None => {
            eprintln!("neither Go nor the containernetworking plugins are there: measured without the peers");
            None
        }
    };
    let bridge = theirs.as_ref().and_then(|t| t.bridge.as_ref());
    let chain = theirs.as_ref().and_then(|t| t.chain.as_ref());
    let mut rows = Vec::new();
    let mut node = Node::start(&programs, &[])?;
    rows.extend(memory(&node, "idle", 25.0)?);

    let (add, del) = one_by_one(&node, "", 0)?;
    let compared = |case: &str, value: f64, peer: Option<(&Peer, f64)>, ratio: f64| {
        let row = Row::new(BENCH, case, "p50", value, "ms");
        match peer {
            Some((peer, value)) => row.peer(peer.name, value),
            None => row,
        }
        .goal(Goal::Ratio(ratio))
    };
    rows.push(compared("add", add.p50, bridge.map(|p| (p, p.add.p50)), 12.0));
    rows.push(compared("add", add.p50, chain.map(|p| (p, p.add.p50)), 50.0));
    rows.push(with_peer("add", "min", add.min, bridge.map(|p| (p, p.add.min))));
    rows.push(with_peer("add", "p99", add.p99, bridge.map(|p| (p, p.add.p99))));
    rows.push(with_peer("add", "cpu", add.cpu, bridge.map(|p| (p, p.add.cpu))).goal(Goal::AtMost(2.0)));
    rows.push(compared("del", del.p50, bridge.map(|p| (p, p.del.p50)), 20.0));
    rows.push(with_peer("del", "p50", del.p50, chain.map(|p| (p, p.del.p50))));
    rows.push(with_peer("del", "cpu", del.cpu, bridge.map(|p| (p, p.del.cpu))));
    let gone = until_gone(&node)?;
    rows.push(Row::new(BENCH, "del, until the link is gone", "p50", gone, "ms"));

    let (adds, dels) = in_parallel(&node)?;
    rows.push(Row::new(BENCH, "add, 8 in parallel", "rate", adds, "per s").goal(Goal::AtLeast(400.0)));
    rows.push(Row::new(BENCH, "del, 8 in parallel", "rate", dels, "per s"));

    let (four, four_del) = one_by_one(&node, "n1,n2,n3", 1)?;
    rows.push(Row::new(BENCH, "add, four networks", "p50", four.p50, "ms"));
    rows.push(Row::new(BENCH, "add, four networks", "cpu", four.cpu, "ms"));
    rows.push(
        Row::new(BENCH, "add, four networks to one", "ratio", four.p50 / add.p50, "x")
            .goal(Goal::AtMost(2.0)),
    );
    rows.push(Row::new(BENCH, "del, four networks", "p50", four_del.p50, "ms"));

    let mut present = Vec::with_capacity(PRESENT);
    for number in 0..PRESENT {
        let pod = Pod::new(&format!("present{number}"))?;
        node.add(&pod, "")?;
        present.push(pod);
    }
    rows.extend(memory(&node, "500 attachments", 40.0)?);
    let (many, many_del) = one_by_one(&node, "", 2)?;
    rows.push(Row::new(BENCH, "add, 500 present", "p50", many.p50, "ms"));
    rows.push(
        Row::new(BENCH, "add, 500 present to none", "cpu ratio", many.cpu / add.cpu, "x")
            .goal(Goal::AtMost(1.3)),
    );
    rows.push(
        Row::new(BENCH, "add, 500 present to none", "p50 ratio", many.p50 / add.p50, "x")
            .goal(Goal::AtMost(1.3)),
    );
    rows.push(Row::new(BENCH, "add, 500 present to none", "min ratio", many.min / add.min, "x"));
    rows.push(Row::new(BENCH, "del, 500 present", "p50", many_del.p50, "ms"));

    if node.has_passes()? {
        let cpu = pass(&mut node, &present)?;
        let case = "pass, nothing changed: 500 pods, 10 Networks";
        rows.push(Row::new(BENCH, case, "cpu", cpu, "ms").goal(Goal::AtMost(20.0)));
    } else {
        eprintln!("this program has no --pass-every: passes are not measured");
    }
    Ok(rows)
}

/// Goes on in namespaces of its own, with the programs to measure: built outside, where there is a network to
/// fetch the peers from, and found again inside.
pub fn programs_in_namespaces(program: Option<&Path>) -> Result<Programs> {
    let programs = if std::env::var_os("KNIT_TEST_IN_NAMESPACES").is_none() {
        build(program)?;
        None
    } else {
        Some(find())
    };
    if let Some(status) = program_in_namespaces().context("cannot run in namespaces of its own")? {
        std::process::exit(status.code().unwrap_or(1));
    }
    programs.context("the programs to measure are not known")
}

/// What a pass costs that compares everything and finds nothing to do: the CPU of an agent that makes one
/// each second, less that of one that makes none, in milliseconds. Some of the pods that are present are
/// given a further Network, so that there are ten of them.
fn pass(node: &mut Node, present: &[Pod]) -> Result<f64> {
    const SECONDS: u64 = 30;
    for (number, pod) in present.iter().enumerate().take(45) {
        node.del(pod)?;
        node.add(pod, &format!("n{}", number % 9 + 1))?;
    }
    let mut used = |pass_every: u64| -> Result<Duration> {
        node.restart(&["--pass-every", &pass_every.to_string()])?;
        // The first seconds are the start's.
        wait(Duration::from_secs(10));
        let before = node.cpu()?;
        wait(Duration::from_secs(SECONDS));
        Ok(node.cpu()? - before)
    };
    let idle = used(3600)?;
    let busy = used(1)?;
    Ok(ms(busy.saturating_sub(idle)) / SECONDS as f64)
}

/// Lets time pass, in which the agent does what it does.
fn wait(time: Duration) {
    let end = Instant::now() + time;
    eventually("time passes", time * 2, || Instant::now() >= end);
}

/// What the agent has in memory: all of it, and without the pages of its program, which it shares and the
/// kernel drops at will.
fn memory(node: &Node, case: &str, most: f64) -> Result<[Row; 2]> {
    Ok([
        Row::new(BENCH, case, "rss", node.memory("VmRSS:")?, "MiB").goal(Goal::AtMost(most)),
        Row::new(BENCH, case, "rss, own", node.memory("RssAnon:")?, "MiB"),
    ])
}

fn with_peer(case: &str, metric: &str, value: f64, peer: Option<(&Peer, f64)>) -> Row {
    let row = Row::new(BENCH, case, metric, value, "ms");
    match peer {
        Some((peer, value)) => row.peer(peer.name, value),
        None => row,
    }
}

/// Adds pods one after another, then deletes them.
fn one_by_one(node: &Node, networks: &str, round: usize) -> Result<(Cost, Cost)> {
    let pods = pods(&format!("r{round}-"), OURS + 5)?;
    // The first few pay for sockets and memory that are kept.
    let (warm, measured) = pods.split_at(5);
    for pod in warm {
        node.add(pod, networks)?;
        node.del(pod)?;
    }
    settle()?;
    let cpu = || -> Result<Duration> { Ok(cpu_time().1 + node.cpu()?) };
    let add = measure(measured, cpu, |pod| node.add(pod, networks))?;
    let del = measure(measured, cpu, |pod| node.del(pod))?;
    discard(&pods)?;
    Ok((add, del))
}

/// Waits until the kernel has cleared away the namespaces that were discarded so far: it does so later, under
/// the lock that every change of a network takes, and whoever is measured meanwhile waits for it.
pub fn settle() -> Result<()> {
    let handle = Handle::current()?;
    let name = IfName::new("settle")?;
    let last = NetNs::unnamed()?;
    let mut link = NewLink::veth(name.clone(), VethPeer::new(name.clone(), &last));
    link.group = 0;
    handle.create_link(&link)?;
    // They go in the order in which they were left.
    drop(last);
    let gone = || matches!(handle.link_by_name(&name), Ok(None));
    eventually("ended namespaces are cleared away", Duration::from_secs(60), gone);
    Ok(())
}

/// How long after the start of a DEL the link is gone and the address free.
fn until_gone(node: &Node) -> Result<f64> {
    let pods = pods("gone", 20)?;
    let mut walls = Vec::new();
    for pod in &pods {
        node.add(pod, "")?;
        let start = Instant::now();
        node.del(pod)?;
        while node.has_links(pod)? {
            std::thread::yield_now();
        }
        walls.push(start.elapsed());
    }
    discard(&pods)?;
    walls.sort();
    Ok(ms(walls[walls.len() / 2]))
}

/// Adds and deletes pods from several threads; how many of each per second.
fn in_parallel(node: &Node) -> Result<(f64, f64)> {
    let pods = pods("par", OURS * 2)?;
    settle()?;
    let rate = |each: &(dyn Fn(&Pod) -> Result<()> + Sync)| -> Result<f64> {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let start = Instant::now();
        std::thread::scope(|scope| -> Result<()> {
            let workers: Vec<_> = (0..PARALLEL)
                .map(|_| {
                    scope.spawn(|| -> Result<()> {
                        while let Some(pod) =
                            pods.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                        {
                            each(pod)?;
                        }
                        Ok(())
                    })
                })
                .collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
        })?;
        Ok(pods.len() as f64 / start.elapsed().as_secs_f64())
    };
    let adds = rate(&|pod| node.add(pod, ""))?;
    let dels = rate(&|pod| node.del(pod))?;
    discard(&pods)?;
    Ok((adds, dels))
}

/// Does something for each pod, with the time of each and the CPU of all.
pub fn measure(
    pods: &[Pod],
    cpu: impl Fn() -> Result<Duration>,
    mut each: impl FnMut(&Pod) -> Result<()>,
) -> Result<Cost> {
    let before = cpu()?;
    let mut walls = Vec::with_capacity(pods.len());
    for pod in pods {
        let start = Instant::now();
        each(pod)?;
        walls.push(start.elapsed());
    }
    let used = cpu()? - before;
    walls.sort();
    let at = |part: usize| ms(walls[(walls.len() * part / 100).min(walls.len() - 1)]);
    Ok(Cost { min: ms(walls[0]), p50: at(50), p99: at(99), cpu: ms(used) / pods.len() as f64 })
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn pods(prefix: &str, count: usize) -> Result<Vec<Pod>> {
    (0..count).map(|number| Pod::new(&format!("{prefix}{number}"))).collect()
}

fn discard(pods: &[Pod]) -> Result<()> {
    pods.iter().try_for_each(Pod::discard)
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn find() -> Programs {
    let plugins = peers::directories().into_iter().find(|d| d.join("bridge").is_file());
    let directory = super::optimised().join("measured");
    Programs { knit: directory.join("knit"), shim: directory.join("knit-cni"), plugins }
}

/// Builds both programs as they are shipped, and leaves them where [`find`] looks.
fn build(program: Option<&Path>) -> Result<()> {
    let Programs { knit, shim, .. } = find();
    std::fs::create_dir_all(shim.parent().context("a directory")?)?;
    crate::shim::build(Some(&shim))?;
    let built = match program {
        Some(program) => program.to_owned(),
        None => crate::shim::build_static("knit", "release")?,
    };
    std::fs::copy(&built, &knit)
        .with_context(|| format!("cannot copy {} to be measured", built.display()))?;
    peers::build(&root());
    Ok(())
}
