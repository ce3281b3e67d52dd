//! Which pods policies ask for, and what slices say of them: pure, and by event. Whatever the order in which
//! things are told, the same slices come out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use knit_api::names::DEFAULT_NETWORK;
use knit_api::{PolicyPeer, PolicyPeerPort};
use knit_policy::model::{
    Direction, Labels, Name, NamedPort, Namespace, NamespaceMatch, PodKey, Policy, PolicyName, Scope,
};

pub(crate) use super::blocks::BlockFacts;
use super::blocks::{BlockOwner, Blocks};
use super::concerns::PortNames;
pub(crate) use super::facts::{AttachmentFacts, LeftToOthers, NetworkFacts, PodFacts};
use super::keys::AskedKeys;
pub(crate) use super::keys::Unheard;
use super::needs::{AskedPods, Lingering, Need, asks_for, names_pods};

/// Where a slice is about: a Network, and a node.
pub(crate) type NetworkAndNode = (Name, Name);

/// All that is known, and the slices that follow from it.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    left_to_others: LeftToOthers,
    policies: BTreeMap<PolicyName, Policy>,
    namespaces: BTreeMap<Name, Labels>,
    /// The primary Network of each namespace that has another than the default one.
    primaries: BTreeMap<Name, Name>,
    networks: BTreeMap<Name, NetworkFacts>,
    blocks: Blocks,
    pods: BTreeMap<PodKey, PodFacts>,
    port_names: PortNames,
    attachments: BTreeMap<PodKey, AttachmentFacts>,
    /// The attachments in each Network.
    in_network: BTreeMap<Name, BTreeSet<PodKey>>,
    /// The attachments of each pod.
    of_pod: BTreeMap<PodKey, BTreeSet<PodKey>>,
    on_node: BTreeMap<Name, BTreeSet<PodKey>>,
    /// The interfaces of pods, as far as their addresses count.
    interfaces: BTreeMap<PodKey, BTreeMap<Name, Interface>>,
    /// How many pods of a namespace have an interface in a Network, and whether it is their primary one.
    used: BTreeMap<Name, BTreeMap<(Name, bool), usize>>,
    needs: BTreeMap<Name, Need>,
    /// The pods that these are, to find them by.
    asked: BTreeMap<Name, AskedPods>,
    /// What policies ask for that slices have no room for.
    unheard: BTreeMap<PolicyName, Unheard>,
    lingering: Lingering,
    slices: BTreeMap<NetworkAndNode, Vec<PolicyPeer>>,
    /// How many slices were worked out so far.
    #[cfg(test)]
    worked_out: usize,
    stale_needs: bool,
    stale: BTreeSet<NetworkAndNode>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Interface {
    primary: bool,
    addresses: BTreeSet<IpAddr>,
}

impl Peers {
    pub(crate) fn new(left_to_others: LeftToOthers) -> Self {
        Self { left_to_others, ..Self::default() }
    }

    pub(super) fn left_to_others(&self) -> LeftToOthers {
        self.left_to_others
    }

