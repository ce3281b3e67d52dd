//! A sandbox's record: the steps it can take, and that it is written down and read back.

use std::path::PathBuf;

use knit_ipam::{Addresses, LeaseKind, Mac, PodRef};
use knit_ledger::{
    Attachment, AttachmentPlan, AttachmentState, Leased, NetnsRef, Opaque, SandboxRecord, TransitionError,
};
use serde_json::json;

fn plan(interface: &str) -> AttachmentPlan {
    let addresses = Addresses::from_list(&["10.0.0.3".parse().unwrap(), "fd00::3".parse().unwrap()]).unwrap();
    AttachmentPlan {
        interface: interface.into(),
        network: "default".into(),
        runtime: "knit.dev/linux".into(),
        lease: Some(Leased { addresses, mac: Mac([10, 1, 10, 0, 0, 3]), kind: LeaseKind::Dynamic }),
        host_interface: Some("kn0a0003".into()),
        parameters: Opaque::NONE,
    }
}

fn made() -> Opaque {
    Opaque::of(&json!({"ifindex": 7})).unwrap()
}

fn record() -> SandboxRecord {
    let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("u1".into()) };
    let netns = NetnsRef { path: PathBuf::from("/run/netns/cni-1"), inode: 4_026_532_001, device: 4 };
    SandboxRecord::planned("s1", Some(pod), netns, 17, [plan("eth0"), plan("net1")]).unwrap()
}

fn states(record: &SandboxRecord) -> Vec<&AttachmentState> {
    record.attachments().iter().map(Attachment::state).collect()
}

#[test]
fn planned_attached_detaching_gone() {
    let mut record = record();
    assert_eq!(states(&record), [&AttachmentState::Planned, &AttachmentState::Planned]);
    record.attached("eth0", made()).unwrap();
    assert!(!record.is_attached());
    record.attached("net1", Opaque::NONE).unwrap();
    assert!(record.is_attached());
    assert!(matches!(record.gone("eth0"), Err(TransitionError::NotLeaving { .. })), "marked first");
    record.detaching("eth0").unwrap();
    record.detaching("eth0").unwrap();
    assert!(matches!(record.attached("eth0", Opaque::NONE), Err(TransitionError::Leaving { .. })));
    assert_eq!(record.leases().count(), 2, "its address is not free yet");
    record.gone("eth0").unwrap();
    assert!(matches!(record.gone("eth0"), Err(TransitionError::Unknown { .. })));
    record.plan(plan("net2")).unwrap();
    assert!(matches!(record.plan(plan("net1")), Err(TransitionError::Duplicate { .. })));
    record.detach_all();
    record.gone("net1").unwrap();
    record.gone("net2").unwrap();
    assert!(record.is_empty());
}

#[test]
fn written_down_and_read_back() {
    let mut record = record();
    record.attached("eth0", made()).unwrap();
    record.detaching("net1").unwrap();
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(
        text,
        concat!(
            r#"{"sandbox":"s1","pod":{"namespace":"shop","name":"web-0","uid":"u1"},"#,
            r#""netns":{"path":"/run/netns/cni-1","inode":4026532001,"device":4},"created_at":17,"#,
            r#""attachments":[{"interface":"eth0","network":"default","runtime":"knit.dev/linux","#,
            r#""lease":{"ipv4":"10.0.0.3","ipv6":"fd00::3","mac":"0a:01:0a:00:00:03","kind":"dynamic"},"#,
            r#""host_interface":"kn0a0003","state":"attached","made":{"ifindex":7}},"#,
            r#"{"interface":"net1","network":"default","runtime":"knit.dev/linux","#,
            r#""lease":{"ipv4":"10.0.0.3","ipv6":"fd00::3","mac":"0a:01:0a:00:00:03","kind":"dynamic"},"#,
            r#""host_interface":"kn0a0003","state":"detaching","made":null}]}"#,
        )
    );
    assert_eq!(serde_json::from_str::<SandboxRecord>(&text).unwrap(), record);
    let twice = text.replace("net1", "eth0");
    assert!(serde_json::from_str::<SandboxRecord>(&twice).is_err(), "two attachments of one name");
    let planned = serde_json::to_string(&self::record()).unwrap();
    assert_eq!(serde_json::from_str::<SandboxRecord>(&planned).unwrap(), self::record());
}

#[test]
fn what_is_kept_for_others_comes_back_as_it_was() {
    let here = Opaque::of(&json!({"a": [1, "two", null], "b": {"c": 1.5}})).unwrap();
    let there: Opaque = serde_json::from_str(r#" {"b": {"c": 1.5}, "a": [1, "two", null]} "#).unwrap();
    assert_eq!(here, there, "the order of fields does not count");
    assert_ne!(here, made());
    assert_eq!(here.read::<serde_json::Value>().unwrap()["a"][1], "two");
    assert!(here.read::<Vec<u8>>().is_err(), "as something else");
    let nothing: Opaque = serde_json::from_str("null").unwrap();
    assert!(nothing.is_none() && nothing == Opaque::NONE && nothing != here);
    assert!(nothing.read::<Vec<u8>>().is_err());
}
