//! The policy by which pods ask for the addresses that the scheduler counts, in a real API server: which pods
//! it changes, and that it changes nothing else of them.
//!
//! It needs etcd, kube-apiserver and kubectl, as `cargo xtask kube build` leaves them in its cache, or in the
//! folder that `KNIT_KUBE_BIN` names; and `openssl`. Where they are not, it is skipped.

use std::path::Path;

use knit_kernel::testing::{eventually, in_namespaces, skip};
use knit_testbed::control_plane::{ControlPlane, START_TIMEOUT};
use serde_json::{Value, json};

const ACCEPTED: &str = "True";

/// Networks, with what the controller says of them.
fn networks() -> Vec<(&'static str, Value, &'static str)> {
    let all = json!({"from": "All"});
    let tiers = json!([{"key": "tier", "operator": "In", "values": ["front", "edge"]}]);
    let not_old = json!([
        {"key": "old", "operator": "DoesNotExist"},
        {"key": "tier", "operator": "Exists"},
        {"key": "tier", "operator": "NotIn", "values": ["edge"]},
    ]);
    let selected =
        |expressions: Value| json!({"from": "Selector", "selector": {"matchExpressions": expressions}});
    vec![
        ("blue", json!({"scheduling": "Addresses", "allowedNamespaces": all}), ACCEPTED),
        ("team.blue", json!({"scheduling": "Addresses", "allowedNamespaces": all}), ACCEPTED),
        ("front", json!({"scheduling": "Addresses", "allowedNamespaces": selected(tiers)}), ACCEPTED),
        ("fresh", json!({"scheduling": "Addresses", "allowedNamespaces": selected(not_old)}), ACCEPTED),
        ("red", json!({"scheduling": "Addresses", "primaryFor": {"matchLabels": {"team": "red"}}}), ACCEPTED),
        ("closed", json!({"scheduling": "Addresses"}), ACCEPTED),
        ("uncounted", json!({"allowedNamespaces": all}), ACCEPTED),
        ("refused", json!({"scheduling": "Addresses", "allowedNamespaces": all}), "False"),
    ]
}

const NAMESPACES: [(&str, &[(&str, &str)]); 5] = [
    ("shop", &[]),
    ("front", &[("tier", "front")]),
    ("edge", &[("tier", "edge")]),
    ("old", &[("tier", "front"), ("old", "yes")]),
    ("reds", &[("team", "red")]),
];

