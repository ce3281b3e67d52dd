//! A policy of any kind, in one form.

use std::fmt;
use std::sync::Arc;

use super::{AddressRanges, KnownNamespace, Labels, Name, Pod, Ports, Protocol, Selector};

/// A policy of any kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Kind, namespace and name.
    pub name: PolicyName,
    /// When it is asked.
    pub tier: Tier,
    /// On which interfaces of a pod it acts.
    pub scope: Scope,
    /// The pods that it acts on.
    pub subject: Subject,
    /// What it says about traffic to them; nothing at all if it does not act on that direction. In the tier
    /// of [`Tier::Namespace`] a list isolates, even an empty one (rules 7 and 9).
    pub ingress: Option<Box<[Rule]>>,
    /// What it says about traffic from them.
    pub egress: Option<Box<[Rule]>>,
}

/// What a policy is called.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PolicyName {
    /// The kind of the object.
    pub kind: Kind,
    /// The namespace; empty for a kind that has none.
    pub namespace: Name,
    /// The name.
    pub name: Name,
}

/// The kinds of policy objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `policy.networking.k8s.io/v1alpha1` AdminNetworkPolicy.
    Admin,
    /// `policy.networking.k8s.io/v1alpha1` BaselineAdminNetworkPolicy.
    BaselineAdmin,
    /// `policy.networking.k8s.io/v1alpha2` ClusterNetworkPolicy.
    Cluster,
    /// `k8s.cni.cncf.io/v1beta1` MultiNetworkPolicy.
    Multi,
    /// `networking.k8s.io/v1` NetworkPolicy.
    Network,
}

/// When a policy is asked. The order is that of the tiers, and of policies in one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// First, lower numbers before higher ones; ties by name.
    Admin(i32),
    /// Then the policies of namespaces, all together.
    Namespace,
    /// At last, for pods that no policy of a namespace isolates.
    Baseline(i32),
}

/// On which interfaces of a pod a policy acts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// The primary one (rule 37).
    Primary,
    /// Those in these Networks.
    Networks(Box<[Name]>),
    /// Every one.
    Every,
}

/// Which pods: both parts match. Also a peer of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    /// The namespaces.
    pub namespaces: NamespaceMatch,
    /// The pods in them.
    pub pods: Selector,
}

/// Which namespaces.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NamespaceMatch {
    /// This one.
    Named(Name),
    /// Those with such labels.
    Selected(Selector),
}

/// One rule: traffic that one of the peers and one of the ports match (rule 10).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// Its own name, where the kind has one.
    pub name: Option<Name>,
    /// What becomes of what it matches.
    pub action: Action,
    /// The other side; `None` matches everybody, an empty list nobody.
    pub peers: Option<Box<[Peer]>>,
    /// The traffic; `None` matches all, an empty list none.
    pub ports: Option<Box<[PortMatch]>>,
}

/// What becomes of what a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// It may pass this direction.
    Accept,
    /// It is dropped.
    Deny,
    /// The next tier decides.
    Pass,
}

/// The other side of a connection.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// Pods of the same Network, by what they are: never Services, nodes, or pods in a node's namespace (rule
    /// 14).
    Pods(Subject),
    /// Addresses, whoever has them (rule 18).
    Addresses(AddressRanges),
    /// Nodes, by their labels.
    Nodes(Selector),
}

/// Ports of the destination.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PortMatch {
    /// By number.
    Numbers(Ports),
    /// By the name that the destination pod gives them (rule 21); of any protocol if none is given.
    Named(Name, Option<Protocol>),
}

/// Seen from the pod that a policy selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// To it.
    Ingress,
    /// From it.
    Egress,
}

// === impl Policy ===

impl Policy {
    /// Its rules for a direction, if it acts on it at all.
    #[must_use]
    pub fn rules(&self, direction: Direction) -> Option<&[Rule]> {
        match direction {
            Direction::Ingress => self.ingress.as_deref(),
            Direction::Egress => self.egress.as_deref(),
        }
    }

    /// Whether it acts on a direction: one of the namespace's tier isolates, the others have rules or no
    /// effect.
    #[must_use]
    pub fn acts_on(&self, direction: Direction) -> bool {
        self.rules(direction).is_some_and(|rules| self.tier == Tier::Namespace || !rules.is_empty())
    }

