//! What the scheduler is shown of Networks: one device for each, which many claims can have at once, in a
//! pool of the whole cluster; and the DeviceClasses by which claims ask for them. Pure.
//!
//! What is shown changes with Networks and blocks, and never with a pod: how much of a device is taken, the
//! scheduler counts itself.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute,
    DeviceCapacity, DeviceClass, DeviceClassConfiguration, DeviceClassSpec, DeviceSelector,
    OpaqueDeviceConfiguration, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use knit_api::names;
use knit_ipam::{Growth, Pool};
use knit_model::{Network, selector};
use knit_objects::{Key, Write};
use serde_json::json;

use crate::cluster::Cluster;

/// The most devices in one slice.
const PER_SLICE: usize = 128;

/// The most addresses that are shown: more than that is plenty.
const MOST: u128 = 1 << 40;

/// What there should be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shown {
    /// The devices, by name.
    pub devices: Vec<Device>,
    /// The classes, by name.
    pub classes: BTreeMap<String, DeviceClassSpec>,
}

/// What the cluster's Networks are shown as.
#[must_use]
pub fn shown(cluster: &Cluster) -> Shown {
    let mut cut: BTreeMap<&str, Cut> = BTreeMap::new();
    for view in cluster.blocks.values().filter(|view| !view.deleting) {
        let cut = cut.entry(view.network.as_str()).or_default();
        cut.blocks += 1;
        let size = view.block.as_ref().map_or(0, |block| block.block().size().addresses());
        cut.addresses += u128::from(size);
    }
    let mut shown = Shown::default();
    shown.classes.insert(names::DEVICE_CLASS.to_owned(), class_of_all());
    for (name, network) in &cluster.networks {
        let cut = cut.get(name.as_str()).copied().unwrap_or_default();
        let Some(device) = device(network, cut) else { continue };
        shown.devices.push(device);
        if network.counts_in_scheduling() {
            shown.classes.insert(format!("{}-{name}", names::DEVICE_CLASS), class_of(name));
        }
    }
    shown.devices.sort_by(|a, b| a.name.cmp(&b.name));
    shown
}

/// What to write so that the API shows it.
#[derive(Debug, Default, PartialEq)]
pub struct Writes {
    /// Slices of the pool: all of them, or none. While they say different generations, the scheduler goes by
    /// none of them.
    pub slices: Vec<SliceWrite>,
    /// Slices that the pool has no more: once the others are written.
    pub surplus: Vec<Write>,
    /// Classes, each on its own.
    pub classes: Vec<Write>,
}

/// A slice to write.
#[derive(Debug, PartialEq)]
pub struct SliceWrite {
    /// As it should be.
    pub write: Write,
    /// As it is, for when another one of its pool cannot be written.
    pub undo: Write,
}

impl Writes {
    /// How many writes that are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slices.len() + self.surplus.len() + self.classes.len()
    }
}

/// What to write so that the API shows it. Nothing if it does already.
#[must_use]
pub fn writes(shown: &Shown, slices: &[ResourceSlice], classes: &[DeviceClass]) -> Writes {
    let mut writes = write_slices(&shown.devices, slices);
    for (name, spec) in &shown.classes {
        let found = classes.iter().find(|class| class.metadata.name.as_ref() == Some(name));
        // One of that name which somebody else made is theirs, whatever it says.
        if found.is_some_and(|found| !is_ours(&found.metadata) || found.spec == *spec) {
            continue;
        }
        let class = DeviceClass { metadata: metadata(name), spec: spec.clone() };
        writes.classes.push(Write::apply(&class, names::CONTROLLER_MANAGER));
    }
    for class in classes.iter().filter(|class| is_ours(&class.metadata)) {
        let (Some(name), Some(uid)) = (&class.metadata.name, &class.metadata.uid) else { continue };
        if !shown.classes.contains_key(name) {
            let delete = Write::delete_uid::<DeviceClass>(Key::cluster(name.as_str()), uid.as_str());
            writes.classes.push(delete);
        }
    }
    writes
}

