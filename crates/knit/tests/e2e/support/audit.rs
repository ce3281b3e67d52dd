//! Whether kernel, ledger and leases of a node agree.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::netns::NetNs;
use knit_kernel::{Handle, owner};
use knit_ledger::{AttachmentState, Entry, SandboxRecord};
use serde_json::Value;

use super::Node;

impl Node {
    /// The attachments in the ledger, with their addresses.
    pub fn recorded(&self) -> Vec<SandboxRecord> {
        let (content, _) = knit_ledger::read::<Entry>(&self.run.join("ledger")).expect("a ledger");
        assert!(content.unreadable.is_empty(), "{:?}", content.unreadable);
        content.records.values().filter_map(|entry| entry.sandbox().cloned()).collect()
    }

    /// The attachments that the kernel has: sandbox and interface, by the marks of their host ends.
    pub fn in_kernel(&self) -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        for space in self.spaces() {
            let handle = Handle::open(&space).expect("a handle");
            let filter = LinkFilter { kind: Some("veth"), owned: true, ..LinkFilter::default() };
            for link in handle.links(&filter).expect("links") {
                let mark = link.owner().unwrap_or_default().to_owned();
                let mut words = mark.split(' ');
                if words.next() == Some("pod") {
                    let mut word = || words.next().unwrap_or_default().to_owned();
                    found.insert((word(), word()));
                }
            }
        }
        found
    }

    /// The node's namespace and those of its routers.
    fn spaces(&self) -> Vec<NetNs> {
        let routers = self.run.join("netns");
        let names = NetNs::list(&routers).expect("routers");
        let mut spaces = vec![self.space.try_clone().expect("a clone")];
        spaces.extend(names.iter().map(|(name, _)| NetNs::open(routers.join(name)).expect("a router")));
        spaces
    }

    /// Kernel, ledger and leases agree, and have these pods with this many interfaces each and nothing else.
    #[track_caller]
    pub fn audit(&self, pods: &BTreeMap<&str, usize>) {
        let records = self.recorded();
        let mut recorded = BTreeSet::new();
        let mut taken: BTreeSet<(String, IpAddr)> = BTreeSet::new();
        for record in &records {
            for attachment in record.attachments() {
                let plan = attachment.plan();
                assert!(
                    matches!(attachment.state(), AttachmentState::Attached(_)),
                    "{} {} is neither there nor gone: {attachment:?}",
                    record.sandbox(),
                    plan.interface
                );
                recorded.insert((record.sandbox().to_string(), plan.interface.to_string()));
                for address in plan.lease.iter().flat_map(|lease| lease.addresses.iter()) {
                    assert!(
                        taken.insert((plan.network.to_string(), address)),
                        "{address} is given out twice"
                    );
                }
            }
        }
        let counted = records.iter().map(|r| (r.sandbox().as_str(), r.attachments().len())).collect();
        assert_eq!(*pods, counted, "what the ledger has");
        assert_eq!(self.in_kernel(), recorded, "what the kernel has, and what the ledger has");
        // Routes and neighbours of ours lead to those pods, to other nodes' blocks and through uplinks, and
        // nowhere else.
        let addresses: BTreeSet<IpAddr> = taken.into_iter().map(|(_, address)| address).collect();
        let handle = Handle::open(&self.space).expect("a handle");
        let ours = RouteFilter { protocol: Some(owner::PROTOCOL), ..RouteFilter::default() };
        for route in handle.routes(&ours).expect("routes") {
            let to = route.destination;
            let of_pod = to.prefix_len() == to.max_prefix_len() && pods_of_default().contains(&to.addr());
            assert!(!of_pod || addresses.contains(&to.addr()), "a route of nobody: {to}");
        }
        let ours = NeighbourFilter { protocol: Some(owner::PROTOCOL), ..NeighbourFilter::default() };
        for neighbour in handle.neighbours(&ours).expect("neighbours") {
            let of_pod = pods_of_default().contains(&neighbour.address);
            assert!(
                !of_pod || addresses.contains(&neighbour.address),
                "a neighbour of nobody: {neighbour:?}"
            );
        }
    }

    /// How many addresses of a Network are taken, as the agent says.
    pub fn used(&self, network: &str) -> Option<i64> {
        let text = find_text(&self.written(), "\"NodeNetwork\"")
            .or_else(|| find_text(&self.written(), "NodeNetwork"))?;
        let object: Value =
            serde_json::from_str(&text).ok().or_else(|| serde_saphyr::from_str(&text).ok())?;
        let networks = object["status"]["networks"].as_array()?;
        let found = networks.iter().find(|n| n["name"] == network)?;
        found["addresses"][0]["used"].as_i64()
    }
}

fn pods_of_default() -> IpNet {
    "10.244.0.0/16".parse().expect("a range")
}

/// The first file below a folder that has a text in it.
fn find_text(folder: &Path, text: &str) -> Option<String> {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|e| e.path()).collect();
    entries.sort();
    entries.into_iter().find_map(|path| {
        if path.is_dir() {
            return find_text(&path, text);
        }
        std::fs::read_to_string(&path).ok().filter(|content| content.contains(text))
    })
}
