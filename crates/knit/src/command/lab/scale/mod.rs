//! `knit lab scale`: simulated nodes around an API that counts, and what they cost.

mod show;

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use knit_objects::Source;
use knit_output::Note;
use knit_scale::cluster::Api;
use knit_scale::report::Report;
use knit_scale::run::{Options, run as carry_out};
use knit_scale::scenario::Scenario;

use crate::command::log::LogArgs;
use crate::command::stop::Stop;

/// Files that a whole node has open, besides watches of the blocks of further Networks.
const FILES_PER_NODE: u64 = 80;
/// Ends of connections for one watch: the agent's, two of the meter, and the API's.
const FILES_PER_WATCH: u64 = 4;
/// Files that are open in any case.
const FILES: u64 = 500;

/// Measure what a large cluster costs, with simulated nodes on this machine
///
/// Some nodes are whole: the agent's real watches, model, plan and reports, over a network runtime in memory.
/// The others only write what a node writes. The controller and one more agent are processes of their own,
/// whose processor time and memory are measured. Everybody reaches the API through a meter, which counts
/// requests, events and bytes. It needs no root, and changes nothing in the kernel.
///
/// Each size of the cluster is one run with these phases: nothing happens, pods come and go, nodes join while
/// pods come and go, nodes fail, the API is away, and it is back. Those without seconds, nodes or pods are
/// left out. The same scenario with the same seed gives the same pods on the same nodes in the same order.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # 100, 250 and 500 nodes, for about two minutes each
  knit lab scale

  # One small cluster, with a picture
  knit lab scale --nodes 50 --whole 10 --quiet-seconds 5 --busy-seconds 5 --svg scale.svg

  # 1,000 nodes with 30 pods each; 50 join, 10 fail, and the API is down for two minutes
  knit lab scale --nodes 1000 --whole 20 --pods 30000 --joins 50 --failures 10 --outage-seconds 120

  # The same again, from the report
  knit lab scale -o json > report.json
  jq .scenario report.json > scenario.yaml
  knit lab scale --scenario scenario.yaml

Exit code 1 if the simulation lost a part of itself, such as the process of the agent: a warning says which.
docs/scale.md explains the figures.")]
pub struct Args {
    /// Start from the scenario in this file, in YAML or JSON; flags override it
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,

    /// Sizes of the cluster, one run each [default: 100,250,500]
    #[arg(long, value_name = "N,...", value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(2..))]
    nodes: Option<Vec<u32>>,

    /// Number of nodes that run a whole agent; one more agent runs in its own process [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    whole: Option<u32>,

    /// Pods that exist during the whole run, spread over all nodes [default: 0]
    #[arg(long, value_name = "N")]
    pods: Option<u32>,

    /// Pods created per second in the busy phase [default: 20]
    #[arg(long, value_name = "N")]
    pods_per_second: Option<u32>,

    /// Lifetime of such a pod [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pod_seconds: Option<u32>,

    /// Percentage of such pods that are attached to an additional Network [default: 30]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(..=100))]
    further_percent: Option<u32>,

    /// Networks besides the default one [default: 10]
    #[arg(long, value_name = "N")]
    networks: Option<u32>,

    /// Services, each with five endpoints [default: 100]
    #[arg(long, value_name = "N")]
    services: Option<u32>,

    /// NetworkPolicies [default: 50]
    #[arg(long, value_name = "N")]
    policies: Option<u32>,

    /// Duration of the quiet phase, in which no pods are created or deleted [default: 20]
    #[arg(long, value_name = "SECONDS")]
    quiet_seconds: Option<u32>,

    /// Duration of the busy phase, in which pods are created and deleted [default: 20]
    #[arg(long, value_name = "SECONDS")]
    busy_seconds: Option<u32>,

    /// Nodes that join after that [default: 0]
    #[arg(long, value_name = "N")]
    joins: Option<u32>,

    /// Time within which they join [default: 10]
    #[arg(long, value_name = "SECONDS")]
    join_seconds: Option<u32>,

    /// Nodes that fail and are deleted after that [default: 0]
    #[arg(long, value_name = "N")]
    failures: Option<u32>,

    /// How long to observe the effects [default: 10]
    #[arg(long, value_name = "SECONDS")]
    fail_seconds: Option<u32>,

    /// How long the API is down after that [default: 0]
    #[arg(long, value_name = "SECONDS")]
    outage_seconds: Option<u32>,

