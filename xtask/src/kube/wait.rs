//! Waiting for a condition, and saying how long things took.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Asks again and again until there is an answer; an error ends it, and so does the deadline.
pub fn until<T>(what: &str, limit: Duration, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(5);
    loop {
        if let Some(answer) = attempt()? {
            return Ok(answer);
        }
        if Instant::now() > end {
            bail!("{what}: not within {} s", limit.as_secs());
        }
        #[allow(
            clippy::disallowed_methods,
            reason = "the one place of the bed that waits for a condition by polling"
        )]
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(250));
    }
}

/// Prints what was reached, and when.
#[derive(Debug)]
pub struct Phases {
    start: Instant,
    quiet: bool,
}

impl Phases {
    /// From now on.
    pub fn start(quiet: bool) -> Self {
        Self { start: Instant::now(), quiet }
    }

    /// This is reached.
    pub fn reached(&self, what: &str) {
        if !self.quiet {
            eprintln!("{:>6.1} s  {what}", self.start.elapsed().as_secs_f64());
        }
    }
}
