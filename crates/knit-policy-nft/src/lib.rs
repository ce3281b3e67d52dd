//! The nftables backend of [`knit_policy`]: what policies come to, as elements of a fixed number of sets.
//!
//! [`PolicyTable`] makes the elements of a [`sets::Engine`](knit_policy::sets::Engine) true in the kernel of
//! one router: the node's own namespace for the default Network, a namespace of its own for another one. It
//! owns one table of each family (`ip knit-policy`, `ip6 knit-policy`) and touches nothing else. Chains,
//! rules and sets are the same whatever policies there are, and a remote pod more is one element more. A
//! router in which no policy acts has no table.
//!
//! ```no_run
//! use knit_kernel::NetNs;
//! use knit_policy::sets::Engine;
//! use knit_policy_nft::{PolicyTable, Router};
//!
//! let mut engine = Engine::new("node-a");
//! let mut table = PolicyTable::open_in(&NetNs::current()?, Router::Node)?;
//! // What is there is kept as far as it is right: a restart changes nothing.
//! table.sync(&engine.elements("default"))?;
//! // ... the engine is told of a pod ...
//! for (network, changes) in engine.settle() {
//!     assert_eq!(&*network, "default");
//!     let applied = table.apply(&changes)?;
//!     // Connections that are no longer allowed are cut, and those that are allowed again go on.
//!     table.follow(&applied.touched)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`NftBackends`] is the same behind the seam of [`knit_policy::backend`], for programs that are to know no
//! backend by name.
//!
//! # How a packet is judged
//!
//! In the forward hook, after service addresses were translated and before source addresses are, and in the
//! input hook, where only the egress side counts. A packet of a connection that is known takes one rule. Of
//! the first one of a connection, the source is looked for among the subjects of egress and the destination
//! among those of ingress, and where one is found, the chains `egress…` or `ingress…` do what
//! [`knit_policy::sets`] describes.
//!
//! A class goes from one map to the key of another by way of the packet's mark, which is put back within the
//! same rule: a mark that somebody else set stays, and `nft` 1.0.6 can list the rules.
//!
//! Denied packets are counted for each subject ([`PolicyTable::counters`]), and passed on to a netlink group
//! ([`log`]) as far as a limit for each of them, and one for all together, allow.
//!
//! # Live connections
//!
//! A connection that policies no longer allow carries a bit of the connection mark ([`CUT`]), and the first
//! rule passes it over. Deleting the connection instead would not end it: the next packet of the other side
//! would begin a new one, in the other direction.

mod backends;
mod chains;
mod classes;
mod effect;
mod elements;
mod error;
mod follow;
mod ip;
mod layout;
pub mod live;
pub mod log;
mod plan;
mod table;
mod verdict;

pub use backends::NftBackends;
pub use error::{Error, OpenError};
pub use follow::Following;
pub use layout::{CUT, Router, TABLE};
pub use table::{Applied, Denied, PolicyTable, remove_table};
pub use verdict::Elements;
