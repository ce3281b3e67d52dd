//! Real notifications: what others do is heard, what this process does is not, and a pod's own link is no
//! news.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use knit_kernel::link::{Change, NewLink, Peer};
use knit_kernel::nft::Kernel;
use knit_kernel::route::Route;
use knit_kernel::sysctl::{Sysctl, Sysctls};
use knit_kernel::testing::{as_stranger, eventually, in_namespaces, namespace};
use knit_kernel::watch::{Listen, News, Watcher};
use knit_kernel::{Handle, IfName, NetNs, owner};
use knit_nft::{Chain, ChainKind, Family, Hook, Nftables, Table, TableId, Transaction};

const SOON: Duration = Duration::from_secs(20);

fn watch(space: &NetNs) -> (Watcher, Receiver<News>) {
    let (sender, receiver) = channel();
    let watcher = Watcher::start(move |_, news| _ = sender.send(news)).expect("a watcher");
    watcher.add(space, Listen::Everything).expect("listens");
    (watcher, receiver)
}

fn watch_tables(space: &NetNs) -> (Watcher, Receiver<News>) {
    let (sender, receiver) = channel();
    let watcher = Watcher::start(move |_, news| _ = sender.send(news)).expect("a watcher");
    watcher.add(space, Listen::Tables).expect("listens");
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
        assert!(watcher.catch_up(space.id(), generation, SOON), "all is heard");

        as_stranger(|| {
            let mut tx = Transaction::new();
            tx.delete_table(&knit());
            Kernel::open_in(&space).expect("nftables").commit(&tx).expect("deleted");
        });
        assert_eq!(news.recv_timeout(SOON), Ok(News::Table(knit())));
    });
}

/// Threads of this process that listen.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.expect("a thread").path().join("comm")).unwrap_or_default()
    };
    tasks.map(name).filter(|name| name.trim() == "kernel-watch").count()
}

fn change_as_stranger(space: &NetNs, id: &TableId) {
    let mut tx = Transaction::new();
    tx.create_table(Table::new(id.clone())).delete_table(id);
    as_stranger(|| Kernel::open_in(space).expect("nftables").commit(&tx).expect("a table comes and goes"));
}

#[test]
fn a_change_that_came_while_the_one_before_was_told_was_not_told() {
    in_namespaces(|| {
        let space = namespace();
        let (told, news) = channel();
        let (go_on, wait) = channel::<()>();
        let watcher = Watcher::start(move |_, what| {
            // Who is gone hears nothing more.
            let _ = told.send(what);
            let _ = wait.recv();
        });
        let watcher = watcher.expect("a watcher");
        watcher.add(&space, Listen::Tables).expect("listens");
        change_as_stranger(&space, &knit());
        assert_eq!(news.recv_timeout(SOON), Ok(News::Table(knit())));
        // Whoever was told looks at the table; and before the thread reads on, it is changed again.
        change_as_stranger(&space, &knit());
        drop(go_on);
        assert_eq!(news.recv_timeout(SOON), Ok(News::Table(knit())));
    });
}

#[test]
fn any_number_of_watchers_share_one_thread_and_each_hears_what_it_listens_to() {
    in_namespaces(|| {
        let (space, other) = (namespace(), namespace());
        let (sender, tables) = channel();
        let first = Watcher::start(move |id, news| _ = sender.send((id, news))).expect("a watcher");
        first.add(&space, Listen::Tables).expect("listens");
        // More is listened to from here on, and what the first one hears goes on.
        let (second, everything) = watch(&space);
        second.add(&other, Listen::Everything).expect("listens");
        eventually("there is one thread", SOON, || threads() == 1);

        as_stranger(|| Sysctls::of(&space).expect("sysctls").set(&Sysctl::ipv4_forwarding(), 1)).expect("on");
        assert_eq!(everything.recv_timeout(SOON), Ok(News::Network));
        change_as_stranger(&other, &knit());
        assert_eq!(everything.recv_timeout(SOON), Ok(News::Table(knit())));
        change_as_stranger(&space, &knit());
        assert_eq!(everything.recv_timeout(SOON), Ok(News::Table(knit())));
        assert_eq!(
            tables.recv_timeout(SOON),
            Ok((space.id(), News::Table(knit()))),
            "neither the network nor another namespace"
        );

        drop(second);
        change_as_stranger(&space, &knit());
        assert_eq!(tables.recv_timeout(SOON), Ok((space.id(), News::Table(knit()))));
        assert!(everything.recv().is_err(), "nothing can be told to who is gone");
        drop(first);
        eventually("it has ended", SOON, || threads() == 0);
        // And again, from the start.
        let (_third, news) = watch(&space);
        change_as_stranger(&space, &knit());
        assert_eq!(news.recv_timeout(SOON), Ok(News::Table(knit())));
    });
}

#[test]
fn whoever_joins_while_something_is_being_heard_is_told_that_it_missed_something() {
    in_namespaces(|| {
        let space = namespace();
        // The first one is being told, and the thread waits for it.
        let (entered, is_told) = channel();
        let (go_on, wait) = channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        let slow = Watcher::start(move |_, _| {
            let _ = entered.send(());
            let _ = wait.lock().expect("one thread").recv();
        });
        let slow = slow.expect("a watcher");
        slow.add(&space, Listen::Tables).expect("listens");
        change_as_stranger(&space, &knit());
        is_told.recv_timeout(SOON).expect("told");
        let (late, news) = watch_tables(&space);
        drop(go_on);
        assert_eq!(news.recv_timeout(SOON), Ok(News::Lost));
        let generation = Kernel::open_in(&space).expect("nftables").generation().expect("one");
        assert!(late.catch_up(space.id(), generation, SOON));
    });
}

#[test]
fn whoever_cannot_wait_is_not_held_up_by_the_gathering_of_notifications() {
    in_namespaces(|| {
        let space = namespace();
        let (watcher, _news) = watch(&space);
        let mut ours = Kernel::open_in(&space).expect("nftables");
        // Far more of them than there is time for if each waited for the end of an interval.
        for number in 0..200 {
            change_as_stranger(&space, &TableId::new(Family::Inet, format!("other{number}")));
            let generation = ours.generation().expect("a generation");
            assert!(watcher.catch_up(space.id(), generation, SOON), "all is heard");
        }
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
