//! The trait a backend implements: it makes a [`NodeView`] true.
//!
//! A simple backend writes [`sync`](Backend::sync) only, and gets everything each time something changes. One
//! that wants its work to follow the change writes [`apply`](Backend::apply) too. Both are plain calls in the
//! same process; all changes that are due come in one call, so that they can be one transaction (rule 57).

use std::fmt;

use crate::model::{Family, PerFamily};
use crate::view::{Changes, NodeView, PortKey};

/// Makes a [`NodeView`] true: in a kernel, in a process, in a device.
pub trait Backend {
    /// Makes everything so, whatever was there before: at the start, after a failure, and every now and then.
    ///
    /// At the start, what an earlier run left is to be found and changed into what is wanted, not removed: a
    /// restart must not break connections (rule 58).
    fn sync(&mut self, state: &NodeView) -> Outcome;

    /// Makes the changes, which lead from the last state that was done to `state`.
    ///
    /// It is called after a `sync` that did not fail. A change whose `old` is `None` may be about something
    /// that is there already: it is how a port that failed is tried again.
    ///
    /// A family that failed altogether ([`Outcome::FamilyFailed`]) is left alone, whatever changes in it,
    /// until [`Changes::retry`] names it: then all of it is made so, whatever was there before.
    fn apply(&mut self, changes: &Changes, state: &NodeView) -> Outcome {
        let _ = changes;
        self.sync(state)
    }

    /// The families that it can serve at all: of others it is told nothing.
    fn families(&self) -> PerFamily<bool> {
        PerFamily { v4: true, v6: true }
    }

    /// Whether all that it made is certainly as it left it, by a look that costs little whatever is served. A
    /// backend that cannot tell says no, and gets a [`sync`](Self::sync) each time that somebody asks
    /// ([`Handle::compare`](crate::source::Handle::compare)).
    fn is_intact(&mut self) -> bool {
        false
    }

    /// Called once, before anything else: from then on `tell` is to be called whenever somebody else changes
    /// what the backend made, from any thread. A backend that does not hear of that leaves it out; then only
    /// those who compare find out.
    fn watch(&mut self, tell: Box<dyn Fn() + Send>) {
        drop(tell);
    }
}

impl<B: Backend + ?Sized> Backend for Box<B> {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        (**self).sync(state)
    }

    fn apply(&mut self, changes: &Changes, state: &NodeView) -> Outcome {
        (**self).apply(changes, state)
    }

    fn families(&self) -> PerFamily<bool> {
        (**self).families()
    }

    fn is_intact(&mut self) -> bool {
        (**self).is_intact()
    }

    fn watch(&mut self, tell: Box<dyn Fn() + Send>) {
        (**self).watch(tell);
    }
}

/// How a call to a backend went.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// All of it is true now.
    Done,
    /// All but these service ports.
    Partly(Vec<Failure>),
    /// Nothing of one family, or nobody knows; of the other, all but these service ports. The other goes on
    /// with changes.
    FamilyFailed {
        /// The family that failed.
        family: Family,
        /// Why, for people to read.
        reason: String,
        /// Service ports of the other family that failed.
        failures: Vec<Failure>,
    },
    /// None of it, or nobody knows: the next call is a [`sync`](Backend::sync) (rule 57).
    Failed(String),
}

/// A service port that could not be made true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Which one.
    pub key: PortKey,
    /// Why, for people to read.
    pub reason: String,
    /// What to do about it.
    pub retry: Retry,
}

/// What to do about a service port that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Try it again by itself, after a while that grows.
    Later,
    /// It cannot work as it is: wait until it changes.
    OnChange,
}

impl Outcome {
    /// `Done` if there are no failures.
    pub fn of(failures: Vec<Failure>) -> Self {
        if failures.is_empty() { Self::Done } else { Self::Partly(failures) }
    }

    /// Why a family failed altogether; `None` if it did not.
    #[must_use]
    pub fn broken(&self, of: Family) -> Option<&str> {
        match self {
            Self::Done | Self::Partly(_) => None,
            Self::FamilyFailed { family, reason, .. } => (*family == of).then_some(reason),
            Self::Failed(reason) => Some(reason),
        }
    }

    /// Service ports that failed by themselves.
    #[must_use]
    pub fn failures(&self) -> &[Failure] {
        match self {
            Self::Done | Self::Failed(_) => &[],
            Self::Partly(failures) | Self::FamilyFailed { failures, .. } => failures,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.reason)
    }
}
