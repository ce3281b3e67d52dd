//! Ledgers that earlier versions wrote are read: what was made for running pods is known, and nothing is
//! lost. What the agent makes of them is tested in knit-node.
//!
//! `fixtures/ledger-e3f7f38` was written by the code of commit e3f7f38: one sandbox that is attached, with an
//! interface that an object asked for; one that is planned; one that is leaving; one that is gone; one of
//! another runtime. `fixtures/ledger-c14f8c8` was written by an agent of commit c14f8c8, the last one whose
//! records were not typed.

use std::path::Path;

use knit_ledger::{AttachmentState, Door, Entry, ObjectDoor, SandboxRecord, Scan, read};

fn sandboxes(fixture: &str) -> Vec<SandboxRecord> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    let (content, scan) = read::<Entry>(&path).unwrap();
    assert_eq!(scan, Scan::Whole);
    assert_eq!(content.unreadable.len(), 0, "{:?}", content.unreadable);
    content.records.values().filter_map(|entry| entry.sandbox().cloned()).collect()
}

fn leases(records: &[SandboxRecord]) -> Vec<String> {
    let leases = records.iter().flat_map(SandboxRecord::leases);
    leases.map(|lease| format!("{} {}", lease.network, lease.addresses)).collect()
}

fn ids(records: &[SandboxRecord]) -> Vec<&str> {
    records.iter().map(|record| record.sandbox().as_str()).collect()
}

#[test]
fn a_ledger_of_e3f7f38_is_read() {
    let records = sandboxes("ledger-e3f7f38");
    let one = "1".repeat(64);
    assert_eq!(ids(&records), [one.as_str(), "2-planned", "3_leaving.x", "5-other"], "4-gone was removed");

    let record = &records[0];
    assert_eq!(record.pod().unwrap().to_string(), "shop/web-0");
    assert!(record.is_attached());
    let [eth0, net1] = record.attachments() else { panic!("two interfaces") };
    assert_eq!(eth0.details().door, Door::Cni("knit".into()));
    assert_eq!(eth0.details().ports[0].host_port, 5353);
    assert_eq!(eth0.made().unwrap().addresses[1].net.to_string(), "fd77::a/128");
    let door = Door::Object(ObjectDoor { name: "shop/more".into(), uid: None });
    assert_eq!(net1.details().door, door, "by its name alone, as that version kept it");

    assert_eq!(records[1].attachments()[0].state(), &AttachmentState::Planned);
    let leaving = records[2].attachments().iter().map(|a| match a.state() {
        AttachmentState::Detaching(made) => made.is_none(),
        other => panic!("{other:?}"),
    });
    assert_eq!(leaving.collect::<Vec<_>>(), [false, true], "what was there, and what was never made");
    let wanted = [
        "default 10.77.0.10,fd77::a",
        "blue 10.77.0.11,fd77::b",
        "blue 10.77.0.12,fd77::c",
        "default 10.77.0.13,fd77::d",
        "blue 10.77.0.14,fd77::e",
    ];
    assert_eq!(leases(&records), wanted, "no address is free that a record holds");
}

#[test]
fn a_ledger_of_c14f8c8_is_read() {
    let records = sandboxes("ledger-c14f8c8");
    assert_eq!(ids(&records), ["four", "leaving", "one", "three", "two"], "gone was removed");
    let door = |n: usize, m: usize| records[n].attachments()[m].details().door.clone();
    assert_eq!((door(0, 0), door(2, 0)), (Door::Kni, Door::Cni("knit".into())));
    let object = ObjectDoor { name: "shop/more".into(), uid: Some("u-more".into()) };
    assert_eq!(door(3, 1), Door::Object(object));
    let wanted = [
        "default 10.1.0.4",
        "default 10.1.0.6",
        "blue 10.2.0.5",
        "default 10.1.0.2",
        "blue 10.2.0.3",
        "other 10.4.0.3",
        "default 10.1.0.3",
        "blue 10.2.0.9",
        "green 10.2.0.17",
    ];
    assert_eq!(leases(&records), wanted, "no address is free that a record holds");
}
