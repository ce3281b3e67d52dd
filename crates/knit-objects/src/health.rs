//! Whether a source of objects is reachable, since when, and if not, why.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use tokio::sync::watch;

/// Whether objects arrive. While they do not, everything known stays as it is.
#[derive(Clone, Debug, PartialEq)]
pub enum Connection {
    /// Not connected yet since the start.
    Connecting {
        /// Since when.
        since: Timestamp,
        /// Why the last attempt failed, if one did.
        error: Option<Arc<str>>,
    },
    /// Objects arrive.
    Connected {
        /// Since when.
        since: Timestamp,
    },
    /// It was connected once, and is not now.
    Disconnected {
        /// Since when.
        since: Timestamp,
        /// Why the last attempt failed.
        error: Arc<str>,
    },
}

/// The place where a source says how it is.
#[derive(Debug)]
pub(crate) struct Health {
    what: String,
    state: watch::Sender<Connection>,
    /// The last attempt found nobody there.
    away: watch::Sender<bool>,
}

// === impl Connection ===

impl Connection {
    /// Whether objects arrive now.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        matches!(self, Self::Connected { .. })
    }

    /// Why objects do not arrive, if that is known.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        match self {
            Self::Connecting { error, .. } => error.as_deref(),
            Self::Connected { .. } => None,
            Self::Disconnected { error, .. } => Some(error),
        }
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connecting { since, error: None } => write!(f, "connecting since {since:.0}"),
            Self::Connecting { since, error: Some(error) } => {
                write!(f, "connecting since {since:.0}: {error}")
            }
            Self::Connected { since } => write!(f, "connected since {since:.0}"),
            Self::Disconnected { since, error } => write!(f, "disconnected since {since:.0}: {error}"),
        }
    }
}

// === impl Health ===

impl Health {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        let state = Connection::Connecting { since: Timestamp::now(), error: None };
        Self { what: what.into(), state: watch::Sender::new(state), away: watch::Sender::new(false) }
    }

    pub(crate) fn subscribe_away(&self) -> watch::Receiver<bool> {
        self.away.subscribe()
    }

    /// Whether somebody answered the last attempt, were it with an error.
    pub(crate) fn set_away(&self, away: bool) {
        self.away.send_if_modified(|known| std::mem::replace(known, away) != away);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Connection> {
        self.state.subscribe()
    }

    pub(crate) fn connected(&self) {
        self.state.send_if_modified(|state| {
            if state.is_connected() {
                return false;
            }
            if matches!(state, Connection::Disconnected { .. }) || state.error().is_some() {
                tracing::info!(source = %self.what, "objects arrive again");
            }
            *state = Connection::Connected { since: Timestamp::now() };
            true
        });
    }

    pub(crate) fn failed(&self, error: &str) {
        self.state.send_if_modified(|state| {
            let now = Timestamp::now();
            let news = state.error() != Some(error);
            if news {
                tracing::warn!(source = %self.what, %error, "objects do not arrive; continuing with what \
                is known");
            }
            let error: Arc<str> = error.into();
            *state = match state {
                Connection::Connecting { since, .. } => {
                    Connection::Connecting { since: *since, error: Some(error) }
                }
                Connection::Connected { .. } => Connection::Disconnected { since: now, error },
                Connection::Disconnected { since, .. } => Connection::Disconnected { since: *since, error },
            };
            news
        });
    }
}
