//! Services and EndpointSlices as a cluster has them.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

/// The first addresses of 10.96.0.0/12 are an API server's own.
const SERVICE_RANGE: u32 = 0x0a60_0100;
const POD_RANGE: u32 = 0x0a80_0000;

pub fn cluster_ip(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(SERVICE_RANGE + 1 + number)
}

/// Which endpoints a service has.
#[derive(Clone, Copy)]
pub enum Endpoints {
    /// This many, nobody else's.
    Own(u32),
    /// The same few for all, which are here.
    Shared(u32),
}

impl Endpoints {
    pub fn addresses(self, service: u32) -> Vec<Ipv4Addr> {
        match self {
            Self::Own(count) => (0..count).map(|i| Ipv4Addr::from(POD_RANGE + service * count + i)).collect(),
            Self::Shared(count) => (0..count).map(|i| Ipv4Addr::from(0x0a01_0001 + i)).collect(),
        }
    }
}

pub fn service(number: u32, protocol: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": format!("service-{number}"), "namespace": format!("namespace-{}", number % 50),
            "creationTimestamp": "2026-01-01T00:00:00Z",
                "uid": format!("00000000-0000-0000-0000-{number:012}"),
            "labels": { "app": format!("app-{number}") },
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": cluster_ip(number), "clusterIPs": [cluster_ip(number)],
            "ipFamilies": ["IPv4"], "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": { "app": format!("app-{number}") },
            "ports": [{ "name": "http", "port": 80, "protocol": protocol, "targetPort": 8080 }],
        },
    })
}

pub fn slice(number: u32, protocol: &str, addresses: &[Ipv4Addr]) -> Value {
    let endpoint = |(index, address): (usize, &Ipv4Addr)| {
        json!({
            "addresses": [address],
            "conditions": { "ready": true, "serving": true, "terminating": false },
            "nodeName": format!("node-{}", index % 100), "zone": format!("zone-{}", index % 3),
            "targetRef": { "kind": "Pod", "name": format!("pod-{number}-{index}"), "namespace": "ns" },
        })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("service-{number}-abcde"), "namespace": format!("namespace-{}", number % 50),
            "labels": { "kubernetes.io/service-name": format!("service-{number}") },
        },
        "addressType": "IPv4",
        "endpoints": addresses.iter().enumerate().map(endpoint).collect::<Vec<_>>(),
        "ports": [{ "name": "http", "port": 8080, "protocol": protocol }],
    })
}
