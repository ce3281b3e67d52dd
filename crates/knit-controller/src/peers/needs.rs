//! What policies ask for, and for how long it is told after nobody asks any more: whoever creates and deletes
//! a policy, or a pod that one is about, again and again does not make every slice a new one each time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use knit_policy::cluster::SelectorIndex;
use knit_policy::model::{Direction, Labels, Name, NamespaceMatch, Peer, Policy, Rule, Selector, Subject};

use super::keys::{MAX_KEYS, size};

/// What was needed is kept for this time after it was last needed: the watch of all pods, and what slices
/// say.
pub(super) const LINGER: Duration = Duration::from_secs(600);
/// So much is kept that nobody asks for any more; beyond that the oldest goes.
const MOST_LINGERING: usize = 256;

/// What policies of one Network ask for.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Need {
    /// Which pods: of any namespace, or of this one only.
    pub(super) pods: BTreeSet<(Subject, Option<Name>)>,
    pub(super) labels: BTreeSet<Name>,
    pub(super) ports: BTreeSet<Name>,
}

/// Which pods, by their labels.
type PodIndex = SelectorIndex<Arc<(Subject, Option<Name>)>>;

/// The pods that policies of one Network ask for, so that a pod is not compared with all of them.
#[derive(Debug, Default)]
pub(super) struct AskedPods {
    /// Of one namespace, by the pods' labels.
    named: HashMap<Name, PodIndex>,
    selected: PodIndex,
}

/// One thing that is asked for.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Ask {
    Pods(Subject, Option<Name>),
    Label(Name),
    Port(Name),
}

/// What nobody asks for any more and is told all the same, by Network, and since when that is so.
#[derive(Debug, Default)]
pub(super) struct Lingering(BTreeMap<(Name, Ask), Duration>);

/// Something that is kept while it is needed, and for a while after that.
#[derive(Debug, Default)]
pub(super) struct Kept {
    needed: Option<Duration>,
}

// === impl Need ===

impl Need {
    /// Adds what a policy asks for, but for labels: their keys are returned.
    pub(super) fn add(&mut self, policy: &Policy, only: Option<&Name>) -> BTreeSet<Name> {
        let mut labels = BTreeSet::new();
        for direction in Direction::ALL {
            // Nobody calls from behind a cluster service.
            if only.is_some() && direction == Direction::Ingress {
                continue;
            }
            for rule in policy.rules(direction).unwrap_or_default() {
                for peer in rule.peers.iter().flatten() {
                    let Peer::Pods(subject) = peer else { continue };
                    labels.extend(keys(&subject.pods));
                    self.pods.insert((subject.clone(), only.cloned()));
                }
                // A port's name is looked up on the pod that is called: of ingress, that is the subject.
                let Direction::Egress = direction else { continue };
                let mut names = rule.names().map(|(name, _)| name.clone()).peekable();
                if names.peek().is_some() && rule.peers.is_none() {
                    // Whoever has a port of that name.
                    let everybody = NamespaceMatch::Selected(Selector::everything());
                    let subject = Subject { namespaces: everybody, pods: Selector::everything() };
                    self.pods.insert((subject, only.cloned()));
                }
                self.ports.extend(names);
            }
        }
        labels
    }

    fn asks(&self) -> impl Iterator<Item = Ask> + '_ {
        let pods = self.pods.iter().map(|(subject, only)| Ask::Pods(subject.clone(), only.clone()));
        let labels = self.labels.iter().cloned().map(Ask::Label);
        pods.chain(labels).chain(self.ports.iter().cloned().map(Ask::Port))
    }

    /// Asks for one thing more; whether nobody did before.
    fn put(&mut self, ask: Ask) -> bool {
        match ask {
            Ask::Pods(subject, only) => self.pods.insert((subject, only)),
            Ask::Label(name) => self.labels.insert(name),
            Ask::Port(name) => self.ports.insert(name),
        }
    }
}

// === impl AskedPods ===

impl AskedPods {
    pub(super) fn of(need: &Need) -> Self {
        let mut asked = Self::default();
        for ask in &need.pods {
            let index = match &ask.0.namespaces {
                NamespaceMatch::Named(name) => asked.named.entry(name.clone()).or_default(),
                NamespaceMatch::Selected(_) => &mut asked.selected,
            };
            index.insert(&ask.0.pods, &Arc::new(ask.clone()));
        }
        asked
    }

    /// Whether a pod with these labels, in a namespace with those, is asked for.
    pub(super) fn include(&self, namespace: &Name, namespace_labels: &Labels, labels: &Labels) -> bool {
        let named = self.named.get(namespace).into_iter().flat_map(|index| index.candidates(labels));
        let mut candidates = named.chain(self.selected.candidates(labels));
        candidates.any(|ask| asks_for(ask, namespace, namespace_labels, labels))
    }
}

/// Whether a pod with these labels, in a namespace with those, is asked for by this.
pub(super) fn asks_for(
    (subject, only): &(Subject, Option<Name>),
    namespace: &Name,
    namespace_labels: &Labels,
    labels: &Labels,
) -> bool {
    only.as_ref().is_none_or(|name| name == namespace) && subject.matches(namespace, namespace_labels, labels)
}

