//! `cargo xtask bench services`: what services cost in nftables, next to kube-proxy's rule set in the same
//! run, and next to kube-proxy itself where the Kubernetes test bed has built it.
//!
//! Everything happens in namespaces of its own. Objects are Kubernetes objects; what is measured is the way
//! from a decoded object to the kernel: conversion, node view, difference, netlink, kernel. CPU is that of
//! the whole process, so the kernel's share is in it. "Changed" replaces one endpoint of a service by
//! another, "scaled" adds or removes one.

mod cluster;
mod kube_proxy;
mod latency;
pub mod objects;

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use knit_kernel::NetNs;
use knit_kernel::conntrack::{Conntrack, Flow, Tuple};
use knit_kernel::testing::{cpu_time, namespace, program_in_namespaces};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::kubernetes::Kubernetes;
use knit_proxy::model::NodeInfo;
use knit_proxy::source::Event;
use knit_proxy::view::{View, ViewConfig};
use knit_proxy_nft::{Config, NftBackend};

use super::{Goal, Row};
use objects::{Endpoints, cluster_ip};

const BENCH: &str = "services";
const SERVICES: u32 = 10_000;
const ROUNDS: u32 = 200;
const FLOWS: u32 = 100_000;
const UDP: u8 = 17;

pub fn run() -> Result<Vec<Row>> {
    if let Some(status) = program_in_namespaces().context("cannot run in namespaces of its own")? {
        // As root, outside of the user namespace, in a network namespace of its own.
        ensure!(status.success(), "the benchmark failed in its namespaces");
        return kube_proxy::run();
    }
    // First, while nothing else is in the process.
    let mut rows = memory()?;
    rows.extend(load_and_change(Endpoints::Own(5))?);
    rows.extend(load_and_change(Endpoints::Own(100))?);
    rows.extend(stale_flows()?);
    rows.extend(latency::run()?);
    Ok(rows)
}

/// A proxy: what is between objects and the kernel.
pub struct Proxy {
    convert: Kubernetes,
    view: View,
    backend: NftBackend,
}

impl Proxy {
    pub fn new(netns: &NetNs) -> Result<Self> {
        Self::with_addresses(netns, &[])
    }

    /// On a node with these addresses.
    pub fn with_addresses(netns: &NetNs, addresses: &[IpAddr]) -> Result<Self> {
        let node = NodeInfo { addresses: addresses.to_vec(), ..NodeInfo::new("node-1") };
        Ok(Self {
            convert: Kubernetes::new(),
            view: View::new(ViewConfig::default(), node),
            backend: NftBackend::new_in(netns, Config::default())?,
        })
    }

    pub fn service(&mut self, object: &Service) -> Result<()> {
        match self.convert.service(object).event {
            Event::SetService(service) => self.view.set_service(*service),
            other => bail!("a Service became {other:?}"),
        }
        Ok(())
    }

    pub fn slice(&mut self, object: &EndpointSlice) -> Result<()> {
        match self.convert.slice(object).event {
            Event::SetGroup(group) => self.view.set_group(*group),
            other => bail!("an EndpointSlice became {other:?}"),
        }
        Ok(())
    }

    pub fn sync(&mut self) -> Result<()> {
        drop(self.view.take_changes());
        let outcome = self.backend.sync(self.view.current());
        ensure!(outcome == Outcome::Done, "the backend says {outcome:?}");
        Ok(())
    }

    fn apply(&mut self) -> Result<()> {
        let changes = self.view.take_changes();
        let outcome = self.backend.apply(&changes, self.view.current());
        ensure!(outcome == Outcome::Done, "the backend says {outcome:?}");
        Ok(())
    }
}

