//! Whether kube-proxy serves this node.

use knit_kernel::nft::{Family, Kernel, Nftables};
use knit_kernel::{Handle, IfName, NetNs};

use crate::instance::Trouble;

/// Whether kube-proxy's tables (nftables), chains (iptables by way of nftables) or interface (IPVS) are in a namespace.
/// Chains of the old iptables cannot be seen without it.
pub(crate) fn is_there(namespace: &NetNs) -> Result<bool, Trouble> {
    let mut nft = Kernel::open_in(namespace).map_err(Trouble::Look)?;
    for table in nft.tables().map_err(Trouble::Look)? {
        match (table.family, &*table.name) {
            (Family::Ip | Family::Ip6, "kube-proxy") => return Ok(true),
            (Family::Ip | Family::Ip6, "nat") => {
                let state = nft.table(&table).map_err(Trouble::Look)?;
                if state.is_some_and(|s| s.chains.keys().any(|chain| &**chain == "KUBE-SERVICES")) {
                    return Ok(true);
                }
            }
            _ => {}
        }
    }
    let Ok(ipvs) = IfName::new("kube-ipvs0") else { return Ok(false) };
    let links = Handle::open(namespace).map_err(Trouble::Links)?;
    Ok(links.link_by_name(&ipvs).map_err(Trouble::Links)?.is_some())
}

/// Removes our own tables, where kube-proxy serves: two would both balance, and one of them is not kept up to date.
pub(crate) fn give_way(namespace: &NetNs, table: &str) -> Result<bool, Trouble> {
    let mut nft = Kernel::open_in(namespace).map_err(Trouble::Look)?;
    knit_proxy_nft::remove_table(&mut nft, table).map_err(Trouble::Look)
}
