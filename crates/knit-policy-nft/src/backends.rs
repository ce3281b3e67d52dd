//! The backend as whoever enforces policies on a node is handed it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use knit_kernel::NetNs;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_policy::backend::{Backend, Backends, Denied, Failure, Follow, RouterPlace};
use knit_policy::sets::{Change, Key, Value};

use crate::layout::Router;
use crate::live::Touched;
use crate::table::PolicyTable;

/// Policies in nftables, one table for each router.
#[derive(Clone, Copy, Debug, Default)]
pub struct NftBackends;

impl Backends for NftBackends {
    fn open(&self, router: &RouterPlace<'_>) -> Result<Box<dyn Backend>, Failure> {
        let place = match router.uplink.clone() {
            None => Router::Node,
            Some(uplink) => Router::Apart { uplink, node: router.node.clone() },
        };
        let namespace = NetNs::from_fd(router.namespace.try_clone_to_owned()?)?;
        let table = PolicyTable::open_in(&namespace, place)?;
        let bridged = router.is_bridged.then(|| Sysctls::of(&namespace)).transpose()?;
        Ok(Box::new(Table { table, bridged, touched: Touched::default() }))
    }
}

struct Table {
    table: PolicyTable,
    /// The settings of a router in which pods of one bridge reach each other.
    bridged: Option<Sysctls>,
    /// What live connections have not followed yet.
    touched: Touched,
}

impl Table {
    fn touch(&mut self, touched: Touched) {
        self.touched = std::mem::take(&mut self.touched).and(touched);
    }
}

impl Backend for Table {
    fn sync(&mut self, wanted: &BTreeMap<Key, Value>) -> Result<(), Failure> {
        let applied = self.table.sync(wanted)?;
        self.touch(applied.touched);
        Ok(())
    }

    fn apply(&mut self, changes: &[Change]) -> Result<(), Failure> {
        let applied = self.table.apply(changes)?;
        self.touch(applied.touched);
        Ok(())
    }

    fn restore(&mut self) -> Result<usize, Failure> {
        let applied = self.table.restore()?;
        self.touch(applied.touched);
        Ok(applied.changes)
    }

    fn set_node(&mut self, node: &[IpNet]) -> Result<(), Failure> {
        let applied = self.table.set_node(node)?;
        self.touch(applied.touched);
        Ok(())
    }

    fn watch(&mut self, tell: Box<dyn Fn() + Send>) {
        self.table.watch(tell);
    }

    fn denied(&mut self) -> Result<Denied, Failure> {
        let counted = self.table.counters()?;
        Ok(counted.into_iter().map(|(subject, denied)| (subject, denied.packets)).collect())
    }

    fn gap(&mut self) -> Option<String> {
        let sysctls = self.bridged.as_ref().filter(|_| !self.table.elements().all().is_empty())?;
        let settings = [Sysctl::bridge_nf_call_iptables(), Sysctl::bridge_nf_call_ip6tables()];
        let wrong = settings.iter().find_map(|name| match sysctls.get(name) {
            Ok(value) if value == "1" => None,
            Ok(value) => Some(format!("{name} is {value}")),
            Err(_) => Some(format!("{name} is missing or cannot be read")),
        })?;
        Some(format!(
            "packets between pods of one bridge do not pass its rules ({wrong} in the router): load the \
             kernel module br_netfilter on this node"
        ))
    }

    fn touch_all(&mut self) {
        self.touched = Touched::All;
    }

    fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    fn follow(&mut self) -> Follow {
        let following = self.table.following(self.touched.clone());
        Box::new(move || Ok(following.run()?.cut))
    }

    fn leave_connections(&mut self, but: &BTreeSet<IpAddr>) {
        self.touched = match but.is_empty() {
            true => Touched::default(),
            false => Touched::Addresses(but.clone()),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use knit_kernel::testing::{in_namespaces, skip_for_kernel};
    use knit_policy::sets::Decision;
    use knit_types::IfName;

    use super::*;

    #[test]
    fn policies_were_said_to_be_in_force_on_a_bridge_whose_packets_pass_no_rules() {
        in_namespaces(|| {
            let namespace = NetNs::current().expect("a namespace");
            let sysctls = Sysctls::of(&namespace).expect("sysctls");
            let open = |is_bridged| {
                let place = RouterPlace {
                    network: "lan".into(),
                    namespace: namespace.as_fd(),
                    uplink: Some(IfName::new("uplink").expect("a name")),
                    is_bridged,
                    node: Vec::new(),
                };
                NftBackends.open(&place).expect("opened")
            };
            let (mut bridged, mut routed) = (open(true), open(false));
            let subject = Key::Itself(IpAddr::from([10, 0, 0, 1]));
            let wanted = BTreeMap::from([(subject, Value::Decision(Decision::Accept))]);
            let call = Sysctl::bridge_nf_call_ip6tables();
            let has_setting = sysctls.set(&call, 0).is_ok();
            assert_eq!(bridged.gap(), None, "without policies there is nothing to say");
            for backend in [&mut bridged, &mut routed] {
                backend.sync(&wanted).expect("written");
            }
            assert!(bridged.gap().is_some_and(|why| why.contains("br_netfilter")));
            assert_eq!(routed.gap(), None, "a router without a bridge does not need it");
            match has_setting && sysctls.set(&call, 1).is_ok() {
                true => assert_eq!(bridged.gap(), None, "what is repaired is in force"),
                false => skip_for_kernel("br_netfilter, or does not let this namespace set it"),
            }
        });
    }
}