/// The classes of others that have names of classes which should be shown: those are not.
#[must_use]
pub fn taken<'c>(shown: &Shown, classes: &'c [DeviceClass]) -> Vec<&'c DeviceClass> {
    let in_the_way = |class: &&DeviceClass| {
        !is_ours(&class.metadata)
            && class.metadata.name.as_ref().is_some_and(|name| shown.classes.contains_key(name))
    };
    classes.iter().filter(in_the_way).collect()
}

/// What of all slices is the controller's.
#[must_use]
pub fn own_slices(mut slices: Vec<ResourceSlice>) -> Vec<ResourceSlice> {
    slices.retain(|slice| is_ours(&slice.metadata));
    slices
}

/// Slices of the pool: all of them say one generation and their number, or the scheduler goes by none.
fn write_slices(devices: &[Device], found: &[ResourceSlice]) -> Writes {
    let is_pool = |slice: &&ResourceSlice| {
        slice.spec.driver == names::DRIVER && slice.spec.pool.name == names::NETWORK_POOL
    };
    let found: Vec<&ResourceSlice> = found.iter().filter(is_pool).collect();
    let chunks: Vec<&[Device]> = devices.chunks(PER_SLICE).collect();
    let count = i64::try_from(chunks.len()).unwrap_or(i64::MAX);
    let wanted = |n: usize, generation: i64| ResourceSliceSpec {
        driver: names::DRIVER.to_owned(),
        pool: ResourcePool { name: names::NETWORK_POOL.to_owned(), generation, resource_slice_count: count },
        per_device_node_selection: Some(true),
        devices: Some(chunks[n].to_vec()),
        ..ResourceSliceSpec::default()
    };
    let newest = found.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or_default();
    let name = |n: usize| format!("{}-{n:05}", names::NETWORK_POOL);
    let right = |n: usize| {
        let there = found.iter().find(|slice| slice.metadata.name == Some(name(n)));
        there.is_some_and(|there| there.spec == wanted(n, newest))
    };
    let mut writes = Writes::default();
    if found.len() == chunks.len() && (0..chunks.len()).all(right) {
        return writes;
    }
    let apply = |name: &str, spec: ResourceSliceSpec| {
        Write::apply(&ResourceSlice { metadata: metadata(name), spec }, names::CONTROLLER_MANAGER)
    };
    for n in 0..chunks.len() {
        let name = name(n);
        let before = found.iter().find(|slice| slice.metadata.name.as_ref() == Some(&name));
        let undo = match before {
            Some(before) => apply(&name, before.spec.clone()),
            None => Write::delete::<ResourceSlice>(Key::cluster(name.as_str())),
        };
        writes.slices.push(SliceWrite { write: apply(&name, wanted(n, newest + 1)), undo });
    }
    for slice in found {
        let (Some(there), Some(uid)) = (&slice.metadata.name, &slice.metadata.uid) else { continue };
        if !(0..chunks.len()).any(|n| name(n) == *there) {
            let delete = Write::delete_uid::<ResourceSlice>(Key::cluster(there.as_str()), uid.as_str());
            writes.surplus.push(delete);
        }
    }
    writes
}

/// What nodes have of a Network.
#[derive(Clone, Copy, Default)]
struct Cut {
    blocks: u128,
    /// Addresses in them.
    addresses: u128,
}

/// How many addresses pods can have of a pool in the family that has fewest, whoever asks. Each block keeps
/// one for a router, those that are still to be cut as well: the scheduler must not promise it to a claim.
fn addresses_for_pods(pool: &Pool, cut: Cut) -> Option<u128> {
    let subnets = pool.families().filter_map(|family| pool.subnet(family));
    let addresses = subnets.map(|subnet| subnet.unassigned(&[])).min()?;
    if !pool.has_router() {
        return Some(addresses);
    }
    let left = addresses.saturating_sub(cut.addresses);
    // No fewer than these: blocks may be smaller than the largest.
    let further = left / u128::from(Growth::default().largest_in(pool));
    Some(addresses.saturating_sub((cut.blocks + further).max(1)))
}

