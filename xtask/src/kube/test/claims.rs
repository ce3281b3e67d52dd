//! ResourceClaims of Networks, with the real scheduler and kubelet: by template, by name and by extended
//! resource; the agent dies in between; who comes late waits for an address.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::faults::kill_agent;
use super::support::{self, Overlay};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;

const SPACE: &str = "claims";
const LIMIT: Duration = Duration::from_secs(60);
/// NodeNetwork says that counts have changed once a minute at most.
const COUNTS_LIMIT: Duration = Duration::from_secs(180);
const PORT: u16 = 8080;

pub fn served(bed: &Bed) -> Result<()> {
    support::install(bed, Overlay::Claims)?;
    support::namespace(bed, SPACE)?;
    bed.apply(&network("blue", "10.70.0.0/24").to_string())?;
    bed.apply(&network("tiny", "10.71.0.0/29").to_string())?;
    until("the scheduler is shown the Networks", LIMIT, || {
        let slices = bed.kubectl_json(&["get", "resourceslices", "-o", "json"])?;
        let devices: Vec<&str> = slices["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|slice| slice["spec"]["driver"] == "knit.dev")
            .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten())
            .filter_map(|device| device["name"].as_str())
            .collect();
        Ok((devices == ["blue", "tiny"]).then_some(()))
    })?;
    bed.kubectl(&["wait", "--for=create", "deviceclass/knit-blue", "--timeout=60s"])?;

    bed.apply(&template(SPACE).to_string())?;
    bed.apply(&claim("by-name", "knit-blue").to_string())?;
    bed.apply(
        &pod(SPACE, "template", Some(json!({ "resourceClaimTemplateName": "blue" })), None).to_string(),
    )?;
    bed.apply(&pod(SPACE, "named", Some(json!({ "resourceClaimName": "by-name" })), None).to_string())?;
    bed.apply(&pod(SPACE, "extended", None, Some("networks.knit.dev/blue")).to_string())?;
    support::pods_ready(bed, SPACE)?;
    address(bed, SPACE, "template", Some("data0"))?;
    let named = address(bed, SPACE, "named", None)?;
    let extended = address(bed, SPACE, "extended", None)?;
    for target in [&named, &extended] {
        support::reaches(bed, SPACE, "template", &format!("{target}:{PORT}"))?;
    }

    // What a tenant gets wrong is refused by the API server, or told on the pod, and holds up nobody.
    let refused = bed.apply(&wrong("unknown", json!({ "colour": "red" })).to_string()).err();
    let refused = refused.context("a field that nobody knows was accepted")?;
    ensure!(format!("{refused:#}").contains("colour"), "it is refused for something else: {refused:#}");
    bed.apply(&wrong("wrong", json!({ "network": "../blue" })).to_string())?;
    bed.apply(&pod(SPACE, "wrong", Some(json!({ "resourceClaimName": "wrong" })), None).to_string())?;
    until("a wrong parameter is told", LIMIT, || {
        let events = bed.kubectl(&["get", "events", "-n", SPACE])?;
        Ok(events.contains("not a valid Network name").then_some(()))
    })?;

    // The agent dies between prepare and the sandbox, wherever that is.
    bed.kubectl(&["delete", "pod", "-n", SPACE, "template", "wrong", "--timeout=60s"])?;
    let again = pod(SPACE, "template", Some(json!({ "resourceClaimTemplateName": "blue" })), None);
    bed.apply(&again.to_string())?;
    let node = bed.nodes().into_iter().next().context("a node")?;
    kill_agent(bed, &node)?;
    bed.kubectl(&["wait", "--for=condition=Ready", "-n", SPACE, "pod/template", "--timeout=90s"])?;
    let after = address(bed, SPACE, "template", Some("data0"))?;
    support::reaches(bed, SPACE, "named", &format!("{after}:{PORT}"))?;

    waits_for_an_address(bed)?;
    bed.kubectl(&["delete", "pod", "-n", SPACE, "--all", "--timeout=120s"])?;
    until("nothing is attached or reserved any more", COUNTS_LIMIT, || {
        let nodes = bed.kubectl_json(&["get", "nodenetworks", "-o", "json"])?;
        let networks = nodes["items"].as_array().into_iter().flatten();
        let mut networks =
            networks.flat_map(|node| node["status"]["networks"].as_array().into_iter().flatten());
        Ok(networks.all(|network| network["name"] == "default" || is_free(network)).then_some(()))
    })
}

/// Whether NodeNetwork shows that no pod and no claim has anything of a Network on a node. The router's
/// address counts as used, too: one of each family where the node has a block, however many blocks it has.
fn is_free(network: &Value) -> bool {
    let mut addresses = network["addresses"].as_array().into_iter().flatten();
    let attachments = network["attachments"].as_i64().unwrap_or_default();
    attachments == 0 && addresses.all(|counts| counts["used"].as_i64().unwrap_or_default() <= 1)
}

