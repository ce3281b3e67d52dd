//! Between the protocol's messages and our types. What comes from the wire is checked here and nowhere else.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use knit_api::kni::v1alpha1 as wire;

use crate::error::{Error, Reason, Result};
use crate::{
    Address, Announced, AttachRequest, Attachment, Block, Dns, HostEnd, InterfaceName, Network, NetworkId,
    NetworkName, Pod, PortMapping, Protocol, Route, SandboxId, Subnet, Topology, Underlay, UnderlayKind,
    UnderlayMode,
};

/// A Network as a message.
#[must_use]
pub fn network_to_wire(network: &Network) -> wire::Network {
    wire::Network {
        name: network.name.to_string(),
        id: network.id.get(),
        topology: network.topology.number(),
        subnets: network
            .subnets
            .iter()
            .map(|s| wire::Subnet {
                family: family(s.cidr.addr()).into(),
                cidr: s.cidr.to_string(),
                gateway: s.gateway.map(|g| g.to_string()).unwrap_or_default(),
            })
            .collect(),
        mtu: network.mtu.map_or(0, u32::from),
        primary: network.primary,
        outside: network.outside,
        cluster_service_ips: texts(&network.cluster_service_ips),
        routes: routes_to_wire(&network.routes),
        blocks: network
            .blocks
            .iter()
            .map(|b| wire::Block {
                node: b.node.clone(),
                node_addresses: texts(&b.node_addresses),
                ipv4: b.ipv4.map(|n| n.to_string()).unwrap_or_default(),
                ipv6: b.ipv6.map(|n| n.to_string()).unwrap_or_default(),
            })
            .collect(),
        parameters: if network.parameters.is_empty() {
            String::new()
        } else {
            serde_json::Value::Object(network.parameters.clone()).to_string()
        },
        router_addresses: texts(&network.router_addresses),
        not_outside: texts(&network.not_outside),
        announced: network
            .announced
            .iter()
            .map(|a| wire::Announced {
                node: a.node.clone(),
                node_addresses: texts(&a.node_addresses),
                addresses: texts(&a.addresses),
                mac: a.mac.to_string(),
            })
            .collect(),
        underlay: network.underlay.as_ref().map(|u| wire::Underlay {
            parent: u.parent.clone(),
            mode: match u.mode {
                UnderlayMode::Bridge => wire::UnderlayMode::Bridge,
                UnderlayMode::Private => wire::UnderlayMode::Private,
                UnderlayMode::Vepa => wire::UnderlayMode::Vepa,
            }
            .into(),
            kind: match u.kind {
                UnderlayKind::Macvlan => wire::UnderlayKind::Macvlan,
                UnderlayKind::Bridge => wire::UnderlayKind::BridgePort,
            }
            .into(),
            duplicate_check_ms: u32::try_from(u.duplicate_check.as_millis()).unwrap_or(u32::MAX),
        }),
    }
}

/// The name of a Network from a message.
///
/// # Errors
/// When it is none; the message names the field.
pub(super) fn network_name(field: &str, text: &str) -> Result<NetworkName> {
    if text.is_empty() {
        return Err(invalid(field, "is empty"));
    }
    NetworkName::new(text).map_err(|error| invalid(field, "is not the name of a Network").because(error))
}