    /// The seed of the random numbers [default: 1]
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,

    /// How to print the report
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,

    /// Draw the report by cluster size, to this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Use the API of this kubeconfig, which must have Knit's CRDs and no Nodes. What is created there is
    /// removed again [default: an embedded one for each size]
    #[arg(long, value_name = "FILE", conflicts_with = "api_url")]
    kubeconfig: Option<PathBuf>,

    /// Use the API server at this URL, which needs no credentials
    #[arg(long, value_name = "URL")]
    api_url: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Output {
    /// Columns
    #[default]
    Table,
    /// The whole report
    Json,
}

impl Args {
    /// The scenario, if it can be carried out.
    fn scenario(&self) -> Result<Scenario> {
        let mut scenario = match &self.scenario {
            Some(file) => {
                let text = std::fs::read_to_string(file)
                    .with_context(|| format!("cannot read the scenario {}", file.display()))?;
                Scenario::parse(&text).with_context(|| format!("{} cannot be used", file.display()))?
            }
            None => Scenario::default(),
        };
        fn set<T: Clone>(place: &mut T, flag: Option<&T>) {
            if let Some(value) = flag {
                place.clone_from(value);
            }
        }
        set(&mut scenario.nodes, self.nodes.as_ref());
        set(&mut scenario.whole, self.whole.as_ref());
        set(&mut scenario.pods, self.pods.as_ref());
        set(&mut scenario.pods_per_second, self.pods_per_second.as_ref());
        set(&mut scenario.pod_seconds, self.pod_seconds.as_ref());
        set(&mut scenario.further_percent, self.further_percent.as_ref());
        set(&mut scenario.networks, self.networks.as_ref());
        set(&mut scenario.services, self.services.as_ref());
        set(&mut scenario.policies, self.policies.as_ref());
        set(&mut scenario.quiet_seconds, self.quiet_seconds.as_ref());
        set(&mut scenario.busy_seconds, self.busy_seconds.as_ref());
        set(&mut scenario.joins, self.joins.as_ref());
        set(&mut scenario.join_seconds, self.join_seconds.as_ref());
        set(&mut scenario.failures, self.failures.as_ref());
        set(&mut scenario.fail_seconds, self.fail_seconds.as_ref());
        set(&mut scenario.outage_seconds, self.outage_seconds.as_ref());
        set(&mut scenario.seed, self.seed.as_ref());
        scenario.check()?;
        Ok(scenario)
    }

