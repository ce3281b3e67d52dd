//! Linux networking, spoken directly: the only crate that talks to the kernel, and the only one with
//! `unsafe`.
//!
//! One small module per noun. [`netns`] makes and opens network namespaces. A [`Handle`] does everything to
//! the network of one of them: it makes, changes, lists and deletes links ([`link`]), and applies batches of
//! operations ([`op`]) on addresses, routes, rules, neighbours, forwarding entries and queues ([`qdisc`]).
//! [`sysctl`] sets what has no netlink message. [`owner`] has the marks by which Knit recognises what it
//! made. [`nft`] is
//! nftables, [`conntrack`] the kernel's table of connections, [`nflog`] the packets that rules log. [`watch`]
//! hears of what others change. [`packet`] sends and receives whole frames on a link. [`inventory`] is what
//! sysfs says of network devices.
//! [`netlink`] is the socket and the attribute codec that everything speaks through; [`sandbox`] runs a
//! program in namespaces of its own; [`testing`] (a cargo feature) re-enters a test in fresh namespaces.
//!
//! [`links`] and [`knit_nft::Nftables`] are seams: what is written over them is tested with fakes, without a
//! kernel.
//!
//! A new link type is a file in `link/` with its options (`data`, `parse`, `compare`), a variant of
//! [`link::Kind`] and, if it is to be read back, of [`link::Details`].

pub mod addr;
pub mod conntrack;
pub mod error;
pub mod fdb;
pub mod handle;
pub mod inventory;
pub mod link;
pub mod links;
pub mod name;
pub mod neigh;
pub mod netlink;
pub mod netns;
pub mod nflog;
pub mod nft;
pub mod op;
pub mod owner;
pub mod packet;
pub mod qdisc;
pub mod route;
pub mod rule;
pub mod sandbox;
pub mod sysctl;
#[cfg(feature = "testing")]
pub mod testing;
pub mod watch;

mod sys;

pub use error::{Error, Result};
pub use handle::Handle;
pub use name::{IfName, Mac, Mtu};
pub use netns::NetNs;
pub use op::Op;

/// Gives memory that was freed back to the system. For a program after a start that needed much more than
/// what follows: an allocator keeps it otherwise, for good.
pub fn release_memory() {
    sys::release_memory();
}

/// Lets the threads of this process share `count` heaps, for a program with many threads that do little:
/// glibc gives each one its own, and what one has freed another cannot use. To be called before other threads
/// are started.
pub fn share_heaps(count: i32) {
    sys::share_heaps(count);
}
