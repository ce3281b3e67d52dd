//! The nftables backend of [`knit_proxy`]: services as elements of a few maps, over netlink.
//!
//! [`NftBackend`] makes a [`NodeView`](knit_proxy::view::NodeView) true in the kernel of one network
//! namespace. It owns one table of each family (`ip knit-proxy`, `ip6 knit-proxy`) and touches nothing else.
//! There is one map of frontends and one of endpoints for all services, so that a changed endpoint is one
//! element to write, whatever the number of services. At the start it reads what is there and writes the
//! difference, so a restart breaks no connection. [`knit_proxy::start`](mod@knit_proxy::start) runs it on a
//! thread of its own; [`NftBackends`] is what programs are handed that do not know it by name.
//!
//! ```no_run
//! use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
//! use knit_proxy::start::{Options, start};
//! use knit_proxy_nft::{Config, NftBackend};
//!
//! let backend = NftBackend::new(Config::default())?;
//! let running = start(backend, NodeInfo::new("node-a"), Options::default())?;
//! running.handle().set_service(
//!     Service::new("shop/web").cluster_ip("10.96.0.1".parse()?).port(Protocol::Tcp, 80),
//! )?;
//! running.handle().set_group(EndpointGroup::of_addresses(
//!     "shop/web-1", "shop/web", Protocol::Tcp, 8080, &["10.1.0.1".parse()?, "10.1.0.2".parse()?],
//! ))?;
//! running.handle().all_listed()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What it needs: `CAP_NET_ADMIN` in the user namespace that owns the network namespace, and Linux 5.13 or
//! later. Without `CAP_NET_ADMIN` in the first user namespace a transaction may have about 200 KB; larger
//! ones, which only a start with many services makes, go in several, in an order in which no packet finds
//! half a service.
//!
//! `nft list ruleset` shows the tables as they are; it was tried with `nft` 1.0.6. Rules that take a value
//! from one map to another show `meta mark` where that value stands: it goes through the packet's mark, which
//! is put back in the same rule, so that a mark that somebody else set stays.
//!
//! Where pods are on a bridge (Layer2), replies between two of them do not pass the router, unless bridged
//! packets are shown to nftables: set `net.bridge.bridge-nf-call-iptables` (and `-ip6tables`) to 1 in the
//! router's namespace, and hairpin on the pods' ports.

mod backend;
mod backends;
mod behaviour;
mod conntrack;
mod families;
mod ip;
mod kube_proxy;
mod layout;
mod limits;
mod ports;
mod sticky;
mod table;

pub use backend::{Config, NftBackend, OpenError, remove_table};
pub use backends::NftBackends;
pub use families::kernel_families;
pub use kube_proxy::{KubeProxy, LookError};
pub use limits::{Limits, RefusedLimits, cores};
