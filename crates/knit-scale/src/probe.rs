//! One whole node in a process of its own, so that what its agent takes of processor and memory can be told.
//!
//! The simulation starts the process and reads what it says, line by line; in the process, [`serve`] runs the
//! agent, and stands in for the kubelet of its node. A process that ends is told: its figures are never
//! missing in silence.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use knit_objects::{Event, Objects, Source};
use knit_types::chain;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::node::{self, NAMESPACE, WholeNode};
use crate::process::{self, Usage};
use crate::run::Error;

/// How long a process that says nothing more may take to end before it counts as running.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// What the process says of itself, one JSON document per line.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Said {
    /// Its agent is up.
    Ready,
    /// A pod was attached, so many seconds after it was asked for.
    Attached { pod: u32, seconds: f64 },
    /// A pod could not be attached.
    Failed { pod: u32, why: String },
}

/// What is known of the process.
#[derive(Clone, Debug, Default)]
struct Heard {
    ready: bool,
    pods: BTreeMap<u32, Result<f64, String>>,
    /// It says nothing more.
    ended: bool,
}

/// The process, as the simulation sees it. It ends with this.
pub struct Probe {
    /// The number of its node.
    pub number: u32,
    child: Child,
    heard: watch::Receiver<Heard>,
    reading: JoinHandle<()>,
}

/// Waits for what the process says of pods. Clones are of the same one.
#[derive(Clone)]
pub struct Listener {
    /// The number of its node.
    pub number: u32,
    heard: watch::Receiver<Heard>,
}

// === impl Probe ===

impl Probe {
    /// Starts the process, and waits until its agent is up.
    ///
    /// # Errors
    /// When it does not start, or ends, or says nothing in time.
    pub async fn start(
        program: &Path,
        number: u32,
        api: &str,
        directory: &Path,
        patience: Duration,
    ) -> Result<Self, Error> {
        let mut command = tokio::process::Command::new(program);
        command.args(["lab", "simulated-node", "--api-url", api, "--number", &number.to_string()]);
        command.arg("--directory").arg(directory);
        // What its agent waits for at first is of no interest here; what fails is in the report.
        command.args(["--log", "error"]);
        // Its input is never written to: it ends when the simulation is gone, however that went.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let failed = |source| Error::Program { program: program.to_owned(), source };
        let mut child = command.spawn().map_err(failed)?;
        let (sender, mut heard) = watch::channel(Heard::default());
        let reading = tokio::spawn(read(child.stdout.take(), sender));
        let said = heard.wait_for(|heard| heard.ready || heard.ended);
        let ready = match tokio::time::timeout(patience, said).await {
            Ok(Ok(heard)) => heard.ready,
            _ => false,
        };
        let mut probe = Self { number, child, heard, reading };
        if ready {
            return Ok(probe);
        }
        let silent = || format!("it reported nothing for {} s", patience.as_secs());
        let how = probe.end().await.unwrap_or_else(silent);
        Err(Error::Probe { program: program.to_owned(), how })
    }

    /// For those who wait for pods.
    #[must_use]
    pub fn listener(&self) -> Listener {
        Listener { number: self.number, heard: self.heard.clone() }
    }

    /// What the process uses; nothing if it is gone.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.child.id().and_then(process::usage)
    }

    /// How it ended, if it did.
    pub async fn end(&mut self) -> Option<String> {
        let status = if self.heard.borrow().ended {
            // Who closes its output is about to end, unless it is a program of another kind.
            match tokio::time::timeout(END_TIMEOUT, self.child.wait()).await {
                Ok(Ok(status)) => Some(status),
                _ => return Some("it stopped responding but is still running".into()),
            }
        } else {
            self.child.try_wait().ok().flatten()
        };
        status.as_ref().map(ExitStatus::to_string)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

// === impl Listener ===

impl Listener {
    /// Waits for what became of a pod: the seconds until it was attached.
    ///
    /// # Errors
    /// When it could not be attached, or the process ended, or says nothing in time.
    pub async fn attached(&mut self, pod: u32, timeout: Duration) -> Result<f64, String> {
        let known = self.heard.wait_for(|heard| heard.ended || heard.pods.contains_key(&pod));
        match tokio::time::timeout(timeout, known).await {
            Ok(Ok(heard)) => match heard.pods.get(&pod) {
                Some(found) => found.clone(),
                None => Err("the agent's own process has ended".into()),
            },
            Ok(Err(_)) => Err("the agent's own process has ended".into()),
            Err(_) => Err(format!("its agent did not report it within {} s", timeout.as_secs())),
        }
    }
}

async fn read(output: Option<ChildStdout>, heard: watch::Sender<Heard>) {
    if let Some(output) = output {
        let mut lines = BufReader::new(output).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let Ok(said) = serde_json::from_str(&line) else {
                tracing::warn!(line, "unknown output of an agent's own process");
                continue;
            };
            heard.send_modify(|heard| match said {
                Said::Ready => heard.ready = true,
                Said::Attached { pod, seconds } => _ = heard.pods.insert(pod, Ok(seconds)),
                Said::Failed { pod, why } => _ = heard.pods.insert(pod, Err(why)),
            });
        }
    }
    heard.send_modify(|heard| heard.ended = true);
}

