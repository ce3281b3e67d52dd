//! The owner's mark of an attachment: the alias of the interface's host end, and that end's name. Where a
//! kind of Network has no router, the pod's end has it.
//!
//! The mark is all that the runtime remembers of an attachment; it keeps no file. The Network is not in it
//! where there is a router: the host end lives there, and the router's namespace is mounted under
//! the Network's name. The pod's namespace, name and uid, its name servers and its routes do not fit: the
//! caller's ledger has them.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use knit_ipam::Mac;
use knit_kernel::name::IfName;
use knit_kernel::owner;
use knit_runtime::{AttachRequest, Error, InterfaceName, Network, Reason, Result, SandboxId, Topology};
use knit_types::fnv1a;

use crate::topology::{self, Driver};

/// What the host end of an attachment says about it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Mark {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The interface's name in the pod.
    pub interface: InterfaceName,
    /// The inode of the pod's network namespace.
    pub inode: u64,
    /// What else was asked for, as a number: the same request gives the same.
    pub digest: u64,
    /// The pod's MAC.
    pub mac: Mac,
    /// Whether the pod's default route goes out there.
    pub default_route: bool,
    /// Whether ports of the node lead there.
    pub ports: bool,
    /// Of which kind its Network is.
    pub topology: Topology,
    /// The number of its Network, where that does not follow from where the link is: it is in the pod alone.
    pub network: Option<u32>,
    /// The pod's addresses.
    pub addresses: Vec<IpNet>,
}

/// Before it in an alias: this is an attachment.
const KIND: &str = "pod ";
/// Host ends' names begin with this; rules recognise them by it.
pub(crate) const HOST_PREFIX: &str = "knit";

/// The name of an attachment's host end. It follows from sandbox and interface, so that nothing must be
/// looked up to find it; the alias tells the rare two apart that share one.
pub(crate) fn host_name(sandbox: &SandboxId, interface: &InterfaceName) -> IfName {
    // Names made by one version are found by the next.
    let hash = fnv1a(sandbox.as_str().bytes().chain([b' ']).chain(interface.as_str().bytes()));
    let letters = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut name = String::from(HOST_PREFIX);
    name.extend((0..11).map(|place| char::from(letters[(hash >> (5 * place)) as usize & 31])));
    IfName::new(name).expect("a prefix and eleven letters are a name")
}

impl Mark {
    /// The mark of what is asked for.
    pub fn of(request: &AttachRequest, network: &Network, mac: Mac, inode: u64) -> Result<Self> {
        let topology = network.topology;
        let mark = Self {
            sandbox: request.pod.sandbox.clone(),
            interface: request.interface.clone(),
            inode,
            digest: digest(request),
            mac,
            default_route: request.default_route,
            ports: !request.ports.is_empty(),
            topology,
            network: (!topology.has_router()).then(|| network.id.get()),
            addresses: request.addresses.iter().map(|address| address.net).collect(),
        };
        let length = mark.alias().len();
        if length > owner::ALIAS_MAX {
            let message = format!(
                "the owner's mark of sandbox {} would have {length} bytes, but the kernel allows \
                {}: use a shorter sandbox id",
                mark.sandbox,
                owner::ALIAS_MAX
            );
            return Err(Error::new(Reason::Invalid, message).at(request.interface.as_str()));
        }
        Ok(mark)
    }

    /// The alias to set.
    pub fn alias(&self) -> String {
        owner::alias(&self.to_string())
    }

    /// Reads the owner's part of an alias; `None` if it is no attachment's.
    pub fn parse(owner: &str) -> Option<Self> {
        let mut words = owner.strip_prefix(KIND)?.split(' ');
        let mut word = || words.next();
        let mark = Self {
            sandbox: word()?.parse().ok()?,
            interface: word()?.parse().ok()?,
            inode: word()?.parse().ok()?,
            digest: u64::from_str_radix(word()?, 16).ok()?,
            mac: word()?.parse().ok()?,
            default_route: false,
            ports: false,
            topology: topology::of_letters(""),
            network: None,
            addresses: Vec::new(),
        };
        let flags = word()?;
        let addresses = word()?.split(',').filter(|text| !text.is_empty());
        let network = word().and_then(|text| text.strip_prefix('n')?.parse().ok());
        Some(Self {
            default_route: flags.contains('d'),
            ports: flags.contains('p'),
            topology: topology::of_letters(flags),
            network,
            addresses: addresses.map(str::parse).collect::<Result<_, _>>().ok()?,
            ..mark
        })
    }

    /// What its kind of Network is.
    pub fn driver(&self) -> &'static dyn Driver {
        topology::of(self.topology)
    }

    /// The name of its host end: also what it is known by where its kind of Network has none.
    pub fn host(&self) -> IfName {
        host_name(&self.sandbox, &self.interface)
    }

    /// The addresses alone.
    pub fn ips(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.addresses.iter().map(IpNet::addr)
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sandbox, interface, inode, digest, mac, .. } = self;
        write!(f, "{KIND}{sandbox} {interface} {inode} {digest:016x} {mac} -")?;
        if self.default_route {
            f.write_str("d")?;
        }
        if self.ports {
            f.write_str("p")?;
        }
        self.driver().letter().map_or(Ok(()), |letter| write!(f, "{letter}"))?;
        f.write_str(" ")?;
        for (place, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if place == 0 { "" } else { "," })?;
        }
        self.network.map_or(Ok(()), |network| write!(f, " n{network}"))
    }
}

/// A number for everything in a request that shows in what is made. Name servers are only repeated in the
/// answer.
fn digest(request: &AttachRequest) -> u64 {
    let AttachRequest { network, addresses, mac, default_route, ports, routes, .. } = request;
    let what = (network, addresses, mac, default_route, ports, routes);
    fnv1a(serde_json::to_vec(&what).expect("plain data becomes JSON"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark() -> Mark {
        Mark {
            sandbox: "f0".repeat(32).parse().expect("a sandbox"),
            interface: "eth0".parse().expect("a name"),
            inode: 4_026_531_840,
            digest: 0xfedc_ba98_7654_3210,
            mac: "0a:01:0a:f4:00:05".parse().expect("a MAC"),
            default_route: true,
            ports: false,
            topology: Topology::Underlay,
            network: Some((1 << 24) - 1),
            addresses: vec![
                "10.244.0.5/32".parse().expect("v4"),
                "2001:db8:1111:2222:3333:4444:5555:6666/128".parse().expect("v6"),
            ],
        }
    }

    #[test]
    fn a_mark_reads_back_and_fits() {
        let mark = mark();
        let alias = mark.alias();
        assert!(alias.len() < owner::ALIAS_MAX, "{} bytes", alias.len());
        assert_eq!(owner::of_alias(&alias).and_then(Mark::parse), Some(mark));
    }

    #[test]
    fn other_aliases_are_no_attachments() {
        for other in ["", "uplink 7", "pod", "pod x", "pod a b c d e f g", "pod s eth0 1 zz - -"] {
            assert_eq!(Mark::parse(other), None, "{other:?}");
        }
    }

    #[test]
    fn names_of_host_ends_follow_from_their_owner() {
        let mark = mark();
        let name = host_name(&mark.sandbox, &mark.interface);
        assert_eq!(name, host_name(&mark.sandbox, &mark.interface));
        assert_ne!(name, host_name(&mark.sandbox, &"net1".parse().expect("a name")));
        assert_eq!(name.as_str().len(), IfName::MAX);
    }
}
