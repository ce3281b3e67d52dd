//! kube-proxy itself and `knit proxy`, one after the other, as whole programs that follow the same API
//! server.
//!
//! One more service, whose endpoints are here, tells when the services are in force: a connection to it says
//! which endpoint it came to.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use knit_kernel::addr::Address;
use knit_kernel::nft::Kernel;
use knit_kernel::route::Route;
use knit_kernel::testing::{cpu_time_of, loopback_up};
use knit_kernel::{Handle, NetNs, Op};
use knit_proxy_nft::{KubeProxy, remove_table};

use super::cluster::{self, Cluster, Daemon, Programs};
use super::objects::{Endpoints, cluster_ip};
use super::{BENCH, SERVICES, millis, status_kib_of};
use crate::bench::{Goal, Row, optimised};
use crate::kube;

const PEER: &str = "kube-proxy 1.37.1, nftables";
const NODE: &str = "node-1";
const OWN: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 9);
const ENDPOINTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 1, 0, 1), Ipv4Addr::new(10, 1, 0, 2)];
const CHANGES: usize = 8;
const SYNC_TIMEOUT: Duration = Duration::from_secs(300);
/// Both hold back what comes sooner than this after the last change; an odd change is measured here, not a
/// burst.
const PACE: Duration = Duration::from_millis(1200);
const CONFIG: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
hostnameOverride: node-1
clientConnection: {kubeconfig: kubeconfig}
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
";

/// What one of them needed.
struct Needed {
    load_wall: Duration,
    load_cpu: Duration,
    resident: f64,
    peak: f64,
    /// From the write in etcd to the first connection that notices, for each change, in order.
    changes: Vec<Duration>,
    change_cpu: Duration,
}

/// Measures both, where it can be done; otherwise says why not.
pub fn run() -> Result<Vec<Row>> {
    let Some((programs, kube_proxy)) = programs()? else { return Ok(Vec::new()) };
    let netns = network()?;
    let mut objects = vec![cluster::node(NODE, OWN), cluster::service(SERVICES), cluster::address(SERVICES)];
    objects.push(cluster::slice(SERVICES, &ENDPOINTS[..1]));
    for number in 0..SERVICES {
        objects.extend([
            cluster::service(number),
            cluster::address(number),
            cluster::slice(number, &Endpoints::Own(5).addresses(number)),
        ]);
    }
    let mut cluster = Cluster::start(netns, &programs, &objects)?;
    drop(objects);
    cluster.write("config", CONFIG)?;
    let knit = optimised().join("knit");
    let knit_args = ["proxy", "--config=config", "--socket=proxy.sock"];
    let ours = measure(&mut cluster, &knit, &knit_args)?;
    let mut nft = Kernel::open_in(&cluster.netns)?;
    remove_table(&mut nft, "knit-proxy")?;
    cluster.put(&[cluster::slice(SERVICES, &ENDPOINTS[..1])])?;
    let theirs = measure(&mut cluster, &kube_proxy, &["--config=config"])?;
    KubeProxy::in_tables(&mut nft)?.remove_tables(&mut nft)?;
    Ok(rows(&ours, &theirs))
}

fn rows(ours: &Needed, theirs: &Needed) -> Vec<Row> {
    let load = "knit proxy, from a real API server, 10000 x 5";
    let change = "knit proxy, from a real API server, one endpoint changed, 10000 x 5";
    let row = |case: &str, metric: &str, unit, ours, theirs| {
        Row::new(BENCH, case, metric, ours, unit).peer(PEER, theirs)
    };
    let (load_wall, load_cpu) = (ours.load_wall.as_secs_f64(), ours.load_cpu.as_secs_f64());
    let p50 = |needed: &Needed| millis(needed.changes[needed.changes.len() / 2]);
    let worst = |needed: &Needed| millis(needed.changes[needed.changes.len() - 1]);
    vec![
        row(load, "start to in force, wall", "s", load_wall, theirs.load_wall.as_secs_f64()),
        row(load, "start until at rest, cpu", "s", load_cpu, theirs.load_cpu.as_secs_f64()),
        row(load, "resident memory", "MiB", ours.resident, theirs.resident).goal(Goal::AtMost(60.0)),
        row(load, "its peak", "MiB", ours.peak, theirs.peak),
        row(change, "etcd to a connection, p50", "ms", p50(ours), p50(theirs)),
        row(change, "the slowest", "ms", worst(ours), worst(theirs)),
        row(
            change,
            "cpu, with all that goes on besides",
            "ms",
            millis(ours.change_cpu),
            millis(theirs.change_cpu),
        ),
    ]
}

/// A cluster's programs, and kube-proxy.
fn programs() -> Result<Option<(Programs, PathBuf)>> {
    let skip = |why: &str| eprintln!("kube-proxy itself is not measured: {why}");
    if !rustix::process::geteuid().is_root() {
        skip("its transactions are larger than a user namespace allows; run this as root");
        return Ok(None);
    }
    if !Command::new("nft").arg("--version").output().is_ok_and(|output| output.status.success()) {
        skip("`nft`, which it runs, is not installed");
        return Ok(None);
    }
    let found = ["etcd", "kube-apiserver", "kubectl", "kube-proxy"].map(kube::program);
    let [Some(etcd), Some(api_server), Some(kubectl), Some(kube_proxy)] = found.map(Result::transpose) else {
        skip("the Kubernetes test bed has not built it; `cargo xtask kube build core peers` does");
        return Ok(None);
    };
    Ok(Some((Programs { etcd: etcd?, api_server: api_server?, kubectl: kubectl? }, kube_proxy?)))
}

