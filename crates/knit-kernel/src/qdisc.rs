//! Queueing: how fast a link sends, and where what arrives on a link is sent instead.
//!
//! A link sends no faster than its [`TokenBucket`] lets it. What arrives cannot be queued: a [`Redirect`]
//! hands it to an `ifb` link, whose own bucket lets it go on, and from there it goes on as if it had just
//! arrived.

use std::fmt;

use crate::error::{Difference, Error, Result};
use crate::netlink::Message;
use crate::netlink::attr::{Attr, Reader, Writer};

pub(crate) const RTM_NEWQDISC: u16 = 36;
pub(crate) const RTM_DELQDISC: u16 = 37;
pub(crate) const RTM_GETQDISC: u16 = 38;
pub(crate) const RTM_NEWTFILTER: u16 = 44;
pub(crate) const RTM_DELTFILTER: u16 = 45;
pub(crate) const RTM_GETTFILTER: u16 = 46;

const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
const TCA_TBF_BURST: u16 = 6;
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const TCA_MIRRED_PARMS: u16 = 2;
const TCA_EGRESS_REDIR: u32 = 1;
const TC_ACT_STOLEN: u32 = 4;
const TC_U32_TERMINAL: u8 = 1;
const TC_LINKLAYER_ETHERNET: u8 = 1;

const ROOT: u32 = 0xffff_ffff;
const INGRESS: u32 = 0xffff_fff1;
const INGRESS_HANDLE: u32 = 0xffff_0000;
/// The handle of our buckets: where there is one with it, its rate is changed in place.
const BUCKET_HANDLE: u32 = 0x0001_0000;
/// The priority of our redirects, and the protocol (all), as the kernel has them in one number.
const REDIRECT_INFO: u32 = (1 << 16) | (libc::ETH_P_ALL as u16).to_be() as u32;
/// The first filter of the first table, which ours is: without a handle another one is added each time.
const REDIRECT_HANDLE: u32 = 0x8000_0800;
/// The length of a message's header.
const HEADER: usize = 20;
/// A kernel's tick of queueing is so many nanoseconds.
const TICK_SHIFT: u32 = 6;

/// How fast a link sends: the bucket at its root.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenBucket {
    /// The link's index.
    pub interface: u32,
    /// Bytes in a second.
    pub rate: u64,
    /// How many bytes may be sent at once after a pause.
    pub burst: u32,
    /// How many bytes may wait; more are dropped.
    pub limit: u32,
}

/// What lets packets that arrive on a link be redirected: without it a [`Redirect`] cannot be made, and with
/// it go all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Arrivals {
    /// The link's index.
    pub interface: u32,
}

/// Everything that arrives on a link is sent by another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Redirect {
    /// The link's index; it has [`Arrivals`].
    pub interface: u32,
    /// The index of the other one.
    pub to: u32,
}

/// A queueing discipline as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Qdisc {
    /// A bucket at the root of a link.
    TokenBucket(TokenBucket),
    /// Packets that arrive can be redirected.
    Arrivals(Arrivals),
}

impl TokenBucket {
    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        if self.rate == 0 || self.burst == 0 || self.limit == 0 {
            let problem = "a rate, burst or limit of 0 lets nothing pass";
            return Err(Error::invalid(self, problem, "use at least one byte each"));
        }
        Ok(())
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        header(writer, self.interface, BUCKET_HANDLE, ROOT, 0).string(TCA_KIND, "tbf");
        writer.nested(TCA_OPTIONS, |options| {
            // struct tc_tbf_qopt: two rates of 12 bytes each, then limit, buffer and mtu.
            let mut parameters = [0; 36];
            parameters[1] = TC_LINKLAYER_ETHERNET;
            let rate = u32::try_from(self.rate).unwrap_or(u32::MAX);
            parameters[8..12].copy_from_slice(&rate.to_ne_bytes());
            parameters[24..28].copy_from_slice(&self.limit.to_ne_bytes());
            options.bytes(TCA_TBF_PARMS, &parameters).u32(TCA_TBF_BURST, self.burst);
            if self.rate > u64::from(u32::MAX) {
                options.u64(TCA_TBF_RATE64, self.rate);
            }
        });
    }

    fn parse(interface: u32, options: Option<Attr<'_>>) -> Option<Self> {
        let options = options?.nested();
        let parameters: [u8; 36] = options.get(TCA_TBF_PARMS)?.array().ok()?;
        let number = |at: usize| {
            u32::from_ne_bytes([parameters[at], parameters[at + 1], parameters[at + 2], parameters[at + 3]])
        };
        let rate64 = options.get(TCA_TBF_RATE64).and_then(|attr| attr.u64().ok());
        let rate = rate64.unwrap_or_else(|| number(8).into());
        // The kernel keeps the burst as the time that it takes.
        let nanoseconds = u128::from(number(28)) << TICK_SHIFT;
        let burst = u32::try_from(nanoseconds * u128::from(rate) / 1_000_000_000).unwrap_or(u32::MAX);
        Some(Self { interface, rate, burst, limit: number(24) })
    }

    pub(crate) fn differences(&self, found: &Self) -> Vec<Difference> {
        let mut differences = Vec::new();
        Difference::check(&mut differences, "rate", &self.rate, &found.rate);
        Difference::check(&mut differences, "limit", &self.limit, &found.limit);
        if !self.is_about(found.burst) {
            Difference::check(&mut differences, "burst", &self.burst, &found.burst);
        }
        differences
    }

    /// Whether a burst that was read back is this one's: it comes back rounded to the kernel's ticks.
    fn is_about(&self, burst: u32) -> bool {
        let tick = (self.rate << TICK_SHIFT) / 1_000_000_000 + 2;
        u64::from(self.burst.abs_diff(burst)) <= tick
    }
}

