//! What can go wrong.

/// A table that could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no way to nftables.
    #[error("cannot open nftables in the router")]
    Nftables(#[source] knit_nft::Error),
    /// There is no way to connection tracking.
    #[error("cannot open connection tracking in the router")]
    Conntrack(#[source] knit_kernel::conntrack::Error),
    /// There is no way to the network namespace itself.
    #[error("cannot open the network namespace of the router")]
    Namespace(#[source] knit_kernel::netns::Error),
}

/// Something that the kernel did not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The table was not written. What was in force before still is.
    #[error("cannot write the rules of network policies, table {table}")]
    Write {
        /// Which table.
        table: &'static str,
        /// The cause.
        source: knit_nft::Error,
    },
    /// The table could not be read.
    #[error("cannot read the rules of network policies, table {table}")]
    Read {
        /// Which table.
        table: &'static str,
        /// The cause.
        source: knit_nft::Error,
    },
    /// Connections could not be listed or marked.
    #[error("cannot apply network policies to live connections")]
    Conntrack(#[source] knit_kernel::conntrack::Error),
    /// The addresses of the router could not be listed.
    #[error("cannot list the addresses of the router")]
    Addresses(#[source] knit_kernel::Error),
}
