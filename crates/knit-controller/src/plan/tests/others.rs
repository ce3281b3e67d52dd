//! What users of namespaces, dead nodes and former leaders leave for the plan to deal with.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use knit_api::names::ATTACHMENT_FINALIZER;
use knit_api::{AddressBlock, AddressBlockSpec, AddressCounts, Family, NetworkAttachment};
use serde_json::json;

use super::{Action, Plan, World};
use crate::cluster::{AttachmentView, BlockView, PolicyView, WriteFailure};

/// A user's NetworkAttachment as the API shows it.
fn attachment(name: &str, network: &str, wanted: &str, status: &serde_json::Value) -> AttachmentView {
    let object: NetworkAttachment = serde_json::from_value(json!({
        "apiVersion": "knit.dev/v1alpha1", "kind": "NetworkAttachment",
        "metadata": {
            "name": name, "namespace": "evil", "uid": name, "resourceVersion": "1",
            "creationTimestamp": "1970-01-12T13:46:40Z",
        },
        "spec": {"pod": "web", "network": network, "addresses": [wanted]}, "status": status,
    }))
    .expect("a NetworkAttachment");
    AttachmentView::of(object)
}

fn ready(status: &str) -> serde_json::Value {
    json!([{"type": "Ready", "status": status, "reason": "R", "message": "",
        "lastTransitionTime": "1970-01-12T13:46:40Z"}])
}

/// One that is attached on a node, with an address.
fn attached(name: &str, network: &str, node: &str, address: &str) -> AttachmentView {
    let addresses = json!([{"family": "IPv4", "address": address, "prefix": 24}]);
    let status = json!({"node": node, "mac": "02:00:00:00:00:01", "addresses": addresses,
        "conditions": ready("True")});
    attachment(name, network, address, &status)
}

/// Deletes an object that has our finalizer.
fn leaving(mut view: AttachmentView) -> AttachmentView {
    view.leaving = Some(vec![ATTACHMENT_FINALIZER.into(), "example.org/other".into()]);
    view
}

/// Two tenants with the same range, and a node on which red has a block.
fn tenants() -> World {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.network("red", &["10.77.0.0/24"], Some("red"));
    world.network("blue", &["10.77.0.0/24"], Some("blue"));
    world.namespace("evil", "red");
    world.asks("n1", "red");
    world.settle();
    world.asks("n1", "blue");
    world
}

#[test]
fn refused_attachments_cost_other_tenants_no_addresses() {
    let mut world = tenants();
    for k in 0..32 {
        let address = format!("10.77.0.{}", 8 * k + 1);
        let refused = json!({"node": "n1", "conditions": ready("False")});
        let view = attachment(&format!("x{k}"), "red", &address, &refused);
        world.attach(view);
    }
    world.settle();
    assert_eq!(world.blocks_of("blue", "n1"), ["10.77.0.8/29"]);
}