    fn api(&self) -> Api {
        match (&self.kubeconfig, &self.api_url) {
            (Some(path), _) => Api::Given(Source::Kubeconfig { path: path.clone(), context: None }),
            (None, Some(url)) => Api::Given(Source::Url(url.clone())),
            (None, None) => Api::Embedded,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let scenario = args.scenario()?;
    // Twenty agents say the same thing twenty times; what goes wrong with the simulation itself is told.
    LogArgs::start_only("knit_scale=warn")?;
    raise_limit(&scenario)?;
    // A report that cannot be written must not be missed after an hour.
    if let Some(file) = &args.svg {
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(file);
        opened.with_context(|| cannot_write(file))?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let report = runtime.context("cannot start the async runtime")?.block_on(measure(args, &scenario))?;
    let Some(report) = report else {
        return Ok(ExitCode::FAILURE);
    };
    if let Some(file) = &args.svg {
        std::fs::write(file, knit_scale::plot::svg(&report)).with_context(|| cannot_write(file))?;
    }
    match args.output {
        Output::Table => knit_output::print(&format!("{}\n", show::table(&report)))?,
        Output::Json => {
            let text = serde_json::to_string_pretty(&report).context("cannot encode the report")?;
            knit_output::print(&format!("{text}\n"))?;
        }
    }
    let mut code = ExitCode::SUCCESS;
    for (size, error) in report.sizes.iter().flat_map(|size| size.errors.iter().map(move |e| (size, e))) {
        knit_output::note(Note::Warning, format_args!("{} nodes: {error}", size.nodes));
        code = ExitCode::FAILURE;
    }
    Ok(code)
}

/// Carries the scenario out; nothing if it was broken off.
async fn measure(args: &Args, scenario: &Scenario) -> Result<Option<Report>> {
    let mut stop = Stop::listen()?;
    // By this path it is still this program if the file has been replaced meanwhile.
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let options = Options { api: args.api(), controller: Some(program.clone()), agent: Some(program) };
    let (started, shown) = (Instant::now(), std::io::stderr().is_terminal());
    let tell = |text: &str| {
        if shown {
            let seconds = started.elapsed().as_secs_f64();
            knit_output::note(Note::Info, format_args!("{seconds:7.1}s  {text}"));
        }
    };
    tokio::select! {
        report = carry_out(scenario, &options, &tell) => Ok(Some(report?)),
        // Processes and directories go with what is dropped here.
        () = stop.asked() => Ok(None),
    }
}

fn cannot_write(file: &Path) -> String {
    format!("cannot write the picture to {}", file.display())
}

/// Every watch of a whole node is a connection through the meter, all ends of which are in this process.
fn raise_limit(scenario: &Scenario) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let largest = scenario.nodes.iter().copied().max().unwrap_or(0);
    let whole = u64::from(scenario.whole_of(largest));
    let wanted = files(whole, scenario);
    if limit.maximum.is_some_and(|most| most < wanted) {
        bail!(
            "{whole} whole nodes with {} Networks need about {wanted} open files, and this process may have \
             {}: use fewer with --whole, or raise the limit (ulimit -Hn)",
            scenario.networks,
            limit.maximum.unwrap_or_default()
        );
    }
    if limit.current.is_some_and(|current| current < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
            .context("cannot raise the limit of open files")?;
    }
    Ok(())
}

/// About how many files a run has open.
fn files(whole: u64, scenario: &Scenario) -> u64 {
    FILES + whole * (FILES_PER_NODE + FILES_PER_WATCH * u64::from(scenario.networks))
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    fn parse(words: &[&str]) -> Args {
        let command = Args::augment_args(clap::Command::new("scale").no_binary_name(true));
        Args::from_arg_matches(&command.get_matches_from(words)).expect("flags")
    }

    #[test]
    fn every_field_of_a_scenario_is_a_flag_with_its_default() {
        let command = Args::augment_args(clap::Command::new("scale"));
        let serde_json::Value::Object(fields) = serde_json::to_value(Scenario::default()).expect("JSON")
        else {
            panic!("fields")
        };
        for (field, value) in fields {
            // Not flags: a real agent and a real kubelet decide these.
            if ["heartbeatSeconds", "leaseSeconds", "leaseHoldSeconds"].contains(&field.as_str()) {
                continue;
            }
            let flag: String = field
                .chars()
                .flat_map(|c| c.is_uppercase().then_some('-').into_iter().chain(c.to_lowercase()))
                .collect();
            let found = command.get_arguments().find(|argument| argument.get_long() == Some(&flag));
            let help = found.unwrap_or_else(|| panic!("no --{flag}")).get_help().expect("help").to_string();
            let value = value.to_string().replace(['[', ']', '"'], "");
            assert!(help.ends_with(&format!("[default: {value}]")), "--{flag}: {help}, not {value}");
        }
    }

    #[test]
    fn flags_change_what_a_file_says() {
        let file = std::env::temp_dir().join(format!("knit-scenario-{}.yaml", std::process::id()));
        std::fs::write(&file, "{nodes: [20], whole: 3, seed: 9}").expect("written");
        let path = file.display().to_string();
        let words = ["--scenario", &path, "--nodes", "30,40"];
        let scenario = parse(&words).scenario().expect("a scenario");
        std::fs::remove_file(&file).expect("removed");
        assert_eq!((scenario.nodes.as_slice(), scenario.whole, scenario.seed), (&[30, 40][..], 3, 9));
    }

    #[test]
    fn what_is_not_possible_is_said_before_anything_starts() {
        for (words, said) in [
            (&["--nodes", "30000"][..], "at most 20000"),
            (&["--networks", "0"], "furtherPercent needs networks"),
            (&["--nodes", "10", "--pods", "5000"], "can have 110"),
            (&["--nodes", "10", "--whole", "3", "--failures", "8"], "at most 6 with 10 nodes"),
            (&["--scenario", "/nonexistent"], "cannot read the scenario /nonexistent"),
        ] {
            let error = parse(words).scenario().expect_err("not possible").to_string();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }

    #[test]
    fn watches_of_slices_are_files() {
        let scenario = Scenario { networks: 100, ..Scenario::default() };
        assert_eq!(files(20, &scenario), 500 + 20 * 480);
    }
}
