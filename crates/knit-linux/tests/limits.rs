//! One tenant that does its worst, and others that do not notice; and an upgrade that takes nothing from
//! others.

mod support;

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::netlink::{Message, Protocol, Socket};
use knit_kernel::nft::Kernel;
use knit_kernel::op::Op;
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::in_namespaces;
use knit_nft::{Family, Nftables, TableId};
use knit_runtime::{NetworkUsage, Runtime as _};
use support::{Cluster, NEVER, SOON, Talk, blue, default_network, green, ip, name, net, run, udp};

/// How many of `count` connections, each from a socket of its own, arrive at `to` in the outside.
fn connections(pod: &NetNs, outside: &NetNs, to: SocketAddr, count: usize) -> usize {
    let listener = outside.run(|| UdpSocket::bind(to)).expect("in").expect("bound");
    let any: IpAddr = if to.is_ipv4() { ip("0.0.0.0") } else { ip("::") };
    let mut arrived = 0;
    let sent = |arrived: &mut usize, wait: Duration| {
        listener.set_read_timeout(Some(wait)).expect("a timeout");
        while listener.recv_from(&mut [0; 8]).is_ok() {
            *arrived += 1;
        }
    };
    // In handfuls, so that the listener's buffer holds them.
    for _ in 0..count / 50 {
        for _ in 0..50 {
            let socket = pod.run(|| UdpSocket::bind((any, 0))).expect("in").expect("bound");
            socket.send_to(b"hello", to).expect("sent");
        }
        sent(&mut arrived, Duration::from_millis(1));
    }
    sent(&mut arrived, NEVER);
    arrived
}

/// What a Network uses, and was refused.
async fn usage(cluster: &Cluster, network: &str) -> NetworkUsage {
    let all = cluster.a.runtime.usage().await.expect("numbers");
    all.into_iter().find(|usage| usage.network == network).expect("the Network")
}

/// Whether new connections are let through. One datagram may be lost where tests beside this one flood the
/// machine's queues; where a limit is reached, all of them are.
fn gets_through(from: &NetNs, outside: &NetNs, to: IpAddr, port: u16) -> bool {
    (0..5).any(|_| udp(from, outside, to, port, Duration::from_secs(5)) != Talk::Silence)
}

#[test]
fn a_tenant_that_opens_connections_without_end_leaves_others_room() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::new();
            cluster.a.restart_with(|config| config.uplink_connections = 512);
            cluster.a.setup(&default_network()).await;
            cluster.a.setup(&blue(&cluster.a)).await;
            cluster.a.setup(&green(&cluster.a)).await;
            // On a slow machine the first ones would be forgotten, and make room, before the last ones are
            // tried.
            let timeout = Sysctl::new("net/netfilter/nf_conntrack_udp_timeout").expect("a name");
            for space in [&cluster.a.space, &cluster.a.router("blue")] {
                Sysctls::of(space).expect("sysctls").set(&timeout, 3600).expect("set");
            }
            let greedy = cluster.a.pod(&blue(&cluster.a), "greedy", &["10.77.0.18", "fd77::12"]).await;
            let modest = cluster.a.pod(&green(&cluster.a), "modest", &["10.77.0.34", "fd77::22"]).await;
            // Both families count together.
            let worlds = [ip("203.0.113.9"), ip("2001:db8:99::9")];
            let first = connections(&greedy.space, &cluster.outside, SocketAddr::new(worlds[0], 7000), 1000);
            assert!((100..=560).contains(&first), "{first} of 1000 connections");
            let both = worlds.map(|world| {
                connections(&greedy.space, &cluster.outside, SocketAddr::new(world, 7001), 1500)
            });
            let all = first + both.iter().sum::<usize>();
            assert!(all <= 560, "{first} and {both:?} of 4000 connections");
            for world in worlds {
                for port in 7100..7110 {
                    assert!(gets_through(&modest.space, &cluster.outside, world, port), "{world} {port}");
                }
                assert!(gets_through(&cluster.a.space, &cluster.outside, world, 7200), "the node itself");
            }
            // The numbers name who did it.
            let [greedy, modest] = [usage(&cluster, "blue").await, usage(&cluster, "green").await];
            assert!((3000..=4000).contains(&greedy.refused_connections), "{greedy:?}");
            assert!(greedy.connections >= 3000 && greedy.connections_limit > 0, "{greedy:?}");
            assert_eq!((modest.refused_connections, modest.refused_connections_together), (0, 0));
            assert!((1..1000).contains(&modest.connections), "{modest:?}");
            // They are not taken for damage, and last while Networks are set up again.
            let survey = cluster.a.runtime.survey().await.expect("compared");
            assert!(survey.networks.is_empty(), "{survey:?}");
            cluster.a.setup(&blue(&cluster.a)).await;
            assert_eq!(usage(&cluster, "blue").await.refused_connections, greedy.refused_connections);
        });
    });
}

