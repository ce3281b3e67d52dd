//! Tables for `kubectl get`: the printer columns of CRDs, and the usual columns of the built-in kinds.

use std::sync::Arc;

use serde_json::{Value, json};

use super::kinds::{Kind, Logic};
use super::object::{Object, at, is_deleting, list_at, meta, str_at};
use super::{jsonpath, store};

/// How much of each object a row carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Include {
    /// Nothing.
    None,
    /// Its metadata.
    #[default]
    Metadata,
    /// All of it.
    Object,
}

/// A table of objects.
pub fn table(
    kind: &Kind,
    objects: &[Arc<Object>],
    metadata: &Value,
    include: Include,
    now: jiff::Timestamp,
) -> Value {
    let rows: Vec<Value> = objects.iter().map(|object| row(kind, object, include, now)).collect();
    json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": columns(kind), "rows": rows})
}

/// The metadata alone, as metadata-only clients and table rows want it.
pub fn partial(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}

fn row(kind: &Kind, object: &Object, include: Include, now: jiff::Timestamp) -> Value {
    let value = store::from_stored(kind, &object.value);
    let cells = match &kind.logic {
        Logic::Custom(custom) => {
            let mut cells = vec![json!(object.name())];
            cells.extend(
                custom.columns.iter().map(|column| custom_cell(&value, &column.path, &column.kind, now)),
            );
            cells
        }
        Logic::Builtin(_) => builtin_cells(kind, &object.value, now),
    };
    match include {
        Include::None => json!({"cells": cells}),
        Include::Metadata => json!({"cells": cells, "object": partial(&value)}),
        Include::Object => json!({"cells": cells, "object": value}),
    }
}

fn custom_cell(value: &Value, path: &str, kind: &str, now: jiff::Timestamp) -> Value {
    let Some(found) = jsonpath::find(value, path).into_iter().next() else { return Value::Null };
    match kind {
        "date" => json!(age(found.as_str(), now)),
        "integer" | "number" | "boolean" => found.clone(),
        _ => match found {
            Value::String(_) | Value::Null => found.clone(),
            other => json!(other.to_string()),
        },
    }
}

fn columns(kind: &Kind) -> Vec<Value> {
    let column = |name: &str, kind: &str, priority: i64, description: &str| {
        let format = if name == "Name" { "name" } else { "" };
        json!({"name": name, "type": kind, "format": format, "description": description,
            "priority": priority})
    };
    if let Some(custom) = kind.custom() {
        let mut out = vec![column("Name", "string", 0, "Name must be unique within a namespace.")];
        out.extend(custom.columns.iter().map(|c| column(&c.name, &c.kind, c.priority, &c.description)));
        return out;
    }
    let mut out = Vec::new();
    for name in builtin_columns(&kind.kind).split('|') {
        // A leading `+` marks what only `-o wide` shows.
        let (name, priority) = name.strip_prefix('+').map_or((name, 0), |name| (name, 1));
        let kind = if matches!(name, "Data" | "Secrets") { "integer" } else { "string" };
        out.push(column(name, kind, priority, ""));
    }
    out
}

fn builtin_columns(kind: &str) -> &'static str {
    match kind {
        "Pod" => "Name|Ready|Status|Restarts|Age|+IP|+Node|+Nominated Node|+Readiness Gates",
        "Node" => {
            "Name|Status|Roles|Age|Version|+Internal-IP|+External-IP|+OS-Image|+Kernel-Version|+Container-Runtime"
        }
        "Namespace" => "Name|Status|Age",
        "Service" => "Name|Type|Cluster-IP|External-IP|Port(s)|Age|+Selector",
        "ConfigMap" => "Name|Data|Age",
        "Secret" => "Name|Type|Data|Age",
        "ServiceAccount" => "Name|Secrets|Age",
        "Event" => "Last Seen|Type|Reason|Object|+Subobject|+Source|Message|+First Seen|+Count|+Name",
        "Deployment" => "Name|Ready|Up-to-date|Available|Age|+Containers|+Images|+Selector",
        "Lease" => "Name|Holder|Age",
        "EndpointSlice" => "Name|AddressType|Ports|Endpoints|Age",
        "NetworkPolicy" => "Name|Pod-Selector|Age",
        "ServiceCIDR" => "Name|CIDRs|Age",
        "IPAddress" => "Name|ParentRef|Age",
        "CustomResourceDefinition" => "Name|Created At",
        _ => "Name|Age",
    }
}

