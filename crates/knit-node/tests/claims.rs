//! Claims: addresses that are reserved before there is a sandbox, go to the sandbox when it comes and back
//! when it ends, and are free when the claim is released; whatever dies in between.

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use common::{Agent, Node, id};
use knit_ipam::Millis;
use knit_ledger::Entry;
use knit_node::files::Files;
use knit_node::sandboxes::books::Books;
use knit_node::testing::{Faults, Life};
use knit_node::{Asked, ClaimRequest, MainInterfaces, PodRequest, Reason};
use knit_runtime::InterfaceName;
use knit_types::{ObjectRef, Owner};
use tokio::time::Instant;

fn claim(name: &str) -> ObjectRef {
    ObjectRef { namespace: "shop".into(), name: name.into(), uid: format!("uid-{name}") }
}

fn asks(name: &str, networks: &[&'static str]) -> ClaimRequest {
    let asked = |network: &&'static str| Asked { network: (*network).into(), ..Asked::default() };
    ClaimRequest { claim: claim(name), networks: networks.iter().map(asked).collect(), pod: None }
}

fn with_claims(mut request: PodRequest, claims: &[&str]) -> PodRequest {
    request.claims = claims.iter().map(|name| claim(name)).collect();
    request
}

async fn prepare(agent: &Agent, request: ClaimRequest) -> knit_node::Result<Vec<String>> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let reservation = agent.core.prepare_claim(request, deadline).await?;
    let reservation = reservation.iter().flat_map(knit_ledger::Reservation::reserved);
    Ok(reservation.map(|r| format!("{} {} {}", r.interface, r.network, r.lease.addresses)).collect())
}

/// What a ledger says of whose each address is.
fn owners(node: &Node) -> BTreeSet<String> {
    let (content, _) = knit_ledger::read::<Entry>(&node.config().ledger()).expect("the ledger");
    assert!(content.unreadable.is_empty());
    let leases = content.records.values().flat_map(|entry| match entry {
        Entry::Sandbox(record) => record.leases().collect::<Vec<_>>(),
        Entry::Reservation(reservation) => reservation.leases().collect(),
    });
    leases.map(|lease| format!("{} {}", lease.addresses, lease.key)).collect()
}

#[tokio::test]
async fn a_claims_lease_outlives_its_sandboxes_and_is_free_when_it_is_released() {
    let node = Node::new();
    let agent = node.start().await;
    let reserved = prepare(&agent, asks("c", &["blue", "other"])).await.expect("reserved");
    assert_eq!(reserved.len(), 2, "{reserved:?}");
    assert_eq!(prepare(&agent, asks("c", &["blue", "other"])).await.expect("the same"), reserved);
    let error = prepare(&agent, asks("c", &["blue"])).await.expect_err("another one");
    assert_eq!(error.reason, Reason::Refused, "{error}");
    assert!(node.is_clean(), "nothing is made yet");

    let mut before = None;
    for sandbox in ["s1", "s2"] {
        let attached =
            agent.add(with_claims(node.request(sandbox, "shop", ""), &["c"])).await.expect("attached");
        let has: Vec<String> = attached.attachments[1..]
            .iter()
            .map(|a| format!("{} {} {}", a.interface, a.network, a.addresses[0].net.addr()))
            .collect();
        assert_eq!(has, reserved, "{sandbox} has what the claim had");
        let mine = owners(&node);
        assert_eq!(mine.iter().filter(|o| o.contains("claim")).count(), 0, "{mine:?}");
        assert_eq!(prepare(&agent, asks("c", &["blue", "other"])).await.expect("it is in use"), [""; 0]);
        let error = agent.core.release_claim(claim("c")).await.expect_err("in use");
        assert!(error.to_string().contains(sandbox) && error.retryable(), "{error}");
        // Nobody else gets it meanwhile.
        let late = with_claims(node.request("late", "shop", ""), &["c"]);
        let error = agent.add(late).await.expect_err("in use");
        assert!(error.to_string().contains("in use by sandbox"), "{error}");
        let net = InterfaceName::new("net1").expect("a name");
        let error = agent.core.detach_some(id(sandbox), [net].into()).await.expect_err("the claim's");
        assert_eq!(error.reason, Reason::Refused, "{error}");
        agent.del(sandbox).await.expect("detached");
        let mine = owners(&node);
        assert_eq!(mine.len(), 2, "{mine:?}");
        assert!(mine.iter().all(|o| o.ends_with("of claim shop/c")), "{mine:?}");
        assert!(before.is_none_or(|b| b == mine), "the same again");
        before = Some(mine);
    }
    agent.core.release_claim(claim("c")).await.expect("released");
    agent.core.release_claim(claim("c")).await.expect("again is success");
    assert!(owners(&node).is_empty());
    let (used, resting) = {
        let again = prepare(&agent, asks("d", &["blue"])).await.expect("reserved");
        (again.clone(), reserved.contains(&again[0]))
    };
    assert!(!resting, "{used:?}: what a pod had rests");
}

