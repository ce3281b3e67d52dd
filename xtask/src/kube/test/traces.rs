//! What a node has in its kernel and on its disk that somebody may have left there.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::nft::Kernel;
use knit_kernel::{Handle, NetNs, owner};
use knit_nft::{Data, ElementValue, Nftables as _};

use super::talk;
use crate::kube::bed::Bed;
use crate::kube::wait::until;

/// How long the last of it may take to go.
const LIMIT: Duration = Duration::from_secs(60);

/// How long nothing has changed on nodes where nothing is about to.
const CALM: Duration = Duration::from_secs(4);

/// The protocol of routes that follow from addresses by themselves.
const KERNEL: u8 = 2;

/// Where an agent tells its numbers, at its node's address.
const AGENT_HTTP: u16 = 9469;

/// What there is on one node, one line each.
pub type Traces = BTreeSet<String>;

/// What is on a node of Knit, of pods, of network plugins.
pub fn of_node(bed: &Bed, node: &str) -> Result<Traces> {
    let mut found = in_kernel(&bed.node_ns(node)?)?;
    for path in ["/run/knit", "/var/lib/knit", "/opt/cni/bin/knit-cni", "/etc/cni/net.d/05-knit.conflist"] {
        if bed.node_path(node, path)?.symlink_metadata().is_ok() {
            found.insert(format!("file {path}"));
        }
    }
    let mounts = std::fs::read_to_string(format!("/proc/{}/mounts", bed.process(node)?))?;
    found.extend(mounts.lines().filter(|l| l.contains("/run/knit")).map(|line| format!("mount {line}")));
    Ok(found)
}

/// Links, routes that somebody made, rules, neighbours that Knit marks as its own; nftables whole.
fn in_kernel(space: &NetNs) -> Result<Traces> {
    let handle = Handle::open(space)?;
    let links = handle.links(&LinkFilter::default())?;
    let mut found: Traces = links.iter().map(|link| format!("link {}", link.name)).collect();
    let routes = handle.routes(&RouteFilter::default())?;
    let made = routes.iter().filter(|route| route.protocol != KERNEL);
    found.extend(made.map(|route| format!("{route} of protocol {}", route.protocol)));
    found.extend(handle.rules(None)?.iter().map(ToString::to_string));
    let ours = NeighbourFilter { protocol: Some(owner::PROTOCOL), ..NeighbourFilter::default() };
    found.extend(handle.neighbours(&ours)?.iter().map(ToString::to_string));
    let mut kernel = Kernel::open_in(space)?;
    for id in kernel.tables()? {
        found.insert(format!("table {id}"));
        let Some(table) = kernel.table(&id)? else { continue };
        for (name, chain) in &table.chains {
            let rules = chain.rules.iter().enumerate();
            found.extend(rules.map(|(number, _)| format!("table {id} chain {name} rule {number}")));
        }
        // Knit's proxy numbers what is done with a connection, and endpoints; who starts again, or hears of
        // them in another order, numbers otherwise. So a frontend is told by what is done, and an endpoint by
        // where it is. What has a number and no frontend is there for later.
        let action = |number: &Data| {
            let mut actions = table.sets.get("actions")?.elements.values();
            actions.find(|action| action.key == *number).map(|action| &action.value)
        };
        for (name, set) in table.sets.iter().filter(|(name, _)| name.as_ref() != "actions") {
            found.extend(set.elements.values().map(|element| {
                let value = match &element.value {
                    ElementValue::Data(number) if name.as_ref() == "frontends" => action(number),
                    _ => None,
                };
                let mut key = format!("{:?}", element.key);
                if name.as_ref() == "endpoints" {
                    // The last four bytes are its place among the endpoints of its port.
                    key.truncate(key.len().saturating_sub(8));
                }
                format!("table {id} set {name} {key} {:?}", value.unwrap_or(&element.value))
            }));
        }
    }
    Ok(found)
}

/// What the nodes have, and what Knit says that it gave out there.
#[derive(Debug)]
pub struct Before(Vec<(String, Traces)>);

impl Before {
    /// Looks at all nodes, once nothing changes there any more: endpoints of what was made just now (the
    /// cluster DNS, say) arrive at service proxies a moment after their pods are ready.
    pub fn look(bed: &Bed) -> Result<Self> {
        let nodes = || -> Result<Vec<(String, Traces)>> {
            bed.nodes().into_iter().map(|node| Ok((node.clone(), all(bed, &node)?))).collect()
        };
        let (mut last, mut since) = (nodes()?, Instant::now());
        until("nothing changes on nodes", LIMIT, || {
            let now = nodes()?;
            if now != last {
                (last, since) = (now, Instant::now());
            }
            Ok((since.elapsed() > CALM).then_some(()))
        })?;
        Ok(Self(last))
    }

    /// Waits until all nodes have the same again.
    pub fn nothing_is_left(&self, bed: &Bed) -> Result<()> {
        for (node, before) in &self.0 {
            let mut last = String::new();
            let same = until(&format!("{node} is as before"), LIMIT, || {
                let now = all(bed, node)?;
                let shown = |lines: Vec<&String>| -> String {
                    lines.iter().take(12).map(|line| format!("\n  {line}")).collect()
                };
                let more: Vec<_> = now.difference(before).collect();
                let less: Vec<_> = before.difference(&now).collect();
                let same = more.is_empty() && less.is_empty();
                last = format!("{node} has more:{}\nand less:{}", shown(more), shown(less));
                Ok(same.then_some(()))
            });
            same.map_err(|error| error.context(last))?;
        }
        Ok(())
    }
}

/// With the namespaces of pods, and the agent's numbers.
fn all(bed: &Bed, node: &str) -> Result<Traces> {
    let mut found = of_node(bed, node)?;
    if let Ok(entries) = std::fs::read_dir(bed.node_path(node, "/run/netns")?) {
        for entry in entries {
            found.insert(format!("namespace {}", entry?.file_name().display()));
        }
    }
    // NodeNetwork says the same up to a minute later.
    let path = "jsonpath={.status.addresses[?(@.type=='InternalIP')].address}";
    let addresses = bed.kubectl(&["get", "node", node, "-o", path])?;
    let address: IpAddr = addresses.split(' ').next().context("an address")?.trim().parse()?;
    let numbers = talk::http(&bed.node_ns(node)?, SocketAddr::new(address, AGENT_HTTP), "/metrics")?;
    let numbers = numbers.unwrap_or_else(|| "the agent does not answer".to_owned());
    let counts = ["knit_node_attachments{", "knit_node_used_addresses{", "the agent"];
    let counts = numbers.lines().filter(|line| counts.iter().any(|name| line.starts_with(name)));
    found.extend(counts.map(str::to_owned));
    Ok(found)
}
