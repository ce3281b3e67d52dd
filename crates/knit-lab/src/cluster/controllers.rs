//! The small controllers that a cluster has besides Knit: a scheduler, EndpointSlices of Services, replicas
//! of Deployments.
//!
//! Each looks at everything again after any change of its kinds: a lab is small, and so is the code.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::Lab;
use super::events::{self, Mood, Speaker};
use super::objects::{self, Changes, DEPLOYMENT, NODE, POD, SERVICE, SLICE, selects};
use knit_apiserver::object::Object;
use knit_apiserver::{ApiError, Store, WriteOptions};

const OURS: &str = "endpointslice-controller.k8s.io";

/// Gives each pod that has no node the one that has the fewest.
pub(crate) async fn schedule(lab: Lab) {
    let mut changes = Changes::of(lab.store(), &[POD, NODE]);
    loop {
        let pods = objects::list(lab.store(), POD);
        let ready = lab.ready_nodes();
        let mut load: BTreeMap<&str, usize> = ready.iter().map(|node| (node.name.as_str(), 0)).collect();
        for pod in &pods {
            if let Some(count) = pod.value["spec"]["nodeName"].as_str().and_then(|node| load.get_mut(node)) {
                *count += 1;
            }
        }
        for pod in pods.iter().filter(|pod| !pod.is_deleting() && pod.value["spec"]["nodeName"].is_null()) {
            let wanted = pod.value["spec"]["nodeSelector"]["kubernetes.io/hostname"].as_str();
            let fits = load.iter_mut().filter(|(node, _)| wanted.is_none_or(|wanted| wanted == **node));
            let Some((node, count)) = fits.min_by_key(|(node, count)| (**count, node.len(), **node)) else {
                continue;
            };
            let options =
                WriteOptions { manager: "knit-lab-scheduler".to_owned(), ..WriteOptions::default() };
            match lab.store().bind(pod.namespace(), pod.name(), node, &options) {
                Ok(_) => {
                    *count += 1;
                    let who = Speaker { component: "knit-lab-scheduler", node: "" };
                    let words = format!("Successfully assigned {}/{} to {node}", pod.namespace(), pod.name());
                    events::say(lab.store(), pod, who, Mood::Normal, "Scheduled", &words);
                }
                Err(error) => tracing::debug!(%error, pod = pod.name(), "a pod was not bound"),
            }
        }
        changes.wait().await;
    }
}

/// Keeps the replicas of Deployments.
pub(crate) async fn deployments(lab: Lab) {
    let mut changes = Changes::of(lab.store(), &[DEPLOYMENT, POD]);
    loop {
        let pods = objects::list(lab.store(), POD);
        for deployment in objects::list(lab.store(), DEPLOYMENT) {
            if let Err(error) = keep_replicas(lab.store(), &deployment, &pods) {
                tracing::warn!(%error, deployment = deployment.name(), "cannot maintain replicas");
            }
        }
        changes.wait().await;
    }
}

fn keep_replicas(
    store: &Store,
    deployment: &Object,
    pods: &[std::sync::Arc<Object>],
) -> Result<(), ApiError> {
    if deployment.is_deleting() {
        return Ok(());
    }
    let mine: Vec<_> = pods
        .iter()
        .filter(|pod| pod.value["metadata"]["ownerReferences"][0]["uid"] == deployment.uid())
        .filter(|pod| {
            !pod.is_deleting()
                && !matches!(pod.value["status"]["phase"].as_str(), Some("Failed" | "Succeeded"))
        })
        .collect();
    let wanted = usize::try_from(deployment.value["spec"]["replicas"].as_u64().unwrap_or(1)).unwrap_or(1);
    for _ in mine.len()..wanted {
        let template = &deployment.value["spec"]["template"];
        let mut metadata = template["metadata"].clone();
        if !metadata.is_object() {
            metadata = json!({});
        }
        metadata["generateName"] = json!(format!("{}-", deployment.name()));
        metadata["namespace"] = json!(deployment.namespace());
        metadata["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "Deployment",
            "controller": true,
            "name": deployment.name(), "uid": deployment.uid()}]);
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]});
        store.create_object(pod)?;
    }
    // The youngest go first.
    let mut extra = mine.clone();
    extra.sort_by_key(|pod| std::cmp::Reverse(pod.rv));
    for pod in extra.iter().take(mine.len().saturating_sub(wanted)) {
        objects::delete(store, POD, pod, None);
    }
    let ready = mine.iter().filter(|pod| is_ready(pod)).count();
    let status = json!({"observedGeneration": deployment.value["metadata"]["generation"],
        "replicas": mine.len(),
        "updatedReplicas": mine.len(), "readyReplicas": ready, "availableReplicas": ready});
    objects::set_status(store, DEPLOYMENT, deployment.namespace(), deployment.name(), &status)
}

