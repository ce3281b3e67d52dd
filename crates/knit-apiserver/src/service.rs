//! Services: defaults, validation, and the addresses and node ports that the server hands out. Every cluster
//! IP that is taken is an IPAddress object, as in a real server.

use std::net::IpAddr;

use ipnet::IpNet;
use knit_types::Family;
use serde_json::{Value, json};

use super::builtin::check_port;
use super::names::is_label;
use super::object::{child_map, is_deleting, list_at, meta, str_at};
use super::state::{Key, State, cluster_ips};
use super::status::Cause;

const NODE_PORTS: std::ops::RangeInclusive<u16> = 30000..=32767;

fn kind_of(service: &Value) -> &str {
    str_at(service, "spec.type").unwrap_or("ClusterIP")
}

fn has_node_ports(service: &Value) -> bool {
    match kind_of(service) {
        "NodePort" => true,
        "LoadBalancer" => service["spec"]["allocateLoadBalancerNodePorts"] != false,
        _ => false,
    }
}

fn is_headless(service: &Value) -> bool {
    service["spec"]["clusterIP"] == "None"
}

/// Fills in what does not depend on other objects, and carries over what the server gave out before.
pub fn fill_defaults(service: &mut Value, old: Option<&Value>) {
    let spec = child_map(service, "spec");
    let mut set = |key: &str, value: Value| {
        if spec.get(key).is_none_or(Value::is_null) {
            spec.insert(key.to_owned(), value);
        }
    };
    set("type", json!("ClusterIP"));
    set("sessionAffinity", json!("None"));
    let kind = spec["type"].as_str().unwrap_or("").to_owned();
    if kind != "ExternalName" && !spec.contains_key("internalTrafficPolicy") {
        spec.insert("internalTrafficPolicy".into(), json!("Cluster"));
    }
    if kind == "NodePort" || kind == "LoadBalancer" {
        spec.entry("externalTrafficPolicy").or_insert(json!("Cluster"));
    } else {
        spec.remove("externalTrafficPolicy");
    }
    if kind == "LoadBalancer" {
        spec.entry("allocateLoadBalancerNodePorts").or_insert(json!(true));
    }
    if spec["sessionAffinity"] == "ClientIP" && !spec.contains_key("sessionAffinityConfig") {
        spec.insert("sessionAffinityConfig".into(), json!({"clientIP": {"timeoutSeconds": 10800}}));
    }
    for port in spec.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(port) = port.as_object_mut() else { continue };
        port.entry("protocol").or_insert(json!("TCP"));
        if port.get("targetPort").is_none_or(|target| target == 0 || target == "")
            && let Some(number) = port.get("port").cloned()
        {
            port.insert("targetPort".into(), number);
        }
    }
    if kind == "ExternalName" {
        for field in ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "internalTrafficPolicy"] {
            spec.remove(field);
        }
    } else {
        match (spec.get("clusterIP").and_then(Value::as_str), spec.get("clusterIPs")) {
            (None | Some(""), Some(Value::Array(list))) if !list.is_empty() => {
                let first = list[0].clone();
                spec.insert("clusterIP".into(), first);
            }
            (Some(ip), None) if !ip.is_empty() => {
                let list = json!([ip]);
                spec.insert("clusterIPs".into(), list);
            }
            _ => {}
        }
    }
    if let Some(old) = old {
        carry_over(service, old);
    }
    let drop_ports = !has_node_ports(service);
    for port in service["spec"].get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
        if drop_ports && let Some(port) = port.as_object_mut() {
            port.remove("nodePort");
        }
    }
    child_map(service, "status").entry("loadBalancer").or_insert(json!({}));
}

