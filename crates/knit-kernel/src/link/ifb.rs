//! An intermediate functional block: a link that sends what others hand it, at its own pace, and then lets it
//! go on as if it had just arrived where it came from.

use netlink_packet_route::link::LinkAttribute;

/// One queue is enough for one link's packets; the kernel makes one for each processor otherwise.
pub(super) const ONE_QUEUE: [LinkAttribute; 2] =
    [LinkAttribute::NumTxQueues(1), LinkAttribute::NumRxQueues(1)];
