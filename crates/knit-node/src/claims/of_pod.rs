//! Which claims a pod has that starts. Kubelet has every claim prepared before it makes a sandbox, so a pod
//! with claims of ours is in a namespace that has some here; where it has none, no pod waits for its object.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use knit_ledger::{Reservation, SandboxRecord, Unreadable};
use knit_model::allocation::{Allocation, AllocationError};
use knit_types::ObjectRef;
use knit_types::sync::Locked as _;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::{Claims, MAX_FOREIGN_CLAIMS, claim_of};
use crate::error::{Error, Reason, Result};
use crate::pipeline::{Occasion, Waits};
use crate::request::{PodRequest, pod_name};
use crate::world::World;

/// A claim that a pod uses.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum PodClaim {
    /// A claim of this name.
    Named(String),
    /// One that is made from a template, whose name the pod does not say yet. This is what the pod calls it.
    Unmade(String),
}

impl PodClaim {
    /// The claims of a pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Vec<Self> {
        let (spec, status) = (pod.spec.as_ref(), pod.status.as_ref());
        let made = status.and_then(|s| s.resource_claim_statuses.as_deref()).unwrap_or_default();
        let used = spec.and_then(|s| s.resource_claims.as_deref()).unwrap_or_default();
        let used = used.iter().filter_map(|claim| match &claim.resource_claim_name {
            Some(name) => Some(Self::Named(name.clone())),
            None => match made.iter().find(|made| made.name == claim.name) {
                // One without a name was not needed.
                Some(made) => made.resource_claim_name.clone().map(Self::Named),
                None => Some(Self::Unmade(claim.name.clone())),
            },
        });
        let extended = status.and_then(|s| s.extended_resource_claim_status.as_ref());
        used.chain(extended.map(|claim| Self::Named(claim.resource_claim_name.clone()))).collect()
    }
}

/// Why a pod's claims are not had.
#[derive(Debug)]
pub(crate) enum Problem {
    /// It cannot be told which claims it has.
    Unknown(Error),
    /// One of them cannot be had.
    Known(Error),
}

// === impl Problem ===

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::Known(error)
    }
}

// === impl Claims ===

impl Claims {
    /// The claims of ours that the pod of a request has, all of them prepared.
    ///
    /// # Errors
    /// When it cannot be told, or one of them cannot be prepared: a pod does not start without what it was
    /// promised.
    pub(crate) async fn of_pod(
        self: &Arc<Self>,
        request: &PodRequest,
        waits: Waits,
    ) -> Result<Vec<ObjectRef>, Problem> {
        let began = self.pipeline.sandboxes.releases().now();
        let occasion = Occasion { began, sandbox: Some(request.pod.sandbox.clone()) };
        let (Some(namespace), Some(name)) = (&request.pod.namespace, &request.pod.name) else {
            return Ok(Vec::new());
        };
        let who = pod_name(&request.pod);
        let key = (namespace.clone(), name.clone());
        let uid = request.pod.uid.as_ref();
        let look = |world: &World| -> Result<Vec<String>, Problem> {
            let same = |view: &Option<String>| view.as_ref().zip(uid).is_none_or(|(a, b)| a == b);
            let known = world.pods.get(&key).filter(|view| view.mirror || same(&view.uid));
            match known {
                Some(view) => {
                    Ok(view.claims.iter().map(|claim| named(claim, &who)).collect::<Result<_>>()?)
                }
                None if self.has_some(namespace) => {
                    let message = format!(
                        "{who} is not known to the node agent yet, and pods of its namespace have claims of \
                         Networks here; it will be retried"
                    );
                    Err(Problem::Unknown(Error::new(Reason::NotReady, message)))
                }
                None => Ok(Vec::new()),
            }
        };
        let soon = waits.at_most(self.pipeline.config.cache_wait);
        let names = self.pipeline.world.wait(soon, look).await?;
        let mut claims = Vec::with_capacity(names.len());
        for name in names {
            match self.recorded(request, namespace, &name) {
                Some(claim) => claims.push(claim),
                None => claims.extend(self.look_up(request, namespace, &name, (&occasion, waits)).await?),
            }
        }
        Ok(claims)
    }

