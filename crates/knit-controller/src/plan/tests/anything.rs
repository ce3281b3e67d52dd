//! Whatever happens in whatever order: it comes to rest, nothing overlaps, no number is given twice.

use knit_api::Subnet;
use proptest::prelude::*;

use super::World;

/// Something that happens in a cluster.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    NodeJoins(u8, bool),
    NodeGoes(u8),
    NetworkIsMade(u8, u8, bool),
    NetworkIsDeleted(u8),
    NodeAsks(u8, u8),
    PodsRun(u8, u8, u8),
    TimePasses(u16),
    /// The plan is made, and its writes are lost.
    PlanIsLost,
    Settle,
}

pub(super) fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        (0..6_u8, any::<bool>()).prop_map(|(n, ranges)| Happening::NodeJoins(n, ranges)),
        (0..6_u8).prop_map(Happening::NodeGoes),
        (0..5_u8, 0..3_u8, any::<bool>()).prop_map(|(n, s, p)| Happening::NetworkIsMade(n, s, p)),
        (0..5_u8).prop_map(Happening::NetworkIsDeleted),
        (0..6_u8, 0..5_u8).prop_map(|(n, w)| Happening::NodeAsks(n, w)),
        (0..6_u8, 0..5_u8, 0..3_u8).prop_map(|(n, w, c)| Happening::PodsRun(n, w, c)),
        (1..400_u16).prop_map(Happening::TimePasses),
        Just(Happening::PlanIsLost),
        Just(Happening::Settle),
    ]
}

pub(super) fn happens(world: &mut World, happening: &Happening) {
    let subnets: [&[&str]; 3] =
        [&["10.77.0.0/26"], &["10.77.0.0/25", "fd77::/64"], &["10.77.0.32/27", "fd77::/120"]];
    match happening {
        Happening::NodeJoins(n, ranges) => {
            let name = format!("n{n}");
            if !world.cluster.nodes.contains_key(&name) {
                let range = format!("10.244.{n}.0/24");
                let ranges: &[&str] = if *ranges { &[&range] } else { &[] };
                world.node(&name, &format!("192.0.2.{}", n + 1), ranges);
            }
        }
        Happening::NodeGoes(n) => {
            world.cluster.nodes.remove(&format!("n{n}"));
            world.cluster.node_networks.remove(&format!("n{n}"));
        }
        Happening::NetworkIsMade(n, subnet, primary) => {
            let name = format!("w{n}");
            if !world.cluster.networks.contains_key(name.as_str()) {
                let tenant = primary.then(|| format!("t{n}"));
                world.network(&name, subnets[usize::from(*subnet)], tenant.as_deref());
            }
        }
        Happening::NetworkIsDeleted(n) => {
            let name = format!("w{n}");
            if world.cluster.networks.get(name.as_str()).is_some_and(|network| !network.is_being_deleted()) {
                world.delete(&name);
            }
        }
        Happening::NodeAsks(n, w) => {
            let node = format!("n{n}");
            if world.cluster.node_networks.contains_key(&node) {
                world.asks(&node, &format!("w{w}"));
            }
        }
        Happening::PodsRun(n, w, count) => {
            let node = format!("n{n}");
            if world.cluster.node_networks.contains_key(&node) {
                world.says(&node, &format!("w{w}"), |n| n.attachments = i32::from(*count));
            }
        }
        Happening::TimePasses(seconds) => world.pass(i64::from(*seconds)),
        Happening::PlanIsLost => {
            let _lost = world.plan();
            world.pass(61);
        }
        Happening::Settle => world.settle(),
    }
}

fn check(world: &World) {
    let blocks: Vec<_> =
        world.cluster.blocks.values().filter_map(|b| Some(b.block.as_ref()?.block().clone())).collect();
    for (i, a) in blocks.iter().enumerate() {
        for b in &blocks[i + 1..] {
            let apart = !a.overlaps(b);
            assert!(a.network() != b.network() || apart, "{a} and {b} of {} overlap", a.network());
            let primary = |name: &str| world.cluster.networks.get(name).is_some_and(|n| n.is_primary());
            let both = primary(a.network()) && primary(b.network());
            assert!(a.node() != b.node() || !both || apart, "{a} and {b} overlap on {}", a.node());
        }
    }
    let mut ids: Vec<_> = world.cluster.networks.values().filter_map(|n| n.id()).collect();
    ids.sort_unstable();
    let count = ids.len();
    ids.dedup();
    assert_eq!(ids.len(), count, "a number was given twice");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn whatever_happens_it_comes_to_rest_and_nothing_overlaps(
        happenings in prop::collection::vec(happening(), 1..40)
    ) {
        let mut world = World::new();
        world.config.default_subnets = vec![Subnet { cidr: "10.245.0.0/16".into(), ..Subnet::default() }];
        for happening in &happenings {
            happens(&mut world, happening);
            check(&world);
        }
        world.settle();
        check(&world);
        for name in world.cluster.networks.keys() {
            prop_assert!(world.cluster.networks[name].status().is_some());
        }
    }
}
