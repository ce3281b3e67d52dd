//! A small cluster to try policies on, after that of the upstream tests: namespaces x, y and z with pods a, b
//! and c each. Every question is put to the verdict function and to the sets, and both must give the same
//! answer.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::Metadata;
use knit_policy::kubernetes as k8s;
use knit_policy::model::*;
use knit_policy::sets::{Change, Engine};
use knit_policy::verdict::{Flow, State, Verdict};

use super::filter::Filter;

pub struct Lab {
    pub engines: BTreeMap<Name, Engine>,
    filters: BTreeMap<(Name, Name), Filter>,
    pub problems: Vec<String>,
}

pub fn tcp(port: u16) -> Traffic {
    Traffic::Port(Protocol::Tcp, port)
}

pub fn udp(port: u16) -> Traffic {
    Traffic::Port(Protocol::Udp, port)
}

pub fn sctp(port: u16) -> Traffic {
    Traffic::Port(Protocol::Sctp, port)
}

/// Pod a of x is 10.0.0.10 and fd00::10, b of y 10.0.1.11, …; a and c run on n0, b on n1.
pub fn pod(namespace: &str, name: &str) -> Pod {
    let third = namespace.bytes().next().map_or(9, |b| b.saturating_sub(b'x'));
    let last = 10 + name.bytes().next().map_or(9, |b| b.saturating_sub(b'a'));
    let v6 = [0xfd00, u16::from(third), 0, 0, 0, 0, 0, u16::from(last)];
    Pod {
        uid: format!("{namespace}-{name}").into(),
        node: if name == "b" { "n1".into() } else { "n0".into() },
        labels: [("pod", name)].into_iter().collect(),
        ports: [
            ("serve-80-tcp", Protocol::Tcp, 80),
            ("serve-81-tcp", Protocol::Tcp, 81),
            ("serve-80-udp", Protocol::Udp, 80),
        ]
        .map(|(name, protocol, number)| NamedPort { name: name.into(), protocol, number })
        .into(),
        attachments: [attachment("default", true, &[[10, 0, third, last].into(), v6.into()])].into(),
        ..Pod::new(namespace, name)
    }
}

pub fn attachment(network: &str, primary: bool, addresses: &[IpAddr]) -> Attachment {
    Attachment { network: network.into(), primary, addresses: addresses.into() }
}

impl Lab {
    pub fn new() -> Self {
        let engines = ["n0", "n1"].map(|n| (Name::from(n), Engine::new(n))).into();
        let mut lab = Self { engines, filters: BTreeMap::new(), problems: Vec::new() };
        for (node, last) in [("n0", 1), ("n1", 2)] {
            let labels = [("kubernetes.io/os", "linux"), ("node", node)].into_iter().collect();
            let addresses = [[192, 168, 0, last].into()].into();
            lab.tell(|engine| {
                engine.set_node(Node {
                    name: node.into(),
                    labels: Labels::clone(&labels),
                    addresses: Box::clone(&addresses),
                });
            });
        }
        for namespace in ["x", "y", "z"] {
            lab.tell(|e| {
                e.set_namespace(Namespace::new(namespace, [("ns", namespace)].into_iter().collect()));
            });
            for name in ["a", "b", "c"] {
                lab.set_pod(&pod(namespace, name));
            }
        }
        lab
    }

    /// The cluster with these policies.
    pub fn with(yaml: &str) -> Self {
        let mut lab = Self::new();
        lab.apply(yaml);
        lab
    }

    pub fn tell(&mut self, event: impl Fn(&mut Engine)) {
        self.engines.values_mut().for_each(event);
        self.settle();
    }

    fn settle(&mut self) {
        for (node, engine) in &mut self.engines {
            for (network, changes) in engine.settle() {
                let filter = self.filters.entry((node.clone(), network)).or_default();
                changes.iter().for_each(|change: &Change| filter.apply(change));
            }
        }
    }

    pub fn set_pod(&mut self, pod: &Pod) {
        self.tell(|engine| engine.set_pod(pod.clone()));
    }

    /// Changes a pod.
    pub fn change(&mut self, namespace: &str, name: &str, change: impl Fn(&mut Pod)) {
        let key = PodKey::new(namespace, name);
        let mut pod = (**self.cluster().pod(&key).expect("a pod")).clone();
        change(&mut pod);
        self.set_pod(&pod);
    }

    /// Puts a whole namespace's pods into a Network, as its primary one, with the addresses that they have.
    pub fn move_to(&mut self, namespace: &str, network: &str) {
        for name in ["a", "b", "c"] {
            self.change(namespace, name, |pod| {
                pod.attachments[0].network = network.into();
            });
        }
    }

    /// Policies of any kind, as people write them.
    pub fn apply(&mut self, yaml: &str) {
        for text in yaml.split("---\n").filter(|t| !t.trim().is_empty()) {
            let (policy, problems) = read(text);
            self.problems.extend(problems.iter().map(ToString::to_string));
            if let Some(policy) = policy {
                self.tell(|engine| engine.set_policy(policy.clone()));
            }
        }
    }

    pub fn delete(&mut self, kind: Kind, namespace: &str, name: &str) {
        let name = PolicyName { kind, namespace: namespace.into(), name: name.into() };
        self.tell(|engine| engine.delete_policy(&name));
    }

    pub fn cluster(&self) -> &knit_policy::cluster::Cluster {
        self.engines["n0"].cluster()
    }

