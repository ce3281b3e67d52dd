//! Records: the steps that they can take, whose they are, and that they are written down and read back.

use std::path::PathBuf;

use knit_ipam::LeaseKind;
use knit_ledger::{
    Attachment, AttachmentPlan, AttachmentState, Details, Door, Entry, Leased, Loan, NetnsRef, ObjectDoor,
    Record as _, Reservation, ReservedLease, SandboxRecord, Shared, TransitionError,
};
use knit_types::{
    AddressList, Attachment as Made, Dns, HostEnd, InterfaceName, Mac, ObjectRef, Owner, Pod, PodRef,
    SandboxId,
};

fn name(interface: &str) -> InterfaceName {
    InterfaceName::new(interface).unwrap()
}

fn leased(addresses: &[&str]) -> Leased {
    let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    let addresses = AddressList::from_list(&addresses).unwrap();
    Leased { addresses, mac: Mac([10, 1, 10, 0, 0, 3]), kind: LeaseKind::Dynamic }
}

fn plan(interface: &str) -> AttachmentPlan {
    AttachmentPlan {
        interface: name(interface),
        network: "default".into(),
        runtime: "knit.dev/linux".into(),
        lease: Some(leased(&["10.0.0.3", "fd00::3"])),
        loan: None,
        host_interface: Some("kn0a0003".into()),
        details: Shared::new(Details {
            door: Door::Cni("knit".into()),
            main: interface == "eth0",
            default_route: interface == "eth0",
            ports: Vec::new(),
            dns: Dns::default(),
        }),
    }
}

fn made(interface: &str) -> Made {
    Made {
        pod: Pod { sandbox: SandboxId::new("s1").unwrap(), namespace: None, name: None, uid: None },
        network: "default".into(),
        interface: name(interface),
        addresses: Vec::new(),
        mac: Mac([10, 1, 10, 0, 0, 3]),
        mtu: 1450,
        routes: Vec::new(),
        dns: Dns::default(),
        host: HostEnd::default(),
        pod_netns_inode: 7,
        ports: Vec::new(),
    }
}

fn claim() -> ObjectRef {
    ObjectRef { namespace: "shop".into(), name: "c".into(), uid: "u-c".into() }
}

fn record() -> SandboxRecord {
    let pod = PodRef { namespace: "shop".into(), name: "web-0".into(), uid: Some("u1".into()) };
    let netns = NetnsRef { path: PathBuf::from("/run/netns/cni-1"), inode: 4_026_532_001, device: 4 };
    let id = SandboxId::new("s1").unwrap();
    SandboxRecord::planned(id, Some(pod), netns, 17, [plan("eth0"), plan("net1")]).unwrap()
}

fn states(record: &SandboxRecord) -> Vec<&AttachmentState> {
    record.attachments().iter().map(Attachment::state).collect()
}

fn written(entry: impl Into<Entry>) -> (String, Entry) {
    let text = serde_json::to_string(&entry.into()).unwrap();
    let read = serde_json::from_str(&text).unwrap();
    (text, read)
}

#[test]
fn planned_attached_detaching_gone() {
    let (eth0, net1) = (name("eth0"), name("net1"));
    let mut record = record();
    assert_eq!(states(&record), [&AttachmentState::Planned, &AttachmentState::Planned]);
    record.attached(&eth0, made("eth0")).unwrap();
    assert!(!record.is_attached());
    record.attached(&net1, made("net1")).unwrap();
    assert!(record.is_attached());
    assert!(matches!(record.gone(&eth0), Err(TransitionError::NotLeaving { .. })), "marked first");
    record.detaching(&eth0).unwrap();
    record.detaching(&eth0).unwrap();
    assert!(matches!(record.attached(&eth0, made("eth0")), Err(TransitionError::Leaving { .. })));
    assert_eq!(record.leases().count(), 2, "its address is not free yet");
    record.gone(&eth0).unwrap();
    let gone = record.gone(&eth0).unwrap_err();
    assert_eq!(gone.to_string(), "sandbox s1 has no attachment for interface eth0");
    record.plan(plan("net2")).unwrap();
    assert!(matches!(record.plan(plan("net1")), Err(TransitionError::Duplicate { .. })));
    record.detaching(&net1).unwrap();
    record.detaching(&name("net2")).unwrap();
    record.gone(&net1).unwrap();
    record.gone(&name("net2")).unwrap();
    assert!(record.is_empty());
}

