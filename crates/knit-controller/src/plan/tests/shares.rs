//! What one node gets of a Network, whatever it says of itself.

use std::sync::Arc;

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
        assert_eq!(addresses(&world, "n1"), 128, "{lie:?}");
        assert!(told.contains("NodeHasItsShare: node n1 asks for a further block"), "{told}");
    }
}

#[test]
fn a_node_gets_no_more_addresses_than_its_pods_could_need() {
    for (pods, most) in [(None, 512), (Some(10), 512), (Some(500), 2048)] {
        let mut world = two_nodes("10.64.0.0/12");
        Arc::make_mut(world.cluster.nodes.get_mut("n1").expect("a node")).pods = pods;
        let told = wants_for_ever(&mut world, 40, None);
        assert_eq!(addresses(&world, "n1"), most, "{pods:?}");
        assert!(told.contains("NodeHasItsShare: node n1"), "{told}");
    }
}

#[test]
fn a_node_that_is_alone_or_has_a_small_subnet_may_have_all_of_it() {
    let mut world = two_nodes("10.77.0.0/28");
    wants_for_ever(&mut world, 5, None);
    assert_eq!(addresses(&world, "n1"), 16);
    let mut world = two_nodes("10.77.0.0/25");
    world.cluster.nodes.remove("n2");
    wants_for_ever(&mut world, 20, None);
    assert_eq!(addresses(&world, "n1"), 128);
}
