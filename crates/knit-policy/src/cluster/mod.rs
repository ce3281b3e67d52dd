//! All that is known: pods, namespaces, nodes, policies, with the indices that make a change cost what it
//! touches.

pub(crate) mod index;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use crate::model::{
    Alias, DEFAULT_NETWORK, KnownNamespace, Labels, Name, Namespace, NamespaceMatch, Node, Pod, PodKey,
    Policy, PolicyName, Problem, Scope, policy_sort,
};
pub use index::SelectorIndex;

/// What is known of a cluster. What is told last counts; the order of telling means nothing otherwise.
#[derive(Debug, Default)]
pub struct Cluster {
    pods: HashMap<PodKey, Arc<Pod>>,
    in_namespace: HashMap<Name, BTreeMap<PodKey, Arc<Pod>>>,
    /// Who has an address, by Network: several while one pod goes and another comes (rule 35).
    addresses: HashMap<Name, BTreeMap<IpAddr, Vec<Arc<Pod>>>>,
    namespaces: HashMap<Name, Namespace>,
    nodes: BTreeMap<Name, Arc<Node>>,
    node_addresses: HashMap<IpAddr, BTreeSet<Name>>,
    policies: BTreeMap<PolicyName, Arc<Policy>>,
    /// Policies by the one namespace that they select, and by the pods' labels in it.
    of_namespace: HashMap<Name, SelectorIndex<Arc<Policy>>>,
    /// Policies that select namespaces by their labels: those of the cluster, few.
    of_cluster: BTreeMap<PolicyName, Arc<Policy>>,
    aliases: BTreeMap<Name, Box<[Alias]>>,
    networks: BTreeSet<Name>,
}

/// Who has an address in a Network.
#[derive(Debug, Clone)]
pub enum AddressOwner {
    /// A pod.
    Pod(Arc<Pod>),
    /// A node, or a pod in its network namespace (rule 27).
    Node(Arc<Node>),
    /// Neither.
    Nobody,
}

impl Cluster {
    /// Knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A pod is there, or has changed. Returns what was known of that name.
    pub fn set_pod(&mut self, pod: Pod) -> Option<Arc<Pod>> {
        let old = self.remove_pod(&pod.key);
        let pod = Arc::new(pod);
        self.pods.insert(pod.key.clone(), Arc::clone(&pod));
        let names = self.in_namespace.entry(pod.key.namespace.clone()).or_default();
        names.insert(pod.key.clone(), Arc::clone(&pod));
        for (network, address) in claims(&pod) {
            let claimants = self.addresses.entry(network.clone()).or_default().entry(address).or_default();
            claimants.push(Arc::clone(&pod));
            // The one that counts comes last.
            claimants.sort_by(|a, b| (a.created, &a.uid, &a.key).cmp(&(b.created, &b.uid, &b.key)));
        }
        old
    }

    /// A pod is gone. With a uid, only that pod: its name may be another's by now (rule 35).
    pub fn delete_pod(&mut self, key: &PodKey, uid: Option<&str>) -> Option<Arc<Pod>> {
        if uid.is_some_and(|uid| self.pods.get(key).is_some_and(|p| *p.uid != *uid)) {
            return None;
        }
        self.remove_pod(key)
    }

    fn remove_pod(&mut self, key: &PodKey) -> Option<Arc<Pod>> {
        let old = self.pods.remove(key)?;
        if let Some(names) = self.in_namespace.get_mut(&key.namespace) {
            names.remove(key);
            if names.is_empty() {
                self.in_namespace.remove(&key.namespace);
            }
        }
        for (network, address) in claims(&old) {
            let Some(of_network) = self.addresses.get_mut(network) else { continue };
            let Some(claimants) = of_network.get_mut(&address) else { continue };
            claimants.retain(|p| p.key != *key);
            if claimants.is_empty() {
                of_network.remove(&address);
            }
            if of_network.is_empty() {
                self.addresses.remove(network);
            }
        }
        Some(old)
    }

    /// A namespace is there, or has changed. Returns whether that means anything.
    pub fn set_namespace(&mut self, namespace: Namespace) -> bool {
        let labels = namespace.labels.clone();
        let before = self.namespaces.insert(namespace.name.clone(), namespace);
        before.is_none_or(|before| before.labels != labels)
    }

