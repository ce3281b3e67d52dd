//! The sets that make the [verdict](crate::verdict) true in a packet filter, kept up to date by event.
//!
//! An [`Engine`] is told of pods, namespaces, nodes and policies, and says for each router of its node which
//! elements come, go or change. A router is that of one Network; only those that have pods of this node are
//! kept. The sets and the rules that look into them are the same whatever policies there are:
//!
//! | what | key → value | holds |
//! |---|---|---|
//! | [`Key::Subject`] | direction, address → default | local pods that policies act on |
//! | [`Key::Itself`] | address | local pods that policies of their namespace isolate |
//! | [`Key::Peer`] | address → class | pods, nodes and cluster services that some rule here can tell from others |
//! | [`Key::Block`] | range of addresses → class | what the address blocks of rules come to for everybody else; never overlapping |
//! | [`Key::Rule`] | direction, local address, class or anybody, traffic → decision | what the policies come to |
//!
//! # How a packet is judged
//!
//! Once for each new connection, after service addresses were translated and before source addresses are;
//! later packets of a connection, errors about it, and what [always
//! passes](crate::model::Traffic::always_passes) are accepted before. What comes from the node itself is not
//! judged. First egress, where `local` is the source and `remote` the destination, then ingress, where they
//! are the other way round:
//!
//! 1. `Subject(direction, local)`: if it is not there, the packet passes this direction.
//! 2. The class of `remote`: [`Class::ITSELF`] if it is `local` and `Itself(local)` is there; or else
//!    `Peer(remote)`; or else the `Block` that `remote` is in; or else none.
//! 3. With a class, `Rule` with this class: for the port, for a range with the port in it, for the
//!    protocol, for all; the first that is there decides.
//! 4. `Rule` for anybody: in the same order.
//! 5. The subject's default.
//!
//! Traffic without ports has only rules for all. Elements of the two families are apart throughout.
//!
//! # What a change costs
//!
//! Peers with the same answers to every question that policies here ask are one class, so one remote pod more
//! is one element, and a change of labels that nobody asks for is none; so it is with what is known of
//! labels. What policies come to is worked out once for all local pods that the same policies select.

mod atoms;
mod blocks;
mod classes;
mod element;
mod encode;
mod groups;
mod router;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::cluster::{Cluster, claims};
use crate::model::{Alias, DEFAULT_NETWORK, Name, Namespace, Node, Pod, PodKey, Policy, PolicyName};
use router::Router;

pub use element::{Change, Class, Decision, Key, TrafficKey, Value};
#[cfg(feature = "kubernetes")]
pub(crate) use encode::elements_of;

/// Keeps the sets of one node's routers.
#[derive(Debug)]
pub struct Engine {
    node: Name,
    cluster: Cluster,
    routers: BTreeMap<Name, Router>,
    /// The pods of this node.
    here: BTreeSet<PodKey>,
    /// The last answer of [`Self::goes_by_knowledge`], until questions change: it is asked for one pod after
    /// the other.
    knowledge: Option<Knowledge>,
}

/// Whether it means anything here that other labels of a pod are known than before.
#[derive(Debug)]
struct Knowledge {
    old: Arc<[Name]>,
    new: Arc<[Name]>,
    counts: bool,
}

impl Engine {
    /// For the routers of this node.
    #[must_use]
    pub fn new(node: &str) -> Self {
        Self {
            node: node.into(),
            cluster: Cluster::new(),
            routers: BTreeMap::new(),
            here: BTreeSet::new(),
            knowledge: None,
        }
    }

    /// What is known, for [`Cluster::judge`].
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// A pod is there, or has changed.
    pub fn set_pod(&mut self, pod: Pod) {
        let known = self.cluster.pod(&pod.key).cloned();
        if known.as_ref().is_some_and(|known| **known == pod) {
            return;
        }
        if let Some(known) = known.filter(|known| known.is_same_but_for_known_labels(&pod))
            && !self.goes_by_knowledge(known.known_labels.as_ref(), pod.known_labels.as_ref())
        {
            self.cluster.set_pod(pod);
            return;
        }
        if *pod.node == *self.node {
            self.here.insert(pod.key.clone());
        } else {
            self.here.remove(&pod.key);
        }
        let now: Vec<(Name, IpAddr)> = claims(&pod).map(|(n, a)| (n.clone(), a)).collect();
        let old = self.cluster.set_pod(pod);
        let before = old.iter().flat_map(|old| claims(old)).map(|(n, a)| (n.clone(), a));
        for (network, address) in before.chain(now).collect::<BTreeSet<_>>() {
            self.touch(&network, address);
        }
    }

    /// Whether a policy that acts here goes by a label that is known in one case and not in the other. One
    /// that will act after the next [`Self::settle`] is not asked: it looks at all pods then.
    fn goes_by_knowledge(&mut self, old: Option<&Arc<[Name]>>, new: Option<&Arc<[Name]>>) -> bool {
        let (Some(old), Some(new)) = (old, new) else { return true };
        if let Some(last) = &self.knowledge
            && Arc::ptr_eq(&last.old, old)
            && Arc::ptr_eq(&last.new, new)
        {
            return last.counts;
        }
        let differ = |a: &Arc<[Name]>, b: &Arc<[Name]>| {
            let mut others = a.iter().filter(|key| b.binary_search(key).is_err());
            others.any(|key| self.routers.values().any(|router| router.asks_for_label(key)))
        };
        let counts = differ(old, new) || differ(new, old);
        self.knowledge = Some(Knowledge { old: Arc::clone(old), new: Arc::clone(new), counts });
        counts
    }

