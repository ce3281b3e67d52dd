//! What policies dropped on a node, and which of them decided it.
//!
//! Rules that drop a packet for a policy log it first, at a limited rate (`knit_policy_nft::log`). [`Drops`]
//! reads that in every router, asks the verdict function which policy decided ([`Clusters`]), and keeps a
//! short list ([`book`]). The list is served on a local socket ([`socket`], for `knit drops`), told as events
//! on the pods concerned, and counted. [`WithDrops`] adds all of it to an enforcer of policies.
//!
//! Packets are hostile input: a pod decides what is in them and how many there are. Whatever it does, it
//! takes a bounded share of the list, of the events and of the counters, and only its own entries make way
//! for it.

pub mod book;
mod collect;
mod enforcer;
pub mod entry;
pub mod socket;

pub use collect::{Clusters, Drops, Listening, Question, REASON};
pub use enforcer::WithDrops;
pub use entry::{Dropped, End};
