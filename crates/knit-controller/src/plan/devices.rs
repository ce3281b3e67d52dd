//! What the scheduler is shown of Networks: one device for each, which many claims can have at once, in a
//! pool of the whole cluster; and the DeviceClasses by which claims ask for them. Pure.
//!
//! What is shown changes with Networks and blocks, and never with a pod: how much of a device is taken, the
//! scheduler counts itself.

mod nodes;
mod writes;

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute,
    DeviceCapacity, DeviceClassConfiguration, DeviceClassSpec, DeviceSelector, OpaqueDeviceConfiguration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use knit_api::names;
use knit_ipam::{Growth, Pool};
use knit_model::Network;
use serde_json::json;

use crate::cluster::Cluster;
use nodes::{nodes_of, one_term};

pub use writes::{Writes, own_slices, taken, writes};

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
        (names::POD_NETWORK_ATTRIBUTE, text(network.name().to_string())),
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

#[cfg(test)]
mod tests;
