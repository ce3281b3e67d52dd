//! Networks on links of the nodes: what is refused, and what their conditions say.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use knit_api::{Topology, Underlay, UnderlayParent};

use super::World;

impl World {
    /// A Network on links of the nodes.
    fn underlay(&mut self, name: &str, cidr: &str, reserved: &[&str], primary_for: Option<&str>) {
        self.network(name, &[cidr], primary_for);
        let network = Arc::make_mut(self.cluster.networks.get_mut(name).expect("a Network"));
        network.edit(|network| {
            network.spec.topology = Topology::Underlay;
            network.spec.subnets[0].reserved = reserved.iter().map(|range| (*range).to_owned()).collect();
            let parent = UnderlayParent { name: "eth1".into(), node_selector: None };
            network.spec.underlay = Some(Underlay { parents: vec![parent], ..Underlay::default() });
        });
    }
}

#[test]
fn a_network_on_the_nodes_segment_must_not_give_their_addresses_away() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &[]);
    world.node("n2", "192.0.2.40", &[]);
    world.underlay("open", "192.0.2.0/24", &[], None);
    world.underlay("half", "192.0.2.0/24", &["192.0.2.0/28"], None);
    world.underlay("closed", "192.0.2.0/24", &["192.0.2.0/28", "192.0.2.40/32"], None);
    world.settle();
    // The first address of the subnet is never given out.
    for name in ["open", "half"] {
        let (reason, message) = world.accepted(name);
        assert_eq!(reason, "SubnetOverlap", "{name}: {message}");
        assert!(message.contains("192.0.2.40, the address of node n2"), "{message}");
        assert!(message.contains("reserved"), "{message}");
    }
    assert_eq!(world.accepted("closed").0, "Accepted", "{:?}", world.accepted("closed"));
}

#[test]
fn what_an_underlay_network_lacks_is_in_its_conditions() {
    let mut world = World::new();
    world.node("n1", "192.0.2.1", &[]);
    world.namespace("a", "blue");
    world.underlay("lan", "10.20.0.0/24", &[], None);
    world.underlay("primary", "10.21.0.0/24", &[], Some("blue"));
    world.underlay("nowhere", "10.22.0.0/24", &[], None);
    let nowhere = Arc::make_mut(world.cluster.networks.get_mut("nowhere").expect("a Network"));
    nowhere.edit(|network| network.spec.underlay = None);
    world.network("blue", &["10.77.0.0/16"], None);
    world.settle();
    let conditions = |name: &str| -> Vec<String> {
        let status = world.cluster.networks[name].status().expect("a status");
        let text = |c: &Condition| format!("{}={} {}", c.type_, c.status, c.reason);
        status.conditions.iter().map(text).collect()
    };
    assert_eq!(conditions("blue"), ["Accepted=True Accepted", "Ready=True Ready"]);
    assert_eq!(
        conditions("lan"),
        [
            "Accepted=True Accepted",
            "Ready=True Ready",
            "ServicesServed=False NoRouter",
            "NetworkPolicyEnforced=False NoRouter"
        ]
    );
    for (name, words) in [("primary", "cannot be a primary Network"), ("nowhere", "spec.underlay.parents")] {
        let (reason, message) = world.accepted(name);
        assert_eq!(reason, "Invalid", "{message}");
        assert!(message.contains(words), "{message}");
    }
    // A node that asks gets a block of it, and nothing of that is a router's.
    world.asks("n1", "lan");
    world.settle();
    assert_eq!(world.blocks_of("lan", "n1").len(), 1);
}
