//! Linux networking, spoken directly: the only crate that talks to the kernel, and the only one with `unsafe`.
//!
//! One small module per noun. [`netns`] makes and opens network namespaces; [`netlink`] is the socket and the
//! attribute codec that everything else speaks through; [`testing`] (a cargo feature) re-enters a test in fresh
//! namespaces.

pub mod conntrack;
pub mod netlink;
pub mod netns;
pub mod nft;
#[cfg(feature = "testing")]
pub mod testing;

mod sys;
