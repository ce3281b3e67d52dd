//! What recording costs: a pod's record planned, attached and removed, with 500 others there, on a given
//! directory.
//!
//! `cargo run --release -p knit-ledger --example append_cost -- /run`

use std::path::PathBuf;
use std::time::{Duration, Instant};

use knit_ipam::{Addresses, LeaseKind, Mac};
use knit_ledger::{AttachmentPlan, Details, Door, Entry, Leased, Ledger, NetnsRef, SandboxRecord, Shared};
use knit_types::{Attachment, Dns, HostEnd, InterfaceName, SandboxId};

fn eth0() -> InterfaceName {
    InterfaceName::new("eth0").expect("a name")
}

fn record(n: u32) -> SandboxRecord {
    let addresses = Addresses::V4(std::net::Ipv4Addr::from_bits(0x0a00_0000 + n)).into();
    let details = Details {
        door: Door::Cni("knit".into()),
        main: true,
        default_route: true,
        ports: Vec::new(),
        dns: Dns::default(),
    };
    let plan = AttachmentPlan {
        interface: eth0(),
        network: "default".into(),
        runtime: "knit.dev/linux".into(),
        lease: Some(Leased { addresses, mac: Mac([10, 1, 10, 0, 0, 3]), kind: LeaseKind::Dynamic }),
        loan: None,
        host_interface: Some(format!("kn{n:08x}")),
        details: Shared::new(details),
    };
    let netns = NetnsRef { path: PathBuf::from("/run/netns/x"), inode: u64::from(n), device: 4 };
    let id = SandboxId::new(format!("{n:064x}")).expect("an id");
    SandboxRecord::planned(id, None, netns, 0, [plan]).expect("one interface")
}

fn made(record: &SandboxRecord) -> Attachment {
    Attachment {
        pod: record.runtime_pod(),
        network: "default".into(),
        interface: eth0(),
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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base = std::env::args().nth(1).unwrap_or_else(|| "/dev/shm".to_owned());
    let dir = PathBuf::from(base).join(format!("knit-ledger-{}", std::process::id()));
    let mut ledger = Ledger::open(dir.join("ledger"))?.ledger;
    for n in 0..500 {
        ledger.put(Entry::from(record(n)))?;
    }
    let mut times: Vec<Duration> = Vec::new();
    for n in 500..20_500 {
        let mut record = record(n);
        let key = record.sandbox().to_string();
        let mut timed = |step: &mut dyn FnMut(&mut Ledger<Entry>) -> Result<(), knit_ledger::LedgerError>| {
            let start = Instant::now();
            let result = step(&mut ledger);
            times.push(start.elapsed());
            result
        };
        timed(&mut |ledger| ledger.put(record.clone().into()))?;
        record.attached(&eth0(), made(&record))?;
        timed(&mut |ledger| ledger.put(record.clone().into()))?;
        timed(&mut |ledger| ledger.remove(&key))?;
    }
    times.sort_unstable();
    let at = |share: f64| times[(share * (times.len() - 1) as f64) as usize];
    let mean = times.iter().sum::<Duration>() / times.len() as u32;
    println!(
        "{} writes with 500 records: mean {mean:?}, p50 {:?}, p99 {:?}, max {:?} (a compaction); file {} KiB",
        times.len(),
        at(0.5),
        at(0.99),
        at(1.0),
        ledger.bytes() >> 10
    );
    drop(ledger);
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
