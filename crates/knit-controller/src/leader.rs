//! Only one controller acts at a time: who holds the Lease.
//!
//! The decision is pure ([`Election`]); the loop around it reads and writes the Lease. Another's Lease counts
//! as expired when it has not changed for its whole duration by our own clock, so clocks that differ do no
//! harm.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use knit_objects::{Error, Key, Objects, Write};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::Config;

/// Until when this controller leads, if it does, and when everything that it does as the leader must be over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Leading(pub(crate) Option<Term>);

/// The time that one renewal of the Lease gives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Term {
    /// Nothing is begun after this: before another may think that we are gone, we know it ourselves.
    pub(crate) until: Instant,
    /// Another may lead from now on: nothing is under way after this.
    pub(crate) end: Instant,
}

/// What one candidate knows.
#[derive(Debug)]
pub(crate) struct Election {
    namespace: String,
    name: String,
    identity: String,
    duration: Duration,
    /// The Lease as it was last seen, and since when it has been like that.
    seen: Option<(Option<String>, Instant)>,
}

/// What a candidate does next.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Somebody else leads.
    Wait,
    /// Nobody ever led: make the Lease.
    Create(Lease),
    /// Take it, or renew it; only if nobody was faster.
    Replace(Lease),
}

// === impl Leading ===

impl Leading {
    /// The term, if it is not over.
    pub(crate) fn term(self) -> Option<Term> {
        self.0.filter(|term| Instant::now() < term.until)
    }

    /// Carries something out that only the leader may do: not if it leads no more, and not beyond the end of
    /// its term. Nothing if it was not begun, or broken off.
    pub(crate) async fn fence<T>(self, work: impl Future<Output = T>) -> Option<T> {
        let term = self.term()?;
        tokio::time::timeout_at(term.end, work).await.ok()
    }
}

// === impl Election ===

impl Election {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            namespace: config.namespace.clone(),
            name: config.lease_name.clone(),
            identity: config.identity.clone(),
            duration: config.lease_duration,
            seen: None,
        }
    }

    /// What to do about the Lease as it is.
    pub(crate) fn decide(&mut self, lease: Option<&Lease>, wall: Timestamp, now: Instant) -> Step {
        let Some(lease) = lease else {
            let metadata = ObjectMeta {
                name: Some(self.name.clone()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            };
            let spec = LeaseSpec { acquire_time: Some(MicroTime(wall)), ..self.spec(wall) };
            return Step::Create(Lease { metadata, spec: Some(spec) });
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder == self.identity {
            let spec = LeaseSpec {
                acquire_time: spec.acquire_time,
                lease_transitions: spec.lease_transitions,
                ..self.spec(wall)
            };
            return Step::Replace(Lease { metadata: lease.metadata.clone(), spec: Some(spec) });
        }
        let version = lease.metadata.resource_version.clone();
        let since = match &self.seen {
            Some((seen, since)) if *seen == version => *since,
            _ => {
                self.seen = Some((version, now));
                now
            }
        };
        let theirs = u64::try_from(spec.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        if !holder.is_empty() && now.duration_since(since) < Duration::from_secs(theirs) {
            return Step::Wait;
        }
        let transitions = spec.lease_transitions.unwrap_or(0).saturating_add(1);
        let spec = LeaseSpec {
            acquire_time: Some(MicroTime(wall)),
            lease_transitions: Some(transitions),
            ..self.spec(wall)
        };
        Step::Replace(Lease { metadata: lease.metadata.clone(), spec: Some(spec) })
    }

    fn spec(&self, wall: Timestamp) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.duration.as_secs()).unwrap_or(i32::MAX)),
            renew_time: Some(MicroTime(wall)),
            ..LeaseSpec::default()
        }
    }
}

/// Stands for election forever, and tells through `leading` whether it leads, and through `heard` whether
/// the API answers.
pub(crate) async fn stand(
    objects: Objects,
    config: Config,
    leading: watch::Sender<Leading>,
    heard: impl Fn(bool) + Send + 'static,
) {
    let mut election = Election::new(&config);
    let mut renewed: Option<Instant> = None;
    let trust = config.lease_duration * 2 / 3;
    let mut ticks = tokio::time::interval(config.renew_every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let before = Instant::now();
        // An answer that comes too late is no answer.
        let attempt = tokio::time::timeout(trust, step(&objects, &mut election)).await;
        heard(matches!(attempt, Ok(Ok(_))));
        match attempt {
            Ok(Ok(true)) => renewed = Some(before),
            Ok(Ok(false)) => renewed = None,
            Ok(Err(error)) => tracing::warn!(%error, "leader election"),
            Err(_) => tracing::warn!("leader election: the API did not answer in time"),
        }
        let term = renewed.filter(|at| at.elapsed() < trust);
        let term = term.map(|at| Term { until: at + trust, end: at + config.lease_duration });
        leading.send_modify(|was| {
            if was.0.is_some() != term.is_some() {
                tracing::info!(identity = config.identity, leading = term.is_some(), "leader election");
            }
            was.0 = term;
        });
    }
}

