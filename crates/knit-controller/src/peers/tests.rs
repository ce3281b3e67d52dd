//! What slices hold, and that the order of events does not matter.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use knit_policy::model::{
    Action, Kind, Labels, Name, NamespaceMatch, Operator, Peer, PodKey, Policy, PolicyName, PortMatch,
    Requirement, Rule, Scope, Selector, Subject, Tier,
};
use proptest::prelude::*;

use super::concerns::Concerns;
use super::plan::{AttachmentFacts, BlockFacts, NetworkFacts, Peers, PodFacts};
use knit_api::PolicyPeer;

use super::{WRITE_INTERVAL, due, parts, slice_name};

/// When everything happens, and when nothing of it lingers any more.
const NOW: Duration = Duration::from_secs(1000);
const LATER: Duration = Duration::from_secs(1000 + 600);

fn labels(list: &[(&str, &str)]) -> Labels {
    list.iter().map(|(key, value)| (*key, *value)).collect()
}

fn pods_labelled(key: &str, value: &str) -> Peer {
    let pods = Selector::labels([(key, value)]);
    Peer::Pods(Subject { namespaces: NamespaceMatch::Selected(Selector::everything()), pods })
}

fn policy(name: &str, namespace: &str, scope: Scope, peer: Peer) -> Policy {
    let rule = Rule { name: None, action: Action::Accept, peers: Some([peer].into()), ports: None };
    Policy {
        name: PolicyName { kind: Kind::Network, namespace: namespace.into(), name: name.into() },
        tier: Tier::Namespace,
        scope,
        subject: Subject {
            namespaces: NamespaceMatch::Named(namespace.into()),
            pods: Selector::everything(),
        },
        ingress: Some([rule].into()),
        egress: None,
    }
}

fn pod(uid: &str, node: &str, address: [u8; 4], list: &[(&str, &str)]) -> PodFacts {
    PodFacts {
        uid: uid.into(),
        created: 1,
        node: node.into(),
        labels: labels(list),
        ports: Vec::new(),
        addresses: vec![IpAddr::from(address)],
        is_no_peer: false,
    }
}

fn network(range: &str) -> NetworkFacts {
    let ranges = vec![range.parse().expect("a range")];
    NetworkFacts { enforced: true, left_to_others: false, ranges, services: BTreeSet::new() }
}

fn block(network: &str, node: &str, range: &str) -> BlockFacts {
    let ranges = vec![range.parse().expect("a range")];
    BlockFacts { network: network.into(), node: node.into(), ranges }
}

/// Networks default and blue, nodes a and b with a block of each, a pod of namespace shop on each node.
fn cluster() -> Peers {
    let mut peers = Peers::default();
    peers.set_network(&"default".into(), Some(network("10.244.0.0/16")));
    peers.set_network(&"blue".into(), Some(network("10.77.0.0/16")));
    for (name, facts) in [
        ("d-a", block("default", "a", "10.244.1.0/24")),
        ("d-b", block("default", "b", "10.244.2.0/24")),
        ("b-a", block("blue", "a", "10.77.1.0/24")),
        ("b-b", block("blue", "b", "10.77.2.0/24")),
    ] {
        peers.set_block(&name.into(), Some(facts));
    }
    peers.set_namespace(&"shop".into(), Some(Labels::default()), None);
    let web = pod("u1", "a", [10, 244, 1, 5], &[("app", "web"), ("secret", "no")]);
    peers.set_pod(&PodKey::new("shop", "web"), Some(web));
    peers.set_pod(&PodKey::new("shop", "db"), Some(pod("u2", "b", [10, 244, 2, 6], &[("app", "db")])));
    peers
}

fn set(peers: &mut Peers, policy: Policy) {
    let name = policy.name.clone();
    peers.set_policy(&name, Some(policy));
}

fn place(network: &str, node: &str) -> (Name, Name) {
    (network.into(), node.into())
}

