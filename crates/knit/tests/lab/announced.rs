//! Addresses that do not follow from a block: announced to the other nodes one by one.

use crate::support::{Lab, text};

#[test]
fn an_address_outside_of_its_nodes_blocks_is_reached_from_other_nodes_and_given_to_one_pod_only() {
    let Some(lab) = Lab::up(STATIC, &[]) else { return };
    for (network, address) in [("routed", "10.79.200.9"), ("switched", "10.80.200.9")] {
        let to = format!("{address}:8080");
        let heard =
            lab.eventually(&format!("{network} reaches the other node"), || lab.ask("default/client", &to));
        assert!(heard.starts_with("default/server on node-2"), "{network}: {heard}");
    }
    // Another node's pod asks for the same: refused while that one is there, and served when it is gone.
    let thief = lab.dir.path().join("thief.yaml");
    // What is applied must be whole: the Network is named again, as it is.
    let network = STATIC.split("---").next().expect("the Network");
    std::fs::write(&thief, format!("{network}---{THIEF}")).expect("a file");
    lab.lab(&["apply", &thief.display().to_string()]);
    lab.eventually("the second pod is refused", || {
        text(&lab.knit(&["lab", "logs", "node-1"]))
            .contains("pod default/server on node node-2")
            .then_some(())
    });
    let (code, answer) = lab.request("DELETE", "/api/v1/namespaces/default/pods/server");
    assert_eq!(code, 200, "{answer}");
    let heard = lab.eventually("the address is the second pod's", || {
        lab.ask("default/client", "10.79.200.9:8080").filter(|heard| !heard.starts_with("default/server"))
    });
    assert!(heard.starts_with("default/thief on node-1"), "{heard}");
}

const STATIC: &str = r#"
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: routed}
spec:
  topology: Layer3
  subnets: [{cidr: 10.79.0.0/16, reserved: [10.79.200.0/24]}]
  allowedNamespaces: {from: All}
---
apiVersion: knit.dev/v1alpha1
kind: Network
metadata: {name: switched}
spec:
  topology: Layer2
  subnets: [{cidr: 10.80.0.0/16, reserved: [10.80.200.0/24]}]
  allowedNamespaces: {from: All}
---
apiVersion: v1
kind: Pod
metadata:
  name: server
  namespace: default
  annotations:
    knit.dev/networks: '[{"name": "routed", "ips": ["10.79.200.9"]},
      {"name": "switched", "ips": ["10.80.200.9"], "mac": "02:00:5e:00:00:09"}]'
spec: {nodeName: node-2, containers: [{name: main, image: knit-lab}]}
---
apiVersion: v1
kind: Pod
metadata:
  name: client
  namespace: default
  annotations: {knit.dev/networks: "routed,switched"}
spec: {nodeName: node-1, containers: [{name: main, image: knit-lab}]}
"#;

const THIEF: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  name: thief
  namespace: default
  annotations: {knit.dev/networks: '[{"name": "routed", "ips": ["10.79.200.9"]}]'}
spec: {nodeName: node-1, containers: [{name: main, image: knit-lab}]}
"#;