#[tokio::test]
async fn a_claim_is_its_namespaces_and_must_be_prepared() {
    let node = Node::new();
    let agent = node.start().await;
    let error =
        agent.add(with_claims(node.request("s1", "shop", ""), &["c"])).await.expect_err("not prepared");
    assert!(error.to_string().contains("nothing is reserved for claim shop/c"), "{error}");
    prepare(&agent, asks("c", &["blue"])).await.expect("reserved");
    let error =
        agent.add(with_claims(node.request("s1", "forest", ""), &["c"])).await.expect_err("another's");
    assert_eq!(error.reason, Reason::Refused, "{error}");
    let error = prepare(&agent, asks("e", &["green"])).await.expect_err("not for this namespace");
    assert_eq!(error.reason, Reason::NotAllowed, "{error}");
    assert!(node.is_clean());
    // A claim that asks for one name, and a pod that has it: the pod's own stays, and the claim's gets
    // another.
    let attached =
        agent.add(with_claims(node.request("s1", "shop", "other"), &["c"])).await.expect("attached");
    let names: Vec<&str> = attached.attachments.iter().map(|a| a.interface.as_str()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 3, "{names:?}");
    agent.del("s1").await.expect("detached");
    assert!(
        owners(&node).iter().all(|o| o.ends_with("interface net1 of claim shop/c")),
        "{:?}",
        owners(&node)
    );
}

#[tokio::test]
async fn a_name_that_a_claim_asks_for_was_silently_replaced_by_another() {
    let node = Node::new();
    let agent = node.start().await;
    let mut named = asks("c", &["blue"]);
    named.networks[0].interface = Some(InterfaceName::new("data0").expect("a name"));
    prepare(&agent, named).await.expect("reserved");
    // One that nobody asked for, prepared first, gives way.
    prepare(&agent, asks("auto", &["other"])).await.expect("reserved");
    for sandbox in ["s1", "s2"] {
        let taken = with_claims(node.request(sandbox, "shop", "other@data0"), &["c"]);
        let error = agent.add(taken).await.expect_err("two of one name");
        assert_eq!(error.reason, Reason::Refused, "{error}");
        assert!(error.to_string().contains("claim shop/c requests interface data0"), "{error}");
        let both = with_claims(node.request(sandbox, "shop", ""), &["auto", "c"]);
        let attached = agent.add(both).await.expect("attached");
        let names: Vec<&str> = attached.attachments.iter().map(|a| a.interface.as_str()).collect();
        assert_eq!(names, ["eth0", "net1", "data0"]);
        // It is asked for as before when a sandbox has given it back.
        agent.del(sandbox).await.expect("detached");
    }
}

#[tokio::test]
async fn a_default_route_that_belongs_to_another_plugin_was_refused_only_at_the_sandbox() {
    let node = Node { main_interfaces: MainInterfaces::Foreign, ..Node::new() };
    let agent = node.start().await;
    let mut route = asks("c", &["blue"]);
    route.networks[0].default_route = true;
    let error = prepare(&agent, route).await.expect_err("another plugin's");
    assert_eq!(error.reason, Reason::Refused, "{error}");
    assert!(error.to_string().contains("defaultRoute"), "{error}");
    prepare(&agent, asks("c", &["blue"])).await.expect("reserved");
}

