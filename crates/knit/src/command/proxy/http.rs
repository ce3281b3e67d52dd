//! Metrics over HTTP, and listening on addresses that may be taken.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use knit_proxy::health;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

/// How long to wait before an address that is taken is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Listens. An address that is taken is tried again and again, unless that is to end the program: a proxy
/// works without its servers.
pub async fn listen(address: SocketAddr, what: &str, hard_fail: bool) -> Result<TcpListener> {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => {
                let address = listener.local_addr().unwrap_or(address);
                tracing::info!("{what} on http://{address}");
                return Ok(listener);
            }
            Err(error) if hard_fail => {
                return Err(error).with_context(|| format!("cannot listen on {address} for {what}"));
            }
            Err(error) => {
                tracing::error!("cannot listen on {address} for {what}: {error}; trying again in {RETRY:?}");
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Answers /metrics and what kube-proxy has beside them.
pub async fn serve_metrics(listener: TcpListener, mode: &'static str, registry: Arc<Registry>) -> Result<()> {
    let text = move || {
        let mut text = String::new();
        if let Err(error) = prometheus_client::encoding::text::encode(&mut text, &registry) {
            tracing::error!("metrics cannot be written: {error}");
        }
        text
    };
    health::serve_metrics(listener, mode, text).await.context("cannot accept connections for metrics")
}
