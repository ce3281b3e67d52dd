//! `knit lab`: a whole cluster on one machine, with nothing installed.

mod client;
pub mod demo;
mod inside;
mod map;
mod picture;
mod place;
mod scale;
mod serve;
mod simulated_node;
mod talk;
mod up;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

/// Run a whole cluster on this machine: nodes, pods and an API, with nothing installed and no root
///
/// Nodes are namespaces that run the real node agent, pods are namespaces with real processes, and an
/// embedded API stands in for a Kubernetes API server. The machine's own network is never touched. It is for
/// first steps and tests, and not a substitute for Kubernetes.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show in a few seconds what Knit does, then remove everything again
    Demo(demo::Args),
    /// Start a lab in the background
    Up(up::Args),
    /// Stop a lab
    Down(client::DownArgs),
    /// Show nodes, Networks and pods
    Status(client::StatusArgs),
    /// Run a command in a pod
    Exec(client::ExecArgs),
    /// Print the log of a pod, or of the agent of a node
    Logs(client::LogsArgs),
    /// Apply manifests
    Apply(client::ApplyArgs),
    /// Print the path of the kubeconfig
    Kubeconfig(client::KubeconfigArgs),
    /// Break something, or fix it again
    Fail(client::FailArgs),
    /// Replace the agents, one by one, with those of another `knit` program
    Upgrade(client::UpgradeArgs),
    /// Measure what a large cluster costs, with simulated nodes on this machine
    Scale(Box<scale::Args>),
    /// The built-in server of pods without a command
    #[command(hide = true)]
    Serve(serve::Args),
    /// The agent of one node of `scale`
    #[command(hide = true)]
    SimulatedNode(simulated_node::Args),
    /// Send a request to an HTTP server, and print the answer
    #[command(hide = true)]
    Ask(talk::AskArgs),
    /// Send numbered datagrams to an echo server, and print how many came back
    #[command(hide = true)]
    Stream(talk::StreamArgs),
}

pub fn run(args: Args) -> Result<ExitCode> {
    match args.command {
        Command::Demo(args) => demo::run(&args),
        Command::Up(args) => up::run(&args),
        Command::Down(args) => client::down(&args),
        Command::Status(args) => client::status(&args),
        Command::Exec(args) => client::exec(&args),
        Command::Logs(args) => client::logs(&args),
        Command::Apply(args) => client::apply(&args),
        Command::Kubeconfig(args) => client::kubeconfig(&args),
        Command::Fail(args) => client::fail(&args),
        Command::Upgrade(args) => client::upgrade(&args),
        Command::Scale(args) => scale::run(&args),
        Command::SimulatedNode(args) => simulated_node::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Ask(args) => talk::ask(&args),
        Command::Stream(args) => talk::stream(&args),
    }
}
