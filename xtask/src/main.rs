//! `cargo xtask`: the project's chores, one subcommand and one file each.

mod bench;
mod cargo;
mod fuzz;
mod generate;
mod image;
mod kernel_test;
mod kube;
mod licences;
mod oci;
mod shim;
mod style;
mod upgrade_test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's chores")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Writes generated files: the CRDs in deploy/crds/
    Generate(generate::Args),
    /// Measures, next to a peer in the same run
    Bench(bench::Args),
    /// Runs the fuzz targets, each for a while
    Fuzz(fuzz::Args),
    /// Runs the tests with namespaces and packets on another kernel than this machine's
    KernelTest(kernel_test::Args),
    /// A Kubernetes cluster on this machine, to try Knit on
    Kube(kube::Args),
    /// Checks licences and sources of all crates
    Licences(licences::Args),
    /// Builds Knit's own image, as an OCI archive
    Image(image::Args),
    /// Builds the CNI shim as one small static file
    Shim(shim::Args),
    /// Checks that no line of Rust is too long
    Style(style::Args),
    /// Replaces agents of an earlier commit by this tree's, under traffic
    UpgradeTest(upgrade_test::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Generate(args) => generate::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::KernelTest(args) => kernel_test::run(&args),
        Command::Kube(args) => kube::run(args),
        Command::Licences(args) => licences::run(&args),
        Command::Image(args) => image::run(&args),
        Command::Shim(args) => shim::run(&args),
        Command::Style(args) => style::run(&args),
        Command::UpgradeTest(args) => upgrade_test::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> ExitCode {
    knit_output::error(error.as_ref());
    ExitCode::FAILURE
}