/// An update that does not name what was handed out keeps it.
fn carry_over(service: &mut Value, old: &Value) {
    if kind_of(service) == "ExternalName" || kind_of(old) == "ExternalName" {
        return;
    }
    for field in ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "healthCheckNodePort"] {
        let missing = service["spec"].get(field).is_none_or(|value| value.is_null() || value == "");
        if missing && let Some(value) = old["spec"].get(field) {
            service["spec"][field] = value.clone();
        }
    }
    // Who names another address in the old field means the new one, too.
    let (ip, list) = (&service["spec"]["clusterIP"], &service["spec"]["clusterIPs"]);
    if *ip != old["spec"]["clusterIP"] && *list == old["spec"]["clusterIPs"] && list.get(0).is_some() {
        service["spec"]["clusterIPs"][0] = ip.clone();
    }
    if !has_node_ports(service) {
        return;
    }
    let before = list_at(old, "spec.ports").to_vec();
    for port in service["spec"].get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
        let known =
            before.iter().find(|old| old["port"] == port["port"] && old["protocol"] == port["protocol"]);
        if port["nodePort"].as_i64().unwrap_or(0) == 0
            && let Some(number) = known.and_then(|old| old.get("nodePort"))
        {
            port["nodePort"] = number.clone();
        }
    }
}

/// What is wrong with a Service on its own.
pub fn validate(service: &Value, old: Option<&Value>, causes: &mut Vec<Cause>) {
    let spec = &service["spec"];
    let one_of = |field: &str, known: &[&str], causes: &mut Vec<Cause>| {
        if let Some(value) = spec.get(field)
            && !known.iter().any(|name| value == name)
        {
            let known: Vec<String> = known.iter().map(|name| (*name).to_owned()).collect();
            causes.push(Cause::not_supported(format!("spec.{field}"), value, &known));
        }
    };
    one_of("type", &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"], causes);
    one_of("sessionAffinity", &["ClientIP", "None"], causes);
    one_of("internalTrafficPolicy", &["Cluster", "Local"], causes);
    one_of("externalTrafficPolicy", &["Cluster", "Local"], causes);
    one_of("ipFamilyPolicy", &["PreferDualStack", "RequireDualStack", "SingleStack"], causes);
    let external = kind_of(service) == "ExternalName";
    if external && spec["externalName"].as_str().is_none_or(str::is_empty) {
        causes.push(Cause::required("spec.externalName", ""));
    }
    let ports = list_at(service, "spec.ports");
    if ports.is_empty() && !external && !is_headless(service) {
        causes.push(Cause::required("spec.ports", ""));
    }
    for (index, port) in ports.iter().enumerate() {
        let path = format!("spec.ports[{index}]");
        check_port(&port["port"], &format!("{path}.port"), causes);
        if port["targetPort"].is_number() {
            check_port(&port["targetPort"], &format!("{path}.targetPort"), causes);
        }
        if !["SCTP", "TCP", "UDP"].iter().any(|known| port["protocol"] == **known) {
            let known = ["SCTP", "TCP", "UDP"].map(str::to_owned);
            causes.push(Cause::not_supported(format!("{path}.protocol"), &port["protocol"], &known));
        }
        let name = port["name"].as_str().unwrap_or("");
        if name.is_empty() && ports.len() > 1 {
            causes.push(Cause::required(format!("{path}.name"), ""));
        } else if !name.is_empty() && !is_label(name) {
            causes.push(Cause::invalid(
                format!("{path}.name"),
                &port["name"],
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'",
            ));
        }
        for other in &ports[..index] {
            if !name.is_empty() && other["name"] == name {
                causes.push(Cause::duplicate(format!("{path}.name"), &port["name"]));
            } else if other["port"] == port["port"] && other["protocol"] == port["protocol"] {
                causes.push(Cause::duplicate(
                    &path,
                    &json!(format!("{}/{}", port["protocol"].as_str().unwrap_or(""), port["port"])),
                ));
            }
        }
    }
    for (index, ip) in list_at(service, "spec.clusterIPs").iter().enumerate() {
        let text = ip.as_str().unwrap_or("");
        if text != "None" && text.parse::<IpAddr>().is_err() {
            causes.push(Cause::invalid(
                format!("spec.clusterIPs[{index}]"),
                ip,
                "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
            ));
        }
    }
    let first = service["spec"]["clusterIPs"].get(0);
    if first.is_some_and(|first| *first != spec["clusterIP"]) {
        causes.push(Cause::invalid(
            "spec.clusterIPs",
            &spec["clusterIPs"],
            "first value must match `clusterIP`",
        ));
    }
    let Some(old) = old.filter(|old| !external && kind_of(old) != "ExternalName") else { return };
    if old["spec"]["clusterIP"] != spec["clusterIP"] {
        causes.push(Cause::invalid("spec.clusterIPs[0]", &spec["clusterIPs"], "may not change once set"));
    }
}

/// Families, addresses and node ports. Nothing is taken unless all of it can be; with `dry` nothing is at
/// all.
pub fn allocate(
    state: &mut State,
    service: &mut Value,
    old: Option<&Value>,
    dry: bool,
) -> Result<(), Vec<Cause>> {
    let key = (meta(service, "namespace").to_owned(), meta(service, "name").to_owned());
    let addresses = plan_addresses(state, service).map_err(|cause| vec![cause])?;
    plan_ports(state, service, &key)?;
    if dry {
        return Ok(());
    }
    for ip in addresses {
        let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
        let value = json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "IPAddress",
            "metadata": {
                "name": ip.to_string(),
                "uid": uuid::Uuid::new_v4().to_string(),
                "creationTimestamp": service["metadata"]["creationTimestamp"],
                "labels": {"ipaddress.kubernetes.io/ip-family": family,
                    "ipaddress.kubernetes.io/managed-by": "ipallocator.k8s.io"},
            },
            "spec": {"parentRef": {"group": "", "resource": "services", "namespace": key.0, "name": key.1}},
        });
        let table = state.known.ip_addresses;
        state.put(table, value);
    }
    if let Some(old) = old {
        state.release_unused(old, service);
    }
    Ok(())
}

