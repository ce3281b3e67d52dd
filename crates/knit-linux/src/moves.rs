//! Which calls are changing things: what is compared meanwhile may be half made, and is not damage.
//!
//! Each call says what it changes: one attachment, or a whole Network. A comparison asks afterwards what was
//! being changed while it read, and leaves exactly that out.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};

use knit_kernel::link::Link;
use knit_nft::Element;
use knit_types::NetworkName;
use knit_types::sync::Locked;

use crate::mark::{Mark, host_name};
use crate::rules::interface;
use crate::wanted::Entry;

/// The calls that change things, and what has changed while somebody compares.
#[derive(Debug, Default)]
pub(crate) struct Moves(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Numbers calls, and counts those that have ended.
    next: u64,
    ended: u64,
    open: HashMap<u64, MovingSubject>,
    /// What ended while somebody compared, each with the count at its end.
    recent: Vec<(u64, MovingSubject)>,
    comparing: usize,
}

/// What a call changes.
#[derive(Clone, Debug)]
pub(crate) enum MovingSubject {
    /// A Network's own part on this node.
    Network(NetworkName),
    /// One attachment: its host end's name and its addresses.
    Port {
        /// The Network.
        network: NetworkName,
        /// The host end.
        host: String,
        /// The pod's addresses.
        ips: Vec<IpAddr>,
    },
}

/// One call, until it is dropped.
#[derive(Debug)]
pub(crate) struct Moving<'a> {
    moves: &'a Moves,
    number: u64,
}

/// One comparison, until it is dropped.
#[derive(Debug)]
pub(crate) struct Comparing<'a> {
    moves: &'a Moves,
    since: u64,
}

/// What of one Network cannot be compared because it was being changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct InMotion {
    /// The Network itself.
    pub network: bool,
    /// Host ends.
    pub hosts: HashSet<String>,
    /// Addresses of their pods.
    pub ips: HashSet<IpAddr>,
}

impl MovingSubject {
    /// One attachment.
    pub fn port(network: &NetworkName, mark: &Mark) -> Self {
        let host = host_name(&mark.sandbox, &mark.interface).to_string();
        Self::Port { network: network.clone(), host, ips: mark.ips().collect() }
    }
}

impl Moves {
    /// This is being changed, until what is returned is dropped.
    pub fn begin(&self, subject: MovingSubject) -> Moving<'_> {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.open.insert(number, subject);
        Moving { moves: self, number }
    }

    /// Somebody compares from now on.
    pub fn compare(&self) -> Comparing<'_> {
        let mut state = self.state();
        state.comparing += 1;
        Comparing { moves: self, since: state.ended }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.locked()
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut state = self.moves.state();
        state.ended += 1;
        let (at, subject) = (state.ended, state.open.remove(&self.number));
        if state.comparing > 0 {
            state.recent.extend(subject.map(|subject| (at, subject)));
        }
    }
}

impl Comparing<'_> {
    /// What of a Network was being changed at any time since the comparison began.
    pub fn in_motion(&self, network: &NetworkName) -> InMotion {
        let state = self.moves.state();
        let ended = state.recent.iter().filter(|(at, _)| *at > self.since).map(|(_, subject)| subject);
        let mut motion = InMotion::default();
        state.open.values().chain(ended).for_each(|subject| motion.add(network, subject));
        motion
    }
}

impl Comparing<'_> {
    /// Host ends that were being changed at any time since the comparison began, in whichever Network; none
    /// if a Network was.
    pub fn hosts_in_motion(&self) -> Option<HashSet<String>> {
        let state = self.moves.state();
        let ended = state.recent.iter().filter(|(at, _)| *at > self.since).map(|(_, subject)| subject);
        let host = |subject: &MovingSubject| match subject {
            MovingSubject::Network(_) => None,
            MovingSubject::Port { host, .. } => Some(host.clone()),
        };
        state.open.values().chain(ended).map(host).collect()
    }
}

