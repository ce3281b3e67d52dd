//! Nobody takes an address that is not his, nor what others send: Services with external IPs and load
//! balancers.

use std::net::IpAddr;

use knit_kernel::addr::Address;
use knit_kernel::{Handle, IfName, NetNs, Op};
use serde_json::json;

use crate::flows::*;
use crate::steering::{A, B, Bed, STOP, with_bed};
use crate::support::*;

/// An address of a namespace that no object lists.
fn add_address(space: &NetNs, address: IpAddr) {
    let handle = Handle::open(space).expect("a handle");
    let eth0 = handle.index_of(&IfName::new("eth0").expect("a name")).expect("eth0");
    handle.apply(&[Op::create(Address::new(eth0, address.into()))]).expect("an address");
}

/// Somebody else than these answers, or nobody.
fn not(from: &NetNs, kind: Kind, to: (IpAddr, u16), forbidden: &str, what: &str) {
    if let Ok((name, _)) = ask(from, kind, to) {
        assert_ne!(name, forbidden, "{what}: {to:?}");
    }
}

#[test]
fn nobody_takes_a_nodes_address_or_anothers_outside() {
    with_bed(|Bed { objects, nodes: [a, b], client, .. }| async move {
        // The worst that a Network can allow, and a default Network that has no subnets.
        write_network(&objects, "blue", &json!({"externalIPs": "Allow", "nodeAddresses": "Allow"}));
        without_subnets(&objects);
        let public = [ip("198.51.100.7"), ip("2001:db8:7::7")];
        write_node(&objects, "b", &B, &["198.51.100.7", "2001:db8:7::7"]);
        let unlisted = [ip("198.51.100.9"), ip("2001:db8:9::9")];
        unlisted.iter().for_each(|address| add_address(&b.space, *address));
        serve_tcp(&b.space, 22, "sshd");
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let ((sky, _), (plain, _)) = tokio::join!(a.pod("sky-a", "sky"), a.pod("plain", "shop"));
        let ((f1, _), (f2, _)) = tokio::join!(a.pod("forest-a", "forest"), b.pod("forest-b", "forest"));
        for (pod, port) in [(&sky, 9080), (&plain, 22), (&f2, 9080)] {
            serve_tcp(&pod.space, port, pod.name);
        }
        serve_udp(&sky.space, 9081, sky.name);

        let outside = [ip("203.0.113.60"), ip("2001:db8:50::60")];
        let nodes = A.iter().chain(&B).map(|address| ip(address));
        let all: Vec<IpAddr> = nodes
            .chain(public)
            .chain(unlisted)
            .chain(plain.addresses.iter().copied())
            .chain(outside)
            .collect();
        let ports = [("ssh", "TCP", 22, 0), ("vx", "UDP", 4789, 0)];
        ServiceSpec::new("sky", "evil").ports(&ports).external(&all).ip(60).write(&objects);
        slices(&objects, ("sky", "evil"), &[("ssh", "TCP", 9080), ("vx", "UDP", 9081)], &[(&sky, "a")]);
        // One of the default Network, which every pod of that one may use.
        let ours = [ip("203.0.113.70"), ip("2001:db8:50::70")];
        let nodes = A.iter().chain(&B).map(|address| ip(address));
        let grabbed: Vec<IpAddr> = nodes
            .clone()
            .chain(public)
            .chain(unlisted)
            .chain(sky.addresses.iter().copied())
            .chain(ours)
            .collect();
        // A load balancer's address may be a node's there.
        let nodes: Vec<IpAddr> = nodes.collect();
        let lb = ServiceSpec::new("shop", "lb").ports(&[("tcp", "TCP", 8443, 30443)]).kind("LoadBalancer");
        let given = [ip("203.0.113.90"), ip("2001:db8:50::90")];
        let balanced: Vec<IpAddr> = nodes.into_iter().chain(given).collect();
        lb.load_balancer(&balanced, &[]).ip(62).write(&objects);
        slices(&objects, ("shop", "lb"), &[("tcp", "TCP", 22)], &[(&plain, "a")]);
        ServiceSpec::new("shop", "out")
            .ports(&[("ssh", "TCP", 22, 0)])
            .external(&grabbed)
            .ip(61)
            .write(&objects);
        slices(&objects, ("shop", "out"), &[("ssh", "TCP", 22)], &[(&plain, "a")]);

        for family in [0, 1] {
            // What it may have it has, by either node: then it has been decided about all of it.
            for node in [A, B] {
                via(&client, outside[family], ip(node[family]));
                wait("the address that is nobody's", || {
                    names_at(&client, Tcp, (outside[family], 22), &["sky-a"])
                })
                .await;
                unroute(&client, outside[family], ip(node[family]));
            }
            wait("the default Network's", || names_at(&plain.space, Tcp, (ours[family], 22), &["plain"]))
                .await;

            wait("a load balancer's", || names_at(&client, Tcp, (ip(A[family]), 8443), &["plain"])).await;
            wait("its own", || names_at(&plain.space, Tcp, (given[family], 8443), &["plain"])).await;
            not(&plain.space, Tcp, (ip(B[family]), 22), "plain", "a node's address, from a pod");
            not(&a.space, Tcp, (sky.addresses[family], 22), "plain", "a tenant's pod, from the kubelet");

            let ssh = |address| ask_once(&client, Tcp, (address, 22)).map(|(name, _)| name);
            assert_eq!(ssh(ip(B[family])), Ok("sshd".to_owned()));
            assert_eq!(ssh(ip(A[family])), Err(No::Refused), "nobody listens there");
            via(&client, unlisted[family], ip(B[family]));
            assert_eq!(ssh(unlisted[family]), Ok("sshd".to_owned()));
            via(&client, plain.addresses[family], ip(A[family]));
            assert_eq!(ssh(plain.addresses[family]), Ok("plain".to_owned()));
            via(&client, public[family], ip(A[family]));
            not(&client, Tcp, (public[family], 22), "sky-a", "a node's ExternalIP");
            for (from, who) in [
                (&f1.space, "another tenant"),
                (&f2.space, "another tenant elsewhere"),
                (&plain.space, "the default Network"),
                (&a.space, "the node"),
            ] {
                not(from, Tcp, (outside[family], 22), "sky-a", who);
            }
            for forest in [&f1, &f2] {
                not(&forest.space, Tcp, (ours[family], 22), "plain", "a tenant's way out");
                let balanced = (given[family], 8443);
                not(&forest.space, Tcp, balanced, "plain", "a tenant's way out, a load balancer's");
            }
            // Pods of its own Network reach it without the node.
            wait("from inside", || names_at(&sky.space, Tcp, (outside[family], 22), &["sky-a"])).await;
            // The tunnel is as it was.
            let (name, _) = ask_once(&f1.space, Tcp, (f2.addresses[family], 9080)).expect("an answer");
            assert_eq!(name, "forest-b");
        }
        wait("an event says why", || told(&a, "AddressRefused").or_else(|_| told(&b, "AddressRefused")))
            .await;
        wait("the node that has it says so", || told(&b, "though its Node does not list it")).await;
        wait("and whose the tunnels' port is", || {
            let port = "give the Service another port";
            told(&a, port).or_else(|_| told(&b, port))
        })
        .await;
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn an_address_that_comes_to_a_node_is_an_external_ip_there_only_where_the_default_network_allows_it() {
    with_bed(|Bed { objects, nodes: [a, _], client, .. }| async move {
        let moving = [ip("203.0.113.80"), ip("2001:db8:50::80")];
        ServiceSpec::new("shop", "vip")
            .ports(&[("tcp", "TCP", 80, 0)])
            .external(&moving)
            .ip(63)
            .write(&objects);
        let agent = a.start().await;
        let (plain, _) = a.pod("plain", "shop").await;
        serve_tcp(&plain.space, 9080, plain.name);
        slices(&objects, ("shop", "vip"), &[("tcp", "TCP", 9080)], &[(&plain, "a")]);
        for family in [0, 1] {
            via(&client, moving[family], ip(A[family]));
            wait("nobody else's", || names_at(&client, Tcp, (moving[family], 80), &["plain"])).await;
            // From now on it is the node's own, as soon as the kernel has seen that nobody else has it
            // (IPv6), and what is sent there is for the node. No agent has to notice.
            add_address(&a.space, moving[family]);
            wait("it is the node's", || match ask(&client, Tcp, (moving[family], 80)) {
                Err(No::Refused) => Ok(()),
                other => Err(format!("{other:?}")),
            })
            .await;
            for from in [&client, &plain.space, &a.space] {
                assert_eq!(
                    ask_once(from, Tcp, (moving[family], 80)),
                    Err(No::Refused),
                    "nobody listens there"
                );
            }
        }
        wait("an event says what to do", || told(&a, "nodeAddresses: Allow")).await;
        write_network(&objects, "default", &json!({"nodeAddresses": "Allow"}));
        for address in moving {
            wait("allowed", || names_at(&client, Tcp, (address, 80), &["plain"])).await;
        }
        agent.stop(STOP).await;
    });
}

#[test]
fn external_ips_are_off_until_the_network_allows_them() {
    with_bed(|Bed { objects, nodes: [a, b], client, .. }| async move {
        let outside = [ip("203.0.113.60"), ip("2001:db8:50::60")];
        let service = ServiceSpec::new("forest", "out").ports(&[("tcp", "TCP", 80, 30080)]).kind("NodePort");
        service.external(&outside).ip(31).write(&objects);
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let (forest, _) = a.pod("forest-a", "forest").await;
        serve_tcp(&forest.space, 9080, forest.name);
        slices(&objects, ("forest", "out"), &[("tcp", "TCP", 9080)], &[(&forest, "a")]);
        for family in [0, 1] {
            via(&client, outside[family], ip(A[family]));
            // The node port shows that the Service is in force.
            wait("its node port", || names_at(&client, Tcp, (ip(A[family]), 30080), &["forest-a"])).await;
            not(&client, Tcp, (outside[family], 80), "forest-a", "not allowed");
            not(&forest.space, Tcp, (outside[family], 80), "forest-a", "not allowed, inside");
        }
        let reason = "ExternalIPsDenied";
        wait("an event says why", || told(&a, reason).or_else(|_| told(&b, reason))).await;
        write_network(&objects, "green", &json!({"externalIPs": "Allow"}));
        for address in outside {
            wait("allowed", || names_at(&client, Tcp, (address, 80), &["forest-a"])).await;
        }
        write_network(&objects, "green", &json!({}));
        for address in outside {
            wait("not allowed any more", || match ask(&client, Tcp, (address, 80)) {
                Err(_) => Ok(()),
                Ok(name) => Err(format!("{name:?}")),
            })
            .await;
        }
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn a_load_balancer_has_a_nodes_address_only_where_the_network_allows_it() {
    with_bed(|Bed { objects, nodes: [a, b], client, .. }| async move {
        let nodes: Vec<IpAddr> = A.iter().chain(&B).map(|address| ip(address)).collect();
        let service = ServiceSpec::new("sky", "lb").ports(&[("tcp", "TCP", 8443, 30443)]);
        let service = service.kind("LoadBalancer").load_balancer(&nodes, &["192.168.7.0/24", "fd07::/64"]);
        service.ip(30).write(&objects);
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let ((sky, _), (plain, _)) = tokio::join!(a.pod("sky-a", "sky"), a.pod("plain", "shop"));
        serve_tcp(&sky.space, 9080, sky.name);
        slices(&objects, ("sky", "lb"), &[("tcp", "TCP", 9080)], &[(&sky, "a")]);
        for node in [A, B] {
            for family in [0, 1] {
                let at = |port| (ip(node[family]), port);
                wait("its node port", || names_at(&client, Tcp, at(30443), &["sky-a"])).await;
                assert_eq!(ask_once(&client, Tcp, at(8443)), Err(No::Refused), "not allowed");
            }
        }
        wait("an event says why", || told(&a, "nodeAddresses").or_else(|_| told(&b, "nodeAddresses"))).await;
        write_network(&objects, "blue", &json!({"nodeAddresses": "Allow"}));
        for node in [A, B] {
            for family in [0, 1] {
                let at = (ip(node[family]), 8443);
                wait("the client", || names_at(&client, Tcp, at, &["sky-a"])).await;
                wait("the node", || names_at(&a.space, Tcp, at, &["sky-a"])).await;
                // Its source ranges hold: a pod's address is not among them.
                assert_eq!(ask(&plain.space, Tcp, at), Err(No::Silence), "who may not");
            }
        }
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn a_load_balancer_on_a_nodes_address_comes_before_the_host_port_of_its_own_pod() {
    with_bed(|Bed { objects, nodes: [a, _], client, .. }| async move {
        // As k3s' ServiceLB does it: a pod of the default Network has the Service's port on the node, which
        // is the load balancer's address. The Service has the traffic policy Cluster.
        let nodes: Vec<IpAddr> = A.iter().map(|address| ip(address)).collect();
        let service = ServiceSpec::new("sky", "lb").ports(&[("tcp", "TCP", 8443, 30443)]);
        service.kind("LoadBalancer").load_balancer(&nodes, &[]).ip(30).write(&objects);
        let agent = a.start().await;
        let (svclb, _) = a.pod_with_port("svclb", "shop", Some((8443, 9080))).await;
        let (sky, _) = a.pod("sky-a", "sky").await;
        [&svclb, &sky].iter().for_each(|pod| serve_tcp(&pod.space, 9080, pod.name));
        slices(&objects, ("sky", "lb"), &[("tcp", "TCP", 9080)], &[(&sky, "a")]);
        for address in &nodes {
            wait("its node port", || names_at(&client, Tcp, (*address, 30443), &["sky-a"])).await;
            names_at(&client, Tcp, (*address, 8443), &["svclb"]).expect("the host port has it");
        }
        write_network(&objects, "blue", &json!({"nodeAddresses": "Allow"}));
        for address in &nodes {
            for (from, who) in [(&client, "outside"), (&a.space, "the node")] {
                wait(who, || names_at(from, Tcp, (*address, 8443), &["sky-a"])).await;
            }
        }
        agent.stop(STOP).await;
    });
}
