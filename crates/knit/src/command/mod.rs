//! The subcommands: each file has its `Args` and its `run`.

pub mod completions;
pub mod conformance;
pub mod controller;
pub mod doctor;
pub mod drops;
pub mod explain;
pub mod get;
mod http;
pub mod install;
pub mod lab;
mod log;
pub mod man;
pub mod node;
mod objects;
pub mod proxy;
mod stop;
pub mod uninstall;

use std::process::ExitCode;

use anyhow::Result;

use crate::cli::Command;

/// Does what was asked. A command that looked and found something wrong says so by its exit code, not by an
/// error.
pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Completions(args) => completions::run(&args),
        Command::Conformance(args) => conformance::run(args),
        Command::Controller(args) => controller::run(*args),
        Command::Doctor(args) => doctor::run(*args),
        Command::Drops(args) => drops::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Get(args) => get::run(&args),
        Command::Install(args) => install::run(&args),
        Command::Cni => Ok(knit_cni::shim::main()),
        Command::Lab(args) => lab::run(*args),
        Command::Man(args) => man::run(&args),
        Command::Node(args) => node::run(*args),
        Command::Proxy(args) => proxy::run(*args),
        Command::Uninstall(args) => uninstall::run(&args),
    }
}
