//! What one node gets of a Network, whatever it says of itself.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use proptest::prelude::*;

use super::World;

fn two_nodes(cidr: &str) -> World {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.node("n2", "192.0.2.2", &["10.244.1.0/24"]);
    world.network("blue", &[cidr], None);
    world.settle();
    world
}

/// Passes in which a node wants a further block each time. Says what was told last.
fn wants_for_ever(world: &mut World, passes: usize, lie: Option<i32>) -> String {
    let mut told = String::new();
    for _ in 0..passes {
        world.asks("n1", "blue");
        if let Some(blocks) = lie {
            world.says("n1", "blue", |n| (n.wants_block, n.blocks) = (true, blocks));
        }
        let plan = world.plan();
        world.carry_out(&plan);
        told = plan.notes.iter().map(|note| format!("{}: {}", note.reason, note.text)).collect();
        world.pass(1);
    }
    told
}

fn addresses(world: &World, node: &str) -> u32 {
    let prefix = |range: &str| range.rsplit('/').next().and_then(|len| len.parse::<u32>().ok());
    world.blocks_of("blue", node).iter().map(|range| 1 << (32 - prefix(range).expect("a range"))).sum()
}

#[test]
fn one_nodes_token_took_every_address_of_a_network() {
    for lie in [Some(i32::MAX), None] {
        let mut world = two_nodes("10.77.0.0/24");
        let told = wants_for_ever(&mut world, 20, lie);
        world.asks("n2", "blue");
        world.settle();
        assert_eq!(
            world.blocks_of("blue", "n2").len(),
            1,
            "{lie:?}: n1 has {:?}",
            world.blocks_of("blue", "n1")
        );
        assert_eq!(addresses(&world, "n1"), 248, "{lie:?}: all but the other's first block");
        assert!(told.contains("NodeHasItsShare: node n1 requests another block"), "{told}");
    }
}

#[test]
fn a_node_gets_no_more_addresses_than_its_pods_could_need() {
    for (pods, most) in [(None, 512), (Some(10), 512), (Some(500), 2048), (Some(u32::MAX), 4096)] {
        let mut world = two_nodes("10.64.0.0/12");
        Arc::make_mut(world.cluster.nodes.get_mut("n1").expect("a node")).pods = pods;
        let told = wants_for_ever(&mut world, 40, None);
        assert_eq!(addresses(&world, "n1"), most, "{pods:?}");
        assert!(told.contains("NodeHasItsShare: node n1"), "{told}");
    }
}

#[test]
fn nodes_that_never_run_pods_kept_half_of_a_small_network_to_themselves() {
    // A control plane and one worker.
    let mut world = two_nodes("10.77.0.0/25");
    wants_for_ever(&mut world, 20, None);
    assert_eq!(addresses(&world, "n1"), 120);
    // Several nodes without a block: each finds its first one, whoever asked before.
    let mut world = two_nodes("10.77.0.0/25");
    for (n, range) in [("n3", "10.244.2.0/24"), ("n4", "10.244.3.0/24"), ("n5", "10.244.4.0/24")] {
        world.node(n, &format!("192.0.2.{}", &n[1..]), &[range]);
    }
    wants_for_ever(&mut world, 20, None);
    assert_eq!(addresses(&world, "n1"), 128 - 4 * 8);
    for node in ["n2", "n3", "n4", "n5"] {
        world.asks(node, "blue");
        world.settle();
        assert_eq!(addresses(&world, node), 8, "{node}");
    }
}

#[test]
fn a_small_network_of_many_nodes_stayed_at_eight_addresses_a_node() {
    let mut world = two_nodes("10.77.0.0/24");
    for n in 3..=100 {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), &[&format!("10.244.{n}.0/24")]);
    }
    let told = wants_for_ever(&mut world, 20, None);
    assert_eq!(addresses(&world, "n1"), 128, "the other half is kept for other nodes");
    assert!(told.contains("NodeHasItsShare"), "{told}");
    world.asks("n2", "blue");
    world.settle();
    assert_eq!(addresses(&world, "n2"), 8);
}

#[test]
fn nodes_that_a_network_is_not_for_kept_its_addresses() {
    let mut world = two_nodes("10.77.0.0/24");
    for n in 3..=100 {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), &[&format!("10.244.{n}.0/24")]);
    }
    for node in ["n1", "n2"] {
        let view = Arc::make_mut(world.cluster.nodes.get_mut(node).expect("a node"));
        view.labels.insert("pool".into(), "db".into());
    }
    let match_labels = Some([("pool".to_owned(), "db".to_owned())].into());
    let selector = LabelSelector { match_labels, match_expressions: None };
    world.edit("blue", |network| network.spec.node_selector = Some(selector));
    wants_for_ever(&mut world, 30, None);
    assert_eq!(addresses(&world, "n1"), 248, "all but the first block of the only other one");
}

#[test]
fn a_node_that_is_alone_may_have_all_of_a_subnet() {
    let mut world = two_nodes("10.77.0.0/25");
    world.cluster.nodes.remove("n2");
    wants_for_ever(&mut world, 20, None);
    assert_eq!(addresses(&world, "n1"), 128);
}

proptest! {
    #[test]
    fn whoever_asks_how_often_every_node_finds_its_first_block(
        asks in prop::collection::vec(0_usize..4, 0..40), len in 25_u8..=28,
    ) {
        let mut world = two_nodes(&format!("10.77.0.0/{len}"));
        world.node("n3", "192.0.2.3", &["10.244.2.0/24"]);
        world.node("n4", "192.0.2.4", &["10.244.3.0/24"]);
        let nodes = ["n1", "n2", "n3", "n4"];
        // There is room for a first block of each, besides what nobody can have.
        let room = (1_usize << (32 - len)) / 8;
        for asking in &asks {
            world.asks(nodes[*asking], "blue");
            let plan = world.plan();
            world.carry_out(&plan);
            world.pass(1);
        }
        for node in nodes {
            world.asks(node, "blue");
        }
        let plan = world.plan();
        world.carry_out(&plan);
        let have = nodes.iter().filter(|node| !world.blocks_of("blue", node).is_empty()).count();
        prop_assert_eq!(have, nodes.len().min(room), "{:?}", asks);
    }
}
