//! The table: its sets, and which router it is for. The chains are in [`crate::chains`].

use std::collections::BTreeMap;

use ipnet::IpNet;
use knit_nft::ip::{Ip, V4, V6};
use knit_nft::{Element, L4Proto, Mark, Name, Port, Set, SetState, Table, TableId, TableState};
use knit_policy::model::Direction;
use knit_types::{ByFamily as _, Family, IfName};

use crate::chains;
use crate::ip::{family, table_family};
use crate::log;

/// The name of the table.
pub const TABLE: &str = "knit-policy";

/// The bit of the connection mark that a connection has which policies no longer allow. Other bits are other
/// people's: `knit_linux::STEERED` is one of them.
pub const CUT: u32 = 0x0020_0000;

/// Which router a table is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Router {
    /// The node's own namespace, for the default Network. What the node itself sends does not pass the
    /// forward hook, and is not judged.
    Node,
    /// A namespace of its own, for another Network.
    Apart {
        /// The link to the node.
        uplink: IfName,
        /// The node's addresses. What comes from them over the uplink is the node's own, and always reaches
        /// its pods (rule 25).
        node: Vec<IpNet>,
    },
}

/// Which set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Which {
    /// Addresses that policies act on. Each element counts what was denied to it.
    Subjects(Direction),
    /// `address . address` of subjects that may reach themselves by other rules than others reach them.
    Itself,
    /// `address : class`
    Peers,
    /// `range of addresses : class`
    Blocks,
    /// `subject . class . protocol . port : decision`
    Ports(Direction),
    /// `subject . class . protocol . range of ports : decision`
    Ranges(Direction),
    /// `subject . class . protocol : decision`
    Protocols(Direction),
    /// `subject . class : decision`; class 0 has the default.
    All(Direction),
}

impl Which {
    pub(crate) const EVERY: [Self; 13] = [
        Self::Subjects(Direction::Egress),
        Self::Subjects(Direction::Ingress),
        Self::Itself,
        Self::Peers,
        Self::Blocks,
        Self::Ports(Direction::Egress),
        Self::Ports(Direction::Ingress),
        Self::Ranges(Direction::Egress),
        Self::Ranges(Direction::Ingress),
        Self::Protocols(Direction::Egress),
        Self::Protocols(Direction::Ingress),
        Self::All(Direction::Egress),
        Self::All(Direction::Ingress),
    ];

    /// What the set is called.
    fn word(self) -> &'static str {
        use Direction::{Egress, Ingress};
        match self {
            Self::Subjects(Egress) => "egress-subjects",
            Self::Subjects(Ingress) => "ingress-subjects",
            Self::Itself => "itself",
            Self::Peers => "peers",
            Self::Blocks => "blocks",
            Self::Ports(Egress) => "egress-ports",
            Self::Ports(Ingress) => "ingress-ports",
            Self::Ranges(Egress) => "egress-ranges",
            Self::Ranges(Ingress) => "ingress-ranges",
            Self::Protocols(Egress) => "egress-protocols",
            Self::Protocols(Ingress) => "ingress-protocols",
            Self::All(Egress) => "egress-all",
            Self::All(Ingress) => "ingress-all",
        }
    }

    pub(crate) fn name(self) -> Name {
        self.word().into()
    }

    pub(crate) fn set(self, family: Family) -> Set {
        match family {
            Family::V4 => self.set_of::<V4>(),
            Family::V6 => self.set_of::<V6>(),
        }
    }

    fn set_of<I: Ip>(self) -> Set {
        let name = self.word();
        match self {
            Self::Subjects(_) => Set::of::<I::Address>(name).counter(),
            Self::Itself => Set::of::<(I::Address, I::Address)>(name),
            Self::Peers => Set::map::<I::Address, Mark>(name),
            Self::Blocks => Set::map::<I::Address, Mark>(name).interval(),
            Self::Ports(_) => Set::map::<(I::Address, Mark, L4Proto, Port), Mark>(name),
            Self::Ranges(_) => Set::map::<(I::Address, Mark, L4Proto, Port), Mark>(name).interval(),
            Self::Protocols(_) => Set::map::<(I::Address, Mark, L4Proto), Mark>(name),
            Self::All(_) => Set::map::<(I::Address, Mark), Mark>(name),
        }
    }
}

/// The node's addresses, for a router apart from it.
pub(crate) const NODE_SET: &str = "node";

/// Subjects that were told of lately, each with its limit.
pub(crate) fn told_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Egress => "egress-told",
        Direction::Ingress => "ingress-told",
    }
}

/// So many subjects are limited each by itself; the others only together.
const MOST_TOLD: u32 = 1 << 16;

/// The table of a family.
pub(crate) fn table_id(family: Family) -> TableId {
    TableId::new(table_family(family), TABLE)
}

/// The table without any element of a policy.
pub(crate) fn skeleton(family: Family, router: &Router, logs: bool) -> TableState {
    match family {
        Family::V4 => skeleton_of::<V4>(router, logs),
        Family::V6 => skeleton_of::<V6>(router, logs),
    }
}

fn skeleton_of<I: Ip>(router: &Router, logs: bool) -> TableState {
    let table = Table::new(table_id(family::<I>())).comment("network policies, written by knit");
    let mut state = TableState::new(table);
    for which in Which::EVERY {
        state = state.set(which.set_of::<I>(), []);
    }
    for direction in Direction::ALL.into_iter().filter(|_| logs) {
        let told = Set::of::<I::Address>(told_name(direction)).dynamic(MOST_TOLD).timeouts();
        state = state.set(told, []);
    }
    if let Router::Apart { node, .. } = router {
        let set = Set::of::<I::Address>(NODE_SET).interval();
        state = state.set(set, node_elements(node, family::<I>()));
    }
    chains::add::<I>(state, router, logs)
}

fn node_elements(node: &[IpNet], family: Family) -> Vec<Element> {
    let nets: Vec<IpNet> = node.of_family(family).map(IpNet::trunc).collect();
    IpNet::aggregate(&nets).iter().map(|net| Element::prefix(net.network(), net.prefix_len())).collect()
}

/// A set of the table, to add elements to.
pub(crate) fn elements_of(state: &mut TableState, set: Set) -> &mut SetState {
    let name = set.name.clone();
    state.sets.entry(name).or_insert_with(|| SetState { set, elements: BTreeMap::new() })
}

const _: () = assert!(log::SNAPLEN >= 40 + 20, "both headers are told");
