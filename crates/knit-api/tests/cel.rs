//! The CEL rules of the CRDs, run as an API server runs them: each bad object is refused by the rule that is
//! meant.

#![allow(clippy::needless_pass_by_value, reason = "json! literals read better by value")]

use knit_api::{
    AddressBlock, AddressBlockSpec, Network, NetworkAttachment, NetworkAttachmentSpec, NetworkClass,
    NetworkClassSpec,
};
use kube::core::cel::{ValidationErrors, validate_cel, validate_cel_update};
use serde_json::{Value, json};

fn network(name: &str, spec: Value) -> Network {
    serde_json::from_value(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": { "name": name }, "spec": spec,
    }))
    .expect("a Network")
}

fn refused(result: Result<(), ValidationErrors>, words: &str) {
    let errors = result.expect_err("the object must be refused");
    let text = errors.to_string();
    assert!(text.contains(words), "refused, but not for «{words}»: {text}");
}

fn subnets(list: &[&str]) -> Value {
    json!({ "topology": "Layer3", "subnets": list.iter().map(|c| json!({ "cidr": c })).collect::<Vec<_>>() })
}

#[test]
fn good_networks_pass() {
    for spec in [
        subnets(&["10.77.0.0/16"]),
        subnets(&["10.77.0.0/16", "fd77::/64"]),
        json!({
            "topology": "Layer2", "mtu": 1400, "primaryFor": { "matchLabels": { "tenant": "a" } },
            "subnets": [{ "cidr": "10.77.0.0/24", "gateway": "10.77.0.254", "reserved": ["10.77.0.0/28"] }],
            "routes": [
                { "destination": "192.0.2.0/24" },
                { "destination": "198.51.100.0/24", "via": "10.77.0.5" },
            ],
            "allowedNamespaces": { "from": "Selector", "selector": { "matchLabels": { "a": "b" } } },
        }),
    ] {
        validate_cel(&network("blue", spec)).expect("a good Network");
    }
    validate_cel(&network("default", json!({ "topology": "Layer3" }))).expect("default may take podCIDRs");
}

fn with_services(name: &str, services: Value) -> Network {
    let mut spec = subnets(&["10.77.0.0/16"]);
    spec["services"] = services;
    network(name, spec)
}

#[test]
fn what_services_may_take() {
    for services in [json!({}), json!({ "externalIPs": "Allow", "nodeAddresses": "Deny" })] {
        validate_cel(&with_services("blue", services)).expect("a good Network");
    }
    validate_cel(&with_services("default", json!({ "externalIPs": "Deny" }))).expect("a good Network");
    let default = with_services("default", json!({ "nodeAddresses": "Allow" }));
    refused(validate_cel(&default), "leave services.nodeAddresses out");
}

fn underlay(change: impl FnOnce(&mut Value)) -> Network {
    let mut spec = json!({
        "topology": "Underlay",
        "underlay": { "parents": [
            { "name": "bond0.20", "nodeSelector": { "matchLabels": { "rack": "left" } } },
            { "name": "eth1", "nodeSelector": { "matchExpressions": [
                { "key": "rack", "operator": "In", "values": ["right", "middle"] },
            ] } },
        ] },
        "subnets": [{ "cidr": "192.168.20.0/24", "reserved": ["192.168.20.0/27"] }],
    });
    change(&mut spec);
    network("office", spec)
}

#[test]
fn an_underlay_network_has_parents_and_is_never_primary() {
    let office = underlay(|_| {});
    validate_cel(&office).expect("a good Network");
    assert_eq!(office.spec.underlay.as_ref().expect("underlay").mode.as_str(), "Bridge", "the default");
    let without = |spec: &mut Value| _ = spec.as_object_mut().expect("an object").remove("underlay");
    refused(validate_cel(&underlay(without)), "go together");
    refused(validate_cel(&underlay(|spec| spec["topology"] = json!("Layer2"))), "go together");
    refused(validate_cel(&underlay(|spec| spec["primaryFor"] = json!({}))), "leave primaryFor out");
    for (key, value) in
        [("outside", json!("Masquerade")), ("services", json!({})), ("clusterServices", json!([]))]
    {
        refused(validate_cel(&underlay(|spec| spec[key] = value)), "about a router");
    }
    let mut default = underlay(|_| {});
    default.metadata.name = Some("default".into());
    refused(validate_cel(&default), "default cannot be Underlay");
    let mut routed = underlay(|_| {});
    (routed.spec.topology, routed.spec.underlay) = (knit_api::Topology::Layer3, None);
    refused(validate_cel_update(&office, &routed), "topology of a Network cannot be changed");
    serde_json::from_value::<knit_api::Underlay>(json!({ "parents": [], "mode": "Passthru" }))
        .expect_err("one pod would have the whole link");
}

