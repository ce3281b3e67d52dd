//! Metrics over HTTP, and listening on addresses that may be taken.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use knit_http::OPEN_RETRY_DELAY;
use knit_proxy::health;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

/// Listens. An address that is taken is tried again and again, unless that is to end the program: a proxy
/// works without its servers.
pub async fn listen(address: SocketAddr, what: &str, hard_fail: bool) -> Result<TcpListener> {
    let open = || std::net::TcpListener::bind(address);
    let listener = knit_http::open_patiently(open, |error| {
        if hard_fail {
            return ControlFlow::Break(());
        }
        tracing::error!(
            "cannot listen on {address} for {what}: {error}; trying again in {OPEN_RETRY_DELAY:?}"
        );
        ControlFlow::Continue(())
    })
    .await
    .with_context(|| format!("cannot listen on {address} for {what}"))?;
    let address = listener.local_addr().unwrap_or(address);
    tracing::info!("{what} on http://{address}");
    Ok(listener)
}

/// Answers /metrics and what kube-proxy has beside them.
pub async fn serve_metrics(listener: TcpListener, mode: &'static str, registry: Arc<Registry>) -> Result<()> {
    let text = move || {
        let mut text = String::new();
        if let Err(error) = prometheus_client::encoding::text::encode(&mut text, &registry) {
            tracing::error!("cannot write metrics: {error}");
        }
        text
    };
    health::serve_metrics(listener, mode, text).await.context("cannot accept connections for metrics")
}