/// A namespace, what the pod's annotations say, and the Networks whose addresses it asks for then.
type Case = (&'static str, Vec<(&'static str, &'static str)>, &'static [&'static str]);

fn cases() -> Vec<Case> {
    let asks = |text: &'static str| vec![("knit.dev/networks", text)];
    let main = |text: &'static str| vec![("knit.dev/primary", text)];
    vec![
        ("shop", asks("blue"), &["blue"]),
        ("shop", asks("blue@data0"), &["blue"]),
        ("shop", asks(" uncounted , blue "), &["blue"]),
        ("shop", asks("team.blue"), &["team.blue"]),
        ("shop", asks("blue,team.blue"), &["blue", "team.blue"]),
        (
            "shop",
            asks("[ {\"name\" :\n\"blue\", \"interface\": \"x\"}, {\"name\":\"team.blue\"}]"),
            &["blue", "team.blue"],
        ),
        ("shop", asks(r#"[{"name":"uncounted","interface":"blue"}]"#), &[]),
        ("shop", asks(r#"[{"name":"teamxblue"}]"#), &[]),
        ("shop", asks("bluer"), &[]),
        ("shop", asks("teamxblue"), &[]),
        ("shop", asks(""), &[]),
        ("shop", vec![], &[]),
        ("shop", asks("uncounted"), &[]),
        ("shop", asks("refused"), &[]),
        // Those that may not have the Network are refused by the agent, and by nobody before.
        ("shop", asks("closed"), &[]),
        ("shop", asks("front"), &[]),
        ("shop", main("red"), &[]),
        ("front", asks("front,fresh"), &["fresh", "front"]),
        ("edge", asks("front,fresh"), &["front"]),
        ("old", asks("front,fresh"), &["front"]),
        ("reds", vec![], &["red"]),
        ("reds", asks("blue"), &["blue", "red"]),
        ("reds", main("red"), &["red"]),
        ("reds", main("default"), &[]),
        ("kube-system", asks("blue"), &[]),
        ("knit-system", asks("blue"), &[]),
    ]
}

fn pod(name: &str, namespace: &str, annotations: &[(&str, &str)]) -> Value {
    let annotations: serde_json::Map<String, Value> =
        annotations.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
        "spec": {"containers": [
            {"name": "main", "image": "a",
                "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "500m"}}},
            {"name": "side", "image": "b"},
        ]},
    })
}

/// What the API server makes of pods, without keeping them.
fn admitted(plane: &ControlPlane, pods: &[Value]) -> Result<Vec<Value>, String> {
    plane.write("pods.json", &json!({"apiVersion": "v1", "kind": "List", "items": pods}).to_string());
    let said = plane.kubectl(&["create", "--dry-run=server", "-f", "pods.json", "-o", "json"])?;
    // One document for each.
    let documents = serde_json::Deserializer::from_str(&said).into_iter::<Value>();
    documents.collect::<Result<_, _>>().map_err(|error| error.to_string())
}

/// The Networks whose addresses a container asks for, with how many of each are requested and its limit.
fn asked(container: &Value) -> Vec<(String, Value, Value)> {
    let resources = &container["resources"];
    let of = |list: &str| resources[list].as_object().cloned().unwrap_or_default();
    let names =
        of("limits").into_iter().map(|(name, _)| name).chain(of("requests").into_iter().map(|(n, _)| n));
    let names: std::collections::BTreeSet<String> = names.collect();
    let network = |name: String| {
        let network = name.strip_prefix("networks.knit.dev/")?.to_owned();
        Some((network, resources["requests"][&name].clone(), resources["limits"][&name].clone()))
    };
    names.into_iter().filter_map(network).collect()
}

fn serve(folder: &Path) -> Result<ControlPlane, String> {
    let plane = ControlPlane::start(folder, "RBAC")?;
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let path = |name: &str| deploy.join(name).display().to_string();
    plane.apply(&["-k", &path("crds")]);
    plane.apply(&["-f", &path("base/common/namespace.yaml")]);
    let policy = std::fs::read_to_string(path("components/scheduling/policy.yaml")).expect("a file");
    // A pod that the policy cannot be evaluated for is let through, so an error in it would go unseen here.
    let strict = policy.replacen("failurePolicy: Ignore\n", "failurePolicy: Fail\n", 1);
    assert_ne!(strict, policy, "errors of the policy never keep a pod from being created");
    plane.write("policy.yaml", &strict);
    let namespace = |(name, labels): &(&str, &[(&str, &str)])| {
        let labels: serde_json::Map<String, Value> =
            labels.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    };
    let mut objects: Vec<Value> = NAMESPACES.iter().map(namespace).collect();
    for (n, (name, mut spec, _)) in networks().into_iter().enumerate() {
        spec["topology"] = json!("Layer3");
        spec["subnets"] = json!([{"cidr": format!("10.{}.0.0/24", 70 + n)}]);
        let metadata = json!({"name": name});
        objects.push(
            json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": metadata, "spec": spec}),
        );
    }
    plane.write("objects.json", &json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string());
    plane.apply(&["-f", "objects.json"]);
    for (n, (name, _, accepted)) in networks().into_iter().enumerate() {
        let condition = json!({"type": "Accepted", "status": accepted, "reason": "R", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let status = json!({"status": {"id": n + 1, "conditions": [condition]}}).to_string();
        let args = ["patch", "network", name, "--subresource=status", "--type=merge", "-p", &status];
        plane.kubectl(&args).expect("a status");
    }
    plane.apply(&["-f", "policy.yaml"]);
    Ok(plane)
}

#[test]
fn plain_pods_ask_for_the_addresses_that_are_counted() {
    in_namespaces(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let plane = match serve(folder.path()) {
            Ok(plane) => plane,
            Err(why) => return skip(why),
        };
        // Policies, Networks and namespaces reach admission a moment after they are written.
        let cases = cases();
        let all: Vec<Value> = cases
            .iter()
            .enumerate()
            .map(|(n, (namespace, annotations, _))| pod(&format!("pod-{n}"), namespace, annotations))
            .collect();
        let mut made = Vec::new();
        eventually("every pod asks for what is counted", START_TIMEOUT, || {
            let Ok(pods) = admitted(&plane, &all).inspect_err(|error| println!("{error}")) else {
                return false;
            };
            made = pods;
            let right = |(pod, (namespace, annotations, networks)): (&Value, &Case)| {
                let found = asked(&pod["spec"]["containers"][0]);
                let names: Vec<&str> = found.iter().map(|(name, ..)| name.as_str()).collect();
                if names != *networks {
                    println!("{namespace} {annotations:?}: {names:?}, not {networks:?}");
                }
                names == *networks
            };
            made.len() == all.len() && made.iter().zip(&cases).filter(|both| !right(*both)).count() == 0
        });
        for made in &made {
            let [main, side] = &made["spec"]["containers"].as_array().expect("containers")[..] else {
                panic!("{made}")
            };
            assert!(
                asked(main).iter().all(|(_, requests, limits)| requests == "1" && limits == "1"),
                "{main}"
            );
            assert_eq!(main["resources"]["limits"]["cpu"], "1", "{main}");
            assert_eq!(main["resources"]["requests"]["cpu"], "500m", "{main}");
            assert_eq!(asked(side), [], "{side}");
            assert_eq!(made["spec"]["resourceClaims"], Value::Null);
        }

        // Pods that the scheduler never sees, that have no network of their own, or that ask themselves.
        let blue = || pod("special", "shop", &[("knit.dev/networks", "blue")]);
        let (mut bound, mut host, mut asks, mut begins) = (blue(), blue(), blue(), blue());
        bound["spec"]["nodeName"] = json!("n1");
        host["spec"]["hostNetwork"] = json!(true);
        let one = json!({"limits": {"networks.knit.dev/blue": "1"}});
        asks["spec"]["containers"][1]["resources"] = one.clone();
        begins["spec"]["initContainers"] = json!([{"name": "first", "image": "c", "resources": one}]);
        for (what, pod) in [("bound", bound), ("host", host), ("asks", asks), ("begins", begins)] {
            let made = admitted(&plane, std::slice::from_ref(&pod)).expect(what);
            assert_eq!(asked(&made[0]["spec"]["containers"][0]), [], "{what}: {made:?}");
        }
    });
}