/// Keeps the EndpointSlices of Services that select pods: one per family.
pub(crate) async fn endpoints(lab: Lab) {
    let mut changes = Changes::of(lab.store(), &[SERVICE, POD]);
    loop {
        let pods = objects::list(lab.store(), POD);
        let services = objects::list(lab.store(), SERVICE);
        for service in &services {
            if !service.is_deleting() && service.value["spec"]["selector"].is_object() {
                for slice in slices(service, &pods) {
                    if let Err(error) = write_slice(lab.store(), &slice) {
                        tracing::warn!(%error, service = service.name(), "cannot write an EndpointSlice");
                    }
                }
            }
        }
        changes.wait().await;
    }
}

fn write_slice(store: &Store, slice: &Value) -> Result<(), ApiError> {
    let (namespace, name) = (&slice["metadata"]["namespace"], &slice["metadata"]["name"]);
    let (namespace, name) = (namespace.as_str().unwrap_or_default(), name.as_str().unwrap_or_default());
    let kind = store.kind(SLICE.0, SLICE.1)?;
    let options = WriteOptions { manager: OURS.to_owned(), ..WriteOptions::default() };
    match store.get(&kind, namespace, name) {
        Ok(found)
            if found.value["endpoints"] == slice["endpoints"] && found.value["ports"] == slice["ports"] =>
        {
            Ok(())
        }
        Ok(_) => store.update(&kind, namespace, name, slice.clone(), &options).map(drop),
        Err(_) => store.create(&kind, namespace, slice.clone(), &options).map(drop),
    }
}

/// The EndpointSlices of a Service, one per address family that it has.
fn slices(service: &Object, pods: &[std::sync::Arc<Object>]) -> Vec<Value> {
    let spec = &service.value["spec"];
    let families = spec["ipFamilies"].as_array().cloned().unwrap_or_else(|| vec![json!("IPv4")]);
    let everyone = spec["publishNotReadyAddresses"].as_bool().unwrap_or_default();
    let selected: Vec<_> = pods
        .iter()
        .filter(|pod| pod.namespace() == service.namespace())
        .filter(|pod| selects(&spec["selector"], &pod.value["metadata"]["labels"]))
        .filter(|pod| !matches!(pod.value["status"]["phase"].as_str(), Some("Failed" | "Succeeded")))
        .collect();
    let slice = |family: &Value| {
        let v4 = family == "IPv4";
        let mut endpoints: Vec<Value> = selected
            .iter()
            .filter_map(|pod| {
                let ips = pod.value["status"]["podIPs"].as_array()?;
                let mut ips = ips.iter().filter_map(|ip| ip["ip"].as_str()?.parse::<IpAddr>().ok());
                let address = ips.find(|ip| ip.is_ipv4() == v4)?;
                let (ready, leaving) = (is_ready(pod) || everyone, pod.is_deleting());
                Some(json!({
                    "addresses": [address.to_string()],
                    "conditions": {"ready": ready && !leaving, "serving": ready, "terminating": leaving},
                    "nodeName": pod.value["spec"]["nodeName"],
                    "targetRef": {"kind": "Pod", "namespace": pod.namespace(), "name": pod.name(),
                        "uid": pod.uid()},
                }))
            })
            .collect();
        endpoints.sort_by_key(|endpoint| endpoint["addresses"][0].as_str().map(str::to_owned));
        let ports: Vec<Value> =
            spec["ports"].as_array().into_iter().flatten().map(|p| port(p, &selected)).collect();
        let family_name = if v4 { "ipv4" } else { "ipv6" };
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {
                "name": format!("{}-{family_name}", service.name()), "namespace": service.namespace(),
                "labels": {"kubernetes.io/service-name": service.name(),
                    "endpointslice.kubernetes.io/managed-by": OURS},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Service", "name": service.name(),
                    "uid": service.uid(),
                    "controller": true, "blockOwnerDeletion": true}],
            },
            "endpoints": endpoints, "ports": ports,
        })
    };
    families.iter().map(slice).collect()
}