#[test]
fn nothing_is_said_while_no_policy_asks_and_only_what_is_asked_for_then() {
    let mut peers = cluster();
    assert!(peers.settle(NOW).is_empty() && !peers.asks_for_pods());
    set(&mut peers, policy("p", "shop", Scope::Primary, pods_labelled("app", "web")));
    assert!(peers.asks_for_pods());
    assert_eq!(peers.settle(NOW), [place("default", "a")].into(), "the pod on b is nobody's peer");
    let slice = &peers.slices()[&place("default", "a")];
    assert_eq!(slice[0].labels, [("app".to_owned(), "web".to_owned())].into(), "and no other label");
    assert_eq!(slice[0].addresses, ["10.244.1.5"]);
    peers.set_policy(&policy("p", "shop", Scope::Primary, pods_labelled("a", "b")).name, None);
    peers.settle(NOW);
    assert_eq!(peers.settle(LATER), [place("default", "a")].into());
    assert!(peers.slices().is_empty());
}

#[test]
fn whoever_created_and_deleted_one_policy_had_the_slices_of_all_nodes_written_each_time() {
    let mut peers = cluster();
    let seconds = |n| NOW + Duration::from_secs(n);
    let (one, alone) = (PodKey::new("sky", "one"), pod("u4", "b", [10, 244, 2, 9], &[]));
    peers.set_namespace(&"sky".into(), Some(Labels::default()), None);
    peers.set_pod(&one, Some(alone.clone()));
    let asks = policy("p", "sky", Scope::Primary, pods_labelled("app", "web"));
    set(&mut peers, asks.clone());
    assert_eq!(peers.settle(NOW).len(), 1);
    for n in 1..100 {
        peers.set_policy(&asks.name, None);
        assert!(peers.settle(seconds(20 * n)).is_empty(), "it is told for a while longer");
        // So it is if the only pod that the policy is about comes and goes.
        set(&mut peers, asks.clone());
        peers.set_pod(&one, None);
        assert!(peers.settle(seconds(20 * n + 5)).is_empty());
        peers.set_pod(&one, Some(alone.clone()));
        assert!(peers.settle(seconds(20 * n + 10)).is_empty());
    }
    peers.set_policy(&asks.name, None);
    assert!(peers.settle(seconds(2000)).is_empty() && peers.settle(seconds(2599)).is_empty());
    assert_eq!(peers.settle(seconds(2600)), [place("default", "a")].into());
    assert!(peers.slices().is_empty());
}

#[test]
fn an_address_outside_of_its_nodes_blocks_does_not_count() {
    let mut peers = cluster();
    set(&mut peers, policy("p", "shop", Scope::Every, pods_labelled("app", "web")));
    // As a kubelet that lies, or an agent that announces what is another node's.
    peers.set_pod(&PodKey::new("shop", "liar"), Some(pod("u3", "b", [10, 244, 1, 9], &[("app", "web")])));
    let announced = AttachmentFacts {
        pod: PodKey::new("shop", "liar"),
        network: "blue".into(),
        node: "b".into(),
        addresses: vec![IpAddr::from([10, 77, 1, 9]), IpAddr::from([10, 99, 0, 1])],
    };
    peers.set_attachment(&PodKey::new("shop", "liar-net1"), Some(announced.clone()));
    peers.settle(NOW);
    assert!(!peers.slices().contains_key(&place("default", "b")), "{:?}", peers.slices());
    assert!(!peers.slices().contains_key(&place("blue", "b")), "{:?}", peers.slices());
    // One of the Network that is in nobody's block is a static address, and is its.
    let fixed = AttachmentFacts { addresses: vec![IpAddr::from([10, 77, 200, 1])], ..announced.clone() };
    peers.set_attachment(&PodKey::new("shop", "liar-net1"), Some(fixed.clone()));
    peers.settle(NOW);
    assert_eq!(peers.slices()[&place("blue", "b")][0].addresses, ["10.77.200.1"]);
    // Until the range is another node's.
    peers.set_block(&"late".into(), Some(block("blue", "a", "10.77.200.0/24")));
    peers.settle(NOW);
    assert!(!peers.slices().contains_key(&place("blue", "b")));
    // What another node says of a pod is not true.
    peers.set_block(&"late".into(), None);
    peers.set_attachment(
        &PodKey::new("shop", "liar-net1"),
        Some(AttachmentFacts { node: "a".into(), ..fixed }),
    );
    peers.settle(NOW);
    assert!(!peers.slices().keys().any(|(network, _)| **network == *"blue"), "{:?}", peers.slices());
}

