//! Who is connected, and who makes room for whom.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use knit_types::sync::Locked;
use tokio::sync::oneshot;

use crate::limits::Limits;

/// Who is connected to a port, or to several that share one limit.
pub struct Guests {
    limits: Limits,
    connections: Mutex<Connections>,
    refused: Box<dyn Fn() + Send + Sync>,
}

#[derive(Debug, Default)]
struct Connections {
    own: usize,
    /// Of others, by their numbers: the oldest has the lowest.
    by_client: BTreeMap<IpAddr, BTreeMap<u64, oneshot::Sender<Infallible>>>,
    next: u64,
}

/// One connection, while it lasts.
#[derive(Debug)]
pub(crate) struct Guest {
    guests: Arc<Guests>,
    client: IpAddr,
    /// Its number; the node's own have none.
    number: Option<u64>,
    /// Ends when somebody else needs the place.
    sent_away: oneshot::Receiver<Infallible>,
}

// === impl Guests ===

impl Guests {
    /// Nobody yet; `refused` is called for each client that is refused.
    pub fn new(limits: Limits, refused: impl Fn() + Send + Sync + 'static) -> Self {
        Self { limits, connections: Mutex::default(), refused: Box::new(refused) }
    }

    /// What they may have.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Lets a client in, unless there are too many of it. If there are too many of all, whoever has most
    /// makes room.
    pub(crate) fn admit(self: &Arc<Self>, client: IpAddr, local: IpAddr) -> Option<Guest> {
        let (client, local) = (client.to_canonical(), local.to_canonical());
        let limits = &self.limits;
        let own = limits.own.filter(|_| client == local || client.is_loopback());
        let mut connections = self.connections();
        let room = match own {
            Some(limit) => connections.own < limit,
            None => connections.make_room(client, limits),
        };
        if !room {
            drop(connections);
            (self.refused)();
            return None;
        }
        let (stay, sent_away) = oneshot::channel();
        let mut number = None;
        if own.is_some() {
            connections.own += 1;
        } else {
            let next = connections.next;
            connections.next += 1;
            connections.by_client.entry(client).or_default().insert(next, stay);
            number = Some(next);
        }
        Some(Guest { guests: Arc::clone(self), client, number, sent_away })
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.locked()
    }

    /// How many connections the node itself has.
    #[cfg(test)]
    pub(crate) fn of_the_node(&self) -> usize {
        self.connections().own
    }
}

// === impl Connections ===

impl Connections {
    /// Sees that there is room for one more of a client; false if it has all that it may have, or nobody has
    /// more than it would have.
    fn make_room(&mut self, client: IpAddr, limits: &Limits) -> bool {
        let of_client = self.by_client.get(&client).map_or(0, BTreeMap::len);
        if limits.each.is_some_and(|each| of_client >= each) {
            return false;
        }
        if self.by_client.values().map(BTreeMap::len).sum::<usize>() < limits.all {
            return true;
        }
        // Of those that have most, whose oldest is the oldest of all.
        let oldest = |numbers: &BTreeMap<u64, _>| numbers.keys().next().copied();
        let most = self.by_client.iter().max_by_key(|(_, numbers)| (numbers.len(), Reverse(oldest(numbers))));
        let more = most.filter(|(_, numbers)| numbers.len() > of_client);
        // Without a limit for each, a client that has as many as anybody gives up its own oldest.
        let itself = || self.by_client.get_key_value(&client).filter(|_| limits.each.is_none());
        let Some((client, numbers)) = more.or_else(itself) else { return false };
        let (client, Some(number)) = (*client, oldest(numbers)) else { return false };
        self.remove(client, number);
        true
    }

    /// Forgets a connection; if it is still there, it ends.
    fn remove(&mut self, client: IpAddr, number: u64) {
        if let Some(numbers) = self.by_client.get_mut(&client) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_client.remove(&client);
            }
        }
    }
}

// === impl Guest ===

impl Guest {
    /// Waits until somebody else needs the place. The node's own are never sent away.
    pub(crate) async fn sent_away(&mut self) {
        if self.number.is_none() {
            std::future::pending::<()>().await;
        }
        // Nothing is ever sent: it ends when the other end is dropped.
        let _ = (&mut self.sent_away).await;
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let mut connections = self.guests.connections();
        match self.number {
            Some(number) => connections.remove(self.client, number),
            None => connections.own -= 1,
        }
    }
}

