//! What this machine knows of itself: its name, and the addresses of its interfaces.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use knit_kernel::Handle;
use knit_proxy::model::NodeInfo;

/// The host name as Kubernetes has it: in small letters.
pub fn host_name() -> Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .context("cannot read the host name; set --node-name")?;
    Ok(name.trim().to_lowercase())
}

/// The addresses of this machine's interfaces that others can reach.
pub fn host_addresses() -> Result<Vec<IpAddr>> {
    let handle = Handle::current().context("cannot ask the kernel for this machine's addresses")?;
    let listed = handle.addresses(None).context("cannot list this machine's addresses")?;
    let mut found: Vec<IpAddr> = listed.iter().map(|a| a.address.addr()).filter(|a| reachable(*a)).collect();
    // In the order of the interfaces, so that the first is the one to call primary.
    let mut seen = std::collections::HashSet::new();
    found.retain(|address| seen.insert(*address));
    Ok(found)
}

/// The node, where no Node object says more.
pub fn own(name: &str, first: Option<IpAddr>) -> NodeInfo {
    let addresses = host_addresses().unwrap_or_else(|error| {
        tracing::warn!("{error:#}");
        Vec::new()
    });
    let mut node = NodeInfo::new(name);
    node.addresses = first.into_iter().chain(addresses.iter().copied()).collect();
    node.host_addresses = addresses;
    node
}

/// Puts the address that the operator gave before those that the Node object has.
pub fn put_first(node: &mut NodeInfo, first: Option<IpAddr>) {
    if let Some(first) = first.filter(|first| node.addresses.first() != Some(first)) {
        node.addresses.insert(0, first);
    }
}

fn reachable(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    };
    !address.is_loopback() && !link_local
}
