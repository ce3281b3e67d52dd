//! What 10,000 services with 5 endpoints each cost, fed by Kubernetes objects that are dropped as they are
//! read (rule 7).
//!
//! A test binary of its own, so that nothing else is in the process.

use std::time::Instant;

use knit_proxy::kubernetes::Kubernetes;
use knit_proxy::model::NodeInfo;
use knit_proxy::source::Event;
use knit_proxy::view::{View, ViewConfig};

const SERVICES: u32 = 10_000;

fn service(n: u32) -> serde_json::Value {
    serde_json::json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": format!("service-{n}"), "namespace": format!("namespace-{}", n % 50),
            "creationTimestamp": "2026-01-01T00:00:00Z", "uid": format!("00000000-0000-0000-0000-{n:012}"),
            "labels": { "app": format!("app-{n}") },
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": address(0x0a60_0000, n), "clusterIPs": [address(0x0a60_0000,
                n)],
            "ipFamilies": ["IPv4"], "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": { "app": format!("app-{n}") },
            "ports": [{ "name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080 }],
        },
    })
}

fn slice(n: u32, first: u32) -> serde_json::Value {
    let endpoints: Vec<_> = (0..5)
        .map(|i| {
            serde_json::json!({
                "addresses": [address(0x0af4_0000, first + n * 5 + i)],
                "conditions": { "ready": true, "serving": true, "terminating": false },
                "nodeName": format!("node-{}", (n + i) % 100), "zone": format!("zone-{}", i % 3),
                "targetRef": { "kind": "Pod", "name": format!("pod-{n}-{i}"), "namespace": "ns" },
            })
        })
        .collect();
    serde_json::json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("service-{n}-abcde"), "namespace": format!("namespace-{}", n % 50),
            "labels": { "kubernetes.io/service-name": format!("service-{n}") },
        },
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{ "name": "http", "port": 8080, "protocol": "TCP" }],
    })
}

fn address(base: u32, n: u32) -> String {
    std::net::Ipv4Addr::from(base + n).to_string()
}

/// Resident memory of this process in KiB, where the system tells.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?.split_whitespace().next()?.parse().ok()
}

#[test]
fn rule_7_ten_thousand_services_fit_in_60_mib() {
    let mut kubernetes = Kubernetes::new();
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("node-1"));
    let start = Instant::now();
    for n in 0..SERVICES {
        let object = serde_json::from_value(service(n)).expect("a Service");
        let Event::SetService(service) = kubernetes.service(&object).event else { panic!("ignored") };
        view.set_service(*service);
        let object = serde_json::from_value(slice(n, 0)).expect("an EndpointSlice");
        let Event::SetGroup(group) = kubernetes.slice(&object).event else { panic!("ignored") };
        view.set_group(*group);
    }
    println!("read {SERVICES} services: {:?}", start.elapsed());
    let start = Instant::now();
    assert_eq!(view.take_changes().ports.len(), SERVICES as usize);
    println!("resolved: {:?}", start.elapsed());

    let object = serde_json::from_value(slice(7, 1)).expect("an EndpointSlice");
    let start = Instant::now();
    let Event::SetGroup(group) = kubernetes.slice(&object).event else { panic!("ignored") };
    view.set_group(*group);
    assert_eq!(view.take_changes().ports.len(), 1);
    println!("one slice changed: {:?}", start.elapsed());

    let Some(kib) = resident_kib() else {
        println!("memory is not checked: this system has no /proc/self/status");
        return;
    };
    println!("resident: {} MiB", kib / 1024);
    assert!(kib < 60 * 1024, "{kib} KiB resident");
}
