//! `cargo xtask bench lab`: how soon a lab is up, how soon its pods run, and what its API carries.
//!
//! The real `knit`, built as it is shipped, is run as anybody runs it; everything it makes is in namespaces
//! of its own. CPU is that of all processes of the lab, those that have ended included. The API is asked
//! through the port that `kubectl` uses, by plain connections that decode nothing, so that the client costs
//! little.

mod api;

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::process::{self, Process};
use super::{Goal, Row};

const BENCH: &str = "lab";
const PODS: usize = 100;
/// How a lab runs its node agents.
const AGENT: &str = " node --node-name ";

pub fn run(program: Option<&Path>) -> Result<Vec<Row>> {
    let knit = match program {
        Some(program) => program.canonicalize().with_context(|| format!("no {}", program.display()))?,
        None => crate::shim::build_static("knit", "release")?,
    };
    let mut rows = Vec::new();

    let (mut lab, up) = Lab::up(&knit, 2, None)?;
    rows.push(seconds("two nodes up", "wall", up.ready).goal(Goal::AtMost(3.0)));
    rows.push(seconds("two nodes up", "cpu", lab.cpu()?));
    let memory = lab.memory()?;
    rows.push(Row::new(BENCH, "empty", "rss", memory.own, "MiB").goal(Goal::AtMost(30.0)));
    rows.push(Row::new(BENCH, "empty, one agent", "rss", memory.agent, "MiB"));
    let before = lab.cpu()?;
    let writes = api::writes(&lab.api()?)?;
    let case = format!("pods created and patched, {} connections", api::WRITERS);
    rows.push(Row::new(BENCH, &case, "rate", writes.rate(), "per s").goal(Goal::AtLeast(2000.0)));
    let spent = lab.cpu()? - before;
    rows.push(Row::new(BENCH, &case, "cpu each", micros(spent, writes.count), "us"));
    let before = lab.cpu()?;
    let events = api::events(&lab.api()?)?;
    let case = format!("watch events, {} watches", api::WATCHES);
    rows.push(Row::new(BENCH, &case, "rate", events.rate(), "per s").goal(Goal::AtLeast(20_000.0)));
    rows.push(Row::new(BENCH, &case, "cpu each", micros(lab.cpu()? - before, events.count), "us"));
    lab.down()?;

    let (mut lab, up) = Lab::up(&knit, 10, None)?;
    rows.push(seconds("ten nodes up", "wall", up.ready).goal(Goal::AtMost(10.0)));
    rows.push(seconds("ten nodes up", "cpu", lab.cpu()?));
    lab.down()?;

    let (mut lab, up) = Lab::up(&knit, 2, Some(&pods()))?;
    let case = format!("{PODS} pods ready on two nodes");
    rows.push(seconds(&case, "wall", up.ready - up.nodes).goal(Goal::AtMost(5.0)));
    let spent = lab.cpu()? - up.nodes_cpu;
    rows.push(Row::new(BENCH, &case, "cpu each", spent.as_secs_f64() * 1000.0 / PODS as f64, "ms"));
    lab.down()?;
    Ok(rows)
}

fn seconds(case: &str, metric: &str, value: Duration) -> Row {
    Row::new(BENCH, case, metric, value.as_secs_f64(), "s")
}

fn micros(spent: Duration, count: usize) -> f64 {
    spent.as_secs_f64() * 1e6 / count as f64
}

/// Pods with the built-in server, each ready once it has answered a kubelet's probe.
fn pods() -> String {
    (0..PODS).fold(String::new(), |mut text, number| {
        let _ = writeln!(
            text,
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: pod-{number}, labels: {{app: bench}}}}\n\
             spec: {{containers: [{{name: main, image: knit-lab, readinessProbe: {{httpGet: {{port: \
             8080}}}}}}]}}"
        );
        text
    })
}

/// A lab in the foreground of a process of its own.
struct Lab {
    child: Child,
    knit: PathBuf,
    dir: PathBuf,
    ended: bool,
}

/// When what was there, from the start of the command.
struct Up {
    nodes: Duration,
    nodes_cpu: Duration,
    ready: Duration,
}

/// Resident memory, in MiB.
struct Memory {
    own: f64,
    agent: f64,
}

impl Lab {
    /// Starts one, and waits until it is up.
    fn up(knit: &Path, nodes: u16, manifests: Option<&str>) -> Result<(Self, Up)> {
        let dir = std::env::temp_dir().join(format!("knit-bench-{}-{nodes}", std::process::id()));
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let mut command = Command::new(knit);
        command.args(["lab", "up", "--foreground", "--nodes", &nodes.to_string()]);
        match manifests {
            Some(text) => {
                let file = dir.join("manifests.yaml");
                std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
                command.arg(file);
            }
            None => drop(command.arg("--empty")),
        }
        command
            .env("XDG_RUNTIME_DIR", &dir)
            .env_remove("KNIT_LAB")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().context("cannot start the lab")?;
        let output = child.stdout.take().context("the lab has no output")?;
        let lab = Self { child, knit: knit.to_owned(), dir, ended: false };
        let up = lab.wait(started, output)?;
        Ok((lab, up))
    }

    fn wait(&self, started: Instant, output: ChildStdout) -> Result<Up> {
        let mut nodes = None;
        for line in BufReader::new(output).lines() {
            let line = line.context("cannot read the lab's output")?;
            if line.ends_with("nodes are up") {
                nodes = Some((started.elapsed(), self.cpu()?));
            } else if line.starts_with("warning:") {
                bail!("the lab is not whole: {line}");
            } else if line == "ready" {
                let ready = started.elapsed();
                let (nodes, nodes_cpu) = nodes.context("the lab is ready before its nodes are")?;
                return Ok(Up { nodes, nodes_cpu, ready });
            }
        }
        bail!("the lab ended before it was up")
    }

    /// The CPU time of all its processes so far.
    fn cpu(&self) -> Result<Duration> {
        Ok(process::tree(self.child.id())?.iter().map(Process::cpu).sum())
    }

    fn memory(&self) -> Result<Memory> {
        let tree = process::tree(self.child.id())?;
        let largest = |agents: bool| -> Result<f64> {
            let of = tree.iter().filter(|process| process.runs(AGENT) == agents);
            let all = of.map(Process::resident).collect::<Result<Vec<f64>>>()?;
            Ok(all.into_iter().fold(0.0, f64::max))
        };
        Ok(Memory { own: largest(false)?, agent: largest(true)? })
    }

    /// Host and port of its API.
    fn api(&self) -> Result<String> {
        let path = self.dir.join("knit-lab/lab/kubeconfig");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let url = text.lines().find_map(|line| line.trim().strip_prefix("server: http://"));
        Ok(url.with_context(|| format!("{} names no server", path.display()))?.to_owned())
    }

    fn down(&mut self) -> Result<()> {
        let mut command = Command::new(&self.knit);
        command.args(["lab", "down"]).env("XDG_RUNTIME_DIR", &self.dir).env_remove("KNIT_LAB");
        ensure!(command.status().context("knit cannot be run")?.success(), "the lab was not ended");
        self.child.wait().context("cannot wait for the lab")?;
        self.ended = true;
        std::fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !self.ended {
            // Everything inside dies with it.
            let _ = self.child.kill();
            let _ = self.child.wait();
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}
