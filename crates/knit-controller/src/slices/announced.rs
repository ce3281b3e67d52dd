//! Which interfaces other nodes are told of: those of which an agent says that their address or MAC does not
//! follow from its node's blocks. What an agent says may be a lie: a node has room for as many as it may have
//! pods, and is told of in Networks that there are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use knit_api::{AttachedAddress, NetworkAttachment, SliceInterface, names};
use knit_types::Mac;

/// How many interfaces of one node others are told of.
const PER_NODE: usize = 1024;

/// An interface, and its Network.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Announced {
    pub(super) network: String,
    pub(super) interface: SliceInterface,
}

/// All that agents say.
#[derive(Debug, Default)]
pub(super) struct Announcements {
    all: BTreeMap<String, Announced>,
    /// Those that count, by node.
    told: BTreeMap<String, BTreeSet<String>>,
    /// Those that are too many, by node.
    too_many: BTreeMap<String, BTreeSet<String>>,
}

/// An interface of this name is to be told, or is not any more.
pub(super) type Change = (String, Option<Announced>);

// === impl Announced ===

impl Announced {
    /// What an object says that others must be told; nothing if it follows from blocks.
    pub(super) fn of(object: NetworkAttachment) -> Option<Self> {
        let (metadata, status) = (object.metadata, object.status?);
        let labels = metadata.labels.unwrap_or_default();
        let has = |label: &str, value: &str| labels.get(label).is_some_and(|found| found == value);
        // Agents of earlier versions say so on objects that they made, and by the label only.
        let by_label = has(names::MANAGED_BY_LABEL, names::MANAGED_BY) && has(names::ANNOUNCED_LABEL, "true");
        if !status.announced && !by_label {
            return None;
        }
        // What does not fit into a slice must not keep others in it from being written. The API limits
        // neither the length of these texts nor what they say.
        let parsed = |a: &AttachedAddress| a.address.parse::<IpAddr>().map(|address| address.to_string());
        let addresses: Vec<String> = status.addresses.iter().map(parsed).collect::<Result<_, _>>().ok()?;
        if addresses.is_empty() || addresses.len() > 2 {
            return None;
        }
        let mac = status.mac?.parse::<Mac>().ok()?.to_string();
        let attachment = format!("{}/{}", metadata.namespace?, metadata.name?);
        let (pod, node) = (object.spec.pod, status.node?);
        let interface = SliceInterface { attachment, pod, node, addresses, mac };
        Some(Self { network: object.spec.network, interface })
    }
}

// === impl Announcements ===

impl Announcements {
    /// An object says this, or nothing any more: what that changes.
    pub(super) fn set(&mut self, name: &str, announced: Option<Announced>) -> Vec<Change> {
        if self.all.get(name) == announced.as_ref() {
            return Vec::new();
        }
        let mut changes = Vec::new();
        if let Some(before) = self.all.remove(name) {
            let node = &before.interface.node;
            remove(&mut self.too_many, node, name);
            let stays = announced.as_ref().is_some_and(|now| now.interface.node == *node);
            if !stays && remove(&mut self.told, node, name) {
                changes.push((name.to_owned(), None));
                let next = self.too_many.get_mut(node).and_then(BTreeSet::pop_first);
                if let Some(next) = next {
                    self.told.entry(node.clone()).or_default().insert(next.clone());
                    changes.push((next.clone(), self.all.get(&next).cloned()));
                }
            }
        }
        if let Some(announced) = announced {
            let node = announced.interface.node.clone();
            let told = self.told.entry(node.clone()).or_default();
            if told.contains(name) || told.len() < PER_NODE {
                told.insert(name.to_owned());
                changes.push((name.to_owned(), Some(announced.clone())));
            } else {
                let too_many = self.too_many.entry(node.clone()).or_default();
                // Once: its agent may go on for as long as it likes.
                if too_many.is_empty() {
                    tracing::warn!(
                        node,
                        attachment = name,
                        "a node has more than {PER_NODE} interfaces of which the address or MAC does not \
                         follow from its AddressBlocks: other nodes are not told of the rest"
                    );
                }
                too_many.insert(name.to_owned());
            }
            self.all.insert(name.to_owned(), announced);
        }
        changes
    }

