//! What can go wrong, each with what to do about it.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_types::{Family, Mac, NetworkName};

use crate::address::AddressRange;
use crate::lease::{LeaseKey, Millis};
use crate::node::FamilyCounts;

/// Why no pod ever has an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NotLeasable {
    /// It is the anycast gateway.
    Gateway,
    /// It is the subnet's own (first) address.
    SubnetAddress,
    /// It is the subnet's broadcast address.
    Broadcast,
    /// It is the own address of this node's router.
    Router,
    /// It is in a reserved range, and these are other hosts' there.
    OtherHost,
}

/// A Network's subnets cannot work.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Bits behind the prefix.
    #[error("subnet {cidr} has host bits set: use {instead}")]
    HostBits {
        /// As it was written.
        cidr: IpNet,
        /// As it should be.
        instead: IpNet,
    },
    /// No room for a gateway and a pod.
    #[error("subnet {cidr} is too small for a gateway and a pod: use a larger one")]
    TooSmall {
        /// The subnet.
        cidr: IpNet,
    },
    /// A gateway that pods could not reach.
    #[error("gateway {gateway} is not in subnet {cidr}: use an address in the subnet, or leave it out")]
    GatewayOutside {
        /// The subnet.
        cidr: IpNet,
        /// The gateway.
        gateway: IpAddr,
    },
    /// A reserved range that means nothing here.
    #[error("reserved range {reserved} is not in subnet {cidr}: use a range inside the subnet")]
    ReservedOutside {
        /// The subnet.
        cidr: IpNet,
        /// The range.
        reserved: AddressRange,
    },
    /// Two subnets of one family.
    #[error("Network {network} has two {family} subnets: use one larger one, or two Networks")]
    TwoOfOneFamily {
        /// The Network.
        network: NetworkName,
        /// The family.
        family: Family,
    },
    /// Nothing to give out.
    #[error("Network {network} has no subnet: add one, for example 10.77.0.0/16")]
    NoSubnet {
        /// The Network.
        network: NetworkName,
    },
}

/// A block that cannot be, or cannot be added here.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// Not one prefix.
    #[error(
        "block of {size} addresses of Network {network} for node {node} cannot start at {address}: \
         start it at a multiple of its size"
    )]
    NotAligned {
        /// The Network.
        network: NetworkName,
        /// The node.
        node: String,
        /// Where it starts.
        address: IpAddr,
        /// How many addresses it has.
        size: u32,
    },
    /// No family.
    #[error("block of Network {network} for node {node} has no range: give it ipv4, ipv6 or both")]
    Empty {
        /// The Network.
        network: NetworkName,
        /// The node.
        node: String,
    },
    /// Somebody else's block.
    #[error(
        "block {block} of Network {network} belongs to node {owner}, not to this node: do not add it here"
    )]
    OtherNode {
        /// The block.
        block: String,
        /// The Network.
        network: NetworkName,
        /// The node that owns it.
        owner: String,
    },
    /// The Network is not known yet.
    #[error(
        "block {block} belongs to Network {network}, which this node does not know (yet): add the Network \
        first"
    )]
    UnknownNetwork {
        /// The block.
        block: String,
        /// The Network.
        network: NetworkName,
    },
    /// Not the Network's addresses.
    #[error("block {block} is not inside the subnets of Network {network}: delete that AddressBlock")]
    OutsideSubnet {
        /// The block.
        block: String,
        /// The Network.
        network: NetworkName,
    },
    /// Addresses that another block of the Network has.
    #[error("block {block} of Network {network} overlaps block {other}: delete one of the two AddressBlocks")]
    Overlaps {
        /// The block.
        block: String,
        /// The Network.
        network: NetworkName,
        /// The block that is there already.
        other: String,
    },
}

