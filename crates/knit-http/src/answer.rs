//! What is said about one path.

use std::borrow::Cow;

use http_body_util::Full;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};

use crate::server::Reply;

/// What is said about one path.
#[derive(Clone, Debug)]
pub struct Answer {
    code: StatusCode,
    kind: &'static str,
    body: Bytes,
}

impl Answer {
    /// All is well.
    pub fn ok(body: impl Into<Bytes>) -> Self {
        Self { code: StatusCode::OK, kind: "text/plain; charset=utf-8", body: body.into() }
    }

    /// Not now.
    pub fn unavailable(body: impl Into<Bytes>) -> Self {
        Self { code: StatusCode::SERVICE_UNAVAILABLE, ..Self::ok(body) }
    }

    /// Nothing is changed here.
    pub(crate) fn only_get() -> Self {
        Self { code: StatusCode::METHOD_NOT_ALLOWED, ..Self::ok("only GET\n") }
    }

    /// No such path.
    pub fn not_found(body: impl Into<Bytes>) -> Self {
        Self { code: StatusCode::NOT_FOUND, ..Self::ok(body) }
    }

    /// Metrics, as OpenMetrics text.
    pub fn metrics(body: impl Into<Bytes>) -> Self {
        Self { kind: "application/openmetrics-text; version=1.0.0; charset=utf-8", ..Self::ok(body) }
    }

    /// What is said.
    #[must_use]
    pub fn body(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }

    /// Whether all is well.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.code == StatusCode::OK
    }
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        let mut reply = Self::new(Full::new(answer.body));
        *reply.status_mut() = answer.code;
        reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(answer.kind));
        reply
    }
}
