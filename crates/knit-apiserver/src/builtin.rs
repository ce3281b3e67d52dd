//! Defaults and validation of the built-in kinds: what clients rely on, and the mistakes that people make.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use super::kinds::Kind;
use super::names::is_label;
use super::object::{at, child_map, list_at, meta, str_at};
use super::service;
use super::status::{ApiError, Cause, Result};

fn default(map: &mut Map<String, Value>, key: &str, value: Value) {
    if map.get(key).is_none_or(Value::is_null) {
        map.insert(key.to_owned(), value);
    }
}

/// Fills in what a real server fills in.
pub fn fill_defaults(kind: &Kind, value: &mut Value, old: Option<&Value>) {
    match kind.kind.as_str() {
        "Namespace" => {
            let name = meta(value, "name").to_owned();
            let metadata = child_map(value, "metadata");
            default(metadata, "labels", json!({}));
            metadata["labels"]["kubernetes.io/metadata.name"] = json!(name);
            default(child_map(value, "spec"), "finalizers", json!(["kubernetes"]));
            default(child_map(value, "status"), "phase", json!("Active"));
        }
        "Pod" => {
            let spec = child_map(value, "spec");
            pod_defaults(spec);
            default(spec, "enableServiceLinks", json!(true));
            let status = child_map(value, "status");
            default(status, "phase", json!("Pending"));
        }
        "Deployment" => {
            let spec = child_map(value, "spec");
            default(spec, "replicas", json!(1));
            default(spec, "revisionHistoryLimit", json!(10));
            default(spec, "progressDeadlineSeconds", json!(600));
            default(
                spec,
                "strategy",
                json!({
                    "type": "RollingUpdate",
                    "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"},
                }),
            );
            if spec.get("template").is_some_and(Value::is_object) {
                pod_defaults(child_map(&mut spec["template"], "spec"));
            }
            child_map(value, "status");
        }
        "Service" => service::fill_defaults(value, old),
        "Secret" => {
            if let Some(Value::Object(plain)) = value.as_object_mut().and_then(|map| map.remove("stringData"))
            {
                use base64::Engine as _;
                let data = child_map(value, "data");
                for (key, text) in plain {
                    let text = text.as_str().unwrap_or("");
                    data.insert(key, base64::engine::general_purpose::STANDARD.encode(text).into());
                }
            }
            if let Some(map) = value.as_object_mut() {
                default(map, "type", json!("Opaque"));
            }
        }
        "NetworkPolicy" => {
            let spec = child_map(value, "spec");
            default(spec, "podSelector", json!({}));
            let egress = spec.contains_key("egress");
            default(
                spec,
                "policyTypes",
                if egress { json!(["Ingress", "Egress"]) } else { json!(["Ingress"]) },
            );
            for direction in ["ingress", "egress"] {
                for rule in spec.get_mut(direction).and_then(Value::as_array_mut).into_iter().flatten() {
                    for port in rule.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
                        if let Some(port) = port.as_object_mut() {
                            default(port, "protocol", json!("TCP"));
                        }
                    }
                }
            }
        }
        "EndpointSlice" => {
            if let Some(map) = value.as_object_mut() {
                default(map, "endpoints", json!([]));
            }
            for port in value.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(port) = port.as_object_mut() {
                    default(port, "name", json!(""));
                    default(port, "protocol", json!("TCP"));
                }
            }
        }
        "ServiceCIDR" => {
            let ready = json!([{"type": "Ready", "status": "True", "reason": "",
                "message": "Kubernetes Service CIDR is ready",
                "lastTransitionTime": meta(value, "creationTimestamp")}]);
            default(child_map(value, "status"), "conditions", ready);
        }
        "CustomResourceDefinition" => crd_status(value),
        _ => {}
    }
}

