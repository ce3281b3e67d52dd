//! The clock that leases and records use: milliseconds since boot, sleep included.

use knit_ipam::Millis;
use rustix::time::{ClockId, clock_gettime};

/// Now.
#[must_use]
pub fn now() -> Millis {
    let time = clock_gettime(ClockId::Boottime);
    let millis = time.tv_sec.saturating_mul(1000).saturating_add(time.tv_nsec / 1_000_000);
    Millis(u64::try_from(millis).unwrap_or_default())
}
