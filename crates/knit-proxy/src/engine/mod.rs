//! Owns a view and a backend, and brings them together: waits for the first lists, paces, retries.
//!
//! The [`Engine`] is sans-IO. It has no thread and no clock: [`handle`](Engine::handle) it an event,
//! [`poll`](Engine::poll) it, and it says when to poll again. [`run`] is the loop that does this on a thread,
//! fed by a [`Handle`](crate::source::Handle).

mod core;
mod log;
mod pacer;
#[cfg(test)]
mod tests;

pub use self::core::{Engine, EngineConfig, Inspect, Observer, PortStatus, Run, WaitFor};
pub use log::{Level, Log};
pub use pacer::{Due, Pace, Pacer};

use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;

use crate::backend::Backend;
use crate::source::{Inbox, Message};

/// Tells the time. Tests have their own.
pub trait Clock {
    /// The time now.
    fn now(&self) -> Instant;
}

/// The machine's monotonic clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// Runs an engine on this thread until it is stopped or nobody can send to it any more; hands it back then.
///
/// What the backend made stays: a proxy that stops must not break connections.
pub fn run<B: Backend>(mut engine: Engine<B>, inbox: &Inbox) -> Engine<B> {
    let clock = SystemClock;
    loop {
        let mut next = match engine.poll(&clock) {
            Some(at) => match inbox.receiver.recv_timeout(at.saturating_duration_since(clock.now())) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return engine,
            },
            None => match inbox.receiver.recv() {
                Ok(message) => Some(message),
                Err(_) => return engine,
            },
        };
        // Take all that waits before working, so that a burst is one call to the backend.
        while let Some(message) = next {
            match message {
                Message::Event(event) => engine.handle(event, clock.now()),
                Message::Events(events) => {
                    let now = clock.now();
                    events.into_iter().for_each(|event| engine.handle(event, now));
                }
                Message::Inspect(look) => look(engine.inspect()),
                Message::Compare => engine.compare(clock.now()),
                Message::LookAgain => engine.look_again(clock.now()),
                Message::Stop => return engine,
            }
            // If all senders are gone, the next wait says so, after the work that is due.
            next = inbox.receiver.try_recv().ok();
        }
    }
}
