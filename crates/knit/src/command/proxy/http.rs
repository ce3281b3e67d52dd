//! The small HTTP server for metrics, and listening on addresses that may be taken.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// How long to wait before an address that is taken is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Listens. An address that is taken is tried again and again, unless that is to end the program: a proxy works
/// without its servers.
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

/// Answers /metrics, /healthz and /proxyMode, as kube-proxy does beside its metrics.
pub async fn serve_metrics(listener: TcpListener, registry: Arc<Registry>) -> Result<()> {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.context("cannot accept connections for metrics")?;
        while connections.try_join_next().is_some() {}
        let registry = Arc::clone(&registry);
        connections.spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| {
                let reply = reply(request.uri().path(), &registry);
                async move { Ok::<_, Infallible>(reply) }
            });
            // A client that goes away is nothing to report.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn reply(path: &str, registry: &Registry) -> Response<Full<Bytes>> {
    let (code, kind, text) = match path {
        "/metrics" => {
            let mut text = String::new();
            match prometheus_client::encoding::text::encode(&mut text, registry) {
                Ok(()) => {
                    (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", text)
                }
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "text/plain", error.to_string()),
            }
        }
        "/healthz" => (StatusCode::OK, "text/plain", "ok".to_owned()),
        "/proxyMode" => (StatusCode::OK, "text/plain", "nftables".to_owned()),
        _ => (StatusCode::NOT_FOUND, "text/plain", "not found; ask for /metrics\n".to_owned()),
    };
    let mut reply = Response::new(Full::new(Bytes::from(text)));
    *reply.status_mut() = code;
    reply.headers_mut().insert("content-type", hyper::header::HeaderValue::from_static(kind));
    reply
}
