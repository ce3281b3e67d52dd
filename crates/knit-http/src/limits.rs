//! How many connections there may be at once, and how long they last.

use std::time::Duration;

/// What clients of one port may have at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How many connections all clients have at once. When there is no room for somebody new, the oldest
    /// connection of whoever has most is closed.
    pub all: usize,
    /// How many one client has at once; beyond that it is refused. None: a client that has them all makes
    /// room for itself.
    pub each: Option<usize>,
    /// How many the node itself (kubelet's probes) has besides, which nobody else can take. None: it is a
    /// client like any other.
    pub own: Option<usize>,
    /// How long a client may take to say what it wants.
    pub header: Duration,
    /// How long a connection may last, for one request. None: for as many requests as the client has, as
    /// load balancers like it.
    pub lifetime: Option<Duration>,
}

impl Limits {
    /// For a port that pods can reach, and that is asked by few.
    pub const PROBES: Self = Self {
        all: 64,
        each: Some(8),
        own: Some(32),
        header: Duration::from_secs(5),
        lifetime: Some(Duration::from_secs(10)),
    };
}