fn service_ranges(state: &State) -> Vec<IpNet> {
    let mut objects: Vec<&Value> = state
        .range(state.known.service_cidrs, None, None)
        .map(|(_, object)| &object.value)
        .filter(|value| !is_deleting(value))
        .collect();
    // The default range decides which family comes first.
    objects.sort_by_key(|value| meta(value, "name") != "kubernetes");
    objects
        .iter()
        .flat_map(|value| list_at(value, "spec.cidrs"))
        .filter_map(|cidr| cidr.as_str()?.parse().ok())
        .collect()
}

/// Sets families and cluster IPs; returns the addresses that are newly taken.
fn plan_addresses(state: &mut State, service: &mut Value) -> Result<Vec<IpAddr>, Cause> {
    if kind_of(service) == "ExternalName" {
        return Ok(Vec::new());
    }
    let ranges = service_ranges(state);
    let families = plan_families(&ranges, service)?;
    if is_headless(service) {
        return Ok(Vec::new());
    }
    let given: Vec<IpAddr> = cluster_ips(service).filter_map(|ip| ip.parse().ok()).collect();
    let (mut all, mut new) = (Vec::new(), Vec::new());
    for (index, family) in families.iter().enumerate() {
        let of_family: Vec<IpNet> =
            ranges.iter().copied().filter(|net| net.addr().is_ipv4() == (family == "IPv4")).collect();
        let path = "spec.clusterIPs";
        let ip = match given.get(index) {
            Some(ip) => {
                if is_mine(state, *ip, service) {
                    all.push(*ip);
                    continue;
                }
                check_given(state, *ip, &of_family, &service["spec"]["clusterIPs"])?;
                *ip
            }
            None => pick(state, &of_family).ok_or_else(|| {
                Cause::invalid(
                    path,
                    &json!([]),
                    format!("failed to allocate an {family} address: the ServiceCIDRs have none left"),
                )
            })?,
        };
        all.push(ip);
        new.push(ip);
    }
    let list: Vec<Value> = all.iter().map(|ip| json!(ip.to_string())).collect();
    service["spec"]["clusterIP"] = list.first().cloned().unwrap_or(Value::Null);
    service["spec"]["clusterIPs"] = Value::Array(list);
    Ok(new)
}

