//! Pods of two nodes on several Networks, two of which have the same addresses.

use crate::support::{Cluster, NEVER, Pod, SOON, addresses, e2e};

use knit_kernel::testing::eventually;
use std::net::IpAddr;

/// The first packets between two nodes may come before the other node's part is there.
#[track_caller]
fn reaches(client: &Pod, server: &Pod, to: &[IpAddr]) {
    for to in to {
        let what = format!("{} reaches {} at {to}", client.sandbox, server.sandbox);
        eventually(&what, SOON, || client.talks(&server.space, *to, NEVER));
    }
}

#[test]
fn overlapping_networks_over_two_nodes() {
    e2e(|| {
        let cluster = Cluster::started();
        let (a, b) = (&cluster.a, &cluster.b);
        let (blue_a, blue_a_result) = a.add("blue-a", "blue");
        let (blue_b, blue_b_result) = b.add("blue-b", "blue");
        let (green_a, green_a_result) = a.add("green-a", "green");
        let (green_b, green_b_result) = b.add("green-b", "green");

        // Everybody has the default Network, between nodes and on one, both families.
        let of = |result| addresses(result, "eth0");
        assert_eq!(of(&blue_a_result).len(), 2, "{blue_a_result}");
        reaches(&blue_a, &blue_b, &of(&blue_b_result));
        reaches(&blue_b, &green_a, &of(&green_a_result));
        reaches(&green_a, &blue_a, &of(&blue_a_result));
        reaches(&green_b, &green_a, &of(&green_a_result));

        // Blue and green have the same addresses, on other nodes.
        let of = |result| addresses(result, "net1");
        assert_eq!(of(&blue_a_result), of(&green_b_result));
        assert_eq!(of(&blue_b_result), of(&green_a_result));
        reaches(&blue_a, &blue_b, &of(&blue_b_result));
        reaches(&blue_b, &blue_a, &of(&blue_a_result));
        reaches(&green_a, &green_b, &of(&green_b_result));
        reaches(&green_b, &green_a, &of(&green_a_result));

        // Who listens in green does not hear blue.
        for to in of(&green_a_result) {
            assert!(!blue_a.talks(&green_a.space, to, NEVER), "blue-a reached green-a at {to}");
        }
        for to in of(&blue_a_result) {
            assert!(!green_a.talks(&blue_a.space, to, NEVER), "green-a reached blue-a at {to}");
        }
        for (node, pods) in [(a, ["blue-a", "green-a"]), (b, ["blue-b", "green-b"])] {
            node.audit(&pods.map(|pod| (pod, 2)).into());
        }
        for (node, pod) in [(a, &blue_a), (b, &blue_b), (a, &green_a), (b, &green_b)] {
            node.del(pod);
        }
        a.audit(&[].into());
        b.audit(&[].into());
    });
}
