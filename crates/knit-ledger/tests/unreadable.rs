//! Records that are whole but cannot be read are kept, told, and hold their addresses; they hide no other
//! record.

use std::path::Path;

use knit_ledger::testing::FaultFs;
use knit_ledger::{Entry, Ledger, Opened, Options, Recovery};
use serde_json::{Value, json};

const PATH: &str = "/run/knit/ledger";

fn record(sandbox: &str, address: &str) -> Value {
    json!({
        "sandbox": sandbox,
        "pod": {"namespace": "shop", "name": "web-0", "uid": "u1"},
        "netns": {"path": "/run/netns/cni-1", "inode": 4_026_532_001_u64, "device": 4},
        "created_at": 17,
        "attachments": [{
            "interface": "eth0",
            "network": "default",
            "runtime": "knit.dev/linux",
            "lease": {"ipv4": address, "mac": "0a:01:0a:00:00:03", "kind": "dynamic"},
            "parameters": {"door": {"Cni": "knit"}, "main": true, "default_route": true},
            "state": "planned",
        }],
    })
}

/// A ledger with one frame for each of these lists of changes.
fn file(frames: &[Value]) -> Vec<u8> {
    let mut bytes = b"KNITLOG\n".to_vec();
    bytes.extend_from_slice(&1_u32.to_le_bytes());
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    for frame in frames {
        let content = serde_json::to_vec(frame).unwrap();
        let mut head = (content.len() as u32).to_le_bytes().to_vec();
        head.extend_from_slice(&crc32c::crc32c(&content).to_le_bytes());
        head.extend_from_slice(&crc32c::crc32c(&head).to_le_bytes());
        bytes.extend_from_slice(&head);
        bytes.extend_from_slice(&content);
    }
    bytes
}

fn open(fs: &FaultFs) -> Opened<Entry, FaultFs> {
    Ledger::open_with(fs.clone(), PATH, Options { compact_at: 0, compact_factor: 1, sync: false }).unwrap()
}

fn holding(frames: &[Value]) -> FaultFs {
    let fs = FaultFs::new();
    fs.set_content(Path::new(PATH), file(frames));
    fs
}

fn keys(ledger: &Ledger<Entry, FaultFs>) -> Vec<&str> {
    ledger.records().map(knit_ledger::Record::key).collect()
}

/// What can be wrong with a record, each with a record that has it.
fn broken() -> Vec<(&'static str, Value)> {
    let with = |pointer: &str, value: Value| {
        let mut record = record("s2", "10.0.0.2");
        *record.pointer_mut(pointer).unwrap() = value;
        record
    };
    let mut newer = record("s2", "10.0.0.2");
    newer["format"] = json!(3);
    let mut two_owners = record("s2", "10.0.0.2");
    two_owners["claim"] = json!({"namespace": "shop", "name": "c", "uid": "u"});
    vec![
        ("a door that is unknown", with("/attachments/0/parameters", json!({"door": {"Carrier": "pigeon"}}))),
        ("no details", with("/attachments/0/parameters", Value::Null)),
        ("an interface name that no link can have", with("/attachments/0/interface", json!("default"))),
        ("a state that does not exist", with("/attachments/0/state", json!("melted"))),
        ("attached, and nobody knows how", with("/attachments/0/state", json!("attached"))),
        ("no network namespace", with("/netns", Value::Null)),
        ("a MAC that is none", with("/attachments/0/lease/mac", json!("many"))),
        ("no time", with("/created_at", json!("yesterday"))),
        ("a newer form", newer),
        ("two owners", two_owners),
    ]
}

