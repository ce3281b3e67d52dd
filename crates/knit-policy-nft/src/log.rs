//! Where denied packets are told of: the netlink group, and what is in front of each.

use knit_policy::model::Direction;

/// The netlink group (`NFULNL`) that denied packets are passed on to, in the router's own namespace.
pub const GROUP: u16 = 27_502;

/// How many bytes of a packet are passed on: enough for both headers.
pub const SNAPLEN: u32 = 128;

/// How many packets each subject may have told of in a second, and at once.
pub(crate) const EACH: (u64, u32) = (5, 20);
/// How many all together may, in one direction and family.
pub(crate) const TOGETHER: (u64, u32) = (100, 200);

const EGRESS: &str = "knit-policy egress";
const INGRESS: &str = "knit-policy ingress";
const CUT: &str = "knit-policy cut";

/// Why a packet was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Why {
    /// The policies of one side do not allow its connection: for egress its source's, for ingress its
    /// destination's.
    Denied(Direction),
    /// Its connection was allowed once and is no longer; either side may be the cause.
    Cut,
}

impl Why {
    /// Everything that is told.
    pub const ALL: [Self; 3] = [Self::Denied(Direction::Egress), Self::Denied(Direction::Ingress), Self::Cut];

    /// What the kernel puts in front of the packet (`NFULA_PREFIX`).
    #[must_use]
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Denied(Direction::Egress) => EGRESS,
            Self::Denied(Direction::Ingress) => INGRESS,
            Self::Cut => CUT,
        }
    }

    /// The one with this prefix; none if it is somebody else's.
    #[must_use]
    pub fn of_prefix(prefix: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|why| why.prefix() == prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_read_back_and_fit() {
        for why in Why::ALL {
            assert_eq!(Why::of_prefix(why.prefix()), Some(why));
            // NF_LOG_PREFIXLEN, with the zero at its end.
            assert!(why.prefix().len() < 128);
        }
        assert_eq!(Why::of_prefix("ufw block"), None);
    }
}
