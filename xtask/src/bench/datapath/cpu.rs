//! The CPU time that packets cost: that of this process, whose threads are both ends, and that of the
//! kernel's threads for soft interrupts.
//!
//! Most of what a packet costs is spent in soft interrupts. They run in the thread that sent the packet, as
//! part of its time, to the nanosecond, unless the kernel accounts for them apart
//! (`CONFIG_IRQ_TIME_ACCOUNTING`): then they are missing here. What other programs do meanwhile is not
//! counted.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::time::{ClockId, clock_gettime};

/// The time that was spent up to now.
pub struct Cpu(Duration);

/// The kernel's threads that soft interrupts are left to when there are many.
pub struct SoftIrqThreads(Vec<PathBuf>);

impl Cpu {
    pub fn now(threads: &SoftIrqThreads) -> Result<Self> {
        let own = clock_gettime(ClockId::ProcessCPUTime);
        let own = Duration::new(own.tv_sec.cast_unsigned(), u32::try_from(own.tv_nsec)?);
        Ok(Self(own + threads.spent()?))
    }

    /// What was spent since, in microseconds.
    pub fn since(&self, threads: &SoftIrqThreads) -> Result<f64> {
        Ok(Self::now(threads)?.0.saturating_sub(self.0).as_secs_f64() * 1e6)
    }
}

impl SoftIrqThreads {
    /// Those that can be seen from here.
    pub fn find() -> Result<Self> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").context("cannot read /proc")? {
            let process = entry.context("cannot read /proc")?.path();
            let name = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
            if name.starts_with("ksoftirqd/") {
                found.push(process.join("schedstat"));
            }
        }
        Ok(Self(found))
    }

    fn spent(&self) -> Result<Duration> {
        let read = |path: &PathBuf| {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            on_cpu(&text).with_context(|| format!("{} has no numbers", path.display()))
        };
        self.0.iter().map(read).sum()
    }
}

/// The first number of `schedstat`: nanoseconds on a processor.
fn on_cpu(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    #[test]
    fn waiting_for_a_processor_is_not_work() {
        let spent = super::on_cpu("1500000 777 42\n");
        assert_eq!(spent, Some(std::time::Duration::from_micros(1500)));
        assert_eq!(super::on_cpu(""), None);
    }
}
