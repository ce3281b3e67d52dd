//! Hearing of what others change: the kernel's notifications of one namespace, less what this process did
//! itself.
//!
//! nftables' notifications say by which socket a change was made, so those are exact. Of links, addresses,
//! routes and neighbours the kernel does not always say; what is told is then what *may* have been somebody
//! else, and whoever hears it compares. A link whose other end goes up and down is no news: nothing of what
//! we set has changed.
//!
//! A [`Watcher`] listens in any number of namespaces; one thread does it for all watchers of the process.

mod links;
#[cfg(all(test, feature = "testing"))]
mod tests;
mod thread;
mod untouched;

use knit_nft::{Generation, TableId};

use crate::addr::{RTM_DELADDR, RTM_NEWADDR};
use crate::link::{RTM_DELLINK, RTM_NEWLINK, RTNLGRP_LINK};
use crate::neigh::{Neighbour, RTM_DELNEIGH, RTM_NEWNEIGH};
use crate::netlink::{Error, Message, Protocol, Result, Socket, flags, is_doomed, is_own};
use crate::netns::{NetNs, NsId};
use crate::owner;
use crate::route::{RTM_DELROUTE, RTM_NEWROUTE, Route};
use links::Links;
pub use thread::Watcher;
pub use untouched::Untouched;

const RTM_NEWNETCONF: u16 = 80;
const NETCONFA_IFINDEX: u16 = 1;
const NETCONFA_IFINDEX_ALL: i32 = -1;
/// Neighbours, addresses, routes, and the settings of each family.
const GROUPS: [u32; 8] = [RTNLGRP_LINK, 3, 5, 7, 9, 11, 24, 25];
const NFNLGRP_NFTABLES: u32 = 7;
/// Room for what comes while nobody reads. When it is not enough, that is told.
const BUFFER: usize = 2 * 1024 * 1024;

/// Something happened that this process may not have done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Somebody else changed this table.
    Table(TableId),
    /// Somebody may have changed a link of ours, its addresses, routes or neighbours, or a setting of the
    /// namespace.
    Network,
    /// There was more than could be heard: anything may have changed.
    Lost,
}

/// What to listen to: each has what those before it have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Listen {
    /// nftables only.
    Tables,
    /// nftables, links, addresses, routes, neighbours, settings.
    Everything,
}

/// The notifications of one namespace.
#[derive(Debug)]
struct Ears {
    namespace: NsId,
    tables: Socket,
    network: Option<Network>,
    /// The newest state of the rule set that was heard of.
    generation: Option<Generation>,
}

/// The notifications of links and what belongs to them.
#[derive(Debug)]
struct Network {
    socket: Socket,
    links: Links,
    /// To list the links again. The socket keeps the namespace alive as it is.
    namespace: NetNs,
    /// Something of the links was not heard, and they could not be listed since.
    stale: bool,
}

impl Ears {
    fn open(namespace: &NetNs, listen: Listen) -> Result<Self> {
        let mut tables = Socket::open_in(Protocol::Netfilter, namespace)?;
        // As much as is allowed; what does not fit is told as lost.
        let _ = tables.raise_receive_buffer(BUFFER);
        // What happens between the two is heard later, and asked for is older: read once too often at
        // worst.
        let generation = crate::nft::generation_by(&mut tables)?;
        tables.subscribe(NFNLGRP_NFTABLES)?;
        let network = match listen {
            Listen::Tables => None,
            Listen::Everything => {
                let socket = Socket::open_in(Protocol::Route, namespace)?;
                let _ = socket.raise_receive_buffer(BUFFER);
                GROUPS.iter().try_for_each(|group| socket.subscribe(*group))?;
                let links = Links::of(namespace)?;
                let namespace = namespace.try_clone().map_err(|e| Error::Namespace(Box::new(e)))?;
                Some(Network { socket, links, namespace, stale: false })
            }
        };
        Ok(Self { namespace: namespace.id(), tables, network, generation: Some(generation) })
    }

    /// Takes in all that is queued, and tells what is news, and for those who listen to how much.
    fn hear(&mut self, tell: &mut dyn FnMut(News, Listen)) {
        let Self { namespace, tables, network, generation } = self;
        let mut last: Option<TableId> = None;
        let heard = tables.drain(|message| {
            if let Some(new) = crate::nft::new_generation(&message) {
                *generation = Some(new);
                // What is told of one transaction is told once. Whoever was told of it may have looked before
                // the next one, which is in the same queue by now.
                last = None;
            } else if !is_own(*namespace, Protocol::Netfilter, message.port)
                && let Some(table) = crate::nft::table_of(&message)
                && last.as_ref() != Some(&table)
            {
                tell(News::Table(table.clone()), Listen::Tables);
                last = Some(table);
            }
        });
        // Whatever went wrong, something may not have been heard.
        if heard.is_err() {
            // Only now that the queue is empty: what was in it is from before the loss.
            *generation = None;
            tell(News::Lost, Listen::Tables);
        }
        let (mut news, mut lost) = (false, false);
        if let Some(network) = network {
            let Network { socket, links, namespace: space, stale } = network;
            let heard = socket.drain(|message| news |= is_news(&message, *namespace, links));
            if heard.is_err() || *stale {
                lost = true;
                // Before it is told: what changes until the list is read is in it, and is no news later.
                let listed = Links::of(space);
                *stale = listed.is_err();
                if let Ok(listed) = listed {
                    *links = listed;
                }
            }
        }
        if lost {
            tell(News::Lost, Listen::Everything);
        } else if news {
            tell(News::Network, Listen::Everything);
        }
    }
}

fn is_news(message: &Message<'_>, namespace: NsId, links: &mut Links) -> bool {
    let own = is_own(namespace, Protocol::Route, message.port);
    let lives = || !is_doomed(namespace, interface(message));
    match message.kind {
        RTM_NEWLINK | RTM_DELLINK => links.take(message) && !own && lives(),
        _ if own => false,
        // The kernel itself renews those that it got from advertisements.
        RTM_NEWADDR => message.port != 0 || links.is_ours(interface(message)),
        RTM_DELADDR => true,
        // What the kernel itself takes away goes with a link or an address, and of those it tells.
        RTM_NEWROUTE | RTM_DELROUTE if message.port == 0 => false,
        RTM_NEWROUTE | RTM_DELROUTE => Route::parse(message).is_some_and(|route| {
            let replaced = message.kind == RTM_NEWROUTE && message.flags & flags::REPLACE != 0;
            route.table == Route::MAIN && (route.protocol == owner::PROTOCOL || replaced)
        }),
        RTM_NEWNEIGH | RTM_DELNEIGH => match message.payload.first() {
            // Forwarding entries have no mark, and the kernel does not say who changed them.
            Some(family) if i32::from(*family) == libc::AF_BRIDGE => {
                links.is_ours(interface(message)) && lives()
            }
            _ if message.port == 0 => false,
            _ => Neighbour::parse(message).is_some_and(|n| n.protocol == owner::PROTOCOL),
        },
        RTM_NEWNETCONF => message.split::<1>().is_ok_and(|(_, attrs)| {
            attrs.get(NETCONFA_IFINDEX).is_some_and(|index| index.i32() == Ok(NETCONFA_IFINDEX_ALL))
        }),
        _ => false,
    }
}

/// The link that a message about a link, an address or a neighbour is about: all have its index in the same
/// place.
fn interface(message: &Message<'_>) -> u32 {
    let index = message.payload.get(4..8).and_then(|bytes| bytes.try_into().ok());
    index.map_or(0, u32::from_ne_bytes)
}
