//! How many addresses a Network has: used and free on nodes, and what no node has yet.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_api::{AddressCounts, Family, Network};
use knit_ipam::Block;

use super::index::Index;

/// "That many or more".
const MOST: i64 = (1 << 53) - 1;

/// One entry per family that the Network has.
pub(super) fn addresses(index: &Index<'_>, name: &str, network: &Network) -> Vec<AddressCounts> {
    [Family::V4, Family::V6]
        .into_iter()
        .filter_map(|family| {
            let subnet = network.spec.subnets.iter().find_map(|s| {
                let cidr: IpNet = s.cidr.parse().ok()?;
                (Family::of(cidr.addr()) == family).then_some((s, cidr))
            });
            let (mut used, mut free, mut there) = (0_i64, 0_i64, subnet.is_some());
            let said = index.said(name).iter().flat_map(|(_, here)| &here.addresses);
            for counts in said.filter(|counts| counts.family == family) {
                there = true;
                used = used.saturating_add(counts.used.max(0));
                free = free.saturating_add(counts.free.max(0));
            }
            if let Some((subnet, cidr)) = subnet {
                let unassigned = unassigned(subnet, cidr, index.blocks(name));
                free = free.saturating_add(i64::try_from(unassigned).unwrap_or(MOST));
            }
            there.then(|| AddressCounts { family, used: used.min(MOST), free: free.min(MOST) })
        })
        .collect()
}

/// Addresses of a subnet that are in no block and may be given out.
fn unassigned(subnet: &knit_api::Subnet, cidr: IpNet, blocks: &[Block]) -> u128 {
    let family = Family::of(cidr.addr());
    let (first, last) = span(cidr);
    let mut taken: Vec<(u128, u128)> = blocks.iter().filter_map(|b| b.prefix(family)).map(span).collect();
    taken.extend(subnet.reserved.iter().filter_map(|r| r.parse::<IpNet>().ok()).map(span));
    // The subnet's own address, its gateway, and the broadcast address of IPv4.
    taken.push((first, first));
    let gateway =
        subnet.gateway.as_deref().and_then(|g| g.parse().ok()).map_or(first.saturating_add(1), number);
    taken.push((gateway, gateway));
    if cidr.addr().is_ipv4() {
        taken.push((last, last));
    }
    taken.sort_unstable();
    let (mut left, mut next) = ((last - first).saturating_add(1), first);
    for (from, to) in taken {
        let (from, to) = (from.max(next), to.min(last));
        if from <= to {
            left -= to - from + 1;
            next = to.saturating_add(1);
        }
    }
    left
}

fn span(range: IpNet) -> (u128, u128) {
    (number(range.network()), number(range.broadcast()))
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}