    /// A pod is gone. With a uid, only that pod: its name may be another's by now (rule 35).
    pub fn delete_pod(&mut self, key: &PodKey, uid: Option<&str>) {
        let Some(old) = self.cluster.delete_pod(key, uid) else { return };
        self.here.remove(key);
        for (network, address) in claims(&old) {
            self.touch(network, address);
        }
    }

    /// A namespace is there, or has changed.
    pub fn set_namespace(&mut self, namespace: Namespace) {
        let name = namespace.name.clone();
        if self.cluster.set_namespace(namespace) {
            self.touch_namespace(&name);
        }
    }

    /// A namespace is gone.
    pub fn delete_namespace(&mut self, name: &str) {
        if self.cluster.delete_namespace(name) {
            self.touch_namespace(name);
        }
    }

    /// A node is there, or has changed.
    pub fn set_node(&mut self, node: Node) {
        if self.cluster.node(&node.name).is_some_and(|known| **known == node) {
            return;
        }
        let now = node.addresses.clone();
        let old = self.cluster.set_node(node);
        let before = old.iter().flat_map(|old| old.addresses.iter());
        self.touch_node(before.chain(&now).copied().collect());
    }

    /// A node is gone.
    pub fn delete_node(&mut self, name: &str) {
        if let Some(old) = self.cluster.delete_node(name) {
            self.touch_node(old.addresses.iter().copied().collect());
        }
    }

    /// A policy is there, or has changed.
    pub fn set_policy(&mut self, policy: Policy) {
        let name = policy.name.clone();
        if self.cluster.policy(&name).is_some_and(|known| **known == policy) {
            return;
        }
        let old = self.cluster.set_policy(policy);
        let new = self.cluster.policy(&name).cloned();
        self.touch_subjects(&[old, new]);
    }

    /// A policy is gone.
    pub fn delete_policy(&mut self, name: &PolicyName) {
        let old = self.cluster.delete_policy(name);
        self.touch_subjects(&[old]);
    }

    /// The cluster services that pods of a Network reach over the uplink (rule 38).
    pub fn set_aliases(&mut self, network: &str, aliases: &[Alias]) {
        let old: Vec<IpAddr> = self.cluster.aliases(network).iter().map(|a| a.address).collect();
        self.cluster.set_aliases(network, aliases);
        if let Some(router) = self.routers.get_mut(network) {
            old.into_iter().chain(aliases.iter().map(|a| a.address)).for_each(|a| router.touch_peer(a));
        }
    }

    /// Works out what has to change, and says it by Network: one batch each. Taken together with all batches
    /// before, it is what policies ask for now.
    pub fn settle(&mut self) -> Vec<(Name, Vec<Change>)> {
        self.knowledge = None;
        let mut all = Vec::new();
        for (network, router) in &mut self.routers {
            let changes = router.settle(&self.cluster);
            if !changes.is_empty() {
                all.push((network.clone(), changes));
            }
        }
        self.routers.retain(|_, router| !router.is_idle());
        all
    }

    /// All elements of a Network's router, as the last [`Engine::settle`] left them: to compare with what a
    /// packet filter really holds.
    #[must_use]
    pub fn elements(&self, network: &str) -> BTreeMap<Key, Value> {
        self.routers.get(network).map(Router::elements).unwrap_or_default()
    }

    /// The Networks whose routers have elements.
    pub fn networks(&self) -> impl Iterator<Item = &Name> {
        self.routers.keys()
    }

    /// What the members of a class have in common, for messages and tests. Two engines that know the same say
    /// the same, whatever the numbers of their classes are.
    #[must_use]
    pub fn describe(&self, network: &str, class: Class) -> Option<String> {
        self.routers.get(network)?.describe(class)
    }

    /// Whoever has this address may have changed.
    fn touch(&mut self, network: &Name, address: IpAddr) {
        let local = self.cluster.owner_on(&self.node, network, address).is_some();
        if local && !self.routers.contains_key(network) {
            self.routers.insert(network.clone(), Router::new(network.clone(), self.node.clone()));
        }
        if let Some(router) = self.routers.get_mut(network) {
            router.touch_peer(address);
            if local || router.acts_on(address) {
                router.touch_local(address);
            }
        }
        if **network == *DEFAULT_NETWORK {
            self.touch_aliases_of(address);
        }
    }

    fn touch_node(&mut self, addresses: BTreeSet<IpAddr>) {
        for address in addresses {
            self.routers.values_mut().for_each(|router| router.touch_peer(address));
            self.touch_aliases_of(address);
        }
    }

    /// Cluster services that lead to this address.
    fn touch_aliases_of(&mut self, address: IpAddr) {
        for (network, router) in &mut self.routers {
            for alias in self.cluster.aliases(network) {
                if alias.endpoints.iter().any(|e| e.address == address) {
                    router.touch_peer(alias.address);
                }
            }
        }
    }

    fn touch_namespace(&mut self, name: &str) {
        let pods = self.cluster.pods_of(name).flat_map(|pod| claims(pod));
        let touched: Vec<(Name, IpAddr)> = pods.map(|(n, a)| (n.clone(), a)).collect();
        for (network, address) in touched {
            self.touch(&network, address);
        }
    }

    /// The pods of this node that one of these policies selects.
    fn touch_subjects(&mut self, policies: &[Option<Arc<Policy>>]) {
        for key in &self.here {
            let Some(pod) = self.cluster.pod(key) else { continue };
            let labels = self.cluster.namespace_labels(&key.namespace);
            let selects = |p: &Arc<Policy>| p.subject.matches(&key.namespace, &labels, &pod.labels);
            if policies.iter().flatten().any(selects) {
                for (network, address) in claims(pod) {
                    let router = self.routers.entry(network.clone());
                    let router = router.or_insert_with(|| Router::new(network.clone(), self.node.clone()));
                    router.touch_local(address);
                }
            }
        }
    }
}