fn pod_defaults(spec: &mut Map<String, Value>) {
    default(spec, "restartPolicy", json!("Always"));
    default(spec, "terminationGracePeriodSeconds", json!(30));
    default(spec, "dnsPolicy", json!("ClusterFirst"));
    default(spec, "schedulerName", json!("default-scheduler"));
    default(spec, "securityContext", json!({}));
    if let Some(account) = spec.get("serviceAccountName").cloned() {
        default(spec, "serviceAccount", account);
    }
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(container) = container.as_object_mut() else { continue };
            let image = container.get("image").and_then(Value::as_str).unwrap_or("");
            let tag = image.rsplit('/').next().and_then(|last| last.split_once(':')).map(|(_, tag)| tag);
            let latest = matches!(tag, None | Some("latest")) && !image.contains('@');
            default(container, "imagePullPolicy", json!(if latest { "Always" } else { "IfNotPresent" }));
            default(container, "resources", json!({}));
            default(container, "terminationMessagePath", json!("/dev/termination-log"));
            default(container, "terminationMessagePolicy", json!("File"));
            for port in container.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(port) = port.as_object_mut() {
                    default(port, "protocol", json!("TCP"));
                }
            }
            for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
                let Some(probe) = container.get_mut(probe).and_then(Value::as_object_mut) else { continue };
                default(probe, "timeoutSeconds", json!(1));
                default(probe, "periodSeconds", json!(10));
                default(probe, "successThreshold", json!(1));
                default(probe, "failureThreshold", json!(3));
                if let Some(get) = probe.get_mut("httpGet").and_then(Value::as_object_mut) {
                    default(get, "path", json!("/"));
                    default(get, "scheme", json!("HTTP"));
                }
            }
        }
    }
}

/// A definition is established as soon as it is stored.
fn crd_status(value: &mut Value) {
    let kind = str_at(value, "spec.names.kind").unwrap_or("").to_owned();
    let names = child_map(&mut value["spec"], "names");
    default(names, "singular", json!(kind.to_lowercase()));
    default(names, "listKind", json!(format!("{kind}List")));
    let names = Value::Object(names.clone());
    let versions: Vec<Value> = list_at(value, "spec.versions")
        .iter()
        .filter(|v| v["storage"] == true)
        .map(|v| v["name"].clone())
        .collect();
    let since = meta(value, "creationTimestamp").to_owned();
    let condition = |name: &str, reason: &str| {
        json!({"type": name, "status": "True", "reason": reason, "message": "",
            "lastTransitionTime": since})
    };
    let conditions =
        json!([condition("NamesAccepted", "NoConflicts"), condition("Established", "InitialNamesAccepted")]);
    let status = child_map(value, "status");
    status.insert("acceptedNames".into(), names);
    status.insert("storedVersions".into(), Value::Array(versions));
    status.insert("conditions".into(), conditions);
}

