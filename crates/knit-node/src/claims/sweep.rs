//! Reservations whose claim is gone. Kubelet frees them; where it lost its own records, nobody else would.

use std::time::Duration;

use knit_ledger::Unreadable;
use knit_types::ObjectRef;
use tokio::time::Instant;

use super::{API_TIMEOUT, Claims, claim_of};
use crate::error::Result;

/// How often is looked, and the pause between two claims.
const SWEEP_INTERVAL: Duration = Duration::from_secs(600);
const NEXT_CLAIM_DELAY: Duration = Duration::from_millis(50);

impl Claims {
    /// Looks for them, forever.
    pub(crate) async fn keep_swept(&self) {
        loop {
            self.sweep().await;
            tokio::time::sleep(SWEEP_INTERVAL).await;
        }
    }

    /// Looks for them once; how many were freed.
    pub(crate) async fn sweep(&self) -> usize {
        let reserved: Vec<ObjectRef> = {
            let books = self.pipeline.sandboxes.books();
            let reserved = books.reservations().filter_map(|r| claim_of(r.owner())).cloned();
            // Nobody else would remove what cannot be read, if kubelet does not release it.
            reserved.chain(books.unreadable().filter_map(Unreadable::claim)).collect()
        };
        let mut freed = 0;
        for claim in reserved {
            match self.is_gone(&claim).await {
                Ok(true) => {
                    let uid = &claim.uid;
                    tracing::info!(%claim, uid, "releasing the reservations of a deleted claim");
                    match self.release(&claim).await {
                        Ok(()) => freed += 1,
                        Err(error) => tracing::warn!(%claim, "cannot release the claim: {}", error.chain()),
                    }
                }
                Ok(false) => {}
                // It may well be there: nothing is freed on a guess.
                Err(error) => {
                    tracing::debug!(
                        %claim,
                        "cannot determine whether the claim still exists: {}",
                        error.chain()
                    );
                }
            }
            tokio::time::sleep(NEXT_CLAIM_DELAY).await;
        }
        self.sweep_files().await;
        freed
    }

    /// Whether no pod can have a claim any more: it was deleted, or deallocated. Either comes after the end
    /// of the last pod that used it.
    pub(super) async fn is_gone(&self, claim: &ObjectRef) -> Result<bool> {
        let found = self.get(&claim.namespace, &claim.name, Instant::now() + API_TIMEOUT).await?;
        Ok(found.is_none_or(|found| {
            found.metadata.uid.as_deref() != Some(&claim.uid)
                || found.status.is_none_or(|status| status.allocation.is_none())
        }))
    }
}
