//! The policy that refuses parameters of claims which no agent would accept, in a real API server: what it
//! refuses, with the words that say what to write, and what it leaves to others.
//!
//! It needs etcd, kube-apiserver and kubectl, as `cargo xtask kube build` leaves them in its cache, or in the
//! folder that `KNIT_KUBE_BIN` names; and `openssl`. Where they are not, it is skipped.

use std::path::{Path, PathBuf};

use knit_api::attachment_config::{FIELDS, NOT_SERVED};
use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_testbed::control_plane::{ControlPlane, START_TIMEOUT};
use serde_json::{Value, json};

const POLICY: &str = "knit-claim-parameters";

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/components/claims/policy.yaml")
}

/// Claims, templates and classes with these parameters.
fn objects(driver: &str, parameters: &Value) -> [Value; 3] {
    let config = json!([{"opaque": {"driver": driver, "parameters": parameters}}]);
    let requests = json!([{"name": "nic", "exactly": {"deviceClassName": "knit"}}]);
    let spec = json!({"devices": {"requests": requests, "config": config}});
    let object = |kind: &str, spec: Value| {
        let metadata = json!({"name": "it"});
        json!({"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec})
    };
    [
        object("ResourceClaim", spec.clone()),
        object("ResourceClaimTemplate", json!({"spec": spec})),
        object("DeviceClass", json!({"config": config})),
    ]
}

fn parameters(more: Value) -> Value {
    let mut all = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AttachmentConfig"});
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
    all
}

fn attempt(plane: &ControlPlane, object: &Value) -> Result<String, String> {
    plane.write("object.json", &object.to_string());
    plane.kubectl(&["create", "--dry-run=server", "-f", "object.json"])
}

#[test]
fn the_policy_knows_the_fields_that_agents_know() {
    let text = std::fs::read_to_string(file()).expect("a file");
    let policies = text.split("\n---\n").map(|text| serde_saphyr::from_str::<Value>(text).expect("YAML"));
    let mut named = policies.filter(|object| object["kind"] == "ValidatingAdmissionPolicy");
    let spec = named.find(|object| object["metadata"]["name"] == POLICY).expect("a policy")["spec"].take();
    let mut variables = spec["variables"].as_array().expect("variables").iter();
    let fields =
        variables.find(|variable| variable["name"] == "fields").expect("fields")["expression"].clone();
    let fields = fields.as_str().expect("text").trim_matches(['[', ']']);
    let fields: Vec<&str> = fields.split(", ").map(|field| field.trim_matches('\'')).collect();
    for field in FIELDS.iter().chain(&["apiVersion", "kind"]) {
        assert!(fields.contains(field), "{field} is served, and the policy refuses it");
    }
    let known = |field: &&&str| !["apiVersion", "kind"].contains(*field);
    for field in fields.iter().filter(known) {
        assert!(FIELDS.contains(field) || NOT_SERVED.contains(field), "no agent knows {field}");
    }
}

#[test]
fn parameters_that_no_agent_accepts_are_refused_when_they_are_written() {
    in_namespaces(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let plane = match ControlPlane::start(folder.path(), "RBAC") {
            Ok(plane) => plane,
            Err(why) => return skip(why),
        };
        plane.apply(&["-f", &file().display().to_string()]);
        let wrong = [
            (json!({"apiVersion": "dra.net/v1", "kind": "AttachmentConfig"}), "kind: AttachmentConfig"),
            (json!({}), "kind: AttachmentConfig"),
            (parameters(json!({"colour": "red"})), "\"colour\" is not a known or supported field"),
            (parameters(json!({"vrf": {"name": "v"}})), "write network, interface, addresses"),
            (parameters(json!({"interface": "eth0"})), "eth0 is the main interface"),
            (parameters(json!({"addresses": ["10.77.0.300"]})), "at most one IP address per family"),
            (parameters(json!({"addresses": ["10.0.0.1", "10.0.0.2", "fd00::1"]})), "at most one IP address"),
        ];
        eventually("the policy is in force", START_TIMEOUT, || {
            objects("knit.dev", &wrong[0].0).iter().all(|object| attempt(&plane, object).is_err())
        });
        for (wrong, says) in &wrong {
            for object in &objects("knit.dev", wrong) {
                let said = attempt(&plane, object).expect_err(says);
                assert!(said.contains(POLICY) && said.contains(says), "{object}: {said}");
            }
            // Other drivers' parameters are their own.
            for object in &objects("gpu.example.com", wrong) {
                attempt(&plane, object).unwrap_or_else(|error| panic!("{object}: {error}"));
            }
        }
        let right = parameters(json!({"network": "blue", "interface": "data0", "addresses": ["10.77.0.9",
            "fd77::9"], "mac": "02:00:00:00:00:07", "defaultRoute": true}));
        for right in [parameters(json!({})), right] {
            for object in &objects("knit.dev", &right) {
                attempt(&plane, object).unwrap_or_else(|error| panic!("{object}: {error}"));
            }
        }
        let mut plain = objects("knit.dev", &json!({}));
        plain[0]["spec"]["devices"]["config"] = Value::Null;
        plain[1]["spec"]["spec"]["devices"]["config"] = Value::Null;
        plain[2]["spec"] = json!({});
        for object in &plain {
            attempt(&plane, object).unwrap_or_else(|error| panic!("{object}: {error}"));
        }

        // One from before the policy can still be changed as its end needs it.
        let bind = ["delete", "validatingadmissionpolicybinding", POLICY];
        plane.kubectl(&bind).expect("deleted");
        let mut before = objects("knit.dev", &wrong[2].0)[0].clone();
        before["metadata"]["finalizers"] = json!(["example.com/stays"]);
        plane.write("before.json", &before.to_string());
        eventually("it is created", START_TIMEOUT, || {
            plane.kubectl(&["create", "-f", "before.json"]).is_ok()
        });
        plane.apply(&["-f", &file().display().to_string()]);
        eventually("the policy is in force again", START_TIMEOUT, || {
            objects("knit.dev", &wrong[0].0).iter().all(|object| attempt(&plane, object).is_err())
        });
        let patch = r#"{"metadata":{"finalizers":null}}"#;
        let args = ["patch", "resourceclaim", "it", "--type=merge", "-p", patch];
        plane.kubectl(&args).expect("its finalizer goes");
    });
}
