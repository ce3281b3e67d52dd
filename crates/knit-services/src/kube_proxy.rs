//! Whether kube-proxy serves this node.

use knit_kernel::NetNs;
use knit_kernel::nft::{Error, Kernel, Nftables};

/// The name of kube-proxy's tables in its nftables mode.
const TABLE: &str = "kube-proxy";

/// Whether tables of kube-proxy are in a namespace.
pub(crate) fn is_there(namespace: &NetNs) -> Result<bool, Error> {
    Ok(Kernel::open_in(namespace)?.tables()?.iter().any(|table| &*table.name == TABLE))
}

/// Removes our own tables, where kube-proxy serves: two would both balance, and one of them is not kept up to date.
pub(crate) fn give_way(namespace: &NetNs, table: &str) -> Result<bool, Error> {
    knit_proxy_nft::remove_table(&mut Kernel::open_in(namespace)?, table)
}
