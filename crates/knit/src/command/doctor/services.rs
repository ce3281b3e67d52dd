//! Who else programs Services on this node.

use knit_kernel::nft::Kernel;
use knit_nft::{Family, Nftables as _, TableId};

use super::{Node, chain};

pub fn look(node: &mut Node) {
    let check = "Services";
    let tables = Kernel::open().and_then(|mut kernel| {
        let mut found = Vec::new();
        for table in kernel.tables()? {
            let ours = [("kube-proxy", "kube-proxy in its nftables mode")];
            if let Some((_, who)) = ours.iter().find(|(name, _)| *table.name == **name) {
                found.push((table, *who));
            } else if *table.name == *"nat"
                && matches!(table.family, Family::Ip | Family::Ip6)
                && has_kube_chains(&mut kernel, &table)?
            {
                found.push((table, "kube-proxy in its iptables mode"));
            }
        }
        Ok(found)
    });
    let legacy = std::fs::read_to_string("/proc/net/ip_tables_names").unwrap_or_default();
    match tables {
        Ok(found) if found.is_empty() => {
            let more = if legacy.trim().is_empty() {
                ""
            } else {
                "; iptables-legacy tables exist and were not inspected"
            };
            node.good(check, format!("no tables of kube-proxy{more}"));
        }
        Ok(found) => {
            let (table, who) = &found[0];
            node.warning(
                check,
                format!(
                    "{who} has tables here ({table}), so the agent leaves the default Network's Services \
                         to it"
                ),
                "nothing, if kube-proxy should stay; otherwise remove it from the node and flush \
                its tables: kube-proxy --cleanup",
            );
        }
        Err(error) => {
            node.unknown(check, format!("cannot list tables: {}; run this as root", chain(&error)));
        }
    }
}

fn has_kube_chains(kernel: &mut Kernel, table: &TableId) -> knit_nft::Result<bool> {
    let state = kernel.table(table)?;
    Ok(state.is_some_and(|state| state.chains.keys().any(|name| name.starts_with("KUBE-"))))
}
