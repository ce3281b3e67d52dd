//! `cargo xtask bench kube`: 50 pods at once on one node of a real cluster, Knit next to the bridge plugin,
//! portmap and kube-proxy, one after the other on beds that are alike in everything else.
//!
//! A sandbox's time is what containerd writes into its log: when it was asked for a sandbox, and when it had
//! made one, the network plugin's work in between. An address is known when a watch on the API shows it. The
//! pods are behind a Service, so that service proxies have their share of work. CPU is that of processes,
//! those that have ended included.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::jiff::Timestamp;
use knit_types::sync::Locked;

use super::process::{self, Process};
use super::{Goal, Row};
use crate::kube::bed::Bed;
use crate::kube::images::AGNHOST;
use crate::kube::wait::until;
use crate::kube::{Cni, Options, knit};

const BENCH: &str = "kube";
const NODE: &str = "n1";
const NAMESPACE: &str = "bench";
const PODS: usize = 50;
const ROUNDS: usize = 3;
const PEER: &str = "bridge, portmap, kube-proxy";
/// How long 50 pods may take to start, or to end.
const LIMIT: Duration = Duration::from_secs(180);

/// What was measured of one network.
struct Side {
    /// containerd: asked for a sandbox, has made it.
    sandbox: Vec<Duration>,
    /// containerd was asked for a sandbox, the API shows its address.
    known: Vec<Duration>,
    /// CPU of the agent, or of kube-proxy, over all rounds.
    daemon_cpu: Duration,
    /// CPU of everything on the node, by program, over all rounds. What has ended counts for what waited for
    /// it: CNI plugins for containerd, containers and their shims for the node's first process.
    node_cpu: BTreeMap<String, Duration>,
    /// Resident memory of the agent, or of kube-proxy, while the pods of the last round ran, in MiB.
    memory: f64,
}

pub fn run() -> Result<Vec<Row>> {
    let file = knit::release_image()?;
    let bare = Options { nodes: 1, quiet: true, ..Options::BARE };

    let bed = Bed::up(&Options { cni: Some(Cni::Bridge), kube_proxy: true, ..bare.clone() })?;
    let peer = on(bed, "kube-proxy --config")?;

    let bed = Bed::up(&bare)?;
    if let Err(error) = knit::install_image(&bed, "full", &file) {
        bed.down()?;
        return Err(error);
    }
    let ours = on(bed, "knit node")?;
    rows(ours, peer)
}

fn rows(mut ours: Side, mut peer: Side) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let pods = (PODS * ROUNDS) as f64;
    let cases = [
        ("sandbox asked for to made", &mut ours.sandbox, &mut peer.sandbox),
        ("sandbox asked for to address in the API", &mut ours.known, &mut peer.known),
    ];
    for (case, ours, peer) in cases {
        ours.sort_unstable();
        peer.sort_unstable();
        for (metric, share) in [("p50", 0.5), ("p99", 0.99)] {
            let millis = |all: &[Duration]| -> Result<f64> {
                let at = ((all.len() as f64 - 1.0) * share).round() as usize;
                Ok(all.get(at).context("no pod was seen")?.as_secs_f64() * 1000.0)
            };
            rows.push(Row::new(BENCH, case, metric, millis(ours)?, "ms").peer(PEER, millis(peer)?));
        }
    }
    let each = |spent: Duration| spent.as_secs_f64() * 1000.0 / pods;
    rows.push(
        Row::new(BENCH, "a pod, from start to end: agent, or kube-proxy", "cpu", each(ours.daemon_cpu), "ms")
            .peer(PEER, each(peer.daemon_cpu)),
    );
    rows.push(
        Row::new(
            BENCH,
            "a pod, from start to end: the whole node",
            "cpu",
            each(ours.node_cpu.values().sum()),
            "ms",
        )
        .peer(PEER, each(peer.node_cpu.values().sum()))
        .goal(Goal::Ratio(1.0)),
    );
    let programs: BTreeSet<&String> = ours.node_cpu.keys().chain(peer.node_cpu.keys()).collect();
    for program in programs {
        let of = |side: &Side| each(side.node_cpu.get(program).copied().unwrap_or_default());
        let case = format!("a pod, from start to end: {program}");
        rows.push(Row::new(BENCH, case, "cpu", of(&ours), "ms").peer(PEER, of(&peer)));
    }
    let case = format!("agent, or kube-proxy, with {PODS} pods");
    rows.push(
        Row::new(BENCH, case, "rss", ours.memory, "MiB").peer(PEER, peer.memory).goal(Goal::Ratio(1.0)),
    );
    Ok(rows)
}

