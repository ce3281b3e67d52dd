//! Resolving for a pod that starts waits a little for what is not known yet.

use super::{Missing, Wanted, resolve};
use crate::error::Result;
use crate::pipeline::{Pipeline, SandboxSite, Waits};
use crate::request::PodRequest;
use crate::world::World;

impl Pipeline {
    /// Which Networks, under which names. If something is not known yet, a pod that starts waits for it a
    /// little.
    pub(in crate::pipeline) async fn resolve(
        &self,
        request: &PodRequest,
        site: &SandboxSite,
        waits: Waits,
    ) -> Result<Vec<Wanted>> {
        let claimed = self.claimed(request)?;
        let look = |world: &World| match resolve(world, request, &site.has, &claimed) {
            Ok(wanted) => Ok(Ok(wanted)),
            Err(Missing::Error(error)) => Ok(Err(error)),
            Err(Missing::Wait(error)) => Err(error),
        };
        if request.start.is_none() {
            return look(&self.world.get())?;
        }
        self.world.wait(waits.at_most(self.config.cache_wait), look).await?
    }
}
