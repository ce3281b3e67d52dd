//! What the agent says of itself over HTTP: health, readiness and numbers.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;

use knit_http::{Answer, Cached, Guests, Limits};
use tokio::net::TcpListener;

use crate::core::Core;
use crate::proxy::Stopped;

/// The open port.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
}

// === impl HttpServer ===

impl HttpServer {
    /// Opens the port.
    ///
    /// # Errors
    /// When the address cannot be used.
    pub async fn open(address: SocketAddr) -> std::io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await? })
    }

    /// Opens the port as soon as an interface has the address, and serves as [`serve`](Self::serve) does.
    pub async fn serve_once_there(address: SocketAddr, core: Core) {
        let open = || std::net::TcpListener::bind(address);
        let opened = knit_http::open_patiently(open, |error| {
            tracing::debug!(%address, %error, "the port for health and metrics is not open yet");
            ControlFlow::Continue(())
        });
        if let Ok(listener) = opened.await {
            Self { listener }.serve(core).await;
        }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves what an agent says of itself, forever.
    pub async fn serve(self, core: Core) {
        let refused = core.metrics().refused_connections();
        let guests = Guests::new(Limits::PROBES, move || _ = refused.inc());
        let numbers = Arc::new(Cached::default());
        let answer = knit_http::only_get_later(move |path| {
            let (path, core, numbers) = (path.to_owned(), core.clone(), Arc::clone(&numbers));
            Box::pin(async move {
                match path.as_str() {
                    // What ended because of a bug comes back with a new start of the agent.
                    "/healthz" => match ended(&core) {
                        None => Answer::ok("ok\n"),
                        Some(stopped) => Answer::unavailable(format!("{}\n", stopped.why)),
                    },
                    "/readyz" => {
                        core.assess();
                        match core.readiness().now() {
                            Ok(()) => Answer::ok(ready(&core)),
                            Err(problem) => Answer::unavailable(format!("{problem}\n")),
                        }
                    }
                    "/metrics" => Answer::metrics(numbers.get(|| core.scrape()).await),
                    _ => Answer::not_found("not found; available: /healthz, /readyz and /metrics\n"),
                }
            })
        });
        let error = knit_http::serve(self.listener, Arc::new(guests), answer).await;
        tracing::error!(%error, "health and metrics are no longer served: restart the agent");
    }
}

/// What has ended, and is likely to run again after a new start.
fn ended(core: &Core) -> Option<Stopped> {
    let ended = [core.services_stopped(), core.policies_stopped()];
    ended.into_iter().flatten().find(|stopped| stopped.ran)
}

/// "ok", and what people should know of the Services of each Network.
fn ready(core: &Core) -> String {
    let states = core.networks().states().into_iter();
    let notes = states.filter_map(|s| Some(format!("Network {}: {}\n", s.name, s.services?.message()?)));
    std::iter::once("ok\n".to_owned()).chain(notes).collect()
}