#[test]
fn an_address_that_a_pod_of_another_primary_has_is_avoided() {
    let mut world = tenants();
    world.attach(attached("x", "red", "n1", "10.77.0.9"));
    world.node("n2", "192.0.2.2", &["10.244.1.0/24"]);
    world.asks("n2", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n1"), ["10.77.0.16/29"]);
    // On that node, and on no other.
    assert_eq!(world.blocks_of("blue", "n2"), ["10.77.0.0/29"]);
}

#[test]
fn nobody_keeps_a_network_that_is_not_attached_to_it_and_may_not_be() {
    let refused = json!({"node": "n1", "conditions": ready("False")});
    // Whose namespace may use it or not: one that nobody has taken up, one that was refused, one that is
    // attached.
    for (tenant, view, kept) in [
        ("blue", attachment("waiting", "blue", "10.77.0.1", &json!({})), false),
        ("blue", attachment("refused", "blue", "10.77.0.1", &refused), false),
        ("red", attachment("strange", "blue", "10.77.0.1", &refused), false),
        ("red", attached("stranger", "blue", "n1", "10.77.0.1"), false),
        ("blue", attached("user", "blue", "n1", "10.77.0.1"), true),
    ] {
        let mut world = World::new();
        world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
        world.namespace("evil", tenant);
        world.network("blue", &["10.77.0.0/24"], Some("blue"));
        world.settle();
        let name = view.name.clone();
        world.attach_only([view]);
        world.delete("blue");
        world.settle();
        assert_eq!(world.cluster.networks.contains_key("blue"), kept, "{name}");
    }
}

#[test]
fn a_dead_nodes_attachments_are_let_go_after_the_grace() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.node("n2", "192.0.2.2", &["10.244.1.0/24"]);
    world.network("red", &["10.77.0.0/24"], Some("red"));
    let managed = AttachmentView { managed: true, ..attached("published", "red", "n2", "10.77.0.3") };
    world.attach_only([
        leaving(attached("leaving", "red", "n2", "10.77.0.1")),
        attached("staying", "red", "n2", "10.77.0.2"),
        managed,
        leaving(attached("alive", "red", "n1", "10.77.0.4")),
        leaving(attachment("nobodys", "red", "10.77.0.5", &json!({}))),
    ]);
    world.settle();
    world.cluster.nodes.remove("n2");
    world.cluster.node_networks.remove("n2");
    world.settle();
    let names = |world: &World| -> Vec<String> {
        world.cluster.attachments.values().map(|a| a.name.clone()).collect()
    };
    assert_eq!(names(&world), ["alive", "leaving", "nobodys", "published", "staying"], "it may come back");
    world.sleeps(300);
    let plan = world.plan();
    let words = plan.to_string();
    for line in [
        "remove the finalizer of NetworkAttachment evil/leaving: node n2 is gone",
        "reset the status of NetworkAttachment evil/staying: Ready=False/PodNotFound",
        "delete NetworkAttachment evil/published: node n2 is gone",
        "remove the finalizer of NetworkAttachment evil/nobodys: no node reports that it has it",
    ] {
        assert!(words.lines().any(|l| l == line), "{line} in:\n{words}");
    }
    let others = plan.actions.iter().find_map(|action| match action {
        Action::AttachmentFinalizers { finalizers, .. } => Some(finalizers.as_slice()),
        _ => None,
    });
    assert_eq!(
        others,
        Some(&["example.org/other".to_owned()][..]),
        "others' finalizers are not ours to remove"
    );
    world.carry_out(&plan);
    world.settle();
    assert_eq!(names(&world), ["alive", "staying"]);
    // The address is nobody's any more, and the user's object says that its node is gone.
    let staying = world.attachment("staying");
    assert_eq!((&staying.node, staying.ready, staying.addresses.len()), (&None, false, 0));
}

#[test]
fn a_block_was_given_to_another_node_while_it_was_not_known_whether_it_had_been_made() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.node("n2", "192.0.2.2", &["10.244.1.0/24"]);
    world.network("blue", &["10.77.0.0/24"], None);
    world.settle();
    world.asks("n1", "blue");
    let plan = world.plan();
    let [Action::GiveBlock(block)] = &plan.actions[..] else { panic!("{plan}") };
    // The API server did not answer in time.
    let name = block.metadata.name.clone().expect("a name");
    world.memory.blocks.get_mut(&name).expect("remembered").again = Some(block.clone());
    world.asks("n2", "blue");
    let plan = world.plan();
    assert_eq!(
        plan.to_string(),
        "assign to n1 in Network blue: 10.77.0.0/29 as blue-10-77-0-0\n\
         assign to n2 in Network blue: 10.77.0.8/29 as blue-10-77-0-8\n"
    );
    world.carry_out(&plan);
    assert_eq!(world.plan().to_string(), "", "it is asked for again once");
}

#[test]
fn each_node_of_a_rollout_was_a_write_of_every_network() {
    let mut world = World::new();
    for n in 1..=9 {
        world.node(&format!("n{n}"), &format!("192.0.2.{n}"), &[&format!("10.244.{n}.0/24")]);
    }
    world.network("blue", &["10.77.0.0/24"], Some("blue"));
    world.settle();
    let unready = |world: &mut World, node: &str, ready: bool| {
        world.says(node, "blue", |n| {
            (n.ready, n.reason) = (ready, if ready { "Ready" } else { "NotSetUp" }.into());
        });
    };
    unready(&mut world, "n1", false);
    world.settle();
    assert_eq!(world.ready("blue").0, "NodesNotReady", "at once");
    // The next nodes follow, and a namespace that is the Network's comes up.
    world.namespace("evil", "blue");
    for n in 2..=9 {
        world.pass(1);
        unready(&mut world, &format!("n{}", n - 1), true);
        unready(&mut world, &format!("n{n}"), false);
        assert_eq!(world.plan().to_string(), "", "n{n}");
    }
    world.pass(30);
    world.settle();
    assert!(world.ready("blue").1.contains("not set up on n9"), "{:?}", world.ready("blue"));
    let status = world.cluster.networks["blue"].status().expect("a status");
    assert_eq!(status.primary_namespaces, Some(1));
    unready(&mut world, "n9", true);
    world.settle();
    assert_eq!(world.ready("blue").0, "Ready", "at once");
}

