//! Indices that are kept are those that would be made of the cluster as it is, and cost what a change costs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use knit_api::Subnet;
use knit_api::names::ATTACHMENT_FINALIZER;
use proptest::prelude::*;

use super::World;
use super::anything::{Happening, happening, happens};
use crate::cluster::{AgentLease, AttachmentView, Cluster, NamespaceView, Now, PolicyView};
use crate::plan::kept::{Change, Indexed};
use crate::plan::{Action, Plan, plan};

/// Something that happens in a cluster, to Networks and blocks or to the rest.
#[derive(Clone, Debug)]
enum Step {
    Happens(Happening),
    Attach { pod: u8, network: u8, node: Option<u8>, ready: bool, leaving: bool },
    Detach(u8),
    Label(u8, u8),
    Renew(u8),
    Unusable(u8),
    Policy(u8),
    BlockIsDeleted(u8),
    Holds(u8, u8, u8),
    Stir,
}

fn step() -> impl Strategy<Value = Step> {
    let attach = (0..12_u8, 0..5_u8, proptest::option::of(0..6_u8), any::<bool>(), any::<bool>());
    prop_oneof![
        6 => happening().prop_map(Step::Happens),
        4 => attach.prop_map(|(pod, network, node, ready, leaving)| Step::Attach {
            pod, network, node, ready, leaving
        }),
        1 => (0..12_u8).prop_map(Step::Detach),
        1 => (0..4_u8, 0..5_u8).prop_map(|(namespace, tenant)| Step::Label(namespace, tenant)),
        1 => (0..6_u8).prop_map(Step::Renew),
        1 => (0..6_u8).prop_map(Step::Unusable),
        1 => (0..6_u8).prop_map(Step::Policy),
        1 => any::<u8>().prop_map(Step::BlockIsDeleted),
        1 => (0..6_u8, 0..5_u8, 0..8_u8).prop_map(|(node, network, n)| Step::Holds(node, network, n)),
        1 => Just(Step::Stir),
    ]
}

fn take(world: &mut World, step: &Step) {
    match step {
        Step::Happens(happening) => happens(world, happening),
        Step::Attach { pod, network, node, ready, leaving } => world.attach(AttachmentView {
            namespace: format!("t{}", pod % 4),
            name: format!("p{pod}"),
            network: format!("w{network}"),
            node: node.map(|n| format!("n{n}")),
            ready: *ready,
            addresses: vec![[10, 77, 0, *pod].into()],
            unanswered: (!ready && node.is_none()).then_some(world.now),
            deleting: *leaving,
            leaving: leaving.then(|| vec![ATTACHMENT_FINALIZER.to_owned()]),
            ..AttachmentView::default()
        }),
        Step::Detach(pod) => {
            let place = (format!("t{}", pod % 4), format!("p{pod}"));
            world.cluster.attachments.remove(&place);
        }
        Step::Label(namespace, tenant) => {
            world.namespace(&format!("t{namespace}"), &format!("t{tenant}"));
        }
        Step::Renew(node) => {
            world.serial += 1;
            let lease = AgentLease { version: world.serial.to_string(), holds: Duration::from_secs(100) };
            world.cluster.leases.insert(format!("n{node}"), lease);
        }
        Step::Unusable(n) => {
            // Somebody's own AddressBlock, of which nothing can be made, or which overlaps another.
            let name = format!("odd-{n}");
            let spec = knit_api::AddressBlockSpec {
                network: format!("w{}", n % 5),
                node: format!("n{n}"),
                ipv4: (n % 2 == 0).then(|| "10.77.0.0/28".to_owned()),
                ipv6: None,
            };
            let mut object = knit_api::AddressBlock::new(&name, spec);
            object.metadata = world.meta(&name);
            world.cluster.blocks.insert(name, Arc::new(crate::cluster::BlockView::of(object)));
        }
        Step::Policy(n) => {
            let name = format!("policy-{n}");
            let view = PolicyView { namespace: "t0".into(), uid: name.clone(), name: name.clone() };
            world.cluster.policies.insert(("t0".into(), name), Arc::new(view));
        }
        Step::BlockIsDeleted(n) => {
            let names: Vec<String> = world.cluster.blocks.keys().cloned().collect();
            if let Some(name) = names.get(usize::from(*n) % names.len().max(1)) {
                world.cluster.blocks.remove(name);
            }
        }
        Step::Holds(node, network, n) => {
            let node = format!("n{node}");
            if world.cluster.node_networks.contains_key(&node) {
                world.holds(&node, &format!("w{network}"), &[&format!("10.77.0.{}/29", n * 8), "odd"]);
            }
        }
        Step::Stir => world.cluster.hears_agents = !world.cluster.hears_agents,
    }
}

