//! Real notifications: what others do is heard, what this process does is not, and a pod's own link is no
//! news.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::nft::{Chain, ChainKind, Family, Hook, Kernel, Nftables, Table, TableId, Transaction};
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{as_stranger, eventually, in_namespaces, namespace};
use knit_kernel::watch::{Listen, News, Watcher};
use knit_kernel::{Handle, IfName, NetNs, owner};

const SOON: Duration = Duration::from_secs(20);

fn watch(space: &NetNs) -> (Watcher, Receiver<News>) {
    let (sender, receiver) = channel();
    let watcher = Watcher::start(move |_, news| _ = sender.send(news)).expect("a watcher");
    watcher.add(space, Listen::Everything).expect("listens");
    (watcher, receiver)
}

fn knit() -> TableId {
    TableId::new(Family::Inet, "knit")
}

/// Nothing but what is made afterwards by a stranger, which proves that all before it was heard.
#[track_caller]
fn quiet(space: &NetNs, news: &Receiver<News>) {
    let marker = TableId::new(Family::Inet, "marker");
    as_stranger(|| {
        let mut tx = Transaction::new();
        tx.create_table(Table::new(marker.clone())).delete_table(&marker);
        Kernel::open_in(space).expect("nftables").commit(&tx).expect("the marker");
    });
    assert_eq!(news.recv_timeout(SOON), Ok(News::Table(marker)));
    assert_eq!(news.recv_timeout(Duration::from_millis(50)), Err(RecvTimeoutError::Timeout));
}

#[test]
fn a_strangers_change_of_a_table_is_heard_and_our_own_is_not() {
    in_namespaces(|| {
        let space = namespace();
        let (watcher, news) = watch(&space);
        let mut ours = Kernel::open_in(&space).expect("nftables");
        let mut tx = Transaction::new();
        tx.create_table(Table::new(knit()));
        tx.add_chain(&knit(), Chain::base("guard", ChainKind::Filter, Hook::Forward, 0));
        ours.commit(&tx).expect("a table");
        quiet(&space, &news);
        let generation = ours.generation().expect("a generation");
        eventually("all is heard", SOON, || watcher.heard(space.id()) == Some(generation));

        as_stranger(|| {
            let mut tx = Transaction::new();
            tx.delete_table(&knit());
            Kernel::open_in(&space).expect("nftables").commit(&tx).expect("deleted");
        });
        assert_eq!(news.recv_timeout(SOON), Ok(News::Table(knit())));
    });
}

#[test]
fn a_link_that_was_set_down_is_news_and_one_whose_other_end_flaps_is_not() {
    in_namespaces(|| {
        let (space, pod) = (namespace(), namespace());
        let handle = Handle::open(&space).expect("a handle");
        let (host, eth0) = (IfName::new("knithost").expect("a name"), IfName::new("eth0").expect("a name"));
        let (_watcher, news) = watch(&space);
        let mut link = NewLink::veth(host.clone(), Peer::new(eth0.clone(), &pod));
        (link.alias, link.up) = (Some(owner::alias("pod x")), true);
        let index = handle.create_link(&link).expect("a pair").index;
        let inside = Handle::open(&pod).expect("a handle");
        for up in [true, false, true, false, true] {
            inside.apply(&[Change { up: Some(up), ..Change::named(eth0.clone()) }.into()]).expect("flapped");
        }
        // One more, which we delete ourselves.
        let mut gone = NewLink::veth(IfName::new("knitgone").expect("a name"), Peer::new(host.clone(), &pod));
        (gone.alias, gone.up) = (Some(owner::alias("pod y")), true);
        let gone = handle.create_link(&gone).expect("a pair").index;
        let mac = knit_kernel::Mac([2, 0, 0, 0, 0, 7]);
        let address = "10.9.0.7".parse().expect("an address");
        let neighbour = knit_kernel::neigh::Neighbour::permanent(gone, address, mac);
        handle.apply(&[knit_kernel::Op::create(neighbour)]).expect("a neighbour");
        handle.delete_link(gone).expect("deleted");
        quiet(&space, &news);

        as_stranger(|| {
            let theirs = Handle::open(&space).expect("a handle");
            theirs.apply(&[Change { up: Some(false), ..Change::of(index) }.into()]).expect("down");
        });
        assert_eq!(news.recv_timeout(SOON), Ok(News::Network));
    });
}

#[test]
fn a_route_that_was_taken_and_forwarding_that_was_switched_off_are_news() {
    in_namespaces(|| {
        let space = namespace();
        let handle = Handle::open(&space).expect("a handle");
        let lo = handle.index_of(&IfName::new("lo").expect("a name")).expect("lo");
        let route = Route::to("10.9.0.0/24".parse().expect("a range")).dev(lo);
        Sysctls::of(&space).expect("sysctls").set(&Sysctl::ipv4_forwarding(), 1).expect("on");
        let (_watcher, news) = watch(&space);
        handle.apply(&[knit_kernel::Op::create(route)]).expect("a route");
        quiet(&space, &news);

        as_stranger(|| Handle::open(&space).expect("a handle").remove(route).expect("taken"));
        assert_eq!(news.recv_timeout(SOON), Ok(News::Network));
        Sysctls::of(&space).expect("sysctls").set(&Sysctl::ipv4_forwarding(), 0).expect("off");
        assert_eq!(news.recv_timeout(SOON), Ok(News::Network));
    });
}
