//! A proxy on a thread of its own, for one network namespace and one Network.

use std::net::{Ipv6Addr, UdpSocket};
use std::thread::JoinHandle;

use knit_kernel::NetNs;
use knit_proxy::backend::Backend as _;
use knit_proxy::engine::{Engine, EngineConfig, Inspect, Observer, run};
use knit_proxy::model::{NodeInfo, PerFamily};
use knit_proxy::source::{Handle, Stopped, handle};
use knit_proxy::view::PortKey;

use crate::backend::{Config, NftBackend, OnClean, OnRepair, OpenError};

/// The settings of a proxy that [`start`] runs.
#[derive(Default)]
pub struct Options {
    /// View, pace, and what to wait for. `engine.view.network` says whose services are served: what a source sends of
    /// other Networks is left alone.
    pub engine: EngineConfig,
    /// The backend.
    pub nft: Config,
    /// Is told what the engine does.
    pub observer: Option<Box<dyn Observer + Send>>,
    /// Is told of each look at stale flows.
    pub on_clean: Option<OnClean>,
    /// Is told of each table that somebody else had changed, when it is as it should be again.
    pub on_repair: Option<OnRepair>,
}

/// A proxy that runs. Dropping it stops the thread; what it made in the kernel stays, and so do connections.
#[derive(Debug)]
pub struct Running {
    handle: HandleOf,
    thread: Option<JoinHandle<()>>,
}

/// Like [`Handle`], with a word to print.
struct HandleOf(Handle);

/// A proxy that did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The backend could not be opened.
    #[error("cannot open the nftables backend")]
    Backend(#[source] OpenError),
    /// There is no thread for it.
    #[error("cannot start the service proxy's thread")]
    Thread(#[source] std::io::Error),
}

/// How a running proxy stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// All lists that it waits for were there.
    pub ready: bool,
    /// How many service ports it serves.
    pub ports: usize,
    /// Service ports that could not be made true, and why.
    pub failed: Vec<(PortKey, String)>,
    /// Why the last attempt failed altogether, if it did.
    pub broken: Option<String>,
}

/// Starts a proxy in a network namespace (none: the calling thread's), and returns at once.
///
/// Feed it through [`Running::handle`]. It programs nothing before all lists that
/// [`wait_for`](EngineConfig::wait_for) names are complete. There may be any number of them in one process, one for each
/// router; `options.engine.view.network` and `exempt_vips` tell them apart.
///
/// # Errors
/// If nftables or connection tracking of that namespace cannot be reached.
pub fn start(netns: Option<&NetNs>, node: NodeInfo, options: Options) -> Result<Running, StartError> {
    let Options { mut engine, nft, observer, on_clean, on_repair } = options;
    engine.view.families.v6 &= kernel_families().v6;
    let backend = match netns {
        Some(netns) => NftBackend::new_in(netns, nft),
        None => NftBackend::new(nft),
    };
    let mut backend = backend.map_err(StartError::Backend)?;
    if let Some(told) = on_clean {
        backend = backend.on_clean(told);
    }
    if let Some(told) = on_repair {
        backend = backend.on_repair(told);
    }
    // The backend's sockets belong to the namespace; the thread may run in any.
    let (handle, inbox) = handle();
    let touched = handle.clone();
    backend.watch(Box::new(move || {
        // One that has stopped has nothing to look at.
        let _ = touched.look_again();
    }));
    let mut engine = Engine::new(engine, node, backend);
    if let Some(observer) = observer {
        engine = engine.observed_by(observer);
    }
    let thread = std::thread::Builder::new().name("service-proxy".to_owned()).spawn(move || {
        let _ = run(engine, &inbox);
    });
    let thread = thread.map_err(StartError::Thread)?;
    Ok(Running { handle: HandleOf(handle), thread: Some(thread) })
}

/// The families that this kernel has. One without IPv6 (`ipv6.disable=1`, or built without it) refuses all of it for ever.
#[must_use]
pub fn kernel_families() -> PerFamily<bool> {
    let opened = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
    PerFamily { v4: true, v6: opened.err().is_none_or(|error| !is_no_family(&error)) }
}

/// Whether the kernel does not know the family, as opposed to being short of something.
fn is_no_family(error: &std::io::Error) -> bool {
    /// Linux' number; the standard library has no name for it.
    const EAFNOSUPPORT: i32 = 97;
    error.raw_os_error() == Some(EAFNOSUPPORT)
}

impl Running {
    /// To send it events; may be cloned.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle.0
    }

    /// Looks into it, after all events sent so far.
    ///
    /// # Errors
    /// If it has stopped.
    pub fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(Inspect<'_>) -> T + Send + 'static,
    ) -> Result<T, Stopped> {
        self.handle.0.inspect(look)
    }

    /// How it stands.
    ///
    /// # Errors
    /// If it has stopped.
    pub fn status(&self) -> Result<Summary, Stopped> {
        self.inspect(|engine| Summary {
            ready: engine.ready,
            ports: engine.view.current().ports.len(),
            failed: engine.failed().map(|(key, why)| (key.clone(), why.to_owned())).collect(),
            broken: engine.broken().map(str::to_owned),
        })
    }

    /// Stops it and waits until its thread is gone. What it made stays.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.handle.0.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the service proxy's thread panicked");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for HandleOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_18_a_kernel_without_ipv6_is_told_from_one_that_is_short_of_something() {
        assert!(is_no_family(&std::io::Error::from_raw_os_error(97)));
        for errno in [13, 23, 24, 98, 99] {
            assert!(!is_no_family(&std::io::Error::from_raw_os_error(errno)), "{errno}");
        }
        assert!(kernel_families().v4);
    }
}
