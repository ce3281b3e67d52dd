//! Half-made links, names that are taken, and the order of undoing, without a kernel.

use std::collections::BTreeSet;

use knit_kernel::link::{Bridge, Peer};
use knit_kernel::links::FakeLinks;
use knit_nft::{Fake, Op};
use knit_runtime::Topology;

use super::*;
use crate::mark::host_name;
use crate::topology;

const EPERM: i32 = 1;

/// A router without a kernel, with one attachment to be made in it.
struct World {
    links: FakeLinks,
    rules: Fake,
    host: IfName,
    mark: Mark,
}

fn name(text: &str) -> IfName {
    IfName::new(text).expect("a name")
}

impl World {
    fn new(topology: Topology) -> Self {
        let mark = Mark {
            sandbox: "one".parse().expect("a sandbox"),
            interface: "eth0".parse().expect("a name"),
            inode: 7,
            digest: 9,
            mac: "0a:01:0a:f4:00:05".parse().expect("a MAC"),
            default_route: true,
            ports: false,
            topology,
            network: None,
            addresses: vec!["10.77.0.5/24".parse().expect("v4"), "fd77::5/64".parse().expect("v6")],
        };
        let (links, mut rules) = (FakeLinks::new(), Fake::new());
        for layout in topology::of(topology).tables(4789) {
            rules.apply(&layout).expect("a table");
        }
        if let Some(master) = topology::of(topology).master() {
            links.create_link(&NewLink::bridge(name(master.name), Bridge::default())).expect("a bridge");
        }
        Self { links, rules, host: host_name(&mark.sandbox, &mark.interface), mark }
    }

    fn make(&mut self, pod: impl FnOnce(Created) -> Result<()>) -> Result<Created> {
        let peer = Peer { name: name("eth0"), namespace: None, mac: None, mtu: None };
        let mut new = NewLink::veth(self.host.clone(), peer);
        new.alias = Some(self.mark.alias());
        if let Some(master) = self.mark.driver().master() {
            new.master = Some(self.links.index_of(&name(master.name)).expect("a bridge"));
            new.port = Some(master.pod_port);
        }
        let port = Port { host: &self.host, mark: &self.mark };
        port.make(&self.links, &mut self.rules, &new, pod)
    }

    fn find(&self, being_made: bool) -> Result<FoundPort> {
        Port { host: &self.host, mark: &self.mark }.find(&self.links, being_made)
    }

    /// All that there is of the attachment: links, what is on them, and elements of sets.
    fn left(&mut self) -> BTreeSet<String> {
        let mut left: BTreeSet<String> = self.links.objects().into_iter().collect();
        let bridge = self.mark.driver().master().map(|master| master.name);
        left.extend(self.links.names().into_iter().filter(|name| Some(name.as_str()) != bridge));
        let table = self.rules.table(&self.mark.driver().sources()).expect("read").expect("a table");
        let sources = table.sets.iter().filter(|(name, _)| name.starts_with("sources"));
        left.extend(
            sources.flat_map(|(name, set)| set.elements.keys().map(move |key| format!("{name} {key:?}"))),
        );
        left
    }
}

const KINDS: [Topology; 2] = [Topology::Layer3, Topology::Layer2];

#[test]
fn whatever_fails_nothing_of_an_attachment_is_left() {
    for kind in KINDS {
        let mut world = World::new(kind);
        let refused = |_| Err(Error::new(Reason::Internal, "the pod's side fails"));
        world.make(refused).expect_err("the pod's side fails");
        assert!(world.left().is_empty(), "{kind:?}: {:?}", world.left());
        for what in ["create veth", "neighbor"] {
            let mut world = World::new(kind);
            world.links.fail(what, EPERM);
            world.make(|_| Ok(())).expect_err(what);
            assert!(world.left().is_empty(), "{kind:?}, {what}: {:?}", world.left());
        }
        let mut world = World::new(kind);
        let made = world.make(|_| Ok(())).expect("made");
        assert!(world.left().len() > 4, "{:?}", world.left());
        let port = Port { host: &world.host, mark: &world.mark };
        port.unmake(&world.links, &mut world.rules, Some(made.index)).expect("unmade");
        assert!(world.left().is_empty(), "{kind:?}: {:?}", world.left());
        let port = Port { host: &world.host, mark: &world.mark };
        port.unmake(&world.links, &mut world.rules, Some(made.index)).expect("unmade already");
    }
}

