//! The agent in a container: a mount namespace of its own, which ends with it.

use std::process::Command;

use knit_kernel::Handle;
use knit_kernel::netns::NetNs;
use knit_kernel::testing::{eventually, skip};
use serde_json::{Value, json};

use crate::support::{Cluster, NEVER, PODS, SOON, addresses, e2e, name};

/// Whether there is a program that starts another one in a mount namespace of its own.
fn has_unshare() -> bool {
    let there = Command::new("unshare").arg("--version").output().is_ok_and(|output| output.status.success());
    if !there {
        skip("`unshare` is not installed: nothing starts the agent in a mount namespace of its own");
    }
    there
}

/// Two nodes that are up, the agent of the first in a container with this mount propagation of the host's
/// directories.
fn cluster(propagation: &'static str) -> Cluster {
    let mut cluster = Cluster::new();
    NetNs::share_directory(PODS).expect("a shared directory");
    NetNs::share_directory(&cluster.a.run).expect("a shared directory");
    cluster.a.container = Some(propagation);
    cluster.a.start();
    cluster.b.start();
    cluster
}

#[test]
fn routers_outlive_the_agents_container() {
    if !has_unshare() {
        return;
    }
    e2e(|| {
        // Mounted into the container with Bidirectional propagation.
        let mut cluster = cluster("unchanged");
        let (near, near_result) = cluster.a.add("near", "blue");
        let (far, far_result) = cluster.b.add("far", "blue");
        let (routed, _) = cluster.a.add("routed", "green");
        let (there, there_result) = cluster.b.add("there", "green");
        let mut ways = Vec::new();
        for (client, server, result) in [(&near, &far, &far_result), (&routed, &there, &there_result)] {
            for interface in ["eth0", "net1"] {
                ways.extend(addresses(result, interface).into_iter().map(|to| (client, server, to)));
            }
        }
        let all = |what: &str| {
            for (client, server, to) in &ways {
                eventually(&format!("{what}: {to}"), SOON, || client.talks(&server.space, *to, NEVER));
            }
        };
        all("before");
        let routers = |cluster: &Cluster| NetNs::list(cluster.a.run.join("netns")).expect("routers");
        let before = routers(&cluster);
        assert_eq!(before.len(), 2, "the host sees the routers that the container made: {before:?}");

        cluster.a.kill();
        // Not only at some time: nothing of it may be missing for a moment, and nobody is there to repair it.
        for (client, server, to) in &ways {
            assert!(client.talks(&server.space, *to, SOON), "without the container: {to}");
        }
        cluster.a.start();
        all("after");
        assert_eq!(routers(&cluster), before, "the very same routers");
        cluster.a.audit(&[("near", 2), ("routed", 2)].into());
        // The new agent looks into pods that the one before made.
        let check = |result: &Value| {
            let more = json!({"prevResult": result});
            cluster.a.cni_as("CHECK", &near, &near.sandbox, "blue", &more)
        };
        let whole = check(&near_result);
        assert!(whole.ok, "{}", whole.json);
        let inside = Handle::open(&near.space).expect("a handle");
        let net1 = inside.index_of(&name("net1")).expect("net1");
        let lost = inside.addresses(Some(net1)).expect("addresses").into_iter().next().expect("an address");
        inside.remove(lost).expect("removed");
        let damaged = check(&near_result);
        assert!(!damaged.ok && damaged.json["msg"].to_string().contains("it has lost"), "{}", damaged.json);
        inside.ensure(lost).expect("put back");

        let (later, _) = cluster.a.add("later", "blue");
        let to = addresses(&far_result, "net1")[0];
        eventually("a later pod is in the same Network", SOON, || later.talks(&far.space, to, NEVER));
        for pod in [&near, &routed, &later] {
            cluster.a.del(pod);
        }
        cluster.a.audit(&[].into());
    });
}

#[test]
fn routers_that_went_with_the_container_are_made_again_with_their_pods() {
    if !has_unshare() {
        return;
    }
    e2e(|| {
        // Somebody wrote HostToContainer: it sees the pods' namespaces, but what it mounts itself is its own,
        // and ends with it.
        let mut cluster = cluster("slave");
        let (near, near_result) = cluster.a.add("near", "blue");
        let (far, far_result) = cluster.b.add("far", "blue");
        let (routed, routed_result) = cluster.a.add("routed", "green");
        let (there, there_result) = cluster.b.add("there", "green");
        let default = addresses(&far_result, "eth0")[0];
        eventually("the default Network", SOON, || near.talks(&far.space, default, NEVER));

        cluster.a.kill();
        assert!(near.talks(&far.space, default, SOON), "the default Network has no router");
        cluster.a.start();
        // With the same addresses, both ways.
        for (client, server, result) in [
            (&near, &far, &far_result),
            (&far, &near, &near_result),
            (&routed, &there, &there_result),
            (&there, &routed, &routed_result),
        ] {
            for to in addresses(result, "net1") {
                let what = format!("{} reaches {} again at {to}", client.sandbox, server.sandbox);
                eventually(&what, SOON, || client.talks(&server.space, to, NEVER));
            }
        }
        cluster.a.del(&near);
        cluster.a.del(&routed);
    });
}
