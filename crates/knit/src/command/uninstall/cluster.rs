//! What would keep a cluster from forgetting Knit: finalizers that nobody removes any more, and taints that
//! nobody takes back.

use anyhow::{Context as _, Result, bail};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use knit_api::names::{ATTACHMENT_FINALIZER, NETWORK_FINALIZER, UNSCHEDULABLE_TAINT};
use knit_api::{Network, NetworkAttachment};
use knit_objects::{Error, Key, Object, Objects, Selection, Source, Write};
use knit_output::{Note, note};
use serde_json::json;

use crate::command::objects::From;

/// The Lease of the controller, in Knit's namespace.
const LEASE: (&str, &str) = ("knit-system", "knit-controller");

/// Removes Knit's finalizers and taints. Refuses while a controller leads, which would put them back.
pub async fn clean(from: &From) -> Result<()> {
    let source = match (&from.api_url, &from.kubeconfig) {
        (Some(url), _) => Source::Url(url.clone()),
        (None, Some(path)) => Source::Kubeconfig { path: path.clone(), context: None },
        (None, None) => Source::Infer,
    };
    let objects = Objects::open(source).await.context("cannot reach a cluster")?;
    let lease = objects.get::<Lease>(&Key::namespaced(LEASE.0, LEASE.1)).await?;
    if let Some(holder) = lease.as_ref().and_then(|lease| leader(lease, Timestamp::now())) {
        bail!(
            "the controller {holder} is running, and would restore everything: delete the \
            Deployment knit-controller first"
        );
    }
    finalizers::<Network>(&objects, NETWORK_FINALIZER).await?;
    finalizers::<NetworkAttachment>(&objects, ATTACHMENT_FINALIZER).await?;
    taints(&objects).await
}

/// Who leads now, if anybody does.
fn leader(lease: &Lease, now: Timestamp) -> Option<&str> {
    let spec = lease.spec.as_ref()?;
    let holder = spec.holder_identity.as_deref().filter(|holder| !holder.is_empty())?;
    let seconds = i64::from(spec.lease_duration_seconds.unwrap_or(0));
    let renewed = spec.renew_time.as_ref()?.0;
    (now.as_second() - renewed.as_second() <= seconds).then_some(holder)
}

async fn finalizers<K: Object>(objects: &Objects, ours: &str) -> Result<()> {
    let all = match objects.list::<K>(&Selection::default()).await {
        Ok(all) => all,
        // Not even the kind is there.
        Err(Error::NotFound { .. }) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    for object in all {
        let mut left = object.meta().finalizers.clone().unwrap_or_default();
        let before = left.len();
        left.retain(|finalizer| finalizer != ours);
        if left.len() == before {
            continue;
        }
        let key = Key::of(&object);
        let write = Write::merge::<K>(key.clone(), json!({ "metadata": { "finalizers": left } }));
        let write = write.if_version(object.meta().resource_version.as_deref().unwrap_or_default());
        written(objects, &write).await?;
        note(Note::Info, format!("{} {key} can be deleted", K::kind(&())));
    }
    Ok(())
}

async fn taints(objects: &Objects) -> Result<()> {
    for node in objects.list::<Node>(&Selection::default()).await? {
        let Some(mut taints) = node.spec.as_ref().and_then(|spec| spec.taints.clone()) else { continue };
        let before = taints.len();
        taints.retain(|taint| taint.key != UNSCHEDULABLE_TAINT);
        if taints.len() == before {
            continue;
        }
        let key = Key::of(&node);
        let write = Write::merge::<Node>(key.clone(), json!({ "spec": { "taints": taints } }));
        let write = write.if_version(node.metadata.resource_version.as_deref().unwrap_or_default());
        written(objects, &write).await?;
        note(Note::Info, format!("Node {key} accepts pods again"));
    }
    Ok(())
}

/// One that went meanwhile is fine; one that changed is for the next try.
async fn written(objects: &Objects, write: &Write) -> Result<()> {
    match objects.write(write).await {
        Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
        Err(error @ Error::Conflict { .. }) => {
            Err(error).context("an object changed in the meantime: run this again")
        }
        Err(error) => Err(error.into()),
    }
}