/// What is wrong with an object.
pub fn validate(kind: &Kind, value: &Value, old: Option<&Value>, causes: &mut Vec<Cause>) {
    match kind.kind.as_str() {
        "Pod" => pod_spec(&value["spec"], "spec", causes),
        "Deployment" => deployment(value, old, causes),
        "Service" => service::validate(value, old, causes),
        "EndpointSlice" => endpoint_slice(value, old, causes),
        "NetworkPolicy" => network_policy(value, causes),
        "Node" => {
            for (index, cidr) in list_at(value, "spec.podCIDRs").iter().enumerate() {
                check_cidr(cidr, &format!("spec.podCIDRs[{index}]"), causes);
            }
            let before = old.map(|old| list_at(old, "spec.podCIDRs")).unwrap_or_default();
            if !before.is_empty() && before != list_at(value, "spec.podCIDRs") {
                causes.push(Cause::forbidden(
                    "spec.podCIDRs",
                    "node updates may not change podCIDR except from \"\" to valid",
                ));
            }
        }
        "ServiceCIDR" => service_cidr(value, old, causes),
        "IPAddress" => {
            if str_at(value, "spec.parentRef.name").is_none_or(str::is_empty) {
                causes.push(Cause::required("spec.parentRef", ""));
            }
            if let Some(old) = old.filter(|old| old["spec"] != value["spec"]) {
                causes.push(Cause::invalid(
                    "spec.parentRef",
                    &old["spec"]["parentRef"],
                    "field is immutable",
                ));
            }
        }
        "ConfigMap" | "Secret" => {
            for field in ["data", "binaryData"] {
                for key in value[field].as_object().into_iter().flatten().map(|(key, _)| key) {
                    if key.is_empty()
                        || key.len() > 253
                        || !key.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
                    {
                        causes.push(Cause::invalid(
                            format!("{field}[{key}]"),
                            &json!(key),
                            "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
                        ));
                    }
                }
            }
            if let Some(old) = old.filter(|old| {
                old["immutable"] == true && (old["data"] != value["data"] || value["immutable"] != true)
            }) {
                causes.push(Cause::forbidden(
                    if old["data"] == value["data"] { "immutable" } else { "data" },
                    "field is immutable when `immutable` is set",
                ));
            }
        }
        "Lease" => {
            let seconds = &value["spec"]["leaseDurationSeconds"];
            if seconds.as_i64().is_some_and(|seconds| seconds <= 0) {
                causes.push(Cause::invalid("spec.leaseDurationSeconds", seconds, "must be greater than 0"));
            }
        }
        "Event" => {
            let about = at(value, "involvedObject.namespace").or_else(|| at(value, "regarding.namespace"));
            let about = about.and_then(Value::as_str).unwrap_or("");
            let mine = meta(value, "namespace");
            if !about.is_empty() && about != mine {
                causes.push(Cause::invalid(
                    "involvedObject.namespace",
                    &json!(about),
                    "does not match event.namespace",
                ));
            } else if about.is_empty() && mine != "default" && mine != "kube-system" {
                causes.push(Cause::invalid(
                    "involvedObject.namespace",
                    &json!(about),
                    "does not match event.namespace; events of cluster-scoped objects belong into `default`",
                ));
            }
        }
        "CustomResourceDefinition" => {
            let wanted = format!(
                "{}.{}",
                str_at(value, "spec.names.plural").unwrap_or(""),
                str_at(value, "spec.group").unwrap_or("")
            );
            if meta(value, "name") != wanted {
                causes.push(Cause::invalid(
                    "metadata.name",
                    &value["metadata"]["name"],
                    format!("must be spec.names.plural+\".\"+spec.group: {wanted}"),
                ));
            }
        }
        _ => {}
    }
}

fn pod_spec(spec: &Value, path: &str, causes: &mut Vec<Cause>) {
    if list_at(spec, "containers").is_empty() {
        causes.push(Cause::required(format!("{path}.containers"), ""));
    }
    let mut seen = Vec::new();
    for list in ["containers", "initContainers"] {
        for (index, container) in list_at(spec, list).iter().enumerate() {
            let here = format!("{path}.{list}[{index}]");
            match container["name"].as_str() {
                None | Some("") => causes.push(Cause::required(format!("{here}.name"), "")),
                Some(name) if !is_label(name) => {
                    let why = "a lowercase RFC 1123 label must consist of lower case alphanumeric \
                               characters or '-'";
                    causes.push(Cause::invalid(format!("{here}.name"), &json!(name), why));
                }
                Some(name) if seen.contains(&name) => {
                    causes.push(Cause::duplicate(format!("{here}.name"), &json!(name)));
                }
                Some(name) => seen.push(name),
            }
            if container["image"].as_str().is_none_or(str::is_empty) {
                causes.push(Cause::required(format!("{here}.image"), ""));
            }
            for (index, port) in list_at(container, "ports").iter().enumerate() {
                check_port(&port["containerPort"], &format!("{here}.ports[{index}].containerPort"), causes);
            }
        }
    }
    let policies = ["Always", "OnFailure", "Never"].map(str::to_owned);
    if !policies.iter().any(|policy| spec["restartPolicy"] == **policy) {
        causes.push(Cause::not_supported(format!("{path}.restartPolicy"), &spec["restartPolicy"], &policies));
    }
}

/// A port number from 1 to 65535.
pub fn check_port(port: &Value, path: &str, causes: &mut Vec<Cause>) {
    match port.as_i64() {
        None => causes.push(Cause::required(path, "")),
        Some(1..=65535) => {}
        Some(_) => causes.push(Cause::invalid(path, port, "must be between 1 and 65535, inclusive")),
    }
}

