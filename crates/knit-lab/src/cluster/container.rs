//! One container of a pod: its process, its readiness, and how its status says that.

use std::time::Duration;

use knit_kernel::netns::NetNs;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::error::Result;
use super::node::spawn_in;
use super::probe::{Probe, Target};

/// The built-in server, on the container's ports; HTTP and UDP echo on 8080 if it names none.
pub(crate) fn built_in(container: &Value) -> Vec<String> {
    let mut line = vec!["knit".to_owned(), "lab".to_owned(), "serve".to_owned()];
    let ports = container["ports"].as_array().filter(|ports| !ports.is_empty());
    match ports {
        Some(ports) => {
            for port in ports {
                let number = port["containerPort"].as_u64().unwrap_or(8080);
                let flag = if port["protocol"] == "UDP" { "--udp" } else { "--http" };
                line.extend([flag.to_owned(), number.to_string()]);
            }
        }
        None => line.extend(["--http", "8080", "--udp", "8080"].map(str::to_owned)),
    }
    line
}

/// One container: its process and how ready it is.
pub(crate) struct Contained {
    pub(crate) container: Value,
    pub(crate) child: Option<Child>,
    probe: Option<Probe>,
    /// When the next attempt is due, and what came of the last ones.
    attempt_at: tokio::time::Instant,
    in_a_row: (bool, u32),
    pub(crate) ready: bool,
    pub(crate) restarts: u32,
    pub(crate) exit_code: Option<i32>,
    pub(crate) problem: Option<String>,
    started_at: String,
    pub(crate) due: Option<tokio::time::Instant>,
    pub(crate) done: bool,
}

impl Contained {
    pub(crate) fn new(container: Value) -> Self {
        let probe = Probe::of(&container);
        Self {
            container,
            child: None,
            probe,
            attempt_at: tokio::time::Instant::now(),
            in_a_row: (false, 0),
            ready: false,
            restarts: 0,
            exit_code: None,
            problem: None,
            started_at: String::new(),
            due: None,
            done: false,
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.container["name"].as_str().unwrap_or_default()
    }

    /// Starts its process in the pod's namespace.
    pub(crate) fn start(&mut self, command: Result<Command>, namespace: &NetNs, now: &str) {
        let what = format!("container {}", self.name());
        let spawned = command.and_then(|command| spawn_in(namespace, command, &what));
        match spawned {
            Ok(child) => {
                self.child = Some(child);
                now.clone_into(&mut self.started_at);
                self.problem = None;
                self.ready = self.probe.is_none();
                self.in_a_row = (false, 0);
                let delay = self.probe.as_ref().map_or(Duration::ZERO, |probe| probe.delay);
                self.attempt_at = tokio::time::Instant::now() + delay;
            }
            Err(error) => {
                let source = std::error::Error::source(&error).map(|s| format!(": {s}")).unwrap_or_default();
                self.problem = Some(format!("{error}{source}"));
                self.exit_code = Some(127);
                self.child = None;
                self.ready = false;
            }
        }
    }

    async fn change(&mut self, target: Option<&Target>) -> bool {
        if let Some(due) = self.due {
            tokio::time::sleep_until(due).await;
            return true;
        }
        let Some(child) = &mut self.child else {
            if self.done {
                std::future::pending::<()>().await;
            }
            return true; // it did not start
        };
        let probing = async {
            match (&self.probe, target) {
                (Some(probe), Some(target)) => {
                    tokio::time::sleep_until(self.attempt_at).await;
                    probe.attempt(target).await
                }
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = child.wait() => {
                self.exit_code = ended.ok().and_then(|status| status.code()).or(Some(137));
                self.child = None;
                self.ready = false;
                true
            }
            good = probing => {
                self.probed(good);
                false
            }
        }
    }

    fn probed(&mut self, good: bool) {
        let Some(probe) = &self.probe else { return };
        self.in_a_row = if self.in_a_row.0 == good { (good, self.in_a_row.1 + 1) } else { (good, 1) };
        if good && self.in_a_row.1 >= probe.successes {
            self.ready = true;
        } else if !good && self.in_a_row.1 >= probe.failures {
            self.ready = false;
        }
        // Until it is ready for the first time it is asked more often, so that a lab is up soon.
        let pause = if self.ready || self.in_a_row.1 > 50 { probe.period } else { Duration::from_millis(50) };
        self.attempt_at = tokio::time::Instant::now() + pause;
    }

    pub(crate) async fn end(&mut self, grace: Duration) {
        let Some(mut child) = self.child.take() else { return };
        let group = child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
        if !grace.is_zero()
            && let Some(group) = group
        {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::TERM);
            let _ = tokio::time::timeout(grace, child.wait()).await;
        }
        if let Some(group) = group {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = child.kill().await;
    }

    pub(crate) fn status(&self, now: &str) -> Value {
        let exit = self.exit_code.unwrap_or(0);
        let state = if self.child.is_some() {
            json!({"running": {"startedAt": self.started_at}})
        } else if self.done {
            let reason = if exit == 0 { "Completed" } else { "Error" };
            json!({"terminated": {"exitCode": exit, "reason": reason, "finishedAt": now}})
        } else {
            let message = self.problem.clone().unwrap_or_else(|| format!("it ended with exit code {exit}"));
            json!({"waiting": {"reason": "CrashLoopBackOff", "message": message}})
        };
        json!({
            "name": self.container["name"], "image": self.container["image"].as_str().unwrap_or("knit-lab"),
            "imageID": "", "ready": self.ready && self.child.is_some(), "started": self.child.is_some(),
            "restartCount": self.restarts, "state": state,
        })
    }
}

/// Waits until a container has news; says which one if its process ended or is due.
pub(crate) async fn next_change(children: &mut [Contained], target: Option<&Target>) -> Option<usize> {
    use futures::FutureExt as _;
    let waits = children
        .iter_mut()
        .enumerate()
        .map(|(index, contained)| async move { contained.change(target).await.then_some(index) }.boxed());
    let (news, _, _) = futures::future::select_all(waits).await;
    news
}
