//! Is kube-proxy at work on this node? Two proxies that program the same Services get into each other's way.

use std::fmt;

use anyhow::{Context as _, Result};
use knit_kernel::nft::{Family, Kernel, Nftables, TableId, Transaction};
use knit_kernel::{Handle, IfName};

/// What of kube-proxy is on this node.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Its nftables tables.
    pub tables: Vec<TableId>,
    /// Tables of iptables (by nftables) that hold its chains.
    pub iptables: Vec<TableId>,
    /// The interface of its IPVS mode.
    pub ipvs: bool,
}

impl Found {
    /// Looks. Chains of the old iptables (not by nftables) cannot be seen without it.
    pub fn look() -> Result<Self> {
        let mut nft = Kernel::open().context("cannot look for kube-proxy's tables")?;
        let handle = Handle::current().context("cannot look for kube-proxy's interface")?;
        let name = IfName::new("kube-ipvs0").context("the name of kube-proxy's interface")?;
        let ipvs = handle.link_by_name(&name).context("cannot look for kube-proxy's interface")?.is_some();
        Ok(Self { ipvs, ..Self::in_tables(&mut nft)? })
    }

    fn in_tables(nft: &mut impl Nftables) -> Result<Self> {
        let mut found = Self::default();
        for table in nft.tables().context("cannot list nftables tables")? {
            match (table.family, &*table.name) {
                (Family::Ip | Family::Ip6, "kube-proxy") => found.tables.push(table),
                (Family::Ip | Family::Ip6, "nat") => {
                    // Rules that iptables made may be beyond what is understood here; its chains have plain names.
                    let state =
                        nft.table(&table).with_context(|| format!("cannot look into table {table}"))?;
                    if state.is_some_and(|s| s.chains.keys().any(|name| &**name == "KUBE-SERVICES")) {
                        found.iptables.push(table);
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether all of it can be removed from here.
    pub fn removable(&self) -> bool {
        self.iptables.is_empty() && !self.ipvs
    }

    /// Removes its nftables tables.
    pub fn remove_tables(&self) -> Result<()> {
        let mut nft = Kernel::open().context("cannot remove kube-proxy's tables")?;
        self.remove_from(&mut nft)
    }

    fn remove_from(&self, nft: &mut impl Nftables) -> Result<()> {
        for table in &self.tables {
            let mut transaction = Transaction::new();
            transaction.delete_table(table);
            match nft.commit(&transaction) {
                Err(error) if !error.is_not_found() => {
                    return Err(error).with_context(|| format!("cannot remove kube-proxy's table {table}"));
                }
                _ => tracing::info!("removed kube-proxy's table {table}"),
            }
        }
        Ok(())
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = self.tables.iter().map(|t| format!("its nftables table {t}"));
        let iptables = self.iptables.iter().map(|t| format!("its iptables chains in table {t}"));
        let ipvs = self.ipvs.then(|| "its interface kube-ipvs0".to_owned());
        let all: Vec<String> = tables.chain(iptables).chain(ipvs).collect();
        f.write_str(&all.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use knit_kernel::nft::{Chain, Fake, Table};

    use super::*;

    fn node(tables: &[(Family, &str, &[&str])]) -> Fake {
        let mut fake = Fake::new();
        for (family, name, chains) in tables {
            let id = TableId::new(*family, *name);
            let mut transaction = Transaction::new();
            transaction.add_table(Table::new(id.clone()));
            for chain in *chains {
                transaction.add_chain(&id, Chain::regular(*chain));
            }
            fake.commit(&transaction).unwrap();
        }
        fake
    }

    #[test]
    fn rule_62_what_kube_proxy_left_is_seen_in_its_modes() {
        let mut clean = node(&[(Family::Ip, "nat", &["DOCKER"]), (Family::Inet, "kube-proxy", &[])]);
        assert!(Found::in_tables(&mut clean).unwrap().is_empty());
        let mut busy = node(&[
            (Family::Ip, "kube-proxy", &["services"]),
            (Family::Ip6, "kube-proxy", &["services"]),
            (Family::Ip, "nat", &["KUBE-SERVICES"]),
        ]);
        let found = Found::in_tables(&mut busy).unwrap();
        assert_eq!((found.tables.len(), found.iptables.len(), found.removable()), (2, 1, false));
        found.remove_from(&mut busy).unwrap();
        let left = Found::in_tables(&mut busy).unwrap();
        assert_eq!((left.tables.len(), left.iptables.len()), (0, 1));
    }
}