fn plan_families(ranges: &[IpNet], service: &mut Value) -> Result<Vec<String>, Cause> {
    let name = |address: IpAddr| Family::of(address).to_string();
    let mut served: Vec<String> = Vec::new();
    for net in ranges {
        let family = name(net.addr());
        if !served.contains(&family) {
            served.push(family);
        }
    }
    let mut families: Vec<String> =
        list_at(service, "spec.ipFamilies").iter().filter_map(Value::as_str).map(str::to_owned).collect();
    let given: Vec<IpAddr> = cluster_ips(service).filter_map(|ip| ip.parse().ok()).collect();
    for (index, ip) in given.iter().enumerate() {
        match families.get(index) {
            Some(family) if *family != name(*ip) => {
                return Err(Cause::invalid(
                    format!("spec.clusterIPs[{index}]"),
                    &json!(ip.to_string()),
                    format!("expected an {family} value as indicated by `ipFamilies[{index}]`"),
                ));
            }
            Some(_) => {}
            None => families.push(name(*ip)),
        }
    }
    let policy = str_at(service, "spec.ipFamilyPolicy").map(str::to_owned);
    let policy = policy
        .unwrap_or_else(|| if families.len() > 1 { "RequireDualStack" } else { "SingleStack" }.to_owned());
    if policy == "SingleStack" && families.len() > 1 {
        families.truncate(1);
        // Two families that were handed out before shrink to the first; two that are asked for do not fit.
        if given.len() < 2 {
            return Err(Cause::invalid(
                "spec.ipFamilyPolicy",
                &json!(policy),
                "must be RequireDualStack or PreferDualStack when multiple `ipFamilies` are specified",
            ));
        }
        service["spec"]["clusterIPs"] = json!([given[0].to_string()]);
    }
    // A headless Service without selector is nobody's to serve: its families need no range.
    if let Some(family) = families.iter().find(|family| !served.contains(family) && !is_headless(service)) {
        let place = families.iter().position(|other| other == family).unwrap_or(0);
        let path = format!("spec.ipFamilies[{place}]");
        return Err(Cause::invalid(path, &json!(family), "not configured on this cluster"));
    }
    if families.is_empty() {
        families.extend(served.first().cloned());
    }
    if policy != "SingleStack" && families.len() < 2 {
        families.extend(served.iter().find(|family| !families.contains(family)).cloned());
        if families.len() < 2 && policy == "RequireDualStack" {
            return Err(Cause::invalid(
                "spec.ipFamilyPolicy",
                &json!(policy),
                "this cluster is not configured for dual-stack services",
            ));
        }
    }
    service["spec"]["ipFamilies"] = json!(families);
    service["spec"]["ipFamilyPolicy"] = json!(policy);
    Ok(families)
}

fn is_mine(state: &State, ip: IpAddr, service: &Value) -> bool {
    state.get(state.known.ip_addresses, &(String::new(), ip.to_string())).is_some_and(|address| {
        let parent = &address.value["spec"]["parentRef"];
        parent["resource"] == "services"
            && parent["name"] == service["metadata"]["name"]
            && parent["namespace"] == service["metadata"]["namespace"]
    })
}

fn check_given(state: &State, ip: IpAddr, ranges: &[IpNet], shown: &Value) -> Result<(), Cause> {
    let path = "spec.clusterIPs";
    if !ranges.iter().any(|net| net.contains(&ip)) {
        let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
        let why = format!(
            "failed to allocate IP {ip}: the provided IP ({ip}) is not in the valid range. The range of \
             valid IPs is {}",
            ranges.join(",")
        );
        return Err(Cause::invalid(path, shown, why));
    }
    if state.get(state.known.ip_addresses, &(String::new(), ip.to_string())).is_some() {
        return Err(Cause::invalid(
            path,
            shown,
            format!("failed to allocate IP {ip}: provided IP is already allocated"),
        ));
    }
    Ok(())
}

/// The next free address. The low end of each range is left to those who choose addresses themselves.
fn pick(state: &mut State, ranges: &[IpNet]) -> Option<IpAddr> {
    for net in ranges {
        let (first, last) = bounds(net);
        let size = last.checked_sub(first)?.saturating_add(1);
        let low = (size / 16).clamp(16, 256).min(size.saturating_sub(1));
        let cursor_name = net.to_string();
        let cursor = state.cursors.get(&cursor_name).copied().unwrap_or(low);
        // At most 65,536 candidates: a service range in use is not larger than that.
        for step in 0..size.min(65_536) {
            let offset = (cursor + step) % size;
            let ip = address(net, first + offset);
            if state.get(state.known.ip_addresses, &(String::new(), ip.to_string())).is_none() {
                state.cursors.insert(cursor_name, (offset + 1) % size);
                return Some(ip);
            }
        }
    }
    None
}

