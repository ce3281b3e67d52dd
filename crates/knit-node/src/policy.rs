//! The seam to policy enforcement: what policies ask for about a pod is in force before its links come up.
//!
//! The agent says which routers and which interfaces there are; who enforces policies, and by what means, is
//! not its business.

use std::fmt::Debug;
use std::path::PathBuf;

use async_trait::async_trait;
use knit_ledger::SandboxRecord;
use knit_objects::Objects;
use knit_runtime::{IfName, Network};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::core::Core;
use crate::error::Result;
use crate::proxy::Stopped;

/// Enforces policies in the routers of this node.
#[async_trait]
pub trait PolicyEnforcer: Send + Sync {
    /// Called once, when objects can be read: begins to follow policies and what they are about, in these
    /// tasks.
    fn follow(&self, core: &Core, objects: &Objects, tasks: &mut JoinSet<()>);

    /// A Network's router is there: what policies ask for is kept in force in it until the answer is
    /// dropped. `router` is none for the node's own.
    fn start(&self, router: Option<RouterApart>, network: &Network) -> Box<dyn EnforcedRouter>;

    /// Returns when what policies ask for about the interfaces of a record is in force. They are recorded,
    /// and none of those that are new is made yet.
    ///
    /// # Errors
    /// When it cannot be told what policies ask for, or it could not be put in force: nothing may be made.
    async fn admit(&self, record: &SandboxRecord, deadline: Instant) -> Result<()>;

    /// The interfaces of a pod are others now, or gone: what was in force about them is not needed any more.
    /// It returns at once.
    fn released(&self, namespace: &str, name: &str);

    /// Compares all that is in force with what should be, interfaces included: called in each pass. It
    /// returns at once.
    fn compare(&self) {}

    /// Why nobody enforces policies any more; none while somebody does, or nobody is to.
    fn stopped(&self) -> Option<Stopped> {
        None
    }

    /// What is counted, in the text form of OpenMetrics without its end.
    fn metrics(&self) -> String {
        String::new()
    }
}

/// A router apart from the node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RouterApart {
    /// The path of its namespace.
    pub namespace: PathBuf,
    /// Its end of the link to the node.
    pub uplink: IfName,
}

/// A router in which policies are enforced until this is dropped.
pub trait EnforcedRouter: Debug + Send + Sync {
    /// How they stand.
    fn state(&self) -> PoliciesState;
}

/// How policies stand in a Network's router.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PoliciesState {
    /// How many policies act on pods of this node.
    pub acting: usize,
    /// The newest version of a policy that was taken into account here, as the API server numbers them; none
    /// before there was one.
    pub newest: Option<String>,
    /// Why what policies ask for is not in force, or nobody enforces it here.
    pub problem: Option<String>,
}