fn builtin_cells(kind: &Kind, value: &Value, now: jiff::Timestamp) -> Vec<Value> {
    let name = json!(meta(value, "name"));
    let created = json!(age(str_at(value, "metadata.creationTimestamp"), now));
    let text = |path: &str, missing: &str| {
        json!(str_at(value, path).filter(|text| !text.is_empty()).unwrap_or(missing))
    };
    let count = |path: &str| {
        at(value, path)
            .map_or(0, |v| v.as_object().map_or(0, serde_json::Map::len) + v.as_array().map_or(0, Vec::len))
    };
    match kind.kind.as_str() {
        "Pod" => pod(value, name, created),
        "Node" => node(value, name, created),
        "Namespace" => vec![name, text("status.phase", ""), created],
        "Service" => service(value, name, created),
        "ConfigMap" => vec![name, json!(count("data") + count("binaryData")), created],
        "Secret" => vec![name, text("type", ""), json!(count("data")), created],
        "ServiceAccount" => vec![name, json!(count("secrets")), created],
        "Event" => event(value, &name, now),
        "Deployment" => {
            let number = |path: &str| at(value, path).and_then(Value::as_i64).unwrap_or(0);
            let ready = format!("{}/{}", number("status.readyReplicas"), number("spec.replicas"));
            let containers = list_at(value, "spec.template.spec.containers");
            vec![
                name,
                json!(ready),
                json!(number("status.updatedReplicas").to_string()),
                json!(number("status.availableReplicas").to_string()),
                created,
                json!(joined(containers.iter().map(|c| c["name"].as_str()))),
                json!(joined(containers.iter().map(|c| c["image"].as_str()))),
                json!(labels(at(value, "spec.selector.matchLabels"))),
            ]
        }
        "Lease" => vec![name, text("spec.holderIdentity", ""), created],
        "EndpointSlice" => {
            let ports = list_at(value, "ports").iter().map(|port| port["port"].to_string());
            let addresses =
                list_at(value, "endpoints").iter().flat_map(|e| list_at(e, "addresses")).map(Value::as_str);
            vec![
                name,
                text("addressType", ""),
                json!(or(ports.collect::<Vec<_>>().join(","), "<unset>")),
                json!(limited(addresses)),
                created,
            ]
        }
        "NetworkPolicy" => vec![name, json!(labels(at(value, "spec.podSelector.matchLabels"))), created],
        "ServiceCIDR" => {
            vec![name, json!(joined(list_at(value, "spec.cidrs").iter().map(Value::as_str))), created]
        }
        "IPAddress" => {
            let part = |path: &str| str_at(value, path).unwrap_or("").to_owned();
            let parent = format!(
                "{}/{}/{}",
                part("spec.parentRef.resource"),
                part("spec.parentRef.namespace"),
                part("spec.parentRef.name")
            );
            vec![name, json!(parent), created]
        }
        "CustomResourceDefinition" => vec![name, text("metadata.creationTimestamp", "<unknown>")],
        _ => vec![name, created],
    }
}

fn pod(value: &Value, name: Value, created: Value) -> Vec<Value> {
    let statuses = list_at(value, "status.containerStatuses");
    let ready = statuses.iter().filter(|status| status["ready"] == true).count();
    let total = list_at(value, "spec.containers").len();
    let restarts: i64 = statuses.iter().filter_map(|status| status["restartCount"].as_i64()).sum();
    let waiting = statuses.iter().rev().find_map(|status| {
        let state = &status["state"];
        state["waiting"]["reason"].as_str().or_else(|| state["terminated"]["reason"].as_str())
    });
    let phase = str_at(value, "status.reason").or(waiting).or_else(|| str_at(value, "status.phase"));
    let status = if is_deleting(value) { "Terminating" } else { phase.unwrap_or("") };
    let text = |path: &str| json!(str_at(value, path).filter(|text| !text.is_empty()).unwrap_or("<none>"));
    vec![
        name,
        json!(format!("{ready}/{total}")),
        json!(status),
        json!(restarts.to_string()),
        created,
        text("status.podIP"),
        text("spec.nodeName"),
        text("status.nominatedNodeName"),
        json!("<none>"),
    ]
}

fn node(value: &Value, name: Value, created: Value) -> Vec<Value> {
    let condition = list_at(value, "status.conditions").iter().find(|condition| condition["type"] == "Ready");
    let mut status = match condition.and_then(|condition| condition["status"].as_str()) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if value["spec"]["unschedulable"] == true {
        status.push_str(",SchedulingDisabled");
    }
    let prefix = "node-role.kubernetes.io/";
    let roles = value["metadata"]["labels"].as_object().into_iter().flatten();
    let roles: Vec<&str> = roles.filter_map(|(label, _)| label.strip_prefix(prefix)).collect();
    let address = |wanted: &str| {
        let found = list_at(value, "status.addresses").iter().find(|address| address["type"] == wanted);
        json!(found.and_then(|address| address["address"].as_str()).unwrap_or("<none>"))
    };
    let info = |field: &str| {
        json!(value["status"]["nodeInfo"][field].as_str().filter(|t| !t.is_empty()).unwrap_or("<unknown>"))
    };
    vec![
        name,
        json!(status),
        json!(or(roles.join(","), "<none>")),
        created,
        json!(value["status"]["nodeInfo"]["kubeletVersion"].as_str().unwrap_or("")),
        address("InternalIP"),
        address("ExternalIP"),
        info("osImage"),
        info("kernelVersion"),
        info("containerRuntimeVersion"),
    ]
}

