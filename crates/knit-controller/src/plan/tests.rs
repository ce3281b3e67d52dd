//! The plan against a small model of the cluster: what it writes, and that it comes to rest.

mod agents;
mod anything;
mod held;
mod kept;
mod others;
mod queues;
mod retries;
mod shares;
mod underlay;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, Time};
use knit_api::names::{LINUX_RUNTIME, NETWORK_FINALIZER};
use knit_api::{
    AddressCounts, Family, HeldRanges, Network, NetworkSpec, NodeNetwork, NodeNetworkSpec, NodeNetworkStatus,
    NodeNetworkStatusNetwork, NodeRuntime, Subnet,
};

use super::{Action, Plan, plan};
use crate::cluster::{
    AgentLease, AttachmentView, BlockView, Cluster, HIGHEST_NUMBER, Memory, NamespaceView, NodeView, Now,
    Numbers,
};
use crate::config::Config;

/// A cluster that carries out what is planned, as the API would.
struct World {
    cluster: Cluster,
    memory: Memory,
    config: Config,
    now: Timestamp,
    serial: u64,
    /// The controller's own Lease is renewed, and that arrives.
    hears_itself: bool,
}

impl World {
    fn new() -> Self {
        Self {
            cluster: Cluster { hears_agents: true, ..Cluster::default() },
            memory: Memory::default(),
            config: Config::new("test"),
            now: Timestamp::from_second(1_000_000).expect("a time"),
            serial: 0,
            hears_itself: true,
        }
    }

    fn meta(&mut self, name: &str) -> ObjectMeta {
        self.serial += 1;
        ObjectMeta {
            name: Some(name.into()),
            uid: Some(format!("uid-{}", self.serial)),
            resource_version: Some(self.serial.to_string()),
            generation: Some(1),
            creation_timestamp: Some(Time(self.now)),
            ..ObjectMeta::default()
        }
    }

    fn pass(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
    }

    /// The time passes without a pass, and the next one begins to hear again.
    fn sleeps(&mut self, seconds: i64) {
        self.pass(seconds);
        self.plan();
    }

    fn node(&mut self, name: &str, address: &str, ranges: &[&str]) {
        let view = NodeView {
            resource_version: "1".into(),
            addresses: vec![address.parse().expect("an address")],
            pod_ranges: ranges.iter().map(|r| r.parse().expect("a range")).collect(),
            created: Some(self.now),
            ..NodeView::default()
        };
        self.cluster.nodes.insert(name.into(), Arc::new(view));
        let metadata = self.meta(name);
        let runtime = NodeRuntime {
            name: LINUX_RUNTIME.into(),
            version: "1".into(),
            features: vec!["layer2".into(), "layer3".into()],
            healthy: true,
            message: None,
        };
        let status = NodeNetworkStatus { runtimes: vec![runtime], ..NodeNetworkStatus::default() };
        let object = NodeNetwork { metadata, spec: NodeNetworkSpec {}, status: Some(status) };
        self.cluster.node_networks.insert(name.into(), Arc::new(object));
    }

    fn network(&mut self, name: &str, cidrs: &[&str], primary_for: Option<&str>) {
        self.pass(1);
        let spec = NetworkSpec {
            class: "knit".into(),
            subnets: cidrs.iter().map(|c| Subnet { cidr: (*c).into(), ..Subnet::default() }).collect(),
            primary_for: primary_for.map(|tenant| LabelSelector {
                match_labels: Some([("tenant".to_owned(), tenant.to_owned())].into()),
                match_expressions: None,
            }),
            ..NetworkSpec::default()
        };
        let metadata = self.meta(name);
        let network = Network { metadata, spec, status: None };
        self.insert(network);
    }

    fn insert(&mut self, network: Network) {
        let network = knit_model::Network::try_from(network).expect("a name");
        self.cluster.networks.insert(network.name().clone(), Arc::new(network));
    }

    /// The Network has our finalizer already.
    fn keep(&mut self, name: &str) {
        self.edit(name, |network| network.metadata.finalizers = Some(vec![NETWORK_FINALIZER.into()]));
    }

    /// Somebody changes a Network.
    fn edit(&mut self, name: &str, change: impl FnOnce(&mut Network)) {
        Arc::make_mut(self.cluster.networks.get_mut(name).expect("a Network")).edit(change);
    }

