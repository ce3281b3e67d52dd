//! A plugin that stays connected: whenever the runtime's socket is there, it registers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use knit_types::chain;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::plugin::Plugin;
use crate::session::{self, Limits};

/// The pause before another attempt, at first and at most. A runtime that restarts runs pods without its
/// plugins until they are back, so the longest is short.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How long connecting may take: a listener whose queue is full lets one wait.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// By what a runtime knows a plugin.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Identity {
    name: String,
    index: String,
}

/// A runtime would not take it.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The name.
    #[error("{0:?} is not a valid name of an NRI plugin: write letters, digits and any of _ . + -")]
    Name(String),
    /// The index.
    #[error("{0:?} is not a valid index of an NRI plugin: write two digits")]
    Index(String),
}

/// A plugin and where it is wanted.
#[derive(Debug)]
pub struct Client<P> {
    /// The runtime's socket.
    pub socket: PathBuf,
    /// By what it registers.
    pub identity: Identity,
    /// What serves.
    pub plugin: Arc<P>,
}

// === impl Identity ===

impl Identity {
    /// A name, and two digits that say when it is called among all plugins of the runtime.
    ///
    /// # Errors
    /// When a runtime would not take one of them.
    pub fn new(name: &str, index: &str) -> Result<Self, IdentityError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '+' | '-');
        if name.is_empty() || !name.chars().all(fits) {
            return Err(IdentityError::Name(name.to_owned()));
        }
        if index.len() != 2 || !index.bytes().all(|b| b.is_ascii_digit()) {
            return Err(IdentityError::Index(index.to_owned()));
        }
        Ok(Self { name: name.to_owned(), index: index.to_owned() })
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The index.
    #[must_use]
    pub fn index(&self) -> &str {
        &self.index
    }
}

// === impl Client ===

impl<P: Plugin> Client<P> {
    /// Connects, serves, and connects again, forever.
    pub async fn run(self) {
        let (least, most) = RETRY_DELAYS;
        let mut delay = least;
        // One line when it goes wrong, and one when it is well again: not one per attempt.
        let mut told: Option<String> = None;
        loop {
            let (lasted, problem) = match timeout(CONNECT_TIMEOUT, UnixStream::connect(&self.socket)).await {
                Ok(Ok(stream)) => {
                    let ended =
                        session::serve(stream, &self.identity, &self.plugin, &Limits::default()).await;
                    (ended.served, chain(&ended.why))
                }
                Ok(Err(error)) => (false, error.to_string()),
                Err(_) => (false, format!("no connection within {} s", CONNECT_TIMEOUT.as_secs())),
            };
            if lasted {
                (delay, told) = (least, None);
            }
            if told.as_ref() != Some(&problem) {
                tracing::warn!(socket = %self.socket.display(), problem, "not connected to the container \
                    runtime through NRI; retrying");
                told = Some(problem);
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_runtime_refuses_are_refused_here() {
        assert!(Identity::new("knit", "10").is_ok());
        for (name, index) in
            [("", "10"), ("a b", "10"), ("a/b", "10"), ("knit", "1"), ("knit", "1a"), ("knit", "100")]
        {
            assert!(Identity::new(name, index).is_err(), "{name:?} {index:?}");
        }
    }
}
