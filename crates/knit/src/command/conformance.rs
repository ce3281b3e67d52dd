//! `knit conformance`: whether a network runtime keeps what KNI v1alpha1 promises.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use knit_conformance::{ExistingNetwork, Options, Report};
use knit_output::{Cell, Table, Tone};
use knit_runtime::{Address, NetworkName};

/// Check a network runtime against the profiles of KNI v1alpha1.
#[derive(Debug, clap::Args)]
#[command(after_help = "Needs permission to create network namespaces, in a directory that the runtime \
    sees at the same path.\nExit code 1 if the runtime does not meet a requirement.\n\nExamples:\n  \
    knit conformance \
                  --runtime /run/knit/runtimes/bridge.sock\n  knit conformance --runtime \
                  /run/knit/runtimes/bridge.sock --node node-1 --node-address 192.0.2.7 --report \
                  report.yaml\n  knit conformance --runtime SOCKET --network red $(seq -f '--address \
                  10.9.0.%g/24@10.9.0.1' 20 29)")]
pub struct Args {
    /// The runtime's socket
    #[arg(long, value_name = "SOCKET")]
    runtime: PathBuf,
    /// Write the report, as YAML, to this file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// The node's name as the runtime knows it [default: the host name]
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// An address of the node, for host ports and tunnels; may be given once per family
    #[arg(long = "node-address", value_name = "IP")]
    node_addresses: Vec<IpAddr>,
    /// Where to create the pods' namespaces
    #[arg(long, value_name = "DIRECTORY", default_value = "/run/knit/conformance")]
    namespaces: PathBuf,
    /// Timeout of a call in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
        value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
    /// A link of this node for Underlay Networks; it is used with addresses of 198.18.0.0/15 and
    /// fd4b:6e69:7400::/48
    #[arg(long, value_name = "LINK", conflicts_with = "network")]
    underlay_parent: Option<String>,
    /// A Network that is already set up, for a runtime without the feature NetworkSetup
    #[arg(long, value_name = "NAME", requires = "addresses")]
    network: Option<NetworkName>,
    /// A free address of that Network with its prefix length and gateway, such as 10.1.0.20/24@10.1.0.1; give
    /// at least ten per family
    #[arg(long = "address", value_name = "ADDRESS", requires = "network", value_parser = parse_address)]
    addresses: Vec<Address>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let node = match args.node {
        Some(node) => node,
        None => std::fs::read_to_string("/proc/sys/kernel/hostname")
            .context("cannot read the host name: set --node")?
            .trim()
            .to_owned(),
    };
    let options = Options {
        socket: std::path::absolute(&args.runtime).context(
            "--runtime cannot be turned into an \
        absolute path",
        )?,
        deadline: Duration::from_secs(args.timeout),
        directory: args.namespaces,
        node,
        node_addresses: args.node_addresses,
        underlay_parent: args.underlay_parent,
        network: args.network.map(|name| ExistingNetwork { name, addresses: args.addresses }),
    };
    let tokio = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let report = tokio.block_on(knit_conformance::run(options, |_, _| {}))?;
    knit_output::print(&format!("{}\n", table(&report)))?;
    let runtime = &report.runtime;
    let verdict = if report.conformant { "meets all requirements" } else { "breaks promises" };
    knit_output::print(&format!("\n{} {} {verdict}\n", runtime.name, runtime.version))?;
    if let Some(file) = &args.report {
        let yaml = serde_saphyr::to_string(&report).context("cannot encode the report as YAML")?;
        std::fs::write(file, yaml)
            .with_context(|| format!("cannot write the report to {}", file.display()))?;
    }
    Ok(if report.conformant { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn table(report: &Report) -> Table {
    let mut table = Table::new(&["PROFILE", "CASE", "RESULT", "MESSAGE"]);
    for profile in &report.profiles {
        // What is not announced needs no line per case.
        if profile.result == "Skipped" {
            let why = profile.cases.first().map_or("", |c| c.message.as_str());
            table.row([plain(profile.name), plain("-"), result("Skipped"), plain(why)]);
            continue;
        }
        for case in &profile.cases {
            table.row([plain(profile.name), plain(case.name), result(case.result), plain(&case.message)]);
        }
    }
    table
}

fn result(word: &'static str) -> Cell {
    let tone = match word {
        "Passed" => Tone::Good,
        "Failed" => Tone::Bad,
        _ => Tone::Plain,
    };
    Cell::new(word, tone)
}

fn plain(text: &str) -> Cell {
    Cell::new(text, Tone::Plain)
}

fn parse_address(text: &str) -> Result<Address> {
    let (net, gateway) = match text.split_once('@') {
        Some((net, gateway)) => (net, Some(gateway.parse().context("the gateway is not an IP address")?)),
        None => (text, None),
    };
    let Ok(net) = net.parse() else {
        bail!(
            "{net:?} is not an address with a prefix length, such as \
    10.1.0.20/24"
        )
    };
    Ok(Address { net, gateway })
}
