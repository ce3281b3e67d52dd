//! What is said in the status of claims: the interface that each device became, with its addresses and MAC.
//! Off the pod's way, and tried again until it is told.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, NetworkDeviceData, ResourceClaim, ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use knit_api::names;
use knit_ledger::SandboxRecord;
use knit_model::allocation::Allocation;
use knit_objects::{EventLimits, EventNote, EventRecorder, Key, Objects, Reporter, Write};
#[cfg(test)]
use knit_runtime::InterfaceName;
use knit_runtime::{Attachment, SandboxId};
use knit_types::{ObjectRef, Owner};
use serde_json::json;
use tokio::time::Instant;

use super::ClaimEvent;
use super::again::Retries;
use crate::core::Core;

/// The condition of a device.
const READY: &str = "Ready";

/// Writes statuses and events of claims, forever.
pub async fn write_claims(core: Core, objects: Objects) {
    let reporter = Reporter { controller: names::AGENT_MANAGER.into(), instance: core.node().to_owned() };
    let recorder = EventRecorder::start(&objects, reporter, EventLimits::default());
    let mut retries: Retries<SandboxId> = Retries::new();
    loop {
        let (mut sandboxes, events) = match retries.next() {
            None => core.report().take_of_claims().await,
            Some(next) => {
                tokio::time::timeout_at(next, core.report().take_of_claims()).await.unwrap_or_default()
            }
        };
        for event in events {
            recorder.tell(note(&event));
        }
        sandboxes.extend(retries.due(Instant::now()));
        for sandbox in sandboxes {
            let done = tell(&core, &objects, &sandbox).await;
            retries.tried(sandbox, done);
        }
    }
}

/// Says what a sandbox's claims became; false if it is to be tried again.
async fn tell(core: &Core, objects: &Objects, sandbox: &SandboxId) -> bool {
    let by_claim = core.sandboxes().books().get(sandbox).map(by_claim).unwrap_or_default();
    let mut complete = true;
    for (claim, made) in by_claim {
        if let Err(error) = tell_one(objects, &claim, &made).await {
            tracing::warn!(%claim, "cannot write its status yet: {}", error.with_causes());
            complete = false;
        }
    }
    complete
}

async fn tell_one(objects: &Objects, claim: &ObjectRef, made: &[Attachment]) -> knit_objects::Result<()> {
    let key = Key::namespaced(claim.namespace.as_str(), claim.name.as_str());
    let Some(found) = objects.get::<ResourceClaim>(&key).await? else { return Ok(()) };
    if found.metadata.uid.as_deref() != Some(&claim.uid) {
        return Ok(());
    }
    let Some(devices) = devices(&found, made, Timestamp::now()) else { return Ok(()) };
    let status = ResourceClaimStatus { devices: Some(devices), ..ResourceClaimStatus::default() };
    objects.write(&Write::status::<ResourceClaim>(key, &status, names::AGENT_MANAGER)).await.map(drop)
}

/// What a sandbox has of each of its claims.
fn by_claim(record: &SandboxRecord) -> Vec<(ObjectRef, Vec<Attachment>)> {
    let mut found: BTreeMap<ObjectRef, Vec<Attachment>> = BTreeMap::new();
    for entry in record.attachments() {
        let loan = entry.plan().loan.as_ref();
        if let (Some(Owner::Claim(claim)), Some(made)) = (loan.map(|loan| &loan.from), entry.made()) {
            found.entry((**claim).clone()).or_default().push(made.clone());
        }
    }
    found.into_iter().collect()
}