/// A Network as a device; none where claims cannot have it. The default one is every pod's anyway.
fn device(network: &Network, cut: Cut) -> Option<Device> {
    if network.is_default() || network.is_being_deleted() || network.refusal().is_some() {
        return None;
    }
    // One without a number is set up nowhere.
    network.id()?;
    let pool = network.pool().ok().flatten()?;
    let addresses = addresses_for_pods(pool, cut)?.min(MOST);
    if addresses == 0 {
        return None;
    }
    let one = || Quantity("1".to_owned());
    let capacity = DeviceCapacity {
        value: quantity(addresses),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(one()),
            // Each claim has one address of each family, whatever it writes.
            valid_range: Some(CapacityRequestPolicyRange { min: one(), max: Some(one()), step: None }),
            valid_values: None,
        }),
    };
    let text = |text: String| DeviceAttribute { string: Some(text), ..DeviceAttribute::default() };
    let yes = |yes: bool| DeviceAttribute { bool: Some(yes), ..DeviceAttribute::default() };
    let has = |family| yes(pool.subnet(family).is_some());
    let attributes = [
        (names::POD_NETWORK_ATTRIBUTE, text(network.name().to_owned())),
        (names::POD_NETWORK_KIND_ATTRIBUTE, text(names::POD_NETWORK_KIND.to_owned())),
        ("topology", text(network.topology().to_string())),
        ("ipv4", has(knit_api::Family::V4)),
        ("ipv6", has(knit_api::Family::V6)),
    ];
    // An empty term selects no node, where an empty selector of labels selects all.
    let nodes = Some(nodes_of(network)?).filter(|terms| !terms.is_empty()).map(one_term);
    Some(Device {
        name: names::device_of(network.name()),
        attributes: Some(attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
        capacity: Some(BTreeMap::from([(names::ADDRESSES_CAPACITY.to_owned(), capacity)])),
        allow_multiple_allocations: Some(true),
        // A claim is for a pod, and a pod is on one node: its agent alone writes the claim's status.
        binds_to_node: Some(true),
        all_nodes: nodes.is_none().then_some(true),
        node_selector: nodes,
        ..Device::default()
    })
}

/// A number as the API server writes it, so that what is read back is what was written.
fn quantity(mut number: u128) -> Quantity {
    let mut suffix = "";
    for next in ["k", "M", "G", "T", "P"] {
        if number == 0 || !number.is_multiple_of(1000) {
            break;
        }
        (number, suffix) = (number / 1000, next);
    }
    Quantity(format!("{number}{suffix}"))
}

/// The nodes that a Network is for, as far as one term can say it; none where that cannot be read: the API
/// server would refuse it with all that are in its slice.
fn nodes_of(network: &Network) -> Option<Vec<NodeSelectorRequirement>> {
    let spec = &network.object().spec;
    let parents = spec.underlay.as_ref().map(|underlay| &underlay.parents[..]).unwrap_or_default();
    let of_parents = || parents.iter().filter_map(|parent| parent.node_selector.as_ref());
    let mut all = spec.node_selector.iter().chain(of_parents());
    if !all.all(|selector| selector::read_for_nodes(selector).is_ok()) {
        return None;
    }
    let own = spec.node_selector.as_ref().map(node_selector).unwrap_or_default();
    let on_parents = match parents {
        [parent] => parent.node_selector.as_ref().map(node_selector).unwrap_or_default(),
        // A node may be any one's, and a term has no "or" but among the values of a label.
        _ if of_parents().count() == parents.len() => {
            one_label(&of_parents().map(node_selector).collect::<Vec<_>>()).into_iter().collect()
        }
        _ => Vec::new(),
    };
    Some(own.into_iter().chain(on_parents).collect())
}

/// What several selectors say together that each want some values of the same label.
fn one_label(selectors: &[Vec<NodeSelectorRequirement>]) -> Option<NodeSelectorRequirement> {
    let (key, mut values) = (&selectors.first()?.first()?.key, BTreeSet::new());
    for selector in selectors {
        let [only] = &selector[..] else { return None };
        if only.key != *key || only.operator != "In" {
            return None;
        }
        values.extend(only.values.iter().flatten().cloned());
    }
    let values = Some(values.into_iter().collect());
    Some(NodeSelectorRequirement { key: key.clone(), operator: "In".to_owned(), values })
}

