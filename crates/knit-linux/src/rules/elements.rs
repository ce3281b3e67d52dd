//! The elements that an attachment has.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};

use knit_ipam::Mac;
use knit_nft::{
    Element, ElementValue, EtherAddr, IfName, L4Proto, Port, Set, TableId, TableState, Transaction,
};
use knit_runtime::{PortMapping, Protocol};

use super::{node, port};

/// An element of a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SetElement {
    /// The set.
    pub set: Set,
    /// The element.
    pub element: Element,
}

impl SetElement {
    /// An element of a set.
    pub fn new(set: Set, element: Element) -> Self {
        Self { set, element }
    }

    /// A transaction that adds these elements.
    pub fn add(puts: &[Self], table: &TableId) -> Transaction {
        let mut transaction = Transaction::new();
        for put in puts {
            transaction.add_elements(table, &put.set, vec![put.element.clone()]);
        }
        transaction
    }

    /// A transaction that takes these elements away.
    pub fn delete(puts: &[Self], table: &TableId) -> Transaction {
        let mut transaction = Transaction::new();
        for put in puts {
            transaction.delete_elements(table, &put.set, vec![put.element.clone()]);
        }
        transaction
    }
}

/// The link-local address that an interface with this MAC has.
pub(crate) fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.octets().map(u16::from);
    Ipv6Addr::new(0xfe80, 0, 0, 0, ((a ^ 2) << 8) | b, (c << 8) | 0xff, 0xfe00 | d, (e << 8) | f)
}

/// The sources of a routed pod: its addresses and, if one of them is IPv6, its link-local one.
pub(crate) fn source_elements(
    host: &str,
    mac: Mac,
    addresses: impl IntoIterator<Item = IpAddr>,
) -> Vec<SetElement> {
    let (name, ether) = (IfName::new(host), EtherAddr(mac.octets()));
    let v6 = |address: Ipv6Addr| SetElement::new(port::sources6(), Element::new(&(name, ether, address)));
    let mut puts = Vec::new();
    for address in addresses {
        match address {
            IpAddr::V4(address) => {
                puts.push(SetElement::new(port::sources4(), Element::new(&(name, ether, address))));
            }
            IpAddr::V6(address) => {
                puts.push(v6(address));
                puts.push(v6(link_local(mac)));
            }
        }
    }
    puts
}

/// The ports of the node that lead to a pod, with the pod's host end as the element's comment: that is whose
/// they are.
pub(crate) fn port_elements(host: &str, ports: &[PortMapping], addresses: &[IpAddr]) -> Vec<SetElement> {
    let mut puts: Vec<SetElement> = Vec::new();
    for mapping in ports {
        let protocol = match mapping.protocol {
            Protocol::Tcp => L4Proto::TCP,
            Protocol::Udp => L4Proto::UDP,
            Protocol::Sctp => L4Proto::SCTP,
        };
        let (from, to) = (Port(mapping.host_port), Port(mapping.container_port));
        let any = mapping.host_ip.is_none_or(|ip| ip.is_unspecified());
        for address in addresses {
            let same_family = mapping.host_ip.is_none_or(|ip| ip.is_ipv4() == address.is_ipv4());
            let (set, element) = match (*address, mapping.host_ip) {
                _ if !same_family => continue,
                (IpAddr::V4(address), Some(IpAddr::V4(at))) if !any => {
                    let element = Element::new(&(at, protocol, from)).value(&(address, to));
                    (node::host_ports_at4(), element)
                }
                (IpAddr::V6(address), Some(IpAddr::V6(at))) if !any => {
                    let element = Element::new(&(at, protocol, from)).value(&(address, to));
                    (node::host_ports_at6(), element)
                }
                (IpAddr::V4(address), _) => {
                    (node::host_ports4(), Element::new(&(protocol, from)).value(&(address, to)))
                }
                (IpAddr::V6(address), _) => {
                    (node::host_ports6(), Element::new(&(protocol, from)).value(&(address, to)))
                }
            };
            puts.push(SetElement::new(set, element.comment(host)));
            let hairpin = match *address {
                IpAddr::V4(address) => SetElement::new(node::hairpin4(), Element::new(&(address, address))),
                IpAddr::V6(address) => SetElement::new(node::hairpin6(), Element::new(&(address, address))),
            };
            let hairpin = SetElement { element: hairpin.element.comment(host), ..hairpin };
            if !puts.contains(&hairpin) {
                puts.push(hairpin);
            }
        }
    }
    puts
}

