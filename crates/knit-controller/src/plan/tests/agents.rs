//! Agents that are away, or seem to be: when a node is closed to new pods, and when not.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Taint;
use knit_api::names::{ATTACHMENT_FINALIZER, DEFAULT_NETWORK};
use knit_api::{AddressCounts, Family};

use super::World;
use crate::cluster::{AgentLease, AttachmentView};

impl World {
    /// The agent of a node renews its Lease, which holds 100 s.
    fn renews(&mut self, node: &str) {
        self.serial += 1;
        let lease = AgentLease { version: self.serial.to_string(), holds: Duration::from_secs(100) };
        self.cluster.leases.insert(node.into(), lease);
    }

    /// Passes go on for so long, and what they plan is carried out.
    fn goes_on(&mut self, seconds: i64) {
        for _ in 0..seconds / 5 {
            self.pass(5);
            self.settle();
        }
    }

    fn closed(&self) -> Vec<&str> {
        let away = |t: &Taint| t.value.as_deref() == Some("agent-away");
        let closed = self.cluster.nodes.iter().filter(|(_, node)| node.taints.iter().any(away));
        closed.map(|(name, _)| name.as_str()).collect()
    }
}

/// Nodes whose agents have just renewed.
fn nodes(count: u8) -> World {
    let mut world = World::new();
    for n in 1..=count {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), &[&format!("10.244.{n}.0/24")]);
        world.renews(&format!("n{n}"));
    }
    world.settle();
    world
}

/// The machine is dead, and nobody deletes its Node: whoever deletes the object waited forever.
#[test]
fn an_attachment_that_is_deleted_is_let_go_when_its_agent_stays_away() {
    let mut world = nodes(3);
    let view = |name: &str, node: &str, leaving: bool| AttachmentView {
        namespace: "shop".into(),
        name: name.into(),
        network: "blue".into(),
        node: Some(node.into()),
        ready: true,
        deleting: leaving,
        leaving: leaving.then(|| vec![ATTACHMENT_FINALIZER.to_owned()]),
        ..AttachmentView::default()
    };
    let all = [view("leaving", "n1", true), view("stays", "n1", false), view("others", "n2", true)];
    world.attach_only(all);
    let names = |world: &World| -> Vec<String> {
        world.cluster.attachments.values().map(|attachment| attachment.name.clone()).collect()
    };
    // Away after 100 s, and then the grace.
    for _ in 0..4 {
        world.goes_on(95);
        world.renews("n2");
        world.renews("n3");
    }
    assert_eq!(names(&world), ["leaving", "others", "stays"]);
    world.goes_on(15);
    world.pass(5);
    let words = world.plan().to_string();
    assert_eq!(
        words,
        "remove the finalizer of NetworkAttachment shop/leaving: the agent of node n1 is down\n"
    );
    world.settle();
    assert_eq!(names(&world), ["others", "stays"]);
}

#[test]
fn nodes_that_cannot_serve_get_no_new_pods_until_they_can() {
    let mut world = nodes(2);
    let other = Taint { key: "other".into(), effect: "NoExecute".into(), ..Taint::default() };
    Arc::make_mut(world.cluster.nodes.get_mut("n1").expect("a node")).taints = vec![other.clone()];
    assert_eq!(world.plan().again, Some(world.steady() + Duration::from_secs(100)));
    world.goes_on(95);
    world.renews("n2");
    world.pass(5);
    let plan = world.plan();
    assert_eq!(
        plan.to_string(),
        "taints of n1: [other:NoExecute,knit.dev/network-unavailable:NoSchedule]: its agent does not answer\n"
    );
    world.carry_out(&plan);
    assert_eq!(world.plan().to_string(), "");
    world.renews("n1");
    world.settle();
    assert_eq!(world.cluster.nodes["n1"].taints, [other]);
    // The default Network's addresses: out, and back.
    let counts = |free| vec![AddressCounts { family: Family::V4, used: 253, free }];
    world.says("n2", DEFAULT_NETWORK, |n| n.addresses = counts(0));
    world.settle();
    assert_eq!(world.cluster.nodes["n2"].taints[0].value.as_deref(), Some("addresses-exhausted"));
    world.says("n2", DEFAULT_NETWORK, |n| n.addresses = counts(1));
    world.settle();
    assert!(world.cluster.nodes["n2"].taints.is_empty());
    // Those of another Network close no node.
    world.network("blue", &["10.77.0.0/29"], None);
    world.says("n2", "blue", |n| {
        n.addresses = counts(0);
        n.reason = "AddressesExhausted".into();
    });
    world.settle();
    assert!(world.cluster.nodes["n2"].taints.is_empty());
}

#[test]
fn a_new_leader_closes_no_node_before_its_agent_had_its_whole_time() {
    let mut world = nodes(2);
    world.goes_on(200);
    assert_eq!(world.closed(), ["n1", "n2"]);
    // It neither closes what was open nor opens what was closed, before it knows.
    Arc::make_mut(world.cluster.nodes.get_mut("n1").expect("a node")).taints.clear();
    world.new_leader();
    world.settle();
    assert_eq!(world.closed(), ["n2"]);
    world.goes_on(95);
    assert_eq!(world.closed(), ["n2"]);
    world.goes_on(5);
    assert_eq!(world.closed(), ["n1", "n2"]);
}

