//! The connection to the agent: one request, one answer, and never longer than the deadline.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::call::Settings;
use crate::protocol::{FrameError, Request, Response, receive, send};
use crate::{CniError, code};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// A connection that ends at a deadline.
pub struct Agent {
    stream: UnixStream,
    deadline: Instant,
}

/// Why there is no answer.
pub enum NoAnswer {
    /// Nobody listens, or who listened ended before it answered.
    Away {
        /// What was seen.
        why: String,
    },
    /// The time is over.
    Late,
    /// Something is wrong that waiting does not mend.
    Failed(CniError),
}

// === impl Agent ===

impl Agent {
    /// Connects.
    pub fn connect(path: &Path, deadline: Instant) -> Result<Self, NoAnswer> {
        let failed = |error: io::Error| {
            let (code, msg) = match error.kind() {
                io::ErrorKind::PermissionDenied => (
                    code::IO,
                    format!(
                        "the node agent's socket {} is only accessible to root: run as \
                    root",
                        path.display()
                    ),
                ),
                _ => (
                    code::INVALID_CONFIG,
                    format!(
                        "{} is not the node agent's socket: fix \"socket\" in the network configuration",
                        path.display()
                    ),
                ),
            };
            NoAnswer::Failed(CniError::new(code, msg).with_details(error.to_string()))
        };
        let address = SocketAddrUnix::new(path).map_err(|e| failed(e.into()))?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| failed(e.into()))?;
        // An agent that does not accept fills its queue, and then connecting waits too.
        let left = remaining(deadline).map_err(|_| NoAnswer::Late)?;
        set_socket_timeout(&socket, Timeout::Send, Some(left)).map_err(|e| failed(e.into()))?;
        match connect(&socket, &address) {
            Ok(()) => Ok(Self { stream: socket.into(), deadline }),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::TIMEDOUT) => Err(NoAnswer::Late),
            Err(error @ (rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED)) => {
                Err(NoAnswer::Away { why: io::Error::from(error).to_string() })
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Sends the request and waits for the answer.
    pub fn exchange(mut self, request: &Request) -> Result<Response, NoAnswer> {
        match send(&mut self, request) {
            Ok(()) => {}
            Err(FrameError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(NoAnswer::Late);
            }
            // Who refuses a client may have said why before it closed: read on.
            Err(FrameError::Io(error)) if gone(&error) => {}
            Err(error) => return Err(unexpected(&error)),
        }
        receive(&mut self).map_err(|error| match error {
            FrameError::Closed | FrameError::Truncated => NoAnswer::Away { why: error.to_string() },
            FrameError::Io(error) if error.kind() == io::ErrorKind::TimedOut => NoAnswer::Late,
            FrameError::Io(error) if gone(&error) => NoAnswer::Away { why: error.to_string() },
            other => unexpected(&other),
        })
    }
}

impl Read for Agent {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(remaining(self.deadline)?))?;
        self.stream.read(buffer).map_err(timed_out)
    }
}

impl Write for Agent {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(remaining(self.deadline)?))?;
        self.stream.write(buffer).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// === impl NoAnswer ===

impl NoAnswer {
    /// As CNI says it.
    pub fn into_error(self, settings: &Settings) -> CniError {
        let socket = settings.socket.display();
        match self {
            Self::Away { why } => {
                let msg = format!(
                    "the node agent does not answer at {socket}: try again later; if this persists, check \
                    that knit node is running on this node"
                );
                CniError::new(code::TRY_AGAIN, msg).with_details(why)
            }
            Self::Late => {
                let msg = format!(
                    "the node agent at {socket} did not answer within {} s: try again later; if this \
                    persists, check its log",
                    settings.timeout.as_secs()
                );
                CniError::new(code::TRY_AGAIN, msg)
            }
            Self::Failed(error) => error,
        }
    }
}

fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A socket's timeout shows as "would block".
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

fn unexpected(error: &FrameError) -> NoAnswer {
    let code = match error {
        FrameError::Content(_) | FrameError::TooLong { .. } => code::DECODE,
        _ => code::IO,
    };
    let details = std::error::Error::source(error).map(knit_types::chain).unwrap_or_default();
    NoAnswer::Failed(CniError::new(code, format!("talking to the node agent: {error}")).with_details(details))
}
