//! macvlan links, and namespaces by their numbers.

mod support;

use knit_kernel::addr::Address;
use knit_kernel::handle::LinkFilter;
use knit_kernel::link::{Change, Details, Macvlan, MacvlanMode, NewLink};
use knit_kernel::links::LinkList;
use knit_kernel::testing::in_namespaces;
use knit_kernel::{Mtu, Op, owner};
use support::*;

#[test]
fn a_child_is_made_in_another_namespace_and_carries_packets() {
    in_namespaces(|| {
        let (host, far, pod) = (node(), node(), node());
        wire(&host, "eth1", "10.0.0.1/24", &far, "10.0.0.2/24");
        let parent = host.link_by_name(&name("eth1")).expect("a look").expect("there");
        assert!(parent.carrier);
        let child =
            Macvlan { parent: parent.index, mode: MacvlanMode::Bridge, namespace: Some(pod.namespace()) };
        let new = NewLink {
            mac: Some(mac("02:00:00:00:00:07")),
            mtu: Some(Mtu::new(1400).expect("fine")),
            ..NewLink::macvlan(name("net1"), child)
        };
        let made = host.create_link(&new).expect("created");
        assert!(host.create_link(&new).expect_err("taken").is_exists());
        assert_eq!(host.link_by_name(&name("net1")).expect("a look"), None, "it was never here");
        let inside = pod.link_by_name(&name("net1")).expect("a look").expect("there");
        assert_eq!((inside.index, inside.kind.as_str(), inside.mtu), (made.index, "macvlan", 1400));
        assert_eq!((inside.mac, inside.link, inside.group), (new.mac, Some(parent.index), owner::GROUP));
        assert_eq!(inside.details, Details::Macvlan(MacvlanMode::Bridge));
        let net = "10.0.0.7/24".parse().expect("a prefix");
        let ops: [Op<'_>; 2] =
            [Op::create(Address::new(inside.index, net)), Change::of(inside.index).up().into()];
        pod.apply(&ops).expect("an address");
        must_reach(&pod, &far, "10.0.0.2");
        must_reach(&far, &pod, "10.0.0.7");
        let marked = NewLink { alias: Some("mine".into()), ..new };
        let error = host.create_link(&marked).expect_err("it cannot be told that from here");
        assert!(error.to_string().contains("from inside"), "{error}");
    });
}

#[test]
fn links_elsewhere_are_found_and_deleted_by_the_namespaces_number() {
    in_namespaces(|| {
        let (room, pod, third) = (node(), node(), node());
        wire(&pod, "eth1", "10.0.0.1/24", &third, "10.0.0.2/24");
        let (number, eth1) = (1_234_567_890, name("eth1"));
        assert_eq!(room.number_of(pod.namespace()).expect("asked"), None);
        assert_eq!(room.distant(number).link_by_name(&eth1).expect("a look"), None, "nobody has it");
        assert_eq!(room.distant(number).links(&LinkFilter::default()).expect("a list"), []);
        assert_eq!(room.number_namespace(pod.namespace(), number).expect("given"), number);
        assert_eq!(room.number_namespace(pod.namespace(), 5).expect("kept"), number);
        room.number_namespace(third.namespace(), number).expect_err("another one's");
        assert_eq!(room.numbered_namespaces().expect("a list"), [number]);
        let there = room.distant(number);
        let link = there.link_by_name(&eth1).expect("a look").expect("there");
        assert_eq!(pod.link_by_name(&eth1).expect("a look").expect("there").index, link.index);
        let filter = LinkFilter { kind: Some("veth"), ..LinkFilter::default() };
        assert_eq!(there.links(&filter).expect("a list").len(), 1);
        let addresses: Vec<String> = there
            .addresses(link.index)
            .expect("a list")
            .into_iter()
            .map(|address| address.address.to_string())
            .filter(|text| text.starts_with("10."))
            .collect();
        assert_eq!(addresses, ["10.0.0.1/24"]);
        assert!(there.delete_link(link.index).expect("deleted"));
        assert!(!there.delete_link(link.index).expect("deleted already"));
        assert_eq!(pod.link_by_name(&eth1).expect("a look"), None);
    });
}
