//! What processes use, read from /proc: a lab, or a node of a cluster, is a tree of processes below one.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result};
use knit_kernel::testing::cpu_time_of;

/// One process.
pub struct Process {
    id: u32,
    /// User and system time of itself. `/proc` rounds it down to ticks of 10 ms; an agent starts in a few of
    /// these.
    own: Duration,
    /// The same of its children that have ended.
    ended: Duration,
    command: String,
}

/// The kernel counts CPU time for /proc in hundredths of a second, on every architecture that Linux knows.
const TICKS_PER_SECOND: u64 = 100;

/// A process and all below it.
pub fn tree(root: u32) -> Result<Vec<Process>> {
    let mut parents: BTreeMap<u32, (u32, Process)> = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").context("/proc cannot be read")? {
        let name = entry.context("/proc cannot be read")?.file_name();
        let Some(id) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // One that has ended meanwhile is counted by its parent.
        if let Some((parent, process)) = read(id) {
            parents.insert(id, (parent, process));
        }
    }
    let below = |mut id: u32| {
        while id != root {
            match parents.get(&id) {
                Some((parent, _)) if *parent != 0 => id = *parent,
                _ => return false,
            }
        }
        true
    };
    let inside: Vec<u32> = parents.keys().copied().filter(|id| below(*id)).collect();
    Ok(inside.into_iter().filter_map(|id| parents.remove(&id)).map(|(_, process)| process).collect())
}

fn read(id: u32) -> Option<(u32, Process)> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name, in parentheses, may hold anything; what follows the last one are numbers from field 3 on.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |field: usize| fields.get(field - 3).and_then(|text| text.parse::<u64>().ok());
    let ended = Duration::from_millis((number(16)? + number(17)?) * 1000 / TICKS_PER_SECOND);
    let own = cpu_time_of(id).ok()?;
    let command = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).replace('\0', " ");
    Some((u32::try_from(number(4)?).ok()?, Process { id, own, ended, command }))
}

impl Process {
    /// The CPU time of it, and of its children that have ended.
    pub fn cpu(&self) -> Duration {
        self.own + self.ended
    }

    /// What it runs: the name of its program's file.
    pub fn program(&self) -> &str {
        let first = self.command.split(' ').next().unwrap_or_default();
        first.rsplit('/').next().unwrap_or_default()
    }

    /// Whether its command line, arguments joined by spaces, contains these words.
    pub fn runs(&self, words: &str) -> bool {
        self.command.contains(words)
    }

    /// Its resident memory, in MiB.
    pub fn resident(&self) -> Result<f64> {
        let path = format!("/proc/{}/status", self.id);
        let status = std::fs::read_to_string(&path).with_context(|| format!("{path} cannot be read"))?;
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
        Ok(kib.unwrap_or(0.0) / 1024.0)
    }
}