/// One tenant's objects; another's node asks for a block meanwhile.
#[test]
fn ten_thousand_objects_that_nobody_answered_held_up_every_plan() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.network("blue", &["10.77.0.0/24"], None);
    world.settle();
    let many = (0..10_000).map(|n| attachment(&format!("a{n}"), "blue", "10.77.0.9", &json!({})));
    world.attach_only(many);
    world.pass(60);
    let about = |plan: &Plan| -> Vec<(String, String)> {
        plan.actions.iter().filter_map(Action::attachment).collect()
    };
    let plan = world.plan();
    let answered = about(&plan);
    assert_eq!(answered.len(), 50);
    world.asks("n1", "blue");
    let plan = world.plan();
    assert!(plan.actions.iter().any(|action| matches!(action, Action::GiveBlock(_))), "{plan}");
    assert!(plan.again.is_some_and(|again| again <= world.steady() + Duration::from_secs(1)));
    // Those that fail are not in the way of the others.
    let now = world.steady();
    let failed = answered.iter().map(|place| (place.clone(), now));
    world.memory.failed.extend(failed);
    let others = about(&world.plan());
    assert_eq!(others.len(), 50);
    assert!(others.iter().all(|place| !answered.contains(place)));
    world.pass(30);
    assert_eq!(about(&world.plan()), answered);
}

/// Its user gave it the label of what agents publish: no agent follows it any more, and none may change it.
#[test]
fn an_attachment_that_its_user_labelled_as_an_agents_kept_its_network_for_ever() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.namespace("evil", "red");
    world.network("red", &["10.77.0.0/24"], Some("red"));
    let relabelled = AttachmentView { managed: true, ..attached("relabelled", "red", "n1", "10.77.0.1") };
    world.attach_only([
        leaving(relabelled),
        // Its agent unplugs it, and lets it go itself.
        leaving(attached("plugged", "red", "n1", "10.77.0.2")),
    ]);
    world.settle();
    assert_eq!(world.cluster.attachments.len(), 2, "the agent of its node unplugs it first");
    world.pass(300);
    let words = world.plan().to_string();
    let gone = "remove the finalizer of NetworkAttachment evil/relabelled: it is labeled as published by an \
        agent, but no agent has it";
    assert!(words.lines().any(|line| line == gone), "{words}");
    assert!(!words.contains("evil/plugged"), "{words}");
    world.settle();
    world.cluster.attachments.retain(|_, attachment| attachment.name != "plugged");
    delete(&mut world, "red");
}

#[test]
fn what_a_dead_node_had_does_not_keep_a_network() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.namespace("evil", "red");
    world.network("red", &["10.77.0.0/24"], Some("red"));
    world.attach(attached("x", "red", "n9", "10.77.0.1"));
    world.settle();
    world.delete("red");
    world.settle();
    assert_eq!(world.ready("red").0, "InUse", "the node may come back");
    world.sleeps(300);
    world.settle();
    assert!(!world.cluster.networks.contains_key("red"));
}

fn delete(world: &mut World, network: &str) {
    world.delete(network);
    world.settle();
    assert!(!world.cluster.networks.contains_key(network));
}

#[test]
fn the_number_of_a_deleted_network_is_not_given_again_by_the_next_leader() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.settle();
    world.network("a", &["10.77.0.0/24"], None);
    world.network("b", &["10.78.0.0/24"], None);
    world.settle();
    let id = |world: &World, name: &str| world.cluster.networks[name].id();
    assert_eq!((id(&world, "a"), id(&world, "b")), (Some(2), Some(3)));
    delete(&mut world, "b");
    world.new_leader();
    world.network("c", &["10.79.0.0/24"], None);
    world.settle();
    assert_eq!(id(&world, "c"), Some(4));
    // One that was never the highest needs no more than that.
    delete(&mut world, "a");
    delete(&mut world, "c");
    world.new_leader();
    world.network("d", &["10.79.0.0/24"], None);
    world.settle();
    assert_eq!(id(&world, "d"), Some(5));
}

#[test]
fn a_network_whose_number_is_not_kept_does_not_go() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.settle();
    world.network("a", &["10.77.0.0/24"], None);
    world.settle();
    world.delete("a");
    // The write is lost, again and again.
    for _ in 0..3 {
        assert_eq!(world.plan().to_string(), "keep 2 as the highest ID of a deleted Network\n");
        world.pass(5);
    }
}

