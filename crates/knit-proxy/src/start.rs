//! A whole proxy on a thread of its own: a backend, its engine and those who watch it, put together in one
//! place.

use std::fmt;
use std::thread::JoinHandle;

use crate::backend::Backend;
use crate::engine::{Engine, EngineConfig, Inspect, Observer, run};
use crate::model::{NodeInfo, PerFamily};
use crate::source::{Handle, Stopped, handle};
use crate::view::PortKey;

/// The settings of a proxy that [`start`] runs.
#[derive(Default)]
pub struct Options {
    /// View, pace, and what to wait for. `engine.view.network` says whose services are served: what a source
    /// sends of other Networks is left alone. Families that the backend does not have are left out.
    pub engine: EngineConfig,
    /// Are told what the engine does: health, metrics, a log.
    pub observers: Vec<Box<dyn Observer + Send>>,
    /// Is called when the thread ends; dropped without a call if it panics.
    pub on_end: Option<Box<dyn FnOnce() + Send>>,
}

/// A proxy that runs. Dropping it stops the thread; what its backend made stays, and so do connections.
pub struct Running {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
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

/// Starts a proxy, and returns at once.
///
/// Feed it through [`Running::handle`]. It programs nothing before all lists that
/// [`wait_for`](EngineConfig::wait_for) names are complete. There may be any number of them in one process,
/// such as one for each network namespace; `engine.view.network` and `exempt_vips` tell them apart.
///
/// ```
/// use knit_proxy::backend::{Backend, Outcome};
/// use knit_proxy::model::{NodeInfo, Protocol, Service};
/// use knit_proxy::start::{Options, start};
/// use knit_proxy::view::NodeView;
///
/// struct Nothing;
///
/// impl Backend for Nothing {
///     fn sync(&mut self, _: &NodeView) -> Outcome {
///         Outcome::Done
///     }
/// }
///
/// let running = start(Nothing, NodeInfo::new("node-a"), Options::default())?;
/// running.handle().set_service(
///     Service::new("shop/web").cluster_ip("10.96.0.1".parse()?).port(Protocol::Tcp, 80),
/// )?;
/// running.handle().all_listed()?;
/// assert!(running.status()?.ready);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If there is no thread for it.
pub fn start(
    mut backend: impl Backend + Send + 'static,
    node: NodeInfo,
    options: Options,
) -> std::io::Result<Running> {
    let Options { mut engine, observers, on_end } = options;
    let (has, asked) = (backend.families(), engine.view.families);
    engine.view.families = PerFamily::from_fn(|family| *has.get(family) && *asked.get(family));
    let (handle, inbox) = handle();
    let touched = handle.clone();
    backend.watch(Box::new(move || {
        // One that has stopped has nothing to look at.
        let _ = touched.look_again();
    }));
    let engine = Engine::new(engine, node, backend).observed_by(Box::new(observers));
    let thread = std::thread::Builder::new().name("service-proxy".to_owned()).spawn(move || {
        let _ = run(engine, &inbox);
        on_end.into_iter().for_each(|told| told());
    })?;
    Ok(Running { handle, thread: Some(thread) })
}

impl Running {
    /// To send it events; may be cloned.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Looks into it, after all events sent so far.
    ///
    /// # Errors
    /// If it has stopped.
    pub fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(Inspect<'_>) -> T + Send + 'static,
    ) -> Result<T, Stopped> {
        self.handle.inspect(look)
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

    /// Stops it and waits until its thread is gone. What it made stays. Says whether it ended well: if not,
    /// the thread panicked, and the reason was printed.
    pub fn stop(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        self.handle.stop();
        self.thread.take().is_none_or(|thread| thread.join().is_ok())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").finish_non_exhaustive()
    }
}
