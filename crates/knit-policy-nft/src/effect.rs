//! Which live connections a change can mean something to: one more pod that may reach others must not cost a
//! look at every connection of the router.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use knit_policy::model::Direction;
use knit_policy::sets::{Change, Class, Decision, Key, TrafficKey, Value};

use crate::live::Touched;
use crate::verdict::Elements;

/// Beyond so many questions a look at all connections is cheaper.
const MOST_QUESTIONS: usize = 20_000;

/// What a class comes to for all subjects.
type Meaning = HashMap<(Direction, IpAddr, TrafficKey), Decision>;

/// What a change does, the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Effect {
    Nothing,
    /// It allows more, and denies nothing that was allowed.
    Loosens,
    /// It may deny something that was allowed.
    Tightens,
}

/// Takes changes in, and says whose live connections may be others afterwards.
pub(crate) fn take_in(wanted: &mut Elements, changes: &[Change]) -> Touched {
    let peers = || changes.iter().filter_map(Peer::of);
    let before: Vec<Option<Class>> = peers().map(|peer| peer.class(peer.old, wanted)).collect();
    let old = meanings(wanted, &before);
    changes.iter().for_each(|change| wanted.apply(change));
    let after: Vec<Option<Class>> = peers().map(|peer| peer.class(peer.new, wanted)).collect();
    let (Some(old), Some(new)) = (old, meanings(wanted, &after)) else { return Touched::All };

    let (mut addresses, mut loosened) = (BTreeSet::new(), false);
    let mut note = |address, effect| match effect {
        Effect::Nothing => {}
        Effect::Loosens => loosened = true,
        Effect::Tightens => drop(addresses.insert(address)),
    };
    let mut known: HashMap<(Option<Class>, Option<Class>), Effect> = HashMap::new();
    for (peer, (from, to)) in peers().zip(before.into_iter().zip(after)) {
        let effect = known.entry((from, to)).or_insert_with(|| compare(old.get(&from), new.get(&to)));
        note(peer.address, *effect);
    }
    for change in changes {
        let drops = |value| matches!(value, Some(Value::Decision(Decision::Drop)));
        let accepts = |value| matches!(value, Some(Value::Decision(Decision::Accept)));
        match change.key {
            // Whoever is in it: rare, so all are looked at.
            Key::Block(..) => return Touched::All,
            Key::Peer(_) => {}
            Key::Itself(address) => note(address, Effect::Tightens),
            Key::Subject(_, address) => {
                let looser = change.new.is_none() || (drops(change.old) && accepts(change.new));
                note(address, if looser { Effect::Loosens } else { Effect::Tightens });
            }
            Key::Rule { pod, .. } => {
                let looser = accepts(change.new) || (drops(change.old) && change.new.is_none());
                note(pod, if looser { Effect::Loosens } else { Effect::Tightens });
            }
        }
    }
    match (addresses.is_empty(), loosened) {
        (false, _) => Touched::Addresses(addresses),
        (true, true) => Touched::Cut,
        (true, false) => Touched::Nothing,
    }
}

/// An address whose class is another one.
struct Peer {
    address: IpAddr,
    old: Option<Class>,
    new: Option<Class>,
}

impl Peer {
    fn of(change: &Change) -> Option<Self> {
        let Key::Peer(address) = change.key else { return None };
        let class = |value| match value {
            Some(Value::Class(class)) => Some(class),
            _ => None,
        };
        Some(Self { address, old: class(change.old), new: class(change.new) })
    }

    /// Its own class, or else that of the block that it is in.
    fn class(&self, own: Option<Class>, elements: &Elements) -> Option<Class> {
        own.or_else(|| elements.block(self.address))
    }
}

/// What these classes come to; nothing if that is too much to ask.
fn meanings(elements: &Elements, classes: &[Option<Class>]) -> Option<HashMap<Option<Class>, Meaning>> {
    let classes: BTreeSet<Class> = classes.iter().flatten().copied().collect();
    let subjects: Vec<(Direction, IpAddr)> = elements.subjects().collect();
    if classes.len() * subjects.len() > MOST_QUESTIONS {
        return None;
    }
    let meaning = |class: Class| {
        let rules = subjects.iter().flat_map(|(direction, pod)| {
            let rules = elements.rules(*direction, *pod, class);
            rules.map(|(traffic, decision)| ((*direction, *pod, traffic), decision))
        });
        (Some(class), rules.collect())
    };
    Some(classes.into_iter().map(meaning).collect())
}

/// Nobody's class comes to nothing.
fn compare(old: Option<&Meaning>, new: Option<&Meaning>) -> Effect {
    let nothing = Meaning::new();
    let (old, new) = (old.unwrap_or(&nothing), new.unwrap_or(&nothing));
    if old == new {
        return Effect::Nothing;
    }
    let stays = old.iter().all(|(key, decision)| new.get(key) == Some(decision));
    let only_accepts = || {
        new.iter()
            .filter(|(key, _)| !old.contains_key(key))
            .all(|(_, decision)| *decision == Decision::Accept)
    };
    if stays && only_accepts() { Effect::Loosens } else { Effect::Tightens }
}
