//! `knit lab up`: starts a lab in the background and tells how that goes. The lab itself is [`run`].

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use knit_kernel::sandbox::Sandbox;
use knit_lab::cluster::{Lab, Manifests, Options, control};
use tokio::sync::Notify;

use super::demo::MANIFESTS;
use super::inside::inside;
use super::place::{LabDirectory, Which};
use crate::command::stop::Stop;

/// How long pods may take until they are ready.
const PODS_READY_TIMEOUT: Duration = Duration::from_secs(60);
/// How long Services may take until they answer, once pods are ready.
const SERVICES: Duration = Duration::from_secs(10);
/// What the running lab says last to who started it.
const READY: &str = "ready";

/// Start a lab in the background
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # Two nodes and a built-in example: two tenants with the same addresses
  knit lab up

  # Three nodes and your own manifests
  knit lab up --nodes 3 networks.yaml app.yaml
  kubectl --kubeconfig $(knit lab kubeconfig) get networks,pods -A

A container without a command runs a built-in server: HTTP on its TCP ports, echo on its UDP ports, both on \
8080 if it
names none. One with a command runs that, with this machine's file system.")]
pub struct Args {
    /// Manifests to apply [default: a built-in example]
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Number of nodes
    #[arg(long, value_name = "N", default_value_t = 2,
        value_parser = clap::value_parser!(u16).range(1..=200))]
    nodes: u16,

    /// The port of the API on 127.0.0.1 [default: any free one]
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    api_port: u16,

    /// Apply nothing, not even the example
    #[arg(long, conflicts_with = "files")]
    empty: bool,

    /// Stay in the foreground, and stop with this command
    #[arg(long)]
    foreground: bool,

    #[command(flatten)]
    which: Which,

    /// The lab's directory, as the process outside has it
    #[arg(long, hide = true, value_name = "DIR")]
    at: Option<PathBuf>,
}

impl Args {
    fn read_manifests(&self) -> Result<Manifests> {
        let mut manifests = Manifests::default();
        if self.files.is_empty() && !self.empty {
            manifests.extend(Manifests::parse("the built-in example", MANIFESTS)?);
        }
        for file in &self.files {
            manifests.extend(Manifests::read(file)?);
        }
        Ok(manifests)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if let Some(dir) = &args.at {
        return run_lab(args, &LabDirectory::at(&args.which.name, dir.clone()));
    }
    let place = args.which.place()?;
    if place.is_running() {
        place.take()?; // says so
    }
    // What is wrong with the manifests is said before anything is made.
    args.read_manifests()?.check()?;
    let mut command = Command::new("/proc/self/exe");
    command.args(std::env::args_os().skip(1)).arg("--at").arg(place.dir());
    if args.foreground {
        let status = command.status().context("cannot start the lab")?;
        return Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)));
    }
    let started = Instant::now();
    let (lines, said) = std::io::pipe().context("cannot open a pipe")?;
    command.stdin(Stdio::null()).stdout(said.try_clone().context("cannot open a pipe")?).stderr(said);
    let mut child = command.spawn().context("cannot start the lab")?;
    drop(command); // holds our copies of the pipe's writing end
    for line in BufReader::new(lines).lines() {
        let line = line.context("cannot read the lab's output")?;
        if line == READY {
            return finish(&place, started);
        }
        knit_output::print(&format!("{line}\n"))?;
    }
    child.wait().context("cannot wait for the lab")?;
    Ok(ExitCode::FAILURE)
}

fn finish(place: &LabDirectory, started: Instant) -> Result<ExitCode> {
    let took = started.elapsed().as_secs_f64();
    let kubeconfig = place.kubeconfig();
    knit_output::print(&format!(
        "\nThe lab is up after {took:.1} s. Try:\n\
         \x20 knit lab status\n\
         \x20 knit lab exec NAMESPACE/POD -- COMMAND...\n\
         \x20 knit lab fail agent node-1\n\
         \x20 kubectl --kubeconfig {} get networks,pods -A\n\
         \x20 knit lab down\n",
        kubeconfig.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// The lab itself, in three processes: outside, between, inside.
fn run_lab(args: &Args, place: &LabDirectory) -> Result<ExitCode> {
    let mut outside = None;
    if !Sandbox::is_again() {
        if !args.foreground {
            // Away from the terminal, so that its end is not ours. It fails only for a leader, which is away
            // already.
            let _ = rustix::process::setsid();
        }
        let lock = place.take()?;
        match open_api(args.api_port, place) {
            Ok(api) => outside = Some((lock, api)),
            Err(error) => {
                place.remove(lock);
                return Err(error);
            }
        }
    }
    let (lock, api) = outside.map_or((None, None), |(lock, api)| (Some(lock), Some(api)));
    let socket = place.socket();
    let done = inside(
        || {
            if let Some(api) = api {
                let socket = socket.clone();
                std::thread::spawn(move || forward(&api, &socket));
            }
            Ok(())
        },
        || UnixListener::bind(place.socket()),
        |listener| async {
            let listener = listener.with_context(|| format!("cannot create {}", place.socket().display()))?;
            live(args, place, listener).await
        },
    );
    if let Some(lock) = lock {
        place.remove(lock);
    }
    done
}

/// Listens where `kubectl` will ask, and writes that down.
fn open_api(port: u16, place: &LabDirectory) -> Result<TcpListener> {
    let api = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).with_context(|| {
        format!(
            "port {port} of 127.0.0.1 is in use: set another one with --api-port, or omit it to use \
            any free one"
        )
    })?;
    let url = format!("http://{}", api.local_addr().context("the API's port is not known")?);
    std::fs::write(place.kubeconfig(), knit_apiserver::server::kubeconfig(&url))
        .with_context(|| format!("cannot write {}", place.kubeconfig().display()))?;
    Ok(api)
}

/// Hands connections to the API of a lab, which is in a network of its own.
fn forward(api: &TcpListener, socket: &std::path::Path) {
    for connection in api.incoming().flatten() {
        // While the lab does not take it, the connection is closed.
        let _ = control::hand_over(socket, &connection);
    }
}

/// The lab, from its start to its end.
async fn live(args: &Args, place: &LabDirectory, listener: UnixListener) -> Result<ExitCode> {
    let mut stop = Stop::listen()?;
    let down = Arc::new(Notify::new());
    let starting = async {
        let lab = Lab::start(Options { nodes: args.nodes, ..Options::default() }).await?;
        control::serve(lab.clone(), listener, Arc::clone(&down));
        tell(&format!("{} nodes are up", args.nodes));
        // They are checked again as they are applied.
        lab.apply(&args.read_manifests()?)?;
        let ready = async {
            lab.wait_for_pods(PODS_READY_TIMEOUT, |pod| tell(&format!("pod {pod} is ready"))).await?;
            lab.wait_for_services(SERVICES).await
        };
        if let Err(error) = ready.await {
            // The lab stays, so that one can look.
            tell(&format!("warning: {error}"));
        }
        tell(READY);
        Ok::<_, anyhow::Error>(lab)
    };
    let started = tokio::select! {
        lab = starting => lab,
        () = down.notified() => bail!("ended before it was up"),
        () = stop.asked() => bail!("ended before it was up"),
    };
    let lab = started?;
    if args.foreground {
        finish(place, Instant::now())?;
    }
    tokio::select! {
        () = down.notified() => {}
        () = stop.asked() => {}
    }
    lab.stop().await;
    Ok(ExitCode::SUCCESS)
}

/// Says how it goes, to who started it; who has gone away does not want to know.
fn tell(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
