//! One thing that policies dropped, as people and scripts see it.

use std::fmt;
use std::net::IpAddr;

use jiff::Timestamp;
use knit_kernel::nflog::{Headers, Transport};
use knit_policy::cluster::{AddressOwner, Cluster};
use knit_policy::model::{Direction, Name, Pod, Protocol, Traffic};
use knit_policy::verdict::{Flow, Reason, State};
use knit_policy_nft::log::Why;
use knit_types::NetworkName;
use serde::{Deserialize, Serialize};

/// Packets that policies dropped: all between the same two ends, to the same port.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Dropped {
    /// When the first of them was seen.
    pub first: Timestamp,
    /// When the last of them was seen.
    pub last: Timestamp,
    /// How many were seen. The kernel passes on a few a second of each pod, so there may have been more.
    pub seen: u64,
    /// The Network.
    pub network: NetworkName,
    /// Whose policies: `egress` for those of the sender, `ingress` for those of the receiver; `cut` for a
    /// connection that was allowed before.
    pub direction: String,
    /// The sender.
    pub from: End,
    /// The receiver.
    pub to: End,
    /// `TCP`, `UDP`, `SCTP`, `ICMP`, `ICMPv6`, or a number.
    pub protocol: String,
    /// The port of the receiver, where there are ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The policies that decided; none if they allow it by now.
    pub policies: Vec<String>,
    /// Why, in words.
    pub reason: String,
}

/// One end of a connection.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct End {
    /// `NAMESPACE/POD` or `node/NAME`, if that is known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its address.
    pub address: IpAddr,
}

/// A packet with names, and the pod whose policies dropped it.
#[derive(Clone, Debug)]
pub struct Named {
    /// What was dropped.
    pub dropped: Dropped,
    /// The pod whose policies decided; none if it is gone, or either side may be the cause.
    pub subject: Option<Subject>,
}

/// The pod whose policies dropped something.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Subject {
    /// Its namespace.
    pub namespace: Name,
    /// The pod's name.
    pub name: Name,
    /// Tells it from others of that name.
    pub uid: Name,
}

impl Named {
    /// Gives a packet its names, by what is known at this moment.
    #[must_use]
    pub fn new(
        cluster: &Cluster,
        network: &NetworkName,
        why: Why,
        headers: &Headers,
        now: Timestamp,
    ) -> Self {
        let (source, destination) = (headers.source, headers.destination);
        let (from, sender) = end(cluster, network, source);
        let (to, receiver) = end(cluster, network, destination);
        let state = State::New;
        let traffic = traffic(headers.transport);
        let flow = Flow { network: network.as_str().into(), source, destination, traffic, state };
        let verdict = cluster.judge(&flow);
        let (direction, side, subject) = match why {
            Why::Denied(Direction::Egress) => ("egress", &verdict.egress, sender),
            Why::Denied(Direction::Ingress) => ("ingress", &verdict.ingress, receiver),
            // Its packets may go either way, so the ends may be the wrong way round: nobody is accused.
            Why::Cut if verdict.egress.allowed => ("cut", &verdict.ingress, None),
            Why::Cut => ("cut", &verdict.egress, None),
        };
        let policies = match &side.reason {
            _ if side.allowed => Vec::new(),
            Reason::Rule(rule) => vec![rule.policy.to_string()],
            Reason::Isolated(all) => all.iter().map(ToString::to_string).collect(),
            _ => Vec::new(),
        };
        let reason = match (why, side.allowed) {
            (Why::Cut, _) => "the connection was allowed before, and policies deny it now".to_owned(),
            (_, true) => "allowed by now: policies, labels or addresses have changed since".to_owned(),
            (_, false) => side.reason.to_string(),
        };
        let dropped = Dropped {
            first: now,
            last: now,
            seen: 1,
            network: network.to_owned(),
            direction: direction.to_owned(),
            from,
            to,
            protocol: protocol(headers.transport),
            port: headers.transport.destination_port(),
            policies,
            reason,
        };
        Self { dropped, subject: subject.map(|pod| Subject::of(&pod)) }
    }
}

fn end(cluster: &Cluster, network: &NetworkName, address: IpAddr) -> (End, Option<std::sync::Arc<Pod>>) {
    match cluster.owner(network, address) {
        AddressOwner::Pod(pod) => (End { name: Some(pod.key.to_string()), address }, Some(pod)),
        AddressOwner::Node(node) => (End { name: Some(format!("node/{}", node.name)), address }, None),
        AddressOwner::Nobody => (End { name: None, address }, None),
    }
}

fn traffic(transport: Transport) -> Traffic {
    match transport {
        Transport::Ports { protocol: 6, destination, .. } => Traffic::Port(Protocol::Tcp, destination),
        Transport::Ports { protocol: 17, destination, .. } => Traffic::Port(Protocol::Udp, destination),
        Transport::Ports { protocol: 132, destination, .. } => Traffic::Port(Protocol::Sctp, destination),
        Transport::Icmp { protocol: 58, kind, .. } => Traffic::Icmpv6(kind),
        Transport::Ports { .. } | Transport::Icmp { .. } | Transport::Other { .. } => Traffic::Other,
    }
}

fn protocol(transport: Transport) -> String {
    match transport.protocol() {
        1 => "ICMP".to_owned(),
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        58 => "ICMPv6".to_owned(),
        132 => "SCTP".to_owned(),
        other => other.to_string(),
    }
}

// === impl Subject ===

impl Subject {
    fn of(pod: &Pod) -> Self {
        Self { namespace: pod.key.namespace.clone(), name: pod.key.name.clone(), uid: pod.uid.clone() }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

// === impl Dropped, End ===

impl Dropped {
    /// Protocol and port, as people write them.
    #[must_use]
    pub fn service(&self) -> String {
        self.port.map_or_else(|| self.protocol.clone(), |port| format!("{} {port}", self.protocol))
    }

    /// Whether it is the same connection, but for the port of the sender.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.from == other.from
            && self.to == other.to
            && self.port == other.port
            && self.direction == other.direction
            && self.network == other.network
            && self.protocol == other.protocol
    }

    /// What is said on the pod.
    #[must_use]
    pub fn message(&self) -> String {
        let (whom, verb) = match self.direction.as_str() {
            "ingress" => (&self.from, "from"),
            _ => (&self.to, "to"),
        };
        format!(
            "{} {verb} {whom} ({}) in Network {} was dropped: {}. knit explain {} {}{} --network {} shows \
             the rules.",
            if self.direction == "ingress" { "A connection" } else { "A connection of this pod" },
            self.service(),
            self.network,
            self.reason,
            self.from.short(),
            self.to.short(),
            self.port.map(|port| format!(":{port}/{}", self.protocol.to_lowercase())).unwrap_or_default(),
            self.network,
        )
    }
}

impl End {
    fn short(&self) -> String {
        self.name.clone().unwrap_or_else(|| match self.address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        })
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name} ({})", self.address),
            None => self.address.fmt(f),
        }
    }
}