    /// Whether any policy asks for pods at all: if not, nobody needs to watch them.
    pub(crate) fn asks_for_pods(&self) -> bool {
        let rules = |policy: &'_ Policy| -> bool {
            Direction::ALL.into_iter().flat_map(|d| policy.rules(d).unwrap_or_default()).any(names_pods)
        };
        !self.left_to_others.cluster && self.policies.values().any(rules)
    }

    /// A policy is like this; none if it is gone.
    pub(crate) fn set_policy(&mut self, name: &PolicyName, policy: Option<Policy>) {
        let same = match policy {
            Some(policy) => self.policies.insert(name.clone(), policy.clone()) == Some(policy),
            None => self.policies.remove(name).is_none(),
        };
        self.stale_needs |= !same;
    }

    /// A namespace has these labels and this primary Network; none if it is gone.
    #[expect(clippy::needless_pass_by_value, reason = "it is kept, and compared with what was")]
    pub(crate) fn set_namespace(&mut self, name: &Name, labels: Option<Labels>, primary: Option<Name>) {
        let labels = labels.map(|labels| Namespace::new(name, labels).labels);
        let same_labels = match labels {
            Some(labels) => self.namespaces.insert(name.clone(), labels.clone()) == Some(labels),
            None => self.namespaces.remove(name).is_none(),
        };
        let before = match primary.clone() {
            Some(primary) => self.primaries.insert(name.clone(), primary),
            None => self.primaries.remove(name),
        };
        if before != primary {
            self.stale_needs = true;
            self.pods_in(name).iter().for_each(|key| self.refresh(key));
        }
        if !same_labels {
            self.stale_needs = true;
            self.pods_in(name).iter().for_each(|key| self.touch(key));
        }
    }

    /// The pods of a namespace.
    fn pods_in(&self, namespace: &Name) -> Vec<PodKey> {
        let from = PodKey::new(namespace.clone(), "");
        let pods = self.pods.range(from..).map(|(key, _)| key);
        pods.take_while(|key| key.namespace == *namespace).cloned().collect()
    }

    /// A Network is like this; none if it is gone.
    #[expect(clippy::needless_pass_by_value, reason = "it is kept, and compared with what was")]
    pub(crate) fn set_network(&mut self, name: &Name, facts: Option<NetworkFacts>) {
        let old = match facts.clone() {
            Some(facts) => self.networks.insert(name.clone(), facts),
            None => self.networks.remove(name),
        };
        self.stale_needs |= old != facts;
        let ranges = |facts: &Option<NetworkFacts>| facts.as_ref().map(|facts| facts.ranges.clone());
        if ranges(&old) != ranges(&facts) {
            // An announced address that is in no block counts if it is in the Network.
            self.announced(name, |_| true).iter().for_each(|key| self.refresh(key));
        }
    }

    /// The pods that attachments in a Network are about, of which an address is such a one.
    fn announced(&self, network: &Name, is_such: impl Fn(&IpAddr) -> bool) -> BTreeSet<PodKey> {
        let names = self.in_network.get(network).into_iter().flatten();
        let attachments = names.filter_map(|name| self.attachments.get(name));
        let such = attachments.filter(|attachment| attachment.addresses.iter().any(&is_such));
        such.map(|attachment| attachment.pod.clone()).collect()
    }

    /// A block is like this; none if it is gone.
    #[expect(clippy::needless_pass_by_value, reason = "it is kept, and compared with what was")]
    pub(crate) fn set_block(&mut self, name: &Name, facts: Option<BlockFacts>) {
        let old = self.blocks.set(name, facts.clone());
        if old == facts {
            return;
        }
        let mut pods = BTreeSet::new();
        for block in old.iter().chain(&facts) {
            pods.extend(self.on_node.get(&block.node).into_iter().flatten().cloned());
            // An announced address counts unless it is in another node's block.
            pods.extend(self.announced(&block.network, |a| block.ranges.iter().any(|r| r.contains(a))));
        }
        pods.iter().for_each(|key| self.refresh(key));
    }

    /// A pod is like this; none if it is gone.
    pub(crate) fn set_pod(&mut self, key: &PodKey, facts: Option<PodFacts>) {
        if self.pods.get(key) == facts.as_ref() {
            return;
        }
        self.touch(key);
        if let Some(old) = self.pods.remove(key) {
            take_out(&mut self.on_node, &old.node, key);
            old.ports.iter().for_each(|port| self.port_names.remove(&key.namespace, &port.name));
        }
        if let Some(facts) = facts {
            facts.ports.iter().for_each(|port| self.port_names.add(&key.namespace, &port.name));
            self.on_node.entry(facts.node.clone()).or_default().insert(key.clone());
            self.pods.insert(key.clone(), facts);
        }
        self.refresh(key);
        self.touch(key);
    }

    /// All pods and attachments are forgotten: nobody watches them any more.
    pub(crate) fn forget_pods(&mut self) {
        let attachments: Vec<PodKey> = self.attachments.keys().cloned().collect();
        attachments.iter().for_each(|name| self.set_attachment(name, None));
        let pods: Vec<PodKey> = self.pods.keys().cloned().collect();
        pods.iter().for_each(|key| self.set_pod(key, None));
    }

    /// A NetworkAttachment is like this; none if it is gone.
    #[expect(clippy::needless_pass_by_value, reason = "it is kept, and compared with what was")]
    pub(crate) fn set_attachment(&mut self, name: &PodKey, facts: Option<AttachmentFacts>) {
        let old = match facts.clone() {
            Some(facts) => self.attachments.insert(name.clone(), facts),
            None => self.attachments.remove(name),
        };
        if old == facts {
            return;
        }
        if let Some(old) = &old {
            take_out(&mut self.of_pod, &old.pod, name);
            take_out(&mut self.in_network, &old.network, name);
        }
        if let Some(facts) = &facts {
            self.of_pod.entry(facts.pod.clone()).or_default().insert(name.clone());
            self.in_network.entry(facts.network.clone()).or_default().insert(name.clone());
        }
        for facts in old.iter().chain(&facts) {
            self.refresh(&facts.pod);
        }
    }

    #[cfg(test)]
    pub(super) fn worked_out(&self) -> usize {
        self.worked_out
    }

    /// The slices as they should be now.
    pub(crate) fn slices(&self) -> &BTreeMap<NetworkAndNode, Vec<PolicyPeer>> {
        &self.slices
    }

    /// The keys of labels that slices of each Network tell of: whoever reads them knows nothing of others.
    pub(super) fn label_keys(&self) -> impl Iterator<Item = (&Name, &BTreeSet<Name>)> {
        self.needs.iter().map(|(network, need)| (network, &need.labels))
    }

    pub(super) fn policies(&self) -> impl Iterator<Item = &Policy> {
        self.policies.values()
    }

    pub(super) fn has_network(&self, name: &Name) -> bool {
        self.networks.contains_key(name)
    }

    pub(super) fn port_names(&self) -> &PortNames {
        &self.port_names
    }

    /// The policies that ask for more labels than slices have room for, as of the last [`Self::settle`].
    pub(crate) fn unheard(&self) -> &BTreeMap<PolicyName, Unheard> {
        &self.unheard
    }

    /// Brings slices up to date, and says which are others now. What nobody asks for any more is told for a
    /// while longer.
    pub(crate) fn settle(&mut self, now: Duration) -> BTreeSet<NetworkAndNode> {
        let mut changed = BTreeSet::new();
        if std::mem::take(&mut self.stale_needs) || self.lingering.is_over(now) {
            let ((asked, unheard), before) = (self.work_out_needs(), std::mem::take(&mut self.needs));
            self.unheard = unheard;
            let enforced = |name: &Name| self.networks.get(name).is_some_and(|facts| facts.enforced);
            let needs = self.lingering.blend(&before, asked, enforced, now);
            let other = |network: &&Name| before.get(*network) != needs.get(*network);
            let others: BTreeSet<&Name> = before.keys().chain(needs.keys()).filter(other).collect();
            let nothing = Need::default();
            for network in others {
                let (old, new) = (before.get(network), needs.get(network));
                let stale = self.told_otherwise(network, old.unwrap_or(&nothing), new.unwrap_or(&nothing));
                self.stale.extend(stale);
                match new {
                    Some(need) => drop(self.asked.insert(network.clone(), AskedPods::of(need))),
                    None => drop(self.asked.remove(network)),
                }
            }
            self.needs = needs;
        }
        for place in std::mem::take(&mut self.stale) {
            #[cfg(test)]
            {
                self.worked_out += 1;
            }
            let pods = self.slice(&place);
            let same = match pods.is_empty() {
                true => self.slices.remove(&place).is_none(),
                false => self.slices.insert(place.clone(), pods.clone()) == Some(pods),
            };
            if !same {
                changed.insert(place);
            }
        }
        changed
    }

    /// The places of pods of which something else is said once this is asked for in a Network in place of
    /// that: those that the difference is about.
    fn told_otherwise(&self, network: &Name, old: &Need, new: &Need) -> BTreeSet<NetworkAndNode> {
        let asks: Vec<_> = old.pods.symmetric_difference(&new.pods).collect();
        let labels: Vec<_> = old.labels.symmetric_difference(&new.labels).collect();
        let ports: BTreeSet<_> = old.ports.symmetric_difference(&new.ports).collect();
        let is_told_otherwise = |key: &PodKey, pod: &PodFacts| {
            let namespace = self.namespace_labels(&key.namespace);
            labels.iter().any(|key| pod.labels.get(key).is_some())
                || pod.ports.iter().any(|port| ports.contains(&port.name))
                || asks.iter().any(|ask| asks_for(ask, &key.namespace, &namespace, &pod.labels))
        };
        // Most policies ask for pods of their own namespace only.
        let named: Option<BTreeSet<&Name>> = asks
            .iter()
            .map(|(subject, only)| match &subject.namespaces {
                NamespaceMatch::Named(name) => Some(name),
                NamespaceMatch::Selected(_) => only.as_ref(),
            })
            .collect();
        let pods: Vec<PodKey> = match named {
            Some(namespaces) if labels.is_empty() && ports.is_empty() => {
                namespaces.into_iter().flat_map(|name| self.pods_in(name)).collect()
            }
            _ => self.pods.keys().cloned().collect(),
        };
        let places = pods.iter().filter_map(|key| {
            let pod = self.pods.get(key).filter(|_| self.is_in(key, network))?;
            is_told_otherwise(key, pod).then(|| (network.clone(), pod.node.clone()))
        });
        places.collect()
    }

    /// Whether a pod has an interface in a Network.
    fn is_in(&self, key: &PodKey, network: &Name) -> bool {
        self.interfaces.get(key).is_some_and(|interfaces| interfaces.contains_key(network))
    }

    fn slice(&self, (network, node): &NetworkAndNode) -> Vec<PolicyPeer> {
        let Some(need) = self.needs.get(network) else { return Vec::new() };
        let Some(asked) = self.asked.get(network) else { return Vec::new() };
        let pods = self.on_node.get(node).into_iter().flatten();
        pods.filter_map(|key| {
            let interface = self.interfaces.get(key)?.get(network)?;
            let pod = self.pods.get(key)?;
            let labels = self.namespace_labels(&key.namespace);
            if !asked.include(&key.namespace, &labels, &pod.labels) {
                return None;
            }
            let labels = pod.labels.iter().filter(|(k, _)| need.labels.contains(*k));
            let ports = pod.ports.iter().filter(|port| need.ports.contains(&port.name));
            let port = |port: &NamedPort| PolicyPeerPort {
                name: port.name.as_ref().to_owned(),
                protocol: port.protocol.as_str().to_owned(),
                port: port.number,
            };
            Some(PolicyPeer {
                namespace: key.namespace.as_ref().to_owned(),
                name: key.name.as_ref().to_owned(),
                uid: pod.uid.clone(),
                created: pod.created,
                addresses: interface.addresses.iter().map(ToString::to_string).collect(),
                labels: labels.map(|(k, v)| (k.as_ref().to_owned(), v.as_ref().to_owned())).collect(),
                ports: ports.map(port).collect(),
            })
        })
        .collect()
    }

    fn namespace_labels(&self, name: &Name) -> Labels {
        let known = self.namespaces.get(name).cloned();
        known.unwrap_or_else(|| Namespace::new(name, Labels::default()).labels)
    }

    /// The interfaces of a pod may be others now.
    fn refresh(&mut self, key: &PodKey) {
        let now = self.interfaces_of(key);
        let before = match now.is_empty() {
            true => self.interfaces.remove(key),
            false => self.interfaces.insert(key.clone(), now.clone()),
        };
        let before = before.unwrap_or_default();
        if before == now {
            return;
        }
        let used = self.used.entry(key.namespace.clone()).or_default();
        for (network, interface) in &before {
            let place = (network.clone(), interface.primary);
            if let Some(count) = used.get_mut(&place) {
                *count -= 1;
                if *count == 0 {
                    used.remove(&place);
                    self.stale_needs = true;
                }
            }
        }
        for (network, interface) in &now {
            let count = used.entry((network.clone(), interface.primary)).or_default();
            *count += 1;
            self.stale_needs |= *count == 1;
        }
        if used.is_empty() {
            self.used.remove(&key.namespace);
        }
        if let Some(pod) = self.pods.get(key) {
            let networks = before.into_keys().chain(now.into_keys());
            self.stale.extend(networks.map(|network| (network, pod.node.clone())));
        }
    }

    /// What is said of a pod may be something else now.
    fn touch(&mut self, key: &PodKey) {
        let Some(pod) = self.pods.get(key) else { return };
        let networks = self.interfaces.get(key).into_iter().flat_map(BTreeMap::keys);
        self.stale.extend(networks.map(|network| (network.clone(), pod.node.clone())));
    }

    fn interfaces_of(&self, key: &PodKey) -> BTreeMap<Name, Interface> {
        let mut found: BTreeMap<Name, Interface> = BTreeMap::new();
        let Some(pod) = self.pods.get(key).filter(|pod| !pod.is_no_peer && !pod.node.is_empty()) else {
            return found;
        };
        for address in &pod.addresses {
            if let Some(network) = self.network_of(&key.namespace, &pod.node, *address) {
                let interface = found.entry(network).or_default();
                interface.primary = true;
                interface.addresses.insert(*address);
            }
        }
        let attachments = self.of_pod.get(key).into_iter().flatten();
        // What another node than the pod's own says of it is not true, or not any more.
        let attachments =
            attachments.filter_map(|name| self.attachments.get(name)).filter(|a| a.node == pod.node);
        for attachment in attachments {
            for address in &attachment.addresses {
                if self.counts(&attachment.network, &pod.node, *address) {
                    let interface = found.entry(attachment.network.clone()).or_default();
                    interface.primary |= pod.addresses.contains(address)
                        && self.primary_of(&key.namespace) == attachment.network;
                    interface.addresses.insert(*address);
                }
            }
        }
        found
    }

    fn primary_of(&self, namespace: &Name) -> Name {
        self.primaries.get(namespace).cloned().unwrap_or_else(|| DEFAULT_NETWORK.into())
    }

    /// The Network of an address that a pod's status names: the one of its namespace, if that has the address
    /// on the pod's node; or else the only one that does, since a pod may have another primary Network.
    fn network_of(&self, namespace: &Name, node: &Name, address: IpAddr) -> Option<Name> {
        let networks = self.blocks.networks_of(node, address);
        let primary = self.primary_of(namespace);
        match networks.contains(&primary) {
            true => Some(primary),
            false if networks.len() == 1 => networks.first().map(|name| (*name).clone()),
            false => None,
        }
    }

    /// Whether an address that is announced for a pod counts: in a block of its node, or in the Network and
    /// in no other node's block.
    fn counts(&self, network: &Name, node: &Name, address: IpAddr) -> bool {
        let ranges = self.networks.get(network).map(|facts| facts.ranges.as_slice()).unwrap_or_default();
        match self.blocks.owner(network, node, address) {
            BlockOwner::This => true,
            BlockOwner::Another => false,
            BlockOwner::Nobody => ranges.iter().any(|range| range.contains(&address)),
        }
    }

    fn work_out_needs(&self) -> (BTreeMap<Name, Need>, BTreeMap<PolicyName, Unheard>) {
        if self.left_to_others.cluster {
            return Default::default();
        }
        let mut needs: BTreeMap<Name, (Need, AskedKeys)> = BTreeMap::new();
        for policy in self.policies.values() {
            let mut ask = |network: &Name, only: Option<&Name>| {
                let (need, keys) = needs.entry(network.clone()).or_default();
                keys.add(&policy.name, need.add(policy, only));
            };
            let networks = self.networks_of(policy);
            for network in networks.iter().filter(|name| self.networks.get(*name).is_some_and(|n| n.enforced))
            {
                ask(network, None);
                let services = self.networks.get(network).map(|facts| &facts.services);
                // Cluster services are reached in the default Network: their pods are peers by way of them.
                for namespace in services.into_iter().flatten().filter(|_| **network != *DEFAULT_NETWORK) {
                    ask(&DEFAULT_NETWORK.into(), Some(namespace));
                }
            }
        }
        let mut unheard = BTreeMap::new();
        let mut allot = |network: &Name, (mut need, keys): (Need, AskedKeys)| {
            need.labels = keys.told();
            unheard.extend(keys.unheard(network, &need.labels));
            need
        };
        let needs = needs.into_iter().filter(|(_, (need, _))| !need.pods.is_empty());
        let needs = needs.map(|(network, asked)| (network.clone(), allot(&network, asked))).collect();
        (needs, unheard)
    }

    /// The Networks that a policy is about and that leave policies to others, whether or not there are pods.
    pub(super) fn left_networks_of(&self, policy: &Policy) -> BTreeSet<Name> {
        let is_left = |name: &Name| {
            let facts = self.networks.get(name);
            facts.is_some_and(|facts| facts.left_to_others)
                || (self.left_to_others.default_network && **name == *DEFAULT_NETWORK)
        };
        let any_is_left =
            self.left_to_others.default_network || self.networks.values().any(|facts| facts.left_to_others);
        if !any_is_left {
            return BTreeSet::new();
        }
        let mut found = self.networks_of(policy);
        if !matches!(policy.scope, Scope::Networks(_)) {
            let selects = |name: &Name, labels: &Labels| match &policy.subject.namespaces {
                NamespaceMatch::Named(only) => only == name,
                NamespaceMatch::Selected(selector) => selector.matches(labels),
            };
            let selected = self.namespaces.iter().filter(|(name, labels)| selects(name, labels));
            found.extend(selected.map(|(name, _)| self.primary_of(name)));
        }
        found.retain(is_left);
        found
    }

    /// The Networks in which a policy acts on pods.
    fn networks_of(&self, policy: &Policy) -> BTreeSet<Name> {
        if let Scope::Networks(names) = &policy.scope {
            return names.iter().cloned().collect();
        }
        let every = policy.scope == Scope::Every;
        let mut found = BTreeSet::new();
        let mut of_namespace = |namespace: &Name| {
            let used = self.used.get(namespace).into_iter().flat_map(BTreeMap::keys);
            found.extend(used.filter(|(_, primary)| every || *primary).map(|(network, _)| network.clone()));
        };
        match &policy.subject.namespaces {
            NamespaceMatch::Named(namespace) => of_namespace(namespace),
            NamespaceMatch::Selected(selector) => {
                let selected = self.namespaces.iter().filter(|(_, labels)| selector.matches(labels));
                selected.for_each(|(name, _)| of_namespace(name));
            }
        }
        found
    }
}

/// Takes one out of the set behind a key.
fn take_out<K: Ord>(sets: &mut BTreeMap<K, BTreeSet<PodKey>>, key: &K, one: &PodKey) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(one);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}
