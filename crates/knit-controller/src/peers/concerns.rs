//! What is wrong with policies in the light of everything else, and is told by events: they name Networks
//! that do not exist, ports that no pod has, or more labels than nodes are told of; or nobody enforces them,
//! where NetworkPolicies are left to `plan::policies`.

use std::collections::BTreeMap;
use std::time::Duration;

use knit_api::names::DEFAULT_NETWORK;
use knit_policy::model::{Direction, Kind, Name, Policy, PolicyName, Rule, Scope};

use super::keys::Unheard;
use super::plan::Peers;

/// What a policy names.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Topic {
    Labels,
    Network,
    Port,
    NotEnforced,
}

/// So many Networks are named.
const MAX_NAMED: usize = 3;

impl Topic {
    const FIRST: Self = Self::Labels;

    /// For how long it may be so: what a policy names may be made right after it.
    fn grace(self) -> Duration {
        Duration::from_secs(match self {
            Self::Labels | Self::NotEnforced => 0,
            Self::Network => 10,
            Self::Port => 60,
        })
    }
}

/// What is wrong, and since when; and of what that was told.
#[derive(Debug, Default)]
pub(super) struct Concerns {
    since: BTreeMap<(PolicyName, Topic), Duration>,
    told: BTreeMap<(PolicyName, Topic), String>,
}

/// The names that pods give their ports, and how many do in each namespace.
#[derive(Debug, Default)]
pub(super) struct PortNames(BTreeMap<Name, BTreeMap<Name, usize>>);

impl Concerns {
    /// What is to be told now, of which policies: once, as long as it stays so.
    pub(super) fn news(&mut self, peers: &Peers, now: Duration) -> Vec<(PolicyName, Topic, String)> {
        let found = found(peers);
        self.since.retain(|about, _| found.contains_key(about));
        self.told.retain(|about, _| found.contains_key(about));
        let mut news = Vec::new();
        for (about, what) in found {
            let since = *self.since.entry(about.clone()).or_insert(now);
            if now >= since + about.1.grace() && self.told.insert(about.clone(), what.clone()).is_none() {
                news.push((about.0, about.1, what));
            }
        }
        news
    }
}

