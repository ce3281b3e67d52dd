//! A case: services, endpoints, and what becomes of packets.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use knit_proxy::model::Protocol;
use serde::Deserialize;

/// One case: a state, flows through it, and more steps of the same.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Case {
    /// What it is about.
    pub name: String,
    /// Which rules of a service proxy it proves.
    pub rules: Vec<u8>,
    /// The settings of the proxy.
    #[serde(default)]
    pub config: Config,
    /// What is there, and what packets do.
    #[serde(flatten)]
    pub start: Step,
    /// What changes after that, step by step.
    #[serde(default)]
    pub then: Vec<Step>,
}

/// The settings of the proxy under test.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Config {
    /// How pods are recognised.
    pub pods: Pods,
    /// Masquerade all traffic to cluster IPs.
    pub masquerade_all: bool,
    /// Where node ports answer.
    pub node_ports: NodePorts,
    /// The ranges of service addresses.
    pub service_ranges: Vec<IpNet>,
    /// Service addresses to leave alone.
    pub exempt: Vec<IpAddr>,
}

/// How pods are recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub enum Pods {
    /// By the range of all pods.
    #[default]
    ClusterRange,
    /// By the range of this node's pods.
    NodeRange,
    /// By the first letters of their interface.
    InterfacePrefix,
    /// By the bridge they are on.
    Bridge,
    /// Not at all.
    Unknown,
}

/// Where node ports answer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub enum NodePorts {
    /// On the node's first address of each family.
    #[default]
    Primary,
    /// On all of its addresses.
    All,
    /// On those in these ranges.
    Ranges(Vec<IpNet>),
}

/// What is there, and what packets do then.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct Step {
    /// All Services, from now on; none: those of the step before.
    pub services: Option<Vec<Service>>,
    /// All EndpointSlices, from now on; none: those of the step before.
    pub endpoint_slices: Option<Vec<EndpointSlice>>,
    /// What packets do.
    pub flows: Vec<Flow>,
}

/// One row: who sends what where, and what becomes of it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Flow {
    /// The host that connects: `pod-a`, `pod-b` (on this node), `remote-a`, `remote-b` (pods elsewhere),
    /// `outside`, `node`.
    pub from: String,
    /// Where to: `10.96.0.1:80/TCP`.
    pub to: Destination,
    /// What becomes of it: `reject`, `drop`, or the endpoints that may answer, all of which must.
    pub gets: Gets,
    /// Whether the endpoint sees another source address than the client's; none: it does not matter.
    pub masqueraded: Option<bool>,
    /// All flows of a case with the same word here reach the same endpoint.
    pub sticky: Option<String>,
}

/// An address, a port and a protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Destination {
    /// Address and port.
    pub socket: SocketAddr,
    /// The protocol: TCP or UDP.
    pub protocol: Protocol,
}

/// What becomes of a flow.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Gets {
    /// One of these answers; over several attempts, each does.
    Endpoints(Vec<SocketAddr>),
    /// The client is told at once that nobody is there.
    Reject,
    /// Nothing comes back.
    Drop,
}

/// A case that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read a case")]
pub struct ReadError(#[from] serde_saphyr::Error);

/// Reads a list of cases.
///
/// # Errors
/// If it is not YAML, or a field is unknown or wrong; the error says where.
pub fn read(yaml: &str) -> Result<Vec<Case>, ReadError> {
    Ok(serde_saphyr::from_str(yaml)?)
}

impl TryFrom<String> for Destination {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not ADDRESS:PORT/PROTOCOL, such as 10.96.0.1:80/TCP");
        let (socket, protocol) = text.split_once('/').ok_or_else(wrong)?;
        let protocol = match protocol {
            "TCP" => Protocol::Tcp,
            "UDP" => Protocol::Udp,
            _ => return Err(wrong()),
        };
        Ok(Self { socket: socket.parse().map_err(|_| wrong())?, protocol })
    }
}

impl TryFrom<String> for Gets {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = |part: &str| format!("{part:?} is neither reject nor drop nor ADDRESS:PORT");
        match text.as_str() {
            "reject" => Ok(Self::Reject),
            "drop" => Ok(Self::Drop),
            _ => text
                .split_whitespace()
                .map(|part| part.parse().map_err(|_| wrong(part)))
                .collect::<Result<_, _>>()
                .map(Self::Endpoints),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.socket, self.protocol)
    }
}

impl fmt::Display for Gets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reject => f.write_str("reject"),
            Self::Drop => f.write_str("drop"),
            Self::Endpoints(all) => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                f.write_str(&all.join(" or "))
            }
        }
    }
}
