//! What the runtime promises about repeating, failing, restarting and cleaning up.

mod support;

use futures::StreamExt;
use knit_kernel::handle::{LinkFilter, NeighbourFilter, RouteFilter};
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::owner;
use knit_kernel::testing::{as_stranger, eventually, in_namespaces};
use knit_nft::{Family, Nftables, TableId};
use knit_runtime::{Change, PortMapping, Protocol, Reason, Runtime};
use support::{Cluster, Node, SOON, Talk, TestPod, default_network, ip, name, ours, run, tables, udp};

#[test]
fn setting_up_twice_changes_nothing() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let (before, rules) = (ours(&cluster.a), tables(&cluster.a));
            cluster.a.setup(&network).await;
            assert_eq!((ours(&cluster.a), tables(&cluster.a)), (before.clone(), rules.clone()));
            cluster.a.restart();
            cluster.a.setup(&network).await;
            assert_eq!((ours(&cluster.a), tables(&cluster.a)), (before, rules));
        });
    });
}

#[test]
fn setting_up_repairs_what_is_damaged_and_removes_leftovers() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let mut network = default_network();
            cluster.a.setup(&network).await;
            let empty = ours(&cluster.a);
            let pod = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let (before, rules) = (ours(&cluster.a), tables(&cluster.a));
            // Somebody flushes rules, routes and neighbours.
            let handle = cluster.a.handle();
            let host = handle.index_of(&name(&pod.attachments[0].host.name)).expect("the host end");
            let filter = RouteFilter { protocol: Some(owner::PROTOCOL), ..RouteFilter::default() };
            for route in handle.routes(&filter).expect("routes") {
                handle.remove(route).expect("removed");
            }
            let ours_there = NeighbourFilter { interface: Some(host), protocol: Some(owner::PROTOCOL) };
            for neighbour in handle.neighbours(&ours_there).expect("listed") {
                handle.remove(neighbour).expect("removed");
            }
            let mut kernel = as_stranger(|| Kernel::open_in(&cluster.a.space).expect("nftables"));
            let mut flush = knit_nft::Transaction::new();
            flush.delete_table(&TableId::new(Family::Inet, "knit"));
            kernel.commit(&flush).expect("flushed");
            drop(kernel);
            let error = cluster.a.runtime.check(&pod.pod, None, None).await.expect_err("damage");
            assert_eq!(error.reason, Reason::Damaged, "{error}");
            assert!(error.message.contains("10.244.1.5"), "{error}");
            cluster.a.setup(&network).await;
            let text = |tables: Vec<String>| {
                tables
                    .iter()
                    .map(|table| table.rsplit_once('\n').expect("two parts").0.to_owned())
                    .collect::<Vec<_>>()
            };
            assert_eq!((ours(&cluster.a), text(tables(&cluster.a))), (before, text(rules)));
            cluster.a.runtime.check(&pod.pod, None, None).await.expect("whole again");
            // The link goes without us: its rules are leftovers, and go at the next pass.
            handle.delete_link(host).expect("deleted");
            cluster.a.setup(&network).await;
            assert_eq!(ours(&cluster.a), empty);
            assert!(!tables(&cluster.a)[0].contains("10.244.1.5"));
            // A node is gone: so is the way to it.
            network.blocks.retain(|block| block.node == "a");
            cluster.a.setup(&network).await;
            assert_eq!(ours(&cluster.a), Vec::<String>::new());
        });
    });
}