/// What may change in a pod that exists: images and little else.
pub fn check_pod_immutable(kind: &Kind, current: &Value, new: &Value) -> Result<()> {
    if !kind.is("", "Pod") {
        return Ok(());
    }
    let fixed = |pod: &Value| {
        let mut spec = pod["spec"].clone();
        for list in ["containers", "initContainers"] {
            for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
                container["image"] = Value::Null;
                container["imagePullPolicy"] = Value::Null;
            }
        }
        for free in
            ["activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "schedulingGates"]
        {
            spec[free] = Value::Null;
        }
        spec
    };
    if fixed(current) == fixed(new) {
        return Ok(());
    }
    let why = "pod updates may not change fields other than `spec.containers[*].image`,\
               `spec.initContainers[*].image`,\
               `spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),\
               `spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";
    Err(ApiError::invalid(kind, meta(new, "name"), &[Cause::forbidden("spec", why)]))
}

fn deployment(value: &Value, old: Option<&Value>, causes: &mut Vec<Cause>) {
    let spec = &value["spec"];
    let selector = &spec["selector"];
    let wanted = selector["matchLabels"].as_object();
    if !selector.is_object() {
        causes.push(Cause::required("spec.selector", ""));
    }
    if !spec["template"].is_object() {
        causes.push(Cause::required("spec.template", ""));
        return;
    }
    let labels = &spec["template"]["metadata"]["labels"];
    if wanted.into_iter().flatten().any(|(key, label)| &labels[key] != label) {
        causes.push(Cause::invalid(
            "spec.template.metadata.labels",
            labels,
            "`selector` does not match template `labels`",
        ));
    }
    if spec["replicas"].as_i64().is_none_or(|replicas| replicas < 0) {
        causes.push(Cause::invalid("spec.replicas", &spec["replicas"], "must be greater than or equal to 0"));
    }
    if let Some(old) = old.filter(|old| old["spec"]["selector"] != *selector) {
        causes.push(Cause::invalid("spec.selector", &old["spec"]["selector"], "field is immutable"));
    }
    pod_spec(&spec["template"]["spec"], "spec.template.spec", causes);
}

fn endpoint_slice(value: &Value, old: Option<&Value>, causes: &mut Vec<Cause>) {
    let family = value["addressType"].as_str().unwrap_or("");
    match family {
        "" => causes.push(Cause::required("addressType", "")),
        "IPv4" | "IPv6" | "FQDN" => {}
        _ => {
            let known = ["FQDN", "IPv4", "IPv6"].map(str::to_owned);
            causes.push(Cause::not_supported("addressType", &value["addressType"], &known));
        }
    }
    if old.is_some_and(|old| old["addressType"] != value["addressType"]) {
        causes.push(Cause::invalid("addressType", &value["addressType"], "field is immutable"));
    }
    let endpoints = list_at(value, "endpoints");
    if endpoints.len() > 1000 {
        causes.push(Cause::too_many("endpoints", endpoints.len(), 1000));
    }
    for (index, endpoint) in endpoints.iter().enumerate() {
        let addresses = list_at(endpoint, "addresses");
        let path = format!("endpoints[{index}].addresses");
        if addresses.is_empty() {
            causes.push(Cause::required(&path, "must contain at least 1 address"));
        } else if addresses.len() > 100 {
            causes.push(Cause::too_many(&path, addresses.len(), 100));
        }
        for address in addresses {
            let ip = address.as_str().and_then(|text| text.parse::<IpAddr>().ok());
            match (family, ip) {
                ("IPv4", Some(IpAddr::V4(_))) | ("IPv6", Some(IpAddr::V6(_))) => {
                    let special = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified() || ip.is_multicast();
                    let why = "may not be a loopback, unspecified or multicast address";
                    causes.extend(ip.filter(|ip| special(*ip)).map(|_| Cause::invalid(&path, address, why)));
                }
                ("IPv4" | "IPv6", _) => {
                    causes.push(Cause::invalid(&path, address, format!("must be an {family} address")));
                }
                _ => {}
            }
        }
    }
    let ports = list_at(value, "ports");
    for (index, port) in ports.iter().enumerate() {
        if ports[..index].iter().any(|other| other["name"] == port["name"]) {
            causes.push(Cause::duplicate(format!("ports[{index}].name"), &port["name"]));
        }
        let protocols = ["SCTP", "TCP", "UDP"].map(str::to_owned);
        if !protocols.iter().any(|known| port["protocol"] == **known) {
            causes.push(Cause::not_supported(
                format!("ports[{index}].protocol"),
                &port["protocol"],
                &protocols,
            ));
        }
    }
}