#[test]
fn after_its_own_silence_the_controller_waits_before_it_closes_nodes() {
    for outage in [false, true] {
        let mut world = nodes(2);
        world.goes_on(50);
        if outage {
            // The API server is away: passes go on, and nothing arrives.
            world.cluster.hears_agents = false;
            world.goes_on(200);
            assert!(world.closed().is_empty());
            world.cluster.hears_agents = true;
            world.settle();
        } else {
            // The controller is stopped for a while, with the API server or without.
            world.pass(200);
            world.settle();
        }
        assert!(world.closed().is_empty());
        world.renews("n1");
        world.goes_on(95);
        assert!(world.closed().is_empty());
        world.renews("n1");
        world.goes_on(10);
        assert_eq!(world.closed(), ["n2"]);
    }
}

#[test]
fn a_watch_of_leases_that_said_nothing_any_more_closed_nodes() {
    let mut world = nodes(2);
    world.goes_on(50);
    // It is open and silent: what anybody renews does not arrive, the controller's own Lease included.
    world.hears_itself = false;
    world.goes_on(200);
    assert!(world.closed().is_empty());
    world.hears_itself = true;
    world.settle();
    assert!(world.closed().is_empty());
    world.renews("n1");
    world.goes_on(95);
    assert!(world.closed().is_empty());
    world.renews("n1");
    world.goes_on(10);
    assert_eq!(world.closed(), ["n2"]);
}

#[test]
fn whoever_deleted_a_node_object_gave_the_addresses_of_its_running_pods_to_others() {
    let mut world = nodes(3);
    world.cluster.nodes.remove("n1");
    for _ in 0..20 {
        world.goes_on(25);
        world.renews("n1");
    }
    assert_eq!(world.blocks_of("default", "n1"), ["10.244.1.0/24"], "its agent is there");
    // It ends, and its Lease with it.
    world.goes_on(95);
    assert_eq!(world.blocks_of("default", "n1").len(), 1);
    world.goes_on(10);
    assert!(world.blocks_of("default", "n1").is_empty());
    // One whose Lease is gone as well has nothing but the grace.
    world.cluster.nodes.remove("n2");
    world.cluster.leases.remove("n2");
    world.settle();
    world.goes_on(300);
    assert!(world.blocks_of("default", "n2").is_empty());
}

/// The watch is open and says nothing, or is not open, while the controller reads and writes its own Lease:
/// it still leads.
#[test]
fn a_living_nodes_blocks_were_released_when_the_watch_of_leases_failed() {
    for is_open in [true, false] {
        for has_lease in [true, false] {
            let mut world = nodes(3);
            world.goes_on(50);
            if !has_lease {
                world.cluster.leases.remove("n1");
            }
            world.cluster.nodes.remove("n1");
            (world.hears_itself, world.cluster.hears_agents) = (!is_open, is_open);
            world.goes_on(1000);
            assert_eq!(world.blocks_of("default", "n1").len(), 1, "its agent may renew its Lease");
            (world.hears_itself, world.cluster.hears_agents) = (true, true);
            world.settle();
            if has_lease {
                world.goes_on(95);
                assert_eq!(world.blocks_of("default", "n1").len(), 1, "it has its whole time again");
            }
            world.goes_on(10);
            assert!(world.blocks_of("default", "n1").is_empty());
        }
    }
}

#[test]
fn when_most_agents_seem_to_be_away_no_further_node_is_closed() {
    let mut world = nodes(10);
    world.goes_on(50);
    for n in 3..=10 {
        world.renews(&format!("n{n}"));
    }
    world.goes_on(50);
    assert_eq!(world.closed(), ["n1", "n2"]);
    // Now nobody renews: it is more likely the API server, or us.
    world.goes_on(200);
    assert_eq!(world.closed(), ["n1", "n2"]);
    assert_eq!(world.plan().held_back, 8);
    // Most are back: those that are not are judged again.
    for n in 4..=10 {
        world.renews(&format!("n{n}"));
    }
    world.goes_on(5);
    assert_eq!(world.closed(), ["n1", "n2", "n3"]);
    assert_eq!(world.plan().held_back, 0);
}

#[test]
fn the_clock_on_the_wall_closes_no_node() {
    let mut world = nodes(2);
    world.goes_on(5);
    // Somebody sets it forward by an hour; the time that has passed is none.
    let steady = world.steady();
    let now = super::Now { wall: world.now + jiff::SignedDuration::from_hours(1), steady };
    let plan = super::plan(&world.cluster, &mut world.memory, &world.config, now);
    assert_eq!(plan.to_string(), "");
}

/// An agent writes how long its own Lease holds.
#[test]
fn an_agent_whose_lease_held_for_years_was_never_away() {
    let mut world = nodes(3);
    let lease: Lease = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "n1", "resourceVersion": "for years"},
        "spec": {"renewTime": "2026-11-19T00:00:00.000000Z", "leaseDurationSeconds": i32::MAX},
    }))
    .expect("a Lease");
    world.cluster.leases.insert("n1".into(), AgentLease::of(&lease).expect("a sign of life"));
    for _ in 0..80 {
        world.renews("n2");
        world.renews("n3");
        world.goes_on(10);
    }
    assert_eq!(world.closed(), ["n1"]);
}