/// Measures on a bed, and ends it, whatever happens.
fn on(bed: Bed, daemon: &str) -> Result<Side> {
    let measured = measure(&bed, daemon).with_context(|| format!("the bed with {daemon}"));
    bed.down()?;
    measured
}

fn measure(bed: &Bed, daemon: &str) -> Result<Side> {
    bed.apply(&format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {NAMESPACE}}}}}"))?;
    bed.kubectl(&["wait", "--for=create", "-n", NAMESPACE, "serviceaccount/default", "--timeout=30s"])?;
    bed.apply(&format!(
        "{{apiVersion: v1, kind: Service, metadata: {{name: web, namespace: {NAMESPACE}}}, \
         spec: {{selector: {{app: web}}, ports: [{{port: 80, targetPort: 8080}}]}}}}"
    ))?;
    let watch = Watch::start(bed)?;
    // The first pod unpacks the image, and shows that the watch is there.
    bed.apply(&pod("first"))?;
    watch.wait_for(&["first".to_owned()])?;

    let (node, agent) = (bed.process(NODE)?, cpu_of(bed, daemon)?);
    let before = cpu(node)?;
    let (mut sandbox, mut known, mut memory) = (Vec::new(), Vec::new(), 0.0);
    for round in 0..ROUNDS {
        let names: Vec<String> = (0..PODS).map(|number| format!("pod-{round}-{number}")).collect();
        let manifests = names.iter().fold(String::new(), |mut text, name| {
            let _ = writeln!(text, "---\n{}", pod(name));
            text
        });
        bed.apply(&manifests)?;
        let addresses = watch.wait_for(&names)?;
        let ready = format!("--timeout={}s", LIMIT.as_secs());
        bed.kubectl(&["wait", "--for=condition=Ready", "-n", NAMESPACE, "pod", "-l", "app=web", &ready])?;
        let made = sandboxes(&bed.state().logs().join(format!("{NODE}-containerd.log")))?;
        for name in &names {
            let (asked, done) = made.get(name).with_context(|| format!("containerd's log has no {name}"))?;
            sandbox.push(between(*asked, *done)?);
            known.push(between(*asked, addresses[name])?);
        }
        memory = daemon_of(bed, daemon)?.resident()?;
        let mut delete = vec!["delete", "pod", "-n", NAMESPACE, "--grace-period=1", "--wait", &ready];
        delete.extend(names.iter().map(String::as_str));
        bed.kubectl(&delete)?;
    }
    let mut node_cpu = cpu(node)?;
    for (program, spent) in &mut node_cpu {
        *spent = spent.saturating_sub(before.get(program).copied().unwrap_or_default());
    }
    Ok(Side { sandbox, known, daemon_cpu: cpu_of(bed, daemon)?.saturating_sub(agent), node_cpu, memory })
}

fn pod(name: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: {NAMESPACE}, labels: {{app: \
         web}}}}, \
         spec: {{nodeName: {NODE}, terminationGracePeriodSeconds: 1, enableServiceLinks: false, \
         automountServiceAccountToken: false, \
         containers: [{{name: web, image: '{AGNHOST}', args: [netexec, --http-port=8080]}}]}}}}"
    )
}

fn daemon_of(bed: &Bed, daemon: &str) -> Result<Process> {
    let mut found: Vec<_> =
        process::tree(bed.process(NODE)?)?.into_iter().filter(|process| process.runs(daemon)).collect();
    ensure!(found.len() == 1, "{} processes of {NODE} run `{daemon}`", found.len());
    found.pop().context("there is one")
}

fn cpu_of(bed: &Bed, daemon: &str) -> Result<Duration> {
    Ok(daemon_of(bed, daemon)?.cpu())
}

