//! `cargo xtask bench NAME`: measures next to a peer in the same run, and prints a table or JSON lines.
//!
//! A benchmark is a function that returns [`Row`]s; it lives in a file of its own here and is named in
//! [`Name`].

mod attach;
mod claims;
mod datapath;
mod kernel;
mod kube;
mod lab;
mod policy;
mod process;
mod row;
mod scale;
mod services;

pub use row::{Goal, Row};

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use knit_output::{Cell, Format, Table, Tone};

#[derive(clap::Args)]
pub struct Args {
    /// Which one
    name: Name,
    /// One JSON object per line
    #[arg(long)]
    json: bool,
    /// For `attach`, `claims`, `lab` and `scale`: measure this program, in place of one that is built as it
    /// is shipped
    #[arg(long, value_name = "KNIT")]
    program: Option<PathBuf>,
    /// For `scale`: sizes of the cluster
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = scale::SIZES)]
    nodes: Vec<u32>,
}

/// The benchmarks there are.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Name {
    /// A pod's networks through the shim, next to the containernetworking plugins
    Attach,
    /// Claims of Networks prepared and attached, next to the same Networks by annotation
    Claims,
    /// What packets of pods cost, next to a bare veth pair, a bridge and routes
    Datapath,
    /// A pod's veth, addresses and routes, next to `ip -batch`
    Kernel,
    /// 50 pods at once on a real cluster, next to the bridge plugin, portmap and kube-proxy
    Kube,
    /// A lab's start, its pods, and what its API carries
    Lab,
    /// 10,000 pods and 1,000 policies in the model of policies
    Policy,
    /// Clusters of 1,000, 2,500 and 5,000 simulated nodes: what an agent and the controller cost
    Scale,
    /// 10,000 services in nftables, next to kube-proxy's rule set
    Services,
    /// What the check of inner sources costs traffic across nodes: the last rows of `datapath`, alone
    TunnelCheck,
}

pub fn run(args: &Args) -> Result<()> {
    // What is measured on a cluster is in Knit's image, and what simulates one is a program of its own, both
    // optimised.
    if cfg!(debug_assertions) && !matches!(args.name, Name::Kube | Name::Scale) {
        return run_optimised(args.name);
    }
    let rows: Vec<Row> = match args.name {
        Name::Attach => attach::run(args.program.as_deref())?,
        Name::Claims => claims::run(args.program.as_deref())?,
        Name::Datapath => datapath::run()?,
        Name::Kernel => kernel::run()?,
        Name::Kube => kube::run()?,
        Name::Lab => lab::run(args.program.as_deref())?,
        Name::Policy => policy::run()?,
        Name::Scale => scale::run(args.program.as_deref(), &args.nodes)?,
        Name::Services => services::run()?,
        Name::TunnelCheck => datapath::run_tunnel_check()?,
    };
    let format = if args.json { Format::JsonLines } else { Format::Table };
    knit_output::print_rows(format, &rows, || table(&rows))?;
    Ok(())
}

/// `cargo xtask` builds for quick chores; figures come from an optimised build, which runs with the same
/// words.
fn run_optimised(name: Name) -> Result<()> {
    let mut command = crate::cargo::command();
    command.args(["build", "--quiet", "--profile", "bench", "--package", "xtask"]);
    if matches!(name, Name::Services) {
        // Its `knit proxy`, in the same build: alone it would have other features, and everything would be
        // built again.
        command.args(["--package", "knit"]);
    }
    let built = command.status().context("cannot run cargo to build the benchmarks")?;
    ensure!(built.success(), "the benchmarks were not built");
    let program = optimised().join("xtask");
    let status = Command::new(&program)
        .args(std::env::args_os().skip(1))
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(status.success(), "the benchmark failed");
    Ok(())
}

/// Where the programs of the profile `bench` are.
fn optimised() -> PathBuf {
    crate::shim::target_dir().join("release")
}

fn table(rows: &[Row]) -> Table {
    let mut table =
        Table::new(&["BENCH", "CASE", "METRIC", "VALUE", "PEER", "PEER VALUE", "RATIO", "TARGET", "MET"]);
    for row in rows {
        let number = |value: Option<f64>| value.map(|v| format!("{v:.3}")).unwrap_or_default();
        let met = match row.met {
            None => Cell::from(""),
            Some(true) => Cell::new("yes", Tone::Good),
            Some(false) => Cell::new("NO", Tone::Bad),
        };
        table.row([
            row.bench.clone().into(),
            row.case.clone().into(),
            row.metric.clone().into(),
            format!("{:.3} {}", row.value, row.unit).into(),
            row.peer.clone().unwrap_or_default().into(),
            number(row.peer_value).into(),
            number(row.ratio).into(),
            row.target.clone().unwrap_or_default().into(),
            met,
        ]);
    }
    table
}
