//! A ledger that an earlier version wrote is read: what was made for running pods is known, and nothing is
//! lost.
//!
//! `fixtures/ledger-e3f7f38` was written by the code of commit e3f7f38: one sandbox that is attached, with an
//! interface that an object asked for; one that is planned; one that is leaving; one that is gone; one of
//! another runtime.

use std::path::Path;

use knit_ledger::{AttachmentState, SandboxRecord, Scan, read};
use serde_json::Value;

#[test]
fn a_ledger_of_e3f7f38_is_read() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ledger-e3f7f38");
    let (records, scan) = read::<SandboxRecord>(&path).unwrap();
    assert_eq!(scan, Scan::Whole);
    let one = "1".repeat(64);
    let keys: Vec<&str> = records.iter().map(SandboxRecord::sandbox).collect();
    assert_eq!(keys, [one.as_str(), "2-planned", "3_leaving.x", "5-other"], "4-gone was removed");

    let record = &records[0];
    assert_eq!(record.pod().unwrap().to_string(), "shop/web-0");
    assert!(record.is_attached());
    let [eth0, net1] = record.attachments() else { panic!("two interfaces") };
    let details: Value = eth0.plan().parameters.read().unwrap();
    assert_eq!(details["door"]["Cni"], "knit");
    assert_eq!(details["ports"][0]["host_port"], 5353);
    let AttachmentState::Attached(made) = eth0.state() else { panic!("attached") };
    let made: Value = made.read().unwrap();
    assert_eq!(made["addresses"][1]["net"], "fd77::a/128");
    let details: Value = net1.plan().parameters.read().unwrap();
    assert_eq!(details["door"]["Object"], "shop/more", "by its name alone, as that version kept it");

    assert_eq!(records[1].attachments()[0].state(), &AttachmentState::Planned);
    let leaving = records[2].attachments().iter().map(|a| match a.state() {
        AttachmentState::Detaching(made) => made.is_none(),
        other => panic!("{other:?}"),
    });
    assert_eq!(leaving.collect::<Vec<_>>(), [false, true], "what was there, and what was never made");

    let leases = records.iter().flat_map(SandboxRecord::leases);
    let leases: Vec<String> = leases.map(|lease| format!("{} {}", lease.network, lease.addresses)).collect();
    let wanted = [
        "default 10.77.0.10,fd77::a",
        "blue 10.77.0.11,fd77::b",
        "blue 10.77.0.12,fd77::c",
        "default 10.77.0.13,fd77::d",
        "blue 10.77.0.14,fd77::e",
    ];
    assert_eq!(leases, wanted, "no address is free that a record holds");
}
