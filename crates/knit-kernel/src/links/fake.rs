//! Links in memory: names can be taken, calls can fail, and what was done is told in order.

use std::sync::{Mutex, MutexGuard};

use knit_types::sync::Locked;

use super::{LinkList, Links};
use crate::error::{Error, Result};
use crate::handle::{Created, LinkFilter};
use crate::link::{Details, Kind, Link, NewLink};
use crate::name::IfName;
use crate::netlink::{Errno, Refusal};
use crate::op::{Object, Op};

/// Links of a namespace that is not there. What the kernel does that callers rely on, it does too: a name
/// belongs to one link, with a link goes what is on it, and what is refused changes nothing.
#[derive(Debug, Default)]
pub struct FakeLinks(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    links: Vec<Link>,
    /// What is on links: addresses, routes, neighbours, forwarding entries.
    objects: Vec<Object>,
    /// Names that the other ends of pairs cannot have.
    taken: Vec<IfName>,
    last: u32,
    done: Vec<String>,
    fail: Option<(String, i32)>,
}

impl FakeLinks {
    /// No links.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a link there as somebody else, or a process that was killed, left it. Its index is given.
    pub fn add(&self, link: Link) -> u32 {
        let mut state = self.state();
        state.last += 1;
        let index = state.last;
        state.links.push(Link { index, ..link });
        index
    }

    /// A link with nothing but a name and a kind, for [`add`](Self::add).
    #[must_use]
    pub fn bare(name: IfName, kind: &str) -> Link {
        Link {
            index: 0,
            name,
            kind: kind.into(),
            up: false,
            running: false,
            carrier: false,
            mac: None,
            mtu: 1500,
            master: None,
            group: 0,
            alias: None,
            link: None,
            link_namespace: None,
            addr_gen: None,
            port: None,
            details: Details::Other,
        }
    }

    /// The namespace of other ends has a link of this name.
    pub fn take_peer_name(&self, name: IfName) {
        self.state().taken.push(name);
    }

    /// The first call from now on whose words contain this is refused with this number, and does nothing.
    pub fn fail(&self, what: &str, errno: i32) {
        self.state().fail = Some((what.to_owned(), errno));
    }

    /// What was done, in order, in words; what was refused is not in it.
    #[must_use]
    pub fn done(&self) -> Vec<String> {
        self.state().done.clone()
    }

    /// What there is on links, in words.
    #[must_use]
    pub fn objects(&self) -> Vec<String> {
        self.state().objects.iter().map(ToString::to_string).collect()
    }

    /// The names of all links.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.state().links.iter().map(|link| link.name.to_string()).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.locked()
    }
}

impl State {
    /// Notes what is done, unless it is to fail.
    fn attempt(&mut self, what: String) -> Result<()> {
        if let Some((_, errno)) = self.fail.take_if(|(words, _)| what.contains(words.as_str())) {
            return Err(refused(what, errno));
        }
        self.done.push(what);
        Ok(())
    }

    fn has(&self, index: u32) -> bool {
        self.links.iter().any(|link| link.index == index)
    }

    fn apply(&mut self, op: &Op<'_>) -> Result<()> {
        let what = op.to_string();
        match op {
            Op::Change(_) => self.attempt(what),
            Op::Create(object) | Op::Replace(object) => {
                if interface(object).is_some_and(|index| !self.has(index)) {
                    return Err(refused(what, libc::ENODEV));
                }
                let there = self.objects.contains(object);
                if there && matches!(op, Op::Create(_)) {
                    return Err(refused(what, libc::EEXIST));
                }
                self.attempt(what)?;
                self.objects.retain(|other| other != object);
                self.objects.push(object.clone());
                Ok(())
            }
            Op::Prefer(route) => {
                self.attempt(what)?;
                self.objects.push(Object::Route(*route));
                Ok(())
            }
            Op::Delete(object) => {
                if !self.objects.contains(object) {
                    return Err(refused(what, libc::ENOENT));
                }
                self.attempt(what)?;
                self.objects.retain(|other| other != object);
                Ok(())
            }
        }
    }
}

impl LinkList for FakeLinks {
    fn link_by_name(&self, name: &IfName) -> Result<Option<Link>> {
        Ok(self.state().links.iter().find(|link| link.name == *name).cloned())
    }

    fn links(&self, filter: &LinkFilter<'_>) -> Result<Vec<Link>> {
        Ok(self.state().links.iter().filter(|link| filter.accepts(link)).cloned().collect())
    }