impl Comparing<'_> {
    /// The same, whatever Networks were being changed.
    pub fn ports_in_motion(&self) -> HashSet<String> {
        let state = self.moves.state();
        let ended = state.recent.iter().filter(|(at, _)| *at > self.since).map(|(_, subject)| subject);
        let host = |subject: &MovingSubject| match subject {
            MovingSubject::Network(_) => None,
            MovingSubject::Port { host, .. } => Some(host.clone()),
        };
        state.open.values().chain(ended).filter_map(host).collect()
    }
}

impl Drop for Comparing<'_> {
    fn drop(&mut self) {
        let mut state = self.moves.state();
        state.comparing -= 1;
        if state.comparing == 0 {
            state.recent.clear();
        }
    }
}

impl InMotion {
    fn add(&mut self, of: &NetworkName, subject: &MovingSubject) {
        match subject {
            MovingSubject::Network(network) => self.network |= network == of,
            MovingSubject::Port { network, host, ips } if network == of => self.leave_out(host, ips),
            MovingSubject::Port { .. } => {}
        }
    }

    /// Leaves an attachment out of the comparison.
    pub fn leave_out(&mut self, host: &str, ips: &[IpAddr]) {
        self.hosts.insert(host.to_owned());
        self.ips.extend(ips);
    }

    /// Whether a host end was not being made or taken away.
    pub fn has_settled(&self, link: &Link) -> bool {
        !self.hosts.contains(link.name.as_str())
    }

    /// Whether an element of a set allows a pod its sources that was being changed.
    pub fn is_source_in_motion(&self, set: &str, element: &Element) -> bool {
        set.starts_with("sources") && self.hosts.contains(&interface(element))
    }

    /// Whether an entry is about an attachment that was being changed.
    pub fn is_about(&self, entry: &Entry) -> bool {
        match entry {
            Entry::Address { link, .. } | Entry::Remote { link, .. } | Entry::Port { link, .. } => {
                self.hosts.contains(link)
            }
            Entry::Route { to, link, .. } => self.hosts.contains(link) || self.ips.contains(&to.addr()),
            Entry::Neighbour { link, address, .. } => self.hosts.contains(link) || self.ips.contains(address),
        }
    }

    /// Whether nothing was being changed.
    pub fn is_none(&self) -> bool {
        !self.network && self.hosts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(network: &'static str, host: &str) -> MovingSubject {
        MovingSubject::Port { network: network.into(), host: host.into(), ips: vec![[10, 0, 0, 1].into()] }
    }

    #[test]
    fn what_changes_before_during_and_after_a_comparison_is_told_apart() {
        let moves = Moves::default();
        drop(moves.begin(port("blue", "before")));
        let open = moves.begin(port("blue", "open"));
        let comparing = moves.compare();
        drop(moves.begin(port("blue", "during")));
        drop(moves.begin(port("green", "another")));
        let hosts = |comparing: &Comparing<'_>| {
            let mut hosts: Vec<_> = comparing.in_motion(&"blue".into()).hosts.into_iter().collect();
            hosts.sort();
            hosts
        };
        assert_eq!(hosts(&comparing), ["during", "open"]);
        let all = ["another", "during", "open"].map(String::from);
        assert_eq!(comparing.hosts_in_motion(), Some(all.into()));
        drop(open);
        assert_eq!(hosts(&comparing), ["during", "open"], "it moved while it was compared");
        drop(comparing);
        assert!(moves.compare().in_motion(&"blue".into()).is_none());
        assert!(moves.state().recent.is_empty(), "nothing is kept for nobody");
    }

    #[test]
    fn a_network_that_is_set_up_is_that_network_only() {
        let moves = Moves::default();
        let _moving = moves.begin(MovingSubject::Network("blue".into()));
        let comparing = moves.compare();
        assert!(comparing.in_motion(&"blue".into()).network);
        assert!(comparing.in_motion(&"green".into()).is_none());
        assert_eq!(comparing.hosts_in_motion(), None);
    }
}
