//! `cargo xtask bench kernel`: what a pod's veth, addresses and routes cost, next to `ip -batch` in the same
//! run.
//!
//! Everything happens in namespaces of its own: a node with an uplink, and pods. A pod is routed: veth with
//! its other end in the pod's namespace; there `lo` and `eth0` up, an address, a permanent neighbour and a
//! default route per family; on the node's side a host route and a neighbour per family. The pods' namespaces
//! are made beforehand and not counted. CPU is that of the whole process (of the children, for `ip`), so the
//! kernel's share is in it.

use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use knit_kernel::addr::Address;
use knit_kernel::link::{AddrGenMode, Change, NewLink, Peer};
use knit_kernel::neigh::Neighbour;
use knit_kernel::route::Route;
use knit_kernel::testing::{cpu_time, program_in_namespaces};
use knit_kernel::{Handle, IfName, Mac, NetNs, Op, owner};

use super::{Goal, Row};

const BENCH: &str = "kernel";
const PEER: &str = "ip -batch";
/// Pods per measurement of ours, and of the peer, which takes twenty times as long.
const OURS: u32 = 100;
const THEIRS: u32 = 30;
const PRESENT: u32 = 500;
const GATEWAY_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// What one kind of operation took.
struct Cost {
    /// Per pod, in milliseconds.
    cpu: f64,
    p50: f64,
}

/// One pod: its namespace, and what is derived from its number.
struct Pod {
    number: u32,
    namespace: NetNs,
}

pub fn run() -> Result<Vec<Row>> {
    if let Some(status) = program_in_namespaces().context("cannot run in namespaces of its own")? {
        // The inner process has printed; this one only passes on how it went.
        std::process::exit(status.code().unwrap_or(1));
    }
    std::fs::create_dir_all("/run/netns").context("cannot create /run/netns in our own mount namespace")?;
    // A node has an address, as every node does: without one, each IPv4 route to a pod makes the kernel look
    // for a source through all links of the namespace, and what is measured grows with the pods.
    let _outside = super::attach::uplink()?;
    let node = Handle::current()?;
    let has_ip = Command::new("ip").arg("-V").output().is_ok_and(|output| output.status.success());
    if !has_ip {
        eprintln!("`ip` is not installed: measured without the peer");
    }
    let mut rows = Vec::new();
    let mut present = Vec::new();
    let mut set_up_cpu = Vec::new();
    for count in [0, PRESENT] {
        for number in present.len() as u32..count {
            let pod = Pod::new(number)?;
            pod.set_up(&node)?;
            present.push(pod);
        }
        let (ours_up, ours_down) = ours(&node)?;
        let theirs = if has_ip { Some(theirs()?) } else { None };
        let (theirs_up, theirs_down) = theirs.map_or((None, None), |(up, down)| (Some(up), Some(down)));
        let row = |what: &str, metric, value, peer: Option<f64>| {
            let row = Row::new(BENCH, format!("{what}, {count} pods present"), metric, value, "ms");
            match peer {
                Some(peer) => row.peer(PEER, peer),
                None => row,
            }
        };
        let peer_cpu = theirs_up.as_ref().map(|cost| cost.cpu);
        rows.push(row("set-up", "cpu", ours_up.cpu, peer_cpu).goal(Goal::AtMost(0.6)));
        rows.push(row("set-up", "p50", ours_up.p50, theirs_up.map(|cost| cost.p50)));
        rows.push(row("removal", "cpu", ours_down.cpu, theirs_down.as_ref().map(|cost| cost.cpu)));
        let peer_p50 = theirs_down.map(|cost| cost.p50);
        rows.push(row("removal", "p50", ours_down.p50, peer_p50).goal(Goal::AtMost(1.5)));
        set_up_cpu.push(ours_up.cpu);
    }
    // "Flat" leaves room for the noise of a shared machine.
    let growth = set_up_cpu[1] / set_up_cpu[0];
    let row = Row::new(BENCH, format!("set-up, {PRESENT} pods present / 0"), "cpu", growth, "times");
    rows.push(row.goal(Goal::AtMost(1.5)));
    Ok(rows)
}

/// Sets pods up and removes them through knit-kernel.
fn ours(node: &Handle) -> Result<(Cost, Cost)> {
    let pods = pods(OURS + 10)?;
    // The first few pay for threads and memory that are kept.
    let (warm, measured) = pods.split_at(10);
    for pod in warm {
        let index = pod.set_up(node)?;
        node.delete_link(index)?;
    }
    let mut indexes = Vec::new();
    let up = measure(measured, false, |pod| {
        indexes.push(pod.set_up(node)?);
        Ok(())
    })?;
    let mut indexes = indexes.into_iter();
    let down = measure(measured, false, |_| {
        let index = indexes.next().context("a pod without a link")?;
        if !node.delete_link(index)? {
            bail!("link {index} was gone before it was deleted");
        }
        Ok(())
    })?;
    discard(&pods)?;
    Ok((up, down))
}

/// Does the same by running `ip -batch`, once for the node's side and once for the pod's.
fn theirs() -> Result<(Cost, Cost)> {
    let pods = pods(THEIRS)?;
    let up = measure(&pods, true, |pod| {
        ip_batch(&["-batch", "-"], &pod.node_script())?;
        ip_batch(&["-n", &pod.netns(), "-batch", "-"], &pod.pod_script())
    })?;
    let down =
        measure(&pods, true, |pod| ip_batch(&["-batch", "-"], &format!("link del {}\n", pod.host_name())))?;
    discard(&pods)?;
    Ok((up, down))
}

