//! Real agents with the reference runtime on two nodes: each Network's Services lead to its own pods only.

use std::path::PathBuf;
use std::time::Duration;

use knit_nft::{Family, Nftables, TableId, Transaction};

use crate::flows::{ServiceSpec, ip};
use crate::support::*;
use knit_kernel::nft::Kernel;
use knit_kernel::testing::in_namespaces;
use knit_node::proxy::ServicesState;

const STOP: Duration = Duration::from_secs(5);
/// The Service `web` of both tenants: even the same service address leads to their own pods.
const TENANT: (&str, u16) = ("10.96.0.11", 80);
const SHOP: (&str, u16) = ("10.96.0.10", 80);
const API: (&str, u16) = ("10.96.0.1", 443);

fn in_two_nodes<F: Future<Output = ()>>(scenario: impl FnOnce(PathBuf, [Node; 2]) -> F + Send) {
    in_namespaces(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let dir = PathBuf::from("/run/test");
        let (_wire, nodes) = nodes(&dir);
        let objects = dir.join("objects");
        write_objects(&objects);
        runtime.expect("a runtime").block_on(scenario(objects, nodes));
    });
}

#[test]
fn each_network_has_its_own_services() {
    in_two_nodes(|objects, [a, b]| async move {
        write_service(&objects, ("default", "kubernetes"), API.0, API.1);
        write_slice(
            &objects,
            ("default", "kubernetes"),
            6443,
            &[("192.168.7.1".parse().expect("an address"), "a")],
        );
        for (space, at) in [("shop", SHOP), ("sky", TENANT), ("forest", TENANT)] {
            write_service(&objects, (space, "web"), at.0, at.1);
        }
        serve(&a.space, 6443, "api");
        let (agent_a, agent_b) = tokio::join!(a.start(), b.start());
        let mut pods = Vec::new();
        for (space, names) in [
            ("shop", ["shop-a", "shop-b"]),
            ("sky", ["sky-a", "sky-b"]),
            ("forest", ["forest-a", "forest-b"]),
        ] {
            let ((one, first), (two, second)) = tokio::join!(a.pod(names[0], space), b.pod(names[1], space));
            write_slice(&objects, (space, "web"), 8080, &[(first, "a"), (second, "b")]);
            pods.push((space, [one, two], [first, second]));
        }
        let [shop, sky, forest] = &pods[..] else { unreachable!() };
        // The tenants have the same addresses, each on the other node.
        assert_eq!(sky.2[0], forest.2[1]);

        // Each balances over its own pods of both nodes, from both nodes.
        for (_, [one, two], _) in &pods {
            let at = if one.name == "shop-a" { SHOP } else { TENANT };
            for pod in [one, two] {
                wait_for(pod, at, &[one.name, two.name]).await;
            }
        }
        // Nobody reaches another Network's Services, nor an address that no Service has.
        assert!(connect(&shop.1[0].space, TENANT, NEVER).is_err());
        for pod in sky.1.iter().chain(&forest.1) {
            assert!(connect(&pod.space, SHOP, NEVER).is_err(), "{}", pod.name);
            assert!(connect(&pod.space, ("10.96.0.99", 80), NEVER).is_err(), "{}", pod.name);
            // But the API server, which their Networks list.
            wait_for(pod, API, &["api"]).await;
        }

        // An endpoint goes: the other one has all. One that calls itself is answered, routed and bridged.
        for (space, [one, two], addresses) in &pods {
            let at = if *space == "shop" { SHOP } else { TENANT };
            write_slice(&objects, (space, "web"), 8080, &[(addresses[0], "a")]);
            wait_for(two, at, &[one.name]).await;
            wait_for(one, at, &[one.name]).await;
        }

        // The agent goes and comes, and meanwhile an endpoint: connections stay, and nobody is sent astray.
        let mut open: Vec<_> = [(&shop.1[0], SHOP), (&sky.1[0], TENANT), (&forest.1[0], TENANT)]
            .map(|(pod, at)| connect(&pod.space, at, SOON).expect("a connection").0)
            .into();
        agent_a.stop(STOP).await;
        open.iter_mut().for_each(|stream| echo(stream).expect("the agent is away"));
        assert_eq!(answers(&sky.1[0].space, TENANT, SOON).expect("answers"), ["sky-a".to_owned()].into());
        write_slice(&objects, ("sky", "web"), 8080, &[(sky.2[1], "b")]);
        let agent_a = a.start().await;
        wait_for(&sky.1[0], TENANT, &["sky-b"]).await;
        wait_for(&forest.1[0], TENANT, &["forest-a"]).await;
        open.iter_mut().for_each(|stream| echo(stream).expect("the agent is back"));
        for network in ["default", "blue", "green"] {
            // Rules of the agent before answer too, so that this one may still be at its first look.
            wait_until(&format!("Services of {network} are served"), || match services(&agent_a, network) {
                Some(ServicesState::Serving { failed: 0, ports: 1.. }) => Ok(()),
                other => Err(format!("{other:?}")),
            })
            .await;
        }
        agent_a.stop(STOP).await;
        agent_b.stop(STOP).await;
    });
}

#[test]
fn the_default_network_is_left_to_kube_proxy() {
    in_two_nodes(|objects, [a, _]| async move {
        let mut nft = Kernel::open_in(&a.space).expect("nftables");
        let table = TableId::new(Family::Ip, "kube-proxy");
        let mut add = Transaction::new();
        add.add_table(table.clone());
        nft.commit(&add).expect("a table");
        for (space, at) in [("shop", SHOP), ("sky", TENANT)] {
            write_service(&objects, (space, "web"), at.0, at.1);
        }
        // What this agent would not serve, and kube-proxy does.
        let grab = ServiceSpec::new("shop", "grab").ports(&[("ssh", "TCP", 22, 0)]);
        grab.external(&[ip("192.168.7.2")]).ip(40).write(&objects);
        let agent = a.start().await;
        let (shop, at) = a.pod("shop-a", "shop").await;
        write_slice(&objects, ("shop", "web"), 8080, &[(at, "a")]);
        let (sky, at) = a.pod("sky-a", "sky").await;
        write_slice(&objects, ("sky", "web"), 8080, &[(at, "a")]);
        // Other Networks are ours all the same.
        wait_for(&sky, TENANT, &["sky-a"]).await;
        wait_until("the default Network's are left alone", || match services(&agent, "default") {
            Some(ServicesState::Off(_)) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await;
        assert!(connect(&shop.space, SHOP, NEVER).is_err());
        assert!(!nft.tables().expect("tables").iter().any(|t| &*t.name == "knit-proxy"));
        assert!(told(&a, "AddressRefused").is_err(), "kube-proxy serves it");
        // Without it, the default Network's are ours too.
        let mut delete = Transaction::new();
        delete.delete_table(&table);
        nft.commit(&delete).expect("gone");
        wait_for(&shop, SHOP, &["shop-a"]).await;
        wait_until("and what they do not get is told", || told(&a, "AddressRefused")).await;
        agent.stop(STOP).await;
    });
}