/// What became different, as caches tell it.
fn changes(before: &Cluster, after: &Cluster) -> Vec<Change> {
    fn each<K: Ord + Clone, V>(
        before: &BTreeMap<K, Arc<V>>,
        after: &BTreeMap<K, Arc<V>>,
        mut tell: impl FnMut(K, Option<Arc<V>>),
    ) {
        for key in before.keys().filter(|key| !after.contains_key(*key)) {
            tell(key.clone(), None);
        }
        for (key, new) in after {
            if before.get(key).is_none_or(|old| !Arc::ptr_eq(old, new)) {
                tell(key.clone(), Some(Arc::clone(new)));
            }
        }
    }
    let mut all = Vec::new();
    each(&before.attachments, &after.attachments, |k, v| all.push(Change::Attachment(k, v)));
    each(&before.blocks, &after.blocks, |k, v| all.push(Change::Block(k, v)));
    each(&before.classes, &after.classes, |k, v| all.push(Change::Class(k, v)));
    each(&before.networks, &after.networks, |k, v| all.push(Change::Network(k, v)));
    each(&before.node_networks, &after.node_networks, |k, v| all.push(Change::NodeNetwork(k, v)));
    each(&before.nodes, &after.nodes, |k, v| all.push(Change::Node(k, v)));
    each(&before.namespaces, &after.namespaces, |k, v| all.push(Change::Namespace(k, v)));
    each(&before.policies, &after.policies, |k, v| all.push(Change::Policy(k, v)));
    for (node, lease) in after.leases.iter().filter(|(node, lease)| before.leases.get(*node) != Some(lease)) {
        all.push(Change::Lease(node.clone(), Some(lease.clone())));
    }
    all.push(Change::HearsAgents(after.hears_agents));
    all
}

fn assert_same(kept: &Indexed, made: &Indexed) {
    let (kept, made) = (&kept.kept, &made.kept);
    assert_eq!(kept.networks, made.networks);
    assert_eq!(kept.nodes, made.nodes);
    assert_eq!(kept.runtimes, made.runtimes);
    assert_eq!(kept.missing, made.missing);
    assert_eq!((&kept.unanswered, &kept.leaving), (&made.unanswered, &made.leaving));
    assert_eq!((&kept.addresses, &kept.ranges), (&made.addresses, &made.ranges));
    assert_eq!(kept.primaries, made.primaries);
    assert_eq!(kept.without_default, made.without_default);
    assert_eq!(kept.not_pod_ranges, made.not_pod_ranges);
    assert_eq!(kept.lingering, made.lingering);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_plan_of_what_changed_is_the_plan_of_everything(
        steps in prop::collection::vec((step(), any::<bool>()), 1..40)
    ) {
        let mut world = World::new();
        world.config.default_subnets = vec![Subnet { cidr: "10.245.0.0/16".into(), ..Subnet::default() }];
        let mut kept = Indexed::new(world.cluster.clone());
        for (step, backwards) in &steps {
            let before = world.cluster.clone();
            take(&mut world, step);
            let mut changes = changes(&before, &world.cluster);
            // Nothing is promised about the order between kinds.
            if *backwards {
                changes.reverse();
            }
            changes.into_iter().for_each(|change| kept.apply(change));
            let now = Now { wall: world.now, steady: world.steady() };
            let mut memory = world.memory.clone();
            let incremental = kept.plan(&mut memory, &world.config, now);
            let whole = plan(&world.cluster, &mut world.memory, &world.config, now);
            prop_assert_eq!(&incremental, &whole, "{}\nis not\n{}", incremental, whole);
            let mut made = Indexed::new(world.cluster.clone());
            made.refresh();
            assert_same(&kept, &made);
        }
    }
}

