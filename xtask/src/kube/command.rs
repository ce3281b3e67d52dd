//! The subcommands of `cargo xtask kube`.

use std::convert::Infallible;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use knit_output::{Cell, Table, Tone};

use super::bed::{self, Bed};
use super::components::Group;
use super::paths::Cache;
use super::{Options, build, e2e_images, images, machine, test};

#[derive(clap::Subcommand)]
pub enum Command {
    /// Builds the cluster's components with Go, once
    Build {
        /// Which groups
        #[arg(value_enum, default_values_t = [Group::Core])]
        groups: Vec<Group>,
    },
    /// Prints the path of a folder with all programs that are built
    Bin,
    /// Starts a cluster
    Up(Options),
    /// Ends it, and removes everything of it
    Down,
    /// Says what runs
    Status,
    /// Runs a command on a node
    Exec {
        /// `n1`, `n2`; or `control-plane`
        node: String,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Runs kubectl as administrator
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Prints the path of the administrator's kubeconfig, good on this machine's loopback
    Kubeconfig,
    /// Loads image files (OCI or Docker tars) on all nodes
    Load {
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Stops a daemon and starts it again: `restart n1 kubelet`, `restart control-plane kube-apiserver`
    Restart { machine: String, daemon: String },
    /// Makes the images of the upstream end-to-end tests, once
    Images,
    /// Runs end-to-end tests, on beds of their own
    Test(test::Args),
    /// The process that keeps a machine
    #[command(hide = true)]
    MachineKeeper(machine::Args),
    /// The first process of a machine
    #[command(hide = true)]
    MachineInit(machine::Args),
    /// The API server's port on this machine's loopback
    #[command(hide = true)]
    MachineRelay(machine::Args),
    /// Runs a command in a machine
    #[command(hide = true)]
    MachineEnter {
        #[arg(long)]
        process: u32,
        #[arg(long)]
        path: PathBuf,
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Build { groups } => {
            let cache = Cache::find()?;
            build::build(&cache, &groups)?;
            if groups.contains(&Group::Core) {
                images::make(&cache)?;
            }
            Ok(())
        }
        Command::Bin => {
            let folder = build::current(&Cache::find()?)?;
            Ok(knit_output::print(&format!("{}\n", folder.display()))?)
        }
        Command::Up(options) => up(&options),
        Command::Down => bed::down(),
        Command::Status => status(),
        Command::Exec { node, command } => {
            let bed = Bed::open()?;
            never(machine::enter(bed.process(&node)?, &bed.state().bin(), &command)?)
        }
        Command::Kubectl { args } => never(kubectl(&args)?),
        Command::Kubeconfig => {
            Ok(knit_output::print(&format!("{}\n", Bed::open()?.state().kubeconfig().display()))?)
        }
        Command::Load { files } => {
            let bed = Bed::open()?;
            files.iter().try_for_each(|file| bed.load_image(file))
        }
        Command::Restart { machine, daemon } => {
            let control = Bed::open()?.machine(&machine);
            control.stop(&daemon, machine::control::Stop::Terminate)?;
            control.start_again(&daemon)
        }
        Command::Images => {
            let files = e2e_images::make(&Cache::find()?)?;
            let names: String = files.iter().map(|file| format!("{}\n", file.display())).collect();
            Ok(knit_output::print(&names)?)
        }
        Command::Test(args) => test::run(&args),
        Command::MachineKeeper(args) => machine::keep(&args),
        Command::MachineInit(args) => machine::init(&args),
        Command::MachineRelay(args) => machine::relay(&args),
        Command::MachineEnter { process, path, command } => never(machine::enter(process, &path, &command)?),
    }
}

fn never(never: Infallible) -> Result<()> {
    match never {}
}

fn up(options: &Options) -> Result<()> {
    let bed = Bed::up(options)?;
    let config = bed.state().kubeconfig();
    let hint =
        if options.cni.is_none() { "Nodes are NotReady until a network plugin is installed.\n" } else { "" };
    Ok(knit_output::print(&format!(
        "{hint}cargo xtask kube kubectl -- get nodes\nexport KUBECONFIG={}\n",
        config.display()
    ))?)
}

/// Becomes kubectl, in the control plane's network and with this machine's files.
fn kubectl(args: &[String]) -> Result<Infallible> {
    let bed = Bed::open()?;
    bed.control_plane_ns()?.enter()?;
    let program = bed.state().program("kubectl");
    let mut command = std::process::Command::new(&program);
    command.args(args).env("KUBECONFIG", bed.state().kubeconfig());
    Err(command.exec()).with_context(|| format!("cannot run {}", program.display()))
}

fn status() -> Result<()> {
    if machine::holder()?.is_none() {
        return Ok(knit_output::print("no bed is up\n")?);
    }
    let bed = Bed::open()?;
    let daemons = bed.daemons()?;
    let mut table = Table::new(&["MACHINE", "DAEMON", "STATE", "LOG"]);
    for (machine, status) in &daemons {
        let state = match (&status.ended, status.stopped) {
            (None, _) => Cell::new("runs", Tone::Good),
            (Some(_), true) => Cell::from("stopped"),
            (Some(how), false) => Cell::new(format!("ended: {how}"), Tone::Bad),
        };
        let log = status.log.display().to_string();
        table.row([machine.clone().into(), status.name.clone().into(), state, log.into()]);
    }
    Ok(knit_output::print(&format!("{table}\n"))?)
}
