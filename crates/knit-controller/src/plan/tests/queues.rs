//! Who gets a block first, and what is left alone for a while.

use std::sync::Arc;
use std::time::Duration;

use knit_api::{AddressBlock, AddressBlockSpec, Subnet};

use super::{BlockView, World};

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
fn a_full_default_network_took_all_further_attempts_of_other_networks() {
    let mut world = World::new();
    world.config.default_subnets = vec![Subnet { cidr: "10.244.0.0/28".into(), ..Subnet::default() }];
    for n in 0..200_u8 {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), &[]);
    }
    world.network("blue", &["10.77.0.0/29"], None);
    // Two nodes have the whole default Network, and all others are refused again and again.
    for _ in 0..15 {
        let plan = world.plan();
        world.carry_out(&plan);
        world.pass(1);
    }
    assert_eq!(world.memory.refused["default"].len(), 198);
    for node in ["n0", "n1"] {
        world.asks(node, "blue");
        for _ in 0..2 {
            let plan = world.plan();
            world.carry_out(&plan);
            world.pass(1);
        }
    }
    assert!(world.memory.refused["blue"].contains_key("n1"));
    // It has room again.
    world.says("n0", "blue", |_| {});
    world.cluster.blocks.retain(|_, block| block.network != "blue");
    let words = world.plan().to_string();
    assert!(words.contains("assign to n1 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n"), "{words}");
}

#[test]
fn networks_of_which_a_node_has_its_share_took_all_further_attempts_of_others() {
    let mut world = World::new();
    for n in 0..3_u8 {
        joins(&mut world, &format!("n{n}"), &format!("10.244.{n}.0/24"));
    }
    for n in 0..30_u8 {
        let network = format!("a{n:02}");
        world.network(&network, &[&format!("10.{n}.0.0/16")], None);
        // As much as a node may have of it.
        let spec =
            AddressBlockSpec { network, node: "n0".into(), ipv4: Some(format!("10.{n}.0.0/23")), ipv6: None };
        let block = AddressBlock::new("block", spec);
        world.cluster.blocks.insert(format!("block-{n}"), Arc::new(BlockView::of(block)));
    }
    world.network("blue", &["10.77.0.0/29"], None);
    world.settle();
    for node in ["n1", "n2"] {
        world.asks(node, "blue");
        world.settle();
    }
    assert!(world.memory.refused["blue"].contains_key("n2"));
    for n in 0..30 {
        world.asks("n0", &format!("a{n:02}"));
    }
    for _ in 0..5 {
        let plan = world.plan();
        world.carry_out(&plan);
        world.pass(1);
    }
    assert!((0..30).all(|n| world.memory.refused[&format!("a{n:02}")].contains_key("n0")));
    // Blue has room again.
    world.says("n1", "blue", |_| {});
    world.cluster.blocks.retain(|_, block| block.network != "blue");
    let mut words = String::new();
    for _ in 0..3 {
        words += &world.plan().to_string();
        world.pass(1);
    }
    assert!(words.contains("assign to n2 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n"), "{words}");
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
    let range = BlockView::of(block.clone()).block.expect("a range").block().clone();
    world.memory.blocks.clear();
    let until = world.steady() + Duration::from_secs(60);
    world.memory.taken.push((range, until));
    let plan = world.plan();
    assert_eq!(plan.to_string(), "assign to n1 in Network blue: 10.77.0.8/29 as blue-10-77-0-8\n");
    world.memory.blocks.clear();
    world.pass(60);
    assert_eq!(world.plan().to_string(), "assign to n1 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n");
}
