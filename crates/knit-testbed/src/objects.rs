//! Objects of the cluster as files of a folder that agents read.

use std::path::Path;

use serde_json::{Value, json};

/// Writes an object as FILE.json; a reader never sees half of it.
#[track_caller]
pub fn write(folder: &Path, file: &str, object: &Value) {
    let unfinished = folder.join(format!(".{file}.json"));
    std::fs::write(&unfinished, object.to_string()).expect("written");
    std::fs::rename(unfinished, folder.join(format!("{file}.json"))).expect("in place");
}

/// A Network that has its number.
#[expect(clippy::needless_pass_by_value, reason = "it is written where it is given")]
pub fn network(name: &str, id: u32, spec: Value) -> Value {
    json!({"apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": {"name": name},
        "spec": spec, "status": {"id": id}})
}

/// A node's block of a Network, called NETWORK-NODE.
pub fn block(network: &str, node: &str, ipv4: &str, ipv6: Option<&str>) -> Value {
    let mut object = json!({"apiVersion": "knit.dev/v1alpha1", "kind": "AddressBlock",
        "metadata": {"name": format!("{network}-{node}")},
        "spec": {"network": network, "node": node, "ipv4": ipv4}});
    if let Some(ipv6) = ipv6 {
        object["spec"]["ipv6"] = ipv6.into();
    }
    object
}

/// A Node with these InternalIPs.
pub fn node(name: &str, addresses: &[&str]) -> Value {
    let addresses: Vec<Value> =
        addresses.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect();
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {"addresses": addresses}})
}
