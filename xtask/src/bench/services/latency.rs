//! How long a connect takes through 10,000 services, next to a chain and a map per service, as kube-proxy
//! writes them.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use knit_kernel::addr::Address;
use knit_kernel::nft::Kernel;
use knit_kernel::route::Route;
use knit_kernel::testing::{cpu_time, namespace};
use knit_kernel::{Handle, NetNs, Op};
use knit_proxy_nft::remove_table;

use super::objects::{self, Endpoints, cluster_ip};
use super::{BENCH, Proxy, SERVICES, decode};
use crate::bench::{Goal, Row};

const CONNECTS: usize = 2000;
const PEER: &str = "kube-proxy's shape, nft -f";
const PEER_CHUNK: u32 = 100;
const PEER_TABLE: &str = "table ip kube-proxy {
map service-ips {
type ipv4_addr . inet_proto . inet_service : verdict
}
chain services {
ip daddr . meta l4proto . th dport vmap @service-ips
}
chain prerouting {
type nat hook prerouting priority -100; jump services
}
chain output {
type nat hook output priority -100; jump services
}
chain postrouting {
type nat hook postrouting priority 100; meta mark and 0x4000 != 0 masquerade fully-random
}
}
";
const SHARED: Endpoints = Endpoints::Shared(5);

struct Latency {
    first: f64,
    last: f64,
}

pub fn run() -> Result<Vec<Row>> {
    let netns = namespace();
    let handle = Handle::open(&netns)?;
    let lo = handle.index_of(&"lo".parse()?)?;
    for address in SHARED.addresses(0) {
        handle.apply(&[Op::create(Address::new(lo, ipnet::Ipv4Net::from(address).into()))])?;
    }
    let source = SHARED.addresses(0)[0].into();
    let services = Route { source: Some(source), ..Route::to("10.96.0.0/12".parse()?).dev(lo) };
    handle.apply(&[Op::create(services)])?;
    let listener = netns.run(|| TcpListener::bind("0.0.0.0:8080"))??;
    std::thread::spawn(move || listener.incoming().for_each(drop));

    let direct = connects(&netns, source_socket())?;
    let mut proxy = Proxy::new(&netns)?;
    for number in 0..SERVICES {
        proxy.service(&decode(&objects::service(number, "TCP"))?)?;
        proxy.slice(&decode(&objects::slice(number, "TCP", &SHARED.addresses(number)))?)?;
    }
    proxy.sync()?;
    let ours = both(&netns)?;
    remove_table(&mut Kernel::open_in(&netns)?, "knit-proxy")?;
    drop(proxy);

    let has_nft = Command::new("nft").arg("--version").output().is_ok_and(|output| output.status.success());
    let mut rows = vec![Row::new(BENCH, "connect, no service", "p50", direct, "us")];
    let theirs = if has_nft {
        let (load, cpu) = load_peer(&netns)?;
        let case = format!("{PEER}, {PEER_CHUNK} services at a time");
        let row = |metric, value: Duration| Row::new(BENCH, case.clone(), metric, value.as_secs_f64(), "s");
        rows.extend([row("load, wall", load), row("load, cpu", cpu)]);
        Some(both(&netns)?)
    } else {
        eprintln!("`nft` is not installed: measured without kube-proxy's rule set");
        None
    };
    let theirs = theirs.as_ref();
    for (which, ours, theirs) in
        [("first", ours.first, theirs.map(|t| t.first)), ("last", ours.last, theirs.map(|t| t.last))]
    {
        let row = Row::new(BENCH, format!("connect, {which} of {SERVICES} services"), "p50", ours, "us");
        // Five per cent is what two runs of the same differ by.
        rows.push(match theirs {
            Some(theirs) => row.peer(PEER, theirs).goal(Goal::Ratio(0.95)),
            None => row,
        });
    }
    let apart = Row::new(BENCH, "connect, last / first service", "p50", ours.last / ours.first, "times");
    rows.push(apart.goal(Goal::AtMost(1.1)));
    Ok(rows)
}

fn source_socket() -> SocketAddr {
    SocketAddr::new(Ipv4Addr::new(10, 1, 0, 1).into(), 8080)
}

/// The median of several rounds that take turns, so that both see the same machine.
fn both(netns: &NetNs) -> Result<Latency> {
    let socket = |number| SocketAddr::new(cluster_ip(number).into(), 80);
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        first.push(connects(netns, socket(0))?);
        last.push(connects(netns, socket(SERVICES - 1))?);
    }
    first.sort_by(f64::total_cmp);
    last.sort_by(f64::total_cmp);
    Ok(Latency { first: first[2], last: last[2] })
}

/// The median time of a connect, in microseconds.
fn connects(netns: &NetNs, to: SocketAddr) -> Result<f64> {
    let times = netns.run(move || -> std::io::Result<Vec<Duration>> {
        let mut times = Vec::with_capacity(CONNECTS);
        for _ in 0..CONNECTS {
            let start = Instant::now();
            let stream = TcpStream::connect(to)?;
            times.push(start.elapsed());
            drop(stream);
        }
        Ok(times)
    })?;
    let mut times = times.with_context(|| format!("cannot connect to {to}"))?;
    times.sort();
    Ok(times[times.len() / 2].as_secs_f64() * 1e6)
}

/// Loads a chain and an anonymous map for each service. In a user namespace `nft` may not send it all at
/// once, so it goes a hundred services at a time; what one transaction costs grows with the square of its
/// size, so all at once is slower.
fn load_peer(netns: &NetNs) -> Result<(Duration, Duration)> {
    let (cpu, wall) = (cpu_time().1, Instant::now());
    nft(netns, PEER_TABLE.to_owned())?;
    let endpoints = SHARED.addresses(0);
    let map: Vec<String> =
        endpoints.iter().enumerate().map(|(slot, address)| format!("{slot} : {address} . 8080")).collect();
    let map = map.join(", ");
    for first in (0..SERVICES).step_by(PEER_CHUNK as usize) {
        let services = first..(first + PEER_CHUNK).min(SERVICES);
        let mut text = String::from("table ip kube-proxy {\n");
        for number in services.clone() {
            writeln!(text, "chain service-{number} {{")?;
            writeln!(text, "ip saddr != 10.0.0.0/8 meta mark set meta mark or 0x4000")?;
            let count = endpoints.len();
            writeln!(text, "meta l4proto tcp dnat ip to numgen random mod {count} map {{ {map} }}\n}}")?;
        }
        text.push_str("}\nadd element ip kube-proxy service-ips {\n");
        for number in services {
            writeln!(text, "{} . tcp . 80 : goto service-{number},", cluster_ip(number))?;
        }
        text.push_str("}\n");
        nft(netns, text)?;
    }
    Ok((wall.elapsed(), cpu_time().1 - cpu))
}

fn nft(netns: &NetNs, script: String) -> Result<()> {
    let status = netns.run(move || -> std::io::Result<_> {
        let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn()?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(script.as_bytes())?;
        }
        child.wait()
    })??;
    ensure!(status.success(), "nft did not load kube-proxy's rule set");
    Ok(())
}
