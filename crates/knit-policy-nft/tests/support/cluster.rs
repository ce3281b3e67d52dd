//! The real engine with a real table: policies as people write them.

use std::net::IpAddr;

use k8s_openapi::Metadata;
use knit_kernel::NetNs;
use knit_policy::kubernetes as k8s;
use knit_policy::model::{
    Attachment, DEFAULT_NETWORK, Kind, NamedPort, Namespace, Node, Pod, Policy, PolicyName, Protocol,
};
use knit_policy::sets::Engine;
use knit_policy_nft::live::{Followed, Touched};
use knit_policy_nft::{Applied, PolicyTable, Router};
use knit_testbed::ip;

/// The node that the router is on.
pub const HERE: &str = "here";

/// An engine and the table of one of its routers, always in step.
pub struct Policies {
    pub engine: Engine,
    pub table: PolicyTable,
    /// What the last change touched.
    pub touched: Touched,
}

impl Policies {
    pub fn new(space: &NetNs, router: Router) -> Self {
        let mut engine = Engine::new(HERE);
        let addresses = [ip("192.0.2.1"), ip("2001:db8:2::1")].into();
        engine.set_node(Node { name: HERE.into(), labels: Default::default(), addresses });
        for name in ["x", "y", "z"] {
            engine.set_namespace(Namespace::new(name, [("ns", name)].into_iter().collect()));
        }
        let table = PolicyTable::open_in(space, router).expect("a table");
        let mut policies = Self { engine, table, touched: Touched::default() };
        policies.table.sync(&Default::default()).expect("nothing yet");
        policies
    }

    /// Has the kernel do what the engine has been told.
    #[track_caller]
    pub fn settle(&mut self) -> Applied {
        let mut all = Applied::default();
        for (network, changes) in self.engine.settle() {
            assert_eq!(&*network, DEFAULT_NETWORK);
            let applied = self.table.apply(&changes).expect("applied");
            all =
                Applied { changes: all.changes + applied.changes, touched: all.touched.and(applied.touched) };
        }
        self.touched = all.touched.clone();
        all
    }

    #[track_caller]
    pub fn pod(&mut self, who: &str, node: &str, addresses: &[IpAddr]) {
        self.engine.set_pod(pod(who, node, addresses));
        self.settle();
    }

    #[track_caller]
    pub fn apply(&mut self, yaml: &str) -> Applied {
        for text in yaml.split("---\n").filter(|text| !text.trim().is_empty()) {
            self.engine.set_policy(read(text));
        }
        self.settle()
    }

    #[track_caller]
    pub fn delete(&mut self, namespace: &str, name: &str) -> Applied {
        let kind = if namespace.is_empty() { Kind::Cluster } else { Kind::Network };
        self.engine.delete_policy(&PolicyName { kind, namespace: namespace.into(), name: name.into() });
        self.settle()
    }

    /// Live connections follow the last change.
    #[track_caller]
    pub fn follow(&mut self) -> Followed {
        self.table.follow(&self.touched.clone()).expect("followed")
    }

    /// How many packets were denied so far.
    pub fn denied(&mut self) -> u64 {
        self.table.counters().expect("counted").values().map(|denied| denied.packets).sum()
    }
}

/// Pod `x/a` has the label `pod: a` and names for a few ports.
pub fn pod(who: &str, node: &str, addresses: &[IpAddr]) -> Pod {
    let (namespace, name) = who.split_once('/').expect("namespace/name");
    let attachment =
        Attachment { network: DEFAULT_NETWORK.into(), primary: true, addresses: addresses.into() };
    Pod {
        uid: who.into(),
        node: node.into(),
        labels: [("pod", name)].into_iter().collect(),
        ports: [("web", Protocol::Tcp, 80), ("web", Protocol::Udp, 80), ("admin", Protocol::Tcp, 81)]
            .map(|(name, protocol, number)| NamedPort { name: name.into(), protocol, number })
            .into(),
        attachments: [attachment].into(),
        ..Pod::new(namespace, name)
    }
}

/// A NetworkPolicy, or a ClusterNetworkPolicy.
pub fn read(yaml: &str) -> Policy {
    fn of<T: serde::de::DeserializeOwned + Metadata>(value: serde_json::Value) -> T {
        assert_eq!(value["apiVersion"], T::API_VERSION);
        serde_json::from_value(value).expect("an object")
    }
    // A namespace may be called y.
    let options = serde_saphyr::options! { strict_booleans: true };
    let text = yaml.trim_end().trim_end_matches("---");
    let value: serde_json::Value = serde_saphyr::from_str_with_options(text, options).expect("YAML");
    let converted = match value["kind"].as_str() {
        Some("NetworkPolicy") => k8s::network_policy(&of::<k8s::NetworkPolicy>(value)),
        Some("ClusterNetworkPolicy") => k8s::cluster_network_policy(&of(value)),
        other => panic!("{other:?}"),
    };
    assert!(converted.problems.is_empty(), "{:?}", converted.problems);
    converted.object.expect("a policy")
}

/// A NetworkPolicy of namespace x.
pub fn policy(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: \
         x}}\nspec: {spec}\n---\n"
    )
}

/// A ClusterNetworkPolicy.
pub fn cluster_policy(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {{name: \
         {name}}}\nspec: {spec}\n---\n"
    )
}
