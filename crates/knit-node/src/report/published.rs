//! Follows the NetworkAttachments that this agent published: what somebody deletes or changes is written
//! again, since other nodes go by it.

use std::collections::HashMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use knit_api::{NetworkAttachment, names};
use knit_objects::{Event, Key, Objects};
use knit_runtime::SandboxId;

use super::attachments;
use crate::core::Core;

/// What is known of one object.
#[derive(Debug)]
struct PublishedObject {
    sandbox: SandboxId,
    /// What it said when it was last found to say something else than it should. Once is enough: what is not
    /// fixed by writing it again, such as an additional owner, is not written again forever.
    wrong: Option<NetworkAttachment>,
}

/// Follows them forever.
pub async fn follow(core: Core, objects: Objects) {
    let (node, by) = (attachments::label_value(core.node()), names::MANAGED_BY);
    let labels = format!("{}={node},{}={by}", names::NODE_LABEL, names::MANAGED_BY_LABEL);
    let mut events = match objects.watch::<NetworkAttachment>().labels(labels).subscribe() {
        Ok(events) => events,
        Err(error) => {
            tracing::error!("cannot watch published NetworkAttachments: {}", error.with_causes());
            return;
        }
    };
    let mut known: HashMap<Key, PublishedObject> = HashMap::new();
    while let Some(event) = events.next().await {
        match event {
            Event::Applied(key, object) => applied(&core, &mut known, key, object),
            Event::Deleted(key) => {
                // One whose pod is gone was deleted by us.
                if let Some(PublishedObject { sandbox, .. }) = known.remove(&key)
                    && core.sandboxes().books().get(&sandbox).is_some()
                {
                    core.report().changed(&sandbox);
                }
            }
            Event::Synced => {}
        }
    }
}

fn applied(core: &Core, known: &mut HashMap<Key, PublishedObject>, key: Key, object: NetworkAttachment) {
    let said = object.status.as_ref().and_then(|status| status.sandbox_id.clone());
    let said = said.and_then(|sandbox| SandboxId::new(sandbox).ok());
    // A sandbox that we know is the one that wrote it; what the object says may be somebody else's words.
    let before = known.get(&key).filter(|known| core.sandboxes().books().get(&known.sandbox).is_some());
    // One without a status is being written.
    let Some(sandbox) = before.map(|known| known.sandbox.clone()).or(said) else { return };
    let desired = {
        let books = core.sandboxes().books();
        books.get(&sandbox).map(|record| attachments::desired(&core.world().get(), core.node(), record))
    };
    let wanted = desired.into_iter().flatten().find(|wanted| Key::of(wanted) == key);
    let told = wanted.is_some_and(|mut wanted| attachments::is_told(&mut wanted, &object));
    let wrong = (!told).then(|| without_times(object));
    if wrong.is_some() && known.get(&key).is_none_or(|known| known.wrong != wrong) {
        core.report().changed(&sandbox);
    }
    known.insert(key, PublishedObject { sandbox, wrong });
}

/// An object without what changes with every write.
fn without_times(mut object: NetworkAttachment) -> NetworkAttachment {
    object.metadata.resource_version = None;
    object.metadata.generation = None;
    for condition in object.status.iter_mut().flat_map(|status| &mut status.conditions) {
        condition.last_transition_time = Time(Timestamp::UNIX_EPOCH);
    }
    object
}
