//! What policies ask for about a pod is in force before anything of it is made, and goes after all of it has
//! gone.

use std::borrow::Cow;
use std::sync::Arc;

use futures::future::BoxFuture;
use knit_ledger::SandboxRecord;
use knit_runtime::{AttachRequest, Attachment, Runtime};
use tokio::time::Instant;

use super::Pipeline;
use super::record::Recorded;
use crate::error::Result;

/// What is recorded of a sandbox, with the policies about it in force: a runtime makes interfaces of this
/// only.
#[derive(Clone, Debug)]
pub(crate) struct Admitted<'a>(Cow<'a, SandboxRecord>);

impl Pipeline {
    /// Returns when policies about what is recorded are in force.
    pub(super) async fn admit<'a>(&self, recorded: &'a Recorded, deadline: Instant) -> Result<Admitted<'a>> {
        self.admit_again(recorded.record(), deadline).await
    }

    /// The same for a record of which something is to be made again: its router may be a new one, too.
    pub(crate) async fn admit_again<'a>(
        &self,
        record: &'a SandboxRecord,
        deadline: Instant,
    ) -> Result<Admitted<'a>> {
        if let Some(policies) = self.networks.policies() {
            policies.admit(record, deadline).await?;
        }
        Ok(Admitted(Cow::Borrowed(record)))
    }

    /// Interfaces of a sandbox are gone, and out of the record.
    pub(super) fn release(&self, record: &SandboxRecord) {
        if let Some((policies, pod)) = self.networks.policies().zip(record.pod()) {
            policies.released(&pod.namespace, &pod.name);
        }
    }
}

// === impl Admitted ===

impl Admitted<'_> {
    /// The record.
    pub(super) fn record(&self) -> &SandboxRecord {
        &self.0
    }

    /// The same for a task of its own.
    pub(crate) fn into_owned(self) -> Admitted<'static> {
        Admitted(Cow::Owned(self.0.into_owned()))
    }

    /// Has a runtime make an interface of it. Nothing else in the agent asks a runtime for one.
    pub(crate) fn attach(
        &self,
        runtime: &Arc<dyn Runtime>,
        request: &AttachRequest,
    ) -> BoxFuture<'static, knit_runtime::Result<Attachment>> {
        debug_assert!(self.0.attachment(&request.interface).is_some(), "an interface that is recorded");
        let (runtime, request) = (Arc::clone(runtime), request.clone());
        Box::pin(async move { runtime.attach(&request).await })
    }
}
