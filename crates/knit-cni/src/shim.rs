//! The shim itself, as a function: what a container runtime runs to give a pod its networks. It asks the node
//! agent and prints its answer.
//!
//! While the agent is away it fails ADD and CHECK at once with "try again later", notes a DEL for the agent's
//! return, leaves GC to the agent's own pass, and answers STATUS as rule 2 wants it: a node that was ready
//! since boot stays ready, because its pods would be evicted otherwise.

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::call::{AgentCall, Call, Environment, MAX_DEL_INPUT, MAX_INPUT, Refusal, Settings};
use crate::protocol::{Command, Request, Response};
use crate::{CniError, Version, code, spool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::agent::{Agent, NoAnswer};

/// How long a container runtime may take to write the configuration and close it.
const INPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves the one call that environment and standard input describe. It is all that `knit-cni` does, and what
/// `knit lab` runs where there is no such program beside it.
pub fn main() -> ExitCode {
    let started = Instant::now();
    let (output, code) = match serve(started) {
        Ok(Value::Null) => return ExitCode::SUCCESS,
        Ok(value) => (value, ExitCode::SUCCESS),
        Err(Refusal { version, error }) => (error.to_json(version), ExitCode::FAILURE),
    };
    let text = format!("{output}\n");
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Ok(()) => code,
        Err(error) => {
            // Nobody to tell but the log of who started us.
            let _ = writeln!(io::stderr(), "knit-cni: cannot write to standard output: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What is printed; nothing for null.
fn serve(started: Instant) -> Result<Value, Refusal> {
    let early = |error| Refusal { version: Version::LATEST, error };
    let environment = environment().map_err(early)?;
    let del = environment.command == "DEL";
    let mut input = Vec::new();
    let limit = if del { MAX_DEL_INPUT } else { MAX_INPUT };
    match read_input(&mut input, limit, started + INPUT_TIMEOUT) {
        // What names the sandbox is in the environment, and a pod must be able to go.
        Err(_) if del => {}
        read => read.map_err(early)?,
    }
    match Call::parse(&environment, &input)? {
        Call::Version { version } => Ok(json!({ "cniVersion": version, "supportedVersions": Version::ALL })),
        Call::Agent(call) => {
            let AgentCall { version, mut request, settings } = *call;
            let deadline = started + settings.timeout;
            ask(&mut request, &settings, deadline).map_err(|error| Refusal { version, error })
        }
    }
}

/// Asks the agent, and does what must be done where it does not answer.
fn ask(request: &mut Request, settings: &Settings, deadline: Instant) -> Result<Value, CniError> {
    let answer = Agent::connect(&settings.socket, deadline).and_then(|agent| {
        if request.command == Command::Add {
            // A DEL of the same container from while the agent was away must not undo this ADD.
            spool::forget(&settings.spool, &request.container_id, &request.ifname).map_err(|error| {
                let msg = format!(
                    "cannot remove the recorded DEL of container {} in {}: check who owns the directory",
                    request.container_id,
                    settings.spool.display()
                );
                NoAnswer::Failed(CniError::new(code::IO, msg).with_details(error.to_string()))
            })?;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        request.timeout_ms = Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
        agent.exchange(request)
    });
    let nobody = match answer {
        Ok(Response::Ok(value)) if request.command == Command::Add => return Ok(value),
        Ok(Response::Ok(_)) => return Ok(Value::Null),
        Ok(Response::Err(error)) => return Err(error),
        Err(nobody) => nobody,
    };
    match (request.command, nobody) {
        (Command::Status, NoAnswer::Away { .. } | NoAnswer::Late) if settings.ready_file.exists() => {
            Ok(Value::Null)
        }
        (Command::Status, nobody) => {
            Err(CniError { code: code::NOT_AVAILABLE, ..nobody.into_error(settings) })
        }
        (Command::Del, NoAnswer::Away { .. }) => {
            request.timeout_ms = None;
            spool::leave(&settings.spool, request).map_err(|error| {
                let msg = format!(
                    "the node agent is down, and the DEL of container {} cannot be recorded in {}: check \
                    that the directory is writable, and try again",
                    request.container_id,
                    settings.spool.display()
                );
                CniError::new(code::IO, msg).with_details(error.to_string())
            })?;
            Ok(Value::Null)
        }
        // The list of this GC would be out of date when the agent is back, and it collects by itself then.
        (Command::Gc, NoAnswer::Away { .. }) => Ok(Value::Null),
        (_, nobody) => Err(nobody.into_error(settings)),
    }
}

fn environment() -> Result<Environment, CniError> {
    let del = std::env::var("CNI_COMMAND").is_ok_and(|command| command == "DEL");
    let get = |name: &str| match std::env::var(name) {
        Ok(value) => Ok(value),
        Err(std::env::VarError::NotPresent) => Ok(String::new()),
        // These do not name what a DEL is about.
        Err(std::env::VarError::NotUnicode(_))
            if del && matches!(name, "CNI_ARGS" | "CNI_PATH" | "CNI_NETNS") =>
        {
            Ok(String::new())
        }
        Err(std::env::VarError::NotUnicode(_)) => {
            let msg = format!("{name} is not UTF-8 text");
            Err(CniError::new(code::INVALID_ENVIRONMENT, msg))
        }
    };
    Ok(Environment {
        command: get("CNI_COMMAND")?,
        container_id: get("CNI_CONTAINERID")?,
        netns: get("CNI_NETNS")?,
        ifname: get("CNI_IFNAME")?,
        args: get("CNI_ARGS")?,
        path: get("CNI_PATH")?,
    })
}

/// Reads standard input to its end, at most one byte more than is accepted: who parses it sees that it is too
/// much.
fn read_input(input: &mut Vec<u8>, limit: usize, deadline: Instant) -> Result<(), CniError> {
    let failed = |error: io::Error| {
        let msg = "cannot read the network configuration from standard input";
        CniError::new(code::IO, msg).with_details(error.to_string())
    };
    let stdin = io::stdin();
    let stdin = stdin.as_fd();
    let mut chunk = [0; 16 * 1024];
    while input.len() <= limit {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|e| failed(io::Error::other(e)))?;
        match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => {
                let msg = "the network configuration on standard input did not end in time: write it and \
                    close standard input";
                return Err(CniError::new(code::IO, msg));
            }
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(failed(error.into())),
        }
        let room = chunk.len().min(limit + 1 - input.len());
        match rustix::io::read(stdin, &mut chunk[..room]) {
            Ok(0) => break,
            Ok(n) => input.extend_from_slice(&chunk[..n]),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Err(failed(error.into())),
        }
    }
    Ok(())
}
