//! A packet filter of a few lines: it holds elements and looks them up as the documentation of the sets says,
//! and knows nothing of policies.

use std::collections::BTreeMap;
use std::net::IpAddr;

use knit_policy::model::{Direction, Traffic};
use knit_policy::sets::{Change, Class, Decision, Key, TrafficKey, Value};
use knit_policy::verdict::{Flow, State};

#[derive(Debug, Default)]
pub struct Filter(BTreeMap<Key, Value>);

impl Filter {
    /// As a kernel would take it: what is added must be new, what is removed must be there, ranges must not
    /// overlap.
    pub fn apply(&mut self, change: &Change) {
        assert_ne!(change.old, change.new, "a change that changes nothing: {change:?}");
        let had = match change.new {
            Some(value) => self.0.insert(change.key, value),
            None => self.0.remove(&change.key),
        };
        assert_eq!(had, change.old, "{change:?}");
    }

    pub fn elements(&self) -> &BTreeMap<Key, Value> {
        &self.0
    }

    pub fn passes(&self, direction: Direction, flow: &Flow) -> bool {
        if flow.state != State::New || matches!(flow.traffic, Traffic::Icmpv6(130..=137 | 143)) {
            return true;
        }
        let (local, remote) = match direction {
            Direction::Egress => (flow.source, flow.destination),
            Direction::Ingress => (flow.destination, flow.source),
        };
        let Some(Value::Decision(default)) = self.0.get(&Key::Subject(direction, local)) else { return true };
        let class = self.class(local, remote);
        let rules = class.and_then(|class| self.rule(direction, local, Some(class), flow.traffic));
        let rules = rules.or_else(|| self.rule(direction, local, None, flow.traffic));
        rules.unwrap_or(*default) == Decision::Accept
    }

    fn class(&self, local: IpAddr, remote: IpAddr) -> Option<Class> {
        if local == remote && self.0.contains_key(&Key::Itself(local)) {
            return Some(Class(1));
        }
        if let Some(Value::Class(class)) = self.0.get(&Key::Peer(remote)) {
            return Some(*class);
        }
        let mut blocks = self.0.iter().filter_map(|(key, value)| match (key, value) {
            (Key::Block(first, last), Value::Class(class)) if *first <= remote && remote <= *last => {
                Some(*class)
            }
            _ => None,
        });
        let found = blocks.next();
        assert_eq!(blocks.next(), None, "two blocks hold {remote}");
        found
    }

    fn rule(
        &self,
        direction: Direction,
        pod: IpAddr,
        peer: Option<Class>,
        traffic: Traffic,
    ) -> Option<Decision> {
        let at = |traffic| match self.0.get(&Key::Rule { direction, pod, peer, traffic }) {
            Some(Value::Decision(decision)) => Some(*decision),
            _ => None,
        };
        let Traffic::Port(protocol, port) = traffic else { return at(TrafficKey::All) };
        let mut ranges = self.0.iter().filter_map(|(key, value)| match (key, value) {
            (
                Key::Rule { direction: d, pod: p, peer: c, traffic: TrafficKey::Range(q, first, last) },
                Value::Decision(decision),
            ) if (*d, *p, *c, *q) == (direction, pod, peer, protocol) && (*first..=*last).contains(&port) => {
                Some(*decision)
            }
            _ => None,
        });
        let range = ranges.next();
        assert_eq!(ranges.next(), None, "two ranges hold {protocol} {port}");
        let exact = at(TrafficKey::Port(protocol, port));
        exact.or(range).or_else(|| at(TrafficKey::Protocol(protocol))).or_else(|| at(TrafficKey::All))
    }
}
