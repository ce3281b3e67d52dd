//! What was not heard: with buffers that are soon full, and without a thread, so that all is in order.

use knit_nft::{Family, Nftables, Table, TableId, Transaction};

use super::{Ears, Listen, News};
use crate::link::{Change, NewLink, Peer};
use crate::nft::Kernel;
use crate::testing::{as_stranger, in_namespaces, namespace};
use crate::{Handle, IfName, NetNs, owner};

/// More changes than a small buffer has room for.
const MANY: usize = 100;

fn heard(ears: &mut Ears) -> Vec<News> {
    let mut all = Vec::new();
    ears.hear(&mut |news, _| all.push(news));
    all
}

fn table(name: &str) -> TableId {
    TableId::new(Family::Inet, name)
}

fn create(space: &NetNs, id: &TableId) {
    let mut tx = Transaction::new();
    tx.create_table(Table::new(id.clone()));
    as_stranger(|| Kernel::open_in(space).expect("nftables").commit(&tx).expect("a table"));
}

#[test]
fn what_was_lost_of_the_tables_is_told_once_and_nothing_old_counts_as_heard() {
    in_namespaces(|| {
        let space = namespace();
        let mut ears = Ears::open(&space, Listen::Tables).expect("ears");
        ears.tables.least_receive_buffer();
        (0..MANY).for_each(|number| create(&space, &table(&format!("other{number}"))));
        let all = heard(&mut ears);
        assert_eq!(all.iter().filter(|news| **news == News::Lost).count(), 1, "{all:?}");
        assert!(all.len() > 1 && all.len() < MANY, "some was heard, some was not: {all:?}");
        assert_eq!(all.last(), Some(&News::Lost), "when the queue is empty");
        assert_eq!(ears.generation, None);
        assert_eq!(heard(&mut ears), [], "nothing is left of what was before");
        assert_eq!(ears.generation, None);
        create(&space, &table("knit"));
        assert_eq!(heard(&mut ears), [News::Table(table("knit"))], "from now on all is heard");
        assert_eq!(
            ears.generation,
            Some(Kernel::open_in(&space).expect("nftables").generation().expect("one"))
        );
    });
}

#[test]
fn a_link_whose_making_was_not_heard_is_known_after_the_loss() {
    in_namespaces(|| {
        let (space, pod) = (namespace(), namespace());
        let handle = Handle::open(&space).expect("a handle");
        let name = |name: &str| IfName::new(name).expect("a name");
        let mut ears = Ears::open(&space, Listen::Everything).expect("ears");
        ears.network.as_ref().expect("it listens").socket.least_receive_buffer();
        let lo = handle.index_of(&name("lo")).expect("lo");
        for number in 0..MANY {
            handle.apply(&[Change { up: Some(number % 2 == 0), ..Change::of(lo) }.into()]).expect("flapped");
        }
        let mut link = NewLink::veth(name("knithost"), Peer::new(name("eth0"), &pod));
        (link.alias, link.up) = (Some(owner::alias("pod x")), true);
        let index = handle.create_link(&link).expect("a pair").index;
        assert_eq!(heard(&mut ears), [News::Lost]);
        let network = ears.network.as_ref().expect("it listens");
        network.socket.raise_receive_buffer(super::BUFFER).expect("room");
        as_stranger(|| {
            let theirs = Handle::open(&space).expect("a handle");
            theirs.apply(&[Change { up: Some(false), ..Change::of(index) }.into()]).expect("down");
        });
        assert_eq!(heard(&mut ears), [News::Network], "the link is ours, and is not as it was");
    });
}
