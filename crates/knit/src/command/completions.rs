//! `knit completions SHELL`: the completion script of a shell.

use std::process::ExitCode;

use anyhow::Result;
use clap::CommandFactory as _;

/// Print the completion script of a shell.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  knit completions bash > /etc/bash_completion.d/knit\n  source <(knit \
                  completions zsh)")]
pub struct Args {
    /// The shell
    shell: clap_complete::Shell,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::cli::Cli::command(), "knit", &mut script);
    knit_output::print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
