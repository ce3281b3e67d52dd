//! What to write so that the API shows what it should, and nothing else of the controller's.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use knit_api::names;
use knit_objects::{Key, Write};

use super::Shown;

/// The most devices in one slice.
pub(super) const PER_SLICE: usize = 128;

/// What to write so that the API shows it.
#[derive(Debug, Default, PartialEq)]
pub struct Writes {
    /// Slices of the pool: all of them, or none. While they say different generations, the scheduler goes by
    /// none of them.
    pub slices: Vec<SliceWrite>,
    /// Slices that the pool has no more: once the others are written.
    pub surplus: Vec<Write>,
    /// Classes, each on its own.
    pub classes: Vec<Write>,
}

/// A slice to write.
#[derive(Debug, PartialEq)]
pub struct SliceWrite {
    /// As it should be.
    pub write: Write,
    /// As it is, for when another one of its pool cannot be written.
    pub undo: Write,
}

impl Writes {
    /// How many writes that are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slices.len() + self.surplus.len() + self.classes.len()
    }
}

/// What to write so that the API shows it. Nothing if it does already.
#[must_use]
pub fn writes(shown: &Shown, slices: &[ResourceSlice], classes: &[DeviceClass]) -> Writes {
    let mut writes = write_slices(&shown.devices, slices);
    for (name, spec) in &shown.classes {
        let found = classes.iter().find(|class| class.metadata.name.as_ref() == Some(name));
        // One of that name which somebody else made is theirs, whatever it says.
        if found.is_some_and(|found| !is_ours(&found.metadata) || found.spec == *spec) {
            continue;
        }
        let class = DeviceClass { metadata: metadata(name), spec: spec.clone() };
        writes.classes.push(Write::apply(&class, names::CONTROLLER_MANAGER));
    }
    for class in classes.iter().filter(|class| is_ours(&class.metadata)) {
        let (Some(name), Some(uid)) = (&class.metadata.name, &class.metadata.uid) else { continue };
        if !shown.classes.contains_key(name) {
            let delete = Write::delete_uid::<DeviceClass>(Key::cluster(name.as_str()), uid.as_str());
            writes.classes.push(delete);
        }
    }
    writes
}

/// The classes of others that have names of classes which should be shown: those are not.
#[must_use]
pub fn taken<'c>(shown: &Shown, classes: &'c [DeviceClass]) -> Vec<&'c DeviceClass> {
    let in_the_way = |class: &&DeviceClass| {
        !is_ours(&class.metadata)
            && class.metadata.name.as_ref().is_some_and(|name| shown.classes.contains_key(name))
    };
    classes.iter().filter(in_the_way).collect()
}

/// What of all slices is the controller's.
#[must_use]
pub fn own_slices(mut slices: Vec<ResourceSlice>) -> Vec<ResourceSlice> {
    slices.retain(|slice| is_ours(&slice.metadata));
    slices
}

/// Slices of the pool: all of them say one generation and their number, or the scheduler goes by none.
fn write_slices(devices: &[Device], found: &[ResourceSlice]) -> Writes {
    let is_pool = |slice: &&ResourceSlice| {
        slice.spec.driver == names::DRIVER && slice.spec.pool.name == names::NETWORK_POOL
    };
    let found: Vec<&ResourceSlice> = found.iter().filter(is_pool).collect();
    let chunks: Vec<&[Device]> = devices.chunks(PER_SLICE).collect();
    let count = i64::try_from(chunks.len()).unwrap_or(i64::MAX);
    let wanted = |n: usize, generation: i64| ResourceSliceSpec {
        driver: names::DRIVER.to_owned(),
        pool: ResourcePool { name: names::NETWORK_POOL.to_owned(), generation, resource_slice_count: count },
        per_device_node_selection: Some(true),
        devices: Some(chunks[n].to_vec()),
        ..ResourceSliceSpec::default()
    };
    let newest = found.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or_default();
    let name = |n: usize| format!("{}-{n:05}", names::NETWORK_POOL);
    let right = |n: usize| {
        let there = found.iter().find(|slice| slice.metadata.name == Some(name(n)));
        there.is_some_and(|there| there.spec == wanted(n, newest))
    };
    let mut writes = Writes::default();
    if found.len() == chunks.len() && (0..chunks.len()).all(right) {
        return writes;
    }
    let apply = |name: &str, spec: ResourceSliceSpec| {
        Write::apply(&ResourceSlice { metadata: metadata(name), spec }, names::CONTROLLER_MANAGER)
    };
    for n in 0..chunks.len() {
        let name = name(n);
        let before = found.iter().find(|slice| slice.metadata.name.as_ref() == Some(&name));
        let undo = match before {
            Some(before) => apply(&name, before.spec.clone()),
            None => Write::delete::<ResourceSlice>(Key::cluster(name.as_str())),
        };
        writes.slices.push(SliceWrite { write: apply(&name, wanted(n, newest + 1)), undo });
    }
    for slice in found {
        let (Some(there), Some(uid)) = (&slice.metadata.name, &slice.metadata.uid) else { continue };
        if !(0..chunks.len()).any(|n| name(n) == *there) {
            let delete = Write::delete_uid::<ResourceSlice>(Key::cluster(there.as_str()), uid.as_str());
            writes.surplus.push(delete);
        }
    }
    writes
}

pub(super) fn metadata(name: &str) -> ObjectMeta {
    let labels = BTreeMap::from([(names::MANAGED_BY_LABEL.to_owned(), names::MANAGED_BY.to_owned())]);
    ObjectMeta { name: Some(name.to_owned()), labels: Some(labels), ..ObjectMeta::default() }
}

fn is_ours(metadata: &ObjectMeta) -> bool {
    let label = metadata.labels.as_ref().and_then(|labels| labels.get(names::MANAGED_BY_LABEL));
    label.map(String::as_str) == Some(names::MANAGED_BY)
}