#[test]
fn a_namespace_with_its_own_network_has_its_peers_there() {
    let mut peers = cluster();
    peers.set_namespace(&"sky".into(), Some(Labels::default()), Some("blue".into()));
    peers.set_pod(&PodKey::new("sky", "one"), Some(pod("u4", "a", [10, 77, 1, 4], &[("app", "web")])));
    set(&mut peers, policy("p", "sky", Scope::Primary, pods_labelled("app", "web")));
    assert_eq!(peers.settle(NOW), [place("blue", "a")].into(), "web of shop is in another Network");
    // It is left to others there.
    peers.set_network(&"blue".into(), Some(NetworkFacts { enforced: false, ..network("10.77.0.0/16") }));
    peers.settle(NOW);
    assert!(peers.slices().is_empty());
}

#[test]
fn pods_behind_cluster_services_are_told_of_in_the_default_network() {
    let mut peers = cluster();
    let services = BTreeSet::from([Name::from("shop")]);
    peers.set_network(&"blue".into(), Some(NetworkFacts { services, ..network("10.77.0.0/16") }));
    peers.set_namespace(&"sky".into(), Some(Labels::default()), Some("blue".into()));
    peers.set_pod(&PodKey::new("sky", "one"), Some(pod("u4", "a", [10, 77, 1, 4], &[])));
    let mut asks = policy("p", "sky", Scope::Primary, pods_labelled("app", "db"));
    (asks.ingress, asks.egress) = (None, asks.ingress);
    set(&mut peers, asks);
    assert_eq!(peers.settle(NOW), [place("default", "b")].into());
}

#[test]
fn a_port_is_told_of_by_its_name_if_a_rule_for_egress_names_it() {
    let mut peers = cluster();
    let mut asks = policy("p", "shop", Scope::Primary, pods_labelled("app", "db"));
    let ports: Box<[PortMatch]> = [PortMatch::Named("sql".into(), None)].into();
    asks.egress = asks.ingress.take().map(|mut rules| {
        rules[0].ports = Some(ports);
        rules
    });
    set(&mut peers, asks);
    let key = PodKey::new("shop", "db");
    let named = |name: &str| knit_policy::model::NamedPort {
        name: name.into(),
        protocol: knit_policy::model::Protocol::Tcp,
        number: 5432,
    };
    let mut db = pod("u2", "b", [10, 244, 2, 6], &[("app", "db")]);
    db.ports = vec![named("sql"), named("other")];
    peers.set_pod(&key, Some(db));
    peers.settle(NOW);
    let ports = &peers.slices()[&place("default", "b")][0].ports;
    assert_eq!(ports.iter().map(|port| port.name.as_str()).collect::<Vec<_>>(), ["sql"]);
}

#[test]
fn names_of_slices_do_not_run_into_each_other() {
    assert_ne!(slice_name(&place("a", "b.c"), 0), slice_name(&place("a.b", "c"), 0));
    assert!(slice_name(&place(&"n".repeat(63), &"m".repeat(253)), 12).len() < 100);
}

