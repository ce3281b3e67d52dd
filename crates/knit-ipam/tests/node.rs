//! The node's allocator, case by case: what a pod gets, and what it is told when it cannot have it.

use std::net::IpAddr;

use knit_ipam::{
    AddressRange, Addresses, Block, BlockError, BlockSize, LeaseError, LeaseKey, LeaseKind, Mac, Millis,
    NodeAllocator, NodeConfig, PodRef, Pool, Removal, Request, Subnet, Want, gateway_mac, pod_mac,
};
use knit_types::{InterfaceName, ObjectRef, Owner, SandboxId};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn both(list: &[&str]) -> Addresses {
    Addresses::from_list(&list.iter().map(|a| ip(a)).collect::<Vec<_>>()).unwrap()
}

fn pool(name: &'static str, id: u32) -> Pool {
    let range = |a, b| AddressRange::new(ip(a), ip(b)).unwrap();
    let v4 = Subnet::new("10.0.0.0/24".parse().unwrap(), None, &[range("10.0.0.128", "10.0.0.143")]).unwrap();
    let v6 = Subnet::new("fd00::/64".parse().unwrap(), None, &[range("fd00::80", "fd00::8f")]).unwrap();
    Pool::new(name, id, [v4, v6]).unwrap().primary(true).with_router(true)
}

fn block(network: &'static str, at: u8) -> Block {
    let start = both(&[&format!("10.0.0.{at}"), &format!("fd00::{at:x}")]);
    Block::new(network, "n1", start, BlockSize::SMALL).unwrap()
}

fn node() -> NodeAllocator {
    let mut node = NodeAllocator::new("n1", NodeConfig::default());
    node.set_network(pool("red", 1));
    node.add_block(block("red", 0)).unwrap();
    node
}

fn sandbox(id: &str) -> Owner {
    Owner::Sandbox(SandboxId::new(id).unwrap())
}

fn claim(name: &str) -> Owner {
    Owner::claim(ObjectRef { namespace: "shop".into(), name: name.into(), uid: format!("uid-{name}") })
}

fn key(id: &str, interface: &str) -> LeaseKey {
    LeaseKey::new(sandbox(id), InterfaceName::new(interface).unwrap())
}

fn want(interface: &str, network: &'static str) -> Want {
    Want::new(InterfaceName::new(interface).unwrap(), network)
}

fn ask(id: &str, wants: Vec<Want>) -> Request {
    let pod = PodRef { namespace: "shop".into(), name: format!("pod-{id}"), uid: None };
    Request { owner: sandbox(id), pod: Some(pod), wants }
}

fn fixed(addresses: &[&str]) -> Want {
    Want { addresses: addresses.iter().map(|a| ip(a)).collect(), ..want("eth0", "red") }
}

#[test]
fn the_first_pod_follows_subnet_gateway_and_router() {
    let mut node = node();
    let (router, mac) = node.router("red").unwrap();
    assert_eq!(router, both(&["10.0.0.2", "fd00::2"]));
    assert_eq!(mac, pod_mac(1, ip("10.0.0.2")));
    let lease = node.lease(&ask("a", vec![want("eth0", "red")]), Millis(0)).unwrap().remove(0);
    assert_eq!(lease.addresses, both(&["10.0.0.3", "fd00::3"]));
    assert_eq!(lease.mac, block("red", 0).mac_at(1, 3).unwrap(), "known from the block alone");
    assert_eq!(lease.kind, LeaseKind::Dynamic);
}

#[test]
fn all_or_nothing_over_networks() {
    let mut node = node();
    node.set_network(pool("empty", 2));
    let wants = vec![want("eth0", "red"), want("net1", "empty")];
    let error = node.lease(&ask("a", wants), Millis(0)).unwrap_err();
    assert!(matches!(&error, LeaseError::Exhausted { network, .. } if network == "empty"), "{error}");
    assert!(error.retryable());
    assert_eq!(node.leases().count(), 0);
    assert_eq!(node.counts("red", Millis(0)).unwrap().v4.unwrap().used, 0);
}

