//! `knit doctor`: what is wrong on this node, and what to do about it. It looks, and changes nothing.

mod agent;
mod cni;
mod kernel;
mod leftovers;
mod mtu;
mod runtimes;
mod services;
mod trial;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use knit_ledger::{SandboxRecord, Unreadable};
use knit_output::{Cell, Format, Table, Tone};
use knit_types::chain;
use serde::Serialize;

use super::objects::From;

/// Check this node for problems, and say how to fix them
///
/// It changes nothing. The exit code is 0 if all is well, 1 if something needs attention, 2 if something is
/// wrong. Run it on the node, as root: otherwise it sees less, and says so.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  knit doctor
  knit doctor -o json | jq '.[] | select(.verdict == \"wrong\")'

  # In the agent's own pod
  kubectl -n knit-system exec ds/knit-node -- knit doctor")]
pub struct Args {
    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    /// Omit checks that pass
    #[arg(short, long)]
    quiet: bool,

    /// The agent's runtime directory
    #[arg(long, env = "KNIT_RUN_DIR", value_name = "DIR", default_value = knit_cni::paths::RUN_DIR)]
    run_dir: PathBuf,

    /// The agent's directory for what persists across reboots
    #[arg(long, env = "KNIT_STATE_DIR", value_name = "DIR", default_value = "/var/lib/knit")]
    state_dir: PathBuf,

    /// The agent's socket for the CNI shim [default: cni.sock in the runtime directory]
    #[arg(long, env = "KNIT_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Where the container runtime looks for CNI configurations
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    cni_conf_dir: PathBuf,

    /// Where the container runtime looks for CNI plugins
    #[arg(long, value_name = "DIR", default_value = "/opt/cni/bin")]
    cni_bin_dir: PathBuf,

    #[command(flatten)]
    from: From,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
enum Output {
    /// Columns
    #[default]
    Table,
    /// One JSON list
    Json,
    /// YAML
    Yaml,
}

/// What came of one look.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    /// What was looked at.
    check: &'static str,
    verdict: Verdict,
    /// What was seen.
    message: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Good,
    /// It could not be looked at.
    Unknown,
    /// Worth a look.
    Warning,
    /// Pods will miss something.
    Wrong,
}

/// What several checks look at.
struct Node {
    args: Args,
    /// The ledger's records, if it can be read.
    records: Option<Vec<SandboxRecord>>,
    /// Those of its records that cannot be read.
    unreadable: Vec<Unreadable>,
    /// The ledger is damaged: what it does not have may be somebody's all the same.
    damaged: bool,
    findings: Vec<Finding>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let (output, quiet) = (args.output, args.quiet);
    let mut node = Node { args, records: None, unreadable: Vec::new(), damaged: false, findings: Vec::new() };
    runtime.context("cannot start the async runtime")?.block_on(async {
        kernel::look(&mut node);
        trial::look(&mut node).await;
        agent::look(&mut node);
        runtimes::look(&mut node).await;
        leftovers::look(&mut node).await;
        mtu::look(&mut node).await;
        services::look(&mut node);
        cni::look(&mut node);
    });
    let worst = node.findings.iter().map(|f| f.verdict).max().unwrap_or(Verdict::Good);
    let shown: Vec<Finding> =
        node.findings.into_iter().filter(|f| !quiet || f.verdict > Verdict::Good).collect();
    let format = match output {
        Output::Table => Format::Table,
        Output::Json => Format::Json,
        Output::Yaml => Format::Yaml,
    };
    knit_output::print_rows(format, &shown, || table(&shown))?;
    Ok(ExitCode::from(match worst {
        Verdict::Good | Verdict::Unknown => 0,
        Verdict::Warning => 1,
        Verdict::Wrong => 2,
    }))
}

fn table(findings: &[Finding]) -> Table {
    let mut table = Table::new(&["CHECK", "VERDICT", "WHAT"]);
    for finding in findings {
        let verdict = match finding.verdict {
            Verdict::Good => Cell::new("good", Tone::Good),
            Verdict::Unknown => Cell::new("unknown", Tone::Plain),
            Verdict::Warning => Cell::new("warning", Tone::Warning),
            Verdict::Wrong => Cell::new("WRONG", Tone::Bad),
        };
        table.row([finding.check.into(), verdict, finding.message.clone().into()]);
        if let Some(advice) = &finding.advice {
            // A blank, because an empty cell shows as a dash.
            table.row([Cell::from(" "), Cell::from(" "), format!("-> {advice}").into()]);
        }
    }
    table
}

impl Node {
    fn good(&mut self, check: &'static str, message: impl Into<String>) {
        self.add(check, Verdict::Good, message, None);
    }

    fn unknown(&mut self, check: &'static str, message: impl Into<String>) {
        self.add(check, Verdict::Unknown, message, None);
    }

    fn warning(&mut self, check: &'static str, message: impl Into<String>, advice: impl Into<String>) {
        self.add(check, Verdict::Warning, message, Some(advice.into()));
    }

    fn wrong(&mut self, check: &'static str, message: impl Into<String>, advice: impl Into<String>) {
        self.add(check, Verdict::Wrong, message, Some(advice.into()));
    }

    fn add(
        &mut self,
        check: &'static str,
        verdict: Verdict,
        message: impl Into<String>,
        advice: Option<String>,
    ) {
        self.findings.push(Finding { check, verdict, message: message.into(), advice });
    }

    fn socket(&self) -> PathBuf {
        self.args.socket.clone().unwrap_or_else(|| knit_cni::paths::socket(&self.args.run_dir))
    }

    /// Whether an agent was ready here since boot.
    fn was_ready(&self) -> bool {
        knit_cni::paths::ready_marker(&self.args.run_dir).exists()
    }
}