/// One event of a random cluster.
#[derive(Clone, Debug)]
enum Step {
    Policy(u8, u8),
    Pod(u8, u8, u8),
    Namespace(u8, u8),
    Block(u8, u8),
    Attachment(u8, u8),
    Network(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..3_u8, 0..4_u8).prop_map(|(a, b)| Step::Policy(a, b)),
        (0..4_u8, 0..3_u8, 0..5_u8).prop_map(|(a, b, c)| Step::Pod(a, b, c)),
        (0..2_u8, 0..3_u8).prop_map(|(a, b)| Step::Namespace(a, b)),
        (0..4_u8, 0..3_u8).prop_map(|(a, b)| Step::Block(a, b)),
        (0..3_u8, 0..3_u8).prop_map(|(a, b)| Step::Attachment(a, b)),
        (0..3_u8).prop_map(Step::Network),
    ]
}

const SPACES: [&str; 2] = ["shop", "sky"];
const NODES: [&str; 2] = ["a", "b"];

fn take(peers: &mut Peers, step: &Step) {
    match *step {
        Step::Policy(which, how) => {
            let space = SPACES[usize::from(which) % 2];
            let scope = match how {
                1 => Scope::Primary,
                2 => Scope::Every,
                _ => Scope::Networks(["blue".into()].into()),
            };
            let peer = pods_labelled("app", if which == 0 { "web" } else { "db" });
            let made = policy(&format!("p{which}"), space, scope, peer);
            let name = made.name.clone();
            peers.set_policy(&name, (how > 0).then_some(made));
        }
        Step::Pod(which, node, how) => {
            let key = PodKey::new(SPACES[usize::from(which) % 2], format!("pod{which}").as_str());
            let label = if how % 2 == 0 { "web" } else { "db" };
            let node_name = NODES[usize::from(node) % 2];
            let subnet = if which % 2 == 0 { 244 } else { 77 };
            let made = pod(&format!("u{how}"), node_name, [10, subnet, node, which + 1], &[("app", label)]);
            peers.set_pod(&key, (how > 0).then_some(made));
        }
        Step::Namespace(which, how) => {
            let name: Name = SPACES[usize::from(which)].into();
            let primary = (how == 2).then(|| Name::from("blue"));
            peers.set_namespace(&name, (how > 0).then(Labels::default), primary);
        }
        Step::Block(which, how) => {
            let (network, octet) = if which % 2 == 0 { ("default", 244) } else { ("blue", 77) };
            let node = NODES[usize::from(which / 2)];
            let range = format!("10.{octet}.{}.0/24", which / 2 + how % 2);
            peers.set_block(
                &format!("b{which}").as_str().into(),
                (how > 0).then(|| block(network, node, &range)),
            );
        }
        Step::Attachment(which, how) => {
            let name = PodKey::new("shop", format!("at{which}").as_str());
            let made = AttachmentFacts {
                pod: PodKey::new("shop", "pod0"),
                network: "blue".into(),
                node: NODES[usize::from(how) % 2].into(),
                addresses: vec![IpAddr::from([10, 77, 0, 100 + which])],
            };
            peers.set_attachment(&name, (how > 0).then_some(made));
        }
        Step::Network(how) => {
            let facts = NetworkFacts { enforced: how == 1, ..network("10.77.0.0/16") };
            peers.set_network(&"blue".into(), (how > 0).then_some(facts));
        }
    }
}

/// What a step is about: of several about one thing, the last counts.
fn about(step: &Step) -> (u8, u8) {
    match step {
        Step::Policy(which, _) => (0, *which),
        Step::Pod(which, ..) => (1, *which),
        Step::Namespace(which, _) => (2, *which),
        Step::Block(which, _) => (3, *which),
        Step::Attachment(which, _) => (4, *which),
        Step::Network(_) => (5, 0),
    }
}

