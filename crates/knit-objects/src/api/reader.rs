//! One watch on the API: a list, then changes, mended forever.
//!
//! kube's own watcher does not say when it is connected again, and the state of the source must be seen; so
//! the loop is here. Its rules: list in pages; watch from the list's version; a stream that ends is opened
//! again from the last version seen; a version that is too old (410) means a new list, whose end tells what
//! is gone.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use kube::api::WatchParams;
use kube::core::{ApiResource, WatchEvent};
use serde_json::Value;
use tokio::time::Instant;

use super::{Api, path, timed_out};
use crate::backoff::{Backoff, jitter};
use crate::error::{Attempt, Error, Result, chain};
use crate::health::Health;
use crate::key::{Key, resource_name};
use crate::selector::Selection;
use crate::source::{Delta, Lean};

/// A reader of one kind.
pub(crate) struct ApiReader {
    api: Api,
    resource: ApiResource,
    selection: Selection,
    state: State,
    health: Arc<Health>,
    backoff: Backoff,
    pending: VecDeque<Delta>,
    /// Whether a list was read to its end.
    has_listed: bool,
}

enum State {
    /// The next page of a list; none was read yet if there is no token.
    List { token: Option<String> },
    /// Everything up to this version is known.
    Listed { version: String },
    /// Changes arrive.
    Watching { version: String, events: Events, opened: Instant },
}

type Events = BoxStream<'static, kube::Result<WatchEvent<Lean>>>;

/// The server is asked to end a watch after this time at most, so that a dead connection does not stay
/// unnoticed forever.
const WATCH_TIME: Duration = Duration::from_secs(290);
/// Silence for longer than this is a dead connection.
const WATCH_SILENCE: Duration = Duration::from_secs(300);
/// The longest that opening a watch may take.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// A stream that ends sooner did not work.
const SHORT_LIVED: Duration = Duration::from_secs(1);

/// How long a watch lasts: watches that began together, as all do after an outage, do not end and begin
/// together forever.
fn watch_seconds(jitter: f64) -> u32 {
    let time = WATCH_TIME.mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0);
    u32::try_from(time.as_secs()).unwrap_or(u32::MAX)
}

/// An API server that was restarted, or lost its history, tells all watches of the cluster in the same moment
/// that they must list again. They do so within this time. What they know stays in use meanwhile.
const RELIST_SPREAD: Duration = Duration::from_secs(5);

/// How long a reader that has listed before waits before it lists again.
fn relist_delay(jitter: f64) -> Duration {
    RELIST_SPREAD.mul_f64(jitter.clamp(0.0, 1.0))
}

// === impl ApiReader ===

impl ApiReader {
    pub(crate) fn new(api: Api, resource: ApiResource, selection: Selection) -> Self {
        let health = Arc::new(Health::new(format!("{} at {}", resource_name(&resource), api.url)));
        Self {
            api,
            resource,
            selection,
            state: State::List { token: None },
            health,
            backoff: Backoff::default(),
            pending: VecDeque::new(),
            has_listed: false,
        }
    }

