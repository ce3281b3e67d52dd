//! What policies ask for about a pod is in force before anything of it is made, and goes after all of it has
//! gone.

use knit_ledger::SandboxRecord;
use tokio::time::Instant;

use super::Pipeline;
use super::record::Recorded;
use crate::error::Result;

impl Pipeline {
    /// Returns when policies about what is recorded are in force.
    pub(super) async fn admit(&self, recorded: &Recorded, deadline: Instant) -> Result<()> {
        self.admit_record(recorded.record(), deadline).await
    }

    /// The same for a record of which something is to be made again.
    pub(crate) async fn admit_record(&self, record: &SandboxRecord, deadline: Instant) -> Result<()> {
        match self.networks.policies() {
            Some(policies) => policies.admit(record, deadline).await,
            None => Ok(()),
        }
    }

    /// Interfaces of a sandbox are gone, and out of the record.
    pub(super) fn release(&self, record: &SandboxRecord) {
        if let Some((policies, pod)) = self.networks.policies().zip(record.pod()) {
            policies.released(&pod.namespace, &pod.name);
        }
    }
}