#[test]
fn a_record_that_cannot_be_read_hides_no_other_and_keeps_its_addresses() {
    for (what, broken) in broken() {
        let fs = holding(&[
            json!([{"put": record("s1", "10.0.0.1")}]),
            json!([{"put": broken}, {"put": record("s3", "10.0.0.3")}]),
            json!([{"put": record("s4", "10.0.0.4")}]),
        ]);
        // Twice: the next agent is told, too, though the file was written again in between.
        for start in ["first", "second"] {
            let opened = open(&fs);
            assert_eq!(opened.recovery, Recovery::Clean, "{what}, {start} start");
            assert_eq!(keys(&opened.ledger), ["s1", "s3", "s4"], "{what}, {start} start");
            let found: Vec<_> = opened.ledger.unreadable().collect();
            assert_eq!(found.len(), 1, "{what}");
            assert_eq!(found[0].sandbox().unwrap().as_str(), "s2", "{what}");
            assert!(!found[0].why().is_empty());
            let text: Value = serde_json::from_str(found[0].text().get()).unwrap();
            assert_eq!(text, broken, "word for word");
            let holds = found[0].holds();
            assert_eq!(holds.len(), 1, "{what}");
            assert_eq!(holds[0].network.as_deref(), Some("default"), "{what}");
            assert!(holds[0].addresses.contains(&"10.0.0.2".parse().unwrap()), "{what}");
            assert_eq!(found[0].pod().unwrap().name, "web-0");
        }
    }
}

#[test]
fn a_record_of_a_newer_form_says_so() {
    let mut newer = record("s2", "10.0.0.2");
    newer["format"] = json!(3);
    newer["attachments"] = json!("somewhere else");
    let opened = open(&holding(&[json!([{"put": newer}])]));
    let found = opened.ledger.unreadable().next().expect("it cannot be read");
    assert_eq!(found.why(), "it has format 3, and this agent knows up to 2: run the newer version again");
}

#[test]
fn what_the_runtime_gave_counts_where_the_lease_cannot_be_made_out() {
    let mut broken = record("s2", "10.0.0.2");
    broken["attachments"][0]["lease"] = json!(7);
    broken["attachments"][0]["made"] =
        json!({"addresses": [{"net": "10.0.0.2/24"}, {"net": "fd00::2/128"}], "routes": ["10.0.0.0/24"]});
    let opened = open(&holding(&[json!([{"put": broken}])]));
    let holds = opened.ledger.unreadable().next().expect("it cannot be read").holds();
    let addresses: Vec<String> = holds[0].addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.0.0.2", "fd00::2"]);
}

#[test]
fn it_goes_when_it_is_replaced_or_removed() {
    let (_, broken) = broken().remove(0);
    let sound: Entry = serde_json::from_value(record("s2", "10.0.0.2")).unwrap();
    let unreadable = |fs: &FaultFs| open(fs).ledger.unreadable().count();

    let fs = holding(&[json!([{"put": broken}])]);
    open(&fs).ledger.put(sound.clone()).unwrap();
    assert_eq!((unreadable(&fs), keys(&open(&fs).ledger)), (0, vec!["s2"]));

    let fs = holding(&[json!([{"put": broken}])]);
    open(&fs).ledger.remove("s2").unwrap();
    assert_eq!(unreadable(&fs), 0);

    // In the file as well: what came later counts.
    let fs = holding(&[json!([{"put": broken}]), json!([{"put": sound}])]);
    assert_eq!(unreadable(&fs), 0);
    let fs = holding(&[json!([{"put": sound}]), json!([{"put": broken}])]);
    assert_eq!(unreadable(&fs), 1);
    assert!(open(&fs).ledger.is_empty(), "what is known of s2 is old");
    let fs = holding(&[json!([{"put": broken}]), json!([{"remove": "s2"}])]);
    assert_eq!(unreadable(&fs), 0);
}

#[test]
fn a_record_of_nobody_knows_whom_is_kept_all_the_same() {
    let fs = holding(&[json!([{"put": {"who": "10.0.0.9"}}, {"put": record("s1", "10.0.0.1")}])]);
    for _ in 0..2 {
        let opened = open(&fs);
        assert_eq!(keys(&opened.ledger), ["s1"]);
        let found: Vec<_> = opened.ledger.unreadable().collect();
        assert!(found.len() == 1 && found[0].key().starts_with("unknown:"));
        assert_eq!(found[0].sandbox(), None);
        assert_eq!(found[0].holds()[0].network, None, "in any Network");
        assert_eq!(found[0].holds()[0].addresses.len(), 1);
    }
}