proptest! {
    #[test]
    fn any_order_of_events_ends_in_the_same_slices(
        steps in prop::collection::vec(step(), 1..40),
        order in any::<prop::sample::Index>(),
        settle_often in any::<bool>(),
    ) {
        let mut peers = Peers::default();
        peers.set_network(&"default".into(), Some(network("10.244.0.0/16")));
        let mut last = std::collections::BTreeMap::new();
        for step in &steps {
            take(&mut peers, step);
            last.insert(about(step), step.clone());
            if settle_often {
                peers.settle(NOW);
            }
        }
        peers.settle(NOW);
        peers.settle(LATER);
        let mut fresh = Peers::default();
        let mut rest: Vec<Step> = last.into_values().collect();
        let turn = order.index(rest.len());
        rest.rotate_left(turn);
        rest.iter().for_each(|step| take(&mut fresh, step));
        fresh.set_network(&"default".into(), Some(network("10.244.0.0/16")));
        fresh.settle(LATER);
        prop_assert_eq!(peers.slices(), fresh.slices());
    }
}

#[test]
fn one_pod_with_megabytes_of_labels_does_not_keep_the_others_from_being_told_of() {
    let pod = |index: usize, labels: usize| PolicyPeer {
        name: format!("pod-{index}"),
        labels: (0..labels).map(|n| (format!("{n:063}"), "v".repeat(63))).collect(),
        ..PolicyPeer::default()
    };
    // Two of these are more than the API server takes in one object.
    let sizes = [0, 7000, 7000, 0, 0, 2000, 2000, 2000, 0];
    let pods: Vec<PolicyPeer> = sizes.into_iter().enumerate().map(|(i, labels)| pod(i, labels)).collect();
    let parts = parts(&pods);
    for part in &parts {
        let bytes = serde_json::to_vec(part).expect("JSON").len();
        assert!(bytes <= 1024 * 1024, "{bytes} bytes of {} pods", part.len());
    }
    assert_eq!(parts.concat(), pods, "all of them, in order");
    assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [1, 1, 1, 3, 1, 2]);
    let many: Vec<PolicyPeer> = (0..2001).map(|index| pod(index, 0)).collect();
    assert_eq!(super::parts(&many).iter().map(|part| part.len()).collect::<Vec<_>>(), [1000, 1000, 1]);
    assert!(super::parts(&[]).is_empty());
}

#[test]
fn a_new_key_of_labels_was_written_into_every_slice_of_its_network() {
    let mut peers = cluster();
    let web = policy("web", "shop", Scope::Primary, pods_labelled("app", "web"));
    peers.set_policy(&web.name.clone(), Some(web));
    let db = policy("db", "shop", Scope::Primary, pods_labelled("app", "db"));
    peers.set_policy(&db.name.clone(), Some(db));
    assert_eq!(peers.settle(NOW).len(), 2);
    assert_eq!(keys_of(&peers), ["app"]);
    // Its pods are told of already, and none has the label: their slices stay as they are.
    let without =
        Selector::from_iter([Requirement::new("quarantine", Operator::DoesNotExist, [] as [&str; 0])]);
    let subject = Subject { namespaces: NamespaceMatch::Selected(Selector::everything()), pods: without };
    let open = policy("open", "shop", Scope::Primary, Peer::Pods(subject));
    peers.set_policy(&open.name.clone(), Some(open));
    assert_eq!(peers.settle(NOW), BTreeSet::new());
    assert_eq!(keys_of(&peers), ["app", "quarantine"]);
    // One that a pod has is a change of that pod's slice.
    let secret = Selector::from_iter([Requirement::new("secret", Operator::Exists, [] as [&str; 0])]);
    let subject = Subject { namespaces: NamespaceMatch::Selected(Selector::everything()), pods: secret };
    let secret = policy("secret", "shop", Scope::Primary, Peer::Pods(subject));
    peers.set_policy(&secret.name.clone(), Some(secret));
    assert_eq!(peers.settle(NOW), [place("default", "a")].into());
    assert_eq!(peers.slices()[&place("default", "a")][0].labels["secret"], "no");
}

