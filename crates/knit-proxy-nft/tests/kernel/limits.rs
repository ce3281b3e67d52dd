//! Much of everything: services, endpoints, clients, and other programs that commit all the time.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::nft::Kernel;
use knit_kernel::testing::{eventually, in_namespaces};
use knit_nft::{
    Element, ElementValue, Family as TableFamily, Mark, Nftables, Scalar, Set, TableId, Transaction,
};
use knit_proxy::model::{Affinity, EndpointGroup, NodeInfo, Protocol, Service};
use knit_proxy::view::{View, ViewConfig};
use knit_proxy_testkit::World;

use crate::support::*;

#[test]
fn thousands_of_services_go_in_without_privilege() {
    in_namespaces(|| {
        let node = knit_kernel::testing::namespace();
        let mut view = View::new(ViewConfig::default(), NodeInfo::new("node"));
        for n in 0..3000u32 {
            let name = format!("ns/s{n}");
            let ip = Ipv4Addr::from(0x0a60_0000 + n);
            let mut service = Service::new(name.as_str()).cluster_ip(ip.into()).port(Protocol::Tcp, 80);
            service.affinity = (n % 10 == 0).then(Affinity::default);
            view.set_service(service);
            let endpoints: Vec<_> = (0..5).map(|e| Ipv4Addr::from(0x0a01_0000 + n * 5 + e).into()).collect();
            let group = format!("{name}-1");
            view.set_group(EndpointGroup::of_addresses(
                group.as_str(),
                name.as_str(),
                Protocol::Tcp,
                80,
                &endpoints,
            ));
        }
        let mut first = backend(&node);
        sync(&mut first, &mut view);
        assert!(first.committed() > 0);
        let mut second = backend(&node);
        sync(&mut second, &mut view);
        assert_eq!(second.committed(), 0);
    });
}

#[test]
fn a_hundred_thousand_endpoints_in_one_service_leave_the_others_as_they_are() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        echo(&world, "pod-a", "10.1.0.1:8080");
        let mut view = view();
        view.set_service(web());
        view.set_group(group("shop/web", Protocol::Tcp, 8080, &["10.1.0.1"]));
        let huge = Service::new("shop/huge").cluster_ip("10.96.0.2".parse().unwrap()).port(Protocol::Tcp, 80);
        view.set_service(huge);
        let all: Vec<_> = (0..100_000u32).map(|n| Ipv4Addr::from(0x0a80_0000 + n).into()).collect();
        let huge =
            |count| EndpointGroup::of_addresses("shop/huge-1", "shop/huge", Protocol::Tcp, 80, &all[..count]);
        view.set_group(huge(100_000));
        let mut backend = backend(world.node());
        sync(&mut backend, &mut view);
        ping(&mut connect(&world, "pod-b", "10.96.0.1:80"), b"here");
        view.set_group(huge(99_999));
        apply(&mut backend, &mut view);
        ping(&mut connect(&world, "pod-b", "10.96.0.1:80"), b"here");
        // One who reads it all back finds little to do: a chain for more endpoints than anybody has now (its
        // element, its rules, itself). And while the kernel still makes room in the set, a listing of it
        // leaves some elements out: these are put in again, which changes nothing.
        let mut left = || {
            let mut again = self::backend(world.node());
            sync(&mut again, &mut view);
            again.committed()
        };
        let first = left();
        assert!(first <= 4, "{first}");
        eventually("nothing is left to do", Duration::from_secs(60), || left() == 0);
    });
}

/// Another program on the node that commits all the time, in a table of its own, until it is dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Busy {
    fn start(node: &NetNs) -> Self {
        let mut nft = Kernel::open_in(node).expect("a socket");
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let work = move || {
            let id = TableId::new(TableFamily::Inet, "somebody-elses");
            let mut commits = 0;
            while !asked.load(Ordering::Relaxed) {
                let mut tx = Transaction::new();
                tx.add_table(id.clone());
                nft.commit(&tx).expect("made");
                let mut tx = Transaction::new();
                tx.delete_table(&id);
                nft.commit(&tx).expect("deleted");
                commits += 2;
            }
            commits
        };
        Self { stop, thread: Some(std::thread::spawn(work)) }
    }

    fn end(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("a thread").join().expect("it ends")
    }
}

