//! Rules: read only when somebody else touched them, and put right whatever else is wrong.

use super::*;

#[test]
fn rules_that_nobody_else_touched_are_not_read() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            whole(&cluster.a, "read once").await;
            // As ours, so that nobody is told: a survey that reads the rules would find it.
            delete_table(&cluster.a.space, Family::Arp);
            cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            not_read(&cluster.a).await;
            // Somebody else's table is none of ours.
            let theirs = TableId::new(Family::Inet, "theirs");
            as_stranger(|| {
                let mut tx = Transaction::new();
                tx.create_table(knit_nft::Table::new(theirs));
                Kernel::open_in(&cluster.a.space).expect("nftables").commit(&tx).expect("a table");
            });
            not_read(&cluster.a).await;
            let links = cluster.a.handle().links(&LinkFilter { owned: true, ..LinkFilter::default() });
            assert!(!links.expect("links").is_empty());
        });
    });
}

#[test]
fn rules_that_were_made_just_now_are_not_read_back_unless_somebody_touched_them() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let (network, tenant) = (default_network(), green(&cluster.a));
            cluster.a.setup(&network).await;
            cluster.a.setup(&tenant).await;
            let (space, router) = (&cluster.a.space, cluster.a.router(&tenant.name));
            // As ours, so that nobody is told: a survey that reads the rules would find it.
            delete_table(space, Family::Arp);
            delete_table(&router, Family::Arp);
            not_read(&cluster.a).await;
            touch(space);
            assert!(wrong_rules(&cluster.a).await.contains(&network.name), "touched: it is read");
            touch(&router);
            assert!(wrong_rules(&cluster.a).await.contains(&tenant.name), "touched: it is read");
            cluster.a.setup(&network).await;
            cluster.a.setup(&tenant).await;
            whole(&cluster.a, "put right").await;
            // Made anew while a pod is there whose port of the node is in the table, too.
            let pod = TestPod::new("web");
            let mut request = pod.request(&tenant, &["10.77.0.34", "fd77::22"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 7000, container_port: 5000, host_ip }];
            let _pod = pod.attached(&cluster.a, request).await;
            as_stranger(|| delete_table(space, Family::Inet));
            cluster.a.setup(&network).await;
            cluster.a.setup(&tenant).await;
            let survey = cluster.a.runtime.survey().await.expect("a survey");
            assert_eq!(survey.attachments.len(), 1, "its port is closed, and that is seen: {survey:?}");
        });
    });
}

#[test]
fn the_first_network_that_is_set_up_again_closes_the_uplinks_of_all() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let tenant = node.pod(&blue(node), "one", &["10.77.0.18", "fd77::12"]).await;
            let other = node.pod(&default_network(), "two", &["10.244.1.5", "fd44::1:5"]).await;
            // One way: answers have rules of their own.
            let bind = |space: &NetNs, at: &str| {
                let socket = space.run(|| std::net::UdpSocket::bind(at)).expect("a visit").expect("a socket");
                socket.set_read_timeout(Some(support::NEVER)).expect("a timeout");
                socket
            };
            let (from, to) = (bind(&other.space, "0.0.0.0:0"), bind(&tenant.space, "10.77.0.18:5000"));
            let gets_in = || {
                from.send_to(b"hello", "10.77.0.18:5000").expect("sent");
                to.recv_from(&mut [0; 16]).is_ok()
            };
            assert!(!gets_in(), "before");
            as_stranger(|| delete_table(&node.space, Family::Inet));
            eventually("nothing is closed without rules", SOON, gets_in);
            node.setup(&default_network()).await;
            assert!(!gets_in(), "the default Network is set up again, blue is not yet");
        });
    });
}

/// What is wrong with the rules of Networks, by the survey.
async fn wrong_rules(node: &Node) -> Vec<NetworkName> {
    let survey = node.runtime.survey().await.expect("a survey");
    let wrong = survey.networks.into_iter().filter(|(_, all)| all.iter().any(|d| d.kind == "rules"));
    wrong.map(|(network, _)| network).collect()
}

#[test]
fn rules_are_compared_and_put_right_while_the_nodes_address_is_not_to_be_found() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            whole(node, "before").await;
            as_stranger(|| {
                let eth0 = node.handle().index_of(&name("eth0")).expect("eth0");
                for address in node.handle().addresses(Some(eth0)).expect("addresses") {
                    node.handle().remove(address).expect("removed");
                }
            });
            let survey = node.runtime.survey().await.expect("what can be compared is compared");
            assert!(survey.networks.is_empty(), "{survey:?}");
            for network in ["default", "blue", "green"] {
                let why = &survey.unknown[network];
                assert!(matches!(why, NotKnown::Failed(why) if why.contains("192.168.7.1")), "{why:?}");
            }
            as_stranger(|| delete_table(&node.space, Family::Inet));
            as_stranger(|| delete_table(&node.router("blue"), Family::Bridge));
            assert_eq!(wrong_rules(node).await, ["blue", "default", "green"]);
            for network in [default_network(), blue(node), green(node)] {
                let error = node.runtime.setup_network(&network).await.expect_err("no address");
                assert_eq!(error.reason, Reason::NotReady, "{error}");
            }
            assert!(wrong_rules(node).await.is_empty(), "rules are in force again all the same");
        });
    });
}

