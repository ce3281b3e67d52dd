//! `cargo xtask bench scale`: what an agent and the controller cost in clusters of 1,000, 2,500 and 5,000
//! simulated nodes.
//!
//! Each size is a run of `knit lab scale` in processes of its own, of at most [`RUN_TIMEOUT`]. Nodes, and 30
//! pods on each, are what grows; 100 Networks, 10,000 Services, 1,000 policies and 100 pods per second that
//! come and go are the same in all. The API is one without etcd, which counts. Counts are the same on any
//! machine; times and processor shares are those of a machine that also simulates everybody else.

use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::{Goal, Row};

const BENCH: &str = "scale";
/// The sizes of the targets.
pub const SIZES: [u32; 3] = [1000, 2500, 5000];
/// A size that takes longer than this is broken off.
const RUN_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Whole nodes: few, since two cores carry out everything.
const WHOLE: u32 = 20;

/// What this does not measure, each with where it is measured, if it is.
const NOT_MEASURED: [&str; 6] = [
    "the agent with 10,000 Services (5 % of a core, 90 MiB): simulated agents serve none; bench services \
     measures the proxy",
    "what 1,000 policies bring to an agent (200 KB/s): simulated agents enforce none; bench policy measures \
     their model",
    "the kernel's part of ADD, and a real agent's start: bench attach",
    "an API server with etcd: its processor time, memory and latency",
    "an outage of ten minutes: it lasts 150 s, longer than a Lease holds",
    "kubelets, the scheduler and container runtimes",
];

pub fn run(program: Option<&Path>, sizes: &[u32]) -> Result<Vec<Row>> {
    let knit = match program {
        Some(program) => program.canonicalize().with_context(|| format!("no {}", program.display()))?,
        None => crate::shim::build_static("knit", "release")?,
    };
    let mut rows = Vec::new();
    let mut found = Vec::new();
    for nodes in sizes {
        let size = measure(&knit, *nodes)?;
        rows.extend(of_size(*nodes, &size)?);
        found.push((*nodes, size));
    }
    rows.extend(growth(&found)?);
    for what in NOT_MEASURED {
        eprintln!("not measured: {what}");
    }
    Ok(rows)
}

/// Runs one size, and reads its report.
fn measure(knit: &Path, nodes: u32) -> Result<Value> {
    eprintln!("{nodes} nodes: up to {} minutes", RUN_TIMEOUT.as_secs() / 60);
    let mut command = Command::new(knit);
    command.args(["lab", "scale", "-o", "json", "--nodes", &nodes.to_string()]);
    for (flag, value) in [
        ("--whole", WHOLE.min(nodes / 4).max(1).to_string()),
        ("--pods", (nodes * 30).to_string()),
        ("--networks", "100".into()),
        ("--services", "10000".into()),
        ("--policies", "1000".into()),
        ("--pods-per-second", "100".into()),
        ("--pod-seconds", "5".into()),
        ("--quiet-seconds", "60".into()),
        ("--busy-seconds", "60".into()),
        ("--joins", "100".into()),
        ("--join-seconds", "60".into()),
        ("--failures", "20".into()),
        ("--fail-seconds", "20".into()),
        ("--outage-seconds", "150".into()),
    ] {
        command.args([flag, &value]);
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", knit.display()))?;
    let mut output = child.stdout.take().context("the run has no output")?;
    let reading = std::thread::spawn(move || {
        let mut text = String::new();
        output.read_to_string(&mut text).map(|_| text)
    });
    let status = wait(&mut child, nodes)?;
    let text = match reading.join() {
        Ok(text) => text.context("cannot read the report")?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    ensure!(status.success(), "the run of {nodes} nodes failed ({status}): what it says above is missing");
    let report: Value = serde_json::from_str(&text).context("the report is not JSON")?;
    Ok(report["sizes"][0].clone())
}

fn wait(child: &mut Child, nodes: u32) -> Result<std::process::ExitStatus> {
    let end = Instant::now() + RUN_TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the run")? {
            return Ok(status);
        }
        if Instant::now() >= end {
            child.kill().context("cannot end the run")?;
            child.wait().context("cannot wait for the run")?;
            bail!("{nodes} nodes took longer than {} minutes", RUN_TIMEOUT.as_secs() / 60);
        }
        std::thread::park_timeout(Duration::from_millis(200));
    }
}

fn phase<'a>(size: &'a Value, name: &str) -> Result<&'a Value> {
    let mut phases = size["phases"].as_array().into_iter().flatten();
    let found = phases.find(|phase| phase["name"] == name);
    found.with_context(|| format!("the report has no phase {name}"))
}

/// Writes in a phase by a group, of a kind and its subresources.
fn writes(phase: &Value, group: &str, kind: &str) -> f64 {
    let kinds = phase["counts"][group].as_object().into_iter().flatten();
    kinds
        .filter(|(name, _)| name.split('/').next() == Some(kind))
        .map(|(_, count)| count["writes"].as_f64().unwrap_or_default())
        .sum()
}