#[test]
fn the_same_request_again_gives_the_same_answer() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let pod = TestPod::new("one");
            let request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let first = cluster.a.runtime.attach(&request).await.expect("attached");
            assert_eq!(cluster.a.runtime.attach(&request).await.expect("again"), first);
            cluster.a.restart();
            let error = cluster.a.runtime.attach(&request).await.expect_err("not set up yet");
            assert_eq!(error.reason, Reason::NetworkNotFound);
            cluster.a.setup(&network).await;
            assert_eq!(cluster.a.runtime.attach(&request).await.expect("after a restart"), first);
            let mut other = request.clone();
            other.addresses = pod.request(&network, &["10.244.1.6", "fd44::1:6"]).addresses;
            let error = cluster.a.runtime.attach(&other).await.expect_err("other addresses");
            assert_eq!(error.reason, Reason::Conflict, "{error}");
            let mut other = request.clone();
            other.default_route = false;
            let error = cluster.a.runtime.attach(&other).await.expect_err("other routes");
            assert_eq!(error.reason, Reason::Conflict, "{error}");
        });
    });
}

#[test]
fn a_sandbox_that_came_back_is_made_anew() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let pod = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            // The same sandbox id with another namespace and other addresses: its DEL never came.
            let path = pod.path.clone();
            let old = pod.space;
            NetNs::delete(&path).expect("unmounted");
            let pod = TestPod::new("one");
            let request = pod.request(&network, &["10.244.1.6", "fd44::1:6"]);
            let pod = pod.attached(&cluster.a, request).await;
            assert_eq!(
                udp(&cluster.a.space, &pod.space, ip("10.244.1.6"), 5000, SOON),
                Talk::From(ip("192.168.7.1"))
            );
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list").len(), 1);
            assert!(!ours(&cluster.a).iter().any(|text| text.contains("10.244.1.5")));
            drop(old);
        });
    });
}

#[test]
fn a_failed_attachment_leaves_nothing() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let before = (ours(&cluster.a), tables(&cluster.a));
            let pod = TestPod::new("one");
            let request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let attach = async |request| cluster.a.runtime.attach(&request).await.expect_err("refused");
            let mut gone = request.clone();
            gone.netns = "/run/nowhere".into();
            assert_eq!(attach(gone).await.reason, Reason::NamespaceGone);
            let mut elsewhere = request.clone();
            elsewhere.network = "blue".into();
            assert_eq!(attach(elsewhere).await.reason, Reason::NetworkNotFound);
            let foreign = pod.request(&network, &["10.1.1.5", "fd44::1:5"]);
            assert_eq!(attach(foreign).await.reason, Reason::Invalid);
            let half = pod.request(&network, &["10.244.1.5"]);
            assert_eq!(attach(half).await.reason, Reason::Invalid);
            let mut taken = request.clone();
            taken.interface = "veth9".parse().expect("a name");
            let peer = knit_kernel::link::Peer { name: name("veth8"), namespace: None, mac: None, mtu: None };
            let link = knit_kernel::link::NewLink::veth(name("veth9"), peer);
            pod.handle().create_link(&link).expect("a link of the pod's own");
            let error = attach(taken).await;
            assert_eq!(error.reason, Reason::Conflict, "{error}");
            // A pod whose kernel does not answer.
            let sysctls = knit_kernel::sysctl::Sysctls::of(&pod.space).expect("sysctls");
            let ignore = knit_kernel::sysctl::Sysctl::new("net/ipv4/icmp_echo_ignore_all").expect("a name");
            sysctls.set(&ignore, 1).expect("set");
            let mut ports = request.clone();
            ports.ports = vec![PortMapping {
                protocol: Protocol::Tcp,
                host_port: 80,
                container_port: 80,
                host_ip: None,
            }];
            let error = attach(ports).await;
            assert_eq!(error.reason, Reason::Internal);
            assert!(
                error.message.contains("10.244.1.5") && error.message.contains("nothing answers"),
                "{error}"
            );
            assert_eq!((ours(&cluster.a), tables(&cluster.a)), before);
            assert_eq!(pod.handle().link_by_name(&name("eth0")).expect("a look"), None);
            sysctls.set(&ignore, 0).expect("set");
            cluster.a.runtime.attach(&request).await.expect("now it answers");
        });
    });
}

