//! The commands that talk to a running lab: down, status, exec, logs, kubeconfig, fail, upgrade, apply.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use knit_lab::cluster::control::{Failure, Request};
use knit_output::{Cell, Table, Tone};
use serde_json::Value;

use super::place::Which;

/// Stop a lab
#[derive(Debug, clap::Args)]
pub struct DownArgs {
    #[command(flatten)]
    which: Which,
}

/// Show nodes, Networks and pods
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    which: Which,
}

/// Run a command in a pod
#[derive(Debug, clap::Args)]
pub struct ExecArgs {
    /// The pod; in namespace default if no namespace is given
    #[arg(value_name = "[NAMESPACE/]POD")]
    pod: String,

    /// The command; `knit lab ask ADDRESS:PORT` sends a request to an HTTP server
    #[arg(last = true, required = true)]
    line: Vec<String>,

    #[command(flatten)]
    which: Which,
}

/// Print the log of a pod, or of the agent of a node
#[derive(Debug, clap::Args)]
pub struct LogsArgs {
    /// The pod, or a node for its agent
    #[arg(value_name = "[NAMESPACE/]POD|NODE")]
    what: String,

    /// One container of the pod [default: all]
    #[arg(short, long)]
    container: Option<String>,

    #[command(flatten)]
    which: Which,
}

/// Print the path of the kubeconfig
#[derive(Debug, clap::Args)]
pub struct KubeconfigArgs {
    #[command(flatten)]
    which: Which,
}

/// Apply manifests
#[derive(Debug, clap::Args)]
pub struct ApplyArgs {
    /// The manifests
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    #[command(flatten)]
    which: Which,
}

/// Replace the agents, one by one, with those of another `knit`
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # As a DaemonSet's rolling update does: each agent is asked to end, and the new one takes over; pods do \
  not notice
  knit lab upgrade ./target/release/knit")]
pub struct UpgradeArgs {
    /// The `knit` program to run
    #[arg(value_name = "PROGRAM")]
    program: PathBuf,

    /// Only these nodes [default: all]
    #[arg(value_name = "NODE")]
    nodes: Vec<String>,

    #[command(flatten)]
    which: Which,
}

/// What can fail
#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// The node loses power: its agent and pods disappear immediately
    Node,
    /// The node's agent is killed
    Agent,
    /// The node's link is cut
    Link,
    /// The API is down
    Api,
}

/// Break something, or fix it again
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # Kill the agent of node-1; its pods must not notice
  knit lab fail agent node-1

  # Start it again
  knit lab fail agent node-1 --heal

  # Cut a link for five seconds
  knit lab fail link node-2 --for 5")]
pub struct FailArgs {
    /// What to break
    what: What,

    /// The node; none for the API
    node: Option<String>,

    /// Fix it again
    #[arg(long)]
    heal: bool,

    /// Fix it again after this many seconds
    #[arg(long = "for", value_name = "SECONDS", conflicts_with = "heal")]
    seconds: Option<f64>,

    #[command(flatten)]
    which: Which,
}

