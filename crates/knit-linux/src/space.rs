//! A namespace that is worked in, with sockets that stay open in it.
//!
//! A socket stays in the namespace that it was opened in, whichever thread uses it. So a namespace is entered
//! once for each socket and not for each request; as many are kept as were ever needed at once, up to a
//! limit.

use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use knit_kernel::Handle;
use knit_kernel::netns::NetNs;
use knit_kernel::nft::Kernel;
use knit_runtime::Result;
use knit_types::Family;
use knit_types::sync::Locked;

use crate::echo::Echo;
use crate::fail::internal;

/// How many idle sockets of one kind are kept.
const MAX_IDLE_SOCKETS: usize = 8;

/// A namespace with its sockets.
#[derive(Debug)]
pub(crate) struct NamespaceSockets {
    namespace: NetNs,
    /// Whether others changed the rules here.
    pub rules_seen: RulesSeen,
    links: Pool<Handle>,
    rules: Pool<Kernel>,
    echo4: Pool<Echo>,
    echo6: Pool<Echo>,
}

/// Whether rules were compared since somebody else last changed them.
#[derive(Debug, Clone)]
pub(crate) struct RulesSeen(Arc<RuleChanges>);

#[derive(Debug)]
struct RuleChanges {
    /// Counts changes by others.
    touched: AtomicU64,
    /// The count at which all was as it should be.
    compared: AtomicU64,
}

/// Idle things.
#[derive(Debug)]
struct Pool<T>(Mutex<Vec<T>>);

/// A thing that goes back to its pool.
pub(crate) struct Lease<'a, T> {
    pool: &'a Pool<T>,
    thing: Option<T>,
}

impl NamespaceSockets {
    /// Of this namespace.
    pub fn new(namespace: NetNs) -> Self {
        Self {
            namespace,
            rules_seen: RulesSeen::never(),
            links: Pool::default(),
            rules: Pool::default(),
            echo4: Pool::default(),
            echo6: Pool::default(),
        }
    }

    /// The namespace.
    pub fn namespace(&self) -> &NetNs {
        &self.namespace
    }

    /// For links, addresses, routes and neighbours.
    pub fn links(&self) -> Result<Lease<'_, Handle>> {
        let open = || Handle::open(&self.namespace);
        self.links.take(open).map_err(internal("open a socket for links"))
    }

    /// For nftables.
    pub fn rules(&self) -> Result<Lease<'_, Kernel>> {
        let open = || Kernel::open_in(&self.namespace);
        self.rules.take(open).map_err(internal("open a socket for rules"))
    }

    /// For an echo request of one family, from this address if one is given.
    pub fn echo(&self, family: Family, from: Option<IpAddr>) -> Result<Lease<'_, Echo>> {
        let pool = match family {
            Family::V4 => &self.echo4,
            Family::V6 => &self.echo6,
        };
        let open = || Echo::open(&self.namespace, family, from);
        let failed = || internal("open a socket for echo requests");
        let mut lease = pool.take(open).map_err(failed())?;
        if lease.from != from {
            *lease = open().map_err(failed())?;
        }
        Ok(lease)
    }
}

impl RulesSeen {
    /// Not compared yet.
    fn never() -> Self {
        Self(Arc::new(RuleChanges { touched: AtomicU64::new(1), compared: AtomicU64::new(0) }))
    }

    /// Somebody else may have changed them.
    pub fn touch(&self) {
        self.0.touched.fetch_add(1, Ordering::AcqRel);
    }

    /// How often others have changed them; to be asked before they are read.
    pub fn now(&self) -> u64 {
        self.0.touched.load(Ordering::Acquire)
    }

    /// At that count all was as it should be.
    pub fn compared(&self, at: u64) {
        self.0.compared.store(at, Ordering::Release);
    }

    /// The count at which all was as it should be.
    pub fn last_compared(&self) -> Option<u64> {
        Some(self.0.compared.load(Ordering::Acquire)).filter(|at| *at > 0)
    }
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Pool<T> {
    fn take<E>(&self, open: impl FnOnce() -> Result<T, E>) -> Result<Lease<'_, T>, E> {
        let idle = self.0.locked().pop();
        let thing = idle.map_or_else(open, Ok)?;
        Ok(Lease { pool: self, thing: Some(thing) })
    }
}

impl<T> Deref for Lease<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.thing.as_ref().expect("a lease has its thing until it is dropped")
    }
}

impl<T> DerefMut for Lease<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.thing.as_mut().expect("a lease has its thing until it is dropped")
    }
}

impl<T> Drop for Lease<'_, T> {
    fn drop(&mut self) {
        let mut idle = self.pool.0.locked();
        if idle.len() < MAX_IDLE_SOCKETS {
            idle.extend(self.thing.take());
        }
    }
}
