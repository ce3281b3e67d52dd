//! An error with its causes on one line.
//!
//! A message says what was attempted and what to do, and leaves its cause to its source. So whoever shows an
//! error shows the whole chain, by this and by nothing else, and nothing is said twice.

use std::error::Error;
use std::fmt;

/// Shows an error and everything that caused it, on one line: `what failed: why: and why that`.
///
/// A cause that is already spelt out above it is left out: our own errors do not do that (each crate has a
/// test with [`repeated_cause`]), but those of other libraries do.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a>(pub &'a (dyn Error + 'a));

/// An error whose message repeats what caused it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RepeatedCause {
    /// The message.
    pub message: String,
    /// The cause's message, which is part of it.
    pub cause: String,
}

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&chain_messages(self.0).join(": "))
    }
}

/// An error and everything that caused it, on one line: [`Chain`] as text.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    Chain(error).to_string()
}

/// An error's message and those of everything that caused it, the first one first, as [`Chain`] joins them.
#[must_use]
pub fn chain_messages(error: &dyn Error) -> Vec<String> {
    let mut messages: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let message = error.to_string();
        if !message.is_empty() && !messages.iter().any(|above| above.contains(&message)) {
            messages.push(message);
        }
        next = error.source();
    }
    messages
}

/// Looks for a message in the chain that repeats the one below it. For the tests that walk a crate's errors.
#[must_use]
pub fn repeated_cause(error: &dyn Error) -> Option<RepeatedCause> {
    let mut message = error.to_string();
    let mut next = error.source();
    while let Some(inner) = next {
        let cause = inner.to_string();
        if !cause.is_empty() && message.contains(&cause) {
            return Some(RepeatedCause { message, cause });
        }
        message = cause;
        next = inner.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Made {
        #[error("opening the file failed")]
        Open(#[source] std::io::Error),
        #[error("starting failed")]
        Start(#[source] Box<Made>),
        #[error("reading failed: {0}")]
        Repeats(#[source] std::io::Error),
    }

    fn full() -> std::io::Error {
        std::io::Error::other("no space")
    }

    #[test]
    fn every_cause_is_shown_once() {
        let error = Made::Start(Box::new(Made::Open(full())));
        assert_eq!(Chain(&error).to_string(), "starting failed: opening the file failed: no space");
        assert_eq!(repeated_cause(&error), None);
    }

    #[test]
    fn causes_are_listed_as_they_are_joined() {
        let error = Made::Start(Box::new(Made::Repeats(full())));
        assert_eq!(chain_messages(&error), ["starting failed", "reading failed: no space"]);
    }

    #[test]
    fn what_a_strange_error_repeats_is_left_out_and_what_is_below_is_not() {
        let error = Made::Start(Box::new(Made::Repeats(full())));
        assert_eq!(Chain(&error).to_string(), "starting failed: reading failed: no space");
        let found = repeated_cause(&error).expect("a message that repeats its cause");
        assert_eq!((&*found.message, &*found.cause), ("reading failed: no space", "no space"));
    }
}
