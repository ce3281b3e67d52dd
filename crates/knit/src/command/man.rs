//! `knit man FOLDER`: the manual pages, one per subcommand.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;

/// Write the manual pages.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  knit man /usr/local/share/man/man1 && man knit")]
pub struct Args {
    /// The folder to write them to; it must exist
    folder: PathBuf,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    clap_mangen::generate_to(crate::cli::Cli::command(), &args.folder).with_context(|| {
        format!("cannot write manual pages to {}: does the folder exist?", args.folder.display())
    })?;
    Ok(ExitCode::SUCCESS)
}