    /// Somebody deletes a Network.
    fn delete(&mut self, name: &str) {
        let now = Time(self.now);
        self.edit(name, |network| network.metadata.deletion_timestamp = Some(now));
    }

    fn namespace(&mut self, name: &str, tenant: &str) {
        let labels: BTreeMap<_, _> = [("tenant".to_owned(), tenant.to_owned())].into();
        self.cluster.namespaces.insert(name.into(), Arc::new(NamespaceView { labels }));
    }

    /// The node says this of a Network; what it said of it before is gone.
    fn says(&mut self, node: &str, network: &str, change: impl FnOnce(&mut NodeNetworkStatusNetwork)) {
        let object = Arc::make_mut(self.cluster.node_networks.get_mut(node).expect("a node"));
        let networks = &mut object.status.get_or_insert_default().networks;
        networks.retain(|n| n.name != network);
        let mut entry = NodeNetworkStatusNetwork {
            name: network.into(),
            ready: true,
            reason: "Ready".into(),
            message: None,
            attachments: 0,
            addresses: Vec::new(),
            blocks: 0,
            wants_block: false,
            policies: None,
        };
        change(&mut entry);
        networks.push(entry);
    }

    /// The node says that it has these addresses of a Network, and of no other.
    fn holds(&mut self, node: &str, network: &str, ranges: &[&str]) {
        let object = Arc::make_mut(self.cluster.node_networks.get_mut(node).expect("a node"));
        let ranges = ranges.iter().map(|range| (*range).to_owned()).collect();
        object.status.get_or_insert_default().held_ranges =
            vec![HeldRanges { network: network.into(), ranges }];
    }

    fn asks(&mut self, node: &str, network: &str) {
        let blocks = self.blocks_of(network, node).len();
        self.says(node, network, |n| {
            n.wants_block = true;
            n.blocks = i32::try_from(blocks).expect("a number");
        });
    }

    /// The steady clock began a thousand seconds before the test.
    fn steady(&self) -> Duration {
        Duration::from_secs(u64::try_from(self.now.as_second() - 999_000).expect("a time"))
    }

    fn plan(&mut self) -> Plan {
        let now = Now { wall: self.now, steady: self.steady() };
        if self.hears_itself {
            let own = AgentLease { version: format!("own {}", self.now), holds: Duration::from_secs(15) };
            self.cluster.leases.insert(self.config.lease_name.clone(), own);
        }
        plan(&self.cluster, &mut self.memory, &self.config, now)
    }

    /// Another controller leads, and knows what the API shows.
    fn new_leader(&mut self) {
        let kept = self.memory.numbers.kept_in.take();
        self.memory = Memory { numbers: Numbers::of(kept), ..Memory::default() };
    }