impl Arrivals {
    pub(crate) fn write(self, writer: &mut Writer<'_>) {
        header(writer, self.interface, INGRESS_HANDLE, INGRESS, 0).string(TCA_KIND, "ingress");
    }
}

impl Redirect {
    /// Refuses what cannot work, before anything is sent.
    pub fn validate(&self) -> Result<()> {
        if self.interface == self.to {
            return Err(Error::invalid(self, "a link cannot be redirected to itself", "use another link"));
        }
        Ok(())
    }

    pub(crate) fn write(self, writer: &mut Writer<'_>) {
        let parent = INGRESS_HANDLE;
        header(writer, self.interface, REDIRECT_HANDLE, parent, REDIRECT_INFO).string(TCA_KIND, "u32");
        writer.nested(TCA_OPTIONS, |options| {
            // struct tc_u32_sel with one key that every packet matches.
            let mut selector = [0; 32];
            (selector[0], selector[2]) = (TC_U32_TERMINAL, 1);
            options.bytes(TCA_U32_SEL, &selector).nested(TCA_U32_ACT, |actions| {
                actions.nested(1, |action| {
                    // struct tc_mirred: index, capabilities, action, two counts, what to do, where to.
                    let mut mirred = [0; 28];
                    mirred[8..12].copy_from_slice(&TC_ACT_STOLEN.to_ne_bytes());
                    mirred[20..24].copy_from_slice(&TCA_EGRESS_REDIR.to_ne_bytes());
                    mirred[24..28].copy_from_slice(&self.to.to_ne_bytes());
                    action.string(TCA_ACT_KIND, "mirred").nested(TCA_ACT_OPTIONS, |options| {
                        options.bytes(TCA_MIRRED_PARMS, &mirred);
                    });
                });
            });
        });
    }

    /// What names all of ours on a link, for deleting them.
    pub(crate) fn write_key(self, writer: &mut Writer<'_>) {
        header(writer, self.interface, 0, INGRESS_HANDLE, REDIRECT_INFO).string(TCA_KIND, "u32");
    }

    /// Reads a redirect of ours out of a message; `None` if it is something else or damaged.
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWTFILTER {
            return None;
        }
        let (interface, attrs) = split(message)?;
        let kind = attrs.get(TCA_KIND)?.string();
        // A filter's tables are in the list as well; they have no action.
        let options = attrs.get(TCA_OPTIONS).filter(|_| kind == "u32")?.nested();
        let action = options.get(TCA_U32_ACT)?.nested().next()?.nested();
        let is_mirred = action.get(TCA_ACT_KIND)?.string() == "mirred";
        let options = action.get(TCA_ACT_OPTIONS).filter(|_| is_mirred)?.nested();
        let mirred: [u8; 28] = options.get(TCA_MIRRED_PARMS)?.array().ok()?;
        let to = u32::from_ne_bytes([mirred[24], mirred[25], mirred[26], mirred[27]]);
        Some(Self { interface, to })
    }
}

impl Qdisc {
    /// Reads one of these out of a message; `None` if it is another one or damaged.
    pub fn parse(message: &Message<'_>) -> Option<Self> {
        if message.kind != RTM_NEWQDISC {
            return None;
        }
        let (interface, attrs) = split(message)?;
        match attrs.get(TCA_KIND)?.string().as_str() {
            "tbf" => TokenBucket::parse(interface, attrs.get(TCA_OPTIONS)).map(Self::TokenBucket),
            "ingress" => Some(Self::Arrivals(Arrivals { interface })),
            _ => None,
        }
    }

    /// The link that it is on.
    pub fn interface(&self) -> u32 {
        match self {
            Self::TokenBucket(bucket) => bucket.interface,
            Self::Arrivals(arrivals) => arrivals.interface,
        }
    }
}

/// The interface of a message, and its attributes.
fn split<'a>(message: &Message<'a>) -> Option<(u32, Reader<'a>)> {
    let (header, attrs) = message.split::<HEADER>().ok()?;
    let interface = u32::from_ne_bytes([header[4], header[5], header[6], header[7]]);
    (interface != 0).then_some((interface, attrs))
}

/// struct tcmsg.
pub(crate) fn header<'a, 'b>(
    writer: &'a mut Writer<'b>,
    interface: u32,
    handle: u32,
    parent: u32,
    info: u32,
) -> &'a mut Writer<'b> {
    let mut header = [0; HEADER];
    header[4..8].copy_from_slice(&interface.to_ne_bytes());
    header[8..12].copy_from_slice(&handle.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header[16..20].copy_from_slice(&info.to_ne_bytes());
    writer.fixed(&header)
}

/// What lists the filters for packets that arrive on a link.
pub(crate) fn list_arriving(writer: &mut Writer<'_>, interface: u32) {
    header(writer, interface, 0, INGRESS_HANDLE, 0);
}

impl fmt::Display for TokenBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token bucket of {} bytes/s on link {}", self.rate, self.interface)
    }
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ingress queue of link {}", self.interface)
    }
}

impl fmt::Display for Redirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "redirect from link {} to link {}", self.interface, self.to)
    }
}
