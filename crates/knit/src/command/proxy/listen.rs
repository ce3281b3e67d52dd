//! Listening on an address that may be taken.

use std::net::SocketAddr;
use std::ops::ControlFlow;

use anyhow::{Context as _, Result};
use knit_http::OPEN_RETRY_DELAY;
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
