//! What shim and agent say to each other: one frame each way over a unix socket, then the connection closes.
//!
//! A frame is its length as four bytes, the most significant first, and that many bytes of JSON.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::Args;
use crate::config::NetworkConfig;
use crate::error::CniError;

/// The version of this protocol. Fields may be added within one; both sides pass over those they do not know.
pub const PROTOCOL_VERSION: u32 = 1;

/// The largest frame, without its length.
pub const MAX_FRAME: usize = 1 << 20;

/// How many bytes the length takes.
pub const HEADER: usize = 4;

/// What the shim was asked to do.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Command {
    /// Give the container its networks.
    Add,
    /// Take them away.
    Del,
    /// Look whether they are as they were made.
    Check,
    /// Remove what belongs to no container in the list.
    Gc,
    /// Say whether containers can be added.
    Status,
}

/// One call of a container runtime, as the shim passes it on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Request {
    /// [`PROTOCOL_VERSION`] of the shim.
    pub version: u32,
    /// CNI_COMMAND.
    pub command: Command,
    /// CNI_CONTAINERID; empty for GC and STATUS.
    #[serde(default)]
    pub container_id: String,
    /// CNI_NETNS; empty for GC and STATUS, and for a DEL of what is gone already.
    #[serde(default)]
    pub netns: String,
    /// CNI_IFNAME; empty for GC and STATUS.
    #[serde(default)]
    pub ifname: String,
    /// CNI_ARGS.
    #[serde(default)]
    pub args: Args,
    /// CNI_PATH.
    #[serde(default)]
    pub path: String,
    /// What came on standard input.
    pub config: NetworkConfig,
    /// How long the shim waits for an answer, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// The agent's answer.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Response {
    /// It is done. For ADD with the result in the form of the configuration's version, ready to print; null
    /// otherwise.
    Ok(Value),
    /// It is not.
    Err(CniError),
}

/// A frame that could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Longer than both sides accept.
    #[error("a frame of {length} bytes is longer than the {MAX_FRAME} bytes that shim and agent accept")]
    TooLong {
        /// Its length.
        length: usize,
    },
    /// The other side closed the connection before it had said everything.
    #[error("the other side closed the connection in the middle of a frame")]
    Truncated,
    /// The other side closed the connection and had said nothing.
    #[error("the other side closed the connection without an answer")]
    Closed,
    /// Not JSON, or not what was expected.
    #[error("a frame does not match the protocol: use a shim and an agent of the same release")]
    Content(#[source] serde_json::Error),
    /// The socket failed.
    #[error("reading from or writing to the socket failed")]
    Io(#[source] io::Error),
}

/// A message as one frame, its length included.
///
/// # Errors
/// When it is too long.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; HEADER];
    serde_json::to_writer(&mut frame, message).map_err(FrameError::Content)?;
    let length = frame.len() - HEADER;
    let header = header(length)?;
    frame[..HEADER].copy_from_slice(&header);
    Ok(frame)
}

/// The length that a frame's first bytes announce.
///
/// # Errors
/// When it is more than is accepted: nothing of such a frame should be read.
pub fn length(header: [u8; HEADER]) -> Result<usize, FrameError> {
    let length = u32::from_be_bytes(header) as usize;
    if length > MAX_FRAME { Err(FrameError::TooLong { length }) } else { Ok(length) }
}

/// The message in a frame, its length left out.
///
/// # Errors
/// When it is something else.
pub fn decode<T: DeserializeOwned>(content: &[u8]) -> Result<T, FrameError> {
    serde_json::from_slice(content).map_err(FrameError::Content)
}

/// Sends a message.
///
/// # Errors
/// When it is too long or the other side is gone.
pub fn send<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), FrameError> {
    let frame = encode(message)?;
    to.write_all(&frame).and_then(|()| to.flush()).map_err(FrameError::Io)
}

/// Receives a message.
///
/// # Errors
/// When there is none, only a part of one, too much, or something else.
pub fn receive<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, FrameError> {
    let mut header = [0; HEADER];
    let mut have = 0;
    while have < HEADER {
        match from.read(&mut header[have..]) {
            Ok(0) if have == 0 => return Err(FrameError::Closed),
            Ok(0) => return Err(FrameError::Truncated),
            Ok(n) => have += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(FrameError::Io(error)),
        }
    }
    let mut content = vec![0; length(header)?];
    from.read_exact(&mut content).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => FrameError::Truncated,
        _ => FrameError::Io(error),
    })?;
    decode(&content)
}

fn header(length: usize) -> Result<[u8; HEADER], FrameError> {
    match u32::try_from(length) {
        Ok(short) if length <= MAX_FRAME => Ok(short.to_be_bytes()),
        _ => Err(FrameError::TooLong { length }),
    }
}