#[test]
fn ipv6_that_is_switched_off_in_a_pod_is_switched_on() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let pod = TestPod::new("one");
            let sysctls = knit_kernel::sysctl::Sysctls::of(&pod.space).expect("sysctls");
            for scope in [knit_kernel::sysctl::Scope::All, knit_kernel::sysctl::Scope::Default] {
                sysctls.set(&knit_kernel::sysctl::Sysctl::ipv6_disabled(scope), 1).expect("set");
            }
            let request = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let pod = pod.attached(&cluster.a, request).await;
            assert_eq!(
                udp(&cluster.a.space, &pod.space, ip("fd44::1:5"), 5000, SOON),
                Talk::From(ip("fd07::1"))
            );
            // Whoever switches it off again inside the pod is told what follows from it, and not fought.
            let survey = cluster.a.runtime.survey().await.expect("compared");
            assert!(survey.noticed.is_empty(), "{survey:?}");
            let eth0 = name("eth0");
            let off = knit_kernel::sysctl::Sysctl::ipv6_disabled(knit_kernel::sysctl::Scope::Link(&eth0));
            sysctls.set(&off, 1).expect("set");
            let survey = cluster.a.runtime.survey().await.expect("compared");
            let told: Vec<_> = survey.noticed.into_iter().collect();
            assert_eq!(told.len(), 1, "{told:?}");
            assert!(told[0].1.contains("disable_ipv6"), "{told:?}");
            assert!(survey.networks.is_empty() && survey.attachments.is_empty());
            assert_eq!(sysctls.get(&off).expect("read"), "1", "it is the pod's own");
        });
    });
}

#[test]
fn detaching_leaves_nothing_and_may_be_repeated() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let before = (ours(&cluster.a), tables(&cluster.a));
            let one = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let two = cluster.a.pod(&network, "two", &["10.244.1.6", "fd44::1:6"]).await;
            let eth0 = "eth0".parse().expect("a name");
            let net1 = "net1".parse().expect("a name");
            cluster.a.runtime.detach(&one.pod, Some(&net1)).await.expect("no such interface is fine");
            assert_eq!(
                cluster.a.runtime.list(Some(&one.pod.sandbox)).await.expect("a list"),
                one.attachments
            );
            cluster.a.runtime.detach(&one.pod, Some(&eth0)).await.expect("detached");
            assert_eq!(one.handle().link_by_name(&name("eth0")).expect("a look"), None);
            cluster.a.runtime.detach(&one.pod, Some(&eth0)).await.expect("detached twice");
            cluster.a.runtime.detach(&one.pod, None).await.expect("detached thrice");
            let error = cluster.a.runtime.check(&one.pod, None, None).await.expect_err("it is gone");
            assert_eq!(error.reason, Reason::AttachmentNotFound);
            // The address is free at once.
            cluster.a.pod(&network, "three", &["10.244.1.5", "fd44::1:5"]).await;
            // The namespace goes first.
            let TestPod { space, path, pod, .. } = two;
            NetNs::delete(&path).expect("unmounted");
            drop(space);
            let sandboxes = || run_list(&cluster.a);
            eventually("the kernel takes the pair away", SOON, || sandboxes() == ["three"]);
            cluster.a.runtime.detach(&pod, None).await.expect("what is gone is fine");
            let keep = [];
            let removed = cluster.a.runtime.collect_garbage(&keep).await.expect("collected");
            assert_eq!(removed.len(), 1);
            assert_eq!(removed[0].pod.sandbox.as_str(), "three");
            cluster.a.setup(&network).await;
            assert_eq!((ours(&cluster.a), tables(&cluster.a)), before);
        });
    });
}

/// The sandboxes whose host ends are there, without asking the runtime.
fn run_list(node: &Node) -> Vec<String> {
    let links = node.handle().links(&LinkFilter { owned: true, ..LinkFilter::default() }).expect("links");
    let word = |alias: &str| alias.split(' ').nth(1).unwrap_or_default().to_owned();
    links.iter().filter_map(|link| link.alias.as_deref().map(word)).collect()
}