    fn carry_out(&mut self, plan: &Plan) {
        for action in &plan.actions {
            self.serial += 1;
            let version = Some(self.serial.to_string());
            match action.clone() {
                Action::MakeClass(mut class) => {
                    class.metadata = self.meta(class.metadata.name.as_deref().expect("a name"));
                    let name = class.metadata.name.clone().expect("a name");
                    self.cluster.classes.insert(name, Arc::new(class));
                }
                Action::MakeNetwork(mut network) => {
                    let finalizers = network.metadata.finalizers.clone();
                    network.metadata = self.meta(network.metadata.name.as_deref().expect("a name"));
                    network.metadata.finalizers = finalizers;
                    self.insert(network);
                }
                Action::GiveBlock(mut block) => {
                    let name = block.metadata.name.clone().expect("a name");
                    (block.metadata.uid, block.metadata.resource_version) = (version.clone(), version);
                    block.metadata.creation_timestamp = Some(Time(self.now));
                    let before = self.cluster.blocks.insert(name.clone(), Arc::new(BlockView::of(block)));
                    assert!(before.is_none(), "{name} was given twice");
                }
                Action::ReleaseBlock { name, resource_version, .. } => {
                    let block = self.cluster.blocks.remove(&name).expect("a block that is there");
                    assert!(resource_version.is_none_or(|only| only == block.resource_version));
                }
                Action::WantBlock { name, resource_version, reclaim, .. } => {
                    let block = self.cluster.blocks.get_mut(&name).expect("a block that is there");
                    assert_eq!(block.resource_version, resource_version);
                    let block = Arc::make_mut(block);
                    (block.reclaim, block.resource_version) = (reclaim, self.serial.to_string());
                }
                Action::NetworkStatus { name, status, .. } => {
                    let before = self.cluster.networks[name.as_str()].id();
                    assert!(before.is_none() || before == status.id, "the number of {name} changed");
                    self.edit(&name, |network| {
                        network.status = Some(status);
                        network.metadata.resource_version = version;
                    });
                }
                Action::ClassStatus { name, status } => {
                    Arc::make_mut(self.cluster.classes.get_mut(&name).expect("a class")).status =
                        Some(status);
                }
                Action::AttachmentStatus { name, .. } => self.attachment(&name).unanswered = None,
                Action::ForgetAttachment { name, .. } => {
                    let view = self.attachment(&name);
                    (view.node, view.ready, view.addresses) = (None, false, Vec::new());
                }
                Action::AttachmentFinalizers { name, .. } | Action::DeleteAttachment { name, .. } => {
                    self.cluster.attachments.retain(|_, a| a.name != name);
                }
                Action::KeepNumber(mut lease) => {
                    let text = lease.metadata.annotations.clone().unwrap_or_default()[HIGHEST_NUMBER].clone();
                    assert!(text.parse::<u32>().expect("a number") > self.memory.numbers.highest);
                    lease.metadata.resource_version = version;
                    self.memory.numbers = Numbers::of(Some(lease));
                }
                Action::Tell { .. } => {}
                Action::Finalizers { name, finalizers, .. } => {
                    self.edit(&name, |network| network.metadata.finalizers = Some(finalizers.clone()));
                    if finalizers.is_empty() && self.cluster.networks[name.as_str()].is_being_deleted() {
                        self.cluster.networks.remove(name.as_str());
                    }
                }
                Action::Taints { node, taints, .. } => {
                    Arc::make_mut(self.cluster.nodes.get_mut(&node).expect("a node")).taints = taints;
                }
            }
        }
    }

    /// Plans and carries out until nothing is left to do.
    fn settle(&mut self) {
        for _ in 0..10 {
            let plan = self.plan();
            if plan.actions.is_empty() {
                return;
            }
            self.carry_out(&plan);
        }
        panic!("it does not come to rest: {}", self.plan());
    }

    /// This attachment is there, and no other of its name.
    fn attach(&mut self, view: AttachmentView) {
        self.cluster.attachments.insert((view.namespace.clone(), view.name.clone()), Arc::new(view));
    }

    /// These attachments are there, and no others.
    fn attach_only(&mut self, views: impl IntoIterator<Item = AttachmentView>) {
        self.cluster.attachments.clear();
        for view in views {
            self.attach(view);
        }
    }

    fn attachment(&mut self, name: &str) -> &mut AttachmentView {
        let found = self.cluster.attachments.values_mut().find(|a| a.name == name);
        Arc::make_mut(found.expect("an attachment"))
    }

    fn blocks_of(&self, network: &str, node: &str) -> Vec<String> {
        self.cluster
            .blocks
            .values()
            .filter(|b| b.network == network && b.node == node)
            .filter_map(|b| Some(b.block.as_ref()?.to_string()))
            .collect()
    }

    fn accepted(&self, network: &str) -> (String, String) {
        let status = self.cluster.networks[network].status().expect("a status");
        let condition = status.conditions.iter().find(|c| c.type_ == "Accepted").expect("Accepted").clone();
        (condition.reason, condition.message)
    }

    fn ready(&self, network: &str) -> (String, String) {
        let status = self.cluster.networks[network].status().expect("a status");
        let condition = status.conditions.iter().find(|c| c.type_ == "Ready").expect("Ready").clone();
        (condition.reason, condition.message)
    }
}

#[test]
fn the_first_start_of_a_cluster_with_pod_ranges() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24", "fd00:0:0:1::/64"]);
    world.node("n2", "192.0.2.2", &["10.244.1.0/24"]);
    world.namespace("kube-system", "");
    let mut plans = Vec::new();
    for _ in 0..3 {
        let plan = world.plan();
        plans.push(plan.to_string());
        world.carry_out(&plan);
    }
    insta::assert_snapshot!(plans.join("then:\n"), @r"
    create NetworkClass knit
    create Network default
    then:
    status of NetworkClass knit: Accepted=True/Accepted features=[layer2,layer3]
    assign to n1 in Network default: 10.244.0.0/24 fd00:0:0:1::/120 as default-10-244-0-0
    assign to n2 in Network default: 10.244.1.0/24 as default-10-244-1-0
    status of Network default: id=1 Accepted=True/Accepted() Ready=True/Ready() primary-in=1
    then:
    ");
}

