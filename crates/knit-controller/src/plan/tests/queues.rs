//! Who gets a block first, and what is left alone for a while.

use std::time::Duration;

use super::World;

fn joins(world: &mut World, node: &str, range: &str) {
    world.node(node, "192.0.2.1", &[range]);
}

#[test]
fn networks_that_are_full_took_the_tokens_of_others() {
    let mut world = World::new();
    for n in 0..8_u8 {
        joins(&mut world, &format!("n{n}"), &format!("10.244.{n}.0/24"));
    }
    let full: Vec<String> = (0..6).map(|n| format!("full-{n}")).collect();
    for name in &full {
        world.network(name, &["10.77.0.0/29"], None);
    }
    world.settle();
    for name in &full {
        for n in 0..8 {
            world.asks(&format!("n{n}"), name);
        }
    }
    // All are tried: one node of each Network finds a block, and the others do not.
    for _ in 0..3 {
        let plan = world.plan();
        world.carry_out(&plan);
        world.pass(1);
    }
    assert!(full.iter().all(|name| world.memory.refused[name].len() >= 7));
    for _ in 0..10 {
        let before = world.memory.rates.blocks;
        assert_eq!(world.plan().to_string().lines().filter(|line| line.starts_with("assign")).count(), 0);
        assert_eq!(world.memory.rates.blocks, before, "they have a budget of their own");
        world.pass(1);
    }
    // One of them has room again.
    world.cluster.blocks.retain(|_, block| block.network != "full-3");
    world.settle();
    assert_eq!(world.cluster.blocks.values().filter(|block| block.network == "full-3").count(), 1);
}

#[test]
fn nodes_that_joined_took_turns_with_further_blocks_of_a_hundred_networks() {
    let mut world = World::new();
    joins(&mut world, "n0", "10.244.0.0/24");
    for n in 0..100_u8 {
        world.network(&format!("w{n}"), &[&format!("10.{n}.0.0/16")], None);
    }
    world.settle();
    world.pass(10);
    for n in 0..100_u8 {
        world.asks("n0", &format!("w{n}"));
    }
    for n in 1..=20_u8 {
        joins(&mut world, &format!("n{n}"), &format!("10.244.{n}.0/24"));
    }
    let words = world.plan().to_string();
    let given = words.lines().filter(|line| line.contains(" in Network default:")).count();
    assert_eq!(given, 20, "{words}");
    assert!(
        words.lines().any(|line| line.starts_with("assign to n0 in Network w")),
        "the rest is for others: {words}"
    );
}

#[test]
fn a_range_whose_name_is_taken_is_left_alone_for_a_while() {
    let mut world = World::new();
    joins(&mut world, "n1", "10.244.1.0/24");
    world.network("blue", &["10.77.0.0/24"], None);
    world.settle();
    world.asks("n1", "blue");
    let plan = world.plan();
    assert_eq!(plan.to_string(), "assign to n1 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n");
    let super::Action::GiveBlock(block) = &plan.actions[0] else { panic!("{plan}") };
    let range = super::BlockView::of(block.clone()).block.expect("a range").block().clone();
    world.memory.blocks.clear();
    let until = world.steady() + Duration::from_secs(60);
    world.memory.taken.push((range, until));
    let plan = world.plan();
    assert_eq!(plan.to_string(), "assign to n1 in Network blue: 10.77.0.8/29 as blue-10-77-0-8\n");
    world.memory.blocks.clear();
    world.pass(60);
    assert_eq!(world.plan().to_string(), "assign to n1 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n");
}