    /// A namespace is gone. Returns whether that means anything.
    pub fn delete_namespace(&mut self, name: &str) -> bool {
        self.namespaces.remove(name).is_some()
    }

    /// A node is there, or has changed. Returns what was known of that name.
    pub fn set_node(&mut self, node: Node) -> Option<Arc<Node>> {
        let old = self.delete_node(&node.name);
        for address in &node.addresses {
            self.node_addresses.entry(*address).or_default().insert(node.name.clone());
        }
        self.nodes.insert(node.name.clone(), Arc::new(node));
        old
    }

    /// A node is gone.
    pub fn delete_node(&mut self, name: &str) -> Option<Arc<Node>> {
        let old = self.nodes.remove(name)?;
        for address in &old.addresses {
            if let Some(names) = self.node_addresses.get_mut(address) {
                names.remove(name);
                if names.is_empty() {
                    self.node_addresses.remove(address);
                }
            }
        }
        Some(old)
    }

    /// A policy is there, or has changed. Returns what was known of that name.
    pub fn set_policy(&mut self, policy: Policy) -> Option<Arc<Policy>> {
        let old = self.delete_policy(&policy.name);
        let policy = Arc::new(policy);
        match &policy.subject.namespaces {
            NamespaceMatch::Named(namespace) => {
                let index = self.of_namespace.entry(namespace.clone()).or_default();
                index.insert(&policy.subject.pods, &policy);
            }
            NamespaceMatch::Selected(_) => {
                self.of_cluster.insert(policy.name.clone(), Arc::clone(&policy));
            }
        }
        self.policies.insert(policy.name.clone(), policy);
        old
    }

    /// A policy is gone.
    pub fn delete_policy(&mut self, name: &PolicyName) -> Option<Arc<Policy>> {
        let old = self.policies.remove(name)?;
        match &old.subject.namespaces {
            NamespaceMatch::Named(namespace) => {
                if let Some(index) = self.of_namespace.get_mut(namespace) {
                    index.remove(&old.subject.pods, |policy| policy.name == *name);
                    if index.is_empty() {
                        self.of_namespace.remove(namespace);
                    }
                }
            }
            NamespaceMatch::Selected(_) => {
                self.of_cluster.remove(name);
            }
        }
        Some(old)
    }

    /// The cluster services that pods of a Network reach over the uplink (rule 38).
    pub fn set_aliases(&mut self, network: &str, aliases: &[Alias]) {
        let mut sorted = aliases.to_vec();
        sorted.sort();
        // One address and port leads to one service; of two that say so, the first counts.
        sorted.dedup_by(|b, a| (a.address, a.protocol, a.port) == (b.address, b.protocol, b.port));
        if sorted.is_empty() {
            self.aliases.remove(network);
        } else {
            self.aliases.insert(network.into(), sorted.into());
        }
    }

    /// The Networks that there are, besides the default one; only [`Cluster::problems`] asks.
    pub fn set_networks(&mut self, names: impl IntoIterator<Item = impl Into<Name>>) {
        self.networks = names.into_iter().map(Into::into).collect();
    }

    /// A pod by its name.
    #[must_use]
    pub fn pod(&self, key: &PodKey) -> Option<&Arc<Pod>> {
        self.pods.get(key)
    }

