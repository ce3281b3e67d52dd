//! Between CNI's words and the core's.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;

use knit_cni::protocol::Request;
use knit_cni::{CniError, CniResult, NetworkConfig, code};
use knit_runtime::{Dns, InterfaceName, Pod, PortMapping, Protocol, SandboxId};

use super::annotation::{self, parse_address};
use crate::error::{Error, Reason};
use crate::pipeline::Attached;
use crate::request::{Door, Main, MainInterface, PodRequest, Start, Wishes};

/// The sandbox of a call.
pub(super) fn sandbox(request: &Request) -> Result<SandboxId, CniError> {
    SandboxId::new(request.container_id.as_str())
        .map_err(|e| CniError::new(code::INVALID_ENVIRONMENT, format!("CNI_CONTAINERID: {e}")))
}

/// The interface of a call.
pub(super) fn interface(request: &Request) -> Result<InterfaceName, CniError> {
    InterfaceName::new(request.ifname.as_str())
        .map_err(|e| CniError::new(code::INVALID_ENVIRONMENT, format!("CNI_IFNAME: {e}")))
}

/// An ADD as the core takes it.
pub(super) fn pod_request(request: Request) -> Result<PodRequest, CniError> {
    let sandbox = sandbox(&request)?;
    let interface = interface(&request)?;
    let netns = PathBuf::from(&request.netns);
    if !netns.is_absolute() {
        let msg = format!("CNI_NETNS {:?} is not an absolute path", request.netns);
        return Err(CniError::new(code::INVALID_ENVIRONMENT, msg));
    }
    if request.config.prev_result.is_some() {
        let msg = "the configuration has a plugin before knit-cni: put knit-cni first in the list";
        return Err(CniError::new(code::INVALID_CONFIG, msg));
    }
    let NetworkConfig { name, runtime_config, .. } = request.config;
    if runtime_config.bandwidth.is_some() {
        tracing::warn!(%sandbox, "capability bandwidth is not supported: the pod's bandwidth is not limited");
    }
    let (namespace, pod_name) = match (request.args.pod_namespace, request.args.pod_name) {
        (Some(namespace), Some(name)) => (Some(namespace), Some(name)),
        (None, None) => (None, None),
        _ => {
            let msg = "CNI_ARGS has only one of K8S_POD_NAMESPACE and K8S_POD_NAME: set both or neither";
            return Err(CniError::new(code::INVALID_ENVIRONMENT, msg));
        }
    };
    let invalid = |what: &str, problem: String| {
        CniError::new(code::INVALID_CONFIG, format!("runtimeConfig.{what}: {problem}"))
    };
    let addresses: Vec<IpAddr> = runtime_config
        .ips
        .iter()
        .map(|ip| parse_address(ip).map_err(|e| invalid("ips", e)))
        .collect::<Result<_, _>>()?;
    let mac = runtime_config.mac.filter(|mac| !mac.is_empty());
    let mac = mac.map(|mac| mac.parse().map_err(|e| invalid("mac", format!("{e}")))).transpose()?;
    let ports = runtime_config.port_mappings.iter().filter(|p| p.host_port != 0);
    let ports = ports.map(|p| port(p).map_err(|e| invalid("portMappings", e))).collect::<Result<_, _>>()?;
    let dns = runtime_config.dns.unwrap_or_default();
    Ok(PodRequest {
        pod: Pod { sandbox, namespace, name: pod_name, uid: request.args.pod_uid },
        start: Some(Start {
            netns,
            main: Main::Ours(MainInterface {
                interface,
                ports,
                addresses,
                mac,
                dns: Dns { servers: dns.servers, searches: dns.searches, options: dns.options },
            }),
        }),
        wishes: runtime_config.pod_annotations.as_ref().map_or(Wishes::AsThePodSays, annotation::wishes),
        claims: Vec::new(),
        door: Door::Cni(name),
    })
}

