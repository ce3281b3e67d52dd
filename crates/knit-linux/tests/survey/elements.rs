//! Elements of the node's table: host ports that somebody closed, and what belongs to nothing.

use super::*;

#[test]
fn a_lost_link_and_a_closed_port_are_what_attaching_again_puts_right() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let pod = TestPod::new("one");
            let mut request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 7000, container_port: 5000, host_ip }];
            let pod = pod.attached(&cluster.a, request.clone()).await;
            whole(&cluster.a, "before").await;
            let one = (request.pod.sandbox.clone(), request.interface.clone());
            as_stranger(|| delete_table(&cluster.a.space, Family::Inet));
            cluster.a.setup(&network).await;
            let survey = cluster.a.runtime.survey().await.expect("a survey");
            assert_eq!(survey, Survey { attachments: [one.clone()].into(), ..Survey::default() });
            cluster.a.runtime.attach(&request).await.expect("attached again");
            whole(&cluster.a, "the port").await;
            let at = std::net::SocketAddr::new(ip("192.168.7.1"), 7000);
            assert_ne!(udp_via(&cluster.outside, &pod.space, at, 5000, SOON), Talk::Silence);

            as_stranger(|| delete(&cluster.a.space, &pod.attachments[0].host.name));
            let survey = cluster.a.runtime.survey().await.expect("a survey");
            assert!(survey.attachments.contains(&one), "{survey:?}");
            cluster.a.runtime.attach(&request).await.expect("attached again");
            cluster.a.setup(&network).await;
            whole(&cluster.a, "the link").await;
        });
    });
}

/// Changes elements of sets of the node's table, as another program: takes away those of a set that `gone`
/// says, and adds others.
fn edit(space: &NetNs, set: &str, gone: impl Fn(&Element) -> bool, more: Vec<Element>) {
    let id = TableId::new(Family::Inet, "knit");
    as_stranger(|| {
        let mut kernel = Kernel::open_in(space).expect("nftables");
        let table = kernel.table(&id).expect("read").expect("a table");
        let there = &table.sets[set];
        let mut tx = Transaction::new();
        let gone: Vec<Element> = there.elements.values().filter(|element| gone(element)).cloned().collect();
        if !gone.is_empty() {
            tx.delete_elements(&id, &there.set, gone);
        }
        if !more.is_empty() {
            tx.add_elements(&id, &there.set, more);
        }
        kernel.commit(&tx).expect("changed");
    });
}

