//! What tests of Knit on a bed have in common: installing and removing it as a user does, pods, and who
//! reaches whom.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::kube::bed::Bed;
use crate::kube::knit;
use crate::kube::wait::until;

/// How long the parts of Knit may take to come up, or to be replaced.
const LIMIT: &str = "--timeout=120s";

/// Which overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlay {
    /// Pods and Services.
    Full,
    /// Pods and Services, and claims of Networks.
    Claims,
    /// Pods only.
    Cni,
    /// Services only.
    Proxy,
    /// Further interfaces beside another CNI plugin, by annotation.
    Secondary,
    /// The same by claims only.
    Dra,
}

impl Overlay {
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Claims => "claims",
            Self::Cni => "cni",
            Self::Proxy => "proxy",
            Self::Secondary => "secondary",
            Self::Dra => "dra",
        }
    }

    /// What runs.
    fn workloads(self) -> &'static [&'static str] {
        match self {
            Self::Full | Self::Claims | Self::Cni | Self::Secondary | Self::Dra => {
                &["daemonset/knit-node", "deployment/knit-controller"]
            }
            Self::Proxy => &["daemonset/knit-proxy"],
        }
    }
}

/// A folder of deploy/.
fn deploy(name: &str) -> Result<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name);
    folder.to_str().map(str::to_owned).context("the path of deploy/")
}

/// Installs an overlay and waits until everything of it is ready.
pub fn install(bed: &Bed, overlay: Overlay) -> Result<()> {
    knit::install(bed, overlay.name()).map_err(|error| error.context(logs(bed)))?;
    for workload in overlay.workloads() {
        let ready = bed.kubectl(&["rollout", "status", "-n", "knit-system", workload, LIMIT]);
        ready.map_err(|error| error.context(logs(bed)))?;
    }
    Ok(())
}

/// What the parts said last, for a test that failed.
pub fn logs(bed: &Bed) -> String {
    let pods = bed.kubectl(&["get", "pods", "-A", "-o", "wide"]).unwrap_or_default();
    let said = |name: &str| {
        let label = format!("app.kubernetes.io/name={name}");
        let args = ["logs", "-n", "knit-system", "-l", &label, "--tail=15", "--prefix", "--all-containers"];
        bed.kubectl(&args).unwrap_or_default()
    };
    let parts = ["knit-controller", "knit-node", "knit-proxy", "knit-uninstall", "knit-uninstall-cluster"];
    format!("{pods}\n{}", parts.map(said).concat())
}

/// Takes Knit away, in the order of docs/install.md.
pub fn uninstall(bed: &Bed, overlay: Overlay) -> Result<()> {
    let in_system = |args: &[&str]| bed.kubectl(&[&["-n", "knit-system"], args].concat());
    in_system(&["delete", "daemonset,deployment", "--all", LIMIT])?;
    // Their pods let go a moment later than their owners are gone.
    in_system(&["wait", "--for=delete", "pod", "--all", LIMIT])?;
    let folder = deploy("uninstall")?;
    bed.kubectl(&["apply", "--server-side", "-k", &folder])?;
    let done = in_system(&["rollout", "status", "daemonset/knit-uninstall", LIMIT]);
    done.map_err(|error| error.context(logs(bed)))?;
    let cleaned = in_system(&["wait", "--for=condition=complete", "job/knit-uninstall-cluster", LIMIT]);
    cleaned.map_err(|error| error.context(logs(bed)))?;
    bed.kubectl(&["delete", "-k", &folder, LIMIT])?;
    bed.kubectl(&[
        "delete",
        "-k",
        &deploy(&format!("overlays/{}", overlay.name()))?,
        "--ignore-not-found",
        LIMIT,
    ])
    .map(drop)
}

/// Asks a pod to connect to `target` until it succeeds.
pub fn reaches(bed: &Bed, namespace: &str, pod: &str, target: &str) -> Result<()> {
    let command = ["exec", "-n", namespace, pod, "--", "/agnhost", "connect", "--timeout=3s", target];
    let mut last = String::new();
    // Rules and names of a Service follow its endpoints by a moment.
    let reached = until(&format!("{pod} reaches {target}"), Duration::from_secs(30), || {
        let output = bed.kubectl_output(&command, None)?;
        last = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(output.status.success().then_some(()))
    });
    reached.map_err(|error| error.context(last))
}

/// The same from a node itself.
pub fn node_reaches(bed: &Bed, node: &str, target: &str) -> Result<()> {
    let program = bed.state().program("agnhost").display().to_string();
    let mut last = String::new();
    let reached = until(&format!("{node} reaches {target}"), Duration::from_secs(30), || {
        let output = bed.node_output(node, &[&program, "connect", "--timeout=3s", target])?;
        last = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(output.status.success().then_some(()))
    });
    reached.map_err(|error| error.context(last))
}

/// A namespace whose account is there, so that pods can be made at once.
pub fn namespace(bed: &Bed, name: &str) -> Result<()> {
    bed.apply(&format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {name}}}}}"))?;
    bed.kubectl(&["wait", "--for=create", "-n", name, "serviceaccount/default", "--timeout=30s"]).map(drop)
}

/// Waits until all pods of a namespace are ready.
pub fn pods_ready(bed: &Bed, namespace: &str) -> Result<()> {
    let ready =
        bed.kubectl(&["wait", "--for=condition=Ready", "-n", namespace, "pod", "--all", "--timeout=90s"]);
    ready.map(drop).map_err(|error| {
        let events = bed.kubectl(&["get", "events", "-n", namespace]).unwrap_or_default();
        error.context(format!("{events}\n{}", logs(bed)))
    })
}

/// Fields of an object, as text.
pub fn field(bed: &Bed, namespace: &str, object: &str, path: &str) -> Result<String> {
    let value = bed.kubectl(&["get", "-n", namespace, object, "-o", &format!("jsonpath={path}")])?;
    ensure!(!value.is_empty(), "{object} of namespace {namespace} has no {path}");
    Ok(value)
}
