//! A source that is fed by another process: reads the stream that [`Stream`](super::Stream) serves, and
//! answers.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::decode::{self, Unusable};
use super::proto::node_views_client::NodeViewsClient;
use super::proto::watch_response::Op;
use super::proto::{PortFailure, ReportRequest, Set, WatchRequest, WatchResponse, delete, set};
use super::{MAX_MESSAGE, convert};
use crate::backend::{Outcome, Retry};
use crate::engine::{Observer, Run};
use crate::model::{ObjectRef, Problem};
use crate::source::{Event, Handle, Stopped};
use crate::view::{ListKind, PortKey};

const LISTS: [ListKind; 3] = [ListKind::Services, ListKind::Groups, ListKind::ServiceRanges];

/// The first wait before a stream that broke is opened again; it doubles each time.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A feeder that says nothing for this long is asked whether it is there.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(5);

/// Feeds an engine with a node view that another process made.
///
/// What it is told goes on to the engine one whole state at a time. When the stream ends, the engine and what
/// its backend made stay as they are; the source connects again, and what is other than before is all that
/// the engine hears of.
pub struct Source {
    address: Endpoint,
    watcher: String,
    reports: watch::Sender<Report>,
}

/// How a source stands with its feeder, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// The stream is open.
    Connected,
    /// It is not; what was known stays in force.
    Lost {
        /// The reason, as a code.
        reason: String,
        /// When it is tried again.
        retry_in: Duration,
    },
}

/// A feeder's address that is none.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} is not the address of a feeder; use http://HOST:PORT or unix:PATH")]
pub struct BadAddress {
    address: String,
    source: tonic::transport::Error,
}

/// What the feeder is told of this proxy's work.
#[derive(Debug, Clone, Default, PartialEq)]
struct Report {
    /// Nothing was done yet, so there is nothing to report.
    revision: Option<u64>,
    broken: String,
    failed: BTreeMap<PortKey, PortFailure>,
}

/// Tells the feeder how an engine's work went, port by port.
struct Reporter {
    reports: watch::Sender<Report>,
}

impl Source {
    /// Reads from a feeder at `http://HOST:PORT` or `unix:PATH`, under a name that the feeder shows its
    /// operator: the node's, as a rule.
    ///
    /// # Errors
    /// If the address is none.
    pub fn new(address: &str, watcher: &str) -> Result<Self, BadAddress> {
        let endpoint = Endpoint::from_shared(address.to_owned())
            .map_err(|source| BadAddress { address: address.to_owned(), source })?;
        let address = endpoint
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(CONNECT)
            .keep_alive_while_idle(true);
        Ok(Self { address, watcher: watcher.to_owned(), reports: watch::Sender::default() })
    }

    /// To observe the engine that it feeds: it is how the feeder learns which service ports are in force, and
    /// which failed and why.
    #[must_use]
    pub fn observer(&self) -> Box<dyn Observer + Send> {
        Box::new(Reporter { reports: self.reports.clone() })
    }

    /// Feeds an engine until that has stopped. `link` is told of a stream that opens or breaks.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn run(self, engine: Handle, link: impl Fn(Link)) -> Result<(), Stopped> {
        let mut wait = FIRST_WAIT;
        loop {
            let reason = match self.follow(&engine, &link, &mut wait).await? {
                status if status.code() == Code::Ok => "the feeder closed the stream".to_owned(),
                status => chain(&status),
            };
            link(Link::Lost { reason, retry_in: wait });
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// One stream, from its beginning to its end.
    async fn follow(
        &self,
        engine: &Handle,
        link: &impl Fn(Link),
        wait: &mut Duration,
    ) -> Result<Status, Stopped> {
        let channel = match self.address.connect().await {
            Ok(channel) => channel,
            Err(error) => return Ok(Status::from_error(Box::new(error))),
        };
        let mut client = NodeViewsClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let request = WatchRequest { watcher: self.watcher.clone() };
        let mut stream = match client.watch(request).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => return Ok(status),
        };
        link(Link::Connected);
        // This feeder may count from the beginning again: nothing is reported before there is news from it.
        self.reports.send_modify(|report| report.revision = None);
        let reports = self.reports.subscribe();
        let reporting = report(client, self.watcher.clone(), reports);
        tokio::pin!(reporting);
        let mut batch = Batch::default();
        loop {
            let message = tokio::select! {
                message = stream.message() => message,
                // A feeder that cannot be told is one that cannot be trusted to hear of its ports: begin
                // again.
                status = &mut reporting => return Ok(status),
            };
            match message {
                Ok(Some(message)) => {
                    if let Some(events) = batch.take(message) {
                        engine.send_all(events)?;
                        *wait = FIRST_WAIT;
                    }
                }
                Ok(None) => return Ok(Status::ok("")),
                Err(status) => return Ok(status),
            }
        }
    }
}

