//! Writes that fail, and writes that take long: what waits for them, and what does not.

use std::time::Duration;

use super::World;
use crate::cluster::WriteFailure;

fn world() -> World {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.1.0/24"]);
    world.network("blue", &["10.77.0.0/24"], None);
    world.settle();
    world
}

impl World {
    fn fails(&mut self, subject: &str, retry_after: Option<Duration>) {
        let now = self.steady();
        self.memory.writes.failed(subject, WriteFailure::Error, retry_after, (now, 1.0));
    }
}

#[test]
fn one_write_that_always_failed_made_a_new_node_wait_for_its_block() {
    let mut world = world();
    // The status of blue is to be written, and an admission webhook refuses it each time.
    world.says("n1", "blue", |n| n.ready = false);
    for doublings in 0..8 {
        let plan = world.plan();
        assert!(plan.to_string().starts_with("status of Network blue:"), "{plan}");
        world.fails("networks/status blue", None);
        // It is left alone for twice as long each time, whatever else there is to do.
        let plan = world.plan();
        let wait = Duration::from_millis(100 << doublings).min(Duration::from_secs(15));
        assert_eq!((plan.to_string().as_str(), plan.again), ("", Some(world.steady() + wait)));
        let name = format!("m{doublings}");
        world.node(&name, "192.0.2.9", &[&format!("10.244.{}.0/24", 100 + doublings)]);
        let plan = world.plan();
        assert!(plan.to_string().starts_with(&format!("assign to {name} in Network default:")), "{plan}");
        world.carry_out(&plan);
        world.pass(15);
    }
    // Once it went through, it begins with a short wait again.
    world.memory.writes.done("networks/status blue");
    world.fails("networks/status blue", None);
    assert_eq!(world.plan().again, Some(world.steady() + Duration::from_millis(100)));
}

#[test]
fn a_block_that_was_refused_made_all_nodes_of_its_network_wait() {
    let mut world = world();
    for n in 2..=3 {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), &[&format!("10.244.{n}.0/24")]);
    }
    world.settle();
    world.asks("n2", "blue");
    assert_eq!(world.plan().to_string(), "assign to n2 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n");
    // An admission webhook refuses it.
    world.memory.blocks.remove("blue-10-77-0-0").expect("it is remembered");
    world.fails("addressblocks blue-10-77-0-0", Some(Duration::from_secs(10)));
    world.asks("n3", "blue");
    let plan = world.plan();
    assert_eq!(plan.to_string(), "assign to n3 in Network blue: 10.77.0.8/29 as blue-10-77-0-8\n");
    assert_eq!(plan.again, Some(world.steady() + Duration::from_secs(10)));
    world.carry_out(&plan);
    // One that comes first in line takes the range that waits, and with it the wait.
    world.asks("n1", "blue");
    assert_eq!(world.plan().to_string(), "assign to n2 in Network blue: 10.77.0.16/29 as blue-10-77-0-16\n");
    world.memory.blocks.remove("blue-10-77-0-16").expect("it is remembered");
    world.pass(10);
    let words = world.plan().to_string();
    assert!(words.starts_with("assign to n1 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n"), "{words}");
}

#[test]
fn many_blocks_that_were_to_come_had_what_failed_tried_again_all_the_time() {
    let mut world = world();
    for n in 0..100_u8 {
        world.node(&format!("m{n}"), "192.0.2.9", &[&format!("10.245.{n}.0/24")]);
    }
    let plan = world.plan();
    let given: Vec<String> = plan.actions.iter().map(super::Action::subject).collect();
    assert!(given.len() < 100 && plan.again < Some(world.steady() + Duration::from_millis(50)), "{plan}");
    for action in &plan.actions {
        let super::Action::GiveBlock(block) = action else { continue };
        let name = block.metadata.name.clone().expect("a name");
        world.memory.blocks.get_mut(&name).expect("it is remembered").again = Some(block.clone());
    }
    for subject in &given {
        world.fails(subject, Some(Duration::from_secs(7)));
    }
    world.pass(5);
    let plan = world.plan();
    assert!(plan.actions.iter().all(|action| !given.contains(&action.subject())), "{plan}");
    world.carry_out(&plan);
    world.pass(2);
    let again = world.plan();
    assert!(again.actions.iter().any(|action| given.contains(&action.subject())), "as the API server asked");
}

#[test]
fn what_is_being_written_is_not_written_again_meanwhile() {
    let mut world = world();
    world.says("n1", "blue", |n| n.ready = false);
    let plan = world.plan();
    assert!(world.memory.writes.begin(plan.actions[0].subject()));
    world.pass(30);
    assert_eq!(world.plan().to_string(), "");
    // A block whose creation takes longer than it is remembered stays its node's.
    world.asks("n1", "blue");
    let plan = world.plan();
    assert_eq!(plan.to_string(), "assign to n1 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n");
    assert!(world.memory.writes.begin(plan.actions[0].subject()));
    world.node("n2", "192.0.2.2", &["10.244.2.0/24"]);
    world.settle();
    world.pass(120);
    world.asks("n2", "blue");
    assert_eq!(world.plan().to_string(), "assign to n2 in Network blue: 10.77.0.8/29 as blue-10-77-0-8\n");
}
