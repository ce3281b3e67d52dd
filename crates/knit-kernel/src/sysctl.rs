//! Sysctls of a namespace.
//!
//! `/proc/sys/net` shows the namespace of the thread that looks, so reading and writing happen on a thread
//! inside it.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::name::IfName;
use crate::netns::NetNs;

/// The name of a sysctl below `net`, with slashes, because link names may contain dots.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sysctl(String);

/// Which links a setting is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// The namespace as a whole.
    All,
    /// Links that will be made.
    Default,
    /// One link.
    Link(&'a IfName),
}

impl fmt::Display for Scope<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Default => f.write_str("default"),
            Self::Link(name) => name.fmt(f),
        }
    }
}

impl Sysctl {
    /// Any sysctl of the network, as in `net/ipv4/ip_local_port_range`.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let parts: Vec<_> = name.split('/').collect();
        let strange = |part: &&str| part.is_empty() || *part == "." || *part == ".." || part.contains('\0');
        if parts.len() < 2 || parts[0] != "net" || parts.iter().any(strange) {
            let problem = "it is not a path below net";
            return Err(Error::invalid(
                format!("sysctl {name:?}"),
                problem,
                "write it as in net/ipv4/ip_forward",
            ));
        }
        Ok(Self(name))
    }

    /// Whether IPv4 packets are forwarded.
    pub fn ipv4_forwarding() -> Self {
        Self("net/ipv4/ip_forward".into())
    }

    /// Whether IPv6 packets are forwarded.
    pub fn ipv6_forwarding() -> Self {
        Self("net/ipv6/conf/all/forwarding".into())
    }

    /// Whether IPv6 is off.
    pub fn ipv6_disabled(scope: Scope<'_>) -> Self {
        Self(format!("net/ipv6/conf/{scope}/disable_ipv6"))
    }

    /// Whether router advertisements are accepted: 2 is "also while forwarding".
    pub fn accept_ra(scope: Scope<'_>) -> Self {
        Self(format!("net/ipv6/conf/{scope}/accept_ra"))
    }

    /// Whether IPv6 addresses are first checked to be unique.
    pub fn accept_dad(scope: Scope<'_>) -> Self {
        Self(format!("net/ipv6/conf/{scope}/accept_dad"))
    }

    /// Whether packets are dropped whose source is not reachable by the link that they came by: 0 no, 1
    /// strict, 2 loose. The larger of `all` and the link's counts.
    pub fn rp_filter(scope: Scope<'_>) -> Self {
        Self(format!("net/ipv4/conf/{scope}/rp_filter"))
    }

    /// Whether packets to 127.0.0.0/8 may be routed.
    pub fn route_localnet(scope: Scope<'_>) -> Self {
        Self(format!("net/ipv4/conf/{scope}/route_localnet"))
    }

    /// Whether bridged IPv4 packets pass the IP hooks of netfilter. Per namespace; the kernel may lack it.
    pub fn bridge_nf_call_iptables() -> Self {
        Self("net/bridge/bridge-nf-call-iptables".into())
    }

    /// Whether bridged IPv6 packets pass the IP hooks of netfilter. Per namespace; the kernel may lack it.
    pub fn bridge_nf_call_ip6tables() -> Self {
        Self("net/bridge/bridge-nf-call-ip6tables".into())
    }

    fn path(&self) -> PathBuf {
        PathBuf::from("/proc/sys").join(&self.0)
    }
}

impl fmt::Display for Sysctl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The sysctls of one namespace.
#[derive(Debug)]
pub struct Sysctls {
    namespace: NetNs,
}

impl Sysctls {
    /// Those of `namespace`.
    pub fn of(namespace: &NetNs) -> Result<Self> {
        Ok(Self { namespace: namespace.try_clone()? })
    }

    /// Reads one, without the newline at its end.
    pub fn get(&self, name: &Sysctl) -> Result<String> {
        let path = name.path();
        let read = self.namespace.visit(|| {
            let mut text = String::new();
            File::open(path)?.read_to_string(&mut text).map(|_| text.trim_end().to_owned())
        })?;
        read.map_err(|source| self.failed(format!("read sysctl {name}"), source))
    }

    /// Reads several in one visit; each may fail by itself.
    pub fn get_all(&self, names: &[Sysctl]) -> Result<Vec<Result<String>>> {
        let read = |name: &Sysctl| {
            let mut text = String::new();
            File::open(name.path())?.read_to_string(&mut text).map(|_| text.trim_end().to_owned())
        };
        let all: Vec<std::io::Result<String>> = self.namespace.visit(|| names.iter().map(read).collect())?;
        let named = all.into_iter().zip(names);
        Ok(named
            .map(|(read, name)| read.map_err(|e| self.failed(format!("read sysctl {name}"), e)))
            .collect())
    }

    /// Writes one.
    pub fn set(&self, name: &Sysctl, value: impl fmt::Display) -> Result<()> {
        self.set_all(&[(name.clone(), value.to_string())])
    }

    /// Writes several in one visit, in order; stops at the first that is refused and names it.
    pub fn set_all(&self, values: &[(Sysctl, String)]) -> Result<()> {
        let written = self.namespace.visit(|| {
            for (place, (name, value)) in values.iter().enumerate() {
                // One write: the kernel takes each for a whole value.
                let open = OpenOptions::new().write(true).open(name.path());
                let write = open.and_then(|mut file| file.write_all(value.as_bytes()));
                write.map_err(|source| (place, source))?;
            }
            Ok(())
        })?;
        written.map_err(|(place, source)| {
            let (name, value) = &values[place];
            self.failed(format!("set sysctl {name} to {value}"), source)
        })
    }

    fn failed(&self, attempted: String, source: std::io::Error) -> Error {
        Error::Sysctl { attempted, namespace: self.namespace.to_string(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_network_are_taken() {
        assert!(Sysctl::new("net/ipv4/ip_forward").is_ok());
        for bad in [
            "kernel/hostname",
            "net",
            "net/../kernel/hostname",
            "/net/ipv4/x",
            "net//x",
            "net.ipv4.ip_forward",
        ] {
            assert!(matches!(Sysctl::new(bad), Err(Error::Invalid { .. })), "{bad}");
        }
        let name = IfName::new("eth0.1").expect("legal");
        assert_eq!(Sysctl::rp_filter(Scope::Link(&name)).to_string(), "net/ipv4/conf/eth0.1/rp_filter");
    }
}
