//! Runs the rest of a command inside a sandbox of its own.

use std::process::{Child, ExitCode};

use anyhow::{Context as _, Result};
use knit_kernel::sandbox::Sandbox;

/// Runs `work` in the innermost process; the outer ones wait for it and end as it does. `outside` is called
/// in the outermost process once the others have been started, `early` in the innermost one before its `/run`
/// is its own.
pub fn inside<T, F: Future<Output = Result<ExitCode>>>(
    outside: impl FnOnce() -> Result<()>,
    early: impl FnOnce() -> T,
    work: impl FnOnce(T) -> F,
) -> Result<ExitCode> {
    let (sandbox, early) = Sandbox::enter(early)?;
    match (sandbox, early) {
        (Sandbox::Outside(child), _) => {
            outside()?;
            wait(child)
        }
        (Sandbox::Inside, Some(early)) => {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .context("cannot start the async runtime")?;
            runtime.block_on(work(early))
        }
        (Sandbox::Between(child), _) => wait(child),
        (Sandbox::Inside, None) => unreachable!("the innermost process has run what is early"),
    }
}

fn wait(mut child: Child) -> Result<ExitCode> {
    let status = child.wait().context("cannot wait for the lab's own process")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}
