//! The [`Engine`] itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::Clock;
use super::pacer::{Due, Pace, Pacer};
use crate::backend::{Backend, Failure, Outcome, Retry};
use crate::model::{Family, NodeInfo, Problem};
use crate::source::Event;
use crate::view::{Changes, ListKind, NodeView, PortChange, PortKey, View, ViewConfig};

/// The settings of an [`Engine`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineConfig {
    /// What the view needs to know.
    pub view: ViewConfig,
    /// How often to work.
    pub pace: Pace,
    /// What must be there before anything is programmed.
    pub wait_for: WaitFor,
}

/// What must be complete before anything is programmed (rule 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitFor {
    /// The list of services.
    pub services: bool,
    /// The list of endpoint groups.
    pub groups: bool,
    /// The list of service ranges.
    pub service_ranges: bool,
    /// The node: its zone and addresses.
    pub node: bool,
}

/// Brings a view and a backend together. See the [module](super).
pub struct Engine<B> {
    view: View,
    backend: B,
    pacer: Pacer,
    waiting: WaitFor,
    /// Ports that the backend could not make true. All others are.
    failed: BTreeMap<PortKey, Failed>,
    /// All was done once.
    synced: bool,
    /// The last call failed altogether, for this reason.
    broken: Option<String>,
    /// A family that failed altogether, while the other goes on.
    family: Option<(Family, Failed)>,
    observer: Option<Box<dyn Observer + Send>>,
}

#[derive(Debug, Clone)]
struct Failed {
    reason: String,
    attempts: u32,
    retry_at: Option<Instant>,
}

/// How one service port stands with the backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortStatus {
    /// It is as it should be.
    Done,
    /// It changed, or everything waits for a full sync or for the first lists.
    Pending,
    /// The backend could not make it so, for this reason.
    Failed(String),
}

/// One call to the backend, for whoever counts, logs and reports.
#[derive(Debug)]
pub struct Run<'a> {
    /// It was a full sync.
    pub full: bool,
    /// What changed since the last call.
    pub changes: &'a Changes,
    /// The state that was to be made true.
    pub state: &'a NodeView,
    /// How it went.
    pub outcome: &'a Outcome,
    /// When it ended.
    pub ended: Instant,
    /// How long the view and the backend took.
    pub took: Duration,
}

/// Is told what an engine does: metrics, health, logs.
pub trait Observer {
    /// An event came in; `None` for those that carry no object.
    fn event(&mut self, kind: Option<ListKind>, now: Instant) {
        let _ = (kind, now);
    }

    /// Something waits to be done.
    fn queued(&mut self, now: Instant) {
        let _ = now;
    }

    /// The backend was called.
    fn ran(&mut self, run: &Run<'_>) {
        let _ = run;
    }

    /// Something in an object cannot be used, or two objects want the same.
    fn problem(&mut self, problem: &Problem) {
        let _ = problem;
    }
}

/// Tells each of them, in order.
impl Observer for Vec<Box<dyn Observer + Send>> {
    fn event(&mut self, kind: Option<ListKind>, now: Instant) {
        self.iter_mut().for_each(|o| o.event(kind, now));
    }

    fn queued(&mut self, now: Instant) {
        self.iter_mut().for_each(|o| o.queued(now));
    }

    fn ran(&mut self, run: &Run<'_>) {
        self.iter_mut().for_each(|o| o.ran(run));
    }

    fn problem(&mut self, problem: &Problem) {
        self.iter_mut().for_each(|o| o.problem(problem));
    }
}

/// A look into an engine.
#[derive(Debug, Clone, Copy)]
pub struct Inspect<'a> {
    /// The view, with the model it was made from.
    pub view: &'a View,
    /// Whether all lists were there.
    pub ready: bool,
    failed: &'a BTreeMap<PortKey, Failed>,
    broken: Option<&'a str>,
    family: Option<&'a (Family, Failed)>,
}

impl Default for WaitFor {
    /// Services and endpoint groups.
    fn default() -> Self {
        Self { services: true, groups: true, service_ranges: false, node: false }
    }
}

impl WaitFor {
    fn nothing(self) -> bool {
        !(self.services || self.groups || self.service_ranges || self.node)
    }
}

impl<B: Backend> Engine<B> {
    /// An engine that knows no services yet.
    #[must_use]
    pub fn new(config: EngineConfig, node: NodeInfo, backend: B) -> Self {
        Self {
            view: View::new(config.view, node),
            backend,
            pacer: Pacer::new(config.pace),
            waiting: config.wait_for,
            failed: BTreeMap::new(),
            synced: false,
            broken: None,
            family: None,
            observer: None,
        }
    }

