//! `knit`: one command for the node agent, the controller, the lab and the people who run them.
//!
//! This file reads the command line and turns an error into words and an exit code. Each subcommand is a file
//! in [`command`].

mod cli;
mod command;

use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};

fn main() -> ExitCode {
    // A container runtime waits for this one: nothing else is set up for it.
    if std::env::args_os().nth(1).is_some_and(|word| word == "cni") && std::env::args_os().len() == 2 {
        return knit_cni::shim::main();
    }
    match command::run(parse().command) {
        Ok(code) => code,
        Err(error) => {
            knit_output::error(error.as_ref());
            ExitCode::FAILURE
        }
    }
}

/// Reads the command line. As `kubectl-knit`, this is `kubectl knit`, and its help says so.
fn parse() -> cli::Cli {
    let program = std::env::args_os().next().map(std::path::PathBuf::from).unwrap_or_default();
    let mut command = cli::Cli::command();
    if program.file_stem().is_some_and(|name| name == "kubectl-knit") {
        command = command.bin_name("kubectl knit");
    }
    cli::Cli::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit())
}
