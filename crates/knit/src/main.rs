//! `knit`: one command for the node agent, the controller, the lab and the people who run them.
//!
//! This file reads the command line and turns an error into words and an exit code. Each subcommand is a file in
//! [`command`].

mod cli;
mod command;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match command::run(cli::Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            knit_output::error(error.as_ref());
            ExitCode::FAILURE
        }
    }
}
