//! What is shown of Networks, and what is written for it.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{DeviceClass, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use knit_api::AddressBlockSpec;
use knit_ipam::{BlockQuery, Family, Millis, NodeAllocator, NodeConfig, next_block};
use knit_model::AddressBlock;
use knit_objects::Write;
use knit_types::NetworkName;
use serde_json::Value;

use super::writes::{PER_SLICE, metadata};
use super::*;
use crate::cluster::BlockView;

#[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
fn network(name: &str, id: u32, cidr: &str, extra: Value) -> (NetworkName, Arc<Network>) {
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
    (name.parse().expect("a name"), Arc::new(object.try_into().expect("a name")))
}

fn cluster(networks: Vec<(NetworkName, Arc<Network>)>) -> Cluster {
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
            resource_version: String::new(),
            reclaim: None,
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
        network("unknown", 3, "10.3.0.0/24", by(json!({"key": "rack", "operator": "Is", "values": ["a"]}))),
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
        let mut spec = json!({"topology": "Underlay", "underlay": {"parents": parents.collect::<Vec<_>>()}});
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
    assert_eq!(on(2, Value::Null, &[left.clone(), Value::Null]), Some(vec![]), "the last one is all others'");
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
    for (number, text) in [(0, "0"), (253, "253"), (65_000, "65k"), (65_533, "65533"), (2_000_000, "2M")] {
        assert_eq!(quantity(number).0, text);
    }
}