    /// Those that count of a Network, which is there now.
    pub(super) fn of_network(&self, network: &str) -> Vec<SliceInterface> {
        let told = self.told.values().flatten().filter_map(|name| self.all.get(name));
        told.filter(|one| one.network == network).map(|one| one.interface.clone()).collect()
    }
}

fn remove(sets: &mut BTreeMap<String, BTreeSet<String>>, node: &str, name: &str) -> bool {
    let Some(set) = sets.get_mut(node) else { return false };
    let was_there = set.remove(name);
    if set.is_empty() {
        sets.remove(node);
    }
    was_there
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(name: &str, node: &str, more: &serde_json::Value) -> NetworkAttachment {
        let mut object = json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
            "metadata": {"namespace": "shop", "name": name}, "spec": {"pod": "web", "network": "blue"},
            "status": {"node": node, "mac": "02:00:00:00:00:01",
                "addresses": [{"family": "IPv4", "address": "10.2.0.5", "prefix": 24}]},
        });
        if let (Some(object), Some(more)) = (object.as_object_mut(), more.as_object()) {
            for (field, value) in more {
                match (object.get_mut(field).and_then(|v| v.as_object_mut()), value.as_object()) {
                    (Some(there), Some(more)) => there.extend(more.clone()),
                    _ => drop(object.insert(field.clone(), value.clone())),
                }
            }
        }
        serde_json::from_value(object).expect("a NetworkAttachment")
    }

    #[test]
    fn what_follows_from_blocks_is_told_to_nobody() {
        let told = |more: serde_json::Value| Announced::of(object("a", "n1", &more)).is_some();
        assert!(!told(json!({})));
        assert!(told(json!({"status": {"announced": true}})));
        let by = |by: &str| {
            let labels = json!({"knit.dev/announced": "true", "app.kubernetes.io/managed-by": by});
            json!({"metadata": {"labels": labels}})
        };
        assert!(told(by("knit")));
        // A user's own label says nothing.
        assert!(!told(by("helm")));
        assert!(!told(json!({"status": {"announced": true, "mac": null}})));
        for strange in ["10.2.0.5".repeat(100_000), "10.2.0.5/24".into(), "web".into(), String::new()] {
            let addresses = json!([{"family": "IPv4", "address": strange, "prefix": 24}]);
            assert!(!told(json!({"status": {"announced": true, "addresses": addresses}})));
            assert!(!told(json!({"status": {"announced": true, "mac": strange}})));
        }
        let three: Vec<_> = (0..3)
            .map(|n| json!({"family": "IPv4", "address": format!("10.2.0.{n}"), "prefix": 24}))
            .collect();
        assert!(!told(json!({"status": {"announced": true, "addresses": three}})));
    }

    #[test]
    fn one_nodes_agent_filled_everybodys_slices() {
        let announced = json!({"status": {"announced": true}});
        let one = |name: &str, node: &str| Announced::of(object(name, node, &announced));
        let mut all = Announcements::default();
        let mut told = BTreeSet::new();
        let mut take = |changes: Vec<Change>| {
            for (name, change) in changes {
                match change {
                    Some(_) => told.insert(name),
                    None => told.remove(&name),
                };
            }
            told.len()
        };
        for n in 0..3 * PER_NODE {
            take(all.set(&format!("shop/x{n:05}"), one(&format!("x{n:05}"), "evil")));
        }
        assert_eq!(take(all.set("shop/good", one("good", "n1"))), PER_NODE + 1);
        assert_eq!(all.of_network("blue").len(), PER_NODE + 1);
        // One goes, and another one takes its place; it comes to another node.
        assert_eq!(take(all.set("shop/x00000", None)), PER_NODE + 1);
        assert_eq!(take(all.set("shop/x00001", one("x00001", "n1"))), PER_NODE + 2);
        // What is too many, and goes, is missed by nobody.
        assert_eq!(take(all.set("shop/x03000", None)), PER_NODE + 2);
        for n in 0..3 * PER_NODE {
            take(all.set(&format!("shop/x{n:05}"), None));
        }
        assert_eq!(take(Vec::new()), 1);
        assert!(all.too_many.is_empty() && all.told.len() == 1 && all.all.len() == 1);
    }
}