/// The CPU of a node, by program.
fn cpu(node: u32) -> Result<BTreeMap<String, Duration>> {
    let mut programs = BTreeMap::<String, Duration>::new();
    for process in process::tree(node)? {
        *programs.entry(process.program().to_owned()).or_default() += process.cpu();
    }
    Ok(programs)
}

fn between(from: Timestamp, to: Timestamp) -> Result<Duration> {
    Duration::try_from(to.duration_since(from)).context("an end before its start")
}

/// When each pod of the namespace had an address in the API, as a watch of kubectl sees it.
struct Watch {
    child: Child,
    seen: Arc<Mutex<BTreeMap<String, Timestamp>>>,
}

impl Watch {
    fn start(bed: &Bed) -> Result<Self> {
        let mut command = Command::new(bed.state().program("kubectl"));
        command
            .args(["get", "pods", "-n", NAMESPACE, "--watch", "--no-headers", "-o"])
            .arg("custom-columns=NAME:.metadata.name,IP:.status.podIP")
            .env("KUBECONFIG", bed.state().kubeconfig())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = bed.control_plane_ns()?.run(|| command.spawn())?.context("cannot run kubectl")?;
        let output = child.stdout.take().context("kubectl has no output")?;
        let seen = Arc::<Mutex<BTreeMap<String, Timestamp>>>::default();
        let into = Arc::clone(&seen);
        // It ends with kubectl.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let now = Timestamp::now();
                let mut words = line.split_whitespace();
                if let (Some(name), Some(address)) = (words.next(), words.next())
                    && address != "<none>"
                {
                    let mut seen = into.locked();
                    seen.entry(name.to_owned()).or_insert(now);
                }
            }
        });
        Ok(Self { child, seen })
    }

    /// Waits until all of these have an address; when each had it.
    fn wait_for(&self, names: &[String]) -> Result<BTreeMap<String, Timestamp>> {
        until("addresses of all pods", LIMIT, || {
            let seen = self.seen.locked();
            Ok(names.iter().all(|name| seen.contains_key(name)).then(|| seen.clone()))
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// When containerd was asked for the sandbox of each pod, and when it had made one.
fn sandboxes(log: &Path) -> Result<BTreeMap<String, (Timestamp, Timestamp)>> {
    let text = fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    Ok(parse(&text))
}

fn parse(log: &str) -> BTreeMap<String, (Timestamp, Timestamp)> {
    let (mut asked, mut made) = (BTreeMap::new(), BTreeMap::new());
    for line in log.lines() {
        let cut = |from: &str, to: char| line.split_once(from)?.1.split_once(to).map(|(part, _)| part);
        let name = cut(r#"RunPodSandbox for name:\""#, '\\');
        let (Some(time), Some(name)) = (cut("time=\"", '"'), name) else { continue };
        let Ok(time) = time.parse::<Timestamp>() else { continue };
        if line.contains("returns sandbox id") {
            if let Some(asked) = asked.get(name) {
                made.insert(name.to_owned(), (*asked, time));
            }
        } else if !line.contains("failed") {
            // The first time counts: one that had to be tried again took that long.
            asked.entry(name.to_owned()).or_insert(time);
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_takes_from_the_question_to_the_answer() {
        let line = |time: &str, pod: &str, outcome: &str| {
            let asked = format!(r#"RunPodSandbox for name:\"{pod}\" uid:\"1\" namespace:\"bench\"{outcome}"#);
            format!("time=\"2026-01-02T03:04:{time}Z\" level=info msg=\"{asked}\"\n")
        };
        let log = [
            line("05.1", "a", ""),
            "time=\"2026-01-02T03:04:05.200000000Z\" level=info msg=\"connecting to shim 12\"\n".to_owned(),
            line("05.35", "a", r#" returns sandbox id \"12\""#),
            line("06.0", "b", ""),
            line("06.5", "b", " failed, error"),
        ];
        let made = parse(&log.concat());
        assert_eq!(made.len(), 1, "b was never made");
        let (asked, done) = made["a"];
        assert_eq!(between(asked, done).unwrap(), Duration::from_millis(250));
        assert!(between(done, asked).is_err());
    }
}
