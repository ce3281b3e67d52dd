//! The kinds of slices.

use std::net::IpAddr;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use knit_api::names::{MANAGED_BY, MANAGED_BY_LABEL, NETWORK_LABEL};
use knit_api::{
    AddressBlock, BlockSlice, BlockSliceSpec, NodeSlice, NodeSliceSpec, SliceBlock, SliceInterface, SliceNode,
};
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
    fn read(object: &Self::Object) -> (SliceKey, bool, Vec<Self::Item>);
    /// The slice that says this.
    fn object(place: &SliceKey, items: Vec<Self::Item>, complete: bool) -> Self::Object;
}

/// Which slice of which set.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SliceKey {
    /// The set: a Network's name, or nothing where there is only one.
    pub set: String,
    /// The slice's number in it.
    pub index: u32,
}

/// All Nodes: one set.
#[derive(Debug)]
pub struct Nodes;

/// AddressBlocks, and interfaces that do not follow from them: one set for each Network.
#[derive(Debug)]
pub struct Blocks;

/// What is in a BlockSlice.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockItem {
    /// An AddressBlock.
    Block(SliceBlock),
    /// An interface that other nodes are told of.
    Announced(SliceInterface),
}

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

    fn read(object: &NodeSlice) -> (SliceKey, bool, Vec<SliceNode>) {
        let spec = &object.spec;
        (SliceKey { set: String::new(), index: spec.index }, spec.complete, spec.nodes.clone())
    }

    fn object(place: &SliceKey, nodes: Vec<SliceNode>, complete: bool) -> NodeSlice {
        let spec = NodeSliceSpec { index: place.index, complete, nodes };
        NodeSlice { metadata: metadata(format!("nodes-{}", place.index), None), spec }
    }
}

impl SliceKind for Blocks {
    type Object = BlockSlice;
    type Item = BlockItem;

    const CAPACITY: usize = 100;

    fn key(item: &BlockItem) -> &str {
        match item {
            BlockItem::Block(block) => &block.name,
            // With the slash that no AddressBlock has in its name.
            BlockItem::Announced(interface) => &interface.attachment,
        }
    }

    fn read(object: &BlockSlice) -> (SliceKey, bool, Vec<BlockItem>) {
        let spec = &object.spec;
        let blocks = spec.blocks.iter().cloned().map(BlockItem::Block);
        let announced = spec.announced.iter().flatten().cloned().map(BlockItem::Announced);
        // A controller that writes blocks only never completes a set.
        let complete = spec.complete && spec.announced.is_some();
        let place = SliceKey { set: spec.network.clone(), index: spec.index };
        (place, complete, blocks.chain(announced).collect())
    }

    fn object(place: &SliceKey, items: Vec<BlockItem>, complete: bool) -> BlockSlice {
        let (mut blocks, mut announced) = (Vec::new(), Vec::new());
        for item in items {
            match item {
                BlockItem::Block(block) => blocks.push(block),
                BlockItem::Announced(interface) => announced.push(interface),
            }
        }
        let (network, announced) = (place.set.clone(), Some(announced));
        let spec = BlockSliceSpec { network, index: place.index, complete, blocks, announced };
        let name = format!("{}-{}", place.set, place.index);
        BlockSlice { metadata: metadata(name, Some(&place.set)), spec }
    }
}

/// So many addresses of a Node, of each kind, are in one item. Those by which others reach it are among them.
const MOST_ADDRESSES: usize = 16;
/// So many items there are of one Node, at most: a kubelet writes its addresses, and a slice is for many
/// nodes.
const MOST_ITEMS: usize = 8;

/// What others need to know of a Node. Where it has more addresses than fit one item, further ones have them
/// as other addresses, so that they still count as inside of the cluster: their names are no node's.
pub(super) fn slice_node(node: &Node) -> Option<Vec<SliceNode>> {
    let name = node.metadata.name.clone()?;
    let NodeAddresses { internal, others, unreadable: _ } = NodeAddresses::of(node);
    let text = |list: &[IpAddr]| -> Vec<String> { list.iter().map(ToString::to_string).collect() };
    let (first_internal, more_internal) = internal.split_at(internal.len().min(MOST_ADDRESSES));
    let (first_others, more_others) = others.split_at(others.len().min(MOST_ADDRESSES));
    let mut items = vec![SliceNode {
        name: name.clone(),
        addresses: text(first_internal),
        others: text(first_others),
        uid: node.metadata.uid.clone(),
    }];
    let more: Vec<IpAddr> = more_internal.iter().chain(more_others).copied().collect();
    let left_out = more.len().saturating_sub(MOST_ADDRESSES * (MOST_ITEMS - 1));
    if left_out > 0 {
        tracing::warn!(
            node = name,
            left_out,
            "the Node has more addresses than other nodes are told of: to pods of Networks that reach the \
             outside, the rest is outside of the cluster"
        );
    }
    let parts = more.chunks(MOST_ADDRESSES).zip(further_items(&name));
    items.extend(parts.map(|(part, name)| SliceNode { name, others: text(part), ..SliceNode::default() }));
    Some(items)
}

/// The names of all items of a Node but the first, which has its name. No Node has such a name.
pub(super) fn further_items(node: &str) -> impl Iterator<Item = String> {
    (1..MOST_ITEMS).map(move |part| format!("{node}#{part}"))
}

/// What others need to know of an AddressBlock. One that cannot be used is nobody's.
pub(super) fn slice_block(block: AddressBlock) -> Option<(String, BlockItem)> {
    knit_model::AddressBlock::of(&block.spec).ok()?;
    let (metadata, spec) = (block.metadata, block.spec);
    // Kubernetes keeps whole seconds.
    let second = |time: Time| Timestamp::from_second(time.0.as_second()).map_or(time, Time);
    let created = metadata.creation_timestamp.map(second);
    let item =
        SliceBlock { name: metadata.name?, node: spec.node, ipv4: spec.ipv4, ipv6: spec.ipv6, created };
    Some((spec.network, BlockItem::Block(item)))
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
        assert_eq!(found.len(), MOST_ITEMS);
        assert!(found.iter().all(|item| item.addresses.len() + item.others.len() <= 2 * MOST_ADDRESSES));
        assert_eq!(found[0].addresses[0], "10.0.0.0", "the first ones, by which others reach it");
    }

    #[test]
    fn a_nodes_seventeenth_address_was_outside_of_the_cluster() {
        let addresses: Vec<_> = (0..40)
            .map(|n| serde_json::json!({"type": "InternalIP", "address": format!("10.0.0.{n}")}))
            .chain([serde_json::json!({"type": "ExternalIP", "address": "192.0.2.1"})])
            .collect();
        let node =
            serde_json::json!({"metadata": {"name": "n1", "uid": "u"}, "status": {"addresses": addresses}});
        let found = slice_node(&serde_json::from_value(node).expect("a Node")).expect("a name");
        let names: Vec<&str> = found.iter().map(|item| item.name.as_str()).collect();
        assert_eq!(names, ["n1", "n1#1", "n1#2"]);
        assert_eq!(
            (found[0].addresses.len(), found[0].others.as_slice()),
            (16, &["192.0.2.1".to_owned()][..])
        );
        let told: std::collections::BTreeSet<&String> =
            found.iter().flat_map(|item| item.addresses.iter().chain(&item.others)).collect();
        assert_eq!(told.len(), 41, "each of them is told");
        assert!(found[1..].iter().all(|item| item.addresses.is_empty()), "nobody is sent there");
        assert_eq!(further_items("n1").take(2).collect::<Vec<_>>(), names[1..]);
    }
}
