//! Links of other namespaces, by the numbers that this one has for them.
//!
//! A namespace can give others numbers (`ip netns set`). The kernel keeps such a number as long as both live,
//! and through it shows and deletes the other's links. So a namespace remembers others without keeping them
//! alive, without a path, and whoever comes later finds them.

use std::os::fd::{AsFd, AsRawFd};

use super::list::link_header;
use super::{Handle, LinkFilter};
use crate::addr::{Address, RTM_GETADDR};
use crate::error::Result;
use crate::link::{
    IFLA_EXT_MASK, IFLA_IFNAME, IFLA_INFO_KIND, IFLA_LINKINFO, Link, RTEXT_FILTER_SKIP_STATS, RTM_DELLINK,
    RTM_GETLINK,
};
use crate::links::LinkList;
use crate::name::IfName;
use crate::netlink::attr::Writer;
use crate::netlink::{Batch, Error as NetlinkError, Message};
use crate::netns::NetNs;

const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
const IFLA_TARGET_NETNSID: u16 = 46;
const IFA_TARGET_NETNSID: u16 = 10;

/// Another namespace, by its number here. One whose number nobody has, or that is gone, has no links.
#[derive(Debug, Clone, Copy)]
pub struct Distant<'a> {
    handle: &'a Handle,
    number: i32,
}

impl Handle {
    /// Gives another namespace a number here. One that has a number keeps it; says which one it has now.
    pub fn number_namespace(&self, other: &NetNs, number: i32) -> Result<i32> {
        if let Some(has) = self.number_of(other)? {
            return Ok(has);
        }
        let fd = other.as_fd().as_raw_fd();
        let mut batch = Batch::new();
        batch.push(RTM_NEWNSID, 0, |writer| {
            _ = writer.fixed(&[0]).i32(NETNSA_NSID, number).i32(NETNSA_FD, fd);
        });
        let answer = self.socket().request(&mut batch).and_then(crate::netlink::Answers::all);
        match answer {
            Ok(_) => Ok(number),
            // Somebody was quicker, or another namespace has that number.
            Err(source) if source.is_exists() => match self.number_of(other)? {
                Some(has) => Ok(has),
                None => Err(self.failed(format_args!("give {other} the number {number}"), source)),
            },
            Err(source) => Err(self.failed(format_args!("give {other} the number {number}"), source)),
        }
    }

    /// The number of another namespace here, if it has one.
    pub fn number_of(&self, other: &NetNs) -> Result<Option<i32>> {
        let fd = other.as_fd().as_raw_fd();
        let mut batch = Batch::new();
        batch.push(RTM_GETNSID, 0, |writer| _ = writer.fixed(&[0]).i32(NETNSA_FD, fd));
        let replies = self.socket().request(&mut batch).and_then(crate::netlink::Answers::all);
        let replies = replies.map_err(|source| self.failed("ask for a namespace's number", source))?;
        let number = replies.iter().find_map(|(_, kind, payload)| {
            number(&Message { kind: *kind, flags: 0, sequence: 0, port: 0, payload })
        });
        Ok(number.filter(|number| *number >= 0))
    }

    /// The numbers of all namespaces that have one here.
    pub fn numbered_namespaces(&self) -> Result<Vec<i32>> {
        let mut all = self.list("list namespaces", RTM_GETNSID, |writer| _ = writer.fixed(&[0]), number)?;
        all.retain(|number| *number >= 0);
        all.sort_unstable();
        Ok(all)
    }

    /// The namespace with this number.
    pub fn distant(&self, number: i32) -> Distant<'_> {
        Distant { handle: self, number }
    }
}

impl Distant<'_> {
    /// Addresses of a link there.
    pub fn addresses(&self, interface: u32) -> Result<Vec<Address>> {
        let body = |writer: &mut Writer<'_>| {
            let mut header = [0; 8];
            header[4..8].copy_from_slice(&interface.to_ne_bytes());
            writer.fixed(&header).i32(IFA_TARGET_NETNSID, self.number);
        };
        let mut addresses =
            self.or_none(self.handle.dump(RTM_GETADDR, body, Address::parse), "list addresses elsewhere")?;
        addresses.retain(|address| address.interface == interface);
        Ok(addresses)
    }

    /// What was answered; nothing where nobody has the number.
    fn or_none<T: Default>(&self, answer: Result<T, NetlinkError>, attempted: &str) -> Result<T> {
        match answer {
            Ok(answer) => Ok(answer),
            Err(error) if error.errno().is_some_and(|errno| errno.0 == libc::EINVAL) => Ok(T::default()),
            Err(source) => Err(self.handle.failed(attempted, source)),
        }
    }
}

impl LinkList for Distant<'_> {
    fn link_by_name(&self, name: &IfName) -> Result<Option<Link>> {
        let mut batch = Batch::new();
        batch.push(RTM_GETLINK, 0, |writer| {
            link_header(writer, 0).u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
            writer.i32(IFLA_TARGET_NETNSID, self.number).string(IFLA_IFNAME, name.as_str());
        });
        let answer = self.handle.socket().request(&mut batch).and_then(crate::netlink::Answers::all);
        match answer {
            Err(error) if error.is_not_found() => Ok(None),
            answer => {
                let replies = self.or_none(answer, "look for a link elsewhere")?;
                Ok(replies.iter().find_map(|(_, _, payload)| Link::parse_payload(payload)))
            }
        }
    }

    fn links(&self, filter: &LinkFilter<'_>) -> Result<Vec<Link>> {
        let body = |writer: &mut Writer<'_>| {
            link_header(writer, 0).u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
            writer.i32(IFLA_TARGET_NETNSID, self.number);
            if let Some(kind) = filter.kind {
                writer.nested(IFLA_LINKINFO, |writer| _ = writer.string(IFLA_INFO_KIND, kind));
            }
        };
        let mut links =
            self.or_none(self.handle.dump(RTM_GETLINK, body, Link::parse), "list links elsewhere")?;
        links.retain(|link| filter.accepts(link));
        links.sort_by_key(|link| link.index);
        Ok(links)
    }

    fn delete_link(&self, index: u32) -> Result<bool> {
        let mut batch = Batch::new();
        batch.push(RTM_DELLINK, 0, |writer| {
            link_header(writer, index).i32(IFLA_TARGET_NETNSID, self.number);
        });
        let answer = self.handle.socket().request(&mut batch).and_then(crate::netlink::Answers::all);
        match answer {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => self.or_none(Err(error), "delete a link elsewhere"),
        }
    }
}

/// The number in an answer.
fn number(message: &Message<'_>) -> Option<i32> {
    let (_, attrs) = message.split::<4>().ok()?;
    attrs.get(NETNSA_NSID)?.i32().ok()
}
