//! Shows Networks to the scheduler while this controller leads: slices of devices, and DeviceClasses. It has
//! a task of its own, so that a cluster without these kinds costs nothing else anything.

use std::time::Duration;

use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use knit_objects::{Error, Selection};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Controller, any_change};
use crate::leader::Leading;
use crate::plan::devices::{Shown, shown, writes};

/// How long changes are gathered: a Network that is made changes a few times.
const GATHER: Duration = Duration::from_secs(1);
/// How often is looked whether somebody changed or deleted what is shown.
const LOOK: Duration = Duration::from_secs(30);
/// How long to wait with an API server that does not keep what is written.
const UNABLE: Duration = Duration::from_secs(600);

impl Controller {
    /// Shows what should be shown, for as long as it is polled.
    pub(super) async fn show_devices(&self, leading: &watch::Receiver<Leading>) {
        if !self.config.show_devices {
            return std::future::pending().await;
        }
        self.caches.wait_synced().await;
        let mut changes = vec![self.caches.networks.changes(), self.caches.blocks.changes()];
        let mut last: Option<(Shown, bool)> = None;
        loop {
            for change in &mut changes {
                change.mark_unchanged();
            }
            let wanted = shown(&self.caches.networks_and_blocks());
            let known = last.take().filter(|(known, _)| *known == wanted);
            let (pause, written) = match self.bring_up_to_date(&wanted, leading).await {
                Ok(0) => (LOOK, false),
                // The same was written a moment ago, and is not there.
                Ok(_) if known.is_some_and(|(_, written)| written) => {
                    tracing::warn!(
                        "the API server does not keep ResourceSlices and DeviceClasses as they are written: \
                         claims of Networks need Kubernetes 1.36, or the feature gates \
                         DRAConsumableCapacity, DRAPartitionableDevices and DRAExtendedResource"
                    );
                    (UNABLE, true)
                }
                Ok(_) => (LOOK, true),
                Err(error) => {
                    self.failed(&error);
                    (LOOK, false)
                }
            };
            last = Some((wanted, written));
            let next = Instant::now() + pause;
            tokio::select! {
                () = any_change(&mut changes) => tokio::time::sleep(GATHER).await,
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Writes the difference; how many writes that took.
    async fn bring_up_to_date(
        &self,
        wanted: &Shown,
        leading: &watch::Receiver<Leading>,
    ) -> Result<usize, Error> {
        let everything = Selection::default();
        let slices = self.objects.list::<ResourceSlice>(&everything).await?;
        let classes = self.objects.list::<DeviceClass>(&everything).await?;
        let writes = writes(wanted, &slices, &classes);
        for write in &writes {
            let term = *leading.borrow();
            tracing::info!(%write, "write");
            match term.fence(self.objects.write(write)).await {
                Some(result) => drop(result?),
                // Whoever does not lead any more stops in the middle.
                None => break,
            }
        }
        Ok(writes.len())
    }
}