#[tokio::test]
async fn what_fails_gives_the_claim_back_what_it_had() {
    let node = Node::new();
    let agent = node.start().await;
    prepare(&agent, asks("c", &["blue"])).await.expect("reserved");
    let before = owners(&node);
    node.kernel.fail(Faults { attach: Some((1, knit_runtime::Reason::Internal)), ..Faults::default() });
    agent.add(with_claims(node.request("s1", "shop", ""), &["c"])).await.expect_err("told to fail");
    assert_eq!(owners(&node), before);
    agent.add(with_claims(node.request("s1", "shop", ""), &["c"])).await.expect("attached");
    // A new sandbox of the same pod takes it over from the old one, whose DEL never came.
    let mut next = with_claims(node.request("s2", "shop", ""), &["c"]);
    next.pod.name = Some("pod-s1".into());
    next.pod.uid = Some("uid-s1".into());
    agent.add(next).await.expect("attached");
    assert_eq!(owners(&node).iter().filter(|o| o.contains("sandbox s2")).count(), 2, "{:?}", owners(&node));
}

/// A claim of two runtimes' Networks, of which one could not take its interface back from the old sandbox.
#[tokio::test]
async fn a_pods_next_sandbox_started_with_a_part_of_its_claim() {
    let node = Node::new();
    let agent = node.start().await;
    prepare(&agent, asks("c", &["blue", "other"])).await.expect("reserved");
    agent.add(with_claims(node.request("s1", "shop", ""), &["c"])).await.expect("attached");
    node.other.fail(Faults { detaches: 1, ..Faults::default() });
    let mut next = with_claims(node.request("s2", "shop", ""), &["c"]);
    next.pod.name = Some("pod-s1".into());
    next.pod.uid = Some("uid-s1".into());
    let error = agent.add(next.clone()).await.expect_err("the other runtime still has its interface");
    assert!(error.to_string().contains("in use by sandbox s1") && error.retryable(), "{error}");
    let mine = owners(&node);
    assert!(mine.iter().any(|o| o.ends_with("of claim shop/c")), "one part is back: {mine:?}");
    assert!(mine.iter().any(|o| o.contains("sandbox s1")), "the other one is not: {mine:?}");
    assert_eq!(prepare(&agent, asks("c", &["blue", "other"])).await.expect("it is in use"), [""; 0]);
    let attached = agent.add(next).await.expect("kubelet tries again");
    let networks: Vec<&str> = attached.attachments.iter().map(|a| a.network.as_str()).collect();
    assert_eq!(networks, ["default", "blue", "other"]);
    agent.del("s2").await.expect("detached");
    agent.core.release_claim(claim("c")).await.expect("released");
    assert!(owners(&node).is_empty() && node.is_clean());
}

#[tokio::test]
async fn what_came_back_in_another_order_was_refused_as_another_reservation() {
    let node = Node::new();
    let agent = node.start().await;
    let before = prepare(&agent, asks("c", &["blue", "other"])).await.expect("reserved");
    agent.add(with_claims(node.request("s1", "shop", ""), &["c"])).await.expect("attached");
    // The runtime of blue takes its interface back later than the other one.
    node.kernel.fail(Faults { detaches: 1, ..Faults::default() });
    agent.del("s1").await.expect_err("one of them fails");
    agent.del("s1").await.expect("detached");
    let again = prepare(&agent, asks("c", &["blue", "other"])).await.expect("it is what is asked for");
    assert_ne!(again, before, "the order is another one");
    assert_eq!(again.iter().collect::<BTreeSet<_>>(), before.iter().collect());
    for other in [&["blue"][..], &["blue", "blue"], &["blue", "other", "blue"]] {
        let error = prepare(&agent, asks("c", other)).await.expect_err("something else");
        assert_eq!(error.reason, Reason::Refused, "{error}");
    }
}

