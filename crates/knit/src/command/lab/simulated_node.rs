//! `knit lab simulated-node`: the agent of one simulated node, in a process of its own. `knit lab scale`
//! starts it, and hears from its output what became of its pods.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use knit_scale::probe;

use crate::command::log::LogArgs;

/// The agent of one simulated node
#[derive(Debug, clap::Args)]
pub struct Args {
    /// URL of the simulation's API
    #[arg(long, value_name = "URL")]
    api_url: String,

    /// The node's number
    #[arg(long, value_name = "NUMBER")]
    number: u32,

    /// The agent's directory
    #[arg(long, value_name = "DIR")]
    directory: PathBuf,

    #[command(flatten)]
    log: LogArgs,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    args.log.start()?;
    // As `knit node` is: what is measured is its memory.
    knit_kernel::share_heaps(2);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.block_on(probe::serve(args.number, &args.api_url, &args.directory))?;
    Ok(ExitCode::SUCCESS)
}
