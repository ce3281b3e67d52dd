//! Connection tracking over ctnetlink: list with filters in the kernel, delete by tuple, mark by mask, zones.
//!
//! ```no_run
//! use knit_kernel::conntrack::{Conntrack, Filter, TupleFilter};
//!
//! // Every UDP flow to a service address whose endpoint is gone.
//! let mut conntrack = Conntrack::open()?;
//! let filter = Filter::v4()
//!     .original(TupleFilter::new().dst("10.96.0.10".parse().unwrap()).protocol(17).dst_port(53))
//!     .reply(TupleFilter::new().src("10.0.0.7".parse().unwrap()));
//! let stale = conntrack.list(&filter)?;
//! conntrack.delete(&stale)?;
//! # Ok::<(), knit_kernel::conntrack::Error>(())
//! ```

mod codec;
mod filter;

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

pub use filter::{Filter, TupleFilter};

use crate::netlink::{self, Batch, Protocol, Refusal, Socket, flags};
use crate::netns::NetNs;

/// Shorthand for results of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How many deletions or marks go to the kernel at once: each may be answered, and all answers must fit the
/// receive buffer.
const DELETE_BATCH: usize = 256;

/// One direction of a flow, as its packets look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    /// Source address.
    pub src: IpAddr,
    /// Destination address, of the same family.
    pub dst: IpAddr,
    /// The transport protocol and what it adds.
    pub l4: L4,
}

/// The transport part of a tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the fields are those of the headers")]
pub enum L4 {
    /// TCP, UDP, SCTP, DCCP: a protocol with ports.
    Ports { protocol: u8, src: u16, dst: u16 },
    /// ICMP or ICMPv6.
    Icmp { protocol: u8, id: u16, kind: u8, code: u8 },
    /// Any other protocol.
    Other { protocol: u8 },
}

/// Status bits of a flow (`IPS_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

/// A flow that the kernel tracks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// As its first packet went.
    pub original: Tuple,
    /// As the answers look. Differs from the reverse of `original` where addresses are translated.
    pub reply: Tuple,
    /// Status bits.
    pub status: Status,
    /// The connection mark.
    pub mark: u32,
    /// The zone; 0 is the default one.
    pub zone: u16,
    /// How long it will stay without a packet.
    pub timeout: Option<Duration>,
    /// What the kernel calls it; another flow with the same tuple has another id.
    pub id: Option<u32>,
    /// The state of a TCP flow (`TCP_CONNTRACK_*`); 3 is established.
    pub tcp_state: Option<u8>,
}

