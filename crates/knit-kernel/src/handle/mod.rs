//! A handle to one namespace: everything that is done to the network there goes through it.
//!
//! A handle keeps its sockets, which stay in the namespace whichever thread uses them, so a namespace is
//! entered once and not per request. Threads may share a handle; requests take turns, and a deletion never
//! holds up the others.

mod distant;
mod list;
mod remove;

use std::fmt;
use std::sync::{Mutex, MutexGuard};

use knit_types::sync::Locked;

pub use distant::Distant;
pub use list::{LinkFilter, NeighbourFilter, RouteFilter};

use crate::error::{Difference, Error, Result};
use crate::link::{Link, NewLink, RTM_NEWLINK};
use crate::name::IfName;
use crate::netlink::{Batch, Emit as _, Protocol, Socket, flags};
use crate::netns::NetNs;
use crate::op::{Object, Op};
use crate::qdisc::Qdisc;

/// Operations in one `sendmsg`. Each refusal takes room in the receive buffer, and this many always fit the
/// default.
const OPS_PER_SEND: usize = 128;

/// A handle to one namespace.
#[derive(Debug)]
pub struct Handle {
    namespace: NetNs,
    socket: Mutex<Socket>,
    removals: Mutex<Vec<remove::Removal>>,
}

/// A link that was made, or was there as wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Created {
    /// Its index.
    pub index: u32,
    /// A veth's other end: its index in its own namespace.
    pub peer: Option<u32>,
}

impl Handle {
    /// A handle to the calling thread's namespace.
    pub fn current() -> Result<Self> {
        Self::new(NetNs::current()?)
    }

    /// A handle to a namespace, which it keeps alive.
    pub fn new(namespace: NetNs) -> Result<Self> {
        let open = || {
            let socket = Socket::open_in(Protocol::Route, &namespace)?;
            socket.set_strict()?;
            Ok(socket)
        };
        let socket = open().map_err(|source| Error::netlink("open a route socket", &namespace, source))?;
        Ok(Self { namespace, socket: Mutex::new(socket), removals: Mutex::default() })
    }

    /// A handle to a namespace that stays open elsewhere, too.
    pub fn open(namespace: &NetNs) -> Result<Self> {
        Self::new(namespace.try_clone()?)
    }

    /// The namespace.
    pub fn namespace(&self) -> &NetNs {
        &self.namespace
    }