#[test]
fn exhaustion_is_told_with_counts_and_the_time_of_the_next_free_address() {
    let mut node = node();
    for n in 0..5 {
        node.lease(&ask(&format!("s{n}"), vec![want("eth0", "red")]), Millis(0)).unwrap();
    }
    assert_eq!(node.wants_more(Millis(0))[0].free, 0);
    node.free(&key("s1", "eth0"), Millis(1_000)).unwrap();
    let again = ask("late", vec![want("eth0", "red")]);
    let error = node.lease(&again, Millis(2_000)).unwrap_err();
    let LeaseError::Exhausted { next_free_at, .. } = &error else { panic!("{error}") };
    assert_eq!(*next_free_at, Some(Millis(31_000)));
    assert_eq!(
        error.to_string(),
        "no address of Network red is free on this node for interface eth0 of sandbox late: of 8 addresses, \
         4 are used, 1 held back, 2 reserved, 1 used by the router, 0 blocked; try again when the node has \
         another block, or free addresses on this node"
    );
    let lease = node.lease(&again, Millis(31_000)).unwrap().remove(0);
    assert_eq!(lease.addresses, both(&["10.0.0.4", "fd00::4"]));
}

#[test]
fn a_pod_gets_its_own_address_again_through_quarantine() {
    let mut node = node();
    let first = node.lease(&ask("x", vec![want("eth0", "red")]), Millis(0)).unwrap().remove(0);
    node.free(&first.key, Millis(1)).unwrap();
    let sticky = Want { prefer: Some(ip("fd00::3")), ..want("eth0", "red") };
    let stranger = node.lease(&ask("y", vec![sticky.clone()]), Millis(2)).unwrap().remove(0);
    assert_ne!(stranger.addresses, first.addresses);
    let mut same = ask("x2", vec![sticky]);
    same.pod = first.pod.clone();
    let back = node.lease(&same, Millis(3)).unwrap().remove(0);
    assert_eq!(back.addresses, first.addresses);
    // The attach failed, nothing was ever sent: the old quarantine goes on.
    node.cancel(&back.key).unwrap();
    assert_eq!(node.counts("red", Millis(4)).unwrap().v4.unwrap().quarantined, 1);
}

#[test]
fn the_same_request_twice_is_one_and_another_is_a_conflict() {
    let mut node = node();
    let once = ask("a", vec![want("eth0", "red")]);
    let lease = node.lease(&once, Millis(0)).unwrap();
    assert_eq!(node.lease(&once, Millis(9)).unwrap(), lease);
    let error = node.lease(&ask("a", vec![fixed(&["10.0.0.7"])]), Millis(9)).unwrap_err();
    assert!(matches!(error, LeaseError::Conflict { .. }), "{error}");
    let twice = ask("b", vec![want("eth0", "red"), want("eth0", "red")]);
    assert!(matches!(node.lease(&twice, Millis(9)), Err(LeaseError::DuplicateRequest { .. })));
    // A client that first sent no pod and then does: the lease learns it.
    let mut nameless = ask("c", vec![want("eth0", "red")]);
    nameless.pod = None;
    node.lease(&nameless, Millis(9)).unwrap();
    node.lease(&ask("c", vec![want("eth0", "red")]), Millis(9)).unwrap();
    assert_eq!(node.get(&key("c", "eth0")).unwrap().pod.as_ref().unwrap().name, "pod-c");
}

#[test]
fn static_addresses_are_refused_for_the_right_reason() {
    let mut node = node();
    node.lease(&ask("a", vec![want("eth0", "red")]), Millis(0)).unwrap();
    let mut told = |addresses: &[&str]| {
        node.lease(&ask("s", vec![fixed(addresses)]), Millis(0)).unwrap_err().to_string()
    };
    let who = "wanted by interface eth0 of sandbox s,";
    assert_eq!(
        told(&["10.0.0.3"]),
        format!(
            "address 10.0.0.3 of Network red, {who} is in use by pod shop/pod-a (interface eth0 of sandbox \
             a) on Network red: request another address, or remove that pod"
        )
    );
    let text = told(&["10.0.1.3"]);
    assert_eq!(
        text,
        format!(
            "address 10.0.1.3, {who} is not in a subnet of Network red: request an address in one of its \
             subnets"
        )
    );
    assert!(told(&["10.0.0.1"]).contains("is the gateway"));
    assert!(told(&["fd00::2"]).contains("is the address of this node's router"));
    assert!(told(&["10.0.0.99"]).contains("neither in a block of this node nor in a reserved range"));
}