#[test]
fn a_restart_is_not_noticed() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            let one = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let two = cluster.b.pod(&network, "two", &["10.244.2.5", "fd44::2:5"]).await;
            let server =
                two.space.run(|| std::net::UdpSocket::bind("0.0.0.0:5000")).expect("in").expect("bound");
            let client =
                one.space.run(|| std::net::UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound");
            client.connect("10.244.2.5:5000").expect("connected");
            server.set_read_timeout(Some(SOON)).expect("a timeout");
            let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            let sending = {
                let stop = std::sync::Arc::clone(&stop);
                std::thread::spawn(move || {
                    let mut number = 0u32;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        client.send(&number.to_be_bytes()).expect("sent");
                        number += 1;
                        // One packet at a time: what is missing afterwards was dropped, not overrun.
                        let mut buffer = [0; 4];
                        server.recv(&mut buffer).expect("every packet arrives");
                        assert_eq!(u32::from_be_bytes(buffer) + 1, number);
                    }
                    number
                })
            };
            for _ in 0..5 {
                cluster.a.restart();
                cluster.a.setup(&network).await;
                cluster.b.restart();
                cluster.b.setup(&network).await;
            }
            let listed = cluster.a.runtime.list(None).await.expect("a list");
            assert_eq!(listed.len(), 1);
            assert_eq!(listed[0].addresses, one.attachments[0].addresses);
            assert_eq!(listed[0].host, one.attachments[0].host);
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            println!("{} packets", sending.join().expect("no packet was lost"));
            cluster.a.runtime.detach(&one.pod, None).await.expect("detached by another than who attached");
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list"), []);
        });
    });
}

#[test]
fn a_network_goes_when_nobody_uses_it() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.runtime.remove_network(&"default".into()).await.expect("nothing there is fine");
            cluster.a.setup(&network).await;
            let pod = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let error = cluster.a.runtime.remove_network(&"default".into()).await.expect_err("in use");
            assert_eq!(error.reason, Reason::InUse, "{error}");
            let status = cluster.a.runtime.status().await.expect("a status");
            assert!(
                status.ready && status.networks[0].ready && status.networks[0].attachments == 1,
                "{status:?}"
            );
            cluster.a.runtime.detach(&pod.pod, None).await.expect("detached");
            cluster.a.runtime.remove_network(&"default".into()).await.expect("removed");
            assert_eq!((ours(&cluster.a), tables(&cluster.a)), (Vec::new(), Vec::new()));
        });
    });
}

#[test]
fn changes_are_told() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let one = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let mut changes = cluster.a.runtime.watch().await.expect("a watch");
            let mut next = async || changes.next().await.expect("a change").expect("no error");
            assert_eq!(next().await, Change::Added(one.attachments[0].clone()));
            assert_eq!(next().await, Change::Synced);
            let two = cluster.a.pod(&network, "two", &["10.244.1.6", "fd44::1:6"]).await;
            assert_eq!(next().await, Change::Added(two.attachments[0].clone()));
            cluster.a.runtime.detach(&one.pod, None).await.expect("detached");
            assert_eq!(next().await, Change::Removed(one.attachments[0].clone()));
        });
    });
}

#[test]
fn many_pods_at_once() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            let attach = async |number: u16| {
                let pod = TestPod::new(&format!("pod-{number}"));
                let request =
                    pod.request(&network, &[&format!("10.244.1.{number}"), &format!("fd44::1:{number:x}")]);
                pod.attached(&cluster.a, request).await
            };
            let pods = futures::future::join_all((1..=40).map(attach)).await;
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list").len(), 40);
            let detached = pods.iter().map(|pod| cluster.a.runtime.detach(&pod.pod, None));
            for done in futures::future::join_all(detached).await {
                done.expect("detached");
            }
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list"), []);
        });
    });
}