fn check_cidr(value: &Value, path: &str, causes: &mut Vec<Cause>) -> Option<IpNet> {
    let parsed = value.as_str().and_then(|text| text.parse::<IpNet>().ok());
    if parsed.is_none() {
        causes.push(Cause::invalid(
            path,
            value,
            "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)",
        ));
    }
    parsed
}

fn network_policy(value: &Value, causes: &mut Vec<Cause>) {
    let spec = &value["spec"];
    for (index, policy) in list_at(spec, "policyTypes").iter().enumerate() {
        if policy != "Ingress" && policy != "Egress" {
            let known = ["Egress", "Ingress"].map(str::to_owned);
            causes.push(Cause::not_supported(format!("spec.policyTypes[{index}]"), policy, &known));
        }
    }
    for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
        for (index, rule) in list_at(spec, direction).iter().enumerate() {
            let path = format!("spec.{direction}[{index}]");
            for (index, peer) in list_at(rule, peers).iter().enumerate() {
                network_policy_peer(peer, &format!("{path}.{peers}[{index}]"), causes);
            }
            for (index, port) in list_at(rule, "ports").iter().enumerate() {
                let path = format!("{path}.ports[{index}]");
                if port["port"].is_number() {
                    check_port(&port["port"], &format!("{path}.port"), causes);
                }
                if let Some(end) = port["endPort"].as_i64() {
                    match port["port"].as_i64() {
                        None => causes.push(Cause::required(
                            format!("{path}.port"),
                            "must be specified when `endPort` is",
                        )),
                        Some(first) if end < first => causes.push(Cause::invalid(
                            format!("{path}.endPort"),
                            &port["endPort"],
                            "must be greater than or equal to `port`",
                        )),
                        Some(_) => {}
                    }
                }
            }
        }
    }
}

fn network_policy_peer(peer: &Value, path: &str, causes: &mut Vec<Cause>) {
    let block = &peer["ipBlock"];
    let selects = peer.get("podSelector").is_some() || peer.get("namespaceSelector").is_some();
    if !block.is_object() {
        if !selects {
            causes.push(Cause::required(path, "must specify a peer"));
        }
        return;
    }
    if selects {
        causes.push(Cause::forbidden(path, "may not specify both ipBlock and another peer"));
    }
    let Some(net) = check_cidr(&block["cidr"], &format!("{path}.ipBlock.cidr"), causes) else { return };
    for (index, except) in list_at(block, "except").iter().enumerate() {
        let path = format!("{path}.ipBlock.except[{index}]");
        if let Some(hole) = check_cidr(except, &path, causes)
            && !(net.contains(&hole) && net.prefix_len() < hole.prefix_len())
        {
            causes.push(Cause::invalid(path, except, "must be a strict subset of `cidr`"));
        }
    }
}

fn service_cidr(value: &Value, old: Option<&Value>, causes: &mut Vec<Cause>) {
    let cidrs = list_at(value, "spec.cidrs");
    match cidrs.len() {
        0 => causes.push(Cause::required("spec.cidrs", "at least one CIDR required")),
        1 | 2 => {}
        many => causes.push(Cause::too_many("spec.cidrs", many, 2)),
    }
    let nets: Vec<IpNet> = cidrs
        .iter()
        .enumerate()
        .filter_map(|(index, cidr)| check_cidr(cidr, &format!("spec.cidrs[{index}]"), causes))
        .collect();
    if nets.len() == 2 && nets[0].addr().is_ipv4() == nets[1].addr().is_ipv4() {
        causes.push(Cause::invalid(
            "spec.cidrs",
            &value["spec"]["cidrs"],
            "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64",
        ));
    }
    if let Some(old) = old.filter(|old| old["spec"] != value["spec"]) {
        causes.push(Cause::invalid("spec.cidrs", &old["spec"]["cidrs"], "field is immutable"));
    }
}