    /// Has somebody told what it does.
    #[must_use]
    pub fn observed_by(mut self, observer: Box<dyn Observer + Send>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// The backend.
    pub fn backend(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Gives the backend back.
    pub fn into_backend(self) -> B {
        self.backend
    }

    /// A look inside.
    pub fn inspect(&self) -> Inspect<'_> {
        Inspect {
            view: &self.view,
            ready: self.waiting.nothing(),
            failed: &self.failed,
            broken: self.broken.as_deref(),
            family: self.family.as_ref(),
        }
    }

    /// Takes in an event. The work is done by [`poll`](Self::poll).
    pub fn handle(&mut self, event: Event, now: Instant) {
        let kind = match &event {
            Event::SetService(_)
            | Event::DeleteService(_)
            | Event::SetPort(..)
            | Event::DeletePort(_)
            | Event::SetHealthCheck(..)
            | Event::DeleteHealthCheck(_) => Some(ListKind::Services),
            Event::SetGroup(_) | Event::DeleteGroup(_) => Some(ListKind::Groups),
            Event::SetServiceRanges { .. } | Event::DeleteServiceRanges(_) => Some(ListKind::ServiceRanges),
            _ => None,
        };
        if let Some(observer) = &mut self.observer {
            observer.event(kind, now);
        }
        match event {
            Event::SetService(service) => self.view.set_service(*service),
            Event::DeleteService(name) => self.view.delete_service(&name),
            Event::SetGroup(group) => self.view.set_group(*group),
            Event::DeleteGroup(name) => self.view.delete_group(&name),
            Event::SetNode(node) => {
                self.waiting.node = false;
                self.view.set_node(*node);
            }
            Event::SetServiceRanges { name, ranges } => self.view.set_service_ranges(&name, ranges),
            Event::DeleteServiceRanges(name) => self.view.delete_service_ranges(&name),
            Event::SetExemptVips(exempt) => self.view.set_exempt_vips(exempt),
            Event::ListStart(kind) => self.view.list_start(kind),
            Event::ListDone(kind) => {
                self.view.list_done(kind);
                match kind {
                    ListKind::Services => self.waiting.services = false,
                    ListKind::Groups => self.waiting.groups = false,
                    ListKind::ServiceRanges => self.waiting.service_ranges = false,
                }
            }
            Event::SetPort(key, port) => self.view.set_port(key, port),
            Event::DeletePort(key) => self.view.delete_port(&key),
            Event::SetHealthCheck(name, check) => self.view.set_health_check(name, check),
            Event::DeleteHealthCheck(name) => self.view.delete_health_check(&name),
            Event::SetSettings(settings) => {
                self.waiting.node = false;
                self.view.set_settings(*settings);
            }
            Event::State { revision, triggered_ms } => self.view.set_revision(revision, triggered_ms),
            Event::Problem(problem) => {
                if let Some(observer) = &mut self.observer {
                    observer.problem(&problem);
                }
            }
        }
        if self.waiting.nothing() && self.view.is_dirty() && self.pacer.waiting_since().is_none() {
            self.pacer.request(now);
            if let Some(observer) = &mut self.observer {
                observer.queued(now);
            }
        }
    }

    /// Somebody else may have changed what the backend made: a full sync is due, at once after a quiet time.
    pub fn look_again(&mut self, now: Instant) {
        self.pacer.look_again(now);
    }

    /// A full sync is due if the backend cannot tell that all that it made is as it left it.
    pub fn compare(&mut self, now: Instant) {
        // What failed is tried again anyway, from whatever is there.
        if self.waiting.nothing() && self.broken.is_none() && !self.backend.is_intact() {
            self.look_again(now);
        }
    }

    /// Does what is due, and says when to call again; `None`: not before the next event.
    pub fn poll(&mut self, clock: &dyn Clock) -> Option<Instant> {
        if !self.waiting.nothing() {
            return None;
        }
        let now = clock.now();
        // An engine that waits for nothing has the empty state to program.
        if self.view.is_dirty() {
            self.pacer.request(now);
        }
        if self.next_retry().is_some_and(|at| at <= now) {
            self.pacer.request(now);
        }
        match self.pacer.due(now) {
            Due::At(at) => return self.wake(at, now),
            Due::Full => {
                // What changed goes first, by itself: whatever a look at everything finds then is somebody
                // else's doing.
                if self.synced && self.broken.is_none() && self.view.is_dirty() {
                    self.work(false, now, clock);
                }
                self.work(true, now, clock);
            }
            Due::Changes => self.work(false, now, clock),
        }
        let now = clock.now();
        match self.pacer.due(now) {
            Due::At(at) => self.wake(at, now),
            Due::Full | Due::Changes => Some(now),
        }
    }

    fn next_retry(&self) -> Option<Instant> {
        let family = self.family.iter().map(|(_, failed)| failed);
        self.failed.values().chain(family).filter_map(|f| f.retry_at).min()
    }

    /// The earlier of what the pacer says and the next retry. One that is due already waits for the pacer.
    fn wake(&self, paced: Option<Instant>, now: Instant) -> Option<Instant> {
        paced.into_iter().chain(self.next_retry().filter(|at| *at > now)).min()
    }

    fn work(&mut self, full: bool, started: Instant, clock: &dyn Clock) {
        let mut changes = self.view.take_changes();
        let outcome = if full {
            self.backend.sync(self.view.current())
        } else {
            self.add_retries(&mut changes, started);
            let due = |(_, failed): &&(Family, Failed)| failed.retry_at.is_some_and(|at| at <= started);
            changes.retry = self.family.as_ref().filter(due).map(|(family, _)| *family);
            if changes.is_empty() { Outcome::Done } else { self.backend.apply(&changes, self.view.current()) }
        };
        let ended = clock.now();
        match &outcome {
            Outcome::Done | Outcome::Partly(_) => self.settled(full, &changes, outcome.failures(), ended),
            Outcome::FamilyFailed { family, reason, failures } => {
                let before = self.family.take().filter(|(known, _)| known == family);
                self.settled(full, &changes, failures, ended);
                self.family = Some((*family, self.family_failed(before, reason, full, &changes, ended)));
            }
            Outcome::Failed(reason) => {
                self.broken = Some(reason.clone());
                self.family = None;
                self.pacer.failed(ended);
            }
        }
        if let Some(observer) = &mut self.observer {
            let state = self.view.current();
            let took = ended.saturating_duration_since(started);
            changes.problems.iter().for_each(|problem| observer.problem(problem));
            observer.ran(&Run { full, changes: &changes, state, outcome: &outcome, ended, took });
        }
    }

    /// Adds the ports that failed and are due again, unless they changed anyway.
    fn add_retries(&mut self, changes: &mut Changes, now: Instant) {
        let state = self.view.current();
        // A port that failed is not what the backend was told last: it must not go by that.
        for change in changes.ports.iter_mut().filter(|c| self.failed.contains_key(&c.key)) {
            change.old = None;
        }
        let due = self.failed.iter().filter(|(_, f)| f.retry_at.is_some_and(|at| at <= now));
        let due: Vec<PortChange> = due
            .map(|(key, _)| key)
            .filter(|key| changes.ports.binary_search_by(|c| c.key.cmp(key)).is_err())
            .map(|key| PortChange { key: key.clone(), old: None, new: state.ports.get(key).cloned() })
            .collect();
        changes.ports.extend(due);
        changes.ports.sort_by(|a, b| a.key.cmp(&b.key));
    }

    /// What is known of a family that failed: one that was not tried is as it was.
    fn family_failed(
        &self,
        before: Option<(Family, Failed)>,
        reason: &str,
        full: bool,
        changes: &Changes,
        now: Instant,
    ) -> Failed {
        match before {
            Some((_, failed)) if !full && changes.retry.is_none() => failed,
            before => {
                let attempts = before.map_or(1, |(_, failed)| failed.attempts.saturating_add(1));
                let retry_at = Some(now + self.pacer.pace().backoff(attempts));
                Failed { reason: reason.to_owned(), attempts, retry_at }
            }
        }
    }

    fn settled(&mut self, full: bool, changes: &Changes, failures: &[Failure], now: Instant) {
        self.synced |= full;
        self.broken = None;
        self.family = None;
        self.pacer.done(now, full);
        let before = std::mem::take(&mut self.failed);
        if !full {
            // Those that were not tried are still as they were.
            let tried = |key: &PortKey| changes.ports.binary_search_by(|c| c.key.cmp(key)).is_ok();
            self.failed
                .extend(before.iter().filter(|(key, _)| !tried(key)).map(|(k, f)| (k.clone(), f.clone())));
        }
        for failure in failures {
            let attempts = before.get(&failure.key).map_or(1, |f| f.attempts + 1);
            let retry_at = match failure.retry {
                Retry::Later => Some(now + self.pacer.pace().backoff(attempts)),
                Retry::OnChange => None,
            };
            let failed = Failed { reason: failure.reason.clone(), attempts, retry_at };
            self.failed.insert(failure.key.clone(), failed);
        }
    }
}

impl Inspect<'_> {
    /// How a service port stands; `None` if there is no such port.
    #[must_use]
    pub fn status(&self, key: &PortKey) -> Option<PortStatus> {
        if let Some(failed) = self.failed.get(key) {
            return Some(PortStatus::Failed(failed.reason.clone()));
        }
        self.view.current().ports.get(key)?;
        if let Some((_, failed)) = self.family.filter(|(family, _)| *family == key.family) {
            return Some(PortStatus::Failed(failed.reason.clone()));
        }
        let pending = !self.ready || self.broken.is_some() || self.view.is_dirty();
        Some(if pending { PortStatus::Pending } else { PortStatus::Done })
    }

    /// Why the last call to the backend failed altogether, or for one family, if it did.
    #[must_use]
    pub fn broken(&self) -> Option<&str> {
        self.broken.or(self.family.map(|(_, failed)| &*failed.reason))
    }

    /// Every service port that the backend could not make true, and why.
    pub fn failed(&self) -> impl Iterator<Item = (&PortKey, &str)> {
        self.failed.iter().map(|(key, f)| (key, &*f.reason))
    }
}