/// A request that cannot be met. Nothing of it was leased.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The node does not know the Network.
    #[error(
        "{key} wants Network {network}, which this node does not know (yet): try again, or create the Network"
    )]
    UnknownNetwork {
        /// Who asked.
        key: LeaseKey,
        /// The Network.
        network: NetworkName,
    },
    /// No address is free on this node.
    #[error(
        "no address of Network {network} is free on this node for {key}: {counts}; \
         try again when the node has another block, or free addresses on this node"
    )]
    Exhausted {
        /// Who asked.
        key: LeaseKey,
        /// The Network.
        network: NetworkName,
        /// What there is, of the Network's first family.
        counts: Box<FamilyCounts>,
        /// When the next address leaves quarantine, if one is in it.
        next_free_at: Option<Millis>,
    },
    /// A wanted address is taken.
    #[error(
        "address {address} of Network {network}, wanted by {key}, is in use by {by}: request another \
         address, or remove that pod"
    )]
    AddressInUse {
        /// Who asked.
        key: LeaseKey,
        /// The Network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
        /// Who has it.
        by: String,
    },
    /// A wanted address is not in the Network.
    #[error(
        "address {address}, wanted by {key}, is not in a subnet of Network {network}: request an address in \
         one of its subnets"
    )]
    OutsideSubnet {
        /// Who asked.
        key: LeaseKey,
        /// The Network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
    },
    /// A wanted address is never given to a pod.
    #[error("address {address} of Network {network}, wanted by {key}, is {why}: request another address")]
    Reserved {
        /// Who asked.
        key: LeaseKey,
        /// The Network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
        /// Why it cannot be leased.
        why: NotLeasable,
    },
    /// A wanted address may belong to another node's block, now or later.
    #[error(
        "address {address} of Network {network}, wanted by {key}, is neither in a block of this node nor in \
         a reserved range: reserve a range for static addresses in the Network and request an address in \
         that range"
    )]
    NotOnThisNode {
        /// Who asked.
        key: LeaseKey,
        /// The Network.
        network: NetworkName,
        /// The address.
        address: IpAddr,
    },
    /// A wanted MAC cannot be.
    #[error("MAC {mac}, wanted by {key} on Network {network}, {why}: request another MAC, or none")]
    Mac {
        /// Who asked.
        key: LeaseKey,
        /// The Network.
        network: NetworkName,
        /// The MAC.
        mac: Mac,
        /// What is wrong with it.
        why: String,
    },
    /// Two wants for one interface.
    #[error("{key} is requested twice: give each interface a different name")]
    DuplicateRequest {
        /// The interface.
        key: LeaseKey,
    },
    /// The interface has another lease already.
    #[error("{key} has a lease in Network {network} ({has}) that differs from this request: detach it first")]
    Conflict {
        /// The interface.
        key: LeaseKey,
        /// The Network of the lease that is there.
        network: NetworkName,
        /// The addresses that it has.
        has: String,
    },
}

/// No block can be given to a node.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NextBlockError {
    /// The pool has no room.
    #[error(
        "Network {network} has no {family} block left for node {node}: {blocks} blocks hold {in_blocks} of \
         {addresses} addresses; create a Network with a larger subnet, or delete blocks of nodes that no \
         longer exist"
    )]
    Exhausted {
        /// The Network.
        network: NetworkName,
        /// The node.
        node: String,
        /// The family that ran out.
        family: Family,
        /// Blocks of this Network.
        blocks: usize,
        /// Addresses of this family in those blocks.
        in_blocks: u128,
        /// Addresses of this family that blocks can be cut from.
        addresses: u128,
    },
}

// === impl NotLeasable ===

impl fmt::Display for NotLeasable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gateway => "the gateway",
            Self::SubnetAddress => "the network address of the subnet",
            Self::Broadcast => "the broadcast address",
            Self::Router => "the address of this node's router",
            Self::OtherHost => "reserved for other hosts of the segment",
        })
    }
}

// === impl LeaseError ===

impl LeaseError {
    /// Whether the same request may succeed later with nothing changed in it.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(self, Self::UnknownNetwork { .. } | Self::Exhausted { .. } | Self::AddressInUse { .. })
    }

    /// The Network that it is about; none where it is about the request itself.
    #[must_use]
    pub fn network(&self) -> Option<&NetworkName> {
        match self {
            Self::UnknownNetwork { network, .. }
            | Self::Exhausted { network, .. }
            | Self::AddressInUse { network, .. }
            | Self::OutsideSubnet { network, .. }
            | Self::Reserved { network, .. }
            | Self::NotOnThisNode { network, .. }
            | Self::Mac { network, .. }
            | Self::Conflict { network, .. } => Some(network),
            Self::DuplicateRequest { .. } => None,
        }
    }
}