/// The elements of [`port_sets`] that a table has, by the host ends that they lead to.
pub(crate) fn ports_in(table: &TableState) -> HashMap<String, Vec<SetElement>> {
    let mut found: HashMap<String, Vec<SetElement>> = HashMap::new();
    for set in port_sets() {
        let there = table.sets.get(&set.name).into_iter().flat_map(|there| there.elements.values());
        for element in there {
            let Some(host) = element.comment.as_deref() else { continue };
            found.entry(host.to_owned()).or_default().push(SetElement::new(set.clone(), element.clone()));
        }
    }
    found
}

/// Whether the ports of an attachment are these, and no others.
pub(crate) fn same_ports(wanted: &[SetElement], there: &[SetElement]) -> bool {
    wanted.len() == there.len() && wanted.iter().all(|put| there.iter().any(|there| is_same(put, there)))
}

/// Whether two elements are in one set and say the same.
pub(crate) fn is_same(a: &SetElement, b: &SetElement) -> bool {
    a.set.name == b.set.name
        && (&a.element.key, &a.element.value, &a.element.comment)
            == (&b.element.key, &b.element.value, &b.element.comment)
}

/// The ports that elements of [`port_sets`] stand for, by the host ends that they lead to: what
/// [`port_elements`] made them of. A port of both families of a pod is one.
pub(crate) fn ports_of(puts: &[SetElement]) -> BTreeMap<String, Vec<PortMapping>> {
    let mut found: BTreeMap<String, Vec<PortMapping>> = BTreeMap::new();
    for SetElement { set, element } in puts {
        let (Some(host), Some(mapping)) = (element.comment.as_deref(), mapping(set, element)) else {
            continue;
        };
        let ports = found.entry(host.to_owned()).or_default();
        if !ports.contains(&mapping) {
            ports.push(mapping);
        }
    }
    found
}

/// The port that an element leads in from; none if it is not about a port.
fn mapping(set: &Set, element: &Element) -> Option<PortMapping> {
    let address_bytes = if *set == node::host_ports4() || *set == node::host_ports6() {
        0
    } else if *set == node::host_ports_at4() {
        4
    } else if *set == node::host_ports_at6() {
        16
    } else {
        return None;
    };
    let (at, port) = element.key.as_slice().split_at_checked(address_bytes)?;
    let ElementValue::Data(value) = &element.value else { return None };
    let number = |field: &[u8]| Some(u16::from_be_bytes([*field.first()?, *field.get(1)?]));
    let protocol = match L4Proto(*port.first()?) {
        L4Proto::TCP => Protocol::Tcp,
        L4Proto::UDP => Protocol::Udp,
        L4Proto::SCTP => Protocol::Sctp,
        _ => return None,
    };
    let host_ip = match at.len() {
        0 => None,
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(at).ok()?)),
        _ => Some(IpAddr::from(<[u8; 16]>::try_from(at).ok()?)),
    };
    let container_port = number(value.as_slice().last_chunk::<4>()?)?;
    Some(PortMapping { protocol, host_port: number(port.get(4..)?)?, container_port, host_ip })
}

/// The sets that hold what [`port_elements`] makes.
pub(crate) fn port_sets() -> [Set; 6] {
    [
        node::host_ports4(),
        node::host_ports6(),
        node::host_ports_at4(),
        node::host_ports_at6(),
        node::hairpin4(),
        node::hairpin6(),
    ]
}
