//! Cluster services that a Network reaches over its uplink, as what they lead to (rule 38).

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use super::parse_ip;
use crate::model::{Alias, AliasEndpoint, Protocol};

/// The cluster IPs of a Service.
#[must_use]
pub fn cluster_ips(service: &Service) -> Vec<IpAddr> {
    let spec = service.spec.as_ref();
    let listed = spec.and_then(|s| s.cluster_ips.as_ref()).into_iter().flatten();
    let mut all: Vec<IpAddr> = listed.filter_map(|ip| parse_ip(ip)).collect();
    all.extend(spec.and_then(|s| parse_ip(s.cluster_ip.as_deref()?)));
    all.sort_unstable();
    all.dedup();
    all
}

/// Each address and port of a Service, with its ready endpoints of the same family; `slices` are the
/// Service's own.
#[must_use]
pub fn aliases(service: &Service, slices: &[&EndpointSlice]) -> Vec<Alias> {
    let ports = service.spec.iter().flat_map(|s| s.ports.iter().flatten());
    let mut all = Vec::new();
    for port in ports {
        let protocol = Protocol::parse(port.protocol.as_deref().unwrap_or("TCP"));
        let (Some(protocol), Ok(number)) = (protocol, u16::try_from(port.port)) else { continue };
        for address in cluster_ips(service) {
            let mut endpoints: Vec<AliasEndpoint> = Vec::new();
            for slice in slices {
                let same = slice.ports.iter().flatten().find(|p| {
                    p.name.as_deref().unwrap_or_default() == port.name.as_deref().unwrap_or_default()
                        && p.protocol.as_deref().unwrap_or("TCP") == protocol.as_str()
                });
                let Some(there) = same.and_then(|p| u16::try_from(p.port?).ok()) else { continue };
                let ready = slice
                    .endpoints
                    .iter()
                    .filter(|e| e.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true));
                let found = ready.filter_map(|e| parse_ip(e.addresses.first()?));
                let family = found.filter(|a| a.is_ipv4() == address.is_ipv4());
                endpoints.extend(family.map(|address| AliasEndpoint { address, port: there }));
            }
            endpoints.sort_unstable();
            endpoints.dedup();
            all.push(Alias { address, protocol, port: number, endpoints: endpoints.into() });
        }
    }
    all
}