impl Concerns {
    /// What is wrong with a policy, of all that was told.
    pub(super) fn about(&self, policy: &PolicyName) -> Vec<(Topic, &str)> {
        let from = (policy.clone(), Topic::FIRST);
        let all = self.told.range(from..).take_while(|((name, _), _)| name == policy);
        all.map(|((_, topic), what)| (*topic, what.as_str())).collect()
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
    let not_enforced = peers.policies().filter_map(|policy| {
        let what = not_enforced(policy, peers)?;
        Some(((policy.name.clone(), Topic::NotEnforced), what))
    });
    if peers.left_to_others().cluster {
        return not_enforced.collect();
    }
    let unheard = peers.unheard().iter().map(|(name, unheard)| {
        let what = too_many_labels(name, unheard);
        ((name.clone(), Topic::Labels), what)
    });
    let others = peers.policies().flat_map(|policy| {
        let network = unknown_network(policy, peers).map(|what| (Topic::Network, what));
        let port = unknown_port(policy, peers.port_names()).map(|what| (Topic::Port, what));
        network.into_iter().chain(port).map(|(topic, what)| ((policy.name.clone(), topic), what))
    });
    unheard.chain(others).chain(not_enforced).collect()
}

/// Where Knit leaves a policy to others. The author of a NetworkPolicy is told elsewhere.
fn not_enforced(policy: &Policy, peers: &Peers) -> Option<String> {
    if policy.name.kind == Kind::Network {
        return None;
    }
    if peers.left_to_others().cluster {
        return Some(
            "Knit does not enforce policies in this cluster; unless another component does, this policy has \
             no effect."
                .to_owned(),
        );
    }
    let networks: Vec<Name> = peers.left_networks_of(policy).into_iter().collect();
    let named = networks.iter().take(MAX_NAMED).map(|name| &**name).collect::<Vec<_>>().join(", ");
    let networks = match networks.len() {
        0 => return None,
        1 => format!("Network {named}"),
        count if count > MAX_NAMED => format!("Networks {named} and {} more", count - MAX_NAMED),
        _ => format!("Networks {named}"),
    };
    Some(format!(
        "Knit does not enforce policies in {networks}; unless another component does, this policy has no \
         effect there."
    ))
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

#[cfg(test)]
mod tests {
    use knit_policy::model::{Labels, NamespaceMatch, Selector, Subject, Tier};

    use super::super::plan::{LeftToOthers, NetworkFacts};
    use super::*;

    fn policy(kind: Kind, scope: Scope) -> Policy {
        let namespace = if matches!(kind, Kind::Network | Kind::Multi) { "shop" } else { "" };
        let all = || NamespaceMatch::Selected(Selector::everything());
        let namespaces = if namespace.is_empty() { all() } else { NamespaceMatch::Named(namespace.into()) };
        Policy {
            name: PolicyName { kind, namespace: namespace.into(), name: "p".into() },
            tier: Tier::Namespace,
            scope,
            subject: Subject { namespaces, pods: Selector::everything() },
            ingress: Some(Box::default()),
            egress: None,
        }
    }

    /// Namespace shop is in the default Network, sky in blue; there are policies of every kind.
    fn cluster(left: LeftToOthers) -> Peers {
        let mut peers = Peers::new(left);
        for name in ["default", "blue"] {
            peers.set_network(&name.into(), Some(NetworkFacts { enforced: true, ..NetworkFacts::default() }));
        }
        peers.set_namespace(&"shop".into(), Some(Labels::default()), None);
        peers.set_namespace(&"sky".into(), Some(Labels::default()), Some("blue".into()));
        let named = Scope::Networks(["blue".into()].into());
        for policy in [
            policy(Kind::Network, Scope::Primary),
            policy(Kind::Cluster, Scope::Primary),
            policy(Kind::Admin, Scope::Primary),
            policy(Kind::BaselineAdmin, Scope::Primary),
            policy(Kind::Multi, named),
        ] {
            peers.set_policy(&policy.name.clone(), Some(policy));
        }
        peers
    }

    fn told(concerns: &mut Concerns, peers: &Peers) -> Vec<String> {
        let news = concerns.news(peers, Duration::ZERO).into_iter();
        let about = news.filter(|(_, topic, _)| *topic == Topic::NotEnforced);
        about.map(|(policy, _, what)| format!("{policy}: {what}")).collect()
    }

    #[test]
    fn authors_of_all_kinds_but_networkpolicy_heard_nothing_where_policies_are_left_to_others() {
        let (all, mut concerns) =
            (LeftToOthers { cluster: true, ..LeftToOthers::default() }, Concerns::default());
        let peers = cluster(all);
        let news = told(&mut concerns, &peers);
        let kinds: Vec<&str> = news.iter().filter_map(|what| what.split(' ').next()).collect();
        assert_eq!(
            kinds,
            [
                "AdminNetworkPolicy",
                "BaselineAdminNetworkPolicy",
                "ClusterNetworkPolicy",
                "MultiNetworkPolicy"
            ],
            "of NetworkPolicies each is told already"
        );
        assert!(news.iter().all(|what| what.contains("in this cluster; unless another")), "{news:?}");
        assert!(told(&mut concerns, &peers).is_empty(), "once");
        assert!(!peers.asks_for_pods(), "nobody watches pods for the sake of what is told");
    }

    #[test]
    fn a_policy_that_only_one_network_leaves_to_others_is_told_of_that_one() {
        let (mut peers, mut concerns) = (cluster(LeftToOthers::default()), Concerns::default());
        assert!(told(&mut concerns, &peers).is_empty());
        let others = NetworkFacts { left_to_others: true, ..NetworkFacts::default() };
        peers.set_network(&"blue".into(), Some(others.clone()));
        let news = told(&mut concerns, &peers);
        assert_eq!(news.len(), 4, "{news:?}");
        assert!(news.iter().all(|what| what.contains("policies in Network blue;")), "{news:?}");
        // Nobody's pods are in it any more, but what names it still acts there.
        peers.set_namespace(&"sky".into(), Some(Labels::default()), None);
        assert!(told(&mut concerns, &peers).is_empty());
        peers.set_namespace(&"sky".into(), Some(Labels::default()), Some("blue".into()));
        let again = told(&mut concerns, &peers);
        assert_eq!(again.len(), 3, "those of the cluster: {again:?}");
        peers.set_network(&"blue".into(), Some(NetworkFacts { left_to_others: false, ..others }));
        assert!(told(&mut concerns, &peers).is_empty());
    }

    #[test]
    fn beside_another_cni_plugin_policies_of_the_cluster_are_told_of_the_default_network() {
        let beside = LeftToOthers { default_network: true, ..LeftToOthers::default() };
        let news = told(&mut Concerns::default(), &cluster(beside));
        assert_eq!(news.len(), 3, "the fourth is about blue only: {news:?}");
        assert!(news.iter().all(|what| what.contains("policies in Network default;")), "{news:?}");
    }
}
