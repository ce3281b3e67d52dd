//! What a request may ask for, and what setting up does to the node.

mod support;

use knit_kernel::handle::RouteFilter;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::testing::in_namespaces;
use knit_runtime::{Reason, Route, Runtime};
use support::{Cluster, SOON, Talk, TestPod, blue, default_network, green, ip, name, net, run, udp};

#[test]
fn a_wanted_mac_and_extra_routes_are_given() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let mac: knit_ipam::Mac = "02:00:5e:10:00:07".parse().expect("a MAC");
            for (network, addresses) in [
                (default_network(), ["10.244.1.5", "fd44::1:5"]),
                (blue(&cluster.a), ["10.77.0.18", "fd77::12"]),
                (green(&cluster.a), ["10.77.0.34", "fd77::22"]),
            ] {
                let pod = TestPod::new(&network.name);
                let mut request = pod.request(&network, &addresses);
                request.mac = Some(mac);
                request.routes = vec![Route { destination: net("198.51.100.0/24"), via: None }];
                let pod = pod.attached(&cluster.a, request).await;
                assert_eq!(pod.attachments[0].mac, mac);
                let link = pod.handle().link_by_name(&name("eth0")).expect("a look").expect("eth0");
                assert_eq!(link.mac, Some(knit_kernel::Mac(mac.octets())));
                let routes = pod.handle().routes(&RouteFilter::default()).expect("routes");
                let extra = routes.iter().find(|route| route.destination == net("198.51.100.0/24"));
                assert_eq!(extra.expect("the extra route").gateway, network.gateway_for(ip("198.51.100.1")));
                for world in ["203.0.113.9", "2001:db8:99::9"] {
                    assert_ne!(udp(&pod.space, &cluster.outside, ip(world), 5000, SOON), Talk::Silence);
                }
            }
        });
    });
}

#[test]
fn what_cannot_be_given_is_refused() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_tenants().await;
            let pod = TestPod::new("one");
            let network = default_network();
            let good = pod.request(&network, &["10.244.1.5", "fd44::1:5"]);
            let reason =
                async |request| cluster.a.runtime.attach(&request).await.expect_err("refused").reason;
            let gateway = pod.request(&network, &["10.244.255.254", "fd44::1:5"]);
            assert_eq!(reason(gateway).await, Reason::Invalid);
            let router = pod.request(&blue(&cluster.a), &["10.77.0.17", "fd77::12"]);
            assert_eq!(reason(router).await, Reason::Invalid);
            let mut group = good.clone();
            group.mac = Some("01:00:5e:00:00:01".parse().expect("a MAC"));
            assert_eq!(reason(group).await, Reason::Invalid);
            let mut route = good.clone();
            route.routes = vec![Route { destination: net("198.51.100.0/24"), via: Some(ip("10.244.1.9")) }];
            assert_eq!(reason(route).await, Reason::Invalid);
            assert_eq!(cluster.a.runtime.list(None).await.expect("a list"), []);
        });
    });
}

#[test]
fn forwarding_goes_on_and_router_advertisements_are_still_taken() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::new();
            let sysctls = Sysctls::of(&cluster.a.space).expect("sysctls");
            let uplink = name("eth0");
            let accept = Sysctl::accept_ra(Scope::Link(&uplink));
            assert_eq!(sysctls.get(&accept).expect("read"), "1");
            cluster.a.setup(&default_network()).await;
            assert_eq!(sysctls.get(&Sysctl::ipv4_forwarding()).expect("read"), "1");
            assert_eq!(sysctls.get(&Sysctl::ipv6_forwarding()).expect("read"), "1");
            assert_eq!(sysctls.get(&accept).expect("read"), "2");
        });
    });
}

#[test]
fn an_mtu_is_given_and_checked() {
    in_namespaces(|| {
        run(async {
            let cluster = Cluster::with_mtu(1400);
            let mut network = default_network();
            cluster.a.setup(&network).await;
            let one = cluster.a.pod(&network, "one", &["10.244.1.5", "fd44::1:5"]).await;
            assert_eq!(one.attachments[0].mtu, 1400);
            let link = one.handle().link_by_name(&name("eth0")).expect("a look").expect("eth0");
            assert_eq!(link.mtu, 1400);
            cluster.a.setup(&blue(&cluster.a)).await;
            let two = cluster.a.pod(&blue(&cluster.a), "two", &["10.77.0.18", "fd77::12"]).await;
            assert_eq!(two.attachments[0].mtu, 1350);
            network.mtu = Some(1500);
            let error = cluster.a.runtime.setup_network(&network).await.expect_err("too much");
            assert_eq!(error.reason, Reason::Invalid);
            assert!(error.message.contains("1400") && error.message.contains("eth0"), "{error}");
            network.mtu = Some(1300);
            cluster.a.setup(&network).await;
            let three = cluster.a.pod(&network, "three", &["10.244.1.7", "fd44::1:7"]).await;
            assert_eq!(three.attachments[0].mtu, 1300);
            // The pod from before keeps what it has, and is not damaged by it.
            cluster.a.runtime.check(&one.pod, None, None).await.expect("whole");
            let again = cluster.a.runtime.attach(&one.request(&network, &["10.244.1.5", "fd44::1:5"])).await;
            assert_eq!(again.expect("the same answer"), one.attachments[0]);
        });
    });
}
