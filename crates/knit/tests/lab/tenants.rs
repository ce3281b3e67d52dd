//! The example deploy/examples/two-tenants, as far as a lab has what it needs.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::Lab;

/// Namespace, node port of policy Cluster, node port of policy Local.
const TENANTS: [(&str, u16, u16); 2] = [("red", 30180, 30182), ("blue", 30280, 30282)];

/// The example's objects. A lab has no images: each replica is a pod of its own here, with the lab's
/// own server.
fn manifests() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/examples/two-tenants");
    let mut all = vec![json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "client"},
        "spec": {"nodeName": "node-1", "containers": [{"name": "main", "image": "knit-lab"}]}})];
    for file in ["networks.yaml", "red.yaml", "blue.yaml"] {
        let text = std::fs::read_to_string(folder.join(file)).expect("the example");
        for document in text.split("\n---\n") {
            let object: Value = serde_saphyr::from_str(document).expect("an object");
            if object["kind"] != "Deployment" {
                all.push(object);
                continue;
            }
            for number in 1..=object["spec"]["replicas"].as_u64().expect("replicas") {
                let mut pod = object["spec"]["template"].clone();
                pod["apiVersion"] = json!("v1");
                pod["kind"] = json!("Pod");
                pod["metadata"]["name"] = json!(format!("web-{number}"));
                pod["metadata"]["namespace"] = object["metadata"]["namespace"].clone();
                pod["spec"]["nodeName"] = json!(format!("node-{number}"));
                let containers = pod["spec"]["containers"].as_array_mut().expect("containers");
                for container in containers.iter_mut().filter_map(Value::as_object_mut) {
                    container.remove("args");
                }
                all.push(pod);
            }
        }
    }
    all.iter().map(|object| format!("---\n{object}\n")).collect()
}

/// Who answers there, over some tries.
fn answers(lab: &Lab, pod: &str, to: &str) -> BTreeSet<String> {
    let name = |heard: String| heard.split(' ').next().unwrap_or_default().to_owned();
    (0..12).filter_map(|_| lab.ask(pod, to).map(name)).collect()
}

#[test]
fn unchanged_manifests_work_in_primary_networks_and_nothing_crosses() {
    let Some(lab) = Lab::up(&manifests(), &[]) else { return };
    let status = lab.status();
    let nodes = status["nodes"].as_array().expect("nodes");
    let nodes: Vec<&str> = nodes.iter().filter_map(|node| node["addresses"][0].as_str()).collect();
    assert_eq!(nodes.len(), 2, "{status}");
    for (tenant, everywhere, here) in TENANTS {
        let both = BTreeSet::from([1, 2].map(|number| format!("{tenant}/web-{number}")));
        let balanced = |pod: &str, to: &str| {
            lab.eventually(&format!("{pod} to {to}"), || (answers(&lab, pod, to) == both).then_some(()));
        };
        // The Service, from both pods: each comes back to itself, too.
        let service = format!("{}:80", lab.service(tenant, "web"));
        for number in [1, 2] {
            balanced(&format!("{tenant}/web-{number}"), &service);
        }
        // Node ports, from a pod of the default Network: to both nodes, wherever the endpoint is.
        for node in &nodes {
            for port in [everywhere, here] {
                balanced("default/client", &format!("{node}:{port}"));
            }
        }
        // The pods themselves and their Service are the tenant's alone.
        let other = if tenant == "red" { "blue" } else { "red" };
        for pod in ["default/client".to_owned(), format!("{other}/web-1")] {
            assert_eq!(lab.ask(&pod, &service), None, "{pod} reached {service} of {tenant}");
        }
        let pod = format!("{}:8080", lab.address(&format!("{tenant}/web-1")));
        assert_eq!(lab.ask("default/client", &pod), None, "a pod of the default Network reached {pod}");
        if let Some(heard) = lab.ask(&format!("{other}/web-1"), &pod) {
            assert!(heard.starts_with(&format!("{other}/")), "{other} heard {heard}");
        }
    }
}
