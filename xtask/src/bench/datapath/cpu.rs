//! The CPU time of the whole machine: most of what a packet costs is spent in soft interrupts, which belong
//! to no process.

use anyhow::{Context, Result};

/// Ticks that the machine's processors have worked since it started.
pub struct Cpu(u64);

/// How long a tick of `/proc/stat` is, in microseconds: user space has always seen hundredths of a second.
const TICK: f64 = 10_000.0;

impl Cpu {
    pub fn now() -> Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
        worked(&stat).map(Self).context("/proc/stat has no line \"cpu\"")
    }

    /// What was spent since, in microseconds.
    pub fn since(&self) -> Result<f64> {
        Ok(Self::now()?.0.saturating_sub(self.0) as f64 * TICK)
    }
}

/// All but idle, waiting for disks, and stolen by other machines: user, nice, system, irq, softirq.
fn worked(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    Some([0, 1, 2, 5, 6].iter().filter_map(|&field| fields.get(field)).sum())
}

#[cfg(test)]
mod tests {
    #[test]
    fn idle_and_stolen_time_is_not_work() {
        let stat = "cpu  10 20 30 4000 500 6 7 8000 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(super::worked(stat), Some(10 + 20 + 30 + 6 + 7));
    }
}