/// A Network has as many addresses as it has: who comes late is Pending, with a reason, and starts when one
/// is free.
fn waits_for_an_address(bed: &Bed) -> Result<()> {
    let tiny = |n: usize| pod(SPACE, &format!("tiny-{n}"), None, Some("networks.knit.dev/tiny"));
    let room = capacity(bed, "tiny")?;
    for n in 0..=room {
        bed.apply(&tiny(n).to_string())?;
    }
    let pending = until("one more than there are addresses is Pending", LIMIT, || {
        let pods = bed.kubectl_json(&["get", "pods", "-n", SPACE, "-o", "json"])?;
        let pods: Vec<Value> = pods["items"].as_array().cloned().unwrap_or_default();
        let of_tiny =
            pods.iter().filter(|p| p["metadata"]["name"].as_str().is_some_and(|n| n.starts_with("tiny-")));
        let (running, waiting): (Vec<_>, Vec<_>) = of_tiny.partition(|p| p["status"]["phase"] == "Running");
        let name = waiting.first().and_then(|p| p["metadata"]["name"].as_str()).map(str::to_owned);
        Ok(name.filter(|_| running.len() == room && waiting.len() == 1))
    })?;
    let said = bed.kubectl(&["get", "events", "-n", SPACE, "--field-selector", "reason=FailedScheduling"])?;
    ensure!(said.contains(&pending), "no event says why {pending} waits: {said}");
    let first = if pending == "tiny-0" { "tiny-1" } else { "tiny-0" };
    bed.kubectl(&["delete", "pod", "-n", SPACE, first, "--timeout=60s"])?;
    let ready = format!("pod/{pending}");
    bed.kubectl(&["wait", "--for=condition=Ready", "-n", SPACE, &ready, "--timeout=120s"]).map(drop)
}

/// How many addresses the scheduler is shown of a Network.
fn capacity(bed: &Bed, network: &str) -> Result<usize> {
    let slices = bed.kubectl_json(&["get", "resourceslices", "-o", "json"])?;
    let devices = slices["items"].as_array().into_iter().flatten();
    let mut devices = devices.flat_map(|s| s["spec"]["devices"].as_array().into_iter().flatten());
    let device = devices.find(|d| d["name"] == network).context("a device")?;
    Ok(device["capacity"]["addresses"]["value"].as_str().context("a capacity")?.parse()?)
}

/// The address that a pod's claim says it has.
pub fn address(bed: &Bed, space: &str, pod: &str, interface: Option<&str>) -> Result<String> {
    until(&format!("the claim of {pod} says what it has"), LIMIT, || {
        let claims = bed.kubectl_json(&["get", "resourceclaims", "-n", space])?;
        let is_its = |claim: &&Value| {
            claim["status"]["reservedFor"].as_array().is_some_and(|by| by.iter().any(|by| by["name"] == pod))
        };
        let claim = claims["items"].as_array().into_iter().flatten().find(is_its);
        let device = claim.map(|claim| claim["status"]["devices"][0].clone()).unwrap_or_default();
        let data = &device["networkData"];
        if let Some(interface) = interface.filter(|_| data.is_object()) {
            ensure!(data["interfaceName"] == interface, "{device}");
        }
        let ready =
            device["conditions"][0]["status"] == "True" && device["data"]["podNetwork"]["name"] == "blue";
        let address = data["ips"][0].as_str().and_then(|ip| ip.split('/').next()).map(str::to_owned);
        Ok(address.filter(|_| ready))
    })
}

pub fn network(name: &str, cidr: &str) -> Value {
    json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "Network", "metadata": { "name": name },
        "spec": {
            "topology": "Layer3", "subnets": [{ "cidr": cidr }], "allowedNamespaces": { "from": "All" },
            "scheduling": "Addresses",
        },
    })
}

fn parameters(more: Value) -> Value {
    let mut all = json!({ "apiVersion": "knit.dev/v1alpha1", "kind": "AttachmentConfig" });
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
    json!([{ "opaque": { "driver": "knit.dev", "parameters": all } }])
}

pub fn template(space: &str) -> Value {
    let select = "device.attributes['multinetwork.networking.k8s.io'].podNetwork == 'blue'";
    let request = json!({ "name": "nic", "exactly": {
        "deviceClassName": "knit", "selectors": [{ "cel": { "expression": select } }] } });
    let devices = json!({ "requests": [request], "config": parameters(json!({ "interface": "data0" })) });
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": { "name": "blue", "namespace": space }, "spec": { "spec": { "devices": devices } },
    })
}

fn claim(name: &str, class: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": { "name": name, "namespace": SPACE },
        "spec": { "devices": { "requests": [{ "name": "nic", "exactly": { "deviceClassName": class } }] } },
    })
}

fn wrong(name: &str, fields: Value) -> Value {
    let mut claim = claim(name, "knit-blue");
    claim["spec"]["devices"]["config"] = parameters(fields);
    claim
}

pub fn pod(space: &str, name: &str, claim: Option<Value>, extended: Option<&str>) -> Value {
    let mut container = json!({
        "name": "main", "image": AGNHOST, "imagePullPolicy": "Never",
        "args": ["netexec", format!("--http-port={PORT}")],
    });
    if let Some(extended) = extended {
        container["resources"] = json!({ "requests": { extended: "1" }, "limits": { extended: "1" } });
    }
    let mut spec = json!({ "terminationGracePeriodSeconds": 1, "containers": [container] });
    if let Some(mut claim) = claim {
        claim["name"] = json!("net");
        spec["resourceClaims"] = json!([claim]);
    }
    let metadata = json!({ "name": name, "namespace": space });
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec })
}
