//! What is said in the status of claims: the interface that each device became, with its addresses and MAC.
//! Off the pod's way, and tried again until it is told.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim, ResourceClaimStatus};
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

use super::again::Retries;
use super::{ClaimEvent, NotReady};
use crate::claims::network_data;
use crate::core::Core;

/// The condition of a device, and its reason when the sandbox has ended.
const READY: &str = "Ready";
const DETACHED: &str = "Detached";

/// What is told of claims, and when it is tried again.
#[derive(Default)]
struct Telling {
    /// The claims of sandboxes that were told of.
    told: BTreeMap<SandboxId, BTreeSet<ObjectRef>>,
    /// Claims that are not ready.
    not_ready: BTreeMap<ObjectRef, NotReady>,
}

/// What is said of a claim.
#[derive(Clone, Copy, Debug)]
enum Said<'a> {
    /// Its sandbox has these.
    Attached(&'a [Attachment]),
    /// No sandbox has it, for this reason.
    NotReady(&'a NotReady),
}

/// Writes statuses and events of claims, forever.
pub async fn write_claims(core: Core, objects: Objects) {
    let reporter = Reporter { controller: names::AGENT_MANAGER.into(), instance: core.node().to_owned() };
    let recorder = EventRecorder::start(&objects, reporter, EventLimits::default());
    let mut telling = Telling::default();
    let mut retries: Retries<About> = Retries::new();
    loop {
        let news = match retries.next() {
            None => core.report().take_of_claims().await,
            Some(next) => {
                tokio::time::timeout_at(next, core.report().take_of_claims()).await.unwrap_or_default()
            }
        };
        for event in news.events {
            recorder.tell(note(&event));
        }
        let mut about: BTreeSet<About> = news.sandboxes.into_iter().map(About::Sandbox).collect();
        about.extend(news.failed.keys().cloned().map(About::Claim));
        telling.not_ready.extend(news.failed);
        about.extend(retries.due(Instant::now()));
        // A sandbox that goes leaves claims to tell of.
        while let Some(one) = about.pop_first() {
            let told = match &one {
                About::Sandbox(sandbox) => {
                    about.extend(telling.detached(&core, sandbox).into_iter().map(About::Claim));
                    tell(&core, &objects, sandbox).await
                }
                About::Claim(claim) => telling.tell_not_ready(&core, &objects, claim).await,
            };
            retries.tried(one, told);
        }
    }
}

/// What is to be told of.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum About {
    /// What a sandbox has of its claims.
    Sandbox(SandboxId),
    /// A claim that no sandbox has.
    Claim(ObjectRef),
}

// === impl Telling ===

impl Telling {
    /// Notes which claims a sandbox has, and gives those that it has no more.
    fn detached(&mut self, core: &Core, sandbox: &SandboxId) -> Vec<ObjectRef> {
        let has: BTreeSet<ObjectRef> = {
            let books = core.sandboxes().books();
            books.get(sandbox).map(by_claim).unwrap_or_default().into_iter().map(|(claim, _)| claim).collect()
        };
        let had = if has.is_empty() {
            self.told.remove(sandbox)
        } else {
            self.told.insert(sandbox.clone(), has.clone())
        };
        let gone: Vec<ObjectRef> = had.unwrap_or_default().difference(&has).cloned().collect();
        for claim in &gone {
            let message = "The pod's sandbox has ended, and its interface with it.".to_owned();
            self.not_ready.insert(claim.clone(), NotReady { reason: DETACHED, message });
        }
        gone
    }

    /// Says that a claim is not ready, unless a sandbox has it by now; false if it is to be tried again.
    async fn tell_not_ready(&mut self, core: &Core, objects: &Objects, claim: &ObjectRef) -> bool {
        let is_lent = core.sandboxes().books().lent_to(&Owner::claim(claim.clone())).is_some();
        let Some(why) = self.not_ready.get(claim).filter(|_| !is_lent) else {
            self.not_ready.remove(claim);
            return true;
        };
        if let Err(error) = tell_one(objects, claim, Said::NotReady(why)).await {
            tracing::warn!(%claim, "cannot write its status yet: {}", error.with_causes());
            return false;
        }
        self.not_ready.remove(claim);
        true
    }
}

/// Says what a sandbox's claims became; false if it is to be tried again.
async fn tell(core: &Core, objects: &Objects, sandbox: &SandboxId) -> bool {
    let by_claim = core.sandboxes().books().get(sandbox).map(by_claim).unwrap_or_default();
    let mut complete = true;
    for (claim, made) in by_claim {
        if let Err(error) = tell_one(objects, &claim, Said::Attached(&made)).await {
            tracing::warn!(%claim, "cannot write its status yet: {}", error.with_causes());
            complete = false;
        }
    }
    complete
}

