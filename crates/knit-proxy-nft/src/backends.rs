//! What this crate offers to programs and agents that do not know it by name.

use knit_kernel::NetNs;
use knit_kernel::nft::Kernel;
use knit_nft::Nftables;
use knit_proxy::backend::Backend;
use knit_proxy::backends::{BackendSetup, Backends, Namespace, OpenError};

use crate::backend::{Config, NftBackend, remove_table};
use crate::kube_proxy::KubeProxy;
use crate::limits::{Limits, RefusedLimits};

/// Backends over nftables.
#[derive(Debug, Clone, Copy, Default)]
pub struct NftBackends;

impl Backends for NftBackends {
    fn name(&self) -> &'static str {
        "nftables"
    }

    fn open(&self, setup: BackendSetup<'_>) -> Result<Box<dyn Backend + Send>, OpenError> {
        let config = Config {
            masquerade_bit: setup.masquerade_mark,
            masquerade_as: setup.masquerade_as,
            node_sources: setup.node_sources,
            routers: setup.routers,
            keeps_own_addresses: setup.keeps_own_addresses,
            ..config_of(setup.proxy_name)
        };
        let opened = NftBackend::new_in(&namespace(setup.namespace)?, config);
        let attempted = "cannot program nftables; run as root, or with CAP_NET_ADMIN";
        let mut backend = opened.map_err(|error| OpenError::new(attempted, error))?;
        if let Some(told) = setup.on_clean {
            backend = backend.on_clean(told);
        }
        if let Some(told) = setup.on_repair {
            backend = backend.on_repair(told);
        }
        Ok(Box::new(backend))
    }

    fn is_left_over(&self, at: Namespace<'_>) -> Result<bool, OpenError> {
        let table = config_of(None).table;
        let found = nftables(at)?.tables();
        let found = found.map_err(|error| OpenError::new("cannot look for our own tables", error))?;
        Ok(found.iter().any(|id| *id.name == *table))
    }

    fn remove(&self, at: Namespace<'_>) -> Result<bool, OpenError> {
        let table = config_of(None).table;
        let removed = remove_table(&mut nftables(at)?, &table);
        removed.map_err(|error| OpenError::new(format!("cannot remove the nftables tables {table}"), error))
    }

    fn others_at_work(&self, at: Namespace<'_>) -> Result<Option<String>, OpenError> {
        let found = KubeProxy::look_in(&namespace(at)?);
        let found =
            found.map_err(|error| OpenError::new("cannot determine whether kube-proxy is active", error))?;
        Ok((!found.is_empty()).then(|| format!("kube-proxy ({found})")))
    }

    fn limits(&self, shared: bool) -> Option<Box<dyn knit_proxy::backends::Limits>> {
        let limits = Limits::default();
        let limits = if shared { limits.of_router() } else { limits };
        Some(Box::new(ConnectionTable { limits, refused: RefusedLimits::default() }))
    }
}

/// The kernel's connection table.
#[derive(Debug)]
struct ConnectionTable {
    limits: Limits,
    /// What the kernel does not let us set.
    refused: RefusedLimits,
}

impl knit_proxy::backends::Limits for ConnectionTable {
    fn keep(&mut self, at: Namespace<'_>) -> usize {
        match namespace(at) {
            Ok(namespace) => self.limits.keep(&namespace, &mut self.refused),
            // The next look at the namespace says what is wrong with it.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::debug!(error, "cannot inspect the limits of a connection table");
                0
            }
        }
    }
}

fn config_of(proxy_name: Option<&str>) -> Config {
    proxy_name.map_or_else(Config::default, Config::named)
}

fn namespace(at: Namespace<'_>) -> Result<NetNs, OpenError> {
    let attempted = "cannot open the network namespace";
    match at {
        Some(fd) => {
            let fd = fd.try_clone_to_owned().map_err(|error| OpenError::new(attempted, error))?;
            NetNs::from_fd(fd).map_err(|error| OpenError::new(attempted, error))
        }
        None => NetNs::current().map_err(|error| OpenError::new(attempted, error)),
    }
}

fn nftables(at: Namespace<'_>) -> Result<Kernel, OpenError> {
    Kernel::open_in(&namespace(at)?).map_err(|error| OpenError::new("cannot open nftables", error))
}