fn service(value: &Value, name: Value, created: Value) -> Vec<Value> {
    let kind = str_at(value, "spec.type").unwrap_or("");
    let ingress = list_at(value, "status.loadBalancer.ingress")
        .iter()
        .map(|i| i["ip"].as_str().or(i["hostname"].as_str()));
    let external: Vec<&str> =
        list_at(value, "spec.externalIPs").iter().map(Value::as_str).chain(ingress).flatten().collect();
    let external = match kind {
        "ExternalName" => str_at(value, "spec.externalName").unwrap_or("").to_owned(),
        "LoadBalancer" if external.is_empty() => "<pending>".to_owned(),
        _ => or(external.join(","), "<none>"),
    };
    let ports = list_at(value, "spec.ports").iter().map(|port| {
        let node = port["nodePort"]
            .as_i64()
            .filter(|port| *port != 0)
            .map_or(String::new(), |port| format!(":{port}"));
        format!("{}{node}/{}", port["port"], port["protocol"].as_str().unwrap_or("TCP"))
    });
    vec![
        name,
        json!(kind),
        json!(str_at(value, "spec.clusterIP").filter(|ip| !ip.is_empty()).unwrap_or("<none>")),
        json!(external),
        json!(or(ports.collect::<Vec<_>>().join(","), "<none>")),
        created,
        json!(labels(at(value, "spec.selector"))),
    ]
}

fn event(value: &Value, name: &Value, now: jiff::Timestamp) -> Vec<Value> {
    let text = |path: &str| str_at(value, path).filter(|text| !text.is_empty());
    let first = text("firstTimestamp").or(text("eventTime"));
    let last = text("series.lastObservedTime").or(text("lastTimestamp")).or(first);
    let kind = text("involvedObject.kind").unwrap_or("").to_lowercase();
    let object = format!("{kind}/{}", text("involvedObject.name").unwrap_or(""));
    let source = text("source.component").or(text("reportingComponent")).unwrap_or("");
    let count = at(value, "series.count").or_else(|| at(value, "count")).and_then(Value::as_i64).unwrap_or(1);
    vec![
        json!(age(last, now)),
        json!(text("type").unwrap_or("")),
        json!(text("reason").unwrap_or("")),
        json!(object),
        json!(text("involvedObject.fieldPath").unwrap_or("")),
        json!(source),
        json!(text("message").unwrap_or("").trim()),
        json!(age(first, now)),
        json!(count.to_string()),
        name.clone(),
    ]
}

fn or(text: String, missing: &str) -> String {
    if text.is_empty() { missing.to_owned() } else { text }
}

fn joined<'a>(parts: impl Iterator<Item = Option<&'a str>>) -> String {
    parts.flatten().collect::<Vec<_>>().join(",")
}

fn limited<'a>(parts: impl Iterator<Item = Option<&'a str>>) -> String {
    let all: Vec<&str> = parts.flatten().collect();
    match all.len() {
        0 => "<unset>".to_owned(),
        1..=3 => all.join(","),
        many => format!("{} + {} more...", all[..3].join(","), many - 3),
    }
}

fn labels(value: Option<&Value>) -> String {
    let map = value.and_then(Value::as_object);
    let parts: Vec<String> =
        map.into_iter().flatten().map(|(k, v)| format!("{k}={}", v.as_str().unwrap_or(""))).collect();
    or(parts.join(","), "<none>")
}

/// How long ago, as `kubectl` words it.
pub fn age(since: Option<&str>, now: jiff::Timestamp) -> String {
    let Some(since) = since.and_then(|text| text.parse::<jiff::Timestamp>().ok()) else {
        return "<unknown>".to_owned();
    };
    human((now.as_second() - since.as_second()).max(0))
}

fn human(s: i64) -> String {
    let (m, h, d, y) = (s / 60, s / 3600, s / 86400, s / 31_536_000);
    let two = |big: i64, unit: &str, small: i64, small_unit: &str| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{small_unit}") }
    };
    match s {
        _ if s < 120 => format!("{s}s"),
        _ if m < 10 => two(m, "m", s % 60, "s"),
        _ if m < 180 => format!("{m}m"),
        _ if h < 8 => two(h, "h", m % 60, "m"),
        _ if h < 48 => format!("{h}h"),
        _ if d < 8 => two(d, "d", h % 24, "h"),
        _ if d < 730 => format!("{d}d"),
        _ if y < 8 => two(y, "y", d % 365, "d"),
        _ => format!("{y}y"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages() {
        for (seconds, expected) in [
            (5, "5s"),
            (119, "119s"),
            (130, "2m10s"),
            (3600, "60m"),
            (4 * 3600 + 60, "4h1m"),
            (86400, "24h"),
            (3 * 86400, "3d"),
            (20 * 86400, "20d"),
        ] {
            assert_eq!(human(seconds), expected);
        }
    }
}
