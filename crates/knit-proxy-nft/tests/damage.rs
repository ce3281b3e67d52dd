//! Against the kernel: what others do to the tables of Services is found by comparing, without a
//! notification; it is repaired, counted as what it is, and not looked for where nobody can have been.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::testing::{eventually, in_namespaces, namespace, table_damages};
use knit_nft::{Chain, Family as TableFamily, TableId, Transaction};
use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
use knit_proxy::view::{View, ViewConfig};
use knit_proxy_nft::{Config, NftBackend};
use knit_testbed::tables::{commit_as_stranger, elsewhere_in_the_rule_set, read};

const SOON: Duration = Duration::from_secs(60);

fn view() -> View {
    let mut view = View::new(ViewConfig::default(), NodeInfo::new("node-a"));
    for n in 1..=3_u8 {
        let name = format!("shop/web-{n}");
        let service = Service::new(name.as_str()).cluster_ip([10, 96, 0, n].into());
        view.set_service(service.port(Protocol::Tcp, 80));
        let addresses = [[10, 1, 0, n].into(), [10, 1, 1, n].into()];
        let group = format!("{name}-1");
        view.set_group(EndpointGroup::of_addresses(
            group.as_str(),
            name.as_str(),
            Protocol::Tcp,
            8080,
            &addresses,
        ));
    }
    view.take_changes();
    view
}

/// A backend that counts what it repaired.
fn backend(space: &NetNs) -> (NftBackend, Arc<AtomicUsize>) {
    let repairs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&repairs);
    let backend = NftBackend::new_in(space, Config::default()).expect("a backend");
    let backend = backend.on_repair(Box::new(move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
    }));
    (backend, repairs)
}

fn services() -> TableId {
    TableId::new(TableFamily::Ip, "knit-proxy")
}

#[test]
fn damage_to_the_tables_of_services_is_found_by_comparing_and_counted_once() {
    in_namespaces(|| {
        let (space, view) = (namespace(), view());
        // Nobody tells it anything: it compares.
        let (mut backend, repairs) = backend(&space);
        assert_eq!(backend.sync(view.current()), Outcome::Done);
        assert_eq!(repairs.load(Ordering::Relaxed), 0, "to begin is no repair");
        let before = read(&space, &services());
        for (count, (what, damage)) in
            table_damages(&space, &services(), "endpoints", "services").iter().enumerate()
        {
            assert!(backend.is_intact(), "before {what}");
            commit_as_stranger(&space, damage);
            assert!(!backend.is_intact(), "{what}");
            assert_eq!(backend.sync(view.current()), Outcome::Done, "{what}");
            assert_eq!(read(&space, &services()), before, "{what}");
            assert_eq!(repairs.load(Ordering::Relaxed), count + 1, "{what}");
        }
    });
}

#[test]
fn a_change_that_meets_damage_puts_it_right_and_is_counted() {
    in_namespaces(|| {
        let (space, mut view) = (namespace(), view());
        let (mut backend, repairs) = backend(&space);
        assert_eq!(backend.sync(view.current()), Outcome::Done);
        let mut tx = Transaction::new();
        tx.delete_table(&services());
        commit_as_stranger(&space, &tx);
        view.set_service(Service::new("shop/new").cluster_ip([10, 96, 0, 9].into()).port(Protocol::Tcp, 80));
        let changes = view.take_changes();
        assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
        assert_eq!(repairs.load(Ordering::Relaxed), 1);
        assert!(read(&space, &services()).contains("10.96.0.9"));
    });
}

#[test]
fn changes_of_services_and_of_the_node_are_no_repairs() {
    in_namespaces(|| {
        let (space, mut view) = (namespace(), view());
        let (mut backend, repairs) = backend(&space);
        assert_eq!(backend.sync(view.current()), Outcome::Done);
        view.set_service(Service::new("shop/new").cluster_ip([10, 96, 0, 9].into()).port(Protocol::Tcp, 80));
        view.take_changes();
        assert_eq!(backend.sync(view.current()), Outcome::Done);
        view.set_service_ranges("kubernetes", vec!["10.96.0.0/16".parse().expect("a range")]);
        let changes = view.take_changes();
        assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
        assert_eq!(repairs.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn tables_that_nobody_touched_are_not_read_again_whatever_others_do_to_theirs() {
    in_namespaces(|| {
        let (space, mut view) = (namespace(), view());
        let (mut backend, repairs) = backend(&space);
        let (tell, told) = mpsc::channel();
        backend.watch(Box::new(move || _ = tell.send(())));
        assert_eq!(backend.sync(view.current()), Outcome::Done);
        assert!(backend.is_intact());
        // Our own changes, and others' to what is theirs.
        view.delete_service(&"shop/web-3".into());
        let changes = view.take_changes();
        assert_eq!(backend.apply(&changes, view.current()), Outcome::Done);
        commit_as_stranger(&space, &elsewhere_in_the_rule_set("firewall"));
        eventually("all of that is heard", SOON, || backend.is_intact());
        assert!(told.try_recv().is_err(), "nobody touched our tables");
        // What changes nothing is a touch, and no repair.
        let mut tx = Transaction::new();
        tx.add_chain(&services(), Chain::regular("strange"));
        commit_as_stranger(&space, &tx);
        let mut tx = Transaction::new();
        tx.delete_chain(&services(), "strange");
        commit_as_stranger(&space, &tx);
        told.recv_timeout(SOON).expect("the touch is heard");
        assert!(!backend.is_intact());
        assert_eq!(backend.sync(view.current()), Outcome::Done);
        assert_eq!(repairs.load(Ordering::Relaxed), 0);
        eventually("it is known again", SOON, || backend.is_intact());
    });
}