/// A selector of labels in the words of those that select nodes.
fn node_selector(selector: &LabelSelector) -> Vec<NodeSelectorRequirement> {
    let labels = selector.match_labels.iter().flatten().map(|(key, value)| NodeSelectorRequirement {
        key: key.clone(),
        operator: "In".to_owned(),
        values: Some(vec![value.clone()]),
    });
    let expressions = selector.match_expressions.iter().flatten().map(|e| NodeSelectorRequirement {
        key: e.key.clone(),
        operator: e.operator.clone(),
        values: e.values.clone(),
    });
    labels.chain(expressions).collect()
}

fn one_term(requirements: Vec<NodeSelectorRequirement>) -> NodeSelector {
    let term = NodeSelectorTerm { match_expressions: Some(requirements), match_fields: None };
    NodeSelector { node_selector_terms: vec![term] }
}

fn class_of_all() -> DeviceClassSpec {
    DeviceClassSpec {
        selectors: Some(vec![cel(format!("device.driver == \"{}\"", names::DRIVER))]),
        ..Default::default()
    }
}

fn class_of(network: &str) -> DeviceClassSpec {
    let (domain, attribute) = names::POD_NETWORK_ATTRIBUTE.split_once('/').unwrap_or_default();
    let expression = format!(
        "device.driver == \"{}\" && device.attributes[\"{domain}\"].{attribute} == \"{network}\"",
        names::DRIVER
    );
    let parameters = json!({
        "apiVersion": format!("{}/{}", knit_api::GROUP, knit_api::VERSION),
        "kind": knit_api::attachment_config::KIND,
        "network": network,
    });
    let opaque =
        OpaqueDeviceConfiguration { driver: names::DRIVER.to_owned(), parameters: RawExtension(parameters) };
    DeviceClassSpec {
        selectors: Some(vec![cel(expression)]),
        config: Some(vec![DeviceClassConfiguration { opaque: Some(opaque) }]),
        extended_resource_name: Some(format!("{}{network}", names::EXTENDED_RESOURCE)),
    }
}

fn cel(expression: String) -> DeviceSelector {
    DeviceSelector { cel: Some(CELDeviceSelector { expression }) }
}

fn metadata(name: &str) -> ObjectMeta {
    let labels = BTreeMap::from([(names::MANAGED_BY_LABEL.to_owned(), names::MANAGED_BY.to_owned())]);
    ObjectMeta { name: Some(name.to_owned()), labels: Some(labels), ..ObjectMeta::default() }
}