pub fn down(args: &DownArgs) -> Result<ExitCode> {
    let place = args.which.place()?;
    if !place.is_running() {
        let lock = place.take()?; // takes away what a killed one left
        place.remove(lock);
        knit_output::print(&format!("no lab named {} is running\n", args.which.name))?;
        return Ok(ExitCode::SUCCESS);
    }
    place.ask(&Request::Down, false)?;
    let end = Instant::now() + Duration::from_secs(10);
    while place.is_running() {
        if Instant::now() > end {
            bail!("the lab was asked to stop, but is still running; see {}", place.log().display());
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    // The lab may not have come to that yet.
    place.remove_parent();
    Ok(ExitCode::SUCCESS)
}

pub fn exec(args: &ExecArgs) -> Result<ExitCode> {
    let (namespace, name) = pod(&args.pod);
    let request = Request::Exec { namespace, name, line: args.line.clone() };
    let answer = args.which.place()?.ask(&request, true)?;
    let code = answer["code"].as_u64().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

pub fn logs(args: &LogsArgs) -> Result<ExitCode> {
    let place = args.which.place()?;
    let (namespace, name) = pod(&args.what);
    let is_node = !args.what.contains('/') && args.what.starts_with("node-");
    let request = if is_node {
        Request::AgentLog { node: args.what.clone() }
    } else {
        Request::Logs { namespace, name, container: args.container.clone() }
    };
    let text = place.ask(&request, false)?;
    knit_output::print(text.as_str().unwrap_or_default())?;
    Ok(ExitCode::SUCCESS)
}

pub fn kubeconfig(args: &KubeconfigArgs) -> Result<ExitCode> {
    let place = args.which.place()?;
    if !place.is_running() {
        bail!("no lab named {} is running here: start one with `knit lab up`", args.which.name);
    }
    knit_output::print(&format!("{}\n", place.kubeconfig().display()))?;
    Ok(ExitCode::SUCCESS)
}

pub fn apply(args: &ApplyArgs) -> Result<ExitCode> {
    let place = args.which.place()?;
    let mut text = String::new();
    for file in &args.files {
        let one = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        text.push_str(&one);
        text.push_str("\n---\n");
    }
    place.ask(&Request::Apply { text }, false)?;
    Ok(ExitCode::SUCCESS)
}

pub fn fail(args: &FailArgs) -> Result<ExitCode> {
    let what = match args.what {
        What::Node => Failure::Node,
        What::Agent => Failure::Agent,
        What::Link => Failure::Link,
        What::Api => Failure::Api,
    };
    if what != Failure::Api && args.node.is_none() {
        bail!("which node? `knit lab status` lists them, for example: knit lab fail agent node-1");
    }
    let place = args.which.place()?;
    let request = |heal| Request::Fail { what, node: args.node.clone(), heal };
    place.ask(&request(args.heal), false)?;
    if let Some(seconds) = args.seconds {
        let wait = Duration::try_from_secs_f64(seconds).context("--for takes a number of seconds")?;
        let end = Instant::now() + wait;
        while Instant::now() < end {
            std::thread::park_timeout(end.saturating_duration_since(Instant::now()));
        }
        place.ask(&request(true), false)?;
    }
    Ok(ExitCode::SUCCESS)
}

pub fn upgrade(args: &UpgradeArgs) -> Result<ExitCode> {
    let place = args.which.place()?;
    let program = std::fs::canonicalize(&args.program)
        .with_context(|| format!("{} cannot be found", args.program.display()))?;
    let mut nodes = args.nodes.clone();
    if nodes.is_empty() {
        let status = place.ask(&Request::Status, false)?;
        let all = status["nodes"].as_array().into_iter().flatten();
        nodes.extend(all.filter_map(|node| node["name"].as_str().map(str::to_owned)));
    }
    for node in nodes {
        place.ask(&Request::Upgrade { node: node.clone(), program: program.clone() }, false)?;
        knit_output::print(&format!("{node}: its agent is now {}\n", program.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub fn status(args: &StatusArgs) -> Result<ExitCode> {
    let status = args.which.place()?.ask(&Request::Status, false)?;
    if args.json {
        knit_output::print(&format!("{}\n", serde_json::to_string_pretty(&status)?))?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows = |list: &str| status[list].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let joined = |value: &Value| {
        let list = value.as_array().into_iter().flatten().map(text);
        list.collect::<Vec<_>>().join(", ")
    };
    let good = |value: &Value, wanted: &Value| {
        let words = if value.is_null() { "unknown".to_owned() } else { text(value) };
        Cell::new(words, if value == wanted { Tone::Good } else { Tone::Bad })
    };
    let mut nodes = Table::new(&["NODE", "STATE", "AGENT", "ADDRESSES"]);
    for node in rows("nodes") {
        nodes.row([
            text(&node["name"]).into(),
            good(&node["state"], &"up".into()),
            good(&node["agent"], &"running".into()),
            joined(&node["addresses"]).into(),
        ]);
    }
    let mut networks = Table::new(&["NETWORK", "TOPOLOGY", "READY", "SUBNETS"]);
    for network in rows("networks") {
        networks.row([
            text(&network["name"]).into(),
            text(&network["topology"]).into(),
            good(&network["ready"], &"True".into()),
            joined(&network["subnets"]).into(),
        ]);
    }
    let mut pods = Table::new(&["NAMESPACE", "POD", "NODE", "READY", "ADDRESSES", "MESSAGE"]);
    for pod in rows("pods") {
        pods.row([
            text(&pod["namespace"]).into(),
            text(&pod["name"]).into(),
            pod["node"].as_str().unwrap_or_default().into(),
            good(&pod["ready"], &true.into()),
            joined(&pod["addresses"]).into(),
            Cell::from(pod["message"].as_str().unwrap_or_default()),
        ]);
    }
    let mut services = Table::new(&["NAMESPACE", "SERVICE", "ADDRESSES", "PORTS"]);
    for service in rows("services") {
        services.row([
            text(&service["namespace"]),
            text(&service["name"]),
            joined(&service["addresses"]),
            joined(&service["ports"]),
        ]);
    }
    knit_output::print(&format!("{nodes}\n\n{networks}\n\n{pods}\n\n{services}\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn pod(text: &str) -> (String, String) {
    match text.split_once('/') {
        Some((namespace, name)) => (namespace.to_owned(), name.to_owned()),
        None => ("default".to_owned(), text.to_owned()),
    }
}