    /// Whether pods of a namespace may have claims of ours here.
    fn has_some(&self, namespace: &str) -> bool {
        if self.doubtful {
            return true;
        }
        let books = self.pipeline.sandboxes.books();
        let reserved = books.reservations().filter_map(|reservation| claim_of(reservation.owner()));
        let lent = books.records().flat_map(SandboxRecord::attachments);
        let lent = lent.filter_map(|a| claim_of(&a.plan().loan.as_ref()?.from));
        let mut unreadable = books.unreadable().filter_map(Unreadable::claim);
        reserved.chain(lent).any(|claim| claim.namespace == namespace)
            || unreadable.any(|claim| claim.namespace == namespace)
    }

    /// Whether something is reserved for a pod, or may be: it is not known for whom something in its
    /// namespace is.
    pub(crate) fn is_promised(&self, request: &PodRequest) -> bool {
        let pod = &request.pod;
        let books = self.pipeline.sandboxes.books();
        let mut reserved = books.reservations().filter_map(|r| Some((claim_of(r.owner())?, r.pod())));
        reserved.any(|(claim, its)| match its {
            Some(its) => match its.uid.as_ref().zip(pod.uid.as_ref()) {
                Some((its, uid)) => its == uid,
                None => {
                    Some(&its.name) == pod.name.as_ref() && Some(&its.namespace) == pod.namespace.as_ref()
                }
            },
            None => Some(&claim.namespace) == pod.namespace.as_ref(),
        })
    }

    /// Whether something is reserved for a claim of this name, or a sandbox has that.
    pub(super) fn is_recorded(&self, namespace: &str, name: &str) -> bool {
        let is_it = |claim: &ObjectRef| claim.namespace == namespace && claim.name == name;
        let books = self.pipeline.sandboxes.books();
        let reserved = books.reservations().filter_map(|r| claim_of(r.owner()));
        let lent = books.records().flat_map(SandboxRecord::attachments);
        let lent = lent.filter_map(|a| claim_of(&a.plan().loan.as_ref()?.from));
        reserved.chain(lent).any(is_it)
    }

    /// The claim of this name that something is reserved for, or whose reservation a sandbox has. One that is
    /// reserved for another pod is as good as unknown: it was given to this one later, perhaps with another
    /// Network.
    fn recorded(&self, request: &PodRequest, namespace: &str, name: &str) -> Option<ObjectRef> {
        let books = self.pipeline.sandboxes.books();
        let is_it = |claim: &&ObjectRef| claim.namespace == namespace && claim.name == name;
        let of = |reservation: &Reservation| claim_of(reservation.owner()).filter(is_it).cloned();
        let reserved = books.reservations().filter_map(|r| Some((r, of(r)?)));
        if let Some((reservation, claim)) = reserved.max_by_key(|(reservation, _)| reservation.created_at()) {
            let (has, asks) = (reservation.pod().and_then(|pod| pod.uid.as_ref()), request.pod.uid.as_ref());
            return has.zip(asks).is_none_or(|(has, asks)| has == asks).then_some(claim);
        }
        let lent = books.records().flat_map(SandboxRecord::attachments);
        lent.filter_map(|a| claim_of(&a.plan().loan.as_ref()?.from)).find(is_it).cloned()
    }

    /// The same as [`Self::unrecorded`]. A request that is not to wait is refused until it is known, and the
    /// work goes on without it: who comes again finds it done.
    async fn look_up(
        self: &Arc<Self>,
        request: &PodRequest,
        namespace: &str,
        name: &str,
        (occasion, waits): (&Occasion, Waits),
    ) -> Result<Option<ObjectRef>, Problem> {
        let Some(soon) = waits.soon() else {
            return self.unrecorded(request, namespace, name, (occasion, waits.deadline())).await;
        };
        if self.is_foreign(request, namespace, name) {
            return Ok(None);
        }
        let (claims, asked, occasion) = (Arc::clone(self), request.clone(), occasion.clone());
        let (space, claim) = (namespace.to_owned(), name.to_owned());
        let work = async move {
            let deadline = Instant::now() + claims.pipeline.config.request_deadline;
            claims.unrecorded(&asked, &space, &claim, (&occasion, deadline)).await
        };
        let who = || pod_name(&request.pod);
        match tokio::time::timeout_at(soon, tokio::spawn(work.in_current_span())).await {
            Ok(Ok(result)) => result,
            Ok(Err(failed)) => {
                let message = format!("{}: claim {namespace}/{name}: check the agent's log", who());
                Err(Error::new(Reason::Internal, message).because(failed).into())
            }
            Err(_) => {
                let message =
                    format!("{}: claim {namespace}/{name} is being read; it will be retried", who());
                Err(Problem::Unknown(Error::new(Reason::NotReady, message)))
            }
        }
    }

