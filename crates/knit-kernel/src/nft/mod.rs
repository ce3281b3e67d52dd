//! The kernel's nftables: [`Kernel`] is the socket under [`knit_nft::Nftables`]. Types, transactions, diff
//! and encoding are those of [`knit_nft`].

mod kernel;
mod notice;

pub use kernel::Kernel;
pub(crate) use notice::{generation_by, new_generation, table_of};