/// Flows of one network namespace.
#[derive(Debug)]
pub struct Conntrack {
    socket: Socket,
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket could not be opened.
    #[error("cannot open a conntrack socket")]
    Open(#[source] netlink::Error),
    /// Listing failed.
    #[error("cannot list the flows that match {filter}")]
    List {
        /// Which ones were asked for.
        filter: Box<Filter>,
        /// The cause.
        source: netlink::Error,
    },
    /// A flow could not be deleted. Others of the same call may be gone.
    #[error("cannot delete flow {flow}")]
    Delete {
        /// Which one.
        flow: Box<Flow>,
        /// What the kernel said.
        source: Refusal,
    },
    /// A flow's mark could not be set. Those of others of the same call may be.
    #[error("cannot set the mark of flow {flow}")]
    Mark {
        /// Which one.
        flow: Box<Flow>,
        /// What the kernel said.
        source: Refusal,
    },
    /// A flow could not be made.
    #[error("cannot create flow {flow}")]
    Create {
        /// Which one.
        flow: Box<Flow>,
        /// What the kernel said.
        source: netlink::Error,
    },
    /// A filter that the kernel cannot apply.
    #[error("filter {filter} is not valid: {why}")]
    Filter {
        /// The filter.
        filter: Box<Filter>,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The socket failed.
    #[error("cannot delete flows")]
    Socket(#[source] netlink::Error),
    /// The socket failed.
    #[error("cannot set marks of flows")]
    Marks(#[source] netlink::Error),
}

// === impl Conntrack ===

impl Conntrack {
    /// Of the calling thread's network namespace.
    pub fn open() -> Result<Self> {
        Socket::open(Protocol::Netfilter).map(|socket| Self { socket }).map_err(Error::Open)
    }

    /// Of another network namespace.
    pub fn open_in(namespace: &NetNs) -> Result<Self> {
        Socket::open_in(Protocol::Netfilter, namespace).map(|socket| Self { socket }).map_err(Error::Open)
    }

    /// All flows that match. The kernel filters, except by IPv6 addresses, which it gets wrong; everything is
    /// checked here again, because older kernels ignore parts of a filter.
    pub fn list(&mut self, filter: &Filter) -> Result<Vec<Flow>> {
        self.list_where(filter, |_| true)
    }

    /// The same, but keeps only the flows that `keep` says: of a large table, the rest takes no memory. If
    /// the table changes too much meanwhile, it is asked about all of them again.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub fn list_where(&mut self, filter: &Filter, keep: impl Fn(&Flow) -> bool) -> Result<Vec<Flow>> {
        if let Some(why) = filter.fault() {
            return Err(Error::Filter { filter: Box::new(filter.clone()), why });
        }
        let body = |w: &mut netlink::attr::Writer<'_>| codec::put_filter(w, filter);
        let listed = self.socket.dump(codec::GET, body, Vec::new, |flows: &mut Vec<Flow>, message| {
            let (_, attrs) = message.split::<4>()?;
            flows.extend(codec::flow(&attrs).filter(|flow| filter.matches(flow) && keep(flow)));
            Ok(())
        });
        listed.map_err(|source| Error::List { filter: Box::new(filter.clone()), source })
    }

    /// Deletes flows by their original tuple and zone. Returns how many were there; one that is gone, or that
    /// was replaced by another with the same tuple, is no error.
    pub fn delete<'a>(&mut self, flows: impl IntoIterator<Item = &'a Flow>) -> Result<usize> {
        let flows: Vec<&Flow> = flows.into_iter().collect();
        let mut deleted = 0;
        for part in flows.chunks(DELETE_BATCH) {
            let mut batch = Batch::new();
            for flow in part {
                batch.push(codec::DELETE, 0, |w| codec::put_delete(w, flow));
            }
            let answers = self.socket.request(&mut batch).map_err(Error::Socket)?;
            for (index, refusal) in &answers.refused {
                if !refusal.is_not_found() {
                    return Err(Error::Delete {
                        flow: Box::new(part[*index].clone()),
                        source: refusal.clone(),
                    });
                }
            }
            deleted += part.len() - answers.refused.len();
        }
        Ok(deleted)
    }

    /// Sets the bits of `mask` in the marks of flows to those of `value`; other bits stay, whoever changes
    /// them meanwhile. Returns how many flows were there; one that is gone is no error.
    pub fn set_mark<'a>(
        &mut self,
        flows: impl IntoIterator<Item = &'a Flow>,
        value: u32,
        mask: u32,
    ) -> Result<usize> {
        let flows: Vec<&Flow> = flows.into_iter().collect();
        let mut marked = 0;
        for part in flows.chunks(DELETE_BATCH) {
            let mut batch = Batch::new();
            for flow in part {
                batch.push(codec::NEW, 0, |w| codec::put_mark(w, flow, value, mask));
            }
            let answers = self.socket.request(&mut batch).map_err(Error::Marks)?;
            for (index, refusal) in &answers.refused {
                if !refusal.is_not_found() {
                    return Err(Error::Mark {
                        flow: Box::new(part[*index].clone()),
                        source: refusal.clone(),
                    });
                }
            }
            marked += part.len() - answers.refused.len();
        }
        Ok(marked)
    }

    /// Makes a flow, as if its first packet had been seen. Fails if one with the same tuple and zone is
    /// there.
    pub fn create(&mut self, flow: &Flow) -> Result<()> {
        let mut batch = Batch::new();
        batch.push(codec::NEW, flags::CREATE | flags::EXCL, |w| codec::put_flow(w, flow));
        let answers = self.socket.request(&mut batch).and_then(netlink::Answers::all);
        answers.map(|_| ()).map_err(|source| Error::Create { flow: Box::new(flow.clone()), source })
    }
}

/// Reads what the decoder makes of a netlink datagram; for fuzzing and property tests.
#[doc(hidden)]
pub fn decode_any(bytes: &[u8]) -> usize {
    let messages = netlink::Messages::new(bytes).flatten();
    let flows = messages.filter_map(|message| codec::flow(&message.split::<4>().ok()?.1));
    flows.map(|flow| flow.to_string().len()).sum()
}

// === impl Error ===

impl Error {
    /// What was named is not there.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Delete { source, .. } | Self::Mark { source, .. } => source.is_not_found(),
            Self::Create { source, .. } | Self::List { source, .. } => source.is_not_found(),
            _ => false,
        }
    }

    /// What was to be made is there already.
    pub fn is_exists(&self) -> bool {
        matches!(self, Self::Create { source, .. } if source.is_exists())
    }

    /// The same request may succeed later without anything else changing.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Delete { source, .. } | Self::Mark { source, .. } => source.is_retryable(),
            Self::Open(source)
            | Self::Socket(source)
            | Self::Marks(source)
            | Self::Create { source, .. }
            | Self::List { source, .. } => source.is_retryable(),
            Self::Filter { .. } => false,
        }
    }
}