    pub(crate) fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
    }

    /// The next delta. Failures are mended here, for as long as it takes.
    pub(crate) async fn next(&mut self) -> Delta {
        loop {
            if let Some(delta) = self.pending.pop_front() {
                return delta;
            }
            match self.step().await {
                Ok(()) => {}
                Err(Error::Expired { .. }) => {
                    tracing::debug!(resource = %resource_name(&self.resource), "version too old: list again");
                    self.state = State::List { token: None };
                    if self.has_listed {
                        tokio::time::sleep(relist_delay(jitter())).await;
                    } else {
                        self.pause(None).await;
                    }
                }
                Err(error) => {
                    self.health.set_away(matches!(error, Error::Unreachable { .. }));
                    self.health.failed(&chain(&error));
                    self.pause(error.retry_after()).await;
                }
            }
        }
    }

    async fn pause(&mut self, at_least: Option<Duration>) {
        let wait = self.backoff.next(jitter()).max(at_least.unwrap_or_default());
        tokio::time::sleep(wait).await;
    }

    async fn step(&mut self) -> Result<()> {
        match &mut self.state {
            State::List { token } => {
                let token = token.clone();
                self.list(token).await
            }
            State::Listed { version } => {
                let version = version.clone();
                self.open(version).await
            }
            State::Watching { .. } => self.watch().await,
        }
    }

    async fn list(&mut self, token: Option<String>) -> Result<()> {
        let first = token.is_none();
        let page = self.api.page(&self.resource, &self.selection, token).await?;
        self.health.set_away(false);
        if first {
            self.pending.push_back(Delta::Begin);
        }
        let next = page.next_token();
        for object in page.items.unwrap_or_default() {
            self.pending.extend(delta(object));
        }
        self.state = if next.is_some() {
            State::List { token: next }
        } else {
            self.pending.push_back(Delta::Complete);
            self.has_listed = true;
            State::Listed { version: page.metadata.resource_version }
        };
        Ok(())
    }

    async fn open(&mut self, version: String) -> Result<()> {
        let attempt = self.attempt();
        let params = WatchParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.fields.clone(),
            timeout: Some(watch_seconds(jitter())),
            bookmarks: true,
            send_initial_events: false,
        };
        let failed = |error| Error::from_kube(attempt.clone(), error);
        let request = path(&self.resource, self.selection.namespace.as_deref())
            .watch(&params, &version)
            .map_err(|e| failed(kube::Error::BuildRequest(e)))?;
        let opening = self.api.client.request_events::<Lean>(request);
        let events = match tokio::time::timeout(OPEN_TIMEOUT, opening).await {
            Ok(result) => result.map_err(failed)?,
            Err(_) => return Err(failed(timed_out("no answer", OPEN_TIMEOUT))),
        };
        self.health.set_away(false);
        self.health.connected();
        self.state = State::Watching { version, events: events.boxed(), opened: Instant::now() };
        Ok(())
    }

    async fn watch(&mut self) -> Result<()> {
        let attempt = self.attempt();
        let State::Watching { version, events, opened } = &mut self.state else { return Ok(()) };
        let event = match tokio::time::timeout(WATCH_SILENCE, events.next()).await {
            Ok(event) => event,
            Err(_) => Some(Err(timed_out("nothing arrived", WATCH_SILENCE))),
        };
        match event {
            Some(Ok(WatchEvent::Added(object) | WatchEvent::Modified(object))) => {
                follow(version, object.value());
                self.pending.extend(delta(object));
            }
            Some(Ok(WatchEvent::Deleted(object))) => {
                follow(version, object.value());
                self.pending.extend(Key::of_value(object.value()).map(Delta::Gone));
            }
            Some(Ok(WatchEvent::Bookmark(bookmark))) => *version = bookmark.metadata.resource_version,
            Some(Ok(WatchEvent::Error(status))) => {
                self.state = State::Listed { version: std::mem::take(version) };
                return Err(Error::from_status(attempt, status));
            }
            Some(Err(error)) => {
                self.state = State::Listed { version: std::mem::take(version) };
                return Err(Error::from_kube(attempt, error));
            }
            None => {
                let short_lived = opened.elapsed() < SHORT_LIVED;
                self.state = State::Listed { version: std::mem::take(version) };
                if short_lived {
                    self.pause(None).await;
                    return Ok(());
                }
            }
        }
        self.backoff.reset();
        Ok(())
    }

    fn attempt(&self) -> Box<Attempt> {
        Attempt::new("watch", &self.resource, None)
    }
}

impl fmt::Debug for ApiReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiReader").field("resource", &self.resource).finish_non_exhaustive()
    }
}

fn version_of(object: &Value) -> Option<&str> {
    object.pointer("/metadata/resourceVersion").and_then(Value::as_str)
}

fn follow(version: &mut String, object: &Value) {
    if let Some(newer) = version_of(object) {
        newer.clone_into(version);
    }
}

/// An object that has a name; one without cannot be told from another.
fn delta(object: Lean) -> Option<Delta> {
    let key = Key::of_value(object.value())?;
    let version = version_of(object.value()).unwrap_or_default().into();
    Some(Delta::Object { key, version, object })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_readers_of_a_cluster_listed_again_within_a_tenth_of_a_second() {
        // SplitMix64: the same numbers every time.
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            f64::from(u32::try_from((mixed ^ (mixed >> 31)) >> 32).expect("half of it")) / f64::from(u32::MAX)
        };
        let mut lists = std::collections::BTreeMap::<u128, u32>::new();
        for _ in 0..5000 {
            *lists.entry(relist_delay(random()).as_millis() / 100).or_default() += 1;
        }
        let most = lists.values().max().copied().unwrap_or_default();
        assert!(most <= 200, "{most} of 5000 in one tenth of a second: {lists:?}");
        assert!(lists.keys().all(|tenth| *tenth <= 50), "{lists:?}");
    }

    #[test]
    fn watches_that_begin_together_do_not_end_together_and_end_before_silence_is_an_error() {
        let spread: std::collections::BTreeSet<u32> =
            (0..=100).map(|n| watch_seconds(f64::from(n) / 100.0)).collect();
        assert!(spread.len() > 90, "{spread:?}");
        assert!(spread.iter().all(|seconds| (145..=290).contains(seconds)), "{spread:?}");
        assert!(WATCH_TIME < WATCH_SILENCE);
    }
}