#[test]
fn a_reserved_address_is_given_to_who_asks_and_the_other_family_is_chosen() {
    let mut node = node();
    let lease = node.lease(&ask("s", vec![fixed(&["10.0.0.130"])]), Millis(0)).unwrap().remove(0);
    assert_eq!(lease.addresses, both(&["10.0.0.130", "fd00::3"]));
    assert_eq!(lease.kind, LeaseKind::Static);
    let counts = node.counts("red", Millis(0)).unwrap();
    assert_eq!((counts.v4.unwrap().outside, counts.v6.unwrap().outside), (1, 0));
    // The index is held as a whole.
    let error = node.lease(&ask("t", vec![fixed(&["10.0.0.3"])]), Millis(0)).unwrap_err();
    assert!(matches!(error, LeaseError::AddressInUse { .. }), "{error}");
    // One inside the block keeps its pair.
    let lease = node.lease(&ask("u", vec![fixed(&["10.0.0.6"])]), Millis(0)).unwrap().remove(0);
    assert_eq!(lease.addresses, both(&["10.0.0.6", "fd00::6"]));
}

#[test]
fn an_index_that_two_pods_share_is_free_only_after_both() {
    let mut node = node();
    // Both outside any block, until one comes that pairs them.
    node.lease(&ask("a", vec![fixed(&["10.0.0.130"])]), Millis(0)).unwrap();
    node.lease(&ask("b", vec![fixed(&["fd00::82"])]), Millis(0)).unwrap();
    node.add_block(block("red", 128)).unwrap();
    let used = |node: &NodeAllocator| node.counts("red", Millis(0)).unwrap().v4.unwrap().used;
    assert_eq!(used(&node), 3);
    node.free(&key("a", "eth0"), Millis(0)).unwrap();
    assert_eq!(used(&node), 2);
    node.free(&key("b", "eth0"), Millis(0)).unwrap();
    assert_eq!(used(&node), 0);
}

#[test]
fn an_address_is_one_pod_s_on_its_node_over_all_primaries() {
    let mut node = node();
    node.set_network(pool("blue", 2));
    node.set_network(pool("aside", 3).primary(false));
    let on = |network: &'static str| Want { network: network.into(), ..fixed(&["10.0.0.130", "fd00::82"]) };
    node.lease(&ask("a", vec![on("red")]), Millis(0)).unwrap();
    let error = node.lease(&ask("b", vec![on("blue")]), Millis(0)).unwrap_err();
    assert!(error.to_string().contains("in use by pod shop/pod-a"), "{error}");
    node.lease(&ask("b", vec![on("aside")]), Millis(0)).unwrap();
}

#[test]
fn addresses_of_pods_elsewhere_are_known() {
    let mut node = node();
    node.set_elsewhere("red", [(ip("10.0.0.131"), "pod shop/far on node n2".to_owned())].into());
    let error = node.lease(&ask("s", vec![fixed(&["10.0.0.131"])]), Millis(0)).unwrap_err();
    assert!(error.to_string().contains("in use by pod shop/far on node n2"), "{error}");
}