/// A cluster of this many nodes, with a Network of which every node has a block and a pod.
fn cluster_of(nodes: u16) -> (World, Indexed) {
    let mut world = World::new();
    for n in 0..nodes {
        let [high, low] = n.to_be_bytes();
        let name = format!("n{n}");
        world.node(&name, &format!("192.1.{high}.{low}"), &[&format!("10.{}.{low}.0/24", high + 1)]);
        world.attach(pod(n, true));
    }
    world.network("blue", &["172.16.0.0/12"], None);
    world.keep("blue");
    let mut known = Indexed::new(world.cluster.clone());
    settle(&mut world, &mut known);
    let before = world.cluster.clone();
    for n in 0..nodes {
        world.asks(&format!("n{n}"), "blue");
    }
    follow(&world, &before, &mut known);
    settle(&mut world, &mut known);
    assert_eq!(known.cluster().blocks.len(), usize::from(nodes) * 2, "one of each Network");
    (world, known)
}

fn pod(n: u16, ready: bool) -> AttachmentView {
    AttachmentView {
        namespace: "shop".into(),
        name: format!("p{n}"),
        network: "blue".into(),
        node: Some(format!("n{n}")),
        ready,
        managed: true,
        ..AttachmentView::default()
    }
}

/// Plans and carries out, with the indices kept, and time passing.
fn settle(world: &mut World, known: &mut Indexed) -> usize {
    for passes in 1..1000 {
        let now = Now { wall: world.now, steady: world.steady() };
        let before = world.cluster.clone();
        let plan = known.plan(&mut world.memory, &world.config, now);
        if plan.actions.is_empty()
            && plan.again.is_none_or(|again| again > now.steady + Duration::from_secs(2))
        {
            return passes;
        }
        world.carry_out(&plan);
        world.pass(1);
        follow(world, &before, known);
    }
    panic!("it does not come to rest");
}

fn follow(world: &World, before: &Cluster, known: &mut Indexed) {
    changes(before, &world.cluster).into_iter().for_each(|change| known.apply(change));
}

/// Objects looked at for one change and the plan after it.
fn cost(world: &mut World, known: &mut Indexed, change: impl FnOnce(&mut World)) -> (u64, Plan) {
    let (before, work) = (world.cluster.clone(), known.work());
    change(world);
    follow(world, &before, known);
    let now = Now { wall: world.now, steady: world.steady() };
    let plan = known.plan(&mut world.memory, &world.config, now);
    (known.work() - work, plan)
}

#[test]
fn a_pod_or_a_report_costs_the_same_in_a_large_cluster_as_in_a_small_one() {
    let costs = [50, 400].map(|nodes| {
        let (mut world, mut known) = cluster_of(nodes);
        let (of_pod, _) = cost(&mut world, &mut known, |world| world.attach(pod(1, false)));
        let (of_report, _) =
            cost(&mut world, &mut known, |world| world.says("n1", "blue", |said| said.attachments = 7));
        let namespace = |world: &mut World| {
            world.cluster.namespaces.insert("new".into(), Arc::new(NamespaceView::default()));
        };
        let (of_namespace, _) = cost(&mut world, &mut known, namespace);
        (of_pod, of_report, of_namespace)
    });
    assert_eq!(costs[0], costs[1]);
    assert!(costs[1].0 + costs[1].1 + costs[1].2 < 20, "{costs:?}");
}

#[test]
fn a_new_node_does_not_wait_behind_all_that_ask_for_something_else() {
    let (mut world, mut known) = cluster_of(200);
    let before = world.cluster.clone();
    for n in 0..200 {
        world.asks(&format!("n{n}"), "blue");
    }
    world.node("n999", "192.1.200.1", &["10.200.0.0/24"]);
    follow(&world, &before, &mut known);
    let now = Now { wall: world.now, steady: world.steady() };
    let plan = known.plan(&mut world.memory, &world.config, now);
    let given: Vec<&str> = plan
        .actions
        .iter()
        .filter_map(|action| match action {
            Action::GiveBlock(block) => Some(block.spec.node.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(given[0], "n999", "{given:?}");
    assert!(given.len() <= 25 && plan.again.is_some_and(|again| again > now.steady), "{}", given.len());
    assert!(settle(&mut world, &mut known) < 60);
    assert_eq!(world.blocks_of("blue", "n199").len(), 2);
}
