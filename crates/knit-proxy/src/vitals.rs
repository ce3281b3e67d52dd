//! What a running proxy says of itself, put together once: its health, what it counts, and the servers that
//! answer for both as kube-proxy's do. A program that is a proxy uses it, and so does an agent that runs one
//! in each router.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use knit_http::{OPEN_RETRY_DELAY, open_patiently};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::backends::{Cleaned, OnClean};
use crate::engine::Observer;
use crate::health::{self, CheckPlaces, Health, is_no_family, serve_checks_at, serve_metrics, serve_proxy};
use crate::metrics::Metrics;
use crate::model::ServiceName;

/// The health of one proxy, and what it counts; clones share both.
#[derive(Clone, Debug)]
pub struct Vitals {
    health: Health,
    metrics: Metrics,
}

/// What is answered over HTTP, and where.
#[derive(Clone)]
pub struct Servers {
    /// Where /healthz and /livez are; nowhere if there is none.
    pub healthz: Option<SocketAddr>,
    /// Where /metrics and /proxyMode are; nowhere if there is none.
    pub metrics: Option<SocketAddr>,
    /// What /proxyMode answers: the backend's name.
    pub mode: &'static str,
    /// The text of /metrics.
    pub text: Arc<dyn Fn() -> String + Send + Sync>,
    /// The addresses of health check node ports; none if nothing is served there.
    pub checks: Option<Checks>,
    /// Opens a port for one family, as [`health::bind`] does, maybe in another network namespace.
    pub bind: Bind,
    /// An address that is taken ends the servers. Otherwise it is tried again: a proxy works without them.
    pub hard_fail: bool,
    /// Is told how they stand.
    pub tell: Arc<dyn Fn(&ServerNews<'_>) + Send + Sync>,
}

/// Opens a port for one family.
pub type Bind = Arc<dyn Fn(SocketAddr) -> io::Result<std::net::TcpListener> + Send + Sync>;

/// Which addresses health check node ports are on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Checks {
    /// Those of node ports.
    OnNodePorts,
    /// These.
    On(Vec<IpAddr>),
}

/// How a server stands.
#[derive(Debug)]
pub enum ServerNews<'a> {
    /// It answers here.
    Listening {
        /// What is answered: `healthz` or `metrics`.
        what: &'static str,
        /// Where.
        at: SocketAddr,
    },
    /// It cannot listen; it is tried again.
    Unavailable {
        /// What would be answered.
        what: &'static str,
        /// Where.
        at: SocketAddr,
        /// Whether this was said before.
        again: bool,
        /// Why.
        error: &'a io::Error,
    },
    /// A health check node port cannot be opened; it is tried again, and this is said once.
    NoCheck {
        /// Whose.
        service: &'a ServiceName,
        /// Where.
        at: SocketAddr,
        /// Why.
        error: &'a io::Error,
    },
}

/// A server that cannot listen where it has to.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {at} for {what}")]
pub struct ServerError {
    /// What would be answered.
    pub what: &'static str,
    /// Where.
    pub at: SocketAddr,
    /// Why.
    #[source]
    pub source: io::Error,
}

impl Vitals {
    /// Of a new proxy, with what it counts in this registry. A change that waits for longer than this makes
    /// the proxy unwell (rule 55).
    pub fn register(registry: &mut Registry, unhealthy_after: Duration) -> Self {
        Self { health: Health::new(unhealthy_after), metrics: Metrics::register(registry) }
    }

    /// What tells them of an engine's work.
    #[must_use]
    pub fn observers(&self) -> Vec<Box<dyn Observer + Send>> {
        vec![self.health.observer(), self.metrics.observer()]
    }

    /// What a backend tells of each look at stale flows.
    #[must_use]
    pub fn on_clean(&self) -> OnClean {
        let metrics = self.metrics.clone();
        Box::new(move |cleaned: Cleaned| {
            metrics.cleaned(cleaned.family, cleaned.took, cleaned.deleted, cleaned.complete);
        })
    }

    /// Starts the servers, which end when the set is dropped. Without [`Servers::hard_fail`] they do not end
    /// by themselves.
    #[must_use]
    pub fn serve(&self, servers: &Servers) -> JoinSet<Result<(), ServerError>> {
        let mut tasks = JoinSet::new();
        for at in servers.healthz.into_iter().flat_map(both_families) {
            let (health, metrics) = (self.health.clone(), self.metrics.clone());
            tasks.spawn(serve_at(servers.clone(), "healthz", at, move |listener| {
                let metrics = metrics.clone();
                serve_proxy(listener, health.clone(), move |probe| metrics.probed(probe))
            }));
        }
        for at in servers.metrics.into_iter().flat_map(both_families) {
            let (mode, text) = (servers.mode, Arc::clone(&servers.text));
            tasks.spawn(serve_at(servers.clone(), "metrics", at, move |listener| {
                let text = Arc::clone(&text);
                serve_metrics(listener, mode, move || text())
            }));
        }
        if let Some(checks) = servers.checks.clone() {
            let (health, bind, tell) =
                (self.health.clone(), Arc::clone(&servers.bind), Arc::clone(&servers.tell));
            tasks.spawn(async move {
                serve_health_checks(health, checks, bind, &*tell).await;
                Ok(())
            });
        }
        tasks
    }
}

