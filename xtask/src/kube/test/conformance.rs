//! The upstream end-to-end tests of Kubernetes, run by ginkgo in the control plane's network.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use crate::kube::bed::Bed;
use crate::kube::components::Group;
use crate::kube::paths::Cache;
use crate::kube::{Cni, Options, e2e_images, knit};

/// A named selection of upstream specs.
struct Selection {
    name: &'static str,
    focus: &'static str,
    skip: &'static str,
    /// How many these are: an expression that matches fewer after an update must not look like success.
    specs: usize,
    /// A Network that is the primary one of every namespace that the specs make.
    network: Option<&'static str>,
}

/// What namespaces of specs have in common is a label of the framework.
const PRIMARY: &str = "
{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: specs}, spec: {topology: Layer3,
 subnets: [{cidr: 10.97.0.0/16}], allowedNamespaces: {from: All},
 primaryFor: {matchExpressions: [{key: e2e-run, operator: Exists}]}}}
";

/// All but those that need SCTP in the kernel. They are about NetworkPolicy, and none is Conformance.
const NETPOL: Selection =
    Selection { name: "netpol", focus: "Netpol", skip: "SCTPConnectivity", specs: 48, network: None };

const SELECTIONS: [Selection; 4] = [
    Selection {
        name: "conformance",
        focus: r"\[sig-network\].*\[Conformance\]",
        skip: r"\[Serial\]",
        specs: 47,
        network: None,
    },
    // What needs no feature gate, no cloud and no kernel that is built otherwise: docs/upstream-tests.md has
    // the others.
    Selection {
        name: "sig-network",
        focus: r"\[sig-network\]",
        skip: concat!(
            r"\[Conformance\]|\[Serial\]|\[Slow\]|\[Disruptive\]|\[Feature:|\[FeatureGate:|\[Flaky\]|",
            r"LoadBalancer|SCTP|IPv6DualStack|dual-stack"
        ),
        specs: 74,
        network: None,
    },
    NETPOL,
    Selection { name: "netpol-primary", network: Some(PRIMARY), ..NETPOL },
];

#[derive(Debug, clap::Args)]
pub struct Upstream {
    /// Upstream specs to run, as a regular expression, in place of the selection's own
    #[arg(long)]
    focus: Option<String>,
    /// Upstream specs to leave out
    #[arg(long)]
    skip: Option<String>,
    /// Upstream specs at the same time
    #[arg(long, default_value_t = 4)]
    procs: u8,
    /// Upstream specs on the bridge plugin and kube-proxy in place of Knit
    #[arg(long)]
    peer: bool,
}

/// How to run, besides which specs.
#[derive(Debug, Clone, Copy)]
pub struct How {
    /// On the bed that is up.
    pub here: bool,
    /// The bed is left up.
    pub keep: bool,
    /// A spec that fails is run again.
    pub again: bool,
}

/// What ginkgo reports of one spec.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Spec {
    #[serde(default)]
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_text: String,
    leaf_node_type: String,
    state: String,
    #[serde(default)]
    num_attempts: u32,
    #[serde(default)]
    failure: Option<Failure>,
}

/// What became of all specs.
#[derive(Debug, Default)]
struct Outcome {
    passed: usize,
    /// Names and words of those that failed.
    failed: Vec<String>,
    /// Names of those that failed once and passed then.
    retried: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    #[serde(default)]
    message: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Suite {
    spec_reports: Option<Vec<Spec>>,
}

/// Whether this is the name of a selection.
pub fn is_selection(name: &str) -> bool {
    SELECTIONS.iter().any(|selection| selection.name == name)
}

/// Why no upstream spec can run here.
pub fn impossible(cache: &Cache) -> Result<Option<&'static str>> {
    let why = super::impossible(cache, &[Group::Core, Group::E2e])?;
    Ok(why.or_else(|| e2e_images::missing_tool(cache)))
}

/// Runs a selection on a bed of its own, or on the one that is up.
pub fn run(name: &str, args: &Upstream, how: How) -> Result<()> {
    let selection = SELECTIONS.iter().find(|selection| selection.name == name);
    let selection = selection.with_context(|| format!("no selection of upstream specs is called {name}"))?;
    let images = e2e_images::make(&Cache::find()?)?;
    let bed = if how.here { Bed::open()? } else { make_bed(args)? };
    for image in &images {
        bed.load_image(image)?;
    }
    if let Some(network) = selection.network {
        bed.apply(network)?;
        bed.kubectl(&["wait", "--for=condition=Accepted", "network/specs", "--timeout=30s"])?;
    }
    let outcome = run_ginkgo(&bed, selection, args, how.again);
    if outcome.is_err() {
        eprintln!("logs are kept in {}", bed.keep_logs(name)?.display());
    }
    if !how.here && !how.keep {
        bed.down()?;
    }
    outcome
}