/// Runs the agent of a simulated node in this process, until standard input is closed: by whoever started
/// it, or by the kernel when that one is gone.
///
/// # Errors
/// When the agent does not start, or nobody hears what is said.
pub async fn serve(number: u32, api: &str, directory: &Path) -> Result<(), Error> {
    let gone = parent_is_gone();
    let node = Arc::new(WholeNode::start(number, api, directory).await?);
    let objects = Objects::open(Source::Url(api.to_owned())).await?;
    let own = node::name(number);
    let mut pods = objects
        .watch::<Pod>()
        .namespace(NAMESPACE)
        .fields(format!("spec.nodeName={own}"))
        .map(move |pod| {
            let is_own = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&own);
            is_own.then(|| node::network_of(&pod))
        })
        .subscribe()?;
    say(&Said::Ready)?;
    tokio::pin!(gone);
    let mut adding: HashMap<u32, JoinHandle<std::io::Result<()>>> = HashMap::new();
    loop {
        let event = tokio::select! {
            _ = &mut gone => return Ok(()),
            event = pods.next() => event,
        };
        match event {
            None => return Ok(()),
            Some(Event::Synced) => {}
            Some(Event::Applied(key, network)) => {
                let Some(pod) = node::pod_number(key.name()) else { continue };
                adding.entry(pod).or_insert_with(|| {
                    let node = Arc::clone(&node);
                    tokio::spawn(async move {
                        let asked = Instant::now();
                        say(&match node.add(pod, network).await {
                            Ok(_) => Said::Attached { pod, seconds: asked.elapsed().as_secs_f64() },
                            Err(error) => Said::Failed { pod, why: chain(&error) },
                        })
                    })
                });
            }
            Some(Event::Deleted(key)) => {
                let Some(pod) = node::pod_number(key.name()) else { continue };
                let Some(added) = adding.remove(&pod) else { continue };
                let node = Arc::clone(&node);
                tokio::spawn(async move {
                    let _ = added.await;
                    if let Err(error) = node.del(pod).await {
                        tracing::warn!(%error, pod, "a pod was not detached");
                    }
                });
            }
        }
    }
}

fn say(said: &Said) -> std::io::Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{}", serde_json::to_string(said)?)?;
    output.flush()
}

/// Ends when standard input does.
fn parent_is_gone() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let mut nothing = [0; 64];
        while std::io::stdin().read(&mut nothing).is_ok_and(|length| length > 0) {}
        // Who does not listen has ended already.
        let _ = sender.send(());
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that stands in for `knit`. Another process writes it: what this one has open for writing, a
    /// child of another test may hold too, and then it cannot be run.
    fn program(directory: &Path, script: &str) -> std::path::PathBuf {
        let path = directory.join("program");
        let mut shell = std::process::Command::new("/bin/sh");
        shell.args(["-c", r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod 755 "$2""#, "sh", script]);
        assert!(shell.arg(&path).status().expect("a shell").success());
        path
    }

    async fn start(script: &str) -> Result<Probe, Error> {
        let directory = tempfile::tempdir().expect("a directory");
        let program = program(directory.path(), script);
        let patience = Duration::from_secs(60);
        Probe::start(&program, 7, "http://127.0.0.1:1", directory.path(), patience).await
    }

    #[test]
    fn what_is_said_is_one_line_each() {
        for (said, line) in [
            (Said::Ready, r#""ready""#),
            (Said::Attached { pod: 7, seconds: 0.5 }, r#"{"attached":{"pod":7,"seconds":0.5}}"#),
            (Said::Failed { pod: 7, why: "so".into() }, r#"{"failed":{"pod":7,"why":"so"}}"#),
        ] {
            assert_eq!(serde_json::to_string(&said).expect("JSON"), line);
            assert_eq!(serde_json::from_str::<Said>(line).expect("it is read"), said);
        }
    }

    #[tokio::test]
    async fn an_agent_whose_process_could_not_start_was_missing_without_a_word() {
        let error = start("echo 'error: unrecognized subcommand' >&2; exit 2").await.map(drop);
        let text = chain(&error.expect_err("it is told"));
        assert!(text.contains("before its agent was up") && text.contains("exit status: 2"), "{text}");
    }

    #[tokio::test]
    async fn a_process_that_ends_is_told_and_nobody_waits_for_its_pods() {
        let script = r#"echo '"ready"'; echo '{"attached":{"pod":1,"seconds":0.25}}'; read nothing"#;
        let mut probe = start(script).await.expect("it is up");
        let mut listener = probe.listener();
        assert_eq!(listener.attached(1, Duration::from_secs(60)).await, Ok(0.25));
        assert_eq!(probe.end().await, None);
        assert!(probe.usage().is_some());
        drop(probe.child.stdin.take());
        let error = listener.attached(2, Duration::from_secs(600)).await.expect_err("it has ended");
        assert!(error.contains("has ended"), "{error}");
        let how = probe.end().await.expect("it has ended");
        assert!(how.contains("exit status"), "{how}");
    }
}
