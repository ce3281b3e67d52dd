//! Is kube-proxy at work in a network namespace? Two proxies that program the same services get into each
//! other's way.

use std::fmt;

use knit_kernel::nft::Kernel;
use knit_kernel::{Handle, IfName, NetNs};
use knit_nft::{Error as NftError, Family, Nftables, TableId, Transaction};

/// What of kube-proxy is in a network namespace.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct KubeProxy {
    /// Its nftables tables.
    pub tables: Vec<TableId>,
    /// Tables of iptables (by nftables) that hold its chains.
    pub iptables: Vec<TableId>,
    /// The interface of its IPVS mode.
    pub ipvs: bool,
}

/// A look that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookError {
    /// nftables does not say.
    #[error("cannot look for kube-proxy's tables; run as root, or with CAP_NET_ADMIN")]
    Tables(#[source] NftError),
    /// The links cannot be read.
    #[error("cannot look for kube-proxy's interface")]
    Links(#[source] knit_kernel::Error),
}

impl KubeProxy {
    /// Looks. Chains of the old iptables (not by nftables) cannot be seen without it.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn look_in(namespace: &NetNs) -> Result<Self, LookError> {
        let mut nft = Kernel::open_in(namespace).map_err(LookError::Tables)?;
        let found = Self::in_tables(&mut nft).map_err(LookError::Tables)?;
        let links = Handle::open(namespace).map_err(LookError::Links)?;
        let name = IfName::new("kube-ipvs0").map_err(|e| LookError::Links(e.into()))?;
        let ipvs = links.link_by_name(&name).map_err(LookError::Links)?.is_some();
        Ok(Self { ipvs, ..found })
    }

    /// What can be seen in tables.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn in_tables(nft: &mut dyn Nftables) -> Result<Self, NftError> {
        let mut found = Self::default();
        for table in nft.tables()? {
            match (table.family, &*table.name) {
                (Family::Ip | Family::Ip6, "kube-proxy") => found.tables.push(table),
                // Not the table: kube-proxy has up to a hundred thousand rules there.
                (Family::Ip | Family::Ip6, "nat") if nft.has_chain(&table, "KUBE-SERVICES")? => {
                    found.iptables.push(table);
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// Whether nothing of it is there.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether all of it can be removed from here.
    #[must_use]
    pub fn removable(&self) -> bool {
        self.iptables.is_empty() && !self.ipvs
    }

    /// Removes its nftables tables.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_tables(&self, nft: &mut dyn Nftables) -> Result<(), NftError> {
        for table in &self.tables {
            let mut transaction = Transaction::new();
            transaction.delete_table(table);
            match nft.commit(&transaction) {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => tracing::info!("removed kube-proxy's table {table}"),
            }
        }
        Ok(())
    }
}

impl fmt::Display for KubeProxy {
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
    use knit_nft::{Chain, Fake, Table};

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

    /// One whose tables are too large to be read for the sake of one name.
    struct Large(Fake);

    impl Nftables for Large {
        fn commit(&mut self, transaction: &Transaction) -> Result<(), NftError> {
            self.0.commit(transaction)
        }

        fn commit_if(&mut self, at: knit_nft::Generation, tx: &Transaction) -> Result<(), NftError> {
            self.0.commit_if(at, tx)
        }

        fn commit_chunked(&mut self, transaction: &Transaction) -> Result<usize, NftError> {
            self.0.commit_chunked(transaction)
        }

        fn generation(&mut self) -> Result<knit_nft::Generation, NftError> {
            self.0.generation()
        }

        fn tables(&mut self) -> Result<Vec<TableId>, NftError> {
            self.0.tables()
        }

        fn has_chain(&mut self, table: &TableId, chain: &str) -> Result<bool, NftError> {
            self.0.has_chain(table, chain)
        }

        fn snapshot(
            &mut self,
            table: &TableId,
        ) -> Result<(knit_nft::Generation, Option<knit_nft::TableState>), NftError> {
            panic!("{table} is read as a whole")
        }
    }

    #[test]
    fn rule_62_a_look_does_not_read_all_rules_of_kube_proxy() {
        let mut large =
            Large(node(&[(Family::Ip, "nat", &["KUBE-SERVICES"]), (Family::Ip6, "nat", &["OTHER"])]));
        assert_eq!(KubeProxy::in_tables(&mut large).unwrap().iptables.len(), 1);
    }

    #[test]
    fn rule_62_what_kube_proxy_left_is_seen_in_its_modes() {
        let mut clean = node(&[(Family::Ip, "nat", &["DOCKER"]), (Family::Inet, "kube-proxy", &[])]);
        assert!(KubeProxy::in_tables(&mut clean).unwrap().is_empty());
        let mut busy = node(&[
            (Family::Ip, "kube-proxy", &["services"]),
            (Family::Ip6, "kube-proxy", &["services"]),
            (Family::Ip, "nat", &["KUBE-SERVICES"]),
        ]);
        let found = KubeProxy::in_tables(&mut busy).unwrap();
        assert_eq!((found.tables.len(), found.iptables.len(), found.removable()), (2, 1, false));
        found.remove_tables(&mut busy).unwrap();
        let left = KubeProxy::in_tables(&mut busy).unwrap();
        assert_eq!((left.tables.len(), left.iptables.len()), (0, 1));
    }
}
