//! Which interface an object asked for, as its record and its status tell.

use knit_api::{NetworkAttachment, names};
use knit_ledger::SandboxRecord;

use super::ObjectKey;
use crate::request::{Door, ObjectDoor};

pub(super) fn uid_of(object: &NetworkAttachment) -> Option<String> {
    object.metadata.uid.clone()
}

pub(super) fn has_finalizer(object: &NetworkAttachment) -> bool {
    object.metadata.finalizers.iter().flatten().any(|f| f == names::ATTACHMENT_FINALIZER)
}

/// How many interfaces a sandbox has by objects.
pub(super) fn by_objects(record: &SandboxRecord) -> usize {
    let objects = |a: &&knit_ledger::Attachment| matches!(a.details().door, Door::Object(_));
    record.attachments().iter().filter(objects).count()
}

/// Whether a sandbox has an interface that an object of this name asked for.
pub(super) fn has_name(record: &SandboxRecord, place: &ObjectKey) -> bool {
    let (namespace, name) = place;
    let mut doors = record.attachments().iter().map(|a| &a.details().door);
    doors.any(|door| matches!(door, Door::Object(door) if door.name == format!("{namespace}/{name}")))
}

/// The interface that this very object asked for.
pub(super) fn find<'r>(
    record: &'r SandboxRecord,
    place: &ObjectKey,
    object: &NetworkAttachment,
) -> Option<&'r knit_ledger::Attachment> {
    record.attachments().iter().find(|entry| belongs(record, entry, place, object))
}

/// Whether an interface was made for this very object. Where the ledger was damaged and forgot that, what the
/// object's status says counts.
pub(super) fn belongs(
    record: &SandboxRecord,
    entry: &knit_ledger::Attachment,
    place: &ObjectKey,
    object: &NetworkAttachment,
) -> bool {
    let (plan, status) = (entry.plan(), object.status.as_ref());
    let details = entry.details();
    match &details.door {
        Door::Object(door) => is_of(door, plan, place, object),
        door if !details.main && door.is_forgotten() => {
            plan.network == object.spec.network
                && status.and_then(|s| s.sandbox_id.as_deref()) == Some(record.sandbox().as_str())
                && status.and_then(|s| s.interface.as_deref()) == Some(plan.interface.as_str())
        }
        _ => false,
    }
}

/// Whether nobody knows any more what an interface was made for.
pub(super) fn is_forgotten(entry: &knit_ledger::Attachment) -> bool {
    entry.details().door.is_forgotten()
}

/// Whether an interface was made for this very object, and not for one that had its name before. Where no uid
/// is known (a folder's objects have none, and earlier versions did not record it) it is what the object asks
/// for that counts.
pub(super) fn is_of(
    door: &ObjectDoor,
    plan: &knit_ledger::AttachmentPlan,
    place: &ObjectKey,
    object: &NetworkAttachment,
) -> bool {
    let (namespace, name) = place;
    door.name == format!("{namespace}/{name}")
        && (door.uid.is_none() || door.uid == object.metadata.uid)
        && plan.network == object.spec.network
        && object.spec.interface.as_ref().is_none_or(|interface| plan.interface == interface.as_str())
}