pub fn decode<T: serde::de::DeserializeOwned>(value: &serde_json::Value) -> Result<T> {
    Ok(serde_json::from_str(&value.to_string())?)
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn cpu() -> Duration {
    cpu_time().0
}

fn status_kib(field: &str) -> Result<f64> {
    status_kib_of(std::process::id(), field)
}

fn status_kib_of(process: u32, field: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("no such line")?;
    line.split_whitespace().next().context("no number")?.parse().context("no number")
}

/// Resident memory of a process that does nothing but this, fed object by object.
fn memory() -> Result<Vec<Row>> {
    let netns = namespace();
    let mut proxy = Proxy::new(&netns)?;
    for number in 0..SERVICES {
        proxy.service(&decode(&objects::service(number, "TCP"))?)?;
        let addresses = Endpoints::Own(5).addresses(number);
        proxy.slice(&decode(&objects::slice(number, "TCP", &addresses))?)?;
    }
    proxy.sync()?;
    let (now, peak) = (status_kib("VmRSS:")? / 1024.0, status_kib("VmHWM:")? / 1024.0);
    let row = |metric, value| Row::new(BENCH, "10000 x 5", metric, value, "MiB");
    Ok(vec![row("resident memory", now).goal(Goal::AtMost(60.0)), row("its peak, at the first sync", peak)])
}

/// Everything at once, then one thing at a time.
fn load_and_change(endpoints: Endpoints) -> Result<Vec<Row>> {
    let Endpoints::Own(count) = endpoints else { bail!("not for shared endpoints") };
    let size = format!("{SERVICES} x {count}");
    let netns = namespace();
    let mut proxy = Proxy::new(&netns)?;
    let mut rows = Vec::new();
    let texts: Vec<(String, String)> = (0..SERVICES)
        .map(|n| {
            let slice = objects::slice(n, "TCP", &endpoints.addresses(n));
            (objects::service(n, "TCP").to_string(), slice.to_string())
        })
        .collect();
    let start = cpu();
    let all: Vec<(Service, EndpointSlice)> = texts
        .iter()
        .map(|(service, slice)| Ok((serde_json::from_str(service)?, serde_json::from_str(slice)?)))
        .collect::<Result<_>>()?;
    let decoding = cpu() - start;
    drop(texts);
    let (start, wall) = (cpu(), Instant::now());
    for (service, slice) in &all {
        proxy.service(service)?;
        proxy.slice(slice)?;
    }
    proxy.sync()?;
    let (used, took) = (cpu() - start, wall.elapsed());
    let load = |metric: &str, time: Duration| {
        Row::new(BENCH, format!("load {size}"), metric, time.as_secs_f64(), "s")
    };
    let row = load("cpu", used);
    rows.push(if count == 5 { row.goal(Goal::AtMost(0.5)) } else { row });
    rows.push(load("wall", took));
    rows.push(load("cpu with decoding JSON", used + decoding));
    drop(all);

    let changed = |round: u32| -> Result<Vec<EndpointSlice>> {
        let number = round * (SERVICES / ROUNDS);
        let mut addresses = endpoints.addresses(number);
        addresses[0] = Ipv4Addr::from(0x0ac0_0000 + round);
        Ok(vec![decode(&objects::slice(number, "TCP", &addresses))?])
    };
    rows.extend(measure(&mut proxy, &size, "one endpoint changed", 1.0, true, changed)?);
    let scaled = |round: u32| -> Result<Vec<EndpointSlice>> {
        let number = (round / 2) * (SERVICES / ROUNDS) + 1;
        let mut addresses = endpoints.addresses(number);
        if round.is_multiple_of(2) {
            addresses.push(Ipv4Addr::from(0x0ac1_0000 + round));
        }
        Ok(vec![decode(&objects::slice(number, "TCP", &addresses))?])
    };
    rows.extend(measure(&mut proxy, &size, "one endpoint more or less", 1.0, true, scaled)?);
    let added = |round: u32| -> Result<Vec<EndpointSlice>> {
        let addresses: Vec<_> = (0..5).map(|i| Ipv4Addr::from(0x0ac2_0000 + round * 5 + i)).collect();
        Ok(vec![decode(&objects::slice(SERVICES + round, "TCP", &addresses))?])
    };
    rows.extend(measure(&mut proxy, &size, "one service added", 2.0, false, added)?);
    Ok(rows)
}

/// One change at a time, from decoded objects to the kernel.
fn measure(
    proxy: &mut Proxy,
    size: &str,
    what: &str,
    limit: f64,
    limit_cpu: bool,
    slices: impl Fn(u32) -> Result<Vec<EndpointSlice>>,
) -> Result<Vec<Row>> {
    let mut walls = Vec::new();
    let mut used = Duration::ZERO;
    for round in 0..ROUNDS {
        let slices = slices(round)?;
        let service: Option<Service> = match limit_cpu {
            true => None,
            false => Some(decode(&objects::service(SERVICES + round, "TCP"))?),
        };
        let (start, wall) = (cpu(), Instant::now());
        if let Some(service) = &service {
            proxy.service(service)?;
        }
        for slice in &slices {
            proxy.slice(slice)?;
        }
        proxy.apply()?;
        walls.push(wall.elapsed());
        used += cpu() - start;
    }
    walls.sort();
    let at = |part: usize| millis(walls[walls.len() * part / 100]);
    let row = |metric, value| Row::new(BENCH, format!("{what}, {size}"), metric, value, "ms");
    let mut cpu = row("cpu", millis(used) / f64::from(ROUNDS));
    if limit_cpu {
        cpu = cpu.goal(Goal::AtMost(limit));
    }
    Ok(vec![row("p50", at(50)).goal(Goal::AtMost(limit)), row("p99", at(99)), cpu])
}

/// A hundred flows to an endpoint that goes, among many others.
fn stale_flows() -> Result<Vec<Row>> {
    let netns = namespace();
    let mut proxy = Proxy::new(&netns)?;
    let mut conntrack = Conntrack::open_in(&netns)?;
    let old = Ipv4Addr::new(10, 200, 0, 1);
    proxy.service(&decode(&objects::service(0, "UDP"))?)?;
    proxy.slice(&decode(&objects::slice(0, "UDP", &[old]))?)?;
    proxy.sync()?;
    for number in 0..FLOWS {
        let stale = number.is_multiple_of(FLOWS / 100);
        let client = IpAddr::from(Ipv4Addr::from(0x0a0a_0000 + number));
        let service = if stale { cluster_ip(0) } else { Ipv4Addr::new(10, 201, 0, 1) };
        let endpoint = if stale { old } else { Ipv4Addr::new(10, 202, 0, 1) };
        let mut flow =
            Flow::new(Tuple::new(UDP, (client, 4000), (service.into(), 80)), Duration::from_secs(600));
        flow.reply = Tuple::new(UDP, (endpoint.into(), 8080), (client, 4000));
        if let Err(error) = conntrack.create(&flow) {
            eprintln!(
                "this kernel tracks no more than {number} flows ({error}): stale flows are not measured"
            );
            return Ok(Vec::new());
        }
    }
    let new: EndpointSlice = decode(&objects::slice(0, "UDP", &[Ipv4Addr::new(10, 200, 0, 2)]))?;
    let (start, wall) = (cpu(), Instant::now());
    proxy.slice(&new)?;
    proxy.apply()?;
    let (used, took) = (cpu() - start, wall.elapsed());
    ensure!(proxy.backend.cleaned() == 100, "{} flows were deleted, not 100", proxy.backend.cleaned());
    let row = |metric, value| Row::new(BENCH, "100 stale UDP flows among 100000", metric, value, "ms");
    Ok(vec![row("wall", millis(took)).goal(Goal::AtMost(70.0)), row("cpu", millis(used))])
}
