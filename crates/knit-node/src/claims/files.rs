//! When the files of claims are written, and when they go: with what is reserved, before kubelet hears that a
//! claim is prepared; again when its interfaces are there, before containers start; and with its release.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{DeviceAttribute, NetworkDeviceData};
use knit_api::names;
use knit_model::allocation::Allocation;
use knit_runtime::Attachment;
use knit_types::NetworkName;
use knit_types::{ObjectRef, Owner};

use super::device_files::{ClaimData, DeviceData, DeviceFileError, DeviceFiles};
use super::{Claims, network_of};
use crate::error::{Error, Reason, Result};

impl Claims {
    /// Frees what is reserved for a claim, and then removes its files. Nothing is success.
    pub(crate) async fn release(&self, claim: &ObjectRef) -> Result<()> {
        self.pipeline.release_claim(claim).await?;
        let uid = claim.uid.clone();
        let removed = self.with_files(move |files| files.remove(&uid)).await;
        removed.unwrap_or(Ok(())).map_err(|error| failed(claim, error))
    }

    /// Writes the files of a claim that was prepared; gives the CDI device of each request.
    pub(super) async fn write_files(&self, allocation: &Allocation) -> Result<BTreeMap<String, String>> {
        let claim = allocation.claim.clone();
        let data = self.data_of(allocation);
        let written = self.with_files(move |files| files.write(&data)).await;
        written.unwrap_or_else(|| Ok(BTreeMap::new())).map_err(|error| failed(&claim, error))
    }

    /// Adds what the interfaces of claims became. What a container reads without it is incomplete, and
    /// nothing else: the pod starts all the same.
    pub(crate) async fn tell_containers(&self, claims: &[ObjectRef]) {
        for claim in claims {
            let (became, uid) = (self.became(claim), claim.uid.clone());
            let written =
                self.with_files(move |files| files.attached(&uid, &|name| became.get(name).cloned())).await;
            if let Some(Err(error)) = written {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(%claim, error, "containers are not told what its interfaces became");
            }
        }
    }

    /// Removes files whose claim is gone: kubelet or an agent ended between two steps.
    pub(super) async fn sweep_files(&self) {
        let found = self.with_files(DeviceFiles::claims).await.unwrap_or_default();
        for claim in found {
            let owner = Owner::claim(claim.clone());
            let is_known = {
                let books = self.pipeline.sandboxes.books();
                books.reservation(&owner).is_some() || books.lent_to(&owner).is_some()
            };
            // One without a name was never finished, so nobody was told of it.
            let is_gone = !is_known && (claim.name.is_empty() || self.is_gone(&claim).await.unwrap_or(false));
            if is_gone && let Err(error) = self.release(&claim).await {
                tracing::warn!(%claim, "cannot remove the files of a claim: {}", error.chain());
            }
        }
    }

    /// Does something with files on a thread that may wait for the disk; none where there are none.
    async fn with_files<T: Send + 'static>(
        &self,
        work: impl FnOnce(&DeviceFiles) -> T + Send + 'static,
    ) -> Option<T> {
        let files = self.files.clone()?;
        tokio::task::spawn_blocking(move || work(&files)).await.ok()
    }

    fn data_of(&self, allocation: &Allocation) -> ClaimData {
        let became = self.became(&allocation.claim);
        let world = self.pipeline.world.get();
        let mut requests: Vec<(String, Vec<DeviceData>)> = Vec::new();
        for device in &allocation.devices {
            let text = |text: &str| DeviceAttribute { string: Some(text.to_owned()), ..Default::default() };
            let network =
                network_of(&world, &device.device).map_or(device.device.as_str(), NetworkName::as_str);
            let attributes = [
                (names::POD_NETWORK_ATTRIBUTE, text(network)),
                (names::POD_NETWORK_KIND_ATTRIBUTE, text(names::POD_NETWORK_KIND)),
            ];
            let data = DeviceData {
                driver: names::DRIVER.to_owned(),
                pool: device.pool.clone(),
                name: device.device.clone(),
                attributes: attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                network_data: became.get(&device.device).cloned(),
            };
            match requests.iter_mut().find(|(request, _)| *request == device.answers) {
                Some((_, devices)) => devices.push(data),
                None => requests.push((device.answers.clone(), vec![data])),
            }
        }
        ClaimData { claim: allocation.claim.clone(), pod_claim: allocation.pod_claim.clone(), requests }
    }

    /// What the devices of a claim are in the sandbox that has it.
    fn became(&self, claim: &ObjectRef) -> BTreeMap<String, NetworkDeviceData> {
        let owner = Owner::claim(claim.clone());
        let books = self.pipeline.sandboxes.books();
        let Some(record) = books.lent_to(&owner).and_then(|sandbox| books.get(sandbox)) else {
            return BTreeMap::new();
        };
        let its = record.attachments().iter().filter(|entry| {
            let loan = entry.plan().loan.as_ref();
            loan.is_some_and(|loan| loan.from == owner)
        });
        its.filter_map(|entry| entry.made())
            .map(|made| (names::device_of(&made.network), network_data(made)))
            .collect()
    }
}

/// An interface in the words of Kubernetes.
pub(crate) fn network_data(made: &Attachment) -> NetworkDeviceData {
    NetworkDeviceData {
        interface_name: Some(made.interface.to_string()),
        ips: Some(made.addresses.iter().map(|address| address.net.to_string()).collect()),
        hardware_address: Some(made.mac.to_string()),
    }
}

fn failed(claim: &ObjectRef, error: DeviceFileError) -> Error {
    let reason = match &error {
        DeviceFileError::Name { .. } => Reason::Refused,
        DeviceFileError::Io { .. } => Reason::Internal,
    };
    let message = format!("claim {claim}: its device metadata files cannot be written or removed");
    Error::new(reason, message).because(error)
}
