//! What a process uses: processor time and memory, from /proc.

use std::time::Duration;

use serde::Serialize;

/// What a process has used, and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Processor time since its start, in seconds.
    pub cpu_seconds: f64,
    /// Resident memory, in bytes.
    pub memory_bytes: u64,
}

/// Ticks of /proc per second: 100 on all machines that Linux runs on here.
const TICKS: f64 = 100.0;

/// What this process uses; nothing if it is gone.
#[must_use]
pub fn usage(pid: u32) -> Option<Usage> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    parse(&stat, &status)
}

fn parse(stat: &str, status: &str) -> Option<Usage> {
    // The name may hold spaces and brackets: fields are counted from the last bracket.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: f64 = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = resident.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(Usage { cpu_seconds: ticks / TICKS, memory_bytes: kilobytes * 1024 })
}

impl Usage {
    /// The share of one processor that was used since an earlier look.
    #[must_use]
    pub fn share_since(self, before: Self, time: Duration) -> f64 {
        (self.cpu_seconds - before.cpu_seconds).max(0.0) / time.as_secs_f64().max(0.001)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_is_no_field() {
        let stat = "17 (a ) b) S 1 17 17 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 3 0 100 1000 200";
        let found = parse(stat, "Name:\ta\nVmRSS:\t    2048 kB\n").expect("numbers");
        assert_eq!(found, Usage { cpu_seconds: 3.0, memory_bytes: 2 * 1024 * 1024 });
        assert!(usage(std::process::id()).is_some_and(|own| own.memory_bytes > 0));
    }
}
