//! Errors of the kernel in the words of the protocol.

use std::error::Error as StdError;
use std::fmt::Display;

use knit_runtime::{Error, Reason};

/// An error of the kernel, with what was attempted.
pub(crate) fn internal<E>(attempted: impl Display) -> impl FnOnce(E) -> Error
where
    E: StdError + Send + Sync + 'static,
{
    move |source| {
        let message = format!("cannot {attempted}: {}", chain(&source));
        Error::new(Reason::Internal, message).because(source)
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