// === impl Lingering ===

impl Lingering {
    /// Whether something has been kept for long enough.
    pub(super) fn is_over(&self, now: Duration) -> bool {
        self.0.values().any(|since| now >= since.saturating_add(LINGER))
    }

    /// What is asked for now, by Network, and what was before and still counts. `may` says in which Networks
    /// anything is told at all.
    pub(super) fn blend(
        &mut self,
        before: &BTreeMap<Name, Need>,
        mut needs: BTreeMap<Name, Need>,
        may: impl Fn(&Name) -> bool,
        now: Duration,
    ) -> BTreeMap<Name, Need> {
        for (network, need) in before {
            for ask in need.asks() {
                self.0.entry((network.clone(), ask)).or_insert(now);
            }
        }
        self.0.retain(|(network, _), since| now < since.saturating_add(LINGER) && may(network));
        // What is asked for again does not linger.
        for (network, need) in &needs {
            for ask in need.asks() {
                self.0.remove(&(network.clone(), ask));
            }
        }
        if self.0.len() > MOST_LINGERING {
            let mut times: Vec<Duration> = self.0.values().copied().collect();
            times.sort_unstable();
            let oldest = times[times.len() - MOST_LINGERING];
            self.0.retain(|_, since| *since >= oldest);
            while self.0.len() > MOST_LINGERING {
                self.0.pop_first();
            }
        }
        let mut rooms: BTreeMap<&Name, usize> = BTreeMap::new();
        for (network, ask) in self.0.keys() {
            let need = needs.entry(network.clone()).or_default();
            if let Ask::Label(key) = ask {
                // What somebody asks for now comes first.
                let taken = || need.labels.iter().map(size).sum();
                let room = rooms.entry(network).or_insert_with(|| MAX_KEYS.saturating_sub(taken()));
                let Some(rest) = room.checked_sub(size(key)) else { continue };
                *room = rest;
            }
            need.put(ask.clone());
        }
        needs.retain(|_, need| !need.pods.is_empty());
        needs
    }
}

// === impl Kept ===

impl Kept {
    /// Whether it is kept now.
    pub(super) fn keeps(&mut self, is_needed: bool, now: Duration) -> bool {
        if is_needed {
            self.needed = Some(now);
        }
        self.needed.is_some_and(|last| now < last.saturating_add(LINGER))
    }
}

/// Whether a rule asks for pods: by what they are, or by the names of their ports.
pub(super) fn names_pods(rule: &Rule) -> bool {
    rule.peers.iter().flatten().any(|peer| matches!(peer, Peer::Pods(_))) || rule.names().next().is_some()
}

fn keys(selector: &Selector) -> impl Iterator<Item = Name> + '_ {
    selector.requirements().iter().map(|requirement| requirement.key.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(labels: impl IntoIterator<Item = String>) -> BTreeMap<Name, Need> {
        let everybody = NamespaceMatch::Selected(Selector::everything());
        let subject = Subject { namespaces: everybody, pods: Selector::everything() };
        let labels = labels.into_iter().map(|label| label.as_str().into()).collect();
        [("blue".into(), Need { pods: [(subject, None)].into(), labels, ports: BTreeSet::new() })].into()
    }

    #[test]
    fn a_policy_that_comes_and_goes_closed_the_watch_of_pods_each_time() {
        let (mut kept, seconds) = (Kept::default(), Duration::from_secs);
        assert!(!kept.keeps(false, seconds(1)), "nobody has asked yet");
        assert!(kept.keeps(true, seconds(10)));
        assert!(kept.keeps(false, seconds(609)));
        assert!(kept.keeps(true, seconds(609)) && kept.keeps(false, seconds(1208)));
        assert!(!kept.keeps(false, seconds(1209)));
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let mut lingering = Lingering::default();
        let seconds = Duration::from_secs;
        let mut needs = BTreeMap::new();
        for n in 0..1000 {
            needs = lingering.blend(&needs, need([format!("label-{n}")]), |_| true, seconds(n));
        }
        let labels = &needs[&Name::from("blue")].labels;
        assert_eq!(labels.len(), MOST_LINGERING + 1);
        assert!(labels.contains("label-999") && !labels.contains("label-0"), "the oldest goes");
        let needs = lingering.blend(&needs, BTreeMap::new(), |_| false, seconds(1000));
        assert!(needs.is_empty(), "where nothing is told, nothing is kept");
    }

    #[test]
    fn what_nobody_asks_for_any_more_took_the_room_of_what_is_asked_for() {
        let mut lingering = Lingering::default();
        let long = |n: usize| format!("{n:0317}");
        let before = need((0..200).map(long));
        // Far more than there is room for, together.
        let needs = lingering.blend(&before, need((1000..1150).map(long)), |_| true, Duration::ZERO);
        let labels = &needs[&Name::from("blue")].labels;
        assert!((1000..1150).all(|n| labels.contains(long(n).as_str())));
        assert!(labels.len() > 150 && labels.iter().map(size).sum::<usize>() <= MAX_KEYS, "{}", labels.len());
    }
}
