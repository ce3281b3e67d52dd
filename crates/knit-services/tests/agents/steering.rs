//! Clients outside reach the Services of Networks by the node, both families, TCP and UDP; and nobody gets in
//! elsewhere.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::flows::*;
use crate::support::*;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::in_namespaces;
use serde_json::json;

pub const STOP: Duration = Duration::from_secs(5);
pub const A: [&str; 2] = ["192.168.7.1", "fd07::1"];
pub const B: [&str; 2] = ["192.168.7.2", "fd07::2"];
pub const CLIENT: [&str; 2] = ["192.168.7.99", "fd07::99"];

/// Two nodes with agents, a pod of each Network on each node, and a client outside.
pub struct Bed {
    pub objects: PathBuf,
    pub nodes: [Node; 2],
    pub client: knit_kernel::NetNs,
    /// Another one.
    pub other: knit_kernel::NetNs,
}

pub fn with_bed<F: Future<Output = ()>>(scenario: impl FnOnce(Bed) -> F + Send) {
    in_namespaces(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let dir = PathBuf::from("/run/test");
        let (wire, nodes) = nodes(&dir);
        let (client, other) = (plug(&wire, "client", 99), plug(&wire, "other", 98));
        for node in &nodes {
            CLIENT.iter().for_each(|gateway| default_route(&node.space, ip(gateway)));
        }
        let objects = dir.join("objects");
        write_objects(&objects);
        runtime.expect("a runtime").block_on(scenario(Bed { objects, nodes, client, other }));
    });
}