/// A network namespace with endpoints that say who they are.
fn network() -> Result<NetNs> {
    let netns = NetNs::unnamed()?;
    netns.run(loopback_up)??;
    let handle = Handle::open(&netns)?;
    let lo = handle.index_of(&"lo".parse()?)?;
    for address in [OWN, ENDPOINTS[0], ENDPOINTS[1]] {
        handle.apply(&[Op::create(Address::new(lo, ipnet::Ipv4Net::from(address).into()))])?;
    }
    let services = Route { source: Some(OWN.into()), ..Route::to("10.96.0.0/12".parse()?).dev(lo) };
    handle.apply(&[Op::create(services)])?;
    let listener = netns.run(|| TcpListener::bind("0.0.0.0:8080"))??;
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            if let Ok(SocketAddr::V4(address)) = stream.local_addr() {
                // A client that is gone does not care.
                let _ = stream.write_all(&address.ip().octets());
            }
        }
    });
    Ok(netns)
}

fn measure(cluster: &mut Cluster, program: &Path, args: &[&str]) -> Result<Needed> {
    let start = Instant::now();
    let mut daemon = cluster.run(program, args)?;
    wait_for(cluster, &mut daemon, ENDPOINTS[0], Duration::from_millis(20))?;
    let load_wall = start.elapsed();
    // What it ran is counted once it was waited for.
    settle(&mut daemon)?;
    let load_cpu = cpu(&daemon)?;
    let memory = |field| Ok::<_, anyhow::Error>(status_kib_of(daemon.id(), field)? / 1024.0);
    let (resident, peak) = (memory("VmRSS:")?, memory("VmHWM:")?);
    let mut changes = Vec::new();
    let before = cpu(&daemon)?;
    for round in 1..=CHANGES {
        let endpoint = ENDPOINTS[round % 2];
        let object = [cluster::slice(SERVICES, &[endpoint])];
        let start = Instant::now();
        cluster.put(&object)?;
        wait_for(cluster, &mut daemon, endpoint, Duration::from_micros(200))?;
        changes.push(start.elapsed());
        settle(&mut daemon)?;
    }
    let change_cpu = (cpu(&daemon)? - before) / u32::try_from(CHANGES)?;
    changes.sort();
    Ok(Needed { load_wall, load_cpu, resident, peak, changes, change_cpu })
}

/// Until a connection to the service that tells comes to this endpoint.
fn wait_for(cluster: &mut Cluster, daemon: &mut Daemon, endpoint: Ipv4Addr, pause: Duration) -> Result<()> {
    let end = Instant::now() + SYNC_TIMEOUT;
    let service = SocketAddr::new(IpAddr::V4(cluster_ip(SERVICES)), 80);
    let netns = cluster.netns.try_clone()?;
    netns.run(|| {
        while answer(service) != Some(endpoint) {
            cluster.check()?;
            ensure!(daemon.runs(), "it has ended: {}", daemon.log());
            ensure!(Instant::now() < end, "its services are not in force: {}", daemon.log());
            rest(pause);
        }
        Ok(())
    })?
}

fn answer(service: SocketAddr) -> Option<Ipv4Addr> {
    let mut stream = TcpStream::connect_timeout(&service, Duration::from_millis(100)).ok()?;
    let mut octets = [0; 4];
    stream.set_read_timeout(Some(Duration::from_millis(100))).ok()?;
    stream.read_exact(&mut octets).ok()?;
    Some(octets.into())
}

/// Until it has nothing to do, and would take the next change at once.
fn settle(daemon: &mut Daemon) -> Result<()> {
    let end = Instant::now() + SYNC_TIMEOUT;
    loop {
        let before = cpu(daemon)?;
        rest(PACE);
        // A hundredth of a core is what a Go program does besides.
        if cpu(daemon)? - before <= PACE / 100 {
            return Ok(());
        }
        ensure!(daemon.runs() && Instant::now() < end, "it does not come to rest: {}", daemon.log());
    }
}

/// Lets time pass. (A thread that ended may have left this one a wake-up call.)
pub fn rest(time: Duration) {
    let end = Instant::now() + time;
    while let left @ 1.. = end.saturating_duration_since(Instant::now()).as_nanos() {
        std::thread::park_timeout(Duration::from_nanos(u64::try_from(left).unwrap_or(u64::MAX)));
    }
}

/// The CPU time of a program, and of those that it ran and waited for, which are counted in hundredths of a
/// second.
fn cpu(daemon: &Daemon) -> Result<Duration> {
    let id = daemon.id();
    let own = cpu_time_of(id).with_context(|| format!("the CPU time of process {id}"))?;
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
    let (_, rest) = stat.rsplit_once(')').context("/proc has another form")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    // Fields 16 and 17; the rest begins with field 3.
    let ticks: u64 = fields
        .get(13..15)
        .context("/proc has another form")?
        .iter()
        .map(|f| f.parse::<u64>())
        .sum::<Result<_, _>>()?;
    Ok(own + Duration::from_millis(ticks * 10))
}