async fn tell_one(objects: &Objects, claim: &ObjectRef, said: Said<'_>) -> knit_objects::Result<()> {
    let key = Key::namespaced(claim.namespace.as_str(), claim.name.as_str());
    let Some(found) = objects.get::<ResourceClaim>(&key).await? else { return Ok(()) };
    if found.metadata.uid.as_deref() != Some(&claim.uid) {
        return Ok(());
    }
    let Some(devices) = devices(&found, said, Timestamp::now()) else { return Ok(()) };
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
fn devices(claim: &ResourceClaim, said: Said<'_>, now: Timestamp) -> Option<Vec<AllocatedDeviceStatus>> {
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
        let was = before.iter().find(|was| {
            was.pool == device.pool && was.device == device.device && was.share_id == device.share
        });
        let (made, why) = match said {
            Said::Attached(made) => {
                // A claim has a Network once.
                let Some(made) = made.iter().find(|made| names::device_of(&made.network) == device.device)
                else {
                    continue;
                };
                (Some(made), None)
            }
            // That it ended says nothing of one that nothing was said of.
            Said::NotReady(why) if was.is_none() && why.reason == DETACHED => continue,
            Said::NotReady(why) => (None, Some(why)),
        };
        let mut ready = Condition {
            type_: READY.to_owned(),
            status: if why.is_none() { "True" } else { "False" }.to_owned(),
            reason: why.map_or("Attached", |why| why.reason).to_owned(),
            message: why
                .map_or("attached and verified", |why| why.message.as_str())
                .chars()
                .take(1024)
                .collect(),
            last_transition_time: Time(now),
            observed_generation: None,
        };
        let known = was.and_then(|was| was.conditions.as_ref()?.iter().find(|c| c.type_ == READY));
        if let Some(known) = known.filter(|known| known.status == ready.status) {
            ready.last_transition_time = known.last_transition_time.clone();
        }
        let data = |made: &Attachment| {
            RawExtension(json!({"podNetwork": {"kind": names::POD_NETWORK_KIND, "name": made.network}}))
        };
        told.push(AllocatedDeviceStatus {
            driver: names::DRIVER.to_owned(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share.clone(),
            conditions: Some(vec![ready]),
            data: made.map(data).or_else(|| was.and_then(|was| was.data.clone())),
            network_data: made.map(network_data),
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
        let told = devices(&claim(json!([gpu])), Said::Attached(&[made()]), at(1000)).expect("news");
        assert_eq!(told.len(), 1);
        assert_eq!(told[0].share_id.as_deref(), Some("s1"));
        let data = told[0].network_data.as_ref().expect("data");
        assert_eq!(data.interface_name.as_deref(), Some("net1"));
        assert_eq!(data.ips.as_deref(), Some(&["10.2.0.5/16".to_owned()][..]));
        let mut there = serde_json::to_value(&told).expect("JSON");
        there.as_array_mut().expect("a list").push(gpu);
        assert_eq!(
            devices(&claim(there.clone()), Said::Attached(&[made()]), at(2000)),
            None,
            "a restart is no news"
        );
        let mut moved = made();
        moved.interface = InterfaceName::new("net2").expect("a name");
        let told = devices(&claim(there), Said::Attached(&[moved]), at(2000)).expect("another interface");
        assert_eq!(told[0].conditions.as_ref().expect("one")[0].last_transition_time, Time(at(1000)));
        assert_eq!(devices(&claim(json!([])), Said::Attached(&[]), at(2000)), None);
    }

    #[test]
    fn a_claim_whose_pod_was_not_attached_or_has_ended_was_shown_as_ready() {
        let at = |second: i64| Timestamp::from_second(second).expect("a time");
        let why = |reason: &'static str| NotReady { reason, message: "why".to_owned() };
        let failed =
            devices(&claim(json!([])), Said::NotReady(&why("AttachFailed")), at(1000)).expect("news");
        let ready = |told: &[AllocatedDeviceStatus]| told[0].conditions.as_ref().expect("one")[0].clone();
        let condition = ready(&failed);
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "AttachFailed"));
        assert!(failed[0].network_data.is_none() && failed.len() == 1);
        let there = serde_json::to_value(&failed).expect("JSON");
        let again = devices(&claim(there.clone()), Said::NotReady(&why("AttachFailed")), at(2000));
        assert_eq!(again, None, "the same again is no news");
        let made = devices(&claim(there), Said::Attached(&[made()]), at(3000)).expect("attached now");
        assert_eq!(
            (ready(&made).status.as_str(), ready(&made).last_transition_time),
            ("True", Time(at(3000)))
        );
        let there = serde_json::to_value(&made).expect("JSON");
        let gone =
            devices(&claim(there), Said::NotReady(&why(DETACHED)), at(4000)).expect("its pod has ended");
        assert_eq!((ready(&gone).status.as_str(), ready(&gone).reason.as_str()), ("False", DETACHED));
        assert!(gone[0].network_data.is_none() && gone[0].data.is_some(), "{gone:?}");
        assert_eq!(devices(&claim(json!([])), Said::NotReady(&why(DETACHED)), at(5000)), None);
    }
}