/// A Service's port as its endpoints have it. A target that is a name is looked up in the first pod that
/// knows it.
fn port(port: &Value, pods: &[&std::sync::Arc<Object>]) -> Value {
    let target = match &port["targetPort"] {
        Value::String(name) => {
            let containers =
                pods.iter().flat_map(|p| p.value["spec"]["containers"].as_array().into_iter().flatten());
            let mut ports = containers.flat_map(|c| c["ports"].as_array().into_iter().flatten());
            ports.find(|p| p["name"] == name.as_str()).map_or(Value::Null, |p| p["containerPort"].clone())
        }
        Value::Number(number) => json!(number),
        _ => port["port"].clone(),
    };
    let name = port["name"].as_str().unwrap_or("");
    json!({"name": name, "protocol": port["protocol"].as_str().unwrap_or("TCP"), "port": target})
}

/// Whether a pod is ready.
pub(crate) fn is_ready(pod: &Object) -> bool {
    let conditions = pod.value["status"]["conditions"].as_array().into_iter().flatten();
    conditions.filter(|c| c["type"] == "Ready").any(|c| c["status"] == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> std::sync::Arc<Object> {
        std::sync::Arc::new(Object::new(value, 1))
    }

    #[test]
    fn a_slice_per_family_with_ready_pods_and_named_ports() {
        let pod = |name: &str, ip: &str, ready: &str| {
            object(json!({
                "metadata": {"name": name, "namespace": "red", "uid": name, "labels": {"app": "web"}},
                "spec": {"nodeName": "node-1", "containers": [{"ports": [{"name": "http",
                    "containerPort": 8080}]}]},
                "status": {"podIPs": [{"ip": ip}], "conditions": [{"type": "Ready", "status": ready}]},
            }))
        };
        let pods = [pod("a", "10.0.0.2", "True"), pod("b", "10.0.0.1", "False")];
        let service = object(json!({
            "metadata": {"name": "web", "namespace": "red", "uid": "s"},
            "spec": {"selector": {"app": "web"}, "ipFamilies": ["IPv4"],
                "ports": [{"name": "", "port": 80, "targetPort": "http"}]},
        }));
        let slices = slices(&service, &pods);
        assert_eq!(slices.len(), 1);
        let endpoints = slices[0]["endpoints"].as_array().expect("endpoints");
        assert_eq!(endpoints[0]["addresses"][0], "10.0.0.1");
        assert_eq!(endpoints[0]["conditions"]["ready"], false);
        assert_eq!(endpoints[1]["conditions"]["ready"], true);
        assert_eq!(slices[0]["ports"][0]["port"], 8080);
    }

    #[test]
    fn an_empty_selector_selects_nothing() {
        assert!(!selects(&json!({}), &json!({"app": "web"})));
        assert!(selects(&json!({"app": "web"}), &json!({"app": "web", "x": "y"})));
        assert!(!selects(&json!({"app": "web"}), &Value::Null));
    }
}