    /// Whether a claim of a pod is known to be another driver's.
    fn is_foreign(&self, request: &PodRequest, namespace: &str, name: &str) -> bool {
        self.foreign.locked().contains(&place_of(request, namespace, name))
    }

    /// A claim that the ledger does not know for this pod: another driver's, one of ours that was forgotten,
    /// or one that another pod had before. Kubelet may not have it prepared a second time, so it is prepared
    /// here.
    async fn unrecorded(
        &self,
        request: &PodRequest,
        namespace: &str,
        name: &str,
        (occasion, deadline): (&Occasion, Instant),
    ) -> Result<Option<ObjectRef>, Problem> {
        if self.is_foreign(request, namespace, name) {
            return Ok(None);
        }
        let who = pod_name(&request.pod);
        let not_ready = |what: &str| {
            let message = format!("{who}: claim {namespace}/{name} {what}; it will be retried");
            Error::new(Reason::NotReady, message)
        };
        let found = self.get(namespace, name, deadline).await.map_err(Problem::Unknown)?;
        let Some(found) = found else { return Err(not_ready("does not exist").into()) };
        let allocation = match Allocation::of(&found) {
            Ok(allocation) => allocation,
            Err(AllocationError::NotOurs) => {
                let mut foreign = self.foreign.locked();
                if foreign.len() >= MAX_FOREIGN_CLAIMS {
                    foreign.clear();
                }
                foreign.insert(place_of(request, namespace, name));
                return Ok(None);
            }
            Err(error) => return Err(not_ready("cannot be attached").because(error).into()),
        };
        let is_its = |pod: &knit_types::PodRef| {
            Some(&pod.name) == request.pod.name.as_ref()
                && request.pod.uid.as_ref().is_none_or(|uid| pod.uid.as_ref() == Some(uid))
        };
        if !allocation.pods.iter().any(is_its) {
            return Err(not_ready("is not reserved for it").into());
        }
        tracing::warn!("{who}: claim {namespace}/{name} is not in the ledger for it: preparing it now");
        self.prepare_allocated(&allocation, occasion, deadline).await?;
        Ok(Some(allocation.claim))
    }
}

/// What a claim of another driver is remembered by.
fn place_of(request: &PodRequest, namespace: &str, name: &str) -> (String, String, String) {
    (namespace.to_owned(), name.to_owned(), request.pod.uid.clone().unwrap_or_default())
}

fn named(claim: &PodClaim, who: &str) -> Result<String> {
    match claim {
        PodClaim::Named(name) => Ok(name.clone()),
        PodClaim::Unmade(name) => {
            let message = format!("{who}: the claim for {name} has not been created yet; it will be retried");
            Err(Error::new(Reason::NotReady, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pods_claims_by_name_by_template_and_by_extended_resource() {
        let pod: Pod = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
            "spec": {"containers": [], "resourceClaims": [
                {"name": "a", "resourceClaimName": "shared"},
                {"name": "b", "resourceClaimTemplateName": "t"},
                {"name": "c", "resourceClaimTemplateName": "t"},
                {"name": "d", "resourceClaimTemplateName": "t"},
            ]},
            "status": {
                "resourceClaimStatuses": [{"name": "b", "resourceClaimName": "web-b-x1"}, {"name": "c"}],
                "extendedResourceClaimStatus": {"resourceClaimName": "web-extended-resources-z",
                    "requestMappings": []},
            },
        }))
        .expect("a pod");
        let named = |name: &str| PodClaim::Named(name.into());
        assert_eq!(
            PodClaim::of(&pod),
            [
                named("shared"),
                named("web-b-x1"),
                PodClaim::Unmade("d".into()),
                named("web-extended-resources-z")
            ]
        );
    }
}