    fn socket(&self) -> MutexGuard<'_, Socket> {
        // A panic while it was held leaves at worst answers behind, which are told apart by their number.
        self.socket.locked()
    }

    fn failed(&self, attempted: impl fmt::Display, source: crate::netlink::Error) -> Error {
        Error::netlink(attempted, &self.namespace, source)
    }

    /// Applies operations in order, in as few system calls as there can be.
    ///
    /// Input is checked first, and if any of it cannot work, nothing is sent. An operation that the kernel
    /// refuses does not stop those after it; the error names every one that failed.
    pub fn apply(&self, ops: &[Op<'_>]) -> Result<()> {
        ops.iter().try_for_each(Op::validate)?;
        let mut failures: Vec<(usize, String, crate::netlink::Refusal)> = Vec::new();
        let mut batch = Batch::new();
        let mut places = Vec::new();
        for (chunk, part) in ops.chunks(OPS_PER_SEND).enumerate() {
            batch.clear();
            places.clear();
            for (index, op) in part.iter().enumerate() {
                op.encode(&mut batch);
                places.resize(batch.len(), chunk * OPS_PER_SEND + index);
            }
            let answers = self.socket().request(&mut batch);
            let answers = answers.map_err(|source| self.failed(format_args!("{}, ...", part[0]), source))?;
            for (place, refusal) in answers.refused {
                let index = places[place];
                // One refused message of an operation is enough to say.
                if failures.last().is_none_or(|(last, _, _)| *last != index) {
                    failures.push((index, ops[index].to_string(), refusal));
                }
            }
        }
        if failures.is_empty() {
            return Ok(());
        }
        Err(Error::refused(self.namespace.to_string(), ops.len(), failures))
    }

    /// Makes a link with all that it is to have. On an error nothing is left of it.
    pub fn create_link(&self, new: &NewLink<'_>) -> Result<Created> {
        new.validate()?;
        let attempted = || format!("create {}", new.describe());
        let mut batch = Batch::new();
        batch.push(RTM_NEWLINK, flags::CREATE | flags::EXCL | flags::ECHO, |w| _ = w.emit(&new.message()));
        let replies = self.socket().request(&mut batch).and_then(crate::netlink::Answers::all);
        let replies = replies.map_err(|source| self.failed(attempted(), source))?;
        let echo =
            replies.iter().find_map(
                |(_, kind, payload)| {
                    if *kind == RTM_NEWLINK { Link::parse_payload(payload) } else { None }
                },
            );
        let link = match (echo, new.elsewhere()) {
            // The kernel echoes a link to its own namespace only.
            (_, Some(elsewhere)) => {
                let found = Self::open(elsewhere)?.link_by_name(&new.name)?;
                found.ok_or_else(|| Error::NotFound {
                    object: new.describe(),
                    namespace: elsewhere.to_string(),
                })?
            }
            (Some(link), None) => link,
            // Kernels before 6.2 do not echo links.
            (None, None) => self.link_by_name(&new.name)?.ok_or_else(|| Error::NotFound {
                object: new.describe(),
                namespace: self.namespace.to_string(),
            })?,
        };
        if new.needs_change()
            && let Err(error) = self.apply(&[new.change(link.index).into()])
        {
            // The caller must hear of the first error; a link that cannot be deleted either is found by its
            // group.
            let _ = self.delete_link(link.index);
            return Err(error);
        }
        Ok(Created { index: link.index, peer: link.link })
    }

    /// Makes a link, or finds it there as wanted. One that differs is a [`Error::Conflict`] and is left
    /// alone; one that is down and should be up is set up.
    pub fn ensure_link(&self, new: &NewLink<'_>) -> Result<Created> {
        new.validate()?;
        let Some(found) = self.link_by_name(&new.name)? else {
            return match self.create_link(new) {
                Err(error) if error.is_exists() => self.compare_link(new), // somebody else was quicker
                other => other,
            };
        };
        self.accept_link(new, &found)
    }

    fn compare_link(&self, new: &NewLink<'_>) -> Result<Created> {
        let found = self.link_by_name(&new.name)?;
        let gone = || Error::NotFound { object: new.describe(), namespace: self.namespace.to_string() };
        self.accept_link(new, &found.ok_or_else(gone)?)
    }

    fn accept_link(&self, new: &NewLink<'_>, found: &Link) -> Result<Created> {
        self.no_conflict(new.describe(), new.differences(found))?;
        if new.up && !found.up {
            self.apply(&[crate::link::Change::of(found.index).up().into()])?;
        }
        Ok(Created { index: found.index, peer: found.link })
    }

    /// Makes an object, or finds it there as wanted; says whether it was made. One that differs is a
    /// [`Error::Conflict`] and is left alone.
    pub fn ensure(&self, object: impl Into<Object>) -> Result<bool> {
        let op = Op::Create(object.into());
        match self.apply(std::slice::from_ref(&op)) {
            Ok(()) => Ok(true),
            Err(error) if error.is_exists() => {
                let Op::Create(object) = &op else { return Err(error) };
                match self.differences(object)? {
                    Some(differences) => self.no_conflict(object.to_string(), differences).map(|()| false),
                    None => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Deletes an object; one that is not there is fine. Says whether it was.
    pub fn remove(&self, object: impl Into<Object>) -> Result<bool> {
        let object = object.into();
        match self.apply(&[Op::Delete(object.clone())]) {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            // What is wrong is the kernel's default queue there, which has no handle.
            Err(_) if object.is_queueing() && self.differences(&object)?.is_none() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn no_conflict(&self, object: String, differences: Vec<Difference>) -> Result<()> {
        if differences.is_empty() {
            return Ok(());
        }
        Err(Error::Conflict { object, namespace: self.namespace.to_string(), differences })
    }

    /// How what is there differs from `object`; `None` if nothing like it is there.
    fn differences(&self, object: &Object) -> Result<Option<Vec<Difference>>> {
        Ok(match object {
            Object::Address(wanted) => {
                let found = self.addresses(Some(wanted.interface))?;
                found.iter().find(|found| wanted.same_key(found)).map(|found| wanted.differences(found))
            }
            Object::Route(wanted) => {
                let filter = RouteFilter { table: Some(wanted.table), ..RouteFilter::default() };
                let found = self.routes(&filter)?;
                found.iter().find(|found| wanted.same_key(found)).map(|found| wanted.differences(found))
            }
            // A rule is its own key: the kernel refuses only the very same one.
            Object::Rule(_) => Some(Vec::new()),
            Object::Neighbour(wanted) => {
                let filter =
                    NeighbourFilter { interface: Some(wanted.interface), ..NeighbourFilter::default() };
                let found = self.neighbours(&filter)?;
                found.iter().find(|found| wanted.same_key(found)).map(|found| wanted.differences(found))
            }
            Object::Fdb(wanted) => {
                let found = self.fdb(None)?;
                let mut same = found.iter().filter(|found| wanted.same_key(found));
                let exact = same.clone().find(|found| wanted.differences(found).is_empty());
                exact.or_else(|| same.next()).map(|found| wanted.differences(found))
            }
            Object::TokenBucket(wanted) => {
                let found = self.qdiscs(Some(wanted.interface))?;
                found.into_iter().find_map(|found| match found {
                    Qdisc::TokenBucket(found) => Some(wanted.differences(&found)),
                    Qdisc::Arrivals(_) => None,
                })
            }
            Object::Arrivals(wanted) => {
                let found = self.qdiscs(Some(wanted.interface))?;
                found.contains(&Qdisc::Arrivals(*wanted)).then(Vec::new)
            }
            Object::Redirect(wanted) => {
                let found = self.redirects(wanted.interface)?;
                found.first().map(|found| {
                    let mut differences = Vec::new();
                    Difference::check(&mut differences, "to", &wanted.to, &found.to);
                    differences
                })
            }
        })
    }

    /// The index of a link that must be there.
    pub fn index_of(&self, name: &IfName) -> Result<u32> {
        let found = self.link_by_name(name)?;
        let missing =
            || Error::NotFound { object: format!("link {name}"), namespace: self.namespace.to_string() };
        found.map(|link| link.index).ok_or_else(missing)
    }
}
