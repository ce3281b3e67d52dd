//! A pod that lies about who it is, on the default Network.

mod support;

use std::net::SocketAddr;

use knit_kernel::Op;
use knit_kernel::addr::Address;
use knit_kernel::link::Change;
use knit_kernel::testing::in_namespaces;
use support::{Cluster, NEVER, SOON, Talk, default_network, ip, name, net, run, udp, udp_from};

#[test]
fn a_routed_pod_sends_only_as_itself() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            let bad = cluster.a.pod(&network, "bad", &["10.244.1.5", "fd44::1:5"]).await;
            let good = cluster.a.pod(&network, "good", &["10.244.1.6", "fd44::1:6"]).await;
            let far = cluster.b.pod(&network, "far", &["10.244.2.5", "fd44::2:5"]).await;
            let handle = bad.handle();
            let eth0 = handle.index_of(&name("eth0")).expect("eth0");
            for lie in ["10.244.1.9/32", "192.168.7.1/32", "fd44::1:9/128"] {
                handle
                    .apply(&[Op::create(Address::new(eth0, net(lie)))])
                    .expect("a pod may say what it likes");
            }
            for (lie, to) in [
                ("10.244.1.9", "10.244.1.6"),
                ("10.244.1.9", "10.244.2.5"),
                ("192.168.7.1", "10.244.1.6"),
                ("fd44::1:9", "fd44::1:6"),
                ("fd44::1:9", "fd44::2:5"),
            ] {
                let to = ip(to);
                let server = if [ip("10.244.2.5"), ip("fd44::2:5")].contains(&to) { &far } else { &good };
                assert!(
                    !udp_from(&bad.space, ip(lie), &server.space, SocketAddr::new(to, 5000), NEVER),
                    "{lie}"
                );
            }
            let truth = SocketAddr::new(ip("10.244.1.6"), 5000);
            assert!(udp_from(&bad.space, ip("10.244.1.5"), &good.space, truth, SOON), "as itself it may");
            // Another MAC.
            let mac = knit_kernel::Mac([0x0a, 1, 10, 244, 1, 6]);
            handle.apply(&[Change { mac: Some(mac), ..Change::of(eth0) }.into()]).expect("another MAC");
            assert_eq!(udp(&bad.space, &good.space, ip("10.244.1.6"), 5001, NEVER), Talk::Silence);
        });
    });
}

#[test]
fn a_pod_does_not_reach_the_port_of_tunnels() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let network = default_network();
            cluster.a.setup(&network).await;
            cluster.b.setup(&network).await;
            let pod = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            let other = cluster.a.pod(&network, "two", &["10.244.1.6", "fd44::1:6"]).await;
            for (space, to) in [
                (&cluster.a.space, "192.168.7.1"),
                (&cluster.b.space, "192.168.7.2"),
                (&cluster.a.space, "fd07::1"),
                (&cluster.b.space, "fd07::2"),
            ] {
                assert_eq!(udp(&pod.space, space, ip(to), 4789, NEVER), Talk::Silence, "{to}");
                assert_ne!(udp(&pod.space, space, ip(to), 4788, SOON), Talk::Silence, "{to}");
            }
            // What pods do among themselves is their business.
            assert_ne!(udp(&pod.space, &other.space, ip("10.244.1.6"), 4789, SOON), Talk::Silence);
        });
    });
}
