//! What the engine says, as elements of the table's sets.

use std::net::IpAddr;

use knit_nft::{Data, Element, Mark};
use knit_policy::model::Direction;
use knit_policy::sets::{Class, Decision, Key, TrafficKey, Value};
use knit_types::Family;

use crate::classes::Numbers;
use crate::ip;
use crate::layout::Which;

/// What a map of decisions says.
pub(crate) const ACCEPT: u32 = 1;
pub(crate) const DROP: u32 = 2;

/// The class that stands for anybody.
pub(crate) const ANYBODY: u32 = 0;

/// One element of one set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Put {
    pub which: Which,
    pub element: Element,
}

/// What one thing that the engine says is in the kernel, in the table of its family.
pub(crate) fn puts(key: &Key, value: Value, numbers: &Numbers) -> Vec<Put> {
    let put = |which, element| Put { which, element };
    match (*key, value) {
        (Key::Subject(direction, address), Value::Decision(default)) => {
            let mut all = ip::data(address);
            push_class(&mut all, ANYBODY);
            vec![
                put(Which::Subjects(direction), Element::from_data(ip::data(address))),
                put(Which::All(direction), decided(all, default)),
            ]
        }
        (Key::Itself(address), _) => {
            let mut pair = ip::data(address);
            pair.push(ip::data(address).as_slice());
            vec![put(Which::Itself, Element::from_data(pair))]
        }
        (Key::Peer(address), Value::Class(class)) => {
            vec![put(Which::Peers, classed(ip::data(address), class, numbers))]
        }
        (Key::Block(first, last), Value::Class(class)) => {
            let mut element = classed(ip::data(first), class, numbers);
            element.key_end = (first != last).then(|| Box::new(ip::data(last)));
            vec![put(Which::Blocks, element)]
        }
        (Key::Rule { direction, pod, peer, traffic }, Value::Decision(decision)) => {
            let class = peer.map_or(ANYBODY, |class| numbers.of(class));
            let (which, element) = rule(direction, pod, class, traffic, decision);
            vec![put(which, element)]
        }
        // The engine gives each key the kind of value that belongs to it.
        _ => Vec::new(),
    }
}

fn rule(
    direction: Direction,
    pod: IpAddr,
    class: u32,
    traffic: TrafficKey,
    decision: Decision,
) -> (Which, Element) {
    let mut key = ip::data(pod);
    push_class(&mut key, class);
    let with_protocol = |protocol: knit_types::Protocol| {
        let mut key = key.clone();
        key.push_padded(&[protocol.number()]);
        key
    };
    let with_port = |protocol, port: u16| {
        let mut key = with_protocol(protocol);
        key.push_padded(&port.to_be_bytes());
        key
    };
    match traffic {
        TrafficKey::Port(protocol, port) => {
            (Which::Ports(direction), decided(with_port(protocol, port), decision))
        }
        TrafficKey::Range(protocol, first, last) => {
            let mut element = decided(with_port(protocol, first), decision);
            element.key_end = (first != last).then(|| Box::new(with_port(protocol, last)));
            (Which::Ranges(direction), element)
        }
        TrafficKey::Protocol(protocol) => {
            (Which::Protocols(direction), decided(with_protocol(protocol), decision))
        }
        TrafficKey::All => (Which::All(direction), decided(key, decision)),
    }
}

fn push_class(key: &mut Data, class: u32) {
    key.push(&class.to_ne_bytes());
}

fn decided(key: Data, decision: Decision) -> Element {
    let number = match decision {
        Decision::Accept => ACCEPT,
        Decision::Drop => DROP,
    };
    Element::from_data(key).value(&Mark(number))
}

fn classed(key: Data, class: Class, numbers: &Numbers) -> Element {
    Element::from_data(key).value(&Mark(numbers.of(class)))
}

/// The number that an element of a map has as its value.
pub(crate) fn value_of(element: &Element) -> Option<u32> {
    match &element.value {
        knit_nft::ElementValue::Data(data) => read(data.as_slice()),
        _ => None,
    }
}

/// The class in the key of a map of decisions.
pub(crate) fn class_of(family: Family, key: &Data) -> Option<u32> {
    let address = match family {
        Family::V4 => 4,
        Family::V6 => 16,
    };
    read(key.as_slice().get(address..)?)
}

fn read(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk::<4>().map(|bytes| u32::from_ne_bytes(*bytes))
}