#[test]
fn an_underlay_network_on_a_bridge_stays_on_it_and_reflects_nothing() {
    let on = |kind: &'static str, mode: &'static str| {
        underlay(|spec| (spec["underlay"]["kind"], spec["underlay"]["mode"]) = (json!(kind), json!(mode)))
    };
    for (kind, mode) in
        [("Macvlan", "Vepa"), ("Macvlan", "Bridge"), ("Bridge", "Bridge"), ("Bridge", "Private")]
    {
        validate_cel(&on(kind, mode)).expect("a good Network");
    }
    refused(validate_cel(&on("Bridge", "Vepa")), "mode Vepa is for kind Macvlan");
    let office = underlay(|_| {});
    assert_eq!(office.spec.underlay.as_ref().expect("underlay").kind.as_str(), "Macvlan", "the default");
    refused(validate_cel_update(&office, &on("Bridge", "Bridge")), "the kind of an Underlay Network");
    validate_cel_update(&office, &on("Macvlan", "Private")).expect("the mode can change");
}

#[test]
fn bad_subnets_are_refused() {
    let check = |list: &[&str], words| refused(validate_cel(&network("blue", subnets(list))), words);
    check(&[], "at least one subnet");
    check(&["10.77.0.0"], "must be a CIDR");
    check(&["10.77.0.1/16"], "host bits set");
    check(&["10.77.0.0/30"], "too small");
    check(&["fd77::/126"], "too small");
    check(&["10.77.0.0/16", "10.78.0.0/16"], "at most one IPv4 subnet");
    check(&["fd77::/64", "fd78::/64"], "at most one IPv6 subnet");
}

#[test]
fn gateway_and_reserved_lie_inside() {
    let one = |subnet: Value| network("blue", json!({ "topology": "Layer3", "subnets": [subnet] }));
    refused(validate_cel(&one(json!({ "cidr": "10.7.0.0/24", "gateway": "10.8.0.1" }))), "gateway must be");
    refused(validate_cel(&one(json!({ "cidr": "10.7.0.0/24", "gateway": "x" }))), "gateway must be");
    refused(
        validate_cel(&one(json!({ "cidr": "10.7.0.0/24", "reserved": ["10.8.0.0/28"] }))),
        "reserved range",
    );
}

#[test]
fn what_pods_stand_on_cannot_change() {
    let old = network("blue", subnets(&["10.77.0.0/16"]));
    validate_cel_update(&network("blue", subnets(&["10.77.0.0/16", "fd77::/64"])), &old)
        .expect("a family more");
    refused(
        validate_cel_update(&network("blue", subnets(&["10.78.0.0/16"])), &old),
        "cannot be changed or removed",
    );
    let switched = network("blue", json!({ "topology": "Layer2", "subnets": [{ "cidr": "10.77.0.0/16" }] }));
    refused(validate_cel_update(&switched, &old), "topology of a Network cannot be changed");
    let mut other = old.clone();
    other.spec.class = "fast".into();
    refused(validate_cel_update(&other, &old), "class of a Network cannot be changed");
}