/// One round. Whether we hold the Lease.
async fn step(objects: &Objects, election: &mut Election) -> Result<bool, Error> {
    let key = Key::namespaced(election.namespace.as_str(), election.name.as_str());
    let lease = objects.get::<Lease>(&key).await?;
    let write = match election.decide(lease.as_ref(), Timestamp::now(), Instant::now()) {
        Step::Wait => return Ok(false),
        Step::Create(lease) => Write::create(&lease),
        Step::Replace(lease) => Write::replace(&lease),
    };
    match objects.write(&write).await {
        Ok(_) => Ok(true),
        // Somebody was faster.
        Err(Error::Conflict { .. } | Error::AlreadyExists { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Gives the Lease back, so that another need not wait for its end.
pub(crate) async fn resign(objects: &Objects, config: &Config) -> Result<(), Error> {
    let key = Key::namespaced(config.namespace.as_str(), config.lease_name.as_str());
    let Some(mut lease) = objects.get::<Lease>(&key).await? else { return Ok(()) };
    let spec = lease.spec.get_or_insert_default();
    if spec.holder_identity.as_deref() != Some(config.identity.as_str()) {
        return Ok(());
    }
    spec.holder_identity = Some(String::new());
    spec.lease_duration_seconds = Some(1);
    match objects.write(&Write::replace(&lease)).await {
        Ok(_) | Err(Error::Conflict { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_write_of_a_leader_is_over_before_another_may_lead() {
        let seconds = Duration::from_secs;
        let begun = Instant::now();
        let leading = Leading(Some(Term { until: begun + seconds(10), end: begun + seconds(15) }));
        assert_eq!(leading.fence(std::future::ready(7)).await, Some(7));
        tokio::time::advance(seconds(9)).await;
        // An API server that does not answer.
        assert_eq!(leading.fence(std::future::pending::<()>()).await, None);
        assert!(begun.elapsed() < seconds(16), "{:?}", begun.elapsed());
        // Its term is over: nothing is begun, though nobody has told it yet.
        assert_eq!(leading.fence(std::future::ready(7)).await, None);
        assert_eq!(Leading(None).fence(std::future::ready(7)).await, None);
    }

    fn candidate(identity: &str) -> Election {
        Election::new(&Config::new(identity))
    }

    fn stored(step: Step, version: &str) -> Lease {
        let (Step::Create(mut lease) | Step::Replace(mut lease)) = step else {
            panic!("nothing to store: {step:?}")
        };
        lease.metadata.resource_version = Some(version.into());
        lease
    }

    #[test]
    fn one_leads_until_it_is_silent_for_the_whole_duration() {
        let (mut a, mut b) = (candidate("a"), candidate("b"));
        let (wall, now) = (Timestamp::now(), Instant::now());
        let seconds = Duration::from_secs;
        let lease = stored(a.decide(None, wall, now), "1");
        assert_eq!(b.decide(Some(&lease), wall, now), Step::Wait);
        let lease = stored(a.decide(Some(&lease), wall, now + seconds(10)), "2");
        assert_eq!(b.decide(Some(&lease), wall, now + seconds(14)), Step::Wait);
        // Renewed at 10 s, seen at 14 s: not before 29 s.
        assert_eq!(b.decide(Some(&lease), wall, now + seconds(28)), Step::Wait);
        let taken = stored(b.decide(Some(&lease), wall, now + seconds(29)), "3");
        let spec = taken.spec.clone().expect("a spec");
        assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("b"), Some(1)));
        assert_eq!(a.decide(Some(&taken), wall, now + seconds(30)), Step::Wait);
    }

    #[test]
    fn a_lease_that_was_given_back_is_taken_at_once() {
        let (mut a, mut b) = (candidate("a"), candidate("b"));
        let (wall, now) = (Timestamp::now(), Instant::now());
        let mut lease = stored(a.decide(None, wall, now), "1");
        lease.spec.as_mut().expect("a spec").holder_identity = Some(String::new());
        assert!(matches!(b.decide(Some(&lease), wall, now), Step::Replace(_)));
    }
}