    /// A node by its name.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&Arc<Node>> {
        self.nodes.get(name)
    }

    /// A policy by its name.
    #[must_use]
    pub fn policy(&self, name: &PolicyName) -> Option<&Arc<Policy>> {
        self.policies.get(name)
    }

    /// All policies, by kind, namespace and name.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.policies.values()
    }

    /// Who has an address. A pod comes before a node, so that a packet is judged as the narrower of the two.
    #[must_use]
    pub fn owner(&self, network: &str, address: IpAddr) -> AddressOwner {
        if let Some(pod) = self.addresses.get(network).and_then(|n| n.get(&address)?.last()) {
            return AddressOwner::Pod(Arc::clone(pod));
        }
        let node = self.node_addresses.get(&address).and_then(|names| self.nodes.get(names.first()?));
        node.map_or(AddressOwner::Nobody, |node| AddressOwner::Node(Arc::clone(node)))
    }

    /// Whether a node has an address.
    #[must_use]
    pub fn is_address_of_node(&self, address: IpAddr, node: &str) -> bool {
        self.node_addresses.get(&address).is_some_and(|names| names.contains(node))
    }

    /// The labels of a namespace. One that is not known yet has the label with its name (rule 15), and no
    /// other.
    #[must_use]
    pub fn namespace_labels(&self, name: &str) -> Cow<'_, Labels> {
        match self.namespaces.get(name) {
            Some(namespace) => Cow::Borrowed(&namespace.labels),
            None => Cow::Owned(Namespace::new(name, Labels::default()).labels),
        }
    }

    /// A namespace, as far as it is known.
    #[must_use]
    pub fn known_namespace(&self, name: &str) -> KnownNamespace<'_> {
        KnownNamespace { labels: self.namespace_labels(name), known: self.namespaces.contains_key(name) }
    }

    /// The policies that select a pod's interface in a Network, in the order in which they are asked.
    #[must_use]
    pub fn policies_on(&self, pod: &Pod, network: &str, primary: bool) -> Vec<Arc<Policy>> {
        let mut found: Vec<Arc<Policy>> = self.selecting(pod, network, primary).cloned().collect();
        policy_sort(&mut found);
        found
    }

    /// The same in no order.
    pub(crate) fn selecting<'a>(
        &'a self,
        pod: &'a Pod,
        network: &'a str,
        primary: bool,
    ) -> impl Iterator<Item = &'a Arc<Policy>> {
        let namespace_labels = self.namespace_labels(&pod.key.namespace);
        let named = self.of_namespace.get(&pod.key.namespace).filter(|_| pod.counts());
        let named = named.into_iter().flat_map(|index| index.candidates(&pod.labels));
        let cluster = pod.counts().then(|| self.of_cluster.values());
        named
            .chain(cluster.into_iter().flatten())
            .filter(move |p| p.covers(network, primary))
            .filter(move |p| p.subject.matches(&pod.key.namespace, &namespace_labels, &pod.labels))
    }

    /// What is wrong with policies in the light of the others: they name Networks that do not exist.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        for policy in self.policies.values() {
            let Scope::Networks(names) = &policy.scope else { continue };
            for name in names.iter().filter(|n| ***n != *DEFAULT_NETWORK && !self.networks.contains(*n)) {
                let message = format!(
                    "Network {name} does not exist, so the policy has no effect there: create it, or correct \
                     the name"
                );
                let field = "metadata.annotations[k8s.v1.cni.cncf.io/policy-for]";
                problems.push(Problem::of_policy(&policy.name, field, message));
            }
        }
        problems
    }

    pub(crate) fn aliases(&self, network: &str) -> &[Alias] {
        self.aliases.get(network).map_or(&[], |list| list)
    }

    pub(crate) fn alias(
        &self,
        network: &str,
        address: IpAddr,
        traffic: crate::model::Traffic,
    ) -> Option<&Alias> {
        let crate::model::Traffic::Port(protocol, port) = traffic else { return None };
        let is_it = |a: &&Alias| a.address == address && a.protocol == protocol && a.port == port;
        self.aliases(network).iter().find(is_it)
    }

    pub(crate) fn pods_of(&self, namespace: &str) -> impl Iterator<Item = &Arc<Pod>> {
        self.in_namespace.get(namespace).into_iter().flat_map(BTreeMap::values)
    }

    pub(crate) fn namespaces_with_pods(&self) -> impl Iterator<Item = &Name> {
        self.in_namespace.keys()
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.nodes.values()
    }

    pub(crate) fn addresses_in(&self, network: &str) -> impl Iterator<Item = IpAddr> + '_ {
        self.addresses.get(network).into_iter().flat_map(|list| list.keys().copied())
    }

    /// The pod of this node that has an address, whatever is told of pods of other nodes: what it sends and
    /// receives passes here. Of several, the youngest.
    #[must_use]
    pub fn owner_on(&self, node: &str, network: &str, address: IpAddr) -> Option<&Arc<Pod>> {
        let claimants = self.addresses.get(network)?.get(&address)?;
        claimants.iter().rev().find(|pod| *pod.node == *node)
    }
}

/// The addresses that a pod claims.
pub(crate) fn claims(pod: &Pod) -> impl Iterator<Item = (&Name, IpAddr)> {
    let attachments = if pod.counts() { &*pod.attachments } else { &[] };
    attachments.iter().flat_map(|a| a.addresses.iter().map(move |address| (&a.network, *address)))
}
