//! The controller of a run: a task of this process, or a process of its own whose numbers are read.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use knit_controller::{Config, Controller, ControllerState};
use knit_objects::{Objects, Source};
use knit_types::sync::Locked as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::process::{self, Usage};
use crate::run::Error;

/// How often a controller in a process of its own is asked for its numbers.
const ASK_INTERVAL: Duration = Duration::from_millis(500);
/// How long it may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Numbers that are longer than this are something else.
const NUMBERS_LIMIT: u64 = 1 << 20;

/// A controller that runs. It ends with this.
pub struct Running {
    kind: Kind,
    seen: Arc<Mutex<Seen>>,
    watching: JoinHandle<()>,
}

enum Kind {
    Task(JoinHandle<()>),
    Process(Child),
}

/// What was seen of a controller since somebody last asked.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// How long its slowest plan took, in seconds, where one is known.
    pub slowest_plan: Option<f64>,
    /// How often it ceased to lead.
    pub ceased: u32,
    /// Its slowest plan since its start, as it says itself.
    slowest_ever: f64,
    leading: bool,
}

/// What a controller says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Numbers {
    leading: bool,
    last_plan: f64,
    slowest_plan: f64,
}

// === impl Running ===

impl Running {
    /// Starts it: of a program if there is one, or here.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start(program: Option<&Path>, api: &str) -> Result<Self, Error> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let shared = Arc::clone(&seen);
        if let Some(program) = program {
            let port = free_port()?;
            let metrics = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let mut command = tokio::process::Command::new(program);
            command.args(["controller", "--api-url", api, "--identity", "scale", "--log", "warn"]);
            command.args(["--metrics-addr", &metrics.to_string()]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
            let failed = |source| Error::Program { program: program.to_owned(), source };
            let child = command.spawn().map_err(failed)?;
            let watching = tokio::spawn(ask_forever(metrics, shared));
            return Ok(Self { kind: Kind::Process(child), seen, watching });
        }
        let objects = Objects::open(Source::Url(api.to_owned())).await?;
        let controller = Controller::new(objects, Config::new("scale")).map_err(Error::other)?;
        let watching = tokio::spawn(follow(controller.state(), shared));
        let task = tokio::spawn(controller.run(std::future::pending()));
        Ok(Self { kind: Kind::Task(task), seen, watching })
    }

    /// What its process uses, where it has one that runs.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        match &self.kind {
            Kind::Process(child) => child.id().and_then(process::usage),
            Kind::Task(_) => None,
        }
    }

    /// How its process ended, if it did.
    pub fn end(&mut self) -> Option<String> {
        match &mut self.kind {
            Kind::Process(child) => child.try_wait().ok().flatten().as_ref().map(ExitStatus::to_string),
            Kind::Task(_) => None,
        }
    }

    /// What was seen since this was last asked.
    #[must_use]
    pub fn take_seen(&self) -> Seen {
        let mut seen = self.seen.locked();
        let taken = *seen;
        (seen.slowest_plan, seen.ceased) = (None, 0);
        taken
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.watching.abort();
        if let Kind::Task(task) = &self.kind {
            task.abort();
        }
    }
}

// === impl Seen ===

impl Seen {
    /// Of a plan that nobody looked at in time only the controller's own maximum tells.
    fn note(&mut self, numbers: Numbers) {
        let mut plan = numbers.last_plan;
        if numbers.slowest_plan > self.slowest_ever {
            self.slowest_ever = numbers.slowest_plan;
            plan = plan.max(numbers.slowest_plan);
        }
        self.slowest_plan = Some(self.slowest_plan.map_or(plan, |slowest| slowest.max(plan)));
        self.ceased += u32::from(self.leading && !numbers.leading);
        self.leading = numbers.leading;
    }
}

async fn follow(mut state: watch::Receiver<ControllerState>, seen: Arc<Mutex<Seen>>) {
    while state.changed().await.is_ok() {
        let numbers = {
            let state = state.borrow_and_update();
            Numbers {
                leading: state.leading,
                last_plan: state.last_plan.as_secs_f64(),
                slowest_plan: state.slowest_plan.as_secs_f64(),
            }
        };
        seen.locked().note(numbers);
    }
}

async fn ask_forever(metrics: SocketAddr, seen: Arc<Mutex<Seen>>) {
    loop {
        tokio::time::sleep(ASK_INTERVAL).await;
        // Before it listens, and after its end, nobody answers: that it ended is told by its process.
        if let Ok(Ok(text)) = tokio::time::timeout(ANSWER_TIMEOUT, ask(metrics)).await
            && let Some(numbers) = parse(&text)
        {
            seen.locked().note(numbers);
        }
    }
}

async fn ask(metrics: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(metrics).await?;
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {metrics}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.take(NUMBERS_LIMIT).read_to_string(&mut text).await?;
    Ok(text)
}

fn parse(text: &str) -> Option<Numbers> {
    let number = |name: &str| -> Option<f64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    };
    Some(Numbers {
        leading: number("knit_controller_leading")? > 0.0,
        last_plan: number("knit_controller_plan_seconds")?,
        slowest_plan: number("knit_controller_slowest_plan_seconds")?,
    })
}

/// A port that nobody has.
fn free_port() -> std::io::Result<u16> {
    Ok(std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_controllers_page() {
        let page = "HTTP/1.1 200 OK\r\n\r\n# TYPE knit_controller_leading gauge\nknit_controller_leading 1\n\
                    knit_controller_plan_seconds 0.002\nknit_controller_slowest_plan_seconds 0.04\n# EOF\n";
        let expected = Numbers { leading: true, last_plan: 0.002, slowest_plan: 0.04 };
        assert_eq!(parse(page), Some(expected));
        assert_eq!(parse("HTTP/1.1 503 Service Unavailable\r\n\r\n"), None);
    }

    #[test]
    fn a_slow_plan_counts_in_the_phase_in_which_it_was_seen() {
        let mut seen = Seen::default();
        let of = |leading, last_plan, slowest_plan| Numbers { leading, last_plan, slowest_plan };
        seen.note(of(true, 0.001, 0.3));
        assert_eq!((seen.slowest_plan, seen.ceased), (Some(0.3), 0));
        // Another phase.
        seen.slowest_plan = None;
        seen.note(of(true, 0.002, 0.3));
        assert_eq!(seen.slowest_plan, Some(0.002));
        seen.note(of(false, 0.002, 0.3));
        seen.note(of(true, 0.002, 0.3));
        assert_eq!(seen.ceased, 1);
    }
}