#[test]
fn rules_are_there_before_the_link_and_go_after_it() {
    for kind in KINDS {
        // A link that cannot be made finds its rules there, and one that cannot be deleted keeps them.
        let mut world = World::new(kind);
        let made = world.make(|_| Ok(())).expect("made");
        world.links.fail("delete veth", EPERM);
        let port = Port { host: &world.host, mark: &world.mark };
        port.unmake(&world.links, &mut world.rules, Some(made.index)).expect_err("it cannot be deleted");
        assert!(world.left().iter().any(|what| what.starts_with("sources")), "{:?}", world.left());

        let mut world = World::new(kind);
        let before = world.rules.committed().len();
        world.links.fail("create veth", EPERM);
        world.make(|_| Ok(())).expect_err("it cannot be made");
        let [put, taken] = &world.rules.committed()[before..] else { panic!("put, and taken away") };
        assert!(matches!(put.ops()[0], Op::AddElements { .. }), "{put:?}");
        assert!(matches!(taken.ops()[0], Op::DeleteElements { .. }), "{taken:?}");
    }
}

#[test]
fn a_name_that_is_taken_in_the_pod_is_said_and_nothing_is_left() {
    for kind in KINDS {
        let mut world = World::new(kind);
        world.links.take_peer_name(name("eth0"));
        let error = world.make(|_| panic!("there is no link")).expect_err("taken");
        assert_eq!(error.reason, Reason::Conflict, "{error}");
        assert!(error.to_string().contains("use another name"), "{error}");
        assert!(world.left().is_empty(), "{:?}", world.left());
    }
}

#[test]
fn a_link_whose_making_was_cut_off_is_told_from_one_of_others() {
    let world = World::new(Topology::Layer3);
    assert_eq!(world.find(false).expect("a look"), FoundPort::Nothing);
    let half = Link { group: owner::GROUP, ..FakeLinks::bare(world.host.clone(), "veth") };
    let index = world.links.add(half);
    assert_eq!(world.find(false).expect("a look"), FoundPort::HalfMade(index));
    let error = world.find(true).expect_err("it is being made by another call");
    assert_eq!(error.reason, Reason::Conflict, "{error}");
    for strange in [
        FakeLinks::bare(world.host.clone(), "veth"),
        Link { group: owner::GROUP, ..FakeLinks::bare(world.host.clone(), "bridge") },
        Link {
            alias: Some("mine".into()),
            group: owner::GROUP,
            ..FakeLinks::bare(world.host.clone(), "veth")
        },
    ] {
        let world = World::new(Topology::Layer3);
        world.links.add(strange);
        let error = world.find(false).expect_err("it is another's");
        assert!(error.to_string().contains("not an attachment of Knit"), "{error}");
    }
}

#[test]
fn another_sandboxs_link_of_that_name_is_not_taken_and_not_deleted() {
    let mut world = World::new(Topology::Layer3);
    let theirs = Mark { sandbox: "two".parse().expect("a sandbox"), ..world.mark.clone() };
    let link = FakeLinks::bare(world.host.clone(), "veth");
    world.links.add(Link { alias: Some(theirs.alias()), group: owner::GROUP, ..link });
    let error = world.find(false).expect_err("it is another's");
    assert!(error.to_string().contains("sandbox two"), "{error}");
    assert_eq!(world.links.names().len(), 1);
    let ours = FoundPort::Ours(Box::new((
        Link {
            index: 1,
            alias: Some(theirs.alias()),
            group: owner::GROUP,
            ..FakeLinks::bare(world.host.clone(), "veth")
        },
        theirs.clone(),
    )));
    world.mark = theirs;
    assert_eq!(world.find(false).expect("a look"), ours);
}
