//! Blocks that are deleted while pods have addresses of them.

use super::World;

/// A Network with room for three nodes, of which two have a block each.
fn world() -> World {
    let mut world = World::new();
    for n in 1..=3 {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), &[&format!("10.244.{n}.0/24")]);
    }
    world.network("blue", &["10.77.0.0/27"], None);
    world.settle();
    for node in ["n1", "n2"] {
        world.asks(node, "blue");
        world.settle();
        world.says(node, "blue", |n| n.blocks = 1);
    }
    world.holds("n1", "blue", &["10.77.0.0/29"]);
    world.settle();
    assert_eq!(world.blocks_of("blue", "n1"), ["10.77.0.0/29"]);
    world
}

#[test]
fn a_deleted_block_was_given_to_another_node_while_pods_had_its_addresses() {
    let mut world = world();
    world.cluster.blocks.remove("blue-10-77-0-0").expect("a block");
    world.new_leader();
    world.asks("n3", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n3"), ["10.77.0.16/29"]);
    // Its own node gets another one, too.
    world.asks("n1", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n1"), ["10.77.0.24/29"]);
    // The last pod is gone, and the agent says so.
    world.cluster.blocks.remove("blue-10-77-0-24").expect("a block");
    world.holds("n1", "blue", &[]);
    world.says("n1", "blue", |_| {});
    world.asks("n2", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n2"), ["10.77.0.0/29", "10.77.0.8/29"]);
}

#[test]
fn what_a_departed_node_had_is_free() {
    let mut world = world();
    world.cluster.blocks.remove("blue-10-77-0-0").expect("a block");
    world.cluster.nodes.remove("n1").expect("a node");
    world.settle();
    // It has left its block of the default Network, and with that it has departed.
    world.sleeps(300);
    world.asks("n3", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n3"), ["10.77.0.0/29"]);
}

#[test]
fn what_a_departed_node_had_was_reserved_again_once_its_last_block_was_gone() {
    let mut world = world();
    world.holds("n1", "blue", &["10.77.0.0/29", "10.77.0.16/29"]);
    world.cluster.blocks.remove("blue-10-77-0-0").expect("a block");
    world.cluster.nodes.remove("n1").expect("a node");
    world.settle();
    world.sleeps(300);
    // It loses its block of the default Network, and nobody asks for anything before that is over.
    world.settle();
    assert!(world.cluster.blocks.values().all(|block| block.node != "n1"));
    world.asks("n3", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n3"), ["10.77.0.0/29"]);
    world.asks("n2", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n2"), ["10.77.0.16/29", "10.77.0.8/29"]);
}

#[test]
fn what_a_node_without_any_block_had_was_reserved_for_as_long_as_its_node_network_was_there() {
    let mut world = world();
    world.cluster.blocks.retain(|_, block| block.node != "n1");
    world.cluster.nodes.remove("n1").expect("a node");
    world.new_leader();
    world.settle();
    // Its pods may still have the addresses.
    world.asks("n3", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n3"), ["10.77.0.16/29"]);
    world.sleeps(300);
    world.asks("n2", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n2"), ["10.77.0.0/29", "10.77.0.8/29"]);
}

#[test]
fn what_a_node_says_it_has_counts_for_no_more_than_it_may_have() {
    let mut world = world();
    world.network("red", &["10.78.0.0/16"], None);
    world.settle();
    // As whoever has its token could write it.
    world.holds("n1", "red", &["10.78.0.0/20", "10.78.16.0/20", "nonsense"]);
    world.asks("n3", "red");
    world.settle();
    assert_eq!(world.blocks_of("red", "n3"), ["10.78.0.0/29"]);
}