/// Writes in a phase by a group, of all kinds but Leases.
fn writes_but_leases(phase: &Value, group: &str) -> f64 {
    let kinds = phase["counts"][group].as_object().into_iter().flatten();
    kinds
        .filter(|(name, _)| *name != "leases")
        .map(|(_, count)| count["writes"].as_f64().unwrap_or_default())
        .sum()
}

/// The rows of one size. A value that the report does not have is an error, and never a row that is missing.
fn of_size(nodes: u32, size: &Value) -> Result<Vec<Row>> {
    let (quiet, busy, join) = (phase(size, "quiet")?, phase(size, "busy")?, phase(size, "join")?);
    let (outage, afterwards) = (phase(size, "outage")?, phase(size, "afterwards")?);
    let number = |phase: &Value, path: &str| {
        let name = &phase["name"];
        phase.pointer(path).and_then(Value::as_f64).with_context(|| format!("{name} has no {path}"))
    };
    let row = |case: &str, metric: &str, value: f64, unit: &str| {
        Row::new(BENCH, format!("{nodes} nodes, {case}"), metric, value, unit)
    };
    let mebibytes = |bytes: f64| bytes / f64::from(1 << 20);
    let seconds = size["startSeconds"].as_f64().context("the report has no startSeconds")?;
    let mut rows = vec![row("start", "wall", seconds, "s")];
    if let Some(plan) = size["startPlanSeconds"].as_f64() {
        rows.push(row("start", "slowest plan", plan * 1e3, "ms"));
    }
    let bytes = number(quiet, "/perAgent/bytes")? / 1e3;
    rows.push(row("quiet", "to an agent", bytes, "KB/s").goal(Goal::AtMost(2.0)));
    let all = number(quiet, "/writesPerSecond")?;
    rows.push(row("quiet", "writes of all", all, "per s").goal(Goal::AtMost(300.0)));
    for (name, phase) in [("quiet", quiet), ("pods come and go", busy), ("nodes join", join)] {
        let cpu = number(phase, "/controller/cpu")? * 100.0;
        rows.push(row(name, "controller, cpu", cpu, "%").goal(Goal::AtMost(100.0)));
        let memory = mebibytes(number(phase, "/controller/memoryBytes")?);
        rows.push(row(name, "controller, rss", memory, "MiB").goal(Goal::AtMost(1024.0)));
        let plan = number(phase, "/slowestPlanSeconds")? * 1e3;
        rows.push(row(name, "controller, slowest plan", plan, "ms").goal(Goal::AtMost(50.0)));
        let ceased = number(phase, "/ceasedToLead")?;
        rows.push(row(name, "controller, ceased to lead", ceased, "times").goal(Goal::AtMost(0.0)));
    }
    for (name, phase) in [("quiet", quiet), ("pods come and go", busy)] {
        let cpu = number(phase, "/agent/cpu")? * 100.0;
        rows.push(row(name, "agent without Services, cpu", cpu, "%").goal(Goal::AtMost(1.5)));
        let memory = mebibytes(number(phase, "/agent/memoryBytes")?);
        rows.push(row(name, "agent without Services, rss", memory, "MiB").goal(Goal::AtMost(40.0)));
    }
    let further = number(busy, "/further")?.max(1.0);
    let of_agents = writes(busy, "agents", "networkattachments") / number(busy, "/furtherWhole")?.max(1.0);
    let of_controller = writes(busy, "controller", "networkattachments") / further;
    let each = row("pods come and go", "writes per pod of a further Network", of_agents + of_controller, "");
    rows.push(each.goal(Goal::AtMost(4.0)));
    // Whatever kind it is: a pod of the default Network should cost none.
    let (of_all_kinds, on_whole) = (writes_but_leases(busy, "agents"), number(busy, "/onWhole")?.max(1.0));
    let each = row(
        "pods come and go",
        "writes of agents per pod, all kinds but Leases",
        of_all_kinds / on_whole,
        "",
    );
    rows.push(each.goal(Goal::AtMost(4.0)));
    let (whole, minutes) = (
        size["whole"].as_f64().context("the report has no whole")?.max(1.0),
        number(busy, "/seconds")? / 60.0,
    );
    let reports = writes(busy, "agents", "nodenetworks") / whole / minutes.max(1e-3);
    rows.push(row("pods come and go", "writes of its NodeNetwork by an agent", reports, "per min"));
    rows.push(row("pods come and go", "failed", number(busy, "/failed")?, "pods").goal(Goal::AtMost(0.0)));
    let bytes = number(busy, "/perAgent/bytes")? / 1e3;
    rows.push(row("pods come and go", "to an agent", bytes, "KB/s").goal(Goal::AtMost(200.0)));
    for (metric, path) in [("attached, p99", "/attached/p99"), ("reachable, p99", "/reachable/p99")] {
        rows.push(row("pods come and go", metric, number(busy, path)?, "s"));
    }
    let missed = number(join, "/unfollowed")? + number(join, "/refused")?;
    rows.push(row("nodes join", "not followed", missed, "nodes").goal(Goal::AtMost(0.0)));
    let followed = number(join, "/followed/p99")?;
    rows.push(row("nodes join", "every agent follows, p99", followed, "s").goal(Goal::AtMost(5.0)));
    let (idle, joining) = (number(busy, "/added/p99")?, number(join, "/added/p99")?);
    rows.push(row("pods come and go", "ADD, p99", idle * 1e3, "ms"));
    let times = row("nodes join", "ADD, p99 to that without joins", joining / idle.max(1e-6), "x");
    rows.push(times.goal(Goal::AtMost(2.0)));
    let tainted = size["tainted"].as_f64().context("the report has no tainted")?;
    rows.push(row("API away for 150 s", "tainted", tainted, "nodes").goal(Goal::AtMost(0.0)));
    let closed = writes(outage, "controller", "nodes") + writes(afterwards, "controller", "nodes");
    rows.push(row("API away for 150 s", "writes of Nodes", closed, "").goal(Goal::AtMost(0.0)));
    let storm = number(afterwards, "/writesPerSecond")? / all.max(0.001);
    let storm = row("API is back", "writes of all to those of a quiet cluster", storm, "x");
    rows.push(storm.goal(Goal::AtMost(3.0)));
    Ok(rows)
}

