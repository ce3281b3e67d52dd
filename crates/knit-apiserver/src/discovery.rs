//! Discovery: which groups, versions and kinds are served, in the classic and in the aggregated form.

use std::sync::Arc;

use serde_json::{Value, json};

use super::kinds::{Kind, Registry};

const VERBS: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
const STATUS_VERBS: &[&str] = &["get", "patch", "update"];

/// Group and version of every kind, each once, in order.
pub fn group_versions(registry: &Registry) -> Vec<(String, String)> {
    let mut out: Vec<(String, String)> = Vec::new();
    for kind in registry.all() {
        let id = (kind.group.clone(), kind.version.clone());
        if !out.contains(&id) {
            out.push(id);
        }
    }
    out
}

fn kinds_of<'a>(
    registry: &'a Registry,
    group: &'a str,
    version: &'a str,
) -> impl Iterator<Item = &'a Arc<Kind>> {
    registry.all().iter().filter(move |kind| kind.group == group && kind.version == version)
}

fn label(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// `/api`.
pub fn api_versions() -> Value {
    json!({"kind": "APIVersions", "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": ""}]})
}

/// `/apis`.
pub fn groups(registry: &Registry) -> Value {
    let groups: Vec<Value> = group_versions(registry)
        .iter()
        .filter(|(group, _)| !group.is_empty())
        .map(|(group, version)| group_value(group, version))
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

fn group_value(group: &str, version: &str) -> Value {
    let served = json!({"groupVersion": label(group, version), "version": version});
    json!({"name": group, "versions": [served], "preferredVersion": served})
}

/// `/apis/GROUP`.
pub fn group(registry: &Registry, name: &str) -> Option<Value> {
    let (group, version) = group_versions(registry).into_iter().find(|(group, _)| group == name)?;
    let mut value = group_value(&group, &version);
    value["kind"] = json!("APIGroup");
    value["apiVersion"] = json!("v1");
    Some(value)
}

/// `/api/v1` and `/apis/GROUP/VERSION`.
pub fn resources(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let mut out = Vec::new();
    for kind in kinds_of(registry, group, version) {
        let mut main = json!({"name": kind.plural, "singularName": kind.singular,
            "namespaced": kind.namespaced, "kind": kind.kind, "verbs": VERBS});
        if !kind.short_names.is_empty() {
            main["shortNames"] = json!(kind.short_names);
        }
        if !kind.categories.is_empty() {
            main["categories"] = json!(kind.categories);
        }
        out.push(main);
        for (name, response, verbs) in subresources(kind) {
            let mut sub = json!({"name": format!("{}/{name}", kind.plural), "singularName": "",
                "namespaced": kind.namespaced, "kind": response.2, "verbs": verbs});
            if response.0 != kind.group || response.1 != kind.version {
                sub["group"] = json!(response.0);
                sub["version"] = json!(response.1);
            }
            out.push(sub);
        }
    }
    if out.is_empty() {
        return None;
    }
    Some(json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": label(group, version),
            "resources": out}))
}

type Subresource<'a> = (&'static str, (&'a str, &'a str, &'a str), &'static [&'static str]);

fn subresources(kind: &Kind) -> Vec<Subresource<'_>> {
    let mut out: Vec<Subresource<'_>> = Vec::new();
    if kind.status {
        out.push(("status", (&kind.group, &kind.version, &kind.kind), STATUS_VERBS));
    }
    if kind.scale {
        out.push(("scale", ("autoscaling", "v1", "Scale"), STATUS_VERBS));
    }
    if kind.is("", "Pod") {
        out.push(("binding", ("", "v1", "Binding"), &["create"]));
        out.push(("eviction", ("policy", "v1", "Eviction"), &["create"]));
        out.push(("exec", ("", "v1", "PodExecOptions"), &["create", "get"]));
        out.push(("log", ("", "v1", "Pod"), &["get"]));
    }
    out
}

/// `/api` or `/apis` in the aggregated form, `version` being `v2` or `v2beta1`.
pub fn aggregated(registry: &Registry, core: bool, version: &str) -> Value {
    let items: Vec<Value> = group_versions(registry)
        .into_iter()
        .filter(|(group, _)| group.is_empty() == core)
        .map(|(group, version)| {
            let resources: Vec<Value> =
                kinds_of(registry, &group, &version).map(|kind| aggregated_resource(kind)).collect();
            let metadata = if group.is_empty() {
                json!({"creationTimestamp": null})
            } else {
                json!({"name": group, "creationTimestamp": null})
            };
            json!({"metadata": metadata, "versions": [{"version": version, "resources": resources,
                "freshness": "Current"}]})
        })
        .collect();
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": format!("apidiscovery.k8s.io/{version}"),
        "metadata": {}, "items": items})
}

fn aggregated_resource(kind: &Kind) -> Value {
    let subresources: Vec<Value> = subresources(kind)
        .into_iter()
        .map(|(name, (group, version, kind), verbs)| {
            json!({"subresource": name, "responseKind": {"group": group, "version": version, "kind": kind},
                "verbs": verbs})
        })
        .collect();
    let mut out = json!({
        "resource": kind.plural,
        "responseKind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
        "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": kind.singular,
        "verbs": VERBS,
    });
    for (field, list) in [("shortNames", &kind.short_names), ("categories", &kind.categories)] {
        if !list.is_empty() {
            out[field] = json!(list);
        }
    }
    if !subresources.is_empty() {
        out["subresources"] = Value::Array(subresources);
    }
    out
}