#[test]
fn without_pod_ranges_the_default_network_is_cut_up() {
    let mut world = World::new();
    world.config.default_subnets = vec![Subnet { cidr: "10.244.0.0/16".into(), ..Subnet::default() }];
    world.node("n1", "192.0.2.1", &[]);
    world.node("n2", "192.0.2.2", &[]);
    world.settle();
    assert_eq!(world.blocks_of("default", "n1"), ["10.244.0.0/29"]);
    assert_eq!(world.blocks_of("default", "n2"), ["10.244.0.8/29"]);
    // A further one when asked, and only once per wish.
    world.asks("n1", "default");
    world.settle();
    assert_eq!(world.blocks_of("default", "n1").len(), 2);
    world.settle();
    assert_eq!(world.blocks_of("default", "n1").len(), 2);
    world.asks("n1", "default");
    world.settle();
    assert_eq!(world.blocks_of("default", "n1").len(), 3);
    world.pass(30);
    world.settle();
    let status = world.cluster.networks["default"].status().expect("a status").clone();
    // 65,536 less the subnet's own, the gateway (both in n1's first block) and the broadcast address, less
    // blocks.
    assert_eq!(
        status.addresses,
        [AddressCounts { family: Family::V4, used: 0, free: 65_536 - 1 - 8 * 2 - 8 - 16 }]
    );
}

#[test]
fn blocks_only_for_nodes_that_ask_and_none_overlap_on_a_node() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.node("n2", "192.0.2.2", &["10.244.1.0/24"]);
    world.network("blue", &["10.77.0.0/24"], Some("blue"));
    world.network("red", &["10.77.0.0/24"], Some("red"));
    world.settle();
    assert!(world.blocks_of("blue", "n1").is_empty());
    world.asks("n1", "blue");
    world.asks("n1", "red");
    world.asks("n2", "red");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n1"), ["10.77.0.0/29"]);
    assert_eq!(world.blocks_of("red", "n2").len(), 1);
    let mine = world.blocks_of("red", "n1");
    assert_eq!(mine.len(), 1);
    assert_ne!(mine[0], "10.77.0.0/29");
}

#[test]
fn blocks_go_back_when_their_node_is_gone_for_long_enough() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.settle();
    let node = world.cluster.nodes.remove("n1").expect("a node");
    let plan = world.plan();
    assert_eq!(plan.to_string(), "");
    assert_eq!(plan.again, Some(world.steady() + Duration::from_secs(300)));
    // It comes back in time: nothing happens, and the clock starts again when it goes again.
    world.pass(200);
    world.cluster.nodes.insert("n1".into(), node);
    assert_eq!(world.plan().to_string(), "");
    world.cluster.nodes.remove("n1");
    world.pass(200);
    assert_eq!(world.plan().to_string(), "");
    world.sleeps(300);
    assert_eq!(world.plan().to_string(), "release default-10-244-0-0: node n1 is gone\n");
    world.settle();
    assert!(world.cluster.blocks.is_empty());
}

#[test]
fn a_node_that_joins_anew_gets_the_block_of_its_new_pod_ranges() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.settle();
    world.node("n1", "192.0.2.1", &["10.244.7.0/24"]);
    world.settle();
    assert_eq!(world.blocks_of("default", "n1"), ["10.244.7.0/24"]);
    // A range that the cluster gave on does not wait for the grace of the node that had it.
    world.cluster.nodes.remove("n1");
    world.node("n2", "192.0.2.2", &["10.244.7.0/24"]);
    world.settle();
    assert_eq!(world.blocks_of("default", "n1"), Vec::<String>::new());
    assert_eq!(world.blocks_of("default", "n2"), ["10.244.7.0/24"]);
}