/// What an agent receives in the largest cluster, to what it does in the smallest.
fn growth(found: &[(u32, Value)]) -> Result<Vec<Row>> {
    let (Some((few, small)), Some((many, large))) =
        (found.iter().min_by_key(|(nodes, _)| nodes), found.iter().max_by_key(|(nodes, _)| nodes))
    else {
        return Ok(Vec::new());
    };
    if few == many {
        return Ok(Vec::new());
    }
    let mut rows = Vec::new();
    for name in ["quiet", "busy"] {
        for figure in ["events", "bytes"] {
            let of = |size| -> Result<f64> {
                let value = phase(size, name)?["perAgent"][figure].as_f64();
                value.with_context(|| format!("{name} has no {figure} of an agent"))
            };
            let times = of(large)? / of(small)?.max(0.001);
            let case = format!("{many} nodes to {few}, {name}");
            let row = Row::new(BENCH, case, &format!("{figure} to an agent"), times, "x");
            rows.push(row.goal(Goal::AtMost(1.5)));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(bytes: f64) -> Value {
        let load = json!({"cpu": 0.01, "memoryBytes": 30 << 20});
        let phase = |name: &str| {
            json!({"name": name, "seconds": 60.0, "onWhole": 10,
                "perAgent": {"events": 1.0, "bytes": bytes, "writes": 0.0},
                "writesPerSecond": 40.0, "controller": load, "agent": load, "slowestPlanSeconds": 0.01,
                "ceasedToLead": 0, "further": 10, "furtherWhole": 5, "failed": 0, "unfollowed": 0,
                "refused": 0,
                "attached": {"p99": 0.1}, "reachable": {"p99": 0.2}, "added": {"p99": 0.01},
                "followed": {"p99": 1.5}, "counts": {
                    "agents": {"networkattachments": {"writes": 10},
                        "networkattachments/status": {"writes": 5}, "leases": {"writes": 900},
                        "nodenetworks/status": {"writes": 20}},
                    "controller": {"nodeslices": {"writes": 7}, "nodes/status": {"writes": 0}}}})
        };
        let phases = ["quiet", "busy", "join", "outage", "afterwards"].map(phase);
        json!({"startSeconds": 20.0, "whole": 20, "startPlanSeconds": 0.3, "tainted": 0, "phases": phases})
    }

    #[test]
    fn a_report_becomes_rows_with_their_targets() {
        let rows = of_size(1000, &report(1e3)).expect("rows");
        let find = |metric: &str| rows.iter().find(|row| row.metric == metric).expect(metric);
        assert_eq!(find("writes per pod of a further Network").value, 3.0);
        assert_eq!((find("to an agent").value, find("to an agent").met), (1.0, Some(true)));
        assert_eq!(find("writes of agents per pod, all kinds but Leases").value, 3.5);
        assert_eq!(find("writes of its NodeNetwork by an agent").value, 1.0);
        assert_eq!(find("writes of Nodes").value, 0.0, "slices are not Nodes");
        assert!(rows.iter().all(|row| row.met != Some(false)), "{rows:#?}");
    }

    #[test]
    fn a_figure_that_is_missing_is_an_error_and_no_row_less() {
        let mut report = report(1e3);
        report["phases"][1]["agent"] = Value::Null;
        let error = of_size(1000, &report).expect_err("it is missing").to_string();
        assert!(error.contains("busy") && error.contains("/agent/cpu"), "{error}");
    }

    #[test]
    fn what_an_agent_receives_must_not_grow() {
        let rows = growth(&[(1000, report(1e3)), (5000, report(2e3))]).expect("rows");
        let met: Vec<_> = rows.iter().map(|row| (row.value, row.met)).collect();
        assert_eq!(met, [(1.0, Some(true)), (2.0, Some(false)), (1.0, Some(true)), (2.0, Some(false))]);
        assert!(growth(&[(1000, report(1e3))]).expect("none").is_empty());
    }
}
