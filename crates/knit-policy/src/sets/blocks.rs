//! The ranges of addresses that policies name, cut into pieces that never overlap, each with its class.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::atoms::{AtomId, PeerKey};
use super::classes::{ClassKey, Classes};
use super::element::{Class, Key, Pending, Value};
use crate::model::{AddressRanges, Family, address_after, address_before};

/// The pieces, by their first address.
#[derive(Debug, Default)]
pub(super) struct Blocks(BTreeMap<IpAddr, (IpAddr, Class)>);

impl Blocks {
    /// The class of the piece that an address is in.
    pub(super) fn at(&self, address: IpAddr) -> Option<Class> {
        let (_, (last, class)) = self.0.range(..=address).next_back()?;
        (address <= *last).then_some(*class)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, Value)> + '_ {
        self.0.iter().map(|(first, (last, class))| (Key::Block(*first, *last), Value::Class(*class)))
    }

    /// Cuts again what lies in `changed`; `ranges` are all that policies name now.
    pub(super) fn refresh(
        &mut self,
        changed: &AddressRanges,
        ranges: &[(AtomId, &AddressRanges)],
        classes: &mut Classes,
        touched: &mut BTreeSet<Class>,
        pending: &mut Pending,
    ) {
        for (first, last) in changed.iter() {
            let (first, last) = self.widened(first, last);
            let mut old: BTreeMap<IpAddr, (IpAddr, Class)> =
                self.0.range(first..=last).map(|(at, piece)| (*at, *piece)).collect();
            for (start, end, atoms) in pieces(first, last, ranges) {
                let peer = PeerKey { ranges: atoms.into(), ..PeerKey::default() };
                let key = ClassKey { family: Family::of(start), peer, services: Box::default() };
                let before = old.get(&start).filter(|(same, _)| *same == end).map(|(_, class)| *class);
                if before.is_some_and(|class| classes.get(class) == Some(&key)) {
                    old.remove(&start);
                    continue;
                }
                let class = classes.join(key, touched);
                self.0.insert(start, (end, class));
                pending.set(Key::Block(start, end), before.map(Value::Class), Some(Value::Class(class)));
            }
            for (start, (end, class)) in old {
                match self.0.get(&start) {
                    // A new piece is in its place: the same range with another class, or another range.
                    Some((same, now)) if *same == end && *now != class => {}
                    Some((same, _)) if *same != end => {
                        pending.remove(Key::Block(start, end), Value::Class(class));
                    }
                    _ => {
                        self.0.remove(&start);
                        pending.remove(Key::Block(start, end), Value::Class(class));
                    }
                }
                classes.leave(class, touched);
            }
        }
    }

    /// With the pieces that reach into it or touch it, which may have to be cut or joined.
    fn widened(&self, mut first: IpAddr, mut last: IpAddr) -> (IpAddr, IpAddr) {
        let before = address_before(first).unwrap_or(first);
        if let Some((start, (end, _))) = self.0.range(..first).next_back()
            && Family::of(*start) == Family::of(first)
            && *end >= before
        {
            first = *start;
        }
        let after = address_after(last).unwrap_or(last);
        if let Some((start, (end, _))) = self.0.range(..=after).next_back()
            && Family::of(*start) == Family::of(last)
            && *end > last
        {
            last = *end;
        }
        (first, last)
    }
}

/// Cuts a range at every end of the ranges that policies name.
fn pieces(
    first: IpAddr,
    last: IpAddr,
    ranges: &[(AtomId, &AddressRanges)],
) -> Vec<(IpAddr, IpAddr, Vec<AtomId>)> {
    // Where a range begins, and where the first address behind it is; none behind the last address of all.
    let mut edges: BTreeMap<IpAddr, (Vec<AtomId>, Vec<AtomId>)> = BTreeMap::new();
    for (atom, list) in ranges {
        for (start, end) in list.overlapping(first, last) {
            edges.entry(start.max(first)).or_default().0.push(*atom);
            if let Some(behind) = address_after(end.min(last)) {
                edges.entry(behind).or_default().1.push(*atom);
            }
        }
    }
    let mut found: Vec<(IpAddr, IpAddr, Vec<AtomId>)> = Vec::new();
    let mut active: BTreeSet<AtomId> = BTreeSet::new();
    let starts: Vec<IpAddr> = edges.keys().copied().collect();
    for (index, (start, (begin, end))) in edges.into_iter().enumerate() {
        if start > last {
            break;
        }
        for atom in end {
            active.remove(&atom);
        }
        active.extend(begin);
        if active.is_empty() {
            continue;
        }
        let stop =
            starts.get(index + 1).and_then(|next| address_before(*next)).map_or(last, |end| end.min(last));
        let atoms: Vec<AtomId> = active.iter().copied().collect();
        match found.last_mut() {
            Some((_, end, same)) if *same == atoms && address_after(*end) == Some(start) => *end = stop,
            _ => found.push((start, stop, atoms)),
        }
    }
    found
}
