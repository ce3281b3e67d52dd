//! Whether what Networks promise fits through the node's uplink.

use knit_api::names;
use knit_kernel::handle::{LinkFilter, RouteFilter};
use knit_kernel::{Error, Handle};

use super::leftovers::networks;
use super::{Node, chain};

/// What a tunnel takes off, over IPv4 and over IPv6.
const OVERHEAD: [u32; 2] = [50, 70];

pub async fn look(node: &mut Node) {
    let check = "MTU";
    let (uplink, mtu, largest) = match uplink() {
        Ok(Some(found)) => found,
        Ok(None) => return node.unknown(check, "the node has no default route, so its uplink is not known"),
        Err(error) => return node.unknown(check, format!("cannot list links: {}", chain(&error))),
    };
    let mut fits = true;
    if largest > mtu {
        fits = false;
        node.wrong(
            check,
            format!("an interface of a pod has MTU {largest}, but the node's uplink {uplink} only {mtu}"),
            "the uplink's MTU was reduced: raise it again, or set spec.mtu of the Network and \
            recreate the pods",
        );
    }
    for network in networks(node).await.unwrap_or_default() {
        let name = network.metadata.name.unwrap_or_default();
        let Some(wanted) = network.spec.mtu.map(u32::from) else { continue };
        if wanted > mtu {
            fits = false;
            node.wrong(
                check,
                format!("Network {name} wants MTU {wanted}, but the node's uplink {uplink} has {mtu}"),
                format!("set spec.mtu to {} or less, or leave it out", mtu - OVERHEAD[0]),
            );
        } else if wanted + OVERHEAD[0] > mtu && name != names::DEFAULT_NETWORK {
            fits = false;
            node.wrong(
                check,
                format!(
                    "Network {name} wants MTU {wanted}; with {} bytes for a tunnel that does not \
                    fit the {mtu} of {uplink}",
                    OVERHEAD[0]
                ),
                format!(
                    "set spec.mtu to {} or less ({} if nodes communicate over IPv6), or leave it out",
                    mtu - OVERHEAD[0],
                    mtu - OVERHEAD[1]
                ),
            );
        }
    }
    if fits {
        node.good(check, format!("everything fits the node's uplink {uplink} with its MTU of {mtu}"));
    }
}

/// The uplink by the default route, its MTU, and the largest MTU of an interface of ours.
fn uplink() -> Result<Option<(String, u32, u32)>, Error> {
    let handle = Handle::current()?;
    let routes = handle.routes(&RouteFilter { table: Some(254), ..RouteFilter::default() })?;
    let default = routes.iter().filter(|r| r.destination.prefix_len() == 0).find_map(|r| r.interface);
    let Some(default) = default else { return Ok(None) };
    let Some(uplink) = handle.link(default)? else { return Ok(None) };
    let ours = handle.links(&LinkFilter { kind: Some("veth"), owned: true, ..LinkFilter::default() })?;
    let largest = ours.iter().map(|link| link.mtu).max().unwrap_or(0);
    Ok(Some((uplink.name.to_string(), uplink.mtu, largest)))
}