/// The first and last usable address as numbers: without network and, for IPv4, broadcast address.
fn bounds(net: &IpNet) -> (u128, u128) {
    match net {
        IpNet::V4(net) => {
            let (first, last) = (u32::from(net.network()), u32::from(net.broadcast()));
            (u128::from(first) + 1, u128::from(last).saturating_sub(1).max(u128::from(first) + 1))
        }
        IpNet::V6(net) => {
            let (first, last) = (u128::from(net.network()), u128::from(net.broadcast()));
            ((first + 1).min(last), last)
        }
    }
}

fn address(net: &IpNet, number: u128) -> IpAddr {
    match net {
        IpNet::V4(_) => IpAddr::V4(u32::try_from(number).unwrap_or(u32::MAX).into()),
        IpNet::V6(_) => IpAddr::V6(number.into()),
    }
}

fn plan_ports(state: &mut State, service: &mut Value, key: &Key) -> Result<(), Vec<Cause>> {
    if !has_node_ports(service) {
        service["spec"].as_object_mut().map(|spec| spec.remove("healthCheckNodePort"));
        return Ok(());
    }
    let mut causes = Vec::new();
    let mut taken: Vec<(u16, String)> = Vec::new();
    let mut ports = list_at(service, "spec.ports").to_vec();
    for (index, port) in ports.iter().enumerate() {
        let wanted = port["nodePort"].as_u64().unwrap_or(0);
        if wanted == 0 {
            continue;
        }
        let path = format!("spec.ports[{index}].nodePort");
        let protocol = port["protocol"].as_str().unwrap_or("TCP").to_owned();
        let Some(number) = u16::try_from(wanted).ok().filter(|number| NODE_PORTS.contains(number)) else {
            causes.push(Cause::invalid(
                path,
                &port["nodePort"],
                "provided port is not in the valid range. The range of valid ports is 30000-32767",
            ));
            continue;
        };
        let id = (number, protocol);
        if state.node_ports.get(&id).is_some_and(|owner| owner != key) || taken.contains(&id) {
            causes.push(Cause::invalid(path, &port["nodePort"], "provided port is already allocated"));
        }
        taken.push(id);
    }
    if !causes.is_empty() {
        return Err(causes);
    }
    for port in &mut ports {
        if port["nodePort"].as_u64().unwrap_or(0) == 0 {
            let protocol = port["protocol"].as_str().unwrap_or("TCP").to_owned();
            let Some(number) = free_port(state, &protocol, &taken) else {
                return Err(vec![Cause::invalid(
                    "spec.ports",
                    &json!("nodePort"),
                    "range is full: no node port is left",
                )]);
            };
            taken.push((number, protocol));
            port["nodePort"] = json!(number);
        }
    }
    service["spec"]["ports"] = Value::Array(ports);
    let health = kind_of(service) == "LoadBalancer" && service["spec"]["externalTrafficPolicy"] == "Local";
    if !health {
        service["spec"].as_object_mut().map(|spec| spec.remove("healthCheckNodePort"));
    } else if service["spec"]["healthCheckNodePort"].as_u64().unwrap_or(0) == 0
        && let Some(number) = free_port(state, "TCP", &taken)
    {
        service["spec"]["healthCheckNodePort"] = json!(number);
    }
    Ok(())
}

fn free_port(state: &mut State, protocol: &str, taken: &[(u16, String)]) -> Option<u16> {
    let (first, size) = (*NODE_PORTS.start(), NODE_PORTS.len());
    let start = state.cursors.get("node-ports").copied().unwrap_or(86) as usize;
    for step in 0..size {
        let offset = u16::try_from((start + step) % size).ok()?;
        let id = (first + offset, protocol.to_owned());
        if !state.node_ports.contains_key(&id) && !taken.contains(&id) {
            state.cursors.insert("node-ports".to_owned(), u128::from(offset) + 1);
            return Some(id.0);
        }
    }
    None
}
