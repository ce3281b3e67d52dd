//! Backends of one kind, as a crate offers them: made for a network namespace, found again, removed. What a
//! program or an agent tells them is in [`BackendSetup`], so that neither has to know the other by name.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use ipnet::IpNet;

use crate::backend::Backend;
use crate::model::Family;

/// Makes backends of one kind, and knows what else of that kind may be on a node.
pub trait Backends: fmt::Debug + Send + Sync {
    /// What kube-proxy would call it, for `/proxyMode` and people.
    fn name(&self) -> &'static str;

    /// Makes a backend for a place. It changes nothing yet: that comes with the first sync.
    ///
    /// # Errors
    /// If what it needs of the system cannot be reached.
    fn open(&self, setup: BackendSetup<'_>) -> Result<Box<dyn Backend + Send>, OpenError>;

    /// Whether a backend of a run before left something there that is in force.
    ///
    /// # Errors
    /// If it cannot be said.
    fn is_left_over(&self, namespace: Namespace<'_>) -> Result<bool, OpenError>;

    /// Removes what a backend of this kind made there. Says whether there was anything.
    ///
    /// # Errors
    /// If it cannot be removed.
    fn remove(&self, namespace: Namespace<'_>) -> Result<bool, OpenError>;

    /// Says which other proxy has been at work in a namespace, for people; none if there is none.
    ///
    /// # Errors
    /// If it cannot be said.
    fn others_at_work(&self, namespace: Namespace<'_>) -> Result<Option<String>, OpenError>;

    /// What keeps the limits of the system that a proxy needs, such as the size of the connection table (rule
    /// 53); none if there are none. `shared`: the namespace is one of several on the machine, whose own
    /// limits are not touched.
    fn limits(&self, shared: bool) -> Option<Box<dyn Limits>> {
        let _ = shared;
        None
    }
}

/// Limits of the system that a proxy needs in one namespace.
pub trait Limits: fmt::Debug + Send {
    /// Sets those that are not as they should be, as far as that is allowed: how many that were.
    fn keep(&mut self, namespace: Namespace<'_>) -> usize;
}

/// A network namespace by its descriptor; none: the calling thread's.
pub type Namespace<'a> = Option<BorrowedFd<'a>>;

/// Where a backend works, and what is special there.
pub struct BackendSetup<'a> {
    /// The network namespace.
    pub namespace: Namespace<'a>,
    /// The proxy's own name, if it has one (`service.kubernetes.io/service-proxy-name`): what it makes is
    /// apart from that of others.
    pub proxy_name: Option<&'a str>,
    /// The bit of the packet mark that says "masquerade this" (rule 50), as a number with that bit.
    pub masquerade_mark: u32,
    /// What masqueraded traffic looks like. Without it the system chooses, by the interface that it leaves
    /// by.
    pub masquerade_as: MasqueradeAs,
    /// Sources that are the node itself (rule 34), besides the addresses of the namespace: for a router apart
    /// from the node, those of the node.
    pub node_sources: Vec<IpNet>,
    /// How the names of links to routers apart from this namespace begin, if there may be any. External IPs
    /// and load balancers' addresses do not take what comes from there: it is other Networks'.
    pub routers: Option<String>,
    /// External IPs do not take addresses that the namespace itself has, on any interface: what is sent there
    /// is for whoever listens there. kube-proxy takes them.
    pub keeps_own_addresses: bool,
    /// Is told of each look at stale flows.
    pub on_clean: Option<OnClean>,
    /// Is told of each repair of what somebody else had changed.
    pub on_repair: Option<OnRepair>,
}

/// Addresses to masquerade with, where the system would choose one that answers do not come back to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MasqueradeAs {
    /// The addresses, one per family.
    pub addresses: Vec<IpAddr>,
    /// What they are for: traffic to anywhere else looks as the system chooses.
    pub towards: Vec<IpNet>,
}

/// What a look at stale flows of one family came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cleaned {
    /// The family.
    pub family: Family,
    /// How long it took.
    pub took: Duration,
    /// How many flows were deleted.
    pub deleted: usize,
    /// Whether all of it was done.
    pub complete: bool,
}

/// Is told of each look at stale flows.
pub type OnClean = Box<dyn FnMut(Cleaned) + Send>;

/// What somebody else had changed of one family, and that is as it should be again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repaired {
    /// The family.
    pub family: Family,
    /// How many changes that took.
    pub changes: usize,
}

/// Is told of each repair.
pub type OnRepair = Box<dyn FnMut(Repaired) + Send>;

/// A backend that could not be opened, or did not find what it needs.
#[derive(Debug, thiserror::Error)]
#[error("{attempted}")]
pub struct OpenError {
    /// What did not work, for people to read.
    pub attempted: String,
    /// The cause.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl OpenError {
    /// Something did not work, for this reason.
    pub fn new(
        attempted: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { attempted: attempted.into(), source: source.into() }
    }
}

impl Default for BackendSetup<'_> {
    /// The calling thread's namespace, and all as kube-proxy does it: its mark is 0x4000.
    fn default() -> Self {
        Self {
            namespace: None,
            proxy_name: None,
            masquerade_mark: 0x4000,
            masquerade_as: MasqueradeAs::default(),
            node_sources: Vec::new(),
            routers: None,
            keeps_own_addresses: false,
            on_clean: None,
            on_repair: None,
        }
    }
}

impl fmt::Debug for BackendSetup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackendSetup").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}