    fn delete_link(&self, index: u32) -> Result<bool> {
        let mut state = self.state();
        let Some(link) = state.links.iter().find(|link| link.index == index) else { return Ok(false) };
        let what = format!("delete {} {}", link.kind, link.name);
        state.attempt(what)?;
        state.links.retain(|link| link.index != index);
        state.objects.retain(|object| interface(object) != Some(index));
        Ok(true)
    }
}

impl Links for FakeLinks {
    fn create_link(&self, new: &NewLink<'_>) -> Result<Created> {
        new.validate()?;
        let mut state = self.state();
        let what = format!("create {}", new.describe());
        let taken = |peer: &IfName| state.taken.contains(peer);
        let peer_taken = matches!(&new.kind, Kind::Veth(peer) if taken(&peer.name));
        if peer_taken || state.links.iter().any(|link| link.name == new.name) {
            return Err(refused(what, libc::EEXIST));
        }
        state.attempt(what)?;
        state.last += 2;
        let (index, peer) = (state.last - 1, state.last);
        let mut link = Self::bare(new.name.clone(), new.kind.name());
        (link.index, link.up, link.running, link.mac, link.group) =
            (index, new.up, new.up, new.mac, new.group);
        (link.alias, link.master, link.port) = (new.alias.clone(), new.master, new.port);
        if let Kind::Macvlan(macvlan) = &new.kind {
            (link.link, link.details) = (Some(macvlan.parent), Details::Macvlan(macvlan.mode));
        }
        link.mtu = new.mtu.map_or(1500, crate::name::Mtu::get);
        state.links.push(link);
        Ok(Created { index, peer: matches!(new.kind, Kind::Veth(_)).then_some(peer) })
    }

    fn apply(&self, ops: &[Op<'_>]) -> Result<()> {
        let mut state = self.state();
        let mut first = None;
        for op in ops {
            if let Err(error) = state.apply(op) {
                first.get_or_insert(error);
            }
        }
        first.map_or(Ok(()), Err)
    }
}

/// The link that an object is on.
fn interface(object: &Object) -> Option<u32> {
    match object {
        Object::Address(address) => Some(address.interface),
        Object::Route(route) => route.interface,
        Object::Neighbour(neighbour) => Some(neighbour.interface),
        Object::Fdb(entry) => Some(entry.interface),
        Object::TokenBucket(bucket) => Some(bucket.interface),
        Object::Arrivals(arrivals) => Some(arrivals.interface),
        Object::Redirect(redirect) => Some(redirect.interface),
        Object::Rule(_) => None,
    }
}

fn refused(what: String, errno: i32) -> Error {
    let refusal = Refusal { errno: Errno(errno), message: None, offset: None, attribute: None };
    Error::refused("a namespace that is not there".into(), 1, vec![(0, what, refusal)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Bridge, Change};

    fn name(text: &str) -> IfName {
        IfName::new(text).expect("a name")
    }

    #[test]
    fn a_name_is_one_links_and_what_is_on_a_link_goes_with_it() {
        let links = FakeLinks::new();
        let bridge = NewLink::bridge(name("br"), Bridge::default());
        let made = links.create_link(&bridge).expect("made");
        assert!(links.create_link(&bridge).expect_err("taken").is_exists());
        let net = "10.0.0.1/24".parse().expect("a prefix");
        let address = || crate::addr::Address::new(made.index, net);
        links.apply(&[Op::create(address())]).expect("an address");
        assert!(links.apply(&[Op::create(address())]).expect_err("there").is_exists());
        assert!(links.delete_link(made.index).expect("deleted"));
        assert!(links.objects().is_empty() && links.names().is_empty());
        assert!(links.apply(&[Op::create(address())]).expect_err("no link").is_not_found());
        assert!(!links.delete_link(made.index).expect("nothing to delete"));
    }

    #[test]
    fn what_fails_does_nothing_and_only_once() {
        let links = FakeLinks::new();
        links.fail("create bridge", libc::EPERM);
        let bridge = NewLink::bridge(name("br"), Bridge::default());
        links.create_link(&bridge).expect_err("as told");
        assert!(links.names().is_empty() && links.done().is_empty());
        let made = links.create_link(&bridge).expect("the second time");
        links.apply(&[Change::of(made.index).up().into()]).expect("up");
        assert_eq!(links.done().len(), 2);
    }
}
