//! A small HTTP server for health and numbers: answers GET, changes nothing.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

/// What is said about one path.
#[derive(Clone, Debug)]
pub struct Answer {
    code: StatusCode,
    kind: &'static str,
    body: String,
}

/// How long a client may take to send its request.
const PATIENCE: Duration = Duration::from_secs(5);

impl Answer {
    pub fn ok(body: impl Into<String>) -> Self {
        Self { code: StatusCode::OK, kind: "text/plain; charset=utf-8", body: body.into() }
    }

    pub fn unavailable(body: impl Into<String>) -> Self {
        Self { code: StatusCode::SERVICE_UNAVAILABLE, ..Self::ok(body) }
    }

    pub fn not_found(body: impl Into<String>) -> Self {
        Self { code: StatusCode::NOT_FOUND, ..Self::ok(body) }
    }

    /// Metrics, as OpenMetrics text.
    pub fn metrics(body: String) -> Self {
        Self { kind: "application/openmetrics-text; version=1.0.0; charset=utf-8", ..Self::ok(body) }
    }

    #[cfg(test)]
    pub fn body(&self) -> &str {
        &self.body
    }

    #[cfg(test)]
    pub fn is_ok(&self) -> bool {
        self.code == StatusCode::OK
    }

    fn response(self) -> Response<Full<Bytes>> {
        let mut response = Response::new(Full::new(Bytes::from(self.body)));
        *response.status_mut() = self.code;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(self.kind));
        response
    }
}

/// Reads where to listen: an address and a port, or only a port for all addresses.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let all = if std::net::TcpListener::bind("[::]:0").is_ok() { "[::]" } else { "0.0.0.0" };
    let whole = if text.starts_with(':') { format!("{all}{text}") } else { text.to_owned() };
    whole.parse().map_err(|_| {
        format!("{text:?} is no address to listen on: write one such as 127.0.0.1:9469 or :9469")
    })
}

/// Opens the port.
pub async fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        format!("the address {address} for health and metrics cannot be used: free it, or give another")
    })
}

/// Serves for ever.
pub async fn serve(listener: TcpListener, answer: impl Fn(&str) -> Answer + Send + Sync + 'static) {
    let answer = Arc::new(answer);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a client cannot be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let answer = Arc::clone(&answer);
        tokio::spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let get = matches!(*request.method(), Method::GET | Method::HEAD);
                let answer = if get {
                    answer(request.uri().path())
                } else {
                    Answer { code: StatusCode::METHOD_NOT_ALLOWED, ..Answer::ok("only GET\n") }
                };
                async move { Ok::<_, Infallible>(answer.response()) }
            });
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(PATIENCE).max_buf_size(16 << 10);
            if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(%error, "a client was not served");
            }
        });
    }
}
