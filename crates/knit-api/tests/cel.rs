//! The CEL rules of the CRDs, run as an API server runs them: each bad object is refused by the rule that is meant.

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
            "routes": [{ "destination": "192.0.2.0/24" }, { "destination": "198.51.100.0/24", "via": "10.77.0.5" }],
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

#[test]
fn what_is_left_out_is_closed_except_for_the_default_network() {
    let says = |name: &str, services: Value| {
        let spec = with_services(name, services).spec;
        (spec.serves_external_ips(name), spec.serves_node_addresses())
    };
    assert_eq!(says("blue", Value::Null), (false, false));
    assert_eq!(says("blue", json!({})), (false, false));
    assert_eq!(says("default", Value::Null), (true, false));
    assert_eq!(says("default", json!({ "externalIPs": "Deny" })), (false, false));
    assert_eq!(says("blue", json!({ "externalIPs": "Allow", "nodeAddresses": "Allow" })), (true, true));
}

#[test]
fn a_selector_that_nobody_can_read_is_refused() {
    let with = |selector: &Value| {
        let mut primary = subnets(&["10.77.0.0/16"]);
        primary["primaryFor"] = selector.clone();
        let mut allowed = subnets(&["10.77.0.0/16"]);
        allowed["allowedNamespaces"] = json!({ "from": "Selector", "selector": selector });
        [network("blue", primary), network("blue", allowed)]
    };
    let expression = |operator: &str, values: Option<Value>| {
        let mut expression = json!({ "key": "team", "operator": operator });
        if let Some(values) = values {
            expression["values"] = values;
        }
        json!({ "matchLabels": { "tier": "front" }, "matchExpressions": [expression] })
    };
    for (operator, values, words) in [
        ("Equals", Some(json!(["blue"])), "are In, NotIn, Exists and DoesNotExist"),
        ("In", None, "need values"),
        ("NotIn", Some(json!([])), "need values"),
        ("Exists", Some(json!(["blue"])), "take none"),
    ] {
        let selector = expression(operator, values);
        for object in with(&selector) {
            refused(validate_cel(&object), words);
        }
        let read = serde_json::from_value(selector).expect("a selector");
        assert!(
            knit_api::claims::read(&read).is_err(),
            "{operator}: the API server refuses what can be read"
        );
    }
    for (operator, values) in [
        ("In", Some(json!(["blue"]))),
        ("NotIn", Some(json!(["blue"]))),
        ("Exists", None),
        ("DoesNotExist", Some(json!([]))),
    ] {
        let selector = expression(operator, values);
        for object in with(&selector) {
            validate_cel(&object).expect("a good Network");
        }
        let read = serde_json::from_value(selector).expect("a selector");
        knit_api::claims::read(&read).expect("the API server allows what cannot be read");
    }
}

#[test]
fn bad_subnets_are_refused() {
    let check = |list: &[&str], words| refused(validate_cel(&network("blue", subnets(list))), words);
    check(&[], "at least one subnet");
    check(&["10.77.0.0"], "write an address range");
    check(&["10.77.0.1/16"], "bits set behind the prefix");
    check(&["10.77.0.0/30"], "too small");
    check(&["fd77::/126"], "too small");
    check(&["10.77.0.0/16", "10.78.0.0/16"], "one IPv4 subnet at most");
    check(&["fd77::/64", "fd78::/64"], "one IPv6 subnet at most");
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
    refused(validate_cel_update(&switched, &old), "topology of a Network cannot change");
    let mut other = old.clone();
    other.spec.class = "fast".into();
    refused(validate_cel_update(&other, &old), "class of a Network cannot change");
}

#[test]
fn namespaces_and_routes() {
    let with = |key: &str, value: Value| {
        let mut spec = subnets(&["10.77.0.0/16"]);
        spec[key] = value;
        network("blue", spec)
    };
    refused(validate_cel(&with("allowedNamespaces", json!({ "from": "Selector" }))), "needs one");
    refused(
        validate_cel(&with("allowedNamespaces", json!({ "from": "All", "selector": {} }))),
        "selector goes with",
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
        (vec!["10.77.0.9/24".into()], "plain addresses"),
        (vec!["10.77.0.9".into(), "10.77.0.10".into()], "one address per family"),
    ] {
        refused(validate_cel(&make(NetworkAttachmentSpec { addresses, ..good.clone() })), words);
    }
    refused(
        validate_cel(&make(NetworkAttachmentSpec { interface: Some("eth0".into()), ..good.clone() })),
        "taken in every pod",
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
    refused(validate_cel(&block(Some("fd77::10/124"), None)), "write an IPv4 range");
    refused(validate_cel(&block(None, Some("10.77.0.16/28"))), "write an IPv6 range");
    refused(validate_cel_update(&block(Some("10.77.0.32/28"), None), &good), "cannot change hands");

    let class = |runtime: &str| {
        NetworkClass::new("c", NetworkClassSpec { runtime: runtime.into(), parameters: None })
    };
    validate_cel(&class("knit.dev/linux")).expect("a good class");
    refused(
        validate_cel_update(&class("a.b/c"), &class("knit.dev/linux")),
        "runtime of a class cannot change",
    );
}
