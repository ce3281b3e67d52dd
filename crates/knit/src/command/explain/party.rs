//! Who is meant by what was typed: a pod, a node or an address, and a port.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::{Result, bail};
use knit_policy::kubernetes::parse_ip;
use knit_policy::model::{Name, Node, Pod, PodKey, Protocol, Traffic};

use super::known::Known;

/// One end of a connection.
#[derive(Debug, Clone)]
pub enum Party {
    Pod(Arc<Pod>),
    Node(Arc<Node>),
    Address(IpAddr),
}

/// The other end, with what is asked of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub who: String,
    pub port: Option<Port>,
}

/// A port as it was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Port {
    Number(Protocol, u16),
    Named(Option<Protocol>, String),
}

impl std::str::FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let whole = |who: &str| Ok(Self { who: who.to_owned(), port: None });
        if parse_ip(text).is_some() {
            return whole(text);
        }
        if let Some(rest) = text.strip_prefix('[') {
            let Some((address, rest)) = rest.split_once(']') else {
                return Err(format!("{text:?}: write an IPv6 address with a port as [fd00::1]:80"));
            };
            return match rest.strip_prefix(':') {
                Some(port) => Ok(Self { who: address.to_owned(), port: Some(port.parse()?) }),
                None if rest.is_empty() => whole(address),
                None => Err(format!("{text:?}: write an IPv6 address with a port as [fd00::1]:80")),
            };
        }
        match text.split_once(':') {
            Some((who, port)) => Ok(Self { who: who.to_owned(), port: Some(port.parse()?) }),
            None => whole(text),
        }
    }
}

impl std::str::FromStr for Port {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, protocol) = match text.split_once('/') {
            Some((number, protocol)) => {
                let known = Protocol::parse(&protocol.to_ascii_uppercase());
                (number, Some(known.ok_or_else(|| format!("{protocol:?} must be tcp, udp or sctp"))?))
            }
            None => (text, None),
        };
        if number.bytes().all(|b| b.is_ascii_digit()) {
            let wrong = || format!("{number:?} is not a valid port: write 1 to 65535, or a port name");
            let port = number.parse().ok().filter(|n| *n != 0).ok_or_else(wrong)?;
            return Ok(Self::Number(protocol.unwrap_or(Protocol::Tcp), port));
        }
        Ok(Self::Named(protocol, number.to_owned()))
    }
}

impl Party {
    /// `namespace/pod`, `pod`, `node/NAME` or an address.
    pub fn find(text: &str, known: &Known) -> Result<Self> {
        if let Some(address) = parse_ip(text) {
            return Ok(Self::Address(address));
        }
        let (namespace, name) = text.split_once('/').unwrap_or(("default", text));
        if let Some(pod) = known.cluster.pod(&PodKey::new(namespace, name)) {
            if pod.finished {
                bail!("pod {} has terminated: policies no longer apply to it", pod.key);
            }
            return Ok(Self::Pod(Arc::clone(pod)));
        }
        if namespace == "node" {
            if let Some(node) = known.cluster.node(name) {
                return Ok(Self::Node(Arc::clone(node)));
            }
            bail!("Node {name} does not exist: kubectl get nodes lists them");
        }
        let elsewhere: Vec<String> =
            known.pods.iter().filter(|p| *p.key.name == *name).map(|p| p.key.to_string()).collect();
        match (text.contains('/'), &elsewhere[..]) {
            (false, [one]) => bail!("pod {name} does not exist in namespace default: do you mean {one}?"),
            _ => bail!(
                "pod {namespace}/{name} does not exist: write NAMESPACE/POD, node/NAME for a node, \
                or an address"
            ),
        }
    }

    /// Its addresses in a Network.
    pub fn addresses(&self, network: &str) -> Vec<IpAddr> {
        match self {
            Self::Address(address) => vec![*address],
            Self::Node(node) => node.addresses.to_vec(),
            // In the node's network namespace, it has the node's addresses towards every Network.
            Self::Pod(pod) if pod.host_network => {
                pod.attachments.iter().flat_map(|a| a.addresses.iter().copied()).collect()
            }
            Self::Pod(pod) => {
                let there = pod.attachments.iter().filter(|a| *a.network == *network);
                there.flat_map(|a| a.addresses.iter().copied()).collect()
            }
        }
    }

    /// The Networks that it has an interface in, its primary one first; none if it is everywhere.
    pub fn networks(&self) -> Option<Vec<Name>> {
        match self {
            Self::Pod(pod) if !pod.host_network => {
                let primary = pod.attachments.iter().filter(|a| a.primary);
                let further = pod.attachments.iter().filter(|a| !a.primary);
                Some(primary.chain(further).map(|a| a.network.clone()).collect())
            }
            _ => None,
        }
    }

    /// What a port as typed means here.
    pub fn traffic(&self, port: Option<&Port>) -> Result<Traffic> {
        Ok(match port {
            None => Traffic::Other,
            Some(Port::Number(protocol, number)) => Traffic::Port(*protocol, *number),
            Some(Port::Named(protocol, name)) => {
                let Self::Pod(pod) = self else { bail!("{self} has no named ports: write a number") };
                let Some((protocol, number)) = pod.named(name, *protocol).next() else {
                    bail!("pod {} has no port named {name}: write a number, or one of its names", pod.key);
                };
                Traffic::Port(protocol, number)
            }
        })
    }
}

impl std::fmt::Display for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pod(pod) => pod.key.fmt(f),
            Self::Node(node) => write!(f, "node/{}", node.name),
            Self::Address(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_read() {
        for (text, who, port) in [
            ("shop/web", "shop/web", None),
            ("shop/web:80", "shop/web", Some(Port::Number(Protocol::Tcp, 80))),
            ("shop/web:53/udp", "shop/web", Some(Port::Number(Protocol::Udp, 53))),
            ("web:http", "web", Some(Port::Named(None, "http".to_owned()))),
            ("10.0.0.1", "10.0.0.1", None),
            ("10.0.0.1:80", "10.0.0.1", Some(Port::Number(Protocol::Tcp, 80))),
            ("fd00::1", "fd00::1", None),
            ("[fd00::1]:80/SCTP", "fd00::1", Some(Port::Number(Protocol::Sctp, 80))),
            ("[fd00::1]", "fd00::1", None),
        ] {
            assert_eq!(text.parse(), Ok(Target { who: who.to_owned(), port }), "{text}");
        }
        for text in ["web:0", "web:70000", "web:80/quic", "[fd00::1", "[fd00::1]80", "web:"] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }
}