/// What is to be said of a claim's devices; none if it is said already, or nothing of it is ours.
fn devices(claim: &ResourceClaim, made: &[Attachment], now: Timestamp) -> Option<Vec<AllocatedDeviceStatus>> {
    let allocation = Allocation::of(claim).ok()?;
    let status = claim.status.as_ref();
    let before: Vec<&AllocatedDeviceStatus> = status
        .and_then(|status| status.devices.as_deref())
        .unwrap_or_default()
        .iter()
        .filter(|device| device.driver == names::DRIVER)
        .collect();
    let mut told = Vec::new();
    for device in &allocation.devices {
        // A claim has a Network once.
        let Some(made) = made.iter().find(|made| names::device_of(&made.network) == device.device) else {
            continue;
        };
        let was = before.iter().find(|was| {
            was.pool == device.pool && was.device == device.device && was.share_id == device.share
        });
        let mut ready = Condition {
            type_: READY.to_owned(),
            status: "True".to_owned(),
            reason: "Attached".to_owned(),
            message: "attached and verified".to_owned(),
            last_transition_time: Time(now),
            observed_generation: None,
        };
        let known = was.and_then(|was| was.conditions.as_ref()?.iter().find(|c| c.type_ == READY));
        if let Some(known) = known.filter(|known| known.status == ready.status) {
            ready.last_transition_time = known.last_transition_time.clone();
        }
        let data = json!({"podNetwork": {"kind": names::POD_NETWORK_KIND, "name": made.network}});
        told.push(AllocatedDeviceStatus {
            driver: names::DRIVER.to_owned(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share.clone(),
            conditions: Some(vec![ready]),
            data: Some(RawExtension(data)),
            network_data: Some(NetworkDeviceData {
                interface_name: Some(made.interface.to_string()),
                ips: Some(made.addresses.iter().map(|address| address.net.to_string()).collect()),
                hardware_address: Some(made.mac.to_string()),
            }),
        });
    }
    let same = told.len() == before.len() && told.iter().all(|told| before.contains(&told));
    (!told.is_empty() && !same).then_some(told)
}

fn note(event: &ClaimEvent) -> EventNote {
    let claim = ObjectReference {
        api_version: Some("resource.k8s.io/v1".into()),
        kind: Some("ResourceClaim".into()),
        namespace: Some(event.claim.namespace.clone()),
        name: Some(event.claim.name.clone()),
        uid: Some(event.claim.uid.clone()),
        ..ObjectReference::default()
    };
    EventNote::warning(claim, event.reason, "Prepare", &event.message)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "as json! makes it")]
    fn claim(devices: Value) -> ResourceClaim {
        serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "shop", "uid": "u1"}, "spec": {},
            "status": {
                "allocation": {"devices": {"results": [
                    {"request": "nic", "driver": "knit.dev", "pool": "knit-networks", "device": "blue",
                        "shareID": "s1"},
                    {"request": "gpu", "driver": "gpu.example.com", "pool": "p", "device": "gpu-0"},
                ]}},
                "devices": devices,
            },
        }))
        .expect("a claim")
    }

    fn made() -> Attachment {
        serde_json::from_value(json!({
            "pod": {"sandbox": "s1", "namespace": "shop", "name": "web", "uid": "p1"},
            "network": "blue", "interface": "net1", "mac": "0a:58:0a:02:00:05", "mtu": 1450,
            "addresses": [{"net": "10.2.0.5/16", "gateway": "10.2.0.1"}], "routes": [],
            "dns": {"servers": [], "searches": [], "options": []},
            "host": {"name": "", "index": 0, "netns_path": null, "netns_inode": 0}, "pod_netns_inode": 0,
        }))
        .expect("an attachment")
    }

    #[test]
    fn a_status_is_written_once_and_anothers_entries_are_left_alone() {
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        let gpu = json!({"driver": "gpu.example.com", "pool": "p", "device": "gpu-0"});
        let told = devices(&claim(json!([gpu])), &[made()], at(1000)).expect("news");
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].share_id.as_deref(), Some("s1"));
        let data = told[0].network_data.as_ref().expect("data");
        assert_eq!(data.interface_name.as_deref(), Some("net1"));
        assert_eq!(data.ips.as_deref(), Some(&["10.2.0.5/16".to_owned()][..]));
        let mut there = serde_json::to_value(&told).expect("JSON");
        there.as_array_mut().expect("a list").push(gpu);
        assert_eq!(devices(&claim(there.clone()), &[made()], at(2000)), None, "a restart is no news");
        let mut moved = made();
        moved.interface = InterfaceName::new("net2").expect("a name");
        let told = devices(&claim(there), &[moved], at(2000)).expect("another interface");
        assert_eq!(told[0].conditions.as_ref().expect("one")[0].last_transition_time, Time(at(1000)));
        assert_eq!(devices(&claim(json!([])), &[], at(2000)), None);
    }
}