#[test]
fn the_default_network_is_not_made_before_it_is_known_whether_nodes_have_pod_ranges() {
    let mut world = World::new();
    world.config.default_subnets = vec![Subnet { cidr: "10.10.0.0/16".into(), ..Subnet::default() }];
    world.config.pod_cidr_wait = Duration::from_secs(20);
    world.settle();
    assert!(!world.cluster.networks.contains_key("default"), "no Node is there yet");
    world.node("n1", "192.0.2.1", &[]);
    let over = world.steady() + Duration::from_secs(20);
    assert_eq!(world.plan().again, Some(over));
    world.pass(5);
    // The cluster gives it one.
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.settle();
    assert_eq!(world.cluster.networks["default"].ranges(), []);
    assert_eq!(world.blocks_of("default", "n1"), ["10.244.0.0/24"]);

    let mut without = World::new();
    without.config = world.config;
    without.node("n1", "192.0.2.1", &[]);
    without.pass(20);
    without.settle();
    assert_eq!(without.cluster.networks["default"].object().spec.subnets[0].cidr, "10.10.0.0/16");
    assert_eq!(without.blocks_of("default", "n1"), ["10.10.0.0/29"]);
}

#[test]
fn subnets_that_the_default_network_has_come_before_pod_ranges() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.network("default", &["10.10.0.0/16"], None);
    world.settle();
    assert_eq!(world.blocks_of("default", "n1"), ["10.10.0.0/29"]);
}

#[test]
fn a_default_network_without_any_range_says_what_to_do() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &[]);
    world.settle();
    let (reason, message) = world.accepted("default");
    assert_eq!(reason, "Invalid");
    assert!(message.contains("add subnets"), "{message}");
    assert!(world.cluster.blocks.is_empty());
}

#[test]
fn what_collides_is_refused_and_says_with_whom() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.cluster.service_ranges = vec!["10.96.0.0/16".parse().expect("a range")];
    world.namespace("a", "blue");
    world.network("blue", &["10.77.0.0/16"], Some("blue"));
    world.network("late", &["10.78.0.0/16"], Some("blue"));
    world.network("same", &["10.77.0.0/16"], Some("red"));
    world.network("nodes", &["192.0.2.0/24"], None);
    world.network("services", &["10.96.128.0/24"], None);
    world.network("pods", &["10.244.0.0/16"], None);
    world.network("broken", &["10.1.2.3/16"], None);
    world.network("classless", &["10.79.0.0/16"], None);
    world.network("selects", &["10.80.0.0/16"], None);
    world.edit("selects", |network| {
        let labels = Some([("a rack".to_owned(), "a".to_owned())].into());
        network.spec.node_selector = Some(LabelSelector { match_labels: labels, match_expressions: None });
    });
    world.edit("classless", |network| network.spec.class = "none".into());
    world.settle();
    let reason = |name: &str| world.accepted(name).0;
    assert_eq!(reason("default"), "Accepted");
    assert_eq!(reason("blue"), "Accepted");
    assert_eq!(reason("same"), "Accepted");
    assert_eq!(reason("late"), "PrimaryConflict");
    assert!(
        world.accepted("late").1.contains("namespace a already has Network blue"),
        "{:?}",
        world.accepted("late")
    );
    for (name, text) in [("nodes", "node n1"), ("services", "10.96.0.0/16"), ("pods", "podCIDR of node n1")] {
        assert_eq!(reason(name), "SubnetOverlap", "{name}");
        assert!(world.accepted(name).1.contains(text), "{:?}", world.accepted(name));
        assert_eq!(world.ready(name).0, "NotAccepted");
    }
    assert_eq!(reason("broken"), "Invalid");
    assert_eq!(reason("selects"), "Invalid");
    assert!(world.accepted("selects").1.contains("spec.nodeSelector"), "{:?}", world.accepted("selects"));
    assert_eq!(reason("classless"), "ClassNotFound");
    let primary = |name: &str| world.cluster.networks[name].status().and_then(|s| s.primary_namespaces);
    assert_eq!((primary("blue"), primary("late"), primary("default")), (Some(1), Some(0), Some(0)));
    // Nothing is given out of what is refused.
    for name in ["nodes", "services", "pods", "broken"] {
        world.asks("n1", name);
    }
    world.settle();
    for name in ["nodes", "services", "pods", "broken"] {
        assert!(world.blocks_of(name, "n1").is_empty(), "{name}");
    }
}

