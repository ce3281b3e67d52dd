//! What is in force, as plain data, and how it judges: the same lookups as those of the table's chains.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use knit_policy::model::{Direction, Traffic};
use knit_policy::sets::{Change, Class, Decision, Key, TrafficKey, Value};
use knit_types::{Family, PerFamily, Protocol};

/// The elements of a router's sets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elements {
    all: BTreeMap<Key, Value>,
    /// How many there are of each family.
    count: PerFamily<usize>,
}

/// The family of the packets that an element is about.
pub(crate) fn family_of(key: &Key) -> Family {
    match key {
        Key::Subject(_, address) | Key::Peer(address) | Key::Block(address, _) | Key::Itself(address) => {
            Family::of(*address)
        }
        Key::Rule { pod, .. } => Family::of(*pod),
    }
}

impl From<BTreeMap<Key, Value>> for Elements {
    fn from(all: BTreeMap<Key, Value>) -> Self {
        let mut count = PerFamily::default();
        all.keys().for_each(|key| *count.get_mut(family_of(key)) += 1);
        Self { all, count }
    }
}

impl Elements {
    /// The elements.
    #[must_use]
    pub fn all(&self) -> &BTreeMap<Key, Value> {
        &self.all
    }

    /// Whether there is none of a family.
    #[must_use]
    pub fn is_empty(&self, family: Family) -> bool {
        *self.count.get(family) == 0
    }

    /// Takes a change in.
    pub fn apply(&mut self, change: &Change) {
        let before = match change.new {
            Some(value) => self.all.insert(change.key, value),
            None => self.all.remove(&change.key),
        };
        let count = self.count.get_mut(family_of(&change.key));
        *count += usize::from(change.new.is_some());
        *count -= usize::from(before.is_some());
    }

    /// Whether the first packet of a connection may pass both sides, apart from what [always
    /// passes](Traffic::always_passes) and what comes from the node itself.
    #[must_use]
    pub fn allow(&self, source: IpAddr, destination: IpAddr, traffic: Traffic) -> bool {
        self.side(Direction::Egress, source, destination, traffic)
            && self.side(Direction::Ingress, destination, source, traffic)
    }

    /// Whether it may pass one side.
    #[must_use]
    pub fn side(&self, direction: Direction, local: IpAddr, remote: IpAddr, traffic: Traffic) -> bool {
        let Some(Value::Decision(default)) = self.all.get(&Key::Subject(direction, local)) else {
            return true;
        };
        let class = self.class(local, remote);
        let rule = class.and_then(|class| self.rule(direction, local, Some(class), traffic));
        let rule = rule.or_else(|| self.rule(direction, local, None, traffic));
        rule.unwrap_or(*default) == Decision::Accept
    }

    /// All subjects.
    pub(crate) fn subjects(&self) -> impl Iterator<Item = (Direction, IpAddr)> {
        self.all.keys().map_while(|key| match key {
            // They come first.
            Key::Subject(direction, address) => Some((*direction, *address)),
            _ => None,
        })
    }

    /// What is said about a subject and a class.
    pub(crate) fn rules(
        &self,
        direction: Direction,
        pod: IpAddr,
        class: Class,
    ) -> impl Iterator<Item = (TrafficKey, Decision)> {
        let key = |traffic| Key::Rule { direction, pod, peer: Some(class), traffic };
        let (first, last) = (TrafficKey::Port(Protocol::ALL[0], 0), TrafficKey::All);
        self.all.range(key(first)..=key(last)).filter_map(|(key, value)| match (key, value) {
            (Key::Rule { traffic, .. }, Value::Decision(decision)) => Some((*traffic, *decision)),
            _ => None,
        })
    }

    fn class(&self, local: IpAddr, remote: IpAddr) -> Option<Class> {
        if local == remote && self.all.contains_key(&Key::Itself(local)) {
            return Some(Class::ITSELF);
        }
        if let Some(Value::Class(class)) = self.all.get(&Key::Peer(remote)) {
            return Some(*class);
        }
        self.block(remote)
    }

    /// The class of the block that an address is in.
    pub(crate) fn block(&self, remote: IpAddr) -> Option<Class> {
        let last: IpAddr = match remote {
            IpAddr::V4(_) => Ipv4Addr::BROADCAST.into(),
            IpAddr::V6(_) => Ipv6Addr::from_bits(u128::MAX).into(),
        };
        match self.all.range(..=Key::Block(remote, last)).next_back() {
            Some((Key::Block(first, last), Value::Class(class)))
                if (*first..=*last).contains(&remote) && first.is_ipv4() == remote.is_ipv4() =>
            {
                Some(*class)
            }
            _ => None,
        }
    }

    fn rule(
        &self,
        direction: Direction,
        pod: IpAddr,
        peer: Option<Class>,
        traffic: Traffic,
    ) -> Option<Decision> {
        let key = |traffic| Key::Rule { direction, pod, peer, traffic };
        let at = |traffic| match self.all.get(&key(traffic)) {
            Some(Value::Decision(decision)) => Some(*decision),
            _ => None,
        };
        let Traffic::Port(protocol, port) = traffic else { return at(TrafficKey::All) };
        let range = || {
            let highest = key(TrafficKey::Range(protocol, port, u16::MAX));
            let lowest = key(TrafficKey::Range(protocol, 0, 0));
            match self.all.range(lowest..=highest).next_back() {
                Some((Key::Rule { traffic: TrafficKey::Range(_, first, last), .. }, value)) => match value {
                    Value::Decision(decision) if (*first..=*last).contains(&port) => Some(*decision),
                    _ => None,
                },
                _ => None,
            }
        };
        at(TrafficKey::Port(protocol, port))
            .or_else(range)
            .or_else(|| at(TrafficKey::Protocol(protocol)))
            .or_else(|| at(TrafficKey::All))
    }
}
