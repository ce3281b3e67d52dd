//! What must be there before a pod's addresses are reserved: its node is one of the Network's, the Networks
//! are set up with their Services in force, host ports are free for it, and runtimes can make what is wanted.

use super::reserve::ForSandbox;
use super::resolve::Wanted;
use super::{Pipeline, SandboxSite, Waits};
use crate::error::Result;
use crate::networks::WaitLimit;
use crate::request::{PodRequest, pod_name};

/// What somebody is to get: a sandbox, or a claim that has none yet.
#[derive(Debug)]
pub(super) struct Resolved<T> {
    pub(super) target: T,
    pub(super) wanted: Vec<Wanted>,
}

impl Pipeline {
    /// Has the Networks set up here, and runtimes that can make what is wanted.
    pub(super) async fn prepare(
        &self,
        request: &PodRequest,
        site: SandboxSite,
        wanted: Vec<Wanted>,
        patience: WaitLimit,
        waits: Waits,
    ) -> Result<Resolved<ForSandbox>> {
        let who = pod_name(&request.pod);
        self.check_node(&wanted, &who)?;
        let ready_by = waits.soon().unwrap_or(patience.deadline());
        self.set_up_all(&wanted, patience, waits, ready_by, &who).await?;
        self.check_host_ports(&request.pod, &wanted, ready_by).await?;
        wanted.iter().try_for_each(|wanted| self.runtimes.can_have(wanted))?;
        let target = ForSandbox { pod: request.pod.clone(), netns: site.netns, door: request.door.clone() };
        Ok(Resolved { target, wanted })
    }
}