// === impl Tuple, L4, Flow, Status ===

impl Tuple {
    /// A tuple of a protocol with ports.
    pub fn new(protocol: u8, src: (IpAddr, u16), dst: (IpAddr, u16)) -> Self {
        Self { src: src.0, dst: dst.0, l4: L4::Ports { protocol, src: src.1, dst: dst.1 } }
    }

    /// The answer's tuple if nothing is translated.
    pub fn reversed(&self) -> Self {
        let l4 = match self.l4 {
            L4::Ports { protocol, src, dst } => L4::Ports { protocol, src: dst, dst: src },
            L4::Icmp { protocol, id, kind, code } => {
                let kind = match (protocol, kind) {
                    (1, 8) => 0,
                    (1, 0) => 8,
                    (58, 128) => 129,
                    (58, 129) => 128,
                    (_, other) => other,
                };
                L4::Icmp { protocol, id, kind, code }
            }
            other => other,
        };
        Self { src: self.dst, dst: self.src, l4 }
    }
}

impl L4 {
    /// The protocol number.
    pub fn protocol(&self) -> u8 {
        match self {
            Self::Ports { protocol, .. } | Self::Icmp { protocol, .. } | Self::Other { protocol } => {
                *protocol
            }
        }
    }

    /// Source and destination port, if the protocol has them.
    pub fn ports(&self) -> Option<(u16, u16)> {
        match self {
            Self::Ports { src, dst, .. } => Some((*src, *dst)),
            _ => None,
        }
    }
}

impl Status {
    /// Packets were seen in both directions.
    pub const SEEN_REPLY: Self = Self(1 << 1);
    /// Will not be dropped early when the table is full.
    pub const ASSURED: Self = Self(1 << 2);
    /// The first packet has left the machine.
    pub const CONFIRMED: Self = Self(1 << 3);
    /// The source was translated.
    pub const SRC_NAT: Self = Self(1 << 4);
    /// The destination was translated.
    pub const DST_NAT: Self = Self(1 << 5);

    /// Whether all bits of `other` are set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl Flow {
    /// A flow without translation, to be created.
    pub fn new(original: Tuple, timeout: Duration) -> Self {
        Self {
            original,
            reply: original.reversed(),
            status: Status::CONFIRMED,
            mark: 0,
            zone: 0,
            timeout: Some(timeout),
            id: None,
            tcp_state: None,
        }
    }
}

impl fmt::Display for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.l4 {
            L4::Ports { protocol, src, dst } => {
                let name = match protocol {
                    6 => "tcp",
                    17 => "udp",
                    132 => "sctp",
                    _ => return write!(f, "{protocol} {} {src} -> {} {dst}", self.src, self.dst),
                };
                let from = std::net::SocketAddr::new(self.src, src);
                write!(f, "{name} {from} -> {}", std::net::SocketAddr::new(self.dst, dst))
            }
            L4::Icmp { id, kind, code, .. } => {
                write!(f, "icmp type {kind} code {code} id {id} {} -> {}", self.src, self.dst)
            }
            L4::Other { protocol } => write!(f, "protocol {protocol} {} -> {}", self.src, self.dst),
        }
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.original)?;
        if self.reply != self.original.reversed() {
            write!(f, " (answered as {})", self.reply)?;
        }
        if self.zone != 0 {
            write!(f, " zone {}", self.zone)?;
        }
        if self.mark != 0 {
            write!(f, " mark 0x{:x}", self.mark)?;
        }
        Ok(())
    }
}
