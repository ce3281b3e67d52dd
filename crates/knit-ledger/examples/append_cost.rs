//! What recording costs: a pod's record planned, attached and removed, with 500 others there, on a given
//! directory.
//!
//! `cargo run --release -p knit-ledger --example append_cost -- /run`

use std::path::PathBuf;
use std::time::{Duration, Instant};

use knit_ipam::{Addresses, LeaseKind, Mac};
use knit_ledger::{AttachmentPlan, Leased, Ledger, NetnsRef, SandboxRecord};

fn record(n: u32) -> SandboxRecord {
    let addresses = Addresses::V4(std::net::Ipv4Addr::from_bits(0x0a00_0000 + n));
    let plan = AttachmentPlan {
        interface: "eth0".into(),
        network: "default".into(),
        runtime: "knit.dev/linux".into(),
        lease: Some(Leased { addresses, mac: Mac([10, 1, 10, 0, 0, 3]), kind: LeaseKind::Dynamic }),
        host_interface: Some(format!("kn{n:08x}")),
        parameters: knit_ledger::Opaque::NONE,
    };
    let netns = NetnsRef { path: PathBuf::from("/run/netns/x"), inode: u64::from(n), device: 4 };
    SandboxRecord::planned(format!("{n:064x}"), None, netns, 0, [plan]).expect("one interface")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let base = std::env::args().nth(1).unwrap_or_else(|| "/dev/shm".to_owned());
    let dir = PathBuf::from(base).join(format!("knit-ledger-{}", std::process::id()));
    let mut ledger = Ledger::open(dir.join("ledger"))?.ledger;
    for n in 0..500 {
        ledger.put(record(n))?;
    }
    let mut times: Vec<Duration> = Vec::new();
    for n in 500..20_500 {
        let mut record = record(n);
        let key = record.sandbox().to_owned();
        let mut timed =
            |step: &mut dyn FnMut(&mut Ledger<SandboxRecord>) -> Result<(), knit_ledger::LedgerError>| {
                let start = Instant::now();
                let result = step(&mut ledger);
                times.push(start.elapsed());
                result
            };
        timed(&mut |ledger| ledger.put(record.clone()))?;
        record.attached("eth0", knit_ledger::Opaque::NONE)?;
        timed(&mut |ledger| ledger.put(record.clone()))?;
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