    /// Whether it acts on an interface in this Network.
    #[must_use]
    pub fn covers(&self, network: &str, primary: bool) -> bool {
        match &self.scope {
            Scope::Primary => primary,
            Scope::Networks(names) => names.iter().any(|n| **n == *network),
            Scope::Every => true,
        }
    }

    /// Where it stands among others: by tier, priority and name.
    #[must_use]
    pub fn order(&self) -> (Tier, &PolicyName) {
        (self.tier, &self.name)
    }
}

// === impl PolicyName ===

impl PolicyName {
    /// `namespace/name`, or just the name.
    #[must_use]
    pub fn full(&self) -> String {
        if self.namespace.is_empty() {
            self.name.as_ref().to_owned()
        } else {
            format!("{}/{}", self.namespace, self.name)
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.full())
    }
}

// === impl Kind ===

impl Kind {
    /// The name of the kind in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "AdminNetworkPolicy",
            Self::BaselineAdmin => "BaselineAdminNetworkPolicy",
            Self::Cluster => "ClusterNetworkPolicy",
            Self::Multi => "MultiNetworkPolicy",
            Self::Network => "NetworkPolicy",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admin(_) => "Admin",
            Self::Namespace => "NetworkPolicy",
            Self::Baseline(_) => "Baseline",
        })
    }
}

// === impl Subject ===

impl Subject {
    /// Whether a pod with these labels, in a namespace with those, is one of them.
    #[must_use]
    pub fn matches(&self, namespace: &str, namespace_labels: &Labels, pod_labels: &Labels) -> bool {
        let there = match &self.namespaces {
            NamespaceMatch::Named(name) => **name == *namespace,
            NamespaceMatch::Selected(selector) => selector.matches(namespace_labels),
        };
        there && self.pods.matches(pod_labels)
    }

    /// Whether a pod, in this namespace, is one of them as a peer of a rule. What depends on a label that is
    /// not known lets nobody in: then a rule that accepts does not match, and any other does.
    #[must_use]
    pub fn matches_peer(&self, namespace: &KnownNamespace<'_>, pod: &Pod, action: Action) -> bool {
        let otherwise = action != Action::Accept;
        let there = match &self.namespaces {
            NamespaceMatch::Named(name) => *name == pod.key.namespace,
            NamespaceMatch::Selected(selector) => selector.matches_namespace(namespace, otherwise),
        };
        there && self.pods.matches_pod(pod, otherwise)
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespaces {
            NamespaceMatch::Named(name) => write!(f, "pods {} of namespace {name}", self.pods),
            NamespaceMatch::Selected(s) => write!(f, "pods {} of namespaces {s}", self.pods),
        }
    }
}

// === impl Rule ===

impl Rule {
    /// A rule that matches everything.
    #[must_use]
    pub fn all(action: Action) -> Self {
        Self { name: None, action, peers: None, ports: None }
    }

    /// A rule that matches nothing.
    #[must_use]
    pub fn nothing(action: Action) -> Self {
        Self { name: None, action, peers: Some(Box::default()), ports: None }
    }

    /// The numbers among its ports.
    #[must_use]
    pub fn numbers(&self) -> Ports {
        let Some(ports) = &self.ports else { return Ports::all() };
        let numbers = ports.iter().filter_map(|port| match port {
            PortMatch::Numbers(numbers) => Some(numbers),
            PortMatch::Named(..) => None,
        });
        Ports::of_all(&numbers.collect::<Vec<_>>())
    }

    /// The names among its ports.
    pub fn names(&self) -> impl Iterator<Item = (&Name, Option<Protocol>)> {
        self.ports.iter().flatten().filter_map(|port| match port {
            PortMatch::Named(name, protocol) => Some((name, *protocol)),
            PortMatch::Numbers(_) => None,
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Accept => "accept",
            Self::Deny => "deny",
            Self::Pass => "pass",
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pods(pods) => pods.fmt(f),
            Self::Addresses(ranges) => write!(f, "addresses {ranges}"),
            Self::Nodes(selector) => write!(f, "nodes {selector}"),
        }
    }
}

impl fmt::Display for PortMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Numbers(ports) => ports.fmt(f),
            Self::Named(name, Some(protocol)) => write!(f, "{protocol} port named {name}"),
            Self::Named(name, None) => write!(f, "port named {name}"),
        }
    }
}

// === impl Direction ===

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        })
    }
}

/// Policies in the order in which they are asked.
pub(crate) fn sort(policies: &mut [Arc<Policy>]) {
    policies.sort_by(|a, b| a.order().cmp(&b.order()));
}
