//! The API server refuses what cannot be read, and nothing else: the CEL rules of the CRDs against this
//! crate.

use knit_api::Network;
use kube::core::cel::{ValidationErrors, validate_cel};
use serde_json::{Value, json};

fn network(name: &str, spec: &Value) -> Network {
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

fn subnets() -> Value {
    json!({ "topology": "Layer3", "subnets": [{ "cidr": "10.77.0.0/16" }] })
}

#[test]
fn a_selector_that_nobody_can_read_is_refused() {
    let with = |selector: &Value| {
        let mut primary = subnets();
        primary["primaryFor"] = selector.clone();
        let mut allowed = subnets();
        allowed["allowedNamespaces"] = json!({ "from": "Selector", "selector": selector });
        [network("blue", &primary), network("blue", &allowed)]
    };
    let expression = |operator: &str, values: Option<Value>| {
        let mut expression = json!({ "key": "team", "operator": operator });
        if let Some(values) = values {
            expression["values"] = values;
        }
        json!({ "matchLabels": { "tier": "front" }, "matchExpressions": [expression] })
    };
    for (operator, values, words) in [
        ("Equals", Some(json!(["blue"])), "must be In, NotIn, Exists or DoesNotExist"),
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
            knit_model::selector::read(&read).is_err(),
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
        knit_model::selector::read(&read).expect("the API server allows what cannot be read");
    }
}
