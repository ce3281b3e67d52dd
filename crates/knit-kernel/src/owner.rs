//! The owner's marks: how Knit recognises what it made.
//!
//! A mark decides what a repair pass may delete, so it must be where a pod cannot write it. A container with
//! CAP_NET_ADMIN may do what it likes inside its own namespace: it could take the mark off, or put it on
//! something of its own. So links carry it on the node's and the routers' side only (group and alias), and so
//! do routes, rules and neighbours (protocol number). Inside a pod's namespace nothing is recognised by a
//! mark; what is there goes with the namespace or with the link's other end. Forwarding entries (FDB) have no
//! field for a mark; they belong to whoever owns their link.

/// `RTPROT_*` number of Knit's routes, rules and neighbours: an ASCII `K`. Not assigned in linux/rtnetlink.h,
/// and printed by iproute2 as `proto 75`.
pub const PROTOCOL: u8 = b'K';

/// Group of Knit's links: the ASCII word `knit`. One number, so that a listing can be filtered cheaply and
/// links that are to be deleted at once can be moved to a group of their own first.
pub const GROUP: u32 = u32::from_be_bytes(*b"knit");

/// Every alias of a link of ours begins with this; what follows names whose it is.
pub const ALIAS_PREFIX: &str = "knit:";

/// The longest alias that the kernel takes.
pub const ALIAS_MAX: usize = 255;

/// The alias for a link that belongs to `owner` (an attachment, a Network). See [`of_alias`] for the way
/// back.
pub fn alias(owner: &str) -> String {
    format!("{ALIAS_PREFIX}{owner}")
}

/// Whose link it is, if its alias says that it is ours.
pub fn of_alias(alias: &str) -> Option<&str> {
    alias.strip_prefix(ALIAS_PREFIX)
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_alias_names_its_owner() {
        assert_eq!(super::of_alias(&super::alias("default/web-0")), Some("default/web-0"));
        assert_eq!(super::of_alias("somebody's uplink"), None);
        assert_eq!(super::GROUP, 0x6b6e_6974);
    }
}