#[test]
fn two_greedy_networks_filled_the_nodes_whole_table_of_connections() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::new();
            // As on a node whose table has room for twice what one Network may have.
            cluster.a.restart_with(|config| {
                config.uplink_connections = 2048;
                config.uplinks_together = 2048;
            });
            cluster.a.setup(&default_network()).await;
            cluster.a.setup(&blue(&cluster.a)).await;
            cluster.a.setup(&green(&cluster.a)).await;
            let timeout = Sysctl::new("net/netfilter/nf_conntrack_udp_timeout").expect("a name");
            Sysctls::of(&cluster.a.space).expect("sysctls").set(&timeout, 3600).expect("set");
            let one = cluster.a.pod(&blue(&cluster.a), "one", &["10.77.0.18", "fd77::12"]).await;
            let two = cluster.a.pod(&green(&cluster.a), "two", &["10.77.0.34", "fd77::22"]).await;
            let world = ip("203.0.113.9");
            let [first, second] = [&one, &two]
                .map(|pod| connections(&pod.space, &cluster.outside, SocketAddr::new(world, 7000), 2000));
            assert!(first >= 500, "{first}: one alone has its share");
            // What they share, and the first connections that each has in any case: one in each part.
            assert!(first + second <= 2048 + 2 * 256 + 200, "{first} and {second} of 2000 each");
            assert!(gets_through(&cluster.a.space, &cluster.outside, world, 7200), "the node itself");
            let [one, two] = [usage(&cluster, "blue").await, usage(&cluster, "green").await];
            let together = one.refused_connections_together + two.refused_connections_together;
            let alone = one.refused_connections + two.refused_connections;
            let refused = 4000 - (first + second) as u64;
            assert!(together > 0 && together + alone <= refused, "{one:?} {two:?}, {refused} did not arrive");
        });
    });
}

#[test]
fn greedy_networks_used_up_the_share_of_all_and_a_modest_one_got_no_connection() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::new();
            cluster.a.restart_with(|config| {
                config.uplink_connections = 16_384;
                config.uplinks_together = 2048;
            });
            cluster.a.setup(&default_network()).await;
            cluster.a.setup(&blue(&cluster.a)).await;
            cluster.a.setup(&green(&cluster.a)).await;
            let timeout = Sysctl::new("net/netfilter/nf_conntrack_udp_timeout").expect("a name");
            Sysctls::of(&cluster.a.space).expect("sysctls").set(&timeout, 3600).expect("set");
            let greedy = cluster.a.pod(&blue(&cluster.a), "greedy", &["10.77.0.18", "fd77::12"]).await;
            let modest = cluster.a.pod(&green(&cluster.a), "modest", &["10.77.0.34", "fd77::22"]).await;
            let world = ip("203.0.113.9");
            let most = connections(&greedy.space, &cluster.outside, SocketAddr::new(world, 7000), 8000);
            // Counted in parts, and about.
            assert!(most <= 3000, "{most} of 8000: what all share is used up");
            let refused = usage(&cluster, "blue").await;
            assert!(refused.refused_connections_together > 0, "{refused:?}");
            for port in 7100..7110 {
                assert!(gets_through(&modest.space, &cluster.outside, world, port), "{port}");
            }
        });
    });
}

/// How many neighbours a namespace is asking for: the kernel cannot evict these.
fn asked_for(space: &NetNs) -> usize {
    const RTM_GETNEIGH: u16 = 30;
    const NUD_INCOMPLETE: u16 = 1;
    let mut socket = Socket::open_in(Protocol::Route, space).expect("a socket");
    let each = |count: &mut usize, message: Message<'_>| {
        let (header, _) = message.split::<12>()?;
        *count += usize::from(u16::from_ne_bytes([header[8], header[9]]) & NUD_INCOMPLETE != 0);
        Ok(())
    };
    socket.dump(RTM_GETNEIGH, |w| _ = w.fixed(&[0; 12]), || 0, each).expect("neighbours")
}

#[test]
fn a_router_asks_nobody_for_addresses_that_nobody_has() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let network = blue(&cluster.a);
            let pod = cluster.a.pod(&network, "scanner", &["10.77.0.18", "fd77::12"]).await;
            let other = cluster.a.pod(&network, "other", &["10.77.0.19", "fd77::13"]).await;
            let far = cluster.b.pod(&blue(&cluster.b), "far", &["10.77.0.34", "fd77::22"]).await;
            let handle = pod.handle();
            let eth0 = handle.index_of(&name("eth0")).expect("eth0");
            // A pod may send what is on its segment to its gateway as well.
            for (to, via) in [("10.77.0.128/25", "10.77.0.1"), ("fd77::8000/113", "fd77::1")] {
                let route = Route::to(net(to)).dev(eth0).via(ip(via));
                handle.apply(&[Op::create(route)]).expect("a route");
            }
            let (v4, v6) = (
                pod.space.run(|| UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound"),
                pod.space.run(|| UdpSocket::bind("[::]:0")).expect("in").expect("bound"),
            );
            for number in 130..230 {
                v4.send_to(b"x", (format!("10.77.0.{number}").as_str(), 9)).expect("sent");
                v6.send_to(b"x", (format!("fd77::8{number:03x}").as_str(), 9)).expect("sent");
            }
            assert_eq!(asked_for(&cluster.a.router("blue")), 0);
            for (target, server) in [("10.77.0.19", &other), ("fd77::13", &other), ("10.77.0.34", &far)] {
                assert_ne!(udp(&pod.space, &server.space, ip(target), 5000, SOON), Talk::Silence, "{target}");
                assert_ne!(udp(&cluster.a.space, &pod.space, ip("10.77.0.18"), 5000, SOON), Talk::Silence);
            }
        });
    });
}

