//! Whether a sandbox's interfaces are as they were made: CHECK.

use knit_ledger::SandboxRecord;
use knit_runtime::SandboxId;

use super::{Attached, Pipeline, answer};
use crate::error::{Error, Reason, Result};
use crate::netns;
use crate::sandboxes::unreadable;

impl Pipeline {
    /// Looks whether a sandbox's interfaces are as they were made.
    pub(crate) async fn check(&self, sandbox: &SandboxId) -> Result<Attached> {
        let _guard = self.sandboxes.locks().lock(sandbox.clone()).await;
        let record = {
            let books = self.sandboxes.books();
            if let Some(record) = books.unreadable_of(sandbox) {
                return Err(unreadable::error(&format!("sandbox {sandbox}"), record));
            }
            books.get(sandbox).cloned()
        };
        let Some(record) = record else {
            return Err(Error::new(Reason::UnknownSandbox, format!("sandbox {sandbox} has no networks")));
        };
        if netns::is_gone(record.netns()) {
            let path = record.netns().path.display();
            let message = format!("sandbox {sandbox}: network namespace {path} is gone or was replaced");
            return Err(Error::new(Reason::UnknownSandbox, message));
        }
        if !record.is_attached() {
            let message = format!("sandbox {sandbox} is not attached to all of its networks");
            return Err(Error::new(Reason::Damaged, message));
        }
        self.check_each(&record).await?;
        Ok(answer(&record))
    }

    async fn check_each(&self, record: &SandboxRecord) -> Result<()> {
        let pod = record.runtime_pod();
        for attachment in record.attachments() {
            let plan = attachment.plan();
            let runtime = self.runtimes.get(&plan.runtime).ok_or_else(|| {
                Error::new(Reason::NotReady, format!("network runtime {} does not answer", plan.runtime))
            })?;
            let check = runtime.check(&pod, Some(&record.netns().path), Some(&plan.interface));
            let limit = self.config.detach_deadline;
            match tokio::time::timeout(limit, check).await {
                Ok(checked) => checked.map_err(|error| {
                    Error::from_runtime("checking", &plan.network, plan.interface.as_str(), error)
                })?,
                Err(_) => {
                    let (name, seconds) = (&plan.runtime, limit.as_secs());
                    let message = format!(
                        "network runtime {name} did not check interface {} within {seconds} s: check its log",
                        plan.interface
                    );
                    return Err(Error::new(Reason::NotReady, message));
                }
            }
        }
        Ok(())
    }
}
