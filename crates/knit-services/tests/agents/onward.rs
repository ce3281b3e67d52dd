//! Nodes without pods of a Network answer for its Services all the same: they hand clients over to nodes that
//! have its router, and have none, nor a block, of their own.

use std::net::IpAddr;

use knit_kernel::nft::Kernel;
use knit_nft::{Family, Nftables as _, TableId};
use knit_node::agent::Agent;
use serde_json::json;

use crate::flows::*;
use crate::steering::{A, B, Bed, CLIENT, STOP, with_bed};
use crate::support::*;

/// Whether a node has a Network, or anything of it.
fn has(agent: &Agent, node: &Node, network: &str) -> bool {
    let states = agent.core().networks().states();
    states.iter().any(|state| state.name == network) || node.dir.join("run/netns").join(network).exists()
}

#[test]
fn a_node_without_pods_of_a_network_hands_clients_over_and_has_no_router() {
    with_bed(|Bed { objects, nodes: [a, b], client, other }| async move {
        let lb = [ip("203.0.113.50"), ip("2001:db8:50::50")];
        let external = [ip("203.0.113.60"), ip("2001:db8:50::60")];
        write_network(&objects, "blue", &json!({"externalIPs": "Allow"}));
        let ports = |tcp, udp| [("tcp", "TCP", 80, tcp), ("udp", "UDP", 81, udp)];
        let service = |name, tcp, udp| ServiceSpec::new("sky", name).ports(&ports(tcp, udp)).kind("NodePort");
        service("web", 30080, 30081).ip(20).write(&objects);
        service("out", 30082, 30083).external(&external).ip(21).write(&objects);
        let sources = ["192.168.7.99/32", "fd07::99/128"];
        let lb_service = service("lb", 30084, 30085).kind("LoadBalancer").load_balancer(&lb, &sources);
        lb_service.ip(22).write(&objects);
        let near = service("near", 30086, 30087).kind("LoadBalancer").local().health_check(32001);
        near.ip(23).write(&objects);
        service("nobody", 30088, 30089).ip(24).write(&objects);
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let ((sky, _), (plain, _)) = tokio::join!(a.pod("sky-a", "sky"), b.pod("plain", "shop"));
        // Another tenant, with a router on both nodes.
        let (forest, _) = b.pod("forest-b", "forest").await;
        serve_tcp(&sky.space, 9080, sky.name);
        serve_udp(&sky.space, 9081, sky.name);
        let slice = [("tcp", "TCP", 9080), ("udp", "UDP", 9081)];
        for name in ["web", "out", "lb", "near"] {
            slices(&objects, ("sky", name), &slice, &[(&sky, "a")]);
        }
        let kinds = |tcp: u16| [(Tcp, tcp), (Udp, tcp + 1)];

        // Node ports, from everywhere.
        for (from, who) in [(&client, "client"), (&a.space, "a"), (&b.space, "b"), (&plain.space, "plain")] {
            for (kind, port) in kinds(30080) {
                for node in B {
                    wait(&format!("{who} to {node} {port}"), || {
                        names_at(from, kind, (ip(node), port), &["sky-a"])
                    })
                    .await;
                }
            }
        }
        for node in B {
            // Policy Cluster hides the client: the endpoint sees its own Network's router.
            let (_, seen) = ask_once(&client, Tcp, (ip(node), 30080)).expect("an answer");
            let seen = seen.to_string();
            assert!(seen.starts_with("10.77.") || seen.starts_with("fd77:"), "{seen}");
            // Nobody behind it: that is said at once.
            assert_eq!(ask_once(&client, Tcp, (ip(node), 30088)), Err(No::Refused), "{node}");
            assert_eq!(ask_once(&b.space, Tcp, (ip(node), 30088)), Err(No::Refused), "{node}");
        }
        // Addresses of load balancers and external ones.
        for family in 0..2 {
            via(&client, lb[family], ip(B[family]));
            via(&other, lb[family], ip(B[family]));
            via(&client, external[family], ip(B[family]));
            for (kind, port) in kinds(80) {
                let at = (lb[family], port);
                wait("the load balancer's address", || names_at(&client, kind, at, &["sky-a"])).await;
                assert_eq!(ask(&other, kind, at), Err(No::Silence), "who may not");
                let at = (external[family], port);
                wait("the external address", || names_at(&client, kind, at, &["sky-a"])).await;
            }
        }
        // Policy Local: silence, but rule 34: not for the node itself and its pods.
        for (kind, port) in kinds(30086) {
            for node in B {
                let at = (ip(node), port);
                wait("from the node", || names_at(&b.space, kind, at, &["sky-a"])).await;
                wait("from a pod", || names_at(&plain.space, kind, at, &["sky-a"])).await;
                assert_eq!(ask(&client, kind, at), Err(No::Silence), "{node} {port}");
            }
        }
        for (node, code, count) in [(A, 200, 1), (B, 503, 0)] {
            for address in node {
                wait(&format!("health check on {address}"), || {
                    let text = http(&client, (ip(address), 32001), "/");
                    let good = text.starts_with(&format!("HTTP/1.1 {code}"))
                        && text.contains(&format!("\"localEndpoints\":{count}"));
                    if good { Ok(()) } else { Err(text) }
                })
                .await;
            }
        }
        // For another tenant nothing of this leads anywhere.
        for node in A.iter().chain(&B) {
            for port in [30080, 30082, 30084, 30086] {
                assert!(ask(&forest.space, Tcp, (ip(node), port)).is_err(), "forest reached {node} {port}");
            }
        }
        for address in lb.iter().chain(&external) {
            assert!(ask(&forest.space, Tcp, (*address, 80)).is_err(), "forest reached {address}");
        }
        assert!(!has(&agent_b, &b, "blue"), "{:?}", agent_b.core().networks().states());
        assert!(has(&agent_b, &b, "green"));

        // The agent goes: what leads there stays.
        let mut open = connect(&client, (B[0], 30080), SOON).expect("a connection").0;
        agent_b.stop(STOP).await;
        let answer = ask_once(&client, Tcp, (ip(B[0]), 30080)).expect("the agent is away");
        assert_eq!(answer.0, "sky-a");
        let agent_b = b.start().await;
        echo(&mut open).expect("the agent is back");
        wait("the agent is back", || names_at(&client, Tcp, (ip(B[0]), 30080), &["sky-a"])).await;

        // A pod comes to b, and with it a router, which leads to both; flows that were handed over go on.
        let flow = flow(&client, (ip(B[0]), 30081));
        wait("a flow", || match flow.say() {
            Ok(name) if name == "sky-a" => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
        let (second, _) = b.pod("sky-b", "sky").await;
        serve_tcp(&second.space, 9080, second.name);
        serve_udp(&second.space, 9081, second.name);
        slices(&objects, ("sky", "web"), &slice, &[(&sky, "a"), (&second, "b")]);
        slices(&objects, ("sky", "near"), &slice, &[(&sky, "a"), (&second, "b")]);
        wait("both", || names_at(&client, Tcp, (ip(B[0]), 30080), &["sky-a", "sky-b"])).await;
        assert!(has(&agent_b, &b, "blue"));
        wait("health check on b", || {
            let text = http(&client, (ip(B[0]), 32001), "/");
            if text.contains("\"localEndpoints\":1") { Ok(()) } else { Err(text) }
        })
        .await;
        wait("the policy Local", || names_at(&client, Tcp, (ip(B[0]), 30086), &["sky-b"])).await;
        let seen = ask_once(&client, Tcp, (ip(B[0]), 30086));
        assert_eq!(seen, Ok(("sky-b".to_owned(), ip(CLIENT[0]))), "with the client's own address");
        assert!(flow.say().is_ok(), "the flow goes on");
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn two_nodes_that_take_each_other_for_one_with_a_router_do_not_play_with_connections() {
    with_bed(|Bed { objects, nodes: [a, b], client, .. }| async move {
        let ports = [("tcp", "TCP", 80, 30080), ("udp", "UDP", 81, 30081)];
        ServiceSpec::new("sky", "web").ports(&ports).kind("NodePort").ip(20).write(&objects);
        // Whoever may write EndpointSlices says that endpoints are there.
        let nowhere: [Vec<IpAddr>; 2] = [["10.77.0.18", "fd77::12"], ["10.77.0.34", "fd77::22"]]
            .map(|addresses| addresses.map(ip).to_vec());
        let forged = [(&nowhere[0], "a"), (&nowhere[1], "b")];
        slices_of(&objects, ("sky", "web"), &[("tcp", "TCP", 9080), ("udp", "UDP", 9081)], &forged);
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let steer = TableId::new(Family::Inet, "knit-steer");
        for (node, to) in [(&a, B), (&b, A)] {
            wait("each leads to the other", || {
                let table =
                    Kernel::open_in(&node.space).and_then(|mut nft| nft.table(&steer)).expect("nftables");
                let rules = table.map_or_else(String::new, |table| table.to_string());
                let leads = |to: &&str| rules.contains(&format!(": {to} . 30080"));
                if to.iter().all(leads) { Ok(()) } else { Err(rules) }
            })
            .await;
        }
        // The second node says so at once: the packet goes there once, and comes back.
        for node in A.iter().chain(&B) {
            assert_eq!(ask_once(&client, Tcp, (ip(node), 30080)), Err(No::Refused), "{node}");
            // The kernel limits how often it says so of datagrams.
            wait(node, || match ask(&client, Udp, (ip(node), 30081)) {
                Err(No::Refused) => Ok(()),
                other => Err(format!("{other:?}")),
            })
            .await;
        }
        for (agent, node) in [(&agent_a, &a), (&agent_b, &b)] {
            assert!(!has(agent, node, "blue"));
        }
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}