/// Packets that were dropped because a port asked too often: ARP requests, neighbour solicitations.
fn too_many(router: &NetNs) -> [u64; 2] {
    let mut kernel = Kernel::open_in(router).expect("nftables");
    let table = kernel.table(&TableId::new(Family::Bridge, "knit")).expect("a listing").expect("a table");
    ["port", "icmp6"].map(|chain| {
        let rules = table.chains[chain].rules.iter();
        let ours = rules.filter(|rule| rule.rule.comment.as_deref() == Some("too many"));
        ours.filter_map(|rule| rule.counter).map(|(packets, _)| packets).sum()
    })
}

#[test]
fn a_switched_pod_that_asks_for_everybody_is_slowed_down_alone() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let network = blue(&cluster.a);
            let scanner = cluster.a.pod(&network, "scanner", &["10.77.0.18", "fd77::12"]).await;
            let one = cluster.a.pod(&network, "one", &["10.77.0.19", "fd77::13"]).await;
            let two = cluster.a.pod(&network, "two", &["10.77.0.20", "fd77::14"]).await;
            let router = cluster.a.router("blue");
            let v6 = scanner.space.run(|| UdpSocket::bind("[::]:0")).expect("in").expect("bound");
            let v4 = scanner.space.run(|| UdpSocket::bind("0.0.0.0:0")).expect("in").expect("bound");
            for number in 0..600 {
                // Where the table is full, the kernel says so.
                let _ = v6.send_to(b"x", (format!("fd77::f{number:03x}").as_str(), 9));
                let _ = v4.send_to(b"x", (format!("10.77.0.{}", 60 + number % 190).as_str(), 9));
            }
            let [arp, solicitations] = too_many(&router);
            assert!(arp > 0, "190 ARP requests among 600 questions");
            assert!(solicitations > 0, "600 neighbour solicitations");
            let counted = usage(&cluster, "blue").await.refused_questions;
            assert!(counted >= arp + solicitations, "{counted} of {arp} and {solicitations}");
            assert_eq!(usage(&cluster, "green").await.refused_questions, 0);
            for (from, to) in [(&one, "10.77.0.20"), (&one, "fd77::14")] {
                assert_ne!(udp(&from.space, &two.space, ip(to), 5000, SOON), Talk::Silence, "{to}");
            }
        });
    });
}

#[test]
fn an_upgrade_that_changes_a_set_takes_nothing_from_networks_that_are_set_up_later() {
    in_namespaces(|| {
        run(async {
            let mut cluster = Cluster::with_tenants().await;
            let plain = cluster.a.pod(&default_network(), "plain", &["10.244.1.5", "fd44::1:5"]).await;
            let pod = cluster.a.pod(&green(&cluster.a), "green", &["10.77.0.34", "fd77::22"]).await;
            // The version before had other words in its sets.
            let mut kernel = Kernel::open_in(&cluster.a.space).expect("nftables");
            let table = TableId::new(Family::Inet, "knit");
            let mut before = kernel.table(&table).expect("a listing").expect("a table").without_handles();
            for state in before.sets.values_mut().filter(|state| state.set.name.starts_with("uplink")) {
                state.set.comment = Some("as it was".into());
            }
            kernel.apply(&before).expect("the version before");
            cluster.a.restart();
            cluster.a.setup(&blue(&cluster.a)).await;
            let now = kernel.table(&table).expect("a listing").expect("a table");
            assert!(now.sets["uplinks"].set.comment.as_deref() != Some("as it was"), "it was upgraded");
            for world in ["203.0.113.9", "2001:db8:99::9"] {
                assert_ne!(
                    udp(&pod.space, &cluster.outside, ip(world), 5000, SOON),
                    Talk::Silence,
                    "{world}"
                );
            }
            for target in ["10.77.0.34", "fd77::22"] {
                let talk = udp(&plain.space, &pod.space, ip(target), 5002, NEVER);
                assert_eq!(talk, Talk::Silence, "{target} from the default Network");
            }
        });
    });
}