/// Sends each report; ends when one cannot be sent.
async fn report(
    mut client: NodeViewsClient<Channel>,
    watcher: String,
    mut reports: watch::Receiver<Report>,
) -> Status {
    while reports.changed().await.is_ok() {
        let Report { revision, broken, failed } = reports.borrow_and_update().clone();
        let Some(revision) = revision else { continue };
        let failed = failed.into_values().collect();
        let request = ReportRequest { watcher: watcher.clone(), revision, broken, failed };
        match client.report(request).await {
            // One that does not take reports is still one to listen to.
            Err(status) if status.code() == Code::Unimplemented => break,
            Err(status) => return status,
            Ok(_) => {}
        }
    }
    std::future::pending().await
}

/// Collects messages up to the one that makes them a state.
#[derive(Debug, Default)]
pub(super) struct Batch {
    events: Vec<Event>,
    /// The first state of a stream is everything there is; later ones are changes.
    listed: bool,
}

impl Batch {
    /// Takes a message; hands out the events of a state when it is complete.
    pub(super) fn take(&mut self, message: WatchResponse) -> Option<Vec<Event>> {
        if self.events.is_empty() && !self.listed {
            self.events.extend(LISTS.map(Event::ListStart));
        }
        match message.op? {
            Op::Set(set) => {
                let event = read(&set).unwrap_or_else(|(name, error)| problem(&set, name, &error));
                self.events.push(event);
            }
            Op::Delete(deleted) => self.events.extend(match deleted.object? {
                delete::Object::Port(key) => decode::key(&key).map(Event::DeletePort).ok(),
                delete::Object::HealthCheck(name) => {
                    decode::service_name(&name).map(Event::DeleteHealthCheck).ok()
                }
            }),
            Op::Sync(sync) => {
                if !std::mem::replace(&mut self.listed, true) {
                    self.events.extend(LISTS.map(Event::ListDone));
                }
                self.events.push(Event::State { revision: sync.revision, triggered_ms: sync.triggered_ms });
                return Some(std::mem::take(&mut self.events));
            }
        }
        None
    }
}

fn read(set: &Set) -> Result<Event, (String, Unusable)> {
    match &set.object {
        Some(set::Object::Node(node)) => {
            let settings = decode::node(node).map_err(|error| (node.name.clone(), error))?;
            Ok(Event::SetSettings(Box::new(settings)))
        }
        Some(set::Object::Port(port)) => {
            let name =
                || port.key.as_ref().map_or_else(String::new, |k| format!("{}/{}", k.namespace, k.service));
            let (key, view) = decode::port(port).map_err(|error| (name(), error))?;
            Ok(Event::SetPort(key, view.into()))
        }
        Some(set::Object::HealthCheck(check)) => {
            let (name, check) =
                decode::health_check(check).map_err(|error| (check.service.clone(), error))?;
            Ok(Event::SetHealthCheck(name, check))
        }
        None => {
            let message = "ignoring an object of a kind that this version does not know".to_owned();
            Err((String::new(), Unusable { field: "object", message }))
        }
    }
}

/// What cannot be used is named; the rest of the state counts.
fn problem(set: &Set, name: String, error: &Unusable) -> Event {
    let kind = match &set.object {
        Some(set::Object::Node(_)) => "Node",
        Some(_) => "Service",
        None => "Object",
    };
    let message = format!("{}; ignoring this object from the feeder", error.message);
    Event::Problem(Problem {
        object: ObjectRef { kind, name: name.into() },
        field: error.field.into(),
        message,
    })
}

impl Observer for Reporter {
    fn ran(&mut self, run: &Run<'_>) {
        self.reports.send_if_modified(|report| {
            let before = report.clone();
            report.revision = Some(run.state.revision);
            if let Outcome::Failed(reason) = run.outcome {
                report.broken.clone_from(reason);
                return *report != before;
            }
            report.broken.clear();
            if run.full {
                report.failed.clear();
            }
            for change in &run.changes.ports {
                report.failed.remove(&change.key);
            }
            if let Outcome::FamilyFailed { family, reason, .. } = run.outcome {
                report.broken = format!("{family}: {reason}");
            }
            for failure in run.outcome.failures() {
                let told = PortFailure {
                    key: Some(convert::key(&failure.key)),
                    reason: failure.reason.clone(),
                    retrying: failure.retry == Retry::Later,
                };
                report.failed.insert(failure.key.clone(), told);
            }
            *report != before
        });
    }
}

/// A status with all its causes in one line, without its code.
fn chain(status: &Status) -> String {
    let causes = std::error::Error::source(status).map(knit_types::chain).unwrap_or_default();
    match status.message().to_owned() {
        message if message.contains(&causes) => message,
        message if message.is_empty() || causes.contains(&message) => causes,
        message => format!("{message}: {causes}"),
    }
}