#[test]
fn node_ports_lead_into_routers() {
    with_bed(|Bed { objects, nodes: [a, b], client, .. }| async move {
        let web = |space, tcp, udp| {
            let ports = [("tcp", "TCP", 80, tcp), ("udp", "UDP", 81, udp)];
            ServiceSpec::new(space, "web").ports(&ports).kind("NodePort")
        };
        web("sky", 30080, 30081).ip(20).write(&objects);
        web("forest", 30090, 30091).ip(21).write(&objects);
        let near = |space, port| {
            ServiceSpec::new(space, "near").ports(&[("tcp", "TCP", 80, port)]).kind("NodePort").local()
        };
        near("sky", 30082).ip(22).write(&objects);
        near("forest", 30092).ip(23).write(&objects);
        let nobody = ServiceSpec::new("sky", "nobody").ports(&[("tcp", "TCP", 80, 30099)]).kind("NodePort");
        nobody.ip(24).write(&objects);
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let (plain, _) = a.pod("plain", "shop").await;
        let mut tenants = Vec::new();
        for (space, names, tcp, udp, near) in [
            ("sky", ["sky-a", "sky-b"], 30080, 30081, 30082),
            ("forest", ["forest-a", "forest-b"], 30090, 30091, 30092),
        ] {
            let ((one, _), (two, _)) = tokio::join!(a.pod(names[0], space), b.pod(names[1], space));
            for pod in [&one, &two] {
                serve_tcp(&pod.space, 9080, pod.name);
                serve_udp(&pod.space, 9081, pod.name);
            }
            let ports = [("tcp", "TCP", 9080), ("udp", "UDP", 9081)];
            slices(&objects, (space, "web"), &ports, &[(&one, "a"), (&two, "b")]);
            slices(&objects, (space, "near"), &ports[..1], &[(&one, "a")]);
            tenants.push((one, two, tcp, udp, near));
        }
        // The tenants have the same addresses, each on the other node.
        assert_eq!(tenants[0].0.addresses, tenants[1].1.addresses);

        for (one, two, tcp, udp, near) in &tenants {
            let both = [one.name, two.name];
            let clients = [(&client, "client"), (&a.space, "a"), (&b.space, "b"), (&plain.space, "plain")];
            for (from, who) in clients {
                for node in A.iter().chain(&B) {
                    let at = |port| (ip(node), port);
                    wait(&format!("{who} to {node} {tcp}"), || names_at(from, Tcp, at(*tcp), &both)).await;
                    wait(&format!("{who} to {node} {udp}"), || names_at(from, Udp, at(*udp), &both)).await;
                }
            }
            // Policy Cluster hides the client: the endpoint sees its own Network's router.
            for node in [A[0], A[1], B[0], B[1]] {
                let (_, seen) = ask_once(&client, Tcp, (ip(node), *tcp)).expect("an answer");
                assert!(
                    seen.to_string().starts_with("10.77.") || seen.to_string().starts_with("fd77:"),
                    "{seen}"
                );
            }
            // A pod reaches its own Services by its node too, itself included.
            for node in A {
                wait(&format!("{} to itself", one.name), || {
                    names_at(&one.space, Tcp, (ip(node), *tcp), &both)
                })
                .await;
            }
            // Policy Local: the client's own address, only this node's endpoints, silence where there are
            // none.
            for (node, own) in A.iter().zip(CLIENT) {
                let at = (ip(node), *near);
                wait(&format!("client to {node} {near}"), || names_at(&client, Tcp, at, &[one.name])).await;
                assert_eq!(ask_once(&client, Tcp, at), Ok((one.name.to_owned(), ip(own))));
            }
            for node in B {
                // Before it has heard of the endpoints elsewhere, it refuses.
                wait(&format!("silence of {node} {near}"), || match ask(&client, Tcp, (ip(node), *near)) {
                    Err(No::Silence) => Ok(()),
                    other => Err(format!("{other:?}")),
                })
                .await;
                // Rule 34: the node itself is not bound to its own endpoints.
                let (name, _) = ask_once(&b.space, Tcp, (ip(node), *near)).expect("an answer");
                assert_eq!(name, one.name);
            }
        }
        // Nobody behind it: that is said at once, and other ports of the node are as ever.
        for node in A.iter().chain(&B) {
            assert_eq!(ask_once(&client, Tcp, (ip(node), 30099)), Err(No::Refused), "{node}");
            assert_eq!(ask_once(&client, Tcp, (ip(node), 30100)), Err(No::Refused), "{node}");
        }

        // A flow whose endpoint goes is led to another one, from the same socket.
        let flow = flow(&client, (ip(A[0]), 30081));
        let first = (0..60).find_map(|_| flow.say().ok()).expect("an answer");
        let (left, gone) = if first == "sky-a" { (&tenants[0].1, "a") } else { (&tenants[0].0, "b") };
        let on = if gone == "a" { "b" } else { "a" };
        slices(&objects, ("sky", "web"), &[("tcp", "TCP", 9080), ("udp", "UDP", 9081)], &[(left, on)]);
        wait("the flow goes on", || match flow.say() {
            Ok(name) if name == left.name => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;

        // The agent goes and comes: connections stay, new ones are led there all the while.
        let mut open = connect(&client, (A[0], 30090), SOON).expect("a connection").0;
        agent_a.stop(STOP).await;
        echo(&mut open).expect("the agent is away");
        let who = |_| ask_once(&client, Tcp, (ip(A[0]), 30090)).expect("the agent is away").0;
        let names: BTreeSet<String> = (0..20).map(who).collect();
        assert_eq!(names, ["forest-a", "forest-b"].map(str::to_owned).into(), "the agent is away");
        let agent_a = a.start().await;
        wait("the agent is back", || names_at(&client, Tcp, (ip(A[0]), 30090), &["forest-a", "forest-b"]))
            .await;
        echo(&mut open).expect("the agent is back");
        // Rules of the agent before answer too, so that this one may still be at its first look.
        for network in ["default", "blue", "green"] {
            let line = format!(
                "kubeproxy_sync_full_proxy_rules_duration_seconds_count{{network=\"{network}\",ip_family=\"IPv4\"}}"
            );
            wait(&line, || {
                let text = agent_a.core().metrics_text();
                if text.contains(&line) { Ok(()) } else { Err(text) }
            })
            .await;
        }
        assert_eq!(agent_a.core().metrics_text().matches("# EOF").count(), 1);
        // What is no longer a node port leads nowhere.
        near("sky", 30082).kind("ClusterIP").ports(&[("tcp", "TCP", 80, 0)]).ip(22).write(&objects);
        wait("the port is gone", || match ask(&client, Tcp, (ip(A[0]), 30082)) {
            Err(No::Refused) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn load_balancers_external_addresses_and_nodes_without_pods() {
    with_bed(|Bed { objects, nodes: [a, b], client, other }| async move {
        let ports = [("tcp", "TCP", 80, 0), ("udp", "UDP", 81, 0)];
        let lb = [ip("203.0.113.50"), ip("2001:db8:50::50")];
        let external = [ip("203.0.113.60"), ip("2001:db8:50::60")];
        for network in ["blue", "green"] {
            write_network(&objects, network, &json!({"externalIPs": "Allow"}));
        }
        ServiceSpec::new("sky", "lb")
            .ports(&ports)
            .kind("LoadBalancer")
            .local()
            .health_check(32001)
            .load_balancer(&lb, &["192.168.7.99/32", "fd07::99/128"])
            .ip(30)
            .write(&objects);
        ServiceSpec::new("forest", "out").ports(&ports).external(&external).ip(31).write(&objects);
        // Somebody wants what is not his: a service address, and a pod's.
        let greedy = [ip("10.96.0.40"), ip("10.244.1.5")];
        ServiceSpec::new("sky", "greedy").ports(&ports).external(&greedy).ip(32).write(&objects);
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        // Pods on a only; b leads there all the same.
        let ((sky, _), (forest, _)) = tokio::join!(a.pod("sky-a", "sky"), a.pod("forest-a", "forest"));
        for (pod, space, service) in
            [(&sky, "sky", "lb"), (&forest, "forest", "out"), (&sky, "sky", "greedy")]
        {
            serve_tcp(&pod.space, 9080 + u16::from(service == "greedy") * 10, pod.name);
            serve_udp(&pod.space, 9081 + u16::from(service == "greedy") * 10, pod.name);
            let slice = [("tcp", "TCP", 9080), ("udp", "UDP", 9081)];
            slices(&objects, (space, service), &slice, &[(pod, "a")]);
        }
        for (family, own) in CLIENT.iter().enumerate() {
            via(&client, lb[family], ip(A[family]));
            via(&other, lb[family], ip(A[family]));
            via(&client, external[family], ip(B[family]));
            for (kind, port) in [(Tcp, 80), (Udp, 81)] {
                let at = (lb[family], port);
                wait("the load balancer's address", || names_at(&client, kind, at, &["sky-a"])).await;
                let seen = ask_once(&client, kind, at);
                assert_eq!(seen, Ok(("sky-a".to_owned(), ip(own))), "with its own address");
                assert_eq!(ask(&other, kind, at), Err(No::Silence), "who may not");
                let at = (external[family], port);
                wait("the external address, by b", || names_at(&client, kind, at, &["forest-a"])).await;
                // From inside the Network it is reached without the node.
                wait("from inside", || names_at(&forest.space, kind, at, &["forest-a"])).await;
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
        // What load balancers ask of the node as a whole, as kube-proxy answers it.
        for node in A {
            wait(&format!("healthz of {node}"), || {
                let text = http(&client, (ip(node), knit_services::HEALTHZ.port()), "/healthz");
                let good = text.starts_with("HTTP/1.1 200") && text.contains("\"nodeEligible\":true");
                if good { Ok(()) } else { Err(text) }
            })
            .await;
        }
        // And what is asked on the node itself.
        let at = (knit_services::METRICS.ip(), knit_services::METRICS.port());
        for (path, words) in [("/proxyMode", "\r\n\r\nnftables"), ("/metrics", "kubeproxy_")] {
            wait(&format!("{words:?} at {path}"), || {
                let text = http(&a.space, at, path);
                if text.contains(words) { Ok(()) } else { Err(text) }
            })
            .await;
        }
        let close_wait = Sysctl::new("net/netfilter/nf_conntrack_tcp_timeout_close_wait").expect("a sysctl");
        wait("rule 53, as kube-proxy sets it", || {
            let set = Sysctls::of(&a.space).and_then(|sysctls| sysctls.get(&close_wait)).expect("a value");
            if set == "3600" { Ok(()) } else { Err(set) }
        })
        .await;
        for (greedy, node) in [(greedy[0], A[0]), (greedy[1], A[0])] {
            via(&client, greedy, ip(node));
            assert!(ask(&client, Tcp, (greedy, 80)).is_err(), "{greedy} led into a router");
        }
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn a_hand_made_slice_leads_nobody_into_another_network() {
    with_bed(|Bed { objects, nodes: [a, b], client, .. }| async move {
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let ((plain, _), (sky, _)) = tokio::join!(a.pod("plain", "shop"), a.pod("sky-a", "sky"));
        let ((forest, _), (far, _)) = tokio::join!(a.pod("forest-a", "forest"), b.pod("forest-b", "forest"));
        for pod in [&plain, &sky, &forest, &far] {
            serve_tcp(&pod.space, 9080, pod.name);
            serve_udp(&pod.space, 9081, pod.name);
        }
        let slice = [("tcp", "TCP", 9080), ("udp", "UDP", 9081)];
        let ports = |port| [("tcp", "TCP", 80, port), ("udp", "UDP", 81, port)];
        // A Service that works, so that one sees when the others are in force.
        for (space, name, number, port, pod) in [
            ("shop", "evil", 50, 30050, &sky),
            ("shop", "worse", 51, 30051, &forest),
            ("forest", "evil", 52, 30052, &sky),
            ("forest", "plain", 53, 30053, &plain),
            ("shop", "good", 54, 30054, &plain),
            ("forest", "good", 55, 30055, &forest),
        ] {
            ServiceSpec::new(space, name).ports(&ports(port)).kind("NodePort").ip(number).write(&objects);
            slices(&objects, (space, name), &slice, &[(pod, "a")]);
        }
        let vip = |number: u16| [ip(&format!("10.96.0.{number}")), ip(&format!("fd96::{number}"))];
        for (family, address) in vip(54).into_iter().enumerate() {
            wait("the good one", || names_at(&plain.space, Tcp, (address, 80), &["plain"])).await;
            wait("on the node", || names_at(&a.space, Tcp, (address, 80), &["plain"])).await;
            let tenant = vip(55)[family];
            wait("the tenant's", || names_at(&forest.space, Tcp, (tenant, 80), &["forest-a"])).await;
            for (port, name) in [(30054, "plain"), (30055, "forest-a")] {
                wait("its node port", || names_at(&client, Tcp, (ip(A[family]), port), &[name])).await;
            }
        }
        let silent =
            |from: &knit_kernel::NetNs, who: &str, address: IpAddr, (tcp, udp): (u16, u16), not: &[&str]| {
                for (kind, port) in [(Tcp, tcp), (Udp, udp)] {
                    if let Ok((name, _)) = ask(from, kind, (address, port)) {
                        assert!(!not.contains(&name.as_str()), "{who} reached {name} by {address} {port}");
                    }
                }
            };
        for family in [0, 1] {
            // The default Network's own, by pod, node and outside.
            for (number, port) in [(50, 30050), (51, 30051)] {
                let tenants = ["sky-a", "forest-a", "forest-b"];
                silent(&plain.space, "a pod", vip(number)[family], (80, 81), &tenants);
                silent(&a.space, "the node", vip(number)[family], (80, 81), &tenants);
                for (from, who) in [(&client, "the outside"), (&a.space, "the node"), (&plain.space, "a pod")]
                {
                    silent(from, who, ip(A[family]), (port, port), &tenants);
                }
            }
            // Another tenant's: its own pods it may reach, sky's address is one of those elsewhere.
            for (number, port) in [(52, 30052), (53, 30053)] {
                silent(&forest.space, "a tenant", vip(number)[family], (80, 81), &["sky-a", "plain"]);
                silent(&client, "the outside", ip(A[family]), (port, port), &["sky-a", "plain"]);
            }
            // The node probes the pods themselves, though.
            for pod in [&sky, &forest] {
                let (name, _) = ask_once(&a.space, Tcp, (pod.addresses[family], 9080)).expect("a probe");
                assert_eq!(name, pod.name);
            }
        }
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn the_api_server_and_dns_are_reached_by_the_uplink() {
    with_bed(|Bed { objects, nodes: [a, b], .. }| async move {
        // The API server is node a itself; DNS is a pod of the default Network on b.
        serve_tcp(&a.space, 6443, "api");
        ServiceSpec::new("default", "kubernetes").ports(&[("https", "TCP", 443, 0)]).ip(1).write(&objects);
        slices_of(&objects, ("default", "kubernetes"), &[("https", "TCP", 6443)], &[(&A.map(ip), "a")]);
        let ports = [("dns", "UDP", 53, 0), ("dns-tcp", "TCP", 53, 0)];
        ServiceSpec::new("kube-system", "kube-dns").ports(&ports).ip(10).write(&objects);
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let (dns, _) = b.pod("dns", "kube-system").await;
        serve_tcp(&dns.space, 53, "dns");
        serve_udp(&dns.space, 53, "dns");
        let slice = [("dns", "UDP", 53), ("dns-tcp", "TCP", 53)];
        slices(&objects, ("kube-system", "kube-dns"), &slice, &[(&dns, "b")]);
        for (node, names) in [(&a, ["sky-a", "forest-a"]), (&b, ["sky-b", "forest-b"])] {
            for (name, space) in names.into_iter().zip(["sky", "forest"]) {
                let (pod, _) = node.pod(name, space).await;
                for (api, dns) in [("10.96.0.1", "10.96.0.10"), ("fd96::1", "fd96::10")] {
                    let (api, dns) = (ip(api), ip(dns));
                    wait(&format!("{name} to the API"), || names_at(&pod.space, Tcp, (api, 443), &["api"]))
                        .await;
                    wait(&format!("{name} to DNS"), || names_at(&pod.space, Udp, (dns, 53), &["dns"])).await;
                    wait(&format!("{name} to DNS"), || names_at(&pod.space, Tcp, (dns, 53), &["dns"])).await;
                    // Nothing else there.
                    assert!(ask(&pod.space, Tcp, (dns, 9153)).is_err());
                }
                assert_eq!(ask(&pod.space, Udp, (dns.addresses[0], 53)), Err(No::Silence), "a pod elsewhere");
                assert_eq!(ask(&pod.space, Tcp, (ip(A[0]), 6443)), Err(No::Silence), "a node");
            }
        }
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}