#[test]
fn a_host_port_that_somebody_closed_was_taken_for_open_while_anything_of_it_was_left() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let (node, network) = (&cluster.a, default_network());
            node.setup(&network).await;
            let pod = TestPod::new("one");
            let mut request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let mapping = |protocol, host_port, host_ip| PortMapping {
                protocol,
                host_port,
                container_port: 5000,
                host_ip,
            };
            request.ports = vec![
                mapping(Protocol::Udp, 7000, None),
                mapping(Protocol::Tcp, 7001, None),
                mapping(Protocol::Udp, 7002, Some(ip("192.168.7.1"))),
            ];
            let pod = pod.attached(node, request.clone()).await;
            let one = (request.pod.sandbox.clone(), request.interface.clone());
            let host = pod.attachments[0].host.name.clone();
            let key = |port| (L4Proto::UDP, Port(port));
            let to = |port| (std::net::Ipv4Addr::new(10, 244, 1, 5), Port(port));
            let (udp_7000, all) = (Element::new(&key(7000)), |_: &Element| true);
            let is_7000 = |element: &Element| element.key == udp_7000.key;
            let none = |_: &Element| false;
            let elsewhere = || Element::new(&key(7000)).value(&to(22)).comment(&host);
            let more = || Element::new(&key(7009)).value(&to(5000)).comment(&host);
            type Damage<'a> = Box<dyn Fn() + 'a>;
            let damages: [(&str, Damage<'_>); 6] = [
                ("one is closed", Box::new(|| edit(&node.space, "host-ports4", is_7000, Vec::new()))),
                ("all of a family are", Box::new(|| edit(&node.space, "host-ports6", all, Vec::new()))),
                ("that of an address is", Box::new(|| edit(&node.space, "host-ports-at4", all, Vec::new()))),
                ("it cannot reach itself", Box::new(|| edit(&node.space, "hairpin4", all, Vec::new()))),
                (
                    "one leads elsewhere",
                    Box::new(|| {
                        edit(&node.space, "host-ports4", is_7000, Vec::new());
                        edit(&node.space, "host-ports4", none, vec![elsewhere()]);
                    }),
                ),
                ("there is one more", Box::new(|| edit(&node.space, "host-ports4", none, vec![more()]))),
            ];
            for (what, damage) in damages {
                whole(node, what).await;
                not_read(node).await;
                damage();
                let survey = node.runtime.survey().await.expect("a survey");
                assert_eq!(
                    survey,
                    Survey { attachments: [one.clone()].into(), ..Survey::default() },
                    "{what}"
                );
                let mut rules = Kernel::open_in(&node.space).expect("the rules");
                let before = rules.generation().expect("a number");
                node.runtime.attach(&request).await.expect("attached again");
                // A port that leads elsewhere was closed first, and opened after that.
                assert_eq!(rules.generation().expect("a number"), before.after(1), "{what}");
                whole(node, what).await;
                let at = std::net::SocketAddr::new(ip("192.168.7.1"), 7000);
                let talk = udp_via(&cluster.outside, &pod.space, at, 5000, SOON);
                assert_ne!(talk, Talk::Silence, "{what}");
            }
        });
    });
}

#[test]
fn what_another_program_added_to_the_nodes_table_was_never_taken_away() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let node = &cluster.a;
            let network = default_network();
            let pod = TestPod::new("one");
            let mut request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let (protocol, host_ip) = (Protocol::Udp, None);
            request.ports = vec![PortMapping { protocol, host_port: 7000, container_port: 5000, host_ip }];
            let _pod = pod.attached(node, request).await;
            let tenant = node.pod(&blue(node), "two", &["10.77.0.18", "fd77::12"]).await;
            let v4 = |text: &str| text.parse::<std::net::Ipv4Addr>().expect("an address");
            let (pod, other) = (v4("10.244.1.5"), v4("10.244.1.9"));
            let led = |port: u16| Element::new(&(L4Proto::UDP, Port(port))).value(&(pod, Port(53)));
            let foreign: [(&str, Element); 8] = [
                ("uplinks", Element::new(&IfName::new("eth0"))),
                ("uplinks", Element::new(&IfName::new("up-999"))),
                ("uplinks-outside", Element::new(&IfName::new("up-x"))),
                ("uplink-services4", Element::new(&(IfName::new("up-999"), pod))),
                ("host-ports4", led(7001)),
                ("host-ports4", led(7001).comment("knitaaaaaaaaaaa")),
                ("hairpin4", Element::new(&(other, other))),
                ("tunnel-hosts44", Element::new(&(Vni(999), v4("192.168.7.2"), other))),
            ];
            for (set, element) in foreign {
                let what = format!("{set}: {element:?}");
                whole(node, &what).await;
                not_read(node).await;
                edit(&node.space, set, |_| false, vec![element]);
                let survey = node.runtime.survey().await.expect("a survey");
                assert!(survey.attachments.is_empty(), "{what}: {survey:?}");
                let damaged: Vec<&NetworkName> = survey.networks.keys().collect();
                assert_eq!(damaged, [&network.name], "{what}");
                node.setup(&network).await;
                whole(node, &what).await;
            }
            // What belongs to somebody is there: another Network's part, and the pod's port.
            let peer = cluster.b.pod(&blue(&cluster.b), "three", &["10.77.0.34", "fd77::22"]).await;
            let talk = udp(&tenant.space, &peer.space, ip("10.77.0.34"), 80, SOON);
            assert_ne!(talk, Talk::Silence);
        });
    });
}