fn measure(pods: &[Pod], children: bool, mut each: impl FnMut(&Pod) -> Result<()>) -> Result<Cost> {
    let cpu = || if children { cpu_time().1 } else { cpu_time().0 };
    let before = cpu();
    let mut walls = Vec::with_capacity(pods.len());
    for pod in pods {
        let start = Instant::now();
        each(pod)?;
        walls.push(start.elapsed());
    }
    let used = cpu() - before;
    walls.sort();
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    Ok(Cost { cpu: ms(used) / pods.len() as f64, p50: ms(walls[walls.len() / 2]) })
}

fn ip_batch(args: &[&str], script: &str) -> Result<()> {
    let mut child = Command::new("ip").args(args).stdin(Stdio::piped()).spawn().context("cannot run ip")?;
    child.stdin.take().context("ip has no input")?.write_all(script.as_bytes())?;
    let status = child.wait()?;
    if !status.success() {
        bail!("ip {} failed ({status}) on:\n{script}", args.join(" "));
    }
    Ok(())
}

fn pods(count: u32) -> Result<Vec<Pod>> {
    // Numbers that the pods that are present do not have.
    (PRESENT..PRESENT + count).map(Pod::new).collect()
}

fn discard(pods: &[Pod]) -> Result<()> {
    for pod in pods {
        NetNs::delete(format!("/run/netns/{}", pod.netns()))?;
    }
    Ok(())
}

impl Pod {
    fn new(number: u32) -> Result<Self> {
        let namespace = NetNs::create(format!("/run/netns/pod{number}"))?;
        Ok(Self { number, namespace })
    }

    fn netns(&self) -> String {
        format!("pod{}", self.number)
    }

    fn host_name(&self) -> String {
        format!("knit{}", self.number)
    }

    fn v4(&self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 0, 0, 0)) + self.number + 2)
    }

    fn v6(&self) -> Ipv6Addr {
        Ipv6Addr::from(u128::from(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0)) + u128::from(self.number) + 2)
    }

    fn mac(&self) -> Mac {
        let [a, b, c, d] = self.v4().octets();
        Mac([2, 1, a, b, c, d])
    }

    /// Returns the host side's index.
    fn set_up(&self, node: &Handle) -> Result<u32> {
        let (v4, v6) = (ipnet::IpNet::new(self.v4().into(), 32)?, ipnet::IpNet::new(self.v6().into(), 128)?);
        let mut peer = Peer::new(IfName::new("eth0")?, &self.namespace);
        peer.mac = Some(self.mac());
        let mut new = NewLink::veth(IfName::new(self.host_name())?, peer);
        new.mac = Some(GATEWAY_MAC);
        new.alias = Some(owner::alias(&self.netns()));
        new.addr_gen = Some(AddrGenMode::None);
        new.up = true;
        let made = node.create_link(&new)?;
        let eth0 = made.peer.context("a veth has a peer")?;
        let pod = Handle::open(&self.namespace)?;
        pod.apply(&[
            Change::of(1).up().into(),
            Change::of(eth0).up().into(),
            Op::create(Address::new(eth0, v4)),
            Op::create(Address::new(eth0, v6)),
            Op::create(Neighbour::permanent(eth0, GATEWAY_V4.into(), GATEWAY_MAC)),
            Op::create(Neighbour::permanent(eth0, GATEWAY_V6.into(), GATEWAY_MAC)),
            Op::create(Route::default_v4().via(GATEWAY_V4.into()).dev(eth0).onlink()),
            Op::create(Route::default_v6().via(GATEWAY_V6.into()).dev(eth0).onlink()),
        ])?;
        node.apply(&[
            Op::create(Route::to(v4).dev(made.index)),
            Op::create(Route::to(v6).dev(made.index)),
            Op::create(Neighbour::permanent(made.index, v4.addr(), self.mac())),
            Op::create(Neighbour::permanent(made.index, v6.addr(), self.mac())),
        ])?;
        Ok(made.index)
    }

    /// The node's side of [`set_up`](Self::set_up), for `ip -batch`.
    fn node_script(&self) -> String {
        let (host, mac, v4, v6) = (self.host_name(), self.mac(), self.v4(), self.v6());
        let netns = self.netns();
        format!(
            "link add {host} address {GATEWAY_MAC} type veth peer name eth0 address {mac} netns {netns}\n\
             link set {host} alias {netns} addrgenmode none\n\
             link set {host} up\n\
             route add {v4}/32 dev {host}\n\
             route add {v6}/128 dev {host}\n\
             neigh add {v4} lladdr {mac} dev {host} nud permanent\n\
             neigh add {v6} lladdr {mac} dev {host} nud permanent\n"
        )
    }

    /// The pod's side.
    fn pod_script(&self) -> String {
        let (v4, v6) = (self.v4(), self.v6());
        format!(
            "link set lo up\n\
             link set eth0 up\n\
             addr add {v4}/32 dev eth0\n\
             addr add {v6}/128 dev eth0 nodad\n\
             neigh add {GATEWAY_V4} lladdr {GATEWAY_MAC} dev eth0 nud permanent\n\
             neigh add {GATEWAY_V6} lladdr {GATEWAY_MAC} dev eth0 nud permanent\n\
             route add default via {GATEWAY_V4} dev eth0 onlink\n\
             route add ::/0 via {GATEWAY_V6} dev eth0 onlink\n"
        )
    }
}