#[test]
fn rules_are_compared_and_put_right_while_the_mtu_does_not_fit() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let network = Network { mtu: Some(1450), ..blue(node) };
            node.setup(&network).await;
            whole(node, "before").await;
            as_stranger(|| change(&node.space, "eth0", |c| c.mtu = Mtu::new(1400).ok()));
            let survey = node.runtime.survey().await.expect("a survey");
            let kinds: Vec<_> = survey.networks["blue"].iter().map(|damage| damage.kind).collect();
            assert_eq!(kinds, ["node"], "{survey:?}");
            as_stranger(|| delete_table(&node.router("blue"), Family::Inet));
            assert_eq!(wrong_rules(node).await, ["blue"]);
            let error = node.runtime.setup_network(&network).await.expect_err("it does not fit");
            assert!(error.to_string().contains("does not fit"), "{error}");
            assert!(wrong_rules(node).await.is_empty(), "rules are in force again all the same");
        });
    });
}

#[test]
fn a_new_agent_that_cannot_find_its_address_lays_rules_down_all_the_same() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let before = (support::tables(&cluster.a), support::tables_in(&cluster.a.router("blue")));
            cluster.a.restart_with(|config| config.addresses = vec![ip("192.168.7.77")]);
            as_stranger(|| delete_table(&cluster.a.space, Family::Arp));
            for network in [default_network(), blue(&cluster.a)] {
                cluster.a.runtime.setup_network(&network).await.expect_err("no such address");
            }
            let now = (support::tables(&cluster.a), support::tables_in(&cluster.a.router("blue")));
            assert_eq!(now.0.len(), before.0.len());
            assert_eq!((&now.0[0], &now.1), (&before.0[0], &before.1), "what was there stays as it was");
        });
    });
}

#[test]
fn setting_up_a_network_reads_no_rules_that_nobody_else_touched() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            // As ours, so that nobody is told: a set-up that reads the tables would put them back.
            delete_table(&node.space, Family::Arp);
            delete_table(&node.router("green"), Family::Arp);
            let is_gone = |space: &NetNs| {
                let table = TableId::new(Family::Arp, "knit");
                Kernel::open_in(space).expect("nftables").table(&table).expect("read").is_none()
            };
            let mut network = green(node);
            network.cluster_service_ips = vec![ip("10.96.0.9")];
            node.setup(&network).await;
            assert!(is_gone(&node.space) && is_gone(&node.router("green")), "all was read");
            let text = support::tables(node).concat() + &support::tables_in(&node.router("green")).concat();
            assert_eq!(text.matches("10.96.0.9").count(), 2, "{text}");
            assert!(!text.contains("\"up-3\" . 10.96.0.1"), "what was before is gone: {text}");
            assert!(text.contains("\"up-2\" . 10.96.0.1"), "others keep theirs: {text}");
            node.runtime.remove_network(&"blue".into()).await.expect("removed");
            assert!(is_gone(&node.space), "all was read");
            let text = support::tables(node).concat();
            assert!(!text.contains("up-2") && text.contains("up-3"), "{text}");
            touch(&node.space);
            node.setup(&network).await;
            assert!(!is_gone(&node.space), "somebody else touched them: they are read");
        });
    });
}

#[test]
fn what_a_survey_finds_wrong_is_put_right_although_nobody_was_heard_to_touch_it() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            // What an agent finds, it does not trust as it does what it made.
            cluster.a.restart();
            let node = &cluster.a;
            for network in [default_network(), blue(node), green(node)] {
                node.setup(&network).await;
            }
            // As ours, so that nobody is told: a set-up that goes by what it remembers leaves them out.
            delete_table(&node.space, Family::Arp);
            delete_table(&node.router("green"), Family::Arp);
            assert!(wrong_rules(node).await.contains(&"green".into()));
            for network in [default_network(), blue(node), green(node)] {
                node.setup(&network).await;
            }
            whole(node, "after").await;
        });
    });
}

#[test]
fn a_part_that_somebody_else_took_away_comes_back_although_another_network_was_set_up_first() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            node.pod(&default_network(), "one", &["10.244.1.5", "fd44::1:5"]).await;
            whole(node, "before").await;
            as_stranger(|| delete_table(&node.space, Family::Inet));
            for network in [green(node), default_network(), blue(node), green(node)] {
                node.setup(&network).await;
            }
            whole(node, "after").await;
        });
    });
}