#[test]
fn macs_that_are_asked_for() {
    let mut node = node();
    let with = |mac: Mac, interface: &str| Want { mac: Some(mac), ..want(interface, "red") };
    let own = Mac([2, 0, 0, 0, 0, 1]);
    let lease = node.lease(&ask("a", vec![with(own, "eth0")]), Millis(0)).unwrap().remove(0);
    assert_eq!((lease.mac, lease.kind), (own, LeaseKind::Static));
    for (mac, why) in [
        (own, "is in use by pod shop/pod-a"),
        (gateway_mac(1), "belongs to the gateway"),
        (pod_mac(1, ip("10.0.0.200")), "is reserved for another address"),
        (Mac([1, 0, 0, 0, 0, 1]), "is not a unicast address"),
    ] {
        let error = node.lease(&ask("b", vec![with(mac, "eth0")]), Millis(0)).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// What the controller must give to nobody else: whatever a pod still has, and whether or not this node knows
/// the block that it is out of.
#[test]
fn ranges_are_held_until_the_last_pod_of_a_block_that_was_taken_back_is_gone() {
    let held = |node: &NodeAllocator| -> Vec<String> {
        let all = node.held_ranges();
        assert!(all.keys().all(|network| network == "red"));
        all.values().flatten().map(ToString::to_string).collect()
    };
    let (mut before, start) = (node(), block("red", 0).start());
    let lease = before.lease(&ask("a", vec![want("eth0", "red")]), Millis(0)).unwrap().remove(0);
    let reserved = fixed(&["10.0.0.130", "fd00::82"]);
    before.lease(&ask("static", vec![reserved]), Millis(0)).unwrap();
    assert_eq!(held(&before), ["10.0.0.0/29", "fd00::/125"]);
    assert_eq!(before.remove_block("red", &start), Removal::Draining { leased: 1 });
    assert_eq!(held(&before), ["10.0.0.0/29", "fd00::/125"]);
    // The agent is restarted: it knows the pods, and not the block.
    let snapshot = before.snapshot(Millis(0));
    let mut after = NodeAllocator::restore("n1", NodeConfig::default(), [], [], snapshot).allocator;
    let alone = lease.addresses.iter().map(|a| a.to_string()).collect::<Vec<_>>();
    assert!(alone.iter().all(|a| held(&after).iter().any(|range| range.starts_with(&format!("{a}/")))));
    after.set_network(pool("red", 1));
    assert_eq!(held(&after).len(), 2, "{:?}", held(&after));
    for mut node in [before, after] {
        node.free(&lease.key, Millis(0)).unwrap();
        assert!(held(&node).is_empty(), "{:?}", held(&node));
    }
}

#[test]
fn blocks_come_go_and_drain() {
    let mut node = node();
    let start = block("red", 0).start();
    assert_eq!(node.remove_block("red", &start), Removal::Removed);
    assert_eq!(node.remove_block("red", &start), Removal::Unknown);
    node.add_block(block("red", 0)).unwrap();
    let lease = node.lease(&ask("a", vec![want("eth0", "red")]), Millis(0)).unwrap().remove(0);
    assert_eq!(node.remove_block("red", &start), Removal::Draining { leased: 1 });
    assert!(node.lease(&ask("b", vec![want("eth0", "red")]), Millis(0)).is_err());
    node.free(&lease.key, Millis(0)).unwrap();
    assert_eq!(node.blocks("red").count(), 0);
    let other = Block::new("red", "n2", start, BlockSize::SMALL).unwrap();
    assert!(matches!(node.add_block(other), Err(BlockError::OtherNode { .. })));
    node.add_block(block("red", 0)).unwrap();
    let larger = Block::new("red", "n1", start, BlockSize::new(16).unwrap()).unwrap();
    assert!(matches!(node.add_block(larger), Err(BlockError::Overlaps { .. })));
    let outside = Block::new("red", "n1", both(&["10.1.0.0", "fd00::"]), BlockSize::SMALL).unwrap();
    assert!(matches!(node.add_block(outside), Err(BlockError::OutsideSubnet { .. })));
    assert!(matches!(node.add_block(block("green", 0)), Err(BlockError::UnknownNetwork { .. })));
}

#[test]
fn a_family_that_is_added_later_needs_new_blocks() {
    let v4 = || Subnet::new("10.0.0.0/24".parse().unwrap(), None, &[]).unwrap();
    let v6 = || Subnet::new("fd00::/64".parse().unwrap(), None, &[]).unwrap();
    let mut node = NodeAllocator::new("n1", NodeConfig::default());
    node.set_network(Pool::new("red", 1, [v4()]).unwrap());
    node.add_block(Block::new("red", "n1", both(&["10.0.0.0"]), BlockSize::SMALL).unwrap()).unwrap();
    let old = node.lease(&ask("a", vec![want("eth0", "red")]), Millis(0)).unwrap().remove(0);
    node.set_network(Pool::new("red", 1, [v4(), v6()]).unwrap());
    assert_eq!(node.get(&old.key), Some(&old), "who is there stays");
    assert_eq!(node.wants_more(Millis(0)).len(), 1);
    assert!(node.lease(&ask("b", vec![want("eth0", "red")]), Millis(0)).is_err(), "both families or none");
    node.add_block(block("red", 8)).unwrap();
    let new = node.lease(&ask("b", vec![want("eth0", "red")]), Millis(0)).unwrap().remove(0);
    assert_eq!(new.addresses, both(&["10.0.0.8", "fd00::8"]));
    node.free(&old.key, Millis(0)).unwrap();
    let spare: Vec<_> = node.spare_blocks(Millis(60_000)).iter().map(|s| s.block.to_string()).collect();
    assert_eq!(spare, ["10.0.0.0/29"]);
}

#[test]
fn empty_blocks_are_spare_once_they_are_cold_and_the_rest_suffices() {
    let mut node = node();
    for at in [8, 16] {
        node.add_block(block("red", at)).unwrap();
    }
    for n in 0..14 {
        node.lease(&ask(&format!("s{n:02}"), vec![want("eth0", "red")]), Millis(0)).unwrap();
    }
    assert_eq!(node.spare_blocks(Millis(0)), []);
    for n in 0..14 {
        node.free_owner(&sandbox(&format!("s{n:02}")), Millis(1));
    }
    let spare = |node: &NodeAllocator, now| -> Vec<String> {
        let spare = node.spare_blocks(Millis(now)).into_iter();
        spare.map(|s| s.block.prefix(knit_ipam::Family::V4).unwrap().to_string()).collect()
    };
    assert_eq!(spare(&node, 30_000), Vec::<String>::new(), "in quarantine");
    assert_eq!(spare(&node, 30_001), ["10.0.0.16/29", "10.0.0.8/29"], "the oldest stays");
    let first = node.spare_blocks(Millis(30_001))[0];
    assert_eq!((first.last_used, first.is_closed), (Some(Millis(1)), false));
}

#[test]
fn nothing_is_leased_from_a_block_that_is_wanted_back_until_it_is_not_any_more() {
    let mut node = node();
    node.add_block(block("red", 8)).unwrap();
    let back = both(&["10.0.0.8", "fd00::8"]);
    let spare = |node: &NodeAllocator, now| -> Vec<(String, bool)> {
        let spare = node.spare_blocks(Millis(now)).into_iter();
        spare.map(|s| (s.block.prefix(knit_ipam::Family::V4).unwrap().to_string(), s.is_closed)).collect()
    };
    assert_eq!(spare(&node, 0), [("10.0.0.8/29".to_owned(), false)]);
    node.set_wanted_back("red", &back, true);
    assert_eq!(spare(&node, 0), [("10.0.0.8/29".to_owned(), true)]);
    // It stays closed when something about the Network changes, and when its object is read again.
    let pool = node.pool("red").unwrap().clone().primary(true);
    node.set_network(pool);
    node.add_block(block("red", 8)).unwrap();
    let mut leased = Vec::new();
    while let Ok(lease) =
        node.lease(&ask(&format!("s{}", leased.len()), vec![want("eth0", "red")]), Millis(0))
    {
        assert!(lease[0].addresses.iter().all(|a| block("red", 8).index_of(a).is_none()), "{lease:?}");
        leased.push(lease);
    }
    let fixed = ask("fixed", vec![fixed(&["10.0.0.9"])]);
    assert!(matches!(node.lease(&fixed, Millis(0)), Err(LeaseError::NotOnThisNode { .. })));
    // Now it is needed here.
    assert_eq!(spare(&node, 0), []);
    assert!(node.held_ranges()["red"].contains(&"10.0.0.8/29".parse().unwrap()), "and nobody else's");
    node.set_wanted_back("red", &back, false);
    node.lease(&fixed, Millis(0)).unwrap();
    // What a pod has of it is the pod's, whatever is asked for.
    node.set_wanted_back("red", &back, true);
    for n in 0..leased.len() {
        node.free_owner(&sandbox(&format!("s{n}")), Millis(1));
    }
    assert_eq!(spare(&node, 60_000), []);
    node.free_owner(&sandbox("fixed"), Millis(60_000));
    assert_eq!(spare(&node, 80_000), [], "it rests");
    assert_eq!(spare(&node, 90_000), [("10.0.0.8/29".to_owned(), true)]);
}

#[test]
fn the_block_with_the_routers_address_is_not_spare() {
    let mut node = node();
    node.add_block(block("red", 8)).unwrap();
    let pool = node.pool("red").unwrap().clone().with_router(true);
    node.set_network(pool);
    let young = node.lease(&ask("a", vec![fixed(&["10.0.0.10"])]), Millis(0)).unwrap();
    assert!(block("red", 8).index_of(young[0].addresses.first()).is_some());
    assert_eq!(node.spare_blocks(Millis(60_000)), [], "the oldest has the router's address");
}

#[test]
fn a_block_of_a_network_that_is_not_here_is_unused_unless_something_of_it_is_left() {
    let mut node = NodeAllocator::new("n1", NodeConfig::default());
    assert!(node.is_unused(&block("red", 8), Millis(0)));
    node.withhold("a record", None, ip("10.0.0.9"));
    assert!(!node.is_unused(&block("red", 8), Millis(0)) && node.is_unused(&block("red", 16), Millis(0)));
    node.release("a record", Millis(0));
    node.rest_all(Millis(0));
    assert!(!node.is_unused(&block("red", 8), Millis(10_000)), "it may have been freed just before");
    assert!(node.is_unused(&block("red", 8), Millis(60_000)));
}

#[test]
fn a_lease_may_have_several_addresses_of_a_family() {
    let mut node = node();
    let many = fixed(&["10.0.0.130", "10.0.0.5", "10.0.0.131", "10.0.0.5"]);
    let lease = node.lease(&ask("a", vec![many.clone()]), Millis(0)).unwrap().remove(0);
    assert_eq!(lease.addresses.to_string(), "10.0.0.130,fd00::3,10.0.0.5,10.0.0.131");
    assert_eq!((lease.kind, lease.mac), (LeaseKind::Static, pod_mac(1, ip("10.0.0.130"))));
    assert_eq!(node.lease(&ask("a", vec![many]), Millis(0)).unwrap(), std::slice::from_ref(&lease), "again");
    let counts = node.counts("red", Millis(0)).unwrap().v4.unwrap();
    assert_eq!((counts.used, counts.outside), (2, 2), "the indexes of fd00::3 and 10.0.0.5");
    for taken in ["10.0.0.131", "10.0.0.5", "fd00::3"] {
        let error = node.lease(&ask("b", vec![fixed(&[taken])]), Millis(0)).unwrap_err();
        assert!(matches!(error, LeaseError::AddressInUse { .. }), "{taken}: {error}");
    }
    let text = serde_json::to_string(&node.snapshot(Millis(0))).unwrap();
    let read: knit_ipam::Snapshot = serde_json::from_str(&text).unwrap();
    assert_eq!(read.leases, std::slice::from_ref(&lease));
    node.free(&lease.key, Millis(0)).unwrap();
    let counts = node.counts("red", Millis(0)).unwrap().v4.unwrap();
    assert_eq!((counts.used, counts.quarantined, counts.outside), (0, 2, 0), "all of them are free");
    node.lease(&ask("b", vec![fixed(&["10.0.0.131"])]), Millis(0)).unwrap();
}

#[test]
fn what_a_claim_has_goes_to_a_sandbox_and_back_and_is_free_for_nobody_in_between() {
    let mut node = node();
    let request = Request { owner: claim("c"), pod: None, wants: vec![want("net1", "red")] };
    let reserved = node.lease(&request, Millis(0)).unwrap().remove(0);
    let counts = node.counts("red", Millis(0)).unwrap();
    let pod = PodRef { namespace: "shop".into(), name: "web".into(), uid: None };
    let there = key("s", "net2");
    assert!(node.transfer(&reserved.key, &there, Some(&pod)));
    assert!(!node.transfer(&reserved.key, &there, None), "it is not the claim's any more");
    let lease = node.get(&there).unwrap();
    assert_eq!((&lease.addresses, lease.mac, &lease.pod), (&reserved.addresses, reserved.mac, &Some(pod)));
    assert_eq!(node.holder("red", lease.addresses.first()), Some(lease));
    assert_eq!(node.counts("red", Millis(0)).unwrap(), counts);
    node.lease(&ask("t", vec![want("net1", "red")]), Millis(0)).unwrap();
    assert!(!node.transfer(&there, &key("t", "net1"), None), "that one has something else");
    assert!(node.transfer(&there, &reserved.key, None));
    assert_eq!(node.get(&reserved.key), Some(&reserved));
    assert_eq!(node.free_owner(&claim("c"), Millis(1)).len(), 1);
    assert_eq!(node.counts("red", Millis(2)).unwrap().v4.unwrap().quarantined, 1);
}

#[test]
fn what_is_withheld_in_a_primary_network_was_given_to_a_pod_of_another_one() {
    let mut node = NodeAllocator::new("n1", NodeConfig::default());
    node.set_network(pool("red", 1));
    node.set_network(pool("blue", 2));
    node.set_network(pool("aside", 3).primary(false));
    for network in ["blue", "aside"] {
        node.add_block(block(network, 0)).unwrap();
    }
    let free = |node: &NodeAllocator, network| node.counts(network, Millis(0)).unwrap().v4.unwrap().free;
    let before = (free(&node, "blue"), free(&node, "aside"));
    node.withhold("what sandbox x had", Some(&"red".into()), ip("10.0.0.3"));
    assert_eq!((free(&node, "blue"), free(&node, "aside")), (before.0 - 1, before.1));
    let asked = |network| {
        let mut want = want("eth0", network);
        want.addresses = fixed(&["10.0.0.3"]).addresses;
        ask("b", vec![want])
    };
    let error = node.lease(&asked("blue"), Millis(0)).unwrap_err().to_string();
    assert!(error.contains("is in use by what sandbox x had"), "{error}");
    node.lease(&asked("aside"), Millis(0)).expect("it has routes of its own");
}

#[test]
fn what_is_withheld_is_given_to_nobody_until_it_is_released() {
    let mut node = NodeAllocator::new("n1", NodeConfig::default());
    // Before its Network is known, as at a start; and one of which the Network is not known at all.
    node.withhold("what sandbox x had", Some(&"red".into()), ip("10.0.0.3"));
    node.withhold("what sandbox x had", None, ip("fd00::4"));
    node.withhold("what sandbox y had", Some(&"red".into()), ip("10.0.0.130"));
    node.set_network(pool("red", 1));
    node.add_block(block("red", 0)).unwrap();
    node.add_block(block("red", 8)).unwrap();
    assert_eq!(node.counts("red", Millis(0)).unwrap().v4.unwrap().used, 2);
    let lease = node.lease(&ask("a", vec![want("eth0", "red")]), Millis(0)).unwrap().remove(0);
    assert_eq!(lease.addresses, both(&["10.0.0.5", "fd00::5"]), "3 and 4 are not given out");
    for address in ["10.0.0.3", "fd00::3", "10.0.0.4", "10.0.0.130"] {
        let error = node.lease(&ask("b", vec![fixed(&[address])]), Millis(0)).unwrap_err().to_string();
        assert!(error.contains("is in use by what sandbox"), "{error}");
    }
    assert_eq!(node.remove_network("red"), Err(3), "one lease, and two of what is withheld");
    assert_eq!(node.remove_block("red", &block("red", 0).start()), Removal::Draining { leased: 3 });
    node.add_block(block("red", 0)).unwrap();
    let rests = node.release("what sandbox x had", Millis(1));
    let rests: Vec<String> = rests.iter().map(|c| format!("{} {}", c.network, c.address)).collect();
    assert_eq!(rests, ["red 10.0.0.3", "red 10.0.0.4"], "by the first address of their indexes");
    let counts = node.counts("red", Millis(2)).unwrap().v4.unwrap();
    assert_eq!((counts.used, counts.quarantined), (1, 2));
    assert_eq!(node.release("what sandbox x had", Millis(2)), []);
    node.lease(&ask("b", vec![fixed(&["10.0.0.130"])]), Millis(0)).unwrap_err();
    node.release("what sandbox y had", Millis(2));
    node.lease(&ask("b", vec![fixed(&["10.0.0.130"])]), Millis(0)).unwrap();
}