/// A Network from a message.
///
/// # Errors
/// When a field cannot be what it says; the message names it.
pub fn network_from_wire(network: wire::Network) -> Result<Network> {
    let name = network_name("network.name", &network.name)?;
    let parse = |network: wire::Network| -> Result<Network> {
        let topology = match network.topology {
            0 => return Err(invalid("network.topology", "is missing")),
            number => Topology::of_number(number)
                .ok_or_else(|| invalid("network.topology", "is not one that this version knows"))?,
        };
        Ok(Network {
            id: NetworkId::new(network.id)?,
            topology,
            subnets: network
                .subnets
                .iter()
                .map(|s| {
                    Ok(Subnet {
                        cidr: parse_one("subnet.cidr", &s.cidr)?,
                        gateway: match parse_some("subnet.gateway", &s.gateway)? {
                            None if topology.has_router() => {
                                return Err(invalid("subnet.gateway", "is empty"));
                            }
                            gateway => gateway,
                        },
                    })
                })
                .collect::<Result<_>>()?,
            mtu: match network.mtu {
                0 => None,
                mtu => Some(u16::try_from(mtu).map_err(|_| invalid("network.mtu", "is larger than 65535"))?),
            },
            primary: network.primary,
            outside: network.outside,
            not_outside: parse_all("network.not_outside", &network.not_outside)?,
            cluster_service_ips: parse_all("network.cluster_service_ips", &network.cluster_service_ips)?,
            routes: routes_from_wire(&network.routes)?,
            blocks: network
                .blocks
                .iter()
                .map(|b| {
                    Ok(Block {
                        node: b.node.clone(),
                        node_addresses: parse_all("block.node_addresses", &b.node_addresses)?,
                        ipv4: parse_some("block.ipv4", &b.ipv4)?,
                        ipv6: parse_some("block.ipv6", &b.ipv6)?,
                    })
                })
                .collect::<Result<_>>()?,
            router_addresses: parse_all("network.router_addresses", &network.router_addresses)?,
            announced: network
                .announced
                .iter()
                .map(|a| {
                    Ok(Announced {
                        node: a.node.clone(),
                        node_addresses: parse_all("announced.node_addresses", &a.node_addresses)?,
                        addresses: parse_all("announced.addresses", &a.addresses)?,
                        mac: parse_one("announced.mac", &a.mac)?,
                    })
                })
                .collect::<Result<_>>()?,
            underlay: network.underlay.as_ref().map(underlay_from_wire).transpose()?,
            parameters: if network.parameters.is_empty() {
                serde_json::Map::new()
            } else {
                serde_json::from_str(&network.parameters)
                    .map_err(|e| invalid("network.parameters", "is not a JSON object").because(e))?
            },
            name: name.clone(),
        })
    };
    parse(network).map_err(|e| e.on(&name))
}

fn underlay_from_wire(underlay: &wire::Underlay) -> Result<Underlay> {
    if underlay.parent.is_empty() {
        return Err(invalid("underlay.parent", "is empty"));
    }
    Ok(Underlay {
        parent: underlay.parent.clone(),
        mode: match underlay.mode() {
            wire::UnderlayMode::Bridge => UnderlayMode::Bridge,
            wire::UnderlayMode::Private => UnderlayMode::Private,
            wire::UnderlayMode::Vepa => UnderlayMode::Vepa,
            wire::UnderlayMode::Unspecified => return Err(invalid("underlay.mode", "is missing")),
        },
        kind: match underlay.kind() {
            wire::UnderlayKind::Macvlan | wire::UnderlayKind::Unspecified => UnderlayKind::Macvlan,
            wire::UnderlayKind::BridgePort => UnderlayKind::Bridge,
        },
        duplicate_check: Duration::from_millis(underlay.duplicate_check_ms.into()),
    })
}

/// An attachment as a message.
#[must_use]
pub fn attachment_to_wire(attachment: &Attachment) -> wire::Attachment {
    wire::Attachment {
        sandbox_id: attachment.pod.sandbox.to_string(),
        network: attachment.network.to_string(),
        interface: attachment.interface.to_string(),
        addresses: addresses_to_wire(&attachment.addresses),
        mac: attachment.mac.to_string(),
        mtu: attachment.mtu,
        routes: routes_to_wire(&attachment.routes),
        dns: Some(dns_to_wire(&attachment.dns)),
        host_interface: attachment.host.name.clone(),
        host_index: attachment.host.index,
        host_netns_path: attachment
            .host
            .netns_path
            .as_ref()
            .map(|p| p.display().to_string())
            .unwrap_or_default(),
        host_netns_inode: attachment.host.netns_inode,
        pod_netns_inode: attachment.pod_netns_inode,
        ports: ports_to_wire(&attachment.ports),
        pod: Some(pod_to_wire(&attachment.pod, None)),
    }
}

/// An attachment from a message.
///
/// # Errors
/// When a field cannot be what it says; the message names it.
pub fn attachment_from_wire(attachment: wire::Attachment) -> Result<Attachment> {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let pod = attachment.pod.as_ref();
    Ok(Attachment {
        pod: Pod {
            sandbox: SandboxId::new(attachment.sandbox_id)?,
            namespace: pod.and_then(|p| some(&p.namespace)),
            name: pod.and_then(|p| some(&p.name)),
            uid: pod.and_then(|p| some(&p.uid)),
        },
        interface: InterfaceName::new(attachment.interface)?,
        addresses: addresses_from_wire(&attachment.addresses)?,
        mac: parse_one("attachment.mac", &attachment.mac)?,
        mtu: attachment.mtu,
        routes: routes_from_wire(&attachment.routes)?,
        dns: dns_from_wire(attachment.dns),
        host: HostEnd {
            name: attachment.host_interface,
            index: attachment.host_index,
            netns_path: some(&attachment.host_netns_path).map(PathBuf::from),
            netns_inode: attachment.host_netns_inode,
        },
        pod_netns_inode: attachment.pod_netns_inode,
        ports: ports_from_wire(&attachment.ports)?,
        network: network_name("attachment.network", &attachment.network)?,
    })
}

