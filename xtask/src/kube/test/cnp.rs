//! The conformance suite of ClusterNetworkPolicy (network-policy-api), run in the control plane's network.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use super::conformance::How;
use crate::kube::bed::Bed;
use crate::kube::components::{self, Group};
use crate::kube::paths::Cache;
use crate::kube::{Options, build, e2e_images, knit};

/// In which Network the suite's namespaces are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The default one.
    Default,
    /// One that is the primary one of all of them.
    Primary,
}

/// How many of its tests pass where the kernel has no SCTP; the others are skipped, by name.
const PASSED: usize = 14;
const SKIPPED: usize = 10;

/// The Network of [`Place::Primary`], and the label by which namespaces get it.
const LABEL: &str = "knit-test=cnp";
const NETWORK: &str = "
{apiVersion: knit.dev/v1alpha1, kind: Network, metadata: {name: houses}, spec: {topology: Layer3,
 subnets: [{cidr: 10.98.0.0/16}], allowedNamespaces: {from: All},
 primaryFor: {matchLabels: {knit-test: cnp}}}}
";

impl Place {
    /// What it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "cnp",
            Self::Primary => "cnp-primary",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        [Self::Default, Self::Primary].into_iter().find(|place| place.name() == name)
    }
}

/// Runs it on a bed of its own, or on the one that is up, and keeps its report.
pub fn run(place: Place, how: How) -> Result<()> {
    let cache = Cache::find()?;
    build::build(&cache, &[Group::Core, Group::Cnp])?;
    let images = e2e_images::make(&cache)?;
    let bed = if how.here {
        Bed::open()?
    } else {
        let bed = Bed::up(&Options { dns: true, ..Options::BARE })?;
        knit::install(&bed, "full")?;
        bed
    };
    for image in &images {
        bed.load_image(image)?;
    }
    let outcome = suite(&bed, place);
    if outcome.is_err() {
        eprintln!("logs are kept in {}", bed.keep_logs(place.name())?.display());
    }
    if !how.here && !how.keep {
        bed.down()?;
    }
    outcome
}

fn suite(bed: &Bed, place: Place) -> Result<()> {
    let crd = crd()?;
    bed.kubectl(&["apply", "--server-side", "-f", crd.to_str().context("the path of the CRD")?])?;
    if place == Place::Primary {
        bed.apply(NETWORK)?;
        bed.kubectl(&["wait", "--for=condition=Accepted", "network/houses", "--timeout=30s"])?;
    }
    let folder = bed.cache().path().join("e2e").join(place.name());
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let report = folder.join("report.yaml");
    if report.exists() {
        fs::remove_file(&report)?;
    }
    let mut command = Command::new(bed.state().program("cnp.test"));
    command
        .args(["-test.v", "-test.timeout=60m"])
        .arg(format!("-cluster={}", bed.state().kubeconfig().display()))
        .arg(format!("-report-to={}", report.display()))
        .arg(format!("-implementation-version={}", env!("CARGO_PKG_VERSION")))
        .current_dir(&folder);
    if place == Place::Primary {
        command.arg(format!("-namespace-label={LABEL}"));
    }
    let status = bed.control_plane_ns()?.run(|| command.status())?.context("cannot run cnp.test")?;
    let text = fs::read_to_string(&report)
        .with_context(|| format!("the suite left no report {} ({status})", report.display()))?;
    let (passed, failed, skipped) = (count(&text, "passed"), count(&text, "failed"), count(&text, "skipped"));
    eprintln!("{passed} passed, {failed} failed, {skipped} skipped; the report is {}", report.display());
    if !status.success() || failed > 0 {
        bail!("tests of ClusterNetworkPolicy failed:\n{text}");
    }
    ensure!(
        (passed, skipped) == (PASSED, SKIPPED),
        "{passed} tests passed and {skipped} were skipped, not {PASSED} and {SKIPPED}: if the suite has \
         other ones now, look which, and change the numbers"
    );
    Ok(())
}

/// The experimental CRD, which has all fields, as the pinned module ships it.
fn crd() -> Result<PathBuf> {
    let component = components::of(&[Group::Cnp]).next().context("the component of the suite")?;
    let mut command = Command::new("go");
    command.args(["list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/network-policy-api"]);
    let output = command.current_dir(component.folder()).output().context("cannot run go")?;
    ensure!(output.status.success(), "go list failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(folder.join("config/crd/experimental/policy.networking.k8s.io_clusternetworkpolicies.yaml"))
}

/// The sum of a number of the report's statistics, over its levels of support.
fn count(report: &str, what: &str) -> usize {
    let numbers = report.lines().filter_map(|line| {
        let (key, value) = line.trim().split_once(':')?;
        (key.eq_ignore_ascii_case(what)).then(|| value.trim().parse::<usize>().ok())?
    });
    numbers.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_tells_how_many_passed() {
        let report = "
profiles:
- experimental:
    result: partial
    skippedTests:
    - CNPAdminTierEgressNodePeers
    statistics:
      Failed: 0
      Passed: 3
      Skipped: 2
    summary: \"\"
  name: ClusterNetworkPolicy
  standard:
    statistics:
      Failed: 1
      Passed: 11
      Skipped: 8
";
        assert_eq!((count(report, "passed"), count(report, "failed"), count(report, "skipped")), (14, 1, 10));
    }
}