#[test]
fn a_network_stays_while_it_is_used() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.network("blue", &["10.77.0.0/16"], None);
    world.asks("n1", "blue");
    world.settle();
    let finalizers = world.cluster.networks["blue"].object().metadata.finalizers.as_deref();
    assert_eq!(finalizers, Some(&[NETWORK_FINALIZER.to_owned()][..]));
    world.delete("blue");
    world.says("n1", "blue", |n| n.attachments = 2);
    world.namespace("a", "blue");
    let allowed = serde_json::from_value(serde_json::json!({"from": "All"})).expect("all");
    world.edit("blue", |network| network.spec.allowed_namespaces = Some(allowed));
    let view = AttachmentView {
        namespace: "a".into(),
        network: "blue".into(),
        node: Some("n1".into()),
        ready: true,
        ..AttachmentView::default()
    };
    world.attach(view);
    world.settle();
    assert_eq!(world.ready("blue").0, "InUse");
    assert_eq!(world.blocks_of("blue", "n1").len(), 1);
    world.cluster.attachments.clear();
    world.pass(30);
    world.settle();
    assert!(world.ready("blue").1.contains("2 pods on node n1"), "{:?}", world.ready("blue"));
    world.says("n1", "blue", |_| {});
    world.settle();
    assert!(!world.cluster.networks.contains_key("blue"));
    assert!(world.blocks_of("blue", "n1").is_empty());
}

#[test]
fn a_network_without_addresses_tells_people() {
    let mut world = World::new();
    for i in 1..=3 {
        world.node(&format!("n{i}"), &format!("192.0.2.{i}"), &[&format!("10.244.{i}.0/24")]);
    }
    world.network("tiny", &["10.77.0.0/28"], None);
    for node in ["n1", "n2", "n3"] {
        world.asks(node, "tiny");
    }
    world.settle();
    let plan = world.plan();
    assert_eq!(plan.actions, []);
    assert_eq!(plan.notes.len(), 1);
    assert!(plan.to_string().starts_with("event on Network tiny: AddressesExhausted: "), "{plan}");
}

#[test]
fn a_nodes_address_that_cannot_be_read_was_anybodys_without_a_word() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.1.0/24"]);
    let node = serde_json::json!({"metadata": {"name": "n2"}, "status": {"addresses":
        (0..5).map(|n| serde_json::json!({"type": "InternalIP", "address": format!("192.0.2.{n}/24")}))
            .collect::<Vec<_>>()}});
    let node: k8s_openapi::api::core::v1::Node = serde_json::from_value(node).expect("a Node");
    let view =
        NodeView { pod_ranges: vec!["10.244.2.0/24".parse().expect("a range")], ..NodeView::of(&node) };
    world.cluster.nodes.insert("n2".into(), Arc::new(view));
    world.settle();
    let plan = world.plan();
    assert_eq!((plan.actions.len(), plan.notes.len()), (0, 1), "{plan}");
    let text = plan.to_string();
    assert!(text.starts_with("event on Node n2: AddressUnreadable: "), "{text}");
    assert!(text.contains("\"192.0.2.0/24\"") && text.contains("and 2 more"), "{text}");
}

#[test]
fn numbers_are_not_given_again_while_caches_lag() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.settle();
    world.network("b", &["10.77.0.0/16"], None);
    world.keep("b");
    // The status of b is written, but the cache does not show it; then a appears, which sorts first.
    let first = world.plan();
    let id = |plan: &Plan, wanted: &str| {
        plan.actions.iter().find_map(|action| match action {
            Action::NetworkStatus { name, status, .. } if name == wanted => status.id,
            _ => None,
        })
    };
    assert_eq!(id(&first, "b"), Some(2));
    world.network("a", &["10.78.0.0/16"], None);
    world.keep("a");
    let second = world.plan();
    assert_eq!((id(&second, "a"), id(&second, "b")), (Some(3), Some(2)));
    // A number that a deleted Network had is not given again either.
    world.cluster.networks.remove("b");
    world.network("c", &["10.79.0.0/16"], None);
    world.keep("c");
    assert_eq!(id(&world.plan(), "c"), Some(4));
}

#[test]
fn two_networks_with_one_number_the_older_keeps_it() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.network("old", &["10.77.0.0/16"], None);
    world.network("new", &["10.78.0.0/16"], None);
    for name in ["old", "new"] {
        let status = knit_api::NetworkStatus { id: Some(9), ..Default::default() };
        world.edit(name, |network| network.status = Some(status));
    }
    world.settle();
    assert_eq!(world.accepted("old").0, "Accepted");
    assert_eq!(world.accepted("new").0, "Invalid");
    assert!(
        world.accepted("new").1.contains("its ID 9 belongs to Network old"),
        "{:?}",
        world.accepted("new")
    );
}