pub(super) fn pod_to_wire(pod: &Pod, netns: Option<&Path>) -> wire::Pod {
    wire::Pod {
        namespace: pod.namespace.clone().unwrap_or_default(),
        name: pod.name.clone().unwrap_or_default(),
        uid: pod.uid.clone().unwrap_or_default(),
        sandbox_id: pod.sandbox.to_string(),
        netns_path: netns.map(|p| p.display().to_string()).unwrap_or_default(),
        ..Default::default()
    }
}

pub(super) fn pod_from_wire(pod: Option<wire::Pod>) -> Result<(Pod, PathBuf)> {
    let pod = pod.ok_or_else(|| invalid("pod", "is missing"))?;
    let some = |text: String| (!text.is_empty()).then_some(text);
    let netns = PathBuf::from(pod.netns_path);
    let pod = Pod {
        sandbox: SandboxId::new(pod.sandbox_id)?,
        namespace: some(pod.namespace),
        name: some(pod.name),
        uid: some(pod.uid),
    };
    Ok((pod, netns))
}

pub(super) fn request_to_wire(request: &AttachRequest) -> wire::AttachmentRequest {
    wire::AttachmentRequest {
        network: request.network.to_string(),
        interface: request.interface.to_string(),
        addresses: addresses_to_wire(&request.addresses),
        mac: request.mac.map(|m| m.to_string()).unwrap_or_default(),
        default_route: request.default_route,
        ports: ports_to_wire(&request.ports),
        routes: routes_to_wire(&request.routes),
        dns: Some(dns_to_wire(&request.dns)),
    }
}

pub(super) fn request_from_wire(
    pod: Pod,
    netns: PathBuf,
    request: wire::AttachmentRequest,
) -> Result<AttachRequest> {
    if netns.as_os_str().is_empty() {
        return Err(invalid("pod.netns_path", "is empty"));
    }
    Ok(AttachRequest {
        pod,
        netns,
        interface: InterfaceName::new(request.interface)?,
        addresses: addresses_from_wire(&request.addresses)?,
        mac: parse_some("attachment.mac", &request.mac)?,
        default_route: request.default_route,
        ports: ports_from_wire(&request.ports)?,
        routes: routes_from_wire(&request.routes)?,
        dns: dns_from_wire(request.dns),
        network: network_name("attachment.network", &request.network)?,
    })
}

fn ports_to_wire(ports: &[PortMapping]) -> Vec<wire::PortMapping> {
    let port = |p: &PortMapping| wire::PortMapping {
        protocol: match p.protocol {
            Protocol::Tcp => wire::Protocol::Tcp,
            Protocol::Udp => wire::Protocol::Udp,
            Protocol::Sctp => wire::Protocol::Sctp,
        }
        .into(),
        host_port: p.host_port.into(),
        container_port: p.container_port.into(),
        host_ip: p.host_ip.map(|ip| ip.to_string()).unwrap_or_default(),
    };
    ports.iter().map(port).collect()
}

fn ports_from_wire(ports: &[wire::PortMapping]) -> Result<Vec<PortMapping>> {
    let number = |what, n| {
        u16::try_from(n).ok().filter(|n| *n > 0).ok_or_else(|| invalid(what, "is not a valid port"))
    };
    let port = |p: &wire::PortMapping| {
        Ok(PortMapping {
            protocol: match p.protocol() {
                wire::Protocol::Tcp => Protocol::Tcp,
                wire::Protocol::Udp => Protocol::Udp,
                wire::Protocol::Sctp => Protocol::Sctp,
                wire::Protocol::Unspecified => return Err(invalid("port.protocol", "is missing")),
            },
            host_port: number("port.host_port", p.host_port)?,
            container_port: number("port.container_port", p.container_port)?,
            host_ip: parse_some("port.host_ip", &p.host_ip)?,
        })
    };
    ports.iter().map(port).collect()
}