/// The keys of labels that slices of the default Network tell of.
fn keys_of(peers: &Peers) -> Vec<String> {
    let of_network = peers.label_keys().find(|(network, _)| ***network == *"default");
    of_network.into_iter().flat_map(|(_, keys)| keys).map(|key| key.as_ref().to_owned()).collect()
}

#[test]
fn a_key_that_no_label_can_have_kept_all_slices_of_the_network_from_being_written() {
    let mut peers = cluster();
    let exists = |key: &str| {
        let pods = Selector::from_iter([Requirement::new(key, Operator::Exists, [] as [&str; 0])]);
        Peer::Pods(Subject { namespaces: NamespaceMatch::Selected(Selector::everything()), pods })
    };
    // The API server checks keys of NetworkPolicies, and not those of other kinds.
    let long = policy("long", "shop", Scope::Primary, exists(&"a".repeat(318)));
    set(&mut peers, long.clone());
    set(&mut peers, policy("web", "shop", Scope::Primary, exists("app")));
    peers.settle(NOW);
    assert_eq!(keys_of(&peers), ["app"], "and those after it");
    assert_eq!(peers.unheard().keys().collect::<Vec<_>>(), [&long.name], "its author is told");
}

#[test]
fn one_namespaces_label_keys_kept_all_later_ones_of_others_from_being_told() {
    let mut peers = cluster();
    peers.set_namespace(&"evil".into(), Some(Labels::default()), None);
    let alone = pod("u9", "b", [10, 244, 2, 9], &[]);
    peers.set_pod(&PodKey::new("evil", "one"), Some(alone));
    let exists = |key: String| Requirement::new(key.as_str(), Operator::Exists, [] as [&str; 0]);
    let everywhere = |pods: Selector| {
        Peer::Pods(Subject { namespaces: NamespaceMatch::Selected(Selector::everything()), pods })
    };
    // As long as a key can be, and before all others.
    let many: Selector = (0..500).map(|n| exists(format!("{n:0317}"))).collect();
    let greedy = policy("greedy", "evil", Scope::Primary, everywhere(many));
    set(&mut peers, greedy.clone());
    let open = Selector::from_iter([Requirement::new("quarantine", Operator::DoesNotExist, [] as [&str; 0])]);
    set(&mut peers, policy("open", "shop", Scope::Primary, everywhere(open)));
    let mut deny = policy("deny", "", Scope::Primary, pods_labelled("zone", "dmz"));
    deny.name.kind = Kind::Cluster;
    deny.subject.namespaces = NamespaceMatch::Selected(Selector::everything());
    let cluster_wide = deny.name.clone();
    set(&mut peers, deny);
    peers.settle(NOW);
    let keys = keys_of(&peers);
    assert!(keys.iter().any(|key| key == "quarantine"), "another namespace's");
    assert!(keys.iter().any(|key| key == "zone"), "an operator's");
    assert!(keys.len() > 100 && keys.iter().map(String::len).sum::<usize>() < 64 * 1024, "{}", keys.len());
    let unheard = peers.unheard();
    assert_eq!(unheard.keys().collect::<Vec<_>>(), [&greedy.name], "and {cluster_wide} is not");
    assert_eq!(unheard[&greedy.name].keys, 502 - keys.len());
    // Others ask for more than there was room for: it is their share.
    let more: Selector = (0..90).map(|n| exists(format!("more-{n:0300}"))).collect();
    set(&mut peers, policy("more", "shop", Scope::Primary, everywhere(more)));
    peers.settle(LATER);
    assert_eq!(peers.unheard().keys().collect::<Vec<_>>(), [&greedy.name]);
}

#[test]
fn the_first_change_of_a_slice_after_a_quiet_time_is_written_at_once() {
    let now = tokio::time::Instant::now();
    assert_eq!(due(None, now), now);
    assert_eq!(due(Some(now), now + WRITE_INTERVAL), now + WRITE_INTERVAL, "quiet for long enough");
    assert_eq!(due(Some(now), now + WRITE_INTERVAL / 4), now + WRITE_INTERVAL, "and the next one waits");
}

