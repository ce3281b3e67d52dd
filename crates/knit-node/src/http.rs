//! Health and numbers over HTTP: `/healthz`, `/readyz`, `/metrics`. Nothing else, and nothing that changes anything.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::core::Core;

/// The open port.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
}

/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(5);

// === impl HttpServer ===

impl HttpServer {
    /// Opens the port.
    ///
    /// # Errors
    /// When the address cannot be used.
    pub async fn open(address: SocketAddr) -> std::io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await? })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves for ever.
    pub async fn serve(self, core: Core) {
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::debug!(%error, "a client cannot be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let core = core.clone();
            tokio::spawn(async move {
                let service = service_fn(|request| {
                    let response = answer(&request, &core);
                    async move { Ok::<_, Infallible>(response) }
                });
                let mut server = http1::Builder::new();
                server.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(16 << 10);
                if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
                    tracing::debug!(%error, "a client was not served");
                }
            });
        }
    }
}

fn answer(request: &Request<Incoming>, core: &Core) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned());
    }
    match request.uri().path() {
        "/healthz" => text(StatusCode::OK, "ok\n".to_owned()),
        "/readyz" => match core.readiness().now() {
            Ok(()) => text(StatusCode::OK, ready(core)),
            Err(problem) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")),
        },
        "/metrics" => {
            let mut response = text(StatusCode::OK, core.metrics_text());
            let form = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(form));
            response
        }
        _ => text(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n".to_owned()),
    }
}

/// "ok", and what people should know of the Services of each Network.
fn ready(core: &Core) -> String {
    let states = core.networks().states().into_iter();
    let notes = states.filter_map(|s| Some(format!("Network {}: {}\n", s.name, s.services?.message()?)));
    std::iter::once("ok\n".to_owned()).chain(notes).collect()
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response
}