#[test]
fn namespaces_and_routes() {
    let with = |key: &str, value: Value| {
        let mut spec = subnets(&["10.77.0.0/16"]);
        spec[key] = value;
        network("blue", spec)
    };
    refused(validate_cel(&with("allowedNamespaces", json!({ "from": "Selector" }))), "requires a selector");
    refused(
        validate_cel(&with("allowedNamespaces", json!({ "from": "All", "selector": {} }))),
        "selector requires",
    );
    refused(validate_cel(&with("routes", json!([{ "destination": "192.0.2.0" }]))), "destination must be");
    refused(
        validate_cel(&with("routes", json!([{ "destination": "192.0.2.0/24", "via": "no" }]))),
        "via must be",
    );
    let long = network(&"n".repeat(64), subnets(&["10.77.0.0/16"]));
    refused(validate_cel(&long), "at most 63 characters");
}

#[test]
fn attachments() {
    let make = |spec: NetworkAttachmentSpec| NetworkAttachment::new("a", spec);
    let good = NetworkAttachmentSpec {
        pod: "p".into(),
        network: "blue".into(),
        interface: Some("net1".into()),
        addresses: vec!["10.77.0.9".into(), "fd77::9".into()],
        mac: Some("02:00:00:00:00:01".into()),
    };
    validate_cel(&make(good.clone())).expect("a good attachment");
    for (addresses, words) in [
        (vec!["10.77.0.9/24".into()], "IP addresses without a prefix"),
        (vec!["10.77.0.9".into(), "10.77.0.10".into()], "one address per family"),
    ] {
        refused(validate_cel(&make(NetworkAttachmentSpec { addresses, ..good.clone() })), words);
    }
    refused(
        validate_cel(&make(NetworkAttachmentSpec { interface: Some("eth0".into()), ..good.clone() })),
        "already used in every pod",
    );
    let moved = make(NetworkAttachmentSpec { network: "red".into(), ..good.clone() });
    refused(validate_cel_update(&moved, &make(good)), "cannot be changed in place");
}

#[test]
fn blocks_and_classes() {
    let block = |ipv4: Option<&str>, ipv6: Option<&str>| {
        AddressBlock::new(
            "b",
            AddressBlockSpec {
                network: "blue".into(),
                node: "n1".into(),
                ipv4: ipv4.map(Into::into),
                ipv6: ipv6.map(Into::into),
            },
        )
    };
    let good = block(Some("10.77.0.16/28"), Some("fd77::10/124"));
    validate_cel(&good).expect("a good block");
    refused(validate_cel(&block(None, None)), "needs ipv4, ipv6 or both");
    refused(validate_cel(&block(Some("fd77::10/124"), None)), "must be an IPv4 CIDR");
    refused(validate_cel(&block(None, Some("10.77.0.16/28"))), "must be an IPv6 CIDR");
    refused(
        validate_cel_update(&block(Some("10.77.0.32/28"), None), &good),
        "an AddressBlock cannot be \
    changed",
    );

    let class = |runtime: &str| {
        NetworkClass::new("c", NetworkClassSpec { runtime: runtime.into(), parameters: None })
    };
    validate_cel(&class("knit.dev/linux")).expect("a good class");
    refused(
        validate_cel_update(&class("a.b/c"), &class("knit.dev/linux")),
        "runtime of a class cannot be changed",
    );
}

/// It is shown to the scheduler with those of other Networks: one that the API server refuses there would
/// keep all of them back.
#[test]
fn a_node_selector_is_checked_like_those_of_namespaces() {
    let by = |requirement: Value| {
        let mut spec = subnets(&["10.77.0.0/16"]);
        spec["nodeSelector"] = json!({ "matchLabels": { "a": "b" }, "matchExpressions": [requirement] });
        network("blue", spec)
    };
    validate_cel(&by(json!({ "key": "rack", "operator": "In", "values": ["a"] }))).expect("a good Network");
    validate_cel(&by(json!({ "key": "rack", "operator": "Exists" }))).expect("a good Network");
    refused(validate_cel(&by(json!({ "key": "rack", "operator": "Is" }))), "operator of a selector");
    refused(validate_cel(&by(json!({ "key": "rack", "operator": "In" }))), "need values");
    let exists = json!({ "key": "rack", "operator": "Exists", "values": ["a"] });
    refused(validate_cel(&by(exists)), "need values");
}
