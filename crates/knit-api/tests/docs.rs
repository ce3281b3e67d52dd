//! Every example of our kinds in docs/ is what the API server would take: known fields only, schema and CEL
//! rules.

use std::fs;
use std::path::Path;

use knit_api::{AddressBlock, Network, NetworkAttachment, NetworkClass, NodeNetwork};
use kube::CustomResourceExt;
use kube::core::cel::validate_cel;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

fn check<K: CustomResourceExt + DeserializeOwned + Serialize>(place: &str, value: &Value) {
    let object: K = serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{place}: {e}"));
    validate_cel(&object).unwrap_or_else(|e| panic!("{place}: {e}"));
    let back = serde_json::to_value(&object).expect("JSON");
    unknown_fields(place, "", value, &back);
}

/// A field that does not come back was not known.
fn unknown_fields(place: &str, path: &str, written: &Value, understood: &Value) {
    match (written, understood) {
        (Value::Object(written), Value::Object(understood)) => {
            for (key, value) in written {
                let path = format!("{path}.{key}");
                let back = understood.get(key).unwrap_or_else(|| panic!("{place}: unknown field {path}"));
                unknown_fields(place, &path, value, back);
            }
        }
        (Value::Array(written), Value::Array(understood)) => {
            for (index, (a, b)) in written.iter().zip(understood).enumerate() {
                unknown_fields(place, &format!("{path}[{index}]"), a, b);
            }
        }
        (a, b) => assert_eq!(a, b, "{place}: {path}"),
    }
}

/// A claim's parameters, which the API server does not look into.
fn check_claim(place: &str, spec: &Value) {
    let configs = spec["devices"]["config"].as_array().unwrap_or_else(|| panic!("{place}: no config"));
    for config in configs {
        let parameters = &config["opaque"]["parameters"];
        knit_api::AttachmentConfig::read(parameters).unwrap_or_else(|error| panic!("{place}: {error}"));
    }
}

#[test]
fn examples_in_the_documentation_are_valid() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut seen = 0;
    for entry in fs::read_dir(docs).expect("docs/") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "md") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a page");
        for (number, block) in text.split("```yaml\n").skip(1).enumerate() {
            let block = block.split("```").next().expect("an end");
            for document in block.split("\n---\n").filter(|d| d.contains("knit.dev/v1alpha1")) {
                let place = format!("{}, example {}", path.display(), number + 1);
                let value: Value =
                    serde_saphyr::from_str(document).unwrap_or_else(|e| panic!("{place}: {e}"));
                match value["kind"].as_str().expect("a kind") {
                    "Network" => check::<Network>(&place, &value),
                    "NetworkClass" => check::<NetworkClass>(&place, &value),
                    "NetworkAttachment" => check::<NetworkAttachment>(&place, &value),
                    "NodeNetwork" => check::<NodeNetwork>(&place, &value),
                    "AddressBlock" => check::<AddressBlock>(&place, &value),
                    "ResourceClaim" => check_claim(&place, &value["spec"]),
                    "ResourceClaimTemplate" => check_claim(&place, &value["spec"]["spec"]),
                    other => panic!("{place}: no such kind: {other}"),
                }
                seen += 1;
            }
        }
    }
    assert!(seen >= 6, "docs/ has only {seen} examples");
}