#[test]
fn blocks_of_two_leaders_that_overlap_are_reported_and_the_younger_goes() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.node("n2", "192.0.2.2", &["10.244.1.0/24"]);
    world.network("blue", &["10.77.0.0/24"], None);
    world.settle();
    let given = |world: &mut World, name: &str, node: &str, range: &str| {
        let mut metadata = world.meta(name);
        metadata.creation_timestamp = Some(Time(world.now));
        let spec = AddressBlockSpec {
            network: "blue".into(),
            node: node.into(),
            ipv4: Some(range.into()),
            ipv6: None,
        };
        let view = BlockView::of(AddressBlock { metadata, spec });
        world.cluster.blocks.insert(name.into(), Arc::new(view));
    };
    given(&mut world, "blue-10-77-0-24", "n1", "10.77.0.24/29");
    world.pass(1);
    // The late write of a leader that was one no more: another first address, so another name.
    given(&mut world, "blue-10-77-0-16", "n2", "10.77.0.16/28");
    let plan: Plan = world.plan();
    assert_eq!(
        plan.to_string(),
        "release blue-10-77-0-16: it overlaps 10.77.0.24/29 of node n1, which is older\n\
         event on Network blue: BlocksOverlap: AddressBlock blue-10-77-0-16 overlaps 10.77.0.24/29 of node \
         n1, which is older: it is revoked\n"
    );
    world.carry_out(&plan);
    world.asks("n2", "blue");
    world.settle();
    assert_eq!(world.blocks_of("blue", "n1"), ["10.77.0.24/29"]);
    assert_eq!(world.blocks_of("blue", "n2"), ["10.77.0.0/29"]);
}

#[test]
fn the_author_of_a_policy_is_told_once_however_often_it_changes() {
    let mut world = World::new();
    world.config.enforce_policies = false;
    world.settle();
    let policy = |n: usize| PolicyView { namespace: "a".into(), name: format!("p{n}"), uid: format!("u{n}") };
    world.cluster.policies.insert(("a".into(), "p0".into()), Arc::new(policy(0)));
    let plan = world.plan();
    assert_eq!(plan.to_string(), "event on NetworkPolicy a/p0: NotEnforced\n");
    let [Action::Tell { event, .. }] = plan.actions.as_slice() else { panic!("{plan}") };
    assert_eq!(event.metadata.name.as_deref(), Some("knit-not-enforced-u0"), "the next leader's is the same");
    for _ in 0..3 {
        world.pass(5);
        assert_eq!(world.plan().to_string(), "");
    }
    // Thousands at once do not hold up the rest.
    world.cluster.policies.extend((1..=50).map(|n| (("a".into(), format!("p{n}")), Arc::new(policy(n)))));
    let plan = world.plan();
    assert!(plan.again.is_some_and(|again| again > world.steady()), "never a pass without a pause");
    let told: Vec<usize> = (0..3).map(|_| world.plan().actions.len()).collect();
    assert_eq!((plan.actions.len(), told), (20, vec![20, 10, 0]));
}

#[test]
fn twenty_events_that_failed_held_up_those_of_all_other_policies() {
    let mut world = World::new();
    world.config.enforce_policies = false;
    world.settle();
    let policy = |n: usize| PolicyView { namespace: "a".into(), name: format!("p{n}"), uid: format!("u{n}") };
    world.cluster.policies.extend((10..60).map(|n| (("a".into(), format!("p{n}")), Arc::new(policy(n)))));
    assert_eq!(world.plan().actions.len(), 20);
    let now = world.steady();
    for n in 10..30 {
        assert!(world.memory.told.remove(&format!("u{n}")));
        let why = WriteFailure::Error;
        world.memory.writes.failed(&format!("events u{n}"), why, Some(Duration::from_secs(10)), (now, 1.0));
    }
    let told: Vec<usize> = (0..3).map(|_| world.plan().actions.len()).collect();
    assert_eq!(told, [20, 10, 0]);
    assert_eq!(world.plan().again, Some(world.steady() + Duration::from_secs(10)));
    world.pass(10);
    assert_eq!(world.plan().actions.len(), 20, "those that failed");
}

#[test]
fn nobody_was_told_that_policies_are_left_to_another_cni_plugin() {
    let mut world = World::new();
    world.config.serves_default = false;
    world.settle();
    let policy = PolicyView { namespace: "a".into(), name: "p".into(), uid: "u".into() };
    world.cluster.policies.insert(("a".into(), "p".into()), Arc::new(policy));
    assert_eq!(world.plan().to_string(), "event on NetworkPolicy a/p: NotEnforced\n");
}

#[test]
fn counts_of_addresses_are_written_every_half_minute_at_most() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &["10.244.0.0/24"]);
    world.network("blue", &["10.77.0.0/24"], None);
    world.settle();
    let mut writes = 0;
    let counts = |used: i64, free: i64| vec![AddressCounts { family: Family::V4, used, free }];
    for second in 0..60 {
        world.pass(1);
        world.says("n1", "blue", |n| n.addresses = counts(second, 100 - second));
        let plan = world.plan();
        writes += plan.actions.len();
        world.carry_out(&plan);
    }
    assert_eq!(writes, 2);
    // What is more than a count is said at once.
    world.says("n1", "blue", |n| n.ready = false);
    assert_eq!(world.plan().actions.len(), 1);
}