#[test]
fn written_down_and_read_back() {
    let mut record = record();
    record.attached(&name("eth0"), made("eth0")).unwrap();
    record.detaching(&name("net1")).unwrap();
    let (text, read) = written(record.clone());
    assert_eq!(
        text,
        concat!(
            r#"{"sandbox":"s1","pod":{"namespace":"shop","name":"web-0","uid":"u1"},"#,
            r#""netns":{"path":"/run/netns/cni-1","inode":4026532001,"device":4},"created_at":17,"#,
            r#""attachments":[{"interface":"eth0","network":"default","runtime":"knit.dev/linux","#,
            r#""lease":{"ipv4":"10.0.0.3","ipv6":"fd00::3","mac":"0a:01:0a:00:00:03","kind":"dynamic"},"#,
            r#""host_interface":"kn0a0003","parameters":{"door":{"Cni":"knit"},"main":true,"#,
            r#""default_route":true,"ports":[],"dns":{"servers":[],"searches":[],"options":[]}},"#,
            r#""state":"attached","made":{"pod":{"sandbox":"s1","namespace":null,"name":null,"uid":null},"#,
            r#""network":"default","interface":"eth0","addresses":[],"mac":"0a:01:0a:00:00:03","mtu":1450,"#,
            r#""routes":[],"dns":{"servers":[],"searches":[],"options":[]},"host":{"name":"","index":0,"#,
            r#""netns_path":null,"netns_inode":0},"pod_netns_inode":7}},"#,
            r#"{"interface":"net1","network":"default","runtime":"knit.dev/linux","#,
            r#""lease":{"ipv4":"10.0.0.3","ipv6":"fd00::3","mac":"0a:01:0a:00:00:03","kind":"dynamic"},"#,
            r#""host_interface":"kn0a0003","parameters":{"door":{"Cni":"knit"},"main":false,"#,
            r#""default_route":false,"ports":[],"dns":{"servers":[],"searches":[],"options":[]}},"#,
            r#""state":"detaching","made":null}]}"#,
        ),
        "what an agent of the last version reads"
    );
    assert_eq!(read, Entry::from(record));
    let twice = text.replace("net1", "eth0");
    assert!(serde_json::from_str::<Entry>(&twice).is_err(), "two attachments of one name");
    assert_eq!(written(self::record()).1, Entry::from(self::record()));
}

#[test]
fn several_addresses_of_a_family_and_loans_are_of_the_second_form() {
    let mut record = record();
    let many = AttachmentPlan { lease: Some(leased(&["10.0.0.3", "10.0.0.4", "fd00::3"])), ..plan("net2") };
    record.plan(many).unwrap();
    let (text, read) = written(record.clone());
    assert!(text.starts_with(r#"{"format":2,"sandbox":"s1","#), "{text}");
    assert!(text.contains(r#""ipv4":"10.0.0.3","ipv6":"fd00::3","further":["10.0.0.4"],"#), "{text}");
    assert_eq!(read, Entry::from(record.clone()));
    assert_eq!(record.leases().last().unwrap().addresses.to_string(), "10.0.0.3,fd00::3,10.0.0.4");
    record.detaching(&name("net2")).unwrap();
    record.gone(&name("net2")).unwrap();
    assert!(written(record.clone()).0.starts_with(r#"{"sandbox":"#), "the first form again");

    let loan = Loan { from: Owner::claim(claim()), interface: name("net7"), named: false };
    record.plan(AttachmentPlan { loan: Some(Box::new(loan)), ..plan("net2") }).unwrap();
    let (text, read) = written(record.clone());
    let lent = r#""loan":{"claim":{"namespace":"shop","name":"c","uid":"u-c"},"interface":"net7"},"#;
    assert!(text.starts_with(r#"{"format":2,"#) && text.contains(lent), "{text}");
    assert_eq!(read, Entry::from(record));
}

#[test]
fn an_attachment_goes_with_its_sandbox_its_object_or_its_claim() {
    let mut record = record();
    let of = |record: &SandboxRecord, interface: &str| {
        record.goes_with(record.attachment(&name(interface)).unwrap()).to_string()
    };
    assert_eq!(of(&record, "eth0"), "sandbox s1");
    let door = Door::Object(ObjectDoor { name: "shop/more".into(), uid: None });
    record.asked_by(&name("net1"), door).unwrap();
    assert_eq!(of(&record, "net1"), "object shop/more");
    let loan = Loan { from: Owner::claim(claim()), interface: name("net1"), named: true };
    record.plan(AttachmentPlan { loan: Some(Box::new(loan)), ..plan("net2") }).unwrap();
    assert_eq!(of(&record, "net2"), "claim shop/c");
}

#[test]
fn a_reservation_belongs_to_a_claim_or_an_object_and_never_to_a_sandbox() {
    assert!(Reservation::new(Owner::Sandbox(SandboxId::new("s1").unwrap()), 1).is_none());
    for owner in [Owner::claim(claim()), Owner::object(claim())] {
        let mut reservation = Reservation::new(owner.clone(), 17).unwrap();
        let lease = ReservedLease {
            interface: name("net1"),
            named: true,
            network: "blue".into(),
            runtime: "knit.dev/linux".into(),
            default_route: false,
            lease: leased(&["10.0.0.3", "10.0.0.4"]),
        };
        reservation.add(lease.clone()).unwrap();
        let pod = PodRef { namespace: "shop".into(), name: "web".into(), uid: Some("u-web".into()) };
        reservation.set_pod(Some(pod));
        assert!(matches!(reservation.add(lease.clone()), Err(TransitionError::Duplicate { .. })));
        let (text, read) = written(reservation.clone());
        assert!(text.starts_with(r#"{"format":2,""#), "{text}");
        assert_eq!((read.key(), read.owner()), (owner.key().as_str(), owner.clone()));
        assert_eq!(read, Entry::from(reservation.clone()));
        let key = reservation.leases().next().unwrap().key;
        assert_eq!((key.owner, key.interface), (owner, name("net1")));
        assert_eq!(reservation.take(&name("net1")), Some(lease));
        assert!(reservation.is_empty() && reservation.take(&name("net1")).is_none());
    }
}