#[test]
fn killed_at_every_step_a_claims_addresses_are_its_own_or_its_sandboxs() {
    let mut kill_at = 0;
    let (mut with_claim, mut with_sandbox) = (0, 0);
    loop {
        let node = Node::new();
        let life = Life::new(Some(kill_at));
        let runtime =
            || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime().block_on(async {
            let scenario = async {
                let agent = node.start_with(&life).await;
                let _ = prepare(&agent, asks("c", &["blue"])).await;
                let _ = agent.add(with_claims(node.request("s1", "shop", ""), &["c"])).await;
                let _ = agent.del("s1").await;
                let _ = agent.core.release_claim(claim("c")).await;
            };
            tokio::select! {
                () = life.over() => {}
                () = scenario => {}
            }
        });
        let completed = !life.is_over();
        runtime().block_on(async {
            let before = owners(&node);
            let blue: Vec<&String> = before.iter().filter(|o| o.starts_with("10.2.")).collect();
            assert!(
                blue.len() <= 1,
                "killed at {kill_at}: nobody's, the claim's or the sandbox's: {before:?}"
            );
            let agent = node.start().await;
            let (of_claim, lent) = {
                let owner = Owner::claim(claim("c"));
                let after = owners(&node);
                let lent = after.iter().any(|o| o.contains("net1 of sandbox s1"));
                (after.iter().any(|o| o.ends_with(&format!("of {owner}"))), lent)
            };
            assert!(!(of_claim && lent), "killed at {kill_at}");
            if let Some(was) = blue.first() {
                assert!(of_claim || lent, "killed at {kill_at}: {was} is lost");
            }
            with_claim += usize::from(of_claim);
            with_sandbox += usize::from(lent);
            // Whoever has it, it goes on from there, and nothing is left in the end.
            agent.del("s1").await.expect("detached");
            prepare(&agent, asks("c", &["blue"])).await.expect("reserved");
            agent.add(with_claims(node.request("s2", "shop", ""), &["c"])).await.expect("attached");
            agent.del("s2").await.expect("detached");
            agent.core.release_claim(claim("c")).await.expect("released");
            assert!(owners(&node).is_empty() && node.is_clean(), "killed at {kill_at}");
        });
        if completed {
            break;
        }
        kill_at += 1;
    }
    assert!(with_claim > 3 && with_sandbox > 1, "{kill_at} steps: {with_claim} {with_sandbox}");
}

/// The ledger is cut off at any byte, as by a crash while it is written: an address is always the claim's or
/// the sandbox's, in the ledger and for the allocator that is made of it.
#[tokio::test]
async fn cut_off_at_any_byte_a_lease_has_one_owner() {
    let node = Node::new();
    let agent = node.start().await;
    let ledger = node.config().ledger();
    let read = || std::fs::read(&ledger).expect("the ledger");
    prepare(&agent, asks("c", &["blue"])).await.expect("reserved");
    let prepared = read();
    agent.add(with_claims(node.request("s1", "shop", ""), &["c"])).await.expect("attached");
    let attached = read();
    agent.del("s1").await.expect("detached");
    let detached = read();
    assert!(detached.starts_with(&attached) && attached.starts_with(&prepared), "it was only added to");
    drop(agent);

    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("ledger");
    let mut seen = BTreeSet::new();
    for len in prepared.len()..=detached.len() {
        std::fs::write(&path, &detached[..len]).expect("written");
        let (files, _) = Files::open(&path).expect("a ledger");
        let books = Books::open("node-1", Box::new(files), Millis(0));
        let mut blue = books.allocator.leases().filter(|lease| lease.network == "blue");
        let lease = blue.next().unwrap_or_else(|| panic!("cut at {len}: the address is nobody's"));
        assert!(blue.next().is_none(), "cut at {len}: it has two owners");
        let recorded = match &lease.key.owner {
            Owner::Sandbox(sandbox) => books.get(sandbox).is_some_and(|r| r.attachments().len() == 2),
            owner => books.reservation(owner).is_some_and(|r| r.reserved().len() == 1),
        };
        assert!(recorded, "cut at {len}: the ledger says the same");
        seen.insert(lease.key.owner.clone());
    }
    assert_eq!(seen.len(), 2, "both had it: {seen:?}");
}