/// Answers on health check node ports for a proxy that runs elsewhere or not at all, until it is dropped.
pub async fn serve_health_checks(
    health: Health,
    checks: Checks,
    bind: Bind,
    tell: &(dyn Fn(&ServerNews<'_>) + Send + Sync),
) {
    let addresses = match checks {
        Checks::OnNodePorts => None,
        Checks::On(addresses) => Some(addresses),
    };
    let places = CheckPlaces { addresses, bind: Box::new(move |at| bind(at)) };
    let failed = |service: &ServiceName, at: SocketAddr, error: &io::Error| {
        tell(&ServerNews::NoCheck { service, at, error });
    };
    serve_checks_at(health, places, failed).await;
}

/// A socket is of one family. The IPv6 wildcard stands for both: without IPv6, IPv4 is there all the same.
fn both_families(at: SocketAddr) -> Vec<SocketAddr> {
    let v4 = (at.ip() == Ipv6Addr::UNSPECIFIED).then(|| (Ipv4Addr::UNSPECIFIED, at.port()).into());
    v4.into_iter().chain([at]).collect()
}

/// Serves on a port; tries again while somebody else has it.
async fn serve_at<S: Future<Output = io::Result<()>>>(
    servers: Servers,
    what: &'static str,
    at: SocketAddr,
    serve: impl Fn(TcpListener) -> S,
) -> Result<(), ServerError> {
    let Servers { bind, hard_fail, tell, .. } = servers;
    let mut told = false;
    let mut unavailable = |error: &io::Error| {
        tell(&ServerNews::Unavailable { what, at, again: std::mem::replace(&mut told, true), error });
    };
    loop {
        let opened = open_patiently(
            || bind(at),
            |error| {
                // A family that the kernel does not have will not come by waiting.
                if hard_fail || is_no_family(error) {
                    return ControlFlow::Break(());
                }
                unavailable(error);
                ControlFlow::Continue(())
            },
        );
        let listener = match opened.await {
            Ok(listener) => listener,
            Err(error) if is_no_family(&error) && !hard_fail => return Ok(()),
            Err(source) => return Err(ServerError { what, at, source }),
        };
        tell(&ServerNews::Listening { what, at: listener.local_addr().unwrap_or(at) });
        if let Err(source) = serve(listener).await {
            if hard_fail {
                return Err(ServerError { what, at, source });
            }
            unavailable(&source);
        }
        tokio::time::sleep(OPEN_RETRY_DELAY).await;
    }
}

impl Default for Servers {
    /// None, on this thread's network namespace.
    fn default() -> Self {
        Self {
            healthz: None,
            metrics: None,
            mode: "",
            text: Arc::new(String::new),
            checks: None,
            bind: Arc::new(health::bind),
            hard_fail: false,
            tell: Arc::new(|_| ()),
        }
    }
}

impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Servers")
            .field("healthz", &self.healthz)
            .field("metrics", &self.metrics)
            .field("checks", &self.checks)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for ServerNews<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listening { what, at } => write!(f, "{what} on http://{at}"),
            Self::Unavailable { what, at, error, .. } => {
                write!(f, "cannot listen on {at} for {what}: {error}; trying again in {OPEN_RETRY_DELAY:?}")
            }
            Self::NoCheck { service, at, error } => {
                write!(f, "Service {service}: spec.healthCheckNodePort: cannot listen on {at}: {error}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn servers(at: SocketAddr, news: &Arc<Mutex<Vec<String>>>) -> Servers {
        let news = Arc::clone(news);
        Servers {
            metrics: Some(at),
            tell: Arc::new(move |said| news.lock().expect("nobody panicked").push(said.to_string())),
            ..Servers::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_taken_address_is_tried_again_unless_it_is_to_end_the_servers() {
        let taken = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let at = taken.local_addr().expect("an address");
        let vitals = Vitals::register(&mut Registry::default(), Duration::from_secs(60));
        let news = Arc::default();
        let hard = Servers { hard_fail: true, ..servers(at, &news) };
        let ended = vitals.serve(&hard).join_next().await.expect("it ends").expect("it does not panic");
        assert!(ended.is_err_and(|error| error.at == at && error.what == "metrics"));
        let mut patient = vitals.serve(&servers(at, &news));
        tokio::time::sleep(OPEN_RETRY_DELAY * 3).await;
        assert!(patient.try_join_next().is_none(), "it still tries");
        drop(taken);
        tokio::time::sleep(OPEN_RETRY_DELAY * 2).await;
        let said = news.lock().expect("nobody panicked").clone();
        assert!(said[0].starts_with(&format!("cannot listen on {at} for metrics: ")), "{said:?}");
        assert_eq!(said.last(), Some(&format!("metrics on http://{at}")));
    }

    #[test]
    fn the_wildcard_of_ipv6_is_that_of_both_families() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert_eq!(both_families(at("[::]:10256")), [at("0.0.0.0:10256"), at("[::]:10256")]);
        assert_eq!(both_families(at("[::1]:10256")), [at("[::1]:10256")]);
        assert_eq!(both_families(at("0.0.0.0:10256")), [at("0.0.0.0:10256")]);
    }
}