fn is_ours(metadata: &ObjectMeta) -> bool {
    let label = metadata.labels.as_ref().and_then(|labels| labels.get(names::MANAGED_BY_LABEL));
    label.map(String::as_str) == Some(names::MANAGED_BY)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use knit_api::AddressBlockSpec;
    use knit_ipam::{BlockQuery, Family, Millis, NodeAllocator, NodeConfig, next_block};
    use knit_model::AddressBlock;
    use serde_json::Value;

    use super::*;
    use crate::cluster::BlockView;

    #[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
    fn network(name: &str, id: u32, cidr: &str, extra: Value) -> (String, Arc<Network>) {
        let mut object = json!({
            "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": name},
            "spec": {"topology": "Layer3", "subnets": [{"cidr": cidr}]}, "status": {"id": id},
        });
        let spec = object["spec"].as_object_mut().expect("a spec");
        spec.extend(extra.as_object().expect("an object").clone());
        if id == 0 {
            object.as_object_mut().expect("an object").remove("status");
        }
        let object: knit_api::Network = serde_json::from_value(object).expect("a Network");
        (name.to_owned(), Arc::new(object.into()))
    }

    fn cluster(networks: Vec<(String, Arc<Network>)>) -> Cluster {
        Cluster { networks: networks.into_iter().collect(), ..Cluster::default() }
    }

    /// The slices as an API server would have them then.
    fn applied(shown: &Shown, generation: i64) -> Vec<ResourceSlice> {
        let chunks: Vec<_> = shown.devices.chunks(PER_SLICE).collect();
        let count = i64::try_from(chunks.len()).expect("few");
        let slice = |(n, devices): (usize, &&[Device])| {
            let mut metadata = metadata(&format!("knit-networks-{n:05}"));
            metadata.uid = Some(format!("uid-{n}"));
            let pool = ResourcePool { name: "knit-networks".into(), generation, resource_slice_count: count };
            let spec = ResourceSliceSpec {
                driver: "knit.dev".into(),
                pool,
                per_device_node_selection: Some(true),
                devices: Some(devices.to_vec()),
                ..ResourceSliceSpec::default()
            };
            ResourceSlice { metadata, spec }
        };
        chunks.iter().enumerate().map(slice).collect()
    }

    #[test]
    fn a_network_is_one_device_for_many() {
        let nodes = json!({"nodeSelector": {"matchLabels": {"rack": "a"}}, "scheduling": "Addresses"});
        let shown = shown(&cluster(vec![
            network("default", 1, "10.1.0.0/16", json!({})),
            network("blue", 2, "10.2.0.0/24", json!({})),
            network("team.red", 3, "10.3.0.0/16", nodes),
            network("new", 0, "10.4.0.0/16", json!({"class": "knit"})),
        ]));
        let names: Vec<&str> = shown.devices.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names.len(), 2, "neither the default one nor one without a number: {names:?}");
        let blue = shown.devices.iter().find(|d| d.name == "blue").expect("blue");
        assert_eq!((blue.all_nodes, blue.allow_multiple_allocations), (Some(true), Some(true)));
        // Without network, broadcast and gateway, and one for each of the 15 blocks that it has room for.
        assert_eq!(blue.capacity.as_ref().expect("a capacity")["addresses"].value.0, "238");
        for device in &shown.devices {
            let attributes = device.attributes.as_ref().expect("attributes");
            assert!(attributes.contains_key(names::POD_NETWORK_ATTRIBUTE));
            assert!(attributes.contains_key(names::POD_NETWORK_KIND_ATTRIBUTE));
        }
        let red = shown.devices.iter().find(|d| d.name.starts_with("team-red-")).expect("red");
        assert!(red.all_nodes.is_none() && red.node_selector.is_some());
        let classes: Vec<&str> = shown.classes.keys().map(String::as_str).collect();
        assert_eq!(classes, ["knit", "knit-team.red"]);
        let extended = shown.classes["knit-team.red"].extended_resource_name.as_deref();
        assert_eq!(extended, Some("networks.knit.dev/team.red"));
    }

    /// Each of them keeps an address for a router; it was subtracted once for each node.
    #[test]
    fn claims_were_promised_the_router_addresses_of_a_nodes_further_blocks() {
        let (name, blue) = network("blue", 2, "10.2.0.0/24", json!({}));
        let pool = blue.pool().expect("read").expect("a pool");
        let mut node = NodeAllocator::new("n1", NodeConfig::default());
        node.set_network(pool.clone());
        let mut cluster = cluster(vec![(name, Arc::clone(&blue))]);
        let promised = |cluster: &Cluster| -> u64 {
            let devices = shown(cluster).devices;
            devices[0].capacity.as_ref().expect("a capacity")["addresses"].value.0.parse().expect("a number")
        };
        let first = promised(&cluster);
        let (mut existing, mut before) = (Vec::new(), first);
        loop {
            let query = BlockQuery {
                pool,
                node: "n1",
                existing: &existing,
                other_primaries: &[],
                avoid: &[],
                growth: Growth::default(),
            };
            let Ok(block) = next_block(&query) else { break };
            let now = promised(&cluster);
            assert!(now <= before, "a block makes it no more");
            before = now;
            let spec = AddressBlockSpec {
                network: "blue".into(),
                node: "n1".into(),
                ipv4: block.prefix(Family::V4).map(|prefix| prefix.to_string()),
                ipv6: None,
            };
            let view = BlockView {
                uid: String::new(),
                network: "blue".into(),
                node: "n1".into(),
                created: None,
                deleting: false,
                block: Some(AddressBlock::of(&spec).expect("a block")),
            };
            cluster.blocks.insert(format!("blue-{}", existing.len()), Arc::new(view));
            node.add_block(block.clone()).expect("added");
            existing.push(block);
        }
        assert!(existing.len() > 10, "{existing:?}");
        let free = node.counts("blue", Millis(0)).expect("counts").v4.expect("IPv4").free;
        assert_eq!(promised(&cluster), free, "what the node has for pods");
        assert!(first - free <= 2, "{first}: hardly more was promised when there was no block");
    }

    #[test]
    fn what_is_shown_already_is_not_written_again() {
        let networks = (0..130)
            .map(|n: u32| network(&format!("net-{n:03}"), n + 2, &format!("10.{}.0.0/16", n + 2), json!({})));
        let shown = shown(&cluster(networks.collect()));
        let (slices, mut classes) = (applied(&shown, 7), Vec::new());
        assert_eq!(slices.len(), 2);
        assert_eq!(writes(&shown, &slices, &classes).count(), 1, "the class");
        for (name, spec) in &shown.classes {
            classes.push(DeviceClass { metadata: metadata(name), spec: spec.clone() });
        }
        assert_eq!(writes(&shown, &slices, &classes), Writes::default());
        // One changes: all say the new generation.
        let mut fewer = shown.clone();
        fewer.devices.remove(0);
        let written = writes(&fewer, &slices, &classes);
        assert_eq!((written.slices.len(), written.count()), (2, 2), "{written:?}");
        let says =
            |write: &Write, generation: &str| format!("{write:?}").contains(&format!("Number({generation})"));
        assert!(written.slices.iter().all(|w| says(&w.write, "8") && says(&w.undo, "7")), "{written:?}");
        // Another driver's slices, and classes that an operator made, are left alone.
        let mut foreign = slices[0].clone();
        foreign.spec.driver = "gpu.example.com".into();
        let mine = DeviceClass {
            metadata: ObjectMeta { name: Some("mine".into()), ..Default::default() },
            ..Default::default()
        };
        let more: Vec<_> = slices.iter().cloned().chain([foreign]).collect();
        assert_eq!(writes(&shown, &more, &[classes[0].clone(), mine]), Writes::default());
        // None are left: the slices go.
        fewer.devices.truncate(2);
        let written = writes(&fewer, &slices, &classes);
        assert_eq!((written.slices.len(), written.surplus.len()), (1, 1), "{written:?}");
    }

    #[test]
    fn one_node_selector_kept_all_networks_from_the_scheduler() {
        let selecting = |selector: Value| json!({"nodeSelector": selector});
        let by = |requirement: Value| selecting(json!({"matchExpressions": [requirement]}));
        let shown = shown(&cluster(vec![
            network("blue", 2, "10.2.0.0/24", json!({})),
            network(
                "unknown",
                3,
                "10.3.0.0/24",
                by(json!({"key": "rack", "operator": "Is", "values": ["a"]})),
            ),
            network("without", 4, "10.4.0.0/24", by(json!({"key": "rack", "operator": "In"}))),
            network("key", 5, "10.5.0.0/24", selecting(json!({"matchLabels": {"a b": "c"}}))),
            network("value", 6, "10.6.0.0/24", selecting(json!({"matchLabels": {"rack": "a b"}}))),
            network("all", 7, "10.7.0.0/24", selecting(json!({}))),
            network("a", 8, "10.8.0.0/24", by(json!({"key": "example.com/rack", "operator": "Exists"}))),
        ]));
        let names: Vec<&str> = shown.devices.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["a", "all", "blue"], "those that the API server takes");
        let all = &shown.devices[1];
        assert_eq!((all.all_nodes, &all.node_selector), (Some(true), &None), "as agents read it");
        assert!(shown.devices[0].node_selector.is_some());
    }

    #[test]
    fn claims_of_an_underlay_network_were_scheduled_to_nodes_without_its_link() {
        let wants = |values: Value| json!({"key": "rack", "operator": "In", "values": values});
        let rack = |values: Value| json!({"matchExpressions": [wants(values)]});
        let left = json!({"matchLabels": {"rack": "left"}});
        let on = |n: u32, nodes: Value, parents: &[Value]| {
            let parents = parents.iter().enumerate().map(|(n, selector)| {
                let mut parent = json!({"name": format!("eth{n}")});
                if !selector.is_null() {
                    parent["nodeSelector"] = selector.clone();
                }
                parent
            });
            let mut spec =
                json!({"topology": "Underlay", "underlay": {"parents": parents.collect::<Vec<_>>()}});
            if !nodes.is_null() {
                spec["nodeSelector"] = nodes;
            }
            let (_, network) = network("office", n, "192.168.20.0/24", spec);
            let device = device(&network, Cut::default())?;
            let terms = device.node_selector.map(|selector| selector.node_selector_terms);
            assert_eq!(device.all_nodes.is_some(), terms.is_none());
            assert!(terms.as_ref().is_none_or(|terms| terms.len() == 1), "DRA takes no more than one");
            let requirements = terms.into_iter().flatten().flat_map(|term| term.match_expressions);
            let shown = requirements.flatten().map(|r| format!("{} {} {:?}", r.key, r.operator, r.values));
            Some(shown.collect::<Vec<_>>())
        };
        let is = |values: &[&str]| format!("rack In {:?}", Some(values));
        assert_eq!(on(2, Value::Null, &[Value::Null]), Some(vec![]), "each node has it");
        assert_eq!(on(2, Value::Null, std::slice::from_ref(&left)), Some(vec![is(&["left"])]));
        let zone = json!({"matchLabels": {"zone": "a"}});
        let both = Some(vec![format!("zone In {:?}", Some(["a"])), is(&["left"])]);
        assert_eq!(on(2, zone.clone(), std::slice::from_ref(&left)), both);
        let two = [left.clone(), rack(json!(["right", "middle"]))];
        assert_eq!(on(2, Value::Null, &two), Some(vec![is(&["left", "middle", "right"])]));
        assert_eq!(
            on(2, Value::Null, &[left.clone(), Value::Null]),
            Some(vec![]),
            "the last one is all others'"
        );
        assert_eq!(on(2, Value::Null, &[left, zone]), Some(vec![]), "one term cannot say it");
        assert_eq!(on(2, Value::Null, &[json!({"matchLabels": {"a b": "c"}})]), None, "it would be refused");
    }

    #[test]
    fn a_class_of_that_name_that_an_operator_made_was_overwritten() {
        let blue = json!({"scheduling": "Addresses"});
        let shown = shown(&cluster(vec![network("blue", 2, "10.2.0.0/24", blue)]));
        let theirs = |name: &str| DeviceClass {
            metadata: ObjectMeta { name: Some(name.into()), ..Default::default() },
            ..Default::default()
        };
        let classes = [theirs("knit-blue"), theirs("knit-other")];
        let written = writes(&shown, &[], &classes);
        assert!(!written.classes.iter().any(|write| write.to_string().contains("knit-blue")), "{written:?}");
        assert_eq!(written.count(), 2, "the slice and the class of all: {written:?}");
        let taken: Vec<_> =
            taken(&shown, &classes).iter().filter_map(|class| class.metadata.name.as_deref()).collect();
        assert_eq!(taken, ["knit-blue"], "one that is not needed is in nobody's way");
    }

    #[test]
    fn what_is_no_longer_shown_is_deleted_and_nothing_else_is() {
        let shown = shown(&cluster(vec![network("blue", 2, "10.2.0.0/24", json!({}))]));
        let mut slices = applied(&shown, 7);
        let mut theirs = slices[0].clone();
        theirs.metadata.labels = None;
        slices.push(theirs);
        let (name, spec) = shown.classes.first_key_value().expect("a class");
        let mut class = DeviceClass { metadata: metadata(name), spec: spec.clone() };
        class.metadata.uid = Some("u".into());
        let mut mine = class.clone();
        mine.metadata.labels = None;
        let own = own_slices(slices);
        assert_eq!(own.len(), 1);
        assert_eq!(writes(&Shown::default(), &own, &[class, mine]).count(), 2);
    }

    #[test]
    fn numbers_are_written_as_the_api_server_does() {
        for (number, text) in [(0, "0"), (253, "253"), (65_000, "65k"), (65_533, "65533"), (2_000_000, "2M")]
        {
            assert_eq!(quantity(number).0, text);
        }
    }
}
