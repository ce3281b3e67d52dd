//! An observer that says in plain lines what an engine does and what is wrong with objects: the least that a
//! proxy of one's own should log.

use super::core::{Observer, Run};
use crate::backend::Outcome;
use crate::model::Problem;

/// How much a line matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Each change. For those who look for something.
    Debug,
    /// It works.
    Info,
    /// Something of an object cannot be used, or one service port is not in force. The others are.
    Warn,
    /// Nothing is in force, or nobody knows. It is tried again.
    Error,
}

/// Hands a line to `write` for each thing worth knowing. Give it to
/// [`observed_by`](crate::engine::Engine::observed_by); without an observer, an engine says nothing to
/// anybody.
///
/// ```
/// use knit_proxy::engine::{Level, Log};
///
/// let log = Log::new(|level, line| {
///     if level >= Level::Info {
///         eprintln!("{line}");
///     }
/// });
/// # let _: Box<dyn knit_proxy::engine::Observer + Send> = Box::new(log);
/// ```
pub struct Log<W> {
    write: W,
    in_force: bool,
}

impl<W: FnMut(Level, &str)> Log<W> {
    /// Lines go to `write`.
    pub fn new(write: W) -> Self {
        Self { write, in_force: false }
    }

    fn line(&mut self, level: Level, line: &str) {
        (self.write)(level, line);
    }
}

impl<W: FnMut(Level, &str)> Observer for Log<W> {
    fn ran(&mut self, run: &Run<'_>) {
        let (ports, took) = (run.state.ports.len(), run.took);
        match run.outcome {
            Outcome::Failed(reason) => {
                let text = format!("the services could not be applied, retrying: {reason}");
                return self.line(Level::Error, &text);
            }
            Outcome::FamilyFailed { family, reason, .. } => {
                let text = format!("the services of {family} could not be applied, retrying: {reason}");
                self.line(Level::Error, &text);
            }
            Outcome::Partly(_) | Outcome::Done => {}
        }
        for failure in run.outcome.failures() {
            self.line(Level::Warn, &failure.to_string());
        }
        if !std::mem::replace(&mut self.in_force, true) {
            self.line(Level::Info, &format!("in force: {ports} service ports, in {took:.1?}"));
        } else if run.full {
            self.line(Level::Debug, &format!("full sync: {ports} service ports, in {took:.1?}"));
        } else {
            let changed = run.changes.ports.len();
            self.line(Level::Debug, &format!("{changed} of {ports} service ports changed, in {took:.1?}"));
        }
    }

    fn problem(&mut self, problem: &Problem) {
        self.line(Level::Warn, &problem.to_string());
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::backend::{Backend, Failure, Retry};
    use crate::engine::{Engine, EngineConfig, SystemClock};
    use crate::model::{NodeInfo, Protocol, Service};
    use crate::source::Event;
    use crate::view::{ListKind, NodeView};

    /// Answers as it is told to.
    struct Answers(Vec<Outcome>);

    impl Backend for Answers {
        fn sync(&mut self, state: &NodeView) -> Outcome {
            match self.0.remove(0) {
                // The port that is there.
                Outcome::Partly(_) => {
                    let key = state.ports.keys().next().expect("a port").clone();
                    Outcome::Partly(vec![Failure { key, reason: "no room".into(), retry: Retry::OnChange }])
                }
                other => other,
            }
        }
    }

    #[test]
    fn what_goes_wrong_is_said_and_what_works_too() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&lines);
        let log = Log::new(move |level, line: &str| {
            // Without the time that it took, which differs.
            let line = line.split(", in ").next().expect("a beginning").to_owned();
            written.lock().expect("nobody panics").push((level, line));
        });
        let outcomes = vec![Outcome::Failed("no kernel".into()), Outcome::Partly(Vec::new())];
        let mut engine = Engine::new(EngineConfig::default(), NodeInfo::new("here"), Answers(outcomes))
            .observed_by(Box::new(log));
        let now = std::time::Instant::now();
        let address: IpAddr = [10, 0, 0, 1].into();
        // Two Services want one address.
        for name in ["shop/one", "shop/two"] {
            let service = Service::new(name).cluster_ip(address).port(Protocol::Tcp, 80);
            engine.handle(Event::SetService(Box::new(service)), now);
        }
        engine.handle(Event::ListDone(ListKind::Services), now);
        engine.handle(Event::ListDone(ListKind::Groups), now);
        let mut due = engine.poll(&SystemClock);
        // The second try is due when the engine says so.
        while lines.lock().expect("nobody panics").len() < 4 {
            struct At(std::time::Instant);
            impl crate::engine::Clock for At {
                fn now(&self) -> std::time::Instant {
                    self.0
                }
            }
            due = engine.poll(&At(due.expect("another try")));
        }
        let lines = lines.lock().expect("nobody panics");
        let (levels, texts): (Vec<Level>, Vec<&str>) = lines.iter().map(|(l, t)| (*l, t.as_str())).unzip();
        assert_eq!(levels, [Level::Warn, Level::Error, Level::Warn, Level::Info], "{texts:?}");
        assert!(texts[0].starts_with("Service shop/two: "), "{texts:?}");
        assert!(texts[1].ends_with("retrying: no kernel"), "{texts:?}");
        assert_eq!(texts[2], "shop/one TCP IPv4: no room");
        assert_eq!(texts[3], "in force: 2 service ports");
    }
}