fn port(mapping: &knit_cni::PortMapping) -> Result<PortMapping, String> {
    let protocol = match mapping.protocol.to_ascii_lowercase().as_str() {
        "" | "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        other => return Err(format!("protocol {other:?} must be tcp, udp or sctp")),
    };
    if mapping.container_port == 0 {
        return Err(format!("hostPort {} maps to containerPort 0: set a port", mapping.host_port));
    }
    let host_ip = match mapping.host_ip.as_str() {
        "" | "0.0.0.0" | "::" => None,
        text => Some(text.parse().map_err(|_| format!("hostIP {text:?} is not an IP address"))?),
    };
    Ok(PortMapping {
        protocol,
        host_port: mapping.host_port,
        container_port: mapping.container_port,
        host_ip,
    })
}

/// The sandboxes that GC keeps.
pub(super) fn kept(config: &NetworkConfig) -> Result<BTreeSet<String>, CniError> {
    match &config.valid_attachments {
        Some(list) => Ok(list.iter().map(|key| key.container_id.clone()).collect()),
        None => {
            let msg = "GC without cni.dev/valid-attachments would remove everything: list what is in use";
            Err(CniError::new(code::INVALID_CONFIG, msg))
        }
    }
}

/// The answer to an ADD.
pub(super) fn result(attached: &Attached) -> CniResult {
    let mut result = CniResult::default();
    let netns = attached.netns.display().to_string();
    for (index, attachment) in attached.attachments.iter().enumerate() {
        result.interfaces.push(knit_cni::Interface {
            name: attachment.interface.to_string(),
            mac: attachment.mac.to_string(),
            mtu: Some(attachment.mtu).filter(|mtu| *mtu > 0),
            sandbox: Some(netns.clone()),
        });
        for address in &attachment.addresses {
            result.ips.push(knit_cni::Ip {
                address: address.net,
                gateway: address.gateway,
                interface: Some(index),
            });
        }
        let routes = attachment.routes.iter();
        result.routes.extend(routes.map(|r| knit_cni::Route { dst: r.destination, gw: r.via }));
    }
    for attachment in attached.attachments.iter().filter(|a| !a.host.name.is_empty()) {
        result.interfaces.push(knit_cni::Interface {
            name: attachment.host.name.clone(),
            sandbox: attachment.host.netns_path.as_ref().map(|p| p.display().to_string()),
            ..knit_cni::Interface::default()
        });
    }
    if let Some(main) = attached.attachments.first() {
        result.dns = knit_cni::Dns {
            nameservers: main.dns.servers.clone(),
            search: main.dns.searches.clone(),
            options: main.dns.options.clone(),
        };
    }
    result
}

/// Whether what a CHECK gives back is what the pod has.
pub(super) fn check_previous(attached: &Attached, previous: &serde_json::Value) -> Result<(), CniError> {
    let previous = CniResult::from_json(previous).map_err(|error| {
        CniError::new(code::INVALID_CONFIG, "prevResult is not a valid CNI result")
            .with_details(error.to_string())
    })?;
    for address in attached.attachments.iter().take(1).flat_map(|a| &a.addresses) {
        if !previous.ips.iter().any(|ip| ip.address.addr() == address.net.addr()) {
            let msg = format!("the pod has address {}, which is not in prevResult", address.net.addr());
            return Err(CniError::new(code::DAMAGED, msg));
        }
    }
    Ok(())
}

/// An error of the core in CNI's words.
pub(super) fn cni_error(error: &Error) -> CniError {
    let code = match error.reason {
        Reason::Invalid => code::INVALID_CONFIG,
        Reason::NotAllowed => code::NOT_ALLOWED,
        Reason::Refused => code::REFUSED,
        Reason::NotReady | Reason::AddressesExhausted | Reason::AddressInUse => code::TRY_AGAIN,
        Reason::UnknownSandbox => code::UNKNOWN_CONTAINER,
        Reason::Damaged => code::DAMAGED,
        Reason::AttachFailed => code::ATTACH_FAILED,
        Reason::Internal => code::INTERNAL,
    };
    CniError::new(code, error.chain())
}
