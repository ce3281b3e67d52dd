//! Shows Networks to the scheduler while this controller leads: slices of devices, and DeviceClasses. It has
//! a task of its own, so that a cluster without these kinds costs nothing else anything.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use knit_api::names;
use knit_objects::{Error, EventNote, Selection, Write};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Controller, any_change};
use crate::leader::Leading;
use crate::plan::devices::{Shown, Writes, own_slices, shown, taken, writes};

/// How long changes are gathered: a Network that is made changes a few times.
const GATHER_DELAY: Duration = Duration::from_secs(1);
/// How often is looked whether somebody changed or deleted what is shown.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// How long to wait with an API server that does not keep what is written.
const UNABLE_RETRY_DELAY: Duration = Duration::from_secs(600);

impl Controller {
    /// Shows what should be shown, for as long as it is polled.
    pub(super) async fn show_devices(&self, leading: &watch::Receiver<Leading>) {
        if !self.config.show_devices {
            self.hide_devices(leading).await;
            return std::future::pending().await;
        }
        self.caches.wait_synced().await;
        let mut changes = vec![self.caches.networks.changes(), self.caches.blocks.changes()];
        let mut last: Option<(Shown, bool)> = None;
        let mut told = BTreeSet::new();
        let mut next = Instant::now();
        loop {
            for change in &mut changes {
                change.mark_unchanged();
            }
            let wanted = shown(&self.caches.networks_and_blocks());
            let known = last.as_ref().filter(|(known, _)| *known == wanted).map(|(_, written)| *written);
            // Most changes of Networks and blocks, such as of a status, change nothing of what is shown.
            if known.is_none() || Instant::now() >= next {
                let (pause, written) = match self.bring_up_to_date(&wanted, &mut told, leading).await {
                    Ok(0) => (LOOK_INTERVAL, false),
                    // The same was written a moment ago, and is not there.
                    Ok(_) if known == Some(true) => {
                        tracing::warn!(
                            "the API server drops fields of ResourceSlices or DeviceClasses: claims of \
                             Networks need Kubernetes 1.36, or the feature gates DRAConsumableCapacity, \
                             DRAPartitionableDevices and DRAExtendedResource"
                        );
                        (UNABLE_RETRY_DELAY, true)
                    }
                    Ok(_) => (LOOK_INTERVAL, true),
                    Err(error) => {
                        self.failed(&error);
                        (LOOK_INTERVAL, false)
                    }
                };
                last = Some((wanted, written));
                next = Instant::now() + pause;
            }
            tokio::select! {
                () = any_change(&mut changes) => tokio::time::sleep(GATHER_DELAY).await,
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Deletes what an earlier controller showed that was told to: the scheduler would give it to claims that
    /// nobody prepares.
    async fn hide_devices(&self, leading: &watch::Receiver<Leading>) {
        let found = async {
            let slices = own_slices(self.objects.list::<ResourceSlice>(&of_driver()).await?);
            Ok::<_, Error>((slices, self.objects.list::<DeviceClass>(&of_controller()).await?))
        };
        let result = match found.await {
            Ok((slices, classes)) => {
                self.write_devices(&writes(&Shown::default(), &slices, &classes), leading).await
            }
            Err(error) => Err(error),
        };
        // Without these kinds, or without a right to them, there is nothing of it.
        if let Err(error) = result {
            let error = &error as &dyn std::error::Error;
            tracing::debug!(
                error,
                "cannot look for ResourceSlices and DeviceClasses of an earlier controller"
            );
        }
    }

    /// Writes the difference; how many writes that took.
    async fn bring_up_to_date(
        &self,
        wanted: &Shown,
        told: &mut BTreeSet<String>,
        leading: &watch::Receiver<Leading>,
    ) -> Result<usize, Error> {
        let slices = self.objects.list::<ResourceSlice>(&of_driver()).await?;
        let mut classes = self.objects.list::<DeviceClass>(&of_controller()).await?;
        // What is missing among our own may be there as somebody else's.
        let known: BTreeSet<String> =
            classes.iter().filter_map(|class| class.metadata.name.clone()).collect();
        for name in wanted.classes.keys().filter(|name| !known.contains(*name)) {
            let fields = Some(format!("metadata.name={name}"));
            let selection = Selection { fields, ..Selection::default() };
            classes.extend(self.objects.list::<DeviceClass>(&selection).await?);
        }
        self.tell_taken(&taken(wanted, &classes), told);
        let writes = writes(wanted, &slices, &classes);
        self.write_devices(&writes, leading).await?;
        Ok(writes.count())
    }

    /// Writes slices and classes. What cannot be written holds up nothing else; the first error is given.
    pub(super) async fn write_devices(
        &self,
        writes: &Writes,
        leading: &watch::Receiver<Leading>,
    ) -> Result<(), Error> {
        let mut result = self.write_pool(writes, leading).await;
        for write in &writes.classes {
            match self.write_one(write, leading).await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    /// Writes all slices of the pool. Where one cannot be written, those that were are made again what they
    /// were: while slices say different generations, the scheduler goes by none of them.
    async fn write_pool(&self, writes: &Writes, leading: &watch::Receiver<Leading>) -> Result<(), Error> {
        for (n, slice) in writes.slices.iter().enumerate() {
            match self.write_one(&slice.write, leading).await {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    // The last one as well: it may have been written all the same.
                    for slice in writes.slices[..=n].iter().rev() {
                        if let Err(undone) = self.write_one(&slice.undo, leading).await {
                            let undone = &undone as &dyn std::error::Error;
                            tracing::warn!(
                                error = undone,
                                "cannot undo the write of a ResourceSlice: claims wait until it is retried"
                            );
                        }
                    }
                    return Err(error);
                }
            }
        }
        let mut result = Ok(());
        for write in &writes.surplus {
            match self.write_one(write, leading).await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    /// Carries out one write; false if this controller leads no more.
    async fn write_one(&self, write: &Write, leading: &watch::Receiver<Leading>) -> Result<bool, Error> {
        let term = *leading.borrow();
        tracing::info!(%write, "write");
        match term.fence(self.objects.write(write)).await {
            Some(result) => result.map(|_| true),
            // Whoever does not lead any more stops in the middle.
            None => Ok(false),
        }
    }

    /// Says on the events of somebody else's class that it is in the way, once.
    fn tell_taken(&self, classes: &[&DeviceClass], told: &mut BTreeSet<String>) {
        let names: BTreeSet<String> =
            classes.iter().filter_map(|class| class.metadata.name.clone()).collect();
        for class in classes {
            let Some(name) = class.metadata.name.clone().filter(|name| !told.contains(name)) else {
                continue;
            };
            let message = format!(
                "DeviceClass {name} was not created by Knit and is left unchanged; claims that reference it \
                 use its definition. Rename it, and Knit creates its own."
            );
            tracing::warn!("{message}");
            let regarding = ObjectReference {
                api_version: Some("resource.k8s.io/v1".into()),
                kind: Some("DeviceClass".into()),
                name: Some(name),
                uid: class.metadata.uid.clone(),
                ..ObjectReference::default()
            };
            self.recorder.tell(EventNote::warning(regarding, "NameTaken", "ShowDevices", &message));
        }
        *told = names;
    }
}

/// Slices of this driver: a cluster may have thousands of others.
fn of_driver() -> Selection {
    Selection { fields: Some(format!("spec.driver={}", names::DRIVER)), ..Selection::default() }
}

/// Classes that a controller of ours made.
fn of_controller() -> Selection {
    let labels = format!("{}={}", names::MANAGED_BY_LABEL, names::MANAGED_BY);
    Selection { labels: Some(labels), ..Selection::default() }
}