fn make_bed(args: &Upstream) -> Result<Bed> {
    if args.peer {
        return Bed::up(&Options { cni: Some(Cni::Bridge), kube_proxy: true, dns: true, ..Options::BARE });
    }
    let bed = Bed::up(&Options { dns: true, ..Options::BARE })?;
    match knit::install(&bed, "full") {
        Ok(()) => Ok(bed),
        // Whoever comes next would find a bed that is up.
        Err(error) => {
            bed.down()?;
            Err(error)
        }
    }
}

fn run_ginkgo(bed: &Bed, selection: &Selection, args: &Upstream, again: bool) -> Result<()> {
    let state = bed.state();
    let folder = bed.cache().path().join("e2e").join(selection.name);
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let report = folder.join("report.json");
    let mut command = Command::new(state.program("ginkgo"));
    command
        .arg(format!("--procs={}", args.procs))
        .arg(format!("--flake-attempts={}", if again { 2 } else { 1 }))
        .args(["--timeout=60m", "--no-color", "--silence-skips", "--json-report=report.json"])
        .arg(format!("--output-dir={}", folder.display()))
        .arg(format!("--focus={}", args.focus.as_deref().unwrap_or(selection.focus)))
        .arg(format!("--skip={}", args.skip.as_deref().unwrap_or(selection.skip)))
        .arg(state.program("e2e.test"))
        .arg("--")
        .arg(format!("--kubeconfig={}", state.kubeconfig().display()))
        .arg(format!("--kubectl-path={}", state.program("kubectl").display()))
        .arg(format!("--num-nodes={}", bed.options().nodes))
        .arg(format!("--report-dir={}", folder.display()))
        .args(["--provider=skeleton", "--allowed-not-ready-nodes=0", "--dump-logs-on-failure=false"])
        .arg("--minStartupPods=0")
        .current_dir(&folder);
    if report.exists() {
        fs::remove_file(&report)?;
    }
    let status = bed.control_plane_ns()?.run(|| command.status())?.context("cannot run ginkgo")?;
    let Outcome { passed, failed, retried } = read_report(&report)?;
    eprintln!("{passed} specs passed, {} failed; the report is {}", failed.len(), report.display());
    if !retried.is_empty() {
        eprintln!("{} of them had failed once before:\n  {}", retried.len(), retried.join("\n  "));
        retried.iter().try_for_each(|name| super::note_retry(name))?;
    }
    if !status.success() || !failed.is_empty() {
        bail!("upstream specs failed:\n{}", failed.join("\n"));
    }
    let own = args.focus.is_none() && args.skip.is_none();
    ensure!(passed > 0, "no spec was selected");
    ensure!(
        !own || passed == selection.specs,
        "{passed} specs passed, and {} are {}: if Kubernetes has other ones now, look which, and change the \
         number",
        selection.name,
        selection.specs
    );
    Ok(())
}

/// What ginkgo wrote about all specs.
fn read_report(path: &Path) -> Result<Outcome> {
    let text = fs::read(path).with_context(|| format!("ginkgo left no report {}", path.display()))?;
    let suites: Vec<Suite> = serde_json::from_slice(&text).context("ginkgo's report is not understood")?;
    let mut outcome = Outcome::default();
    for spec in suites.into_iter().filter_map(|suite| suite.spec_reports).flatten() {
        let mut name = spec.container_hierarchy_texts.unwrap_or_default();
        name.push(spec.leaf_node_text);
        let name = name.join(" ");
        match spec.state.as_str() {
            "passed" if spec.leaf_node_type == "It" => {
                outcome.passed += 1;
                outcome.retried.extend((spec.num_attempts > 1).then_some(name));
            }
            "passed" | "skipped" | "pending" => {}
            state => {
                let words = spec.failure.map(|failure| failure.message).unwrap_or_default();
                let words = words.lines().next().unwrap_or_default().to_owned();
                outcome.failed.push(format!("  {state}: {name} ({words})"));
            }
        }
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_tells_what_failed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        let report = r#"[{"SpecReports": [
            {"ContainerHierarchyTexts": ["[sig-network] DNS"], "LeafNodeText": "resolves",
              "LeafNodeType": "It", "State": "passed",
             "NumAttempts": 2},
            {"ContainerHierarchyTexts": ["[sig-network] DNS"], "LeafNodeText": "again", "LeafNodeType": "It",
              "State": "passed",
             "NumAttempts": 1},
            {"ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeText": "serve",
              "LeafNodeType": "It",
             "State": "failed", "Failure": {"Message": "timed out\nmore"}},
            {"ContainerHierarchyTexts": null, "LeafNodeText": "", "LeafNodeType": "SynchronizedBeforeSuite",
              "State": "passed"},
            {"ContainerHierarchyTexts": [], "LeafNodeText": "other", "LeafNodeType": "It", "State": "skipped"}
        ]}]"#;
        fs::write(&path, report).unwrap();
        let outcome = read_report(&path).unwrap();
        assert_eq!(outcome.passed, 2);
        assert_eq!(outcome.failed, ["  failed: [sig-network] Services serve (timed out)"]);
        assert_eq!(outcome.retried, ["[sig-network] DNS resolves"]);
    }
}