impl std::fmt::Debug for Guests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guests")
            .field("limits", &self.limits)
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const LIMITS: Limits = Limits::PROBES;
    const ALL: usize = LIMITS.all;
    const EACH: usize = LIMITS.each.unwrap();
    const OWN: usize = LIMITS.own.unwrap();

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn no_client_takes_the_places_of_others_nor_all_together_those_of_the_node() {
        let refused = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&refused);
        let guests = Arc::new(Guests::new(LIMITS, move || {
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        let node = ip("192.0.2.1");
        let hold = |client: &str, n: usize| -> Vec<Guest> {
            (0..n).filter_map(|_| guests.admit(ip(client), node)).collect()
        };
        let greedy = hold("10.244.0.7", 500);
        assert_eq!((greedy.len(), refused.load(Ordering::Relaxed)), (EACH, 500 - EACH));
        let other = hold("10.244.0.8", 1);
        assert_eq!(other.len(), 1, "another client is let in");
        assert_eq!(hold("::ffff:10.244.0.7", 1).len(), 0, "the same client by another name");
        let crowd: Vec<Guest> = (0..200).flat_map(|n| hold(&format!("10.244.1.{n}"), EACH)).collect();
        let stays =
            |guest: &mut Guest| guest.sent_away.try_recv() == Err(oneshot::error::TryRecvError::Empty);
        let mut crowd = crowd;
        let staying = crowd.iter_mut().filter_map(|guest| stays(guest).then_some(())).count();
        assert!(staying <= ALL, "{staying}");
        // As many pods as it takes to fill all places: whoever is new is let in, and whoever has most makes
        // room.
        let mut new = hold("10.244.0.9", 1);
        assert!(new.len() == 1 && stays(&mut new[0]), "a few pods shut everybody out");
        assert_eq!(hold("192.0.2.1", 1).len(), 1, "kubelet is the node");
        assert_eq!(hold("127.0.0.1", 500).len(), OWN);
        let places = guests.connections().by_client.values().map(BTreeMap::len).sum::<usize>();
        assert_eq!(places, ALL);
        drop((greedy, other, crowd, new));
        let connections = guests.connections();
        assert!(connections.by_client.is_empty() && connections.own == 0);
    }

    #[test]
    fn eight_pods_that_hold_all_places_shut_no_ninth_out() {
        let guests = Arc::new(Guests::new(LIMITS, || {}));
        let node = ip("192.0.2.1");
        let admit = |client: String| guests.admit(ip(&client), node);
        let mut held: Vec<Guest> = Vec::new();
        for n in 0..ALL / EACH {
            held.extend((0..EACH).filter_map(|_| admit(format!("10.244.1.{n}"))));
        }
        assert_eq!(held.len(), ALL);
        for n in 0..3 {
            let mut prometheus = admit(format!("10.244.2.{n}")).expect("somebody new is let in");
            let closed = Err(oneshot::error::TryRecvError::Closed);
            let gone =
                held.iter_mut().filter_map(|guest| (guest.sent_away.try_recv() == closed).then_some(()));
            assert_eq!(gone.count(), n + 1, "one makes room for each");
            assert_eq!(prometheus.sent_away.try_recv(), Err(oneshot::error::TryRecvError::Empty));
            held.push(prometheus);
        }
        // Asking again costs those that have many, and nobody who has one.
        let again: Vec<Guest> = (0..80).filter_map(|n| admit(format!("10.244.1.{}", n % 8))).collect();
        for prometheus in &mut held[ALL..] {
            assert_eq!(prometheus.sent_away.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        }
        drop(again);
    }

    #[test]
    fn without_a_limit_for_each_a_client_makes_room_for_itself_and_for_others() {
        let limits = Limits { each: None, own: None, ..LIMITS };
        let guests = Arc::new(Guests::new(limits, || panic!("nobody is refused")));
        let admit = |client: &str| guests.admit(ip(client), ip("192.0.2.1")).expect("let in");
        let stays =
            |guest: &mut Guest| guest.sent_away.try_recv() == Err(oneshot::error::TryRecvError::Empty);
        let mut one = admit("192.0.2.1");
        let mut greedy: Vec<Guest> = (0..ALL + 5).map(|_| admit("10.244.0.7")).collect();
        let staying = greedy.iter_mut().map(stays).collect::<Vec<bool>>();
        assert_eq!(staying.iter().position(|stays| *stays), Some(6), "its own oldest have gone");
        assert!(stays(&mut one), "whoever has one keeps it");
        admit("10.244.0.8");
        assert!(stays(&mut one) && !stays(&mut greedy[6]), "whoever has most makes room");
    }
}