    /// `x/a`, `node/n0` or an address.
    pub fn address(&self, who: &str, network: &str, family: Family) -> IpAddr {
        if let Ok(address) = who.parse() {
            return address;
        }
        let (first, second) = who.split_once('/').expect("x/a, node/n0 or an address");
        let addresses: Vec<IpAddr> = if first == "node" {
            self.cluster().node(second).expect("a node").addresses.to_vec()
        } else {
            let pod = self.cluster().pod(&PodKey::new(first, second)).expect("a pod");
            let there = pod.attachments.iter().filter(|a| *a.network == *network);
            there.flat_map(|a| a.addresses.iter().copied()).collect()
        };
        addresses.into_iter().find(|a| Family::of(*a) == family).expect("an address")
    }

    pub fn judge(&self, flow: &Flow) -> Verdict {
        let verdict = self.cluster().judge(flow);
        assert_eq!(self.passes(flow), verdict.allowed(), "sets and verdict differ: {flow:?} {verdict:#?}");
        verdict
    }

    fn passes(&self, flow: &Flow) -> bool {
        let cluster = self.cluster();
        let node_of = |address| match cluster.owner(&flow.network, address) {
            knit_policy::cluster::AddressOwner::Pod(pod) => Some(pod.node.clone()),
            _ => None,
        };
        let (from, to) = (node_of(flow.source), node_of(flow.destination));
        let judged = |node: &Option<Name>, direction| {
            let filter = node.as_ref().and_then(|n| self.filters.get(&(n.clone(), flow.network.clone())));
            filter.is_none_or(|f| f.passes(direction, flow))
        };
        let own_node =
            to.as_ref().is_some_and(|n| from.is_none() && cluster.is_address_of_node(flow.source, n));
        judged(&from, Direction::Egress) && (own_node || judged(&to, Direction::Ingress))
    }

    pub fn verdict_in(&self, network: &str, from: &str, to: &str, traffic: Traffic) -> Verdict {
        let v6 = |who: &str| who.parse().is_ok_and(|a: IpAddr| a.is_ipv6());
        let family = if v6(from) || v6(to) { Family::V6 } else { Family::V4 };
        self.judge(&Flow {
            network: network.into(),
            source: self.address(from, network, family),
            destination: self.address(to, network, family),
            traffic,
            state: State::New,
        })
    }

    pub fn verdict(&self, from: &str, to: &str, traffic: Traffic) -> Verdict {
        self.verdict_in("default", from, to, traffic)
    }

    pub fn allows(&self, from: &str, to: &str, traffic: Traffic) -> bool {
        self.verdict(from, to, traffic).allowed()
    }

    pub fn allows_in(&self, network: &str, from: &str, to: &str, traffic: Traffic) -> bool {
        self.verdict_in(network, from, to, traffic).allowed()
    }

    /// Who of the nine pods reaches this one.
    pub fn reach(&self, to: &str, traffic: Traffic) -> String {
        let all = ["x", "y", "z"].into_iter().flat_map(|n| ["a", "b", "c"].map(|p| format!("{n}/{p}")));
        let able: Vec<String> = all.filter(|from| from != to && self.allows(from, to, traffic)).collect();
        able.join(" ")
    }

    /// How many elements all routers hold.
    pub fn elements(&self) -> usize {
        self.filters.values().map(|f| f.elements().len()).sum()
    }
}

/// Reads one policy, whatever kind it is.
pub fn read(yaml: &str) -> (Option<Policy>, Vec<Problem>) {
    // A namespace may be called y.
    let options = serde_saphyr::options! { strict_booleans: true };
    let text = yaml.trim_end().trim_end_matches("---");
    let value: serde_json::Value = serde_saphyr::from_str_with_options(text, options).expect("YAML");
    let kind = value["kind"].as_str().expect("a kind").to_owned();
    fn of<T: serde::de::DeserializeOwned + Metadata>(value: serde_json::Value) -> T {
        assert_eq!(value["apiVersion"], T::API_VERSION);
        serde_json::from_value(value).expect("an object")
    }
    let converted = match kind.as_str() {
        "NetworkPolicy" => k8s::network_policy(&of::<k8s::NetworkPolicy>(value)),
        "MultiNetworkPolicy" => k8s::multi_network_policy(&of(value)),
        "ClusterNetworkPolicy" => k8s::cluster_network_policy(&of(value)),
        "AdminNetworkPolicy" => k8s::admin_network_policy(&of(value)),
        "BaselineAdminNetworkPolicy" => k8s::baseline_admin_network_policy(&of(value)),
        other => panic!("{other}"),
    };
    (converted.object, converted.problems)
}

/// A NetworkPolicy of namespace x.
pub fn policy(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: \
            x}}\nspec: {spec}\n---\n"
    )
}

/// A ClusterNetworkPolicy.
pub fn cnp(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: \
            {name}}}\nspec: {spec}\n---\n"
    )
}

/// A MultiNetworkPolicy of namespace x.
pub fn mnp(name: &str, networks: &str, spec: &str) -> String {
    format!(
        "apiVersion: k8s.cni.cncf.io/v1beta1\nkind: MultiNetworkPolicy\nmetadata: {{name: {name}, \
            namespace: x, \
         annotations: {{k8s.v1.cni.cncf.io/policy-for: '{networks}'}}}}\nspec: {spec}\n---\n"
    )
}
