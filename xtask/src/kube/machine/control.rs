//! How the bed tells a machine's init what to run: one JSON line there and one back, on a Unix socket.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

/// A program that runs until it is stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Daemon {
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<String>,
    /// Where programs that it runs are looked for first.
    pub path: PathBuf,
    pub log: PathBuf,
    /// Its own control group, if it is to have one.
    pub group: Option<String>,
}

/// What the init is asked to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    Start(Daemon),
    /// Start it as it was started before.
    Again(String),
    Stop {
        name: String,
        how: Stop,
    },
    List,
}

/// How a daemon ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// Asked to.
    Terminate,
    /// At once.
    Kill,
}

/// How a daemon is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub name: String,
    /// `None` while it runs; else how it ended.
    pub ended: Option<String>,
    /// Whether somebody asked for that.
    pub stopped: bool,
    pub log: PathBuf,
}

/// What the init answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Done(Vec<Status>),
    Failed(String),
}

/// The init of one machine, from outside.
#[derive(Debug, Clone)]
pub struct Control {
    folder: PathBuf,
}

impl Control {
    /// The machine whose folder this is.
    pub fn of(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Where its init listens.
    pub fn socket(folder: &Path) -> PathBuf {
        folder.join("control.sock")
    }

    /// Its init's process, in this machine's numbers; `None` before it is ready.
    pub fn process(&self) -> Option<u32> {
        std::fs::read_to_string(self.folder.join("pid")).ok()?.trim().parse().ok()
    }

    /// Starts a daemon.
    pub fn start(&self, daemon: Daemon) -> Result<()> {
        self.ask(&Request::Start(daemon)).map(drop)
    }

    /// Starts a daemon as it was started before.
    pub fn start_again(&self, name: &str) -> Result<()> {
        self.ask(&Request::Again(name.into())).map(drop)
    }

    /// Stops a daemon, and returns when it is gone.
    pub fn stop(&self, name: &str, how: Stop) -> Result<()> {
        self.ask(&Request::Stop { name: name.into(), how }).map(drop)
    }

    /// How all daemons are.
    pub fn list(&self) -> Result<Vec<Status>> {
        self.ask(&Request::List)
    }

    fn ask(&self, request: &Request) -> Result<Vec<Status>> {
        let path = Self::socket(&self.folder);
        let exchange = || -> std::io::Result<String> {
            let mut stream = UnixStream::connect(&path)?;
            writeln!(stream, "{}", serde_json::to_string(request)?)?;
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line)?;
            Ok(line)
        };
        let line = exchange().with_context(|| format!("cannot talk to the init at {}", path.display()))?;
        match serde_json::from_str(&line).with_context(|| format!("the init said {line:?}"))? {
            Reply::Done(list) => Ok(list),
            Reply::Failed(why) => bail!("{why}"),
        }
    }
}
