//! Pods on their node's own network that use a claim of ours. Prepare refuses such a pod, but kubelet does
//! not ask for a claim that it has had prepared for another pod: this one then runs, and nobody ever asks for
//! its interfaces. It is told by an event.

use std::collections::BTreeSet;
use std::time::Duration;

use knit_runtime::{Pod, SandboxId};
use tokio::time::Instant;

use super::{Claims, PodClaim};
use crate::report::PodEvent;

/// How long changes are gathered, and how often is looked without one: claims are recorded without a change
/// of a pod.
const GATHER_DELAY: Duration = Duration::from_secs(1);
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

impl Claims {
    /// Tells them, forever, each pod once.
    pub(crate) async fn keep_told(&self) {
        let mut changes = self.pipeline.world.subscribe();
        let mut told = BTreeSet::new();
        loop {
            changes.borrow_and_update();
            self.tell_host_pods(&mut told);
            tokio::time::sleep(GATHER_DELAY).await;
            let next = Instant::now() + LOOK_INTERVAL;
            if let Ok(Err(_)) = tokio::time::timeout_at(next, changes.changed()).await {
                return;
            }
        }
    }

    /// Tells those that were not told yet; forgets those that are gone.
    pub(crate) fn tell_host_pods(&self, told: &mut BTreeSet<(String, String, String)>) {
        let world = self.pipeline.world.get();
        let mut there = BTreeSet::new();
        for ((namespace, name), view) in world.pods.iter() {
            if !view.host_network || view.ending {
                continue;
            }
            let is_recorded = |claim: &&PodClaim| match claim {
                PodClaim::Named(claim) => self.is_recorded(namespace, claim),
                PodClaim::Unmade(_) => false,
            };
            let Some(PodClaim::Named(claim)) = view.claims.iter().find(is_recorded) else { continue };
            let uid = view.uid.clone().unwrap_or_default();
            let place = (namespace.clone(), name.clone(), uid.clone());
            let is_news = !told.contains(&place);
            there.insert(place);
            // It has no sandbox of ours; whatever stands for one does.
            let Some(sandbox) = SandboxId::new(&uid).ok().filter(|_| is_news) else { continue };
            let message = format!(
                "Claim {namespace}/{claim} is not attached: the pod uses its node's network (hostNetwork), \
                 and only a pod with its own network can have an additional one. Leave the claim out of \
                 this pod."
            );
            tracing::warn!("pod {namespace}/{name} uses its node's network and has no claim of a Network");
            let pod = Pod {
                sandbox,
                namespace: Some(namespace.clone()),
                name: Some(name.clone()),
                uid: view.uid.clone(),
            };
            self.pipeline.report.say(PodEvent { pod, reason: "ClaimNotAttached", message });
        }
        *told = there;
    }
}