/// What is told of policies, seconds after the first time.
fn news(concerns: &mut Concerns, peers: &Peers, seconds: u64) -> Vec<String> {
    let news = concerns.news(peers, NOW + Duration::from_secs(seconds));
    news.into_iter().map(|(policy, _, what)| format!("{}: {what}", policy.full())).collect()
}

#[test]
fn a_policy_for_a_network_that_is_missing_was_told_once_if_at_all() {
    let (mut peers, mut concerns) = (cluster(), Concerns::default());
    let scope = || Scope::Networks(["green".into(), "default".into()].into());
    set(&mut peers, policy("p", "shop", scope(), pods_labelled("app", "web")));
    assert!(news(&mut concerns, &peers, 0).is_empty(), "it may come right behind it");
    let told = news(&mut concerns, &peers, 10);
    assert!(matches!(&told[..], [what] if what.contains("shop/p: there is no Network green")), "{told:?}");
    assert!(news(&mut concerns, &peers, 100).is_empty(), "once");
    peers.set_network(&"green".into(), Some(network("10.78.0.0/16")));
    assert!(news(&mut concerns, &peers, 200).is_empty());
    peers.set_network(&"green".into(), None);
    assert!(news(&mut concerns, &peers, 300).is_empty());
    assert_eq!(news(&mut concerns, &peers, 310).len(), 1, "it was deleted since");
}

#[test]
fn nobody_was_told_of_a_named_port_that_no_pod_has() {
    let (mut peers, mut concerns) = (cluster(), Concerns::default());
    let mut names = policy("p", "shop", Scope::Primary, pods_labelled("app", "web"));
    let ports: Box<[PortMatch]> = [PortMatch::Named("sql".into(), None)].into();
    names.ingress.iter_mut().flatten().for_each(|rule| rule.ports = Some(ports.clone()));
    set(&mut peers, names);
    assert!(news(&mut concerns, &peers, 0).is_empty(), "its pods may come right behind it");
    let told = news(&mut concerns, &peers, 60);
    assert!(matches!(&told[..], [what] if what.contains("no pod of namespace shop has a port named sql")));
    let sql = knit_policy::model::NamedPort {
        name: "sql".into(),
        protocol: knit_policy::model::Protocol::Tcp,
        number: 5432,
    };
    let with = |ports| PodFacts { ports, ..pod("u2", "b", [10, 244, 2, 6], &[]) };
    // In another namespace it is of no use.
    peers.set_pod(&PodKey::new("sky", "db"), Some(with(vec![sql.clone()])));
    assert!(news(&mut concerns, &peers, 100).is_empty(), "it was told already");
    peers.set_pod(&PodKey::new("shop", "db"), Some(with(vec![sql])));
    assert!(news(&mut concerns, &peers, 200).is_empty());
    peers.set_pod(&PodKey::new("shop", "db"), Some(with(Vec::new())));
    assert!(news(&mut concerns, &peers, 300).is_empty());
    assert_eq!(news(&mut concerns, &peers, 360).len(), 1, "again");
}

#[test]
fn a_policy_of_one_namespace_had_the_slices_of_all_nodes_worked_out_again() {
    let mut peers = cluster();
    set(&mut peers, policy("web", "shop", Scope::Primary, pods_labelled("app", "web")));
    peers.settle(NOW);
    let before = peers.worked_out();
    // It asks for nothing that is new of pods of node b.
    let own = Subject {
        namespaces: NamespaceMatch::Named("shop".into()),
        pods: Selector::labels([("app", "web")]),
    };
    set(&mut peers, policy("own", "shop", Scope::Primary, Peer::Pods(own)));
    assert!(peers.settle(NOW).is_empty(), "nothing else is said of any pod");
    assert_eq!(peers.worked_out() - before, 1, "of the two, the slice with the pod that is asked for");
}