#[test]
fn rule_57_a_full_sync_gets_through_where_others_commit_without_a_pause() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        let mut view = view();
        for n in 0..1500u16 {
            let [high, low] = n.to_be_bytes();
            let (name, ip) = (format!("shop/s{n}"), Ipv4Addr::new(10, 96, high, low));
            view.set_service(Service::new(name.as_str()).cluster_ip(ip.into()).port(Protocol::Tcp, 80));
            view.set_group(group(&name, Protocol::Tcp, 8080, &["10.1.0.1", "10.1.0.2", "10.1.1.1"]));
        }
        let mut first = backend(world.node());
        sync(&mut first, &mut view);
        let busy = Busy::start(world.node());
        // A restart that finds everything as it should be, and one that finds a service too many.
        let mut second = backend(world.node());
        sync(&mut second, &mut view);
        assert_eq!(second.committed(), 0, "all was right already");
        view.delete_service(&"shop/s7".into());
        let mut third = backend(world.node());
        sync(&mut third, &mut view);
        assert!(third.committed() > 0);
        assert!(busy.end() > 0);
    });
}

#[test]
fn rule_40_one_service_with_more_clients_than_can_be_remembered_leaves_the_others_theirs() {
    in_namespaces(|| {
        let world = World::new().expect("a world");
        for (host, at) in [("pod-a", "10.1.0.1:8080"), ("remote-a", "10.1.1.1:8080")] {
            echo(&world, host, at);
        }
        let mut view = view();
        for (name, ip) in [("shop/attacked", "10.96.0.1"), ("shop/other", "10.96.0.2")] {
            let service = Service::new(name).cluster_ip(ip.parse().unwrap()).port(Protocol::Tcp, 80);
            view.set_service(Service { affinity: Some(Affinity::default()), ..service });
            view.set_group(group(name, Protocol::Tcp, 8080, &["10.1.0.1", "10.1.1.1"]));
        }
        let mut backend = backend(world.node());
        sync(&mut backend, &mut view);
        let mut nft = Kernel::open_in(world.node()).expect("a socket");
        let id = TableId::new(TableFamily::Ip, "knit-proxy");
        let clients = |nft: &mut Kernel| -> Vec<Set> {
            let table = nft.table(&id).expect("a listing").expect("the table");
            table.sets.into_values().map(|state| state.set).filter(|set| set.dynamic).collect()
        };
        let remembered = |nft: &mut Kernel, set: &Set| nft.elements(&id, set).expect("a listing").len();
        let ask = |to: &str| ping(&mut connect(&world, "pod-b", to), b"ping");
        // Whoever asks is remembered somewhere: that is the attacked one's set, which is filled with others.
        ask("10.96.0.1:80");
        let set = clients(&mut nft).into_iter().find(|set| remembered(&mut nft, set) == 1).expect("a client");
        let size = set.size.expect("it is limited");
        let spoofed = (1..size).map(|n| {
            let mut element = Element::new(&(Mark(0), Ipv4Addr::from_bits(0xc000_0000 + n)));
            element.value = ElementValue::Data(Mark(1).bytes());
            element
        });
        let mut tx = Transaction::new();
        tx.create_elements(&id, &set, spoofed.collect());
        nft.commit_chunked(&tx).expect("filled");
        assert_eq!(remembered(&mut nft, &set), size as usize);
        // A new client of the other one is remembered, and one of the attacked one is served all the same.
        ask("10.96.0.2:80");
        let others: usize = clients(&mut nft)
            .iter()
            .filter(|other| other.name != set.name)
            .map(|other| remembered(&mut nft, other))
            .sum();
        assert_eq!(others, 1);
        let mut stream = connect(&world, "remote-b", "10.96.0.1:80");
        ping(&mut stream, b"ping");
    });
}