fn addresses_to_wire(addresses: &[Address]) -> Vec<wire::Address> {
    let address = |a: &Address| wire::Address {
        family: family(a.net.addr()).into(),
        ip: a.net.addr().to_string(),
        prefix: a.net.prefix_len().into(),
        gateway: a.gateway.map(|g| g.to_string()).unwrap_or_default(),
    };
    addresses.iter().map(address).collect()
}

fn addresses_from_wire(addresses: &[wire::Address]) -> Result<Vec<Address>> {
    let address = |a: &wire::Address| {
        let ip: IpAddr = parse_one("address.ip", &a.ip)?;
        let net = u8::try_from(a.prefix).ok().and_then(|prefix| IpNet::new(ip, prefix).ok());
        Ok(Address {
            net: net.ok_or_else(|| invalid("address.prefix", "does not match the family"))?,
            gateway: parse_some("address.gateway", &a.gateway)?,
        })
    };
    addresses.iter().map(address).collect()
}

fn routes_to_wire(routes: &[Route]) -> Vec<wire::Route> {
    let route = |r: &Route| wire::Route {
        destination: r.destination.to_string(),
        via: r.via.map(|v| v.to_string()).unwrap_or_default(),
    };
    routes.iter().map(route).collect()
}

fn routes_from_wire(routes: &[wire::Route]) -> Result<Vec<Route>> {
    let route = |r: &wire::Route| {
        Ok(Route {
            destination: parse_one("route.destination", &r.destination)?,
            via: parse_some("route.via", &r.via)?,
        })
    };
    routes.iter().map(route).collect()
}

fn dns_to_wire(dns: &Dns) -> wire::Dns {
    wire::Dns { servers: dns.servers.clone(), searches: dns.searches.clone(), options: dns.options.clone() }
}

fn dns_from_wire(dns: Option<wire::Dns>) -> Dns {
    let dns = dns.unwrap_or_default();
    Dns { servers: dns.servers, searches: dns.searches, options: dns.options }
}

fn family(address: IpAddr) -> wire::Family {
    if address.is_ipv4() { wire::Family::Ipv4 } else { wire::Family::Ipv6 }
}

fn texts<T: ToString>(values: &[T]) -> Vec<String> {
    values.iter().map(ToString::to_string).collect()
}

fn parse_one<T: FromStr>(field: &str, text: &str) -> Result<T> {
    text.parse().map_err(|_| invalid(field, &format!("{text:?} is not valid")))
}

fn parse_some<T: FromStr>(field: &str, text: &str) -> Result<Option<T>> {
    if text.is_empty() { Ok(None) } else { parse_one(field, text).map(Some) }
}

fn parse_all<T: FromStr>(field: &str, texts: &[String]) -> Result<Vec<T>> {
    texts.iter().map(|text| parse_one(field, text)).collect()
}

pub(super) fn invalid(field: &str, what: &str) -> Error {
    Error::new(Reason::Invalid, format!("{field} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_network_is_on_survives_the_wire_and_an_older_agent_means_macvlan() {
        for (kind, mode) in
            [(UnderlayKind::Macvlan, UnderlayMode::Vepa), (UnderlayKind::Bridge, UnderlayMode::Private)]
        {
            let duplicate_check = Duration::from_millis(200);
            let underlay = Underlay { parent: "br0".into(), mode, kind, duplicate_check };
            let network = Network {
                name: "office".into(),
                id: NetworkId::new(7).expect("a number"),
                topology: Topology::Underlay,
                subnets: vec![Subnet { cidr: "10.9.0.0/24".parse().expect("a range"), gateway: None }],
                mtu: None,
                primary: false,
                outside: false,
                not_outside: Vec::new(),
                cluster_service_ips: Vec::new(),
                routes: Vec::new(),
                blocks: Vec::new(),
                router_addresses: Vec::new(),
                announced: Vec::new(),
                underlay: Some(underlay),
                parameters: serde_json::Map::default(),
            };
            let message = network_to_wire(&network);
            assert_eq!(network_from_wire(message.clone()).expect("a Network"), network);
            let mut older = message.underlay.expect("underlay");
            (older.kind, older.duplicate_check_ms) = (0, 0);
            let read = underlay_from_wire(&older).expect("underlay");
            assert_eq!((read.kind, read.duplicate_check), (UnderlayKind::Macvlan, Duration::ZERO));
        }
    }
}
