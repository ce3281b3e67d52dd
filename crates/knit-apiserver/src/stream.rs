//! A watch as a stream of lines: each change encoded once and shared, bookmarks, and the end.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;

use super::event::line;
use super::http::encoded;
use super::kinds::Kind;
use super::request::Form;
use super::store::Store;
use super::table::{Include, partial, table};
use super::watch::{WatchEvent, Watcher};

/// How often a watch that asked for bookmarks gets one.
const BOOKMARK_EVERY: Duration = Duration::from_secs(30);

/// Encodes what a watch sees, sharing bytes where they are the same for everybody.
pub struct Encoder {
    /// The kind.
    pub kind: Arc<Kind>,
    /// The form that was asked for.
    pub form: Form,
    /// For its clock.
    pub store: Store,
}

impl Encoder {
    fn event(&self, event: &WatchEvent) -> Bytes {
        let name = event.change.name();
        match &self.form {
            Form::Table(include) => {
                let make = || {
                    let metadata = json!({"resourceVersion": event.object.rv.to_string()});
                    let rows = table(
                        &self.kind,
                        std::slice::from_ref(&event.object),
                        &metadata,
                        *include,
                        self.store.now(),
                    );
                    line(name, rows.to_string().as_bytes())
                };
                match &event.logged {
                    Some(change) if *include == Include::Metadata && !self.kind.is_events_v1() => {
                        change.table_line(make)
                    }
                    _ => make(),
                }
            }
            Form::Partial => line(name, partial(&event.object.value).to_string().as_bytes()),
            _ => match &event.logged {
                Some(change) if !self.kind.is_events_v1() => change.line(),
                _ => line(name, &encoded(&self.kind, &event.object)),
            },
        }
    }

    fn bookmark(&self, rv: u64, initial_end: bool) -> Bytes {
        let mut metadata = json!({"resourceVersion": rv.to_string(), "creationTimestamp": null});
        if initial_end {
            metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        let (api_version, kind) = match &self.form {
            Form::Table(_) => ("meta.k8s.io/v1".to_owned(), "Table".to_owned()),
            Form::Partial => ("meta.k8s.io/v1".to_owned(), "PartialObjectMetadata".to_owned()),
            _ => (self.kind.api_version(), self.kind.kind.clone()),
        };
        let mut object = json!({"kind": kind, "apiVersion": api_version, "metadata": metadata});
        if matches!(self.form, Form::Table(_)) {
            object["rows"] = json!([]);
            object["columnDefinitions"] = json!([]);
        }
        line("BOOKMARK", object.to_string().as_bytes())
    }
}

/// A watch as a stream of lines.
pub struct WatchStream {
    /// How lines are made.
    pub encoder: Encoder,
    /// What is watched.
    pub watcher: Watcher,
    /// Whether bookmarks were asked for.
    pub bookmarks: bool,
    /// Whether a bookmark tells where the initial events end.
    pub announce: bool,
    /// When the watch ends.
    pub end: tokio::time::Instant,
    /// Whether it has ended.
    pub done: bool,
}

impl WatchStream {
    /// The next lines; none at the end.
    pub async fn next(&mut self) -> Option<Vec<Bytes>> {
        if self.done {
            return None;
        }
        let mut lines: Vec<Bytes> =
            self.watcher.initial().iter().map(|event| self.encoder.event(event)).collect();
        if std::mem::take(&mut self.announce) {
            lines.push(self.encoder.bookmark(self.watcher.resource_version(), true));
        }
        if !lines.is_empty() {
            return Some(lines);
        }
        let wake = self.end.min(tokio::time::Instant::now() + BOOKMARK_EVERY);
        match tokio::time::timeout_at(wake, self.watcher.next()).await {
            Ok(Ok(events)) => Some(events.iter().map(|event| self.encoder.event(event)).collect()),
            Ok(Err(error)) => {
                self.done = true;
                Some(vec![line("ERROR", error.to_status().to_string().as_bytes())])
            }
            Err(_) => {
                self.done = tokio::time::Instant::now() >= self.end;
                let bookmark =
                    self.bookmarks.then(|| self.encoder.bookmark(self.watcher.resource_version(), false));
                if self.done && bookmark.is_none() { None } else { Some(bookmark.into_iter().collect()) }
            }
        }
    }
}
