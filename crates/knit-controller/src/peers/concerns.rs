//! What is wrong with policies in the light of everything else, and is told by events: they name Networks
//! that do not exist, ports that no pod has, or more labels than nodes are told of.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use knit_api::names::DEFAULT_NETWORK;
use knit_policy::model::{Direction, Name, Policy, PolicyName, Rule, Scope};

use super::keys::Unheard;
use super::plan::Peers;

/// What a policy names.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Topic {
    Labels,
    Network,
    Port,
}

impl Topic {
    /// For how long it may be so: what a policy names may be made right after it.
    fn grace(self) -> Duration {
        Duration::from_secs(match self {
            Self::Labels => 0,
            Self::Network => 10,
            Self::Port => 60,
        })
    }
}

/// What is wrong, and since when; and of what that was told.
#[derive(Debug, Default)]
pub(super) struct Concerns {
    since: BTreeMap<(PolicyName, Topic), Duration>,
    told: BTreeSet<(PolicyName, Topic)>,
}

/// The names that pods give their ports, and how many do in each namespace.
#[derive(Debug, Default)]
pub(super) struct PortNames(BTreeMap<Name, BTreeMap<Name, usize>>);

impl Concerns {
    /// What is to be told now, of which policies: once, as long as it stays so.
    pub(super) fn news(&mut self, peers: &Peers, now: Duration) -> Vec<(PolicyName, String)> {
        let found = found(peers);
        self.since.retain(|about, _| found.contains_key(about));
        self.told.retain(|about| found.contains_key(about));
        let mut news = Vec::new();
        for (about, what) in found {
            let since = *self.since.entry(about.clone()).or_insert(now);
            if now >= since + about.1.grace() && self.told.insert(about.clone()) {
                news.push((about.0, what));
            }
        }
        news
    }
}

impl PortNames {
    pub(super) fn add(&mut self, namespace: &Name, name: &Name) {
        *self.0.entry(name.clone()).or_default().entry(namespace.clone()).or_default() += 1;
    }

    pub(super) fn remove(&mut self, namespace: &Name, name: &Name) {
        let Some(namespaces) = self.0.get_mut(name) else { return };
        if let Some(count) = namespaces.get_mut(namespace) {
            *count -= 1;
            if *count == 0 {
                namespaces.remove(namespace);
            }
        }
        if namespaces.is_empty() {
            self.0.remove(name);
        }
    }

    /// Whether a pod has a port of this name, of one namespace or of any.
    fn has(&self, name: &Name, namespace: Option<&Name>) -> bool {
        let namespaces = self.0.get(name);
        namespaces.is_some_and(|some| namespace.is_none_or(|namespace| some.contains_key(namespace)))
    }
}

fn found(peers: &Peers) -> BTreeMap<(PolicyName, Topic), String> {
    let unheard = peers.unheard().iter().map(|(name, unheard)| {
        let what = too_many_labels(name, unheard);
        ((name.clone(), Topic::Labels), what)
    });
    let others = peers.policies().flat_map(|policy| {
        let network = unknown_network(policy, peers).map(|what| (Topic::Network, what));
        let port = unknown_port(policy, peers.port_names()).map(|what| (Topic::Port, what));
        network.into_iter().chain(port).map(|(topic, what)| ((policy.name.clone(), topic), what))
    });
    unheard.chain(others).collect()
}

fn too_many_labels(policy: &PolicyName, Unheard { network, key, keys }: &Unheard) -> String {
    let whose = match policy.namespace.is_empty() {
        true => "the cluster's policies select".to_owned(),
        false => format!("the policies of namespace {} select", policy.namespace),
    };
    format!(
        "{whose} pods by more different label keys than nodes are told of in Network {network}; pods of \
         other nodes are not matched by {keys} of them, {key} among them"
    )
}

fn unknown_network(policy: &Policy, peers: &Peers) -> Option<String> {
    let Scope::Networks(names) = &policy.scope else { return None };
    let unknown = names.iter().find(|name| ***name != *DEFAULT_NETWORK && !peers.has_network(name))?;
    Some(format!("there is no Network {unknown}, so that the policy does nothing there"))
}

/// A port's name is looked up on the pod that is called: of ingress, one that the policy selects.
fn unknown_port(policy: &Policy, ports: &PortNames) -> Option<String> {
    Direction::ALL.into_iter().find_map(|direction| {
        let own = (direction == Direction::Ingress && !policy.name.namespace.is_empty())
            .then_some(&policy.name.namespace);
        let mut names = policy.rules(direction).unwrap_or_default().iter().flat_map(Rule::names);
        let (name, _) = names.find(|(name, _)| !ports.has(name, own))?;
        let whose = own.map_or("no pod".to_owned(), |namespace| format!("no pod of namespace {namespace}"));
        Some(format!("{whose} has a port named {name}, so that nothing matches it (spec.{direction})"))
    })
}
