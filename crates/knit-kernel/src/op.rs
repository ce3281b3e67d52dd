//! Operations: a typed, printable plan, applied by [`crate::Handle::apply`] in one go.

use std::fmt;

use crate::addr::{Address, RTM_DELADDR, RTM_NEWADDR};
use crate::error::Result;
use crate::fdb::FdbEntry;
use crate::link::{Change, RTM_NEWLINK};
use crate::neigh::{Neighbour, RTM_DELNEIGH, RTM_NEWNEIGH};
use crate::netlink::{Batch, Emit as _, flags};
use crate::qdisc::{
    Arrivals, RTM_DELQDISC, RTM_DELTFILTER, RTM_NEWQDISC, RTM_NEWTFILTER, Redirect, TokenBucket,
};
use crate::route::{RTM_DELROUTE, RTM_NEWROUTE, Route};
use crate::rule::{RTM_DELRULE, RTM_NEWRULE, Rule};

/// One operation on one object. Its `Display` is the line that a plan shows.
#[derive(Debug, Clone)]
pub enum Op<'a> {
    /// Make it; fails if it is there.
    Create(Object),
    /// Make it, or make what is there like it.
    Replace(Object),
    /// Make an IPv4 route in front of others to the same destination, which stay and count again when it is
    /// gone.
    Prefer(Route),
    /// Delete it; fails if it is not there.
    Delete(Object),
    /// Change a link. (Links are made and deleted by functions of their own.)
    Change(Change<'a>),
}

/// What is made and deleted in batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Object {
    /// An address of a link.
    Address(Address),
    /// A route.
    Route(Route),
    /// A policy rule.
    Rule(Rule),
    /// A neighbour.
    Neighbour(Neighbour),
    /// A forwarding entry.
    Fdb(FdbEntry),
    /// How fast a link sends.
    TokenBucket(TokenBucket),
    /// What lets packets that arrive be redirected.
    Arrivals(Arrivals),
    /// Where they are sent instead.
    Redirect(Redirect),
}

impl Op<'_> {
    /// Make it; fails if it is there.
    pub fn create(object: impl Into<Object>) -> Self {
        Self::Create(object.into())
    }

    /// Make it, or make what is there like it.
    pub fn replace(object: impl Into<Object>) -> Self {
        Self::Replace(object.into())
    }

    /// Delete it; fails if it is not there.
    pub fn delete(object: impl Into<Object>) -> Self {
        Self::Delete(object.into())
    }

    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Create(object) | Self::Replace(object) | Self::Delete(object) => object.validate(),
            Self::Prefer(route) => route.validate(),
            Self::Change(change) => change.validate(),
        }
    }

    /// Adds the messages of this operation to a batch.
    pub(crate) fn encode(&self, batch: &mut Batch) {
        match self {
            Self::Create(object) => object.encode(batch, flags::CREATE | flags::EXCL, false),
            Self::Replace(object) => object.encode(batch, flags::CREATE | flags::REPLACE, false),
            // Neither exclusive, nor in place of another, nor behind them.
            Self::Prefer(route) => {
                batch.push(RTM_NEWROUTE, flags::CREATE, |w| _ = w.emit(&route.message()));
            }
            Self::Delete(object) => object.encode(batch, 0, true),
            Self::Change(change) => {
                for message in change.messages() {
                    batch.push(RTM_NEWLINK, 0, |writer| _ = writer.emit(&message));
                }
            }
        }
    }
}

impl Object {
    /// Whether it is about queues.
    pub(crate) fn is_queueing(&self) -> bool {
        matches!(self, Self::TokenBucket(_) | Self::Arrivals(_) | Self::Redirect(_))
    }

    fn validate(&self) -> Result<()> {
        match self {
            Self::Address(_) => Ok(()),
            Self::Route(route) => route.validate(),
            Self::Rule(rule) => rule.validate(),
            Self::Neighbour(neighbour) => neighbour.validate(),
            Self::Fdb(entry) => entry.validate(),
            Self::TokenBucket(bucket) => bucket.validate(),
            Self::Arrivals(_) => Ok(()),
            Self::Redirect(redirect) => redirect.validate(),
        }
    }

    fn encode(&self, batch: &mut Batch, mut how: u16, delete: bool) {
        let pick = |new, del| if delete { del } else { new };
        match self {
            Self::Address(address) => {
                batch.push(pick(RTM_NEWADDR, RTM_DELADDR), how, |w| _ = w.emit(&address.message()))
            }
            Self::Route(route) => {
                batch.push(pick(RTM_NEWROUTE, RTM_DELROUTE), how, |w| _ = w.emit(&route.message()))
            }
            Self::Rule(rule) => {
                // The kernel cannot replace rules; the same one again is refused, and that is as good.
                how &= !flags::REPLACE;
                batch.push(pick(RTM_NEWRULE, RTM_DELRULE), how, |w| _ = w.emit(&rule.message()))
            }
            Self::Neighbour(neighbour) => {
                batch.push(pick(RTM_NEWNEIGH, RTM_DELNEIGH), how, |w| _ = w.emit(&neighbour.message()))
            }
            Self::Fdb(entry) => {
                if entry.appends() && !delete {
                    how = flags::CREATE | flags::APPEND;
                }
                batch.push(pick(RTM_NEWNEIGH, RTM_DELNEIGH), how, |w| _ = w.emit(&entry.message()))
            }
            Self::TokenBucket(bucket) => {
                batch.push(pick(RTM_NEWQDISC, RTM_DELQDISC), how, |w| bucket.write(w))
            }
            Self::Arrivals(arrivals) => {
                batch.push(pick(RTM_NEWQDISC, RTM_DELQDISC), how, |w| arrivals.write(w))
            }
            Self::Redirect(redirect) if delete => batch.push(RTM_DELTFILTER, how, |w| redirect.write_key(w)),
            Self::Redirect(redirect) => batch.push(RTM_NEWTFILTER, how, |w| redirect.write(w)),
        };
    }
}

macro_rules! object_from {
    ($($kind:ident($type:ty)),*) => {
        $(impl From<$type> for Object {
            fn from(object: $type) -> Self {
                Self::$kind(object)
            }
        })*
    };
}
object_from!(
    Address(Address),
    Route(Route),
    Rule(Rule),
    Neighbour(Neighbour),
    Fdb(FdbEntry),
    TokenBucket(TokenBucket),
    Arrivals(Arrivals),
    Redirect(Redirect)
);

impl<'a> From<Change<'a>> for Op<'a> {
    fn from(change: Change<'a>) -> Self {
        Self::Change(change)
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Route(route) => route.fmt(f),
            Self::Rule(rule) => rule.fmt(f),
            Self::Neighbour(neighbour) => neighbour.fmt(f),
            Self::Fdb(entry) => entry.fmt(f),
            Self::TokenBucket(bucket) => bucket.fmt(f),
            Self::Arrivals(arrivals) => arrivals.fmt(f),
            Self::Redirect(redirect) => redirect.fmt(f),
        }
    }
}

impl fmt::Display for Op<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Create(object) => write!(f, "create {object}"),
            Self::Replace(object) => write!(f, "replace {object}"),
            Self::Prefer(route) => write!(f, "prefer {route}"),
            Self::Delete(object) => write!(f, "delete {object}"),
            Self::Change(change) => change.fmt(f),
        }
    }
}
