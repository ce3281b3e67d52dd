//! The kinds of slices.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use knit_api::names::{MANAGED_BY, MANAGED_BY_LABEL, NETWORK_LABEL};
use knit_api::{AddressBlock, BlockSlice, BlockSliceSpec, NodeSlice, NodeSliceSpec, SliceBlock, SliceNode};
use knit_model::NodeAddresses;

/// A kind of objects that are slices.
pub trait SliceKind: Send + Sync + 'static {
    /// The object.
    type Object: knit_objects::Object + serde::Serialize;
    /// What is in it.
    type Item: Clone + PartialEq + Send + Sync + 'static;

    /// The most items of one slice. A slice goes to all its readers as a whole when one of them changes.
    const CAPACITY: usize;

    /// What an item is known by: unique in its kind.
    fn key(item: &Self::Item) -> &str;
    /// What a slice says.
    fn read(object: &Self::Object) -> (Place, bool, Vec<Self::Item>);
    /// The slice that says this.
    fn object(place: &Place, items: Vec<Self::Item>, complete: bool) -> Self::Object;
}

/// Which slice of which set.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Place {
    /// The set: a Network's name, or nothing where there is only one.
    pub set: String,
    /// The slice's number in it.
    pub index: u32,
}

/// All Nodes: one set.
#[derive(Debug)]
pub struct Nodes;

/// AddressBlocks: one set for each Network.
#[derive(Debug)]
pub struct Blocks;

fn metadata(name: String, label: Option<&str>) -> ObjectMeta {
    let mut labels = std::collections::BTreeMap::from([(MANAGED_BY_LABEL.to_owned(), MANAGED_BY.to_owned())]);
    labels.extend(label.map(|network| (NETWORK_LABEL.to_owned(), network.to_owned())));
    ObjectMeta { name: Some(name), labels: Some(labels), ..ObjectMeta::default() }
}

impl SliceKind for Nodes {
    type Object = NodeSlice;
    type Item = SliceNode;

    const CAPACITY: usize = 100;

    fn key(item: &SliceNode) -> &str {
        &item.name
    }

    fn read(object: &NodeSlice) -> (Place, bool, Vec<SliceNode>) {
        let spec = &object.spec;
        (Place { set: String::new(), index: spec.index }, spec.complete, spec.nodes.clone())
    }

    fn object(place: &Place, nodes: Vec<SliceNode>, complete: bool) -> NodeSlice {
        let spec = NodeSliceSpec { index: place.index, complete, nodes };
        NodeSlice { metadata: metadata(format!("nodes-{}", place.index), None), spec }
    }
}

impl SliceKind for Blocks {
    type Object = BlockSlice;
    type Item = SliceBlock;

    const CAPACITY: usize = 100;

    fn key(item: &SliceBlock) -> &str {
        &item.name
    }

    fn read(object: &BlockSlice) -> (Place, bool, Vec<SliceBlock>) {
        let spec = &object.spec;
        (Place { set: spec.network.clone(), index: spec.index }, spec.complete, spec.blocks.clone())
    }

    fn object(place: &Place, blocks: Vec<SliceBlock>, complete: bool) -> BlockSlice {
        let spec = BlockSliceSpec { network: place.set.clone(), index: place.index, complete, blocks };
        let name = format!("{}-{}", place.set, place.index);
        BlockSlice { metadata: metadata(name, Some(&place.set)), spec }
    }
}

/// So many addresses of a Node are told, of each kind. A kubelet writes them, and a slice is for many nodes.
const MOST_ADDRESSES: usize = 16;

/// What others need to know of a Node.
pub(super) fn slice_node(node: &Node) -> Option<SliceNode> {
    let NodeAddresses { internal, others } = NodeAddresses::of(node);
    let text = |list: Vec<std::net::IpAddr>| -> Vec<String> {
        list.iter().take(MOST_ADDRESSES).map(ToString::to_string).collect()
    };
    Some(SliceNode {
        name: node.metadata.name.clone()?,
        addresses: text(internal),
        others: text(others),
        uid: node.metadata.uid.clone(),
    })
}

/// What others need to know of an AddressBlock. One that cannot be used is nobody's.
pub(super) fn slice_block(block: AddressBlock) -> Option<(String, SliceBlock)> {
    knit_model::AddressBlock::of(&block.spec).ok()?;
    let (metadata, spec) = (block.metadata, block.spec);
    // Kubernetes keeps whole seconds.
    let second = |time: Time| Timestamp::from_second(time.0.as_second()).map_or(time, Time);
    let created = metadata.creation_timestamp.map(second);
    let item =
        SliceBlock { name: metadata.name?, node: spec.node, ipv4: spec.ipv4, ipv6: spec.ipv6, created };
    Some((spec.network, item))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kubelet_kept_a_hundred_nodes_from_being_told_of() {
        let address = |n: u32, kind: &str| {
            let address = std::net::Ipv4Addr::from(0x0a00_0000 + n);
            serde_json::json!({"type": kind, "address": address})
        };
        let addresses: Vec<_> =
            (0..20_000).flat_map(|n| [address(n, "InternalIP"), address(n, "ExternalIP")]).collect();
        let node = serde_json::json!({"metadata": {"name": "n1"}, "status": {"addresses": addresses}});
        let found = slice_node(&serde_json::from_value(node).expect("a Node")).expect("a name");
        assert_eq!(found.addresses.len(), MOST_ADDRESSES);
        assert_eq!(found.others.len(), MOST_ADDRESSES);
        assert_eq!(found.addresses[0], "10.0.0.0", "the first ones, by which others reach it");
    }
}
