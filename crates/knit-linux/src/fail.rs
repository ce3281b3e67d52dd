//! Errors of the kernel in the words of the protocol.

use std::error::Error as StdError;
use std::fmt::Display;

use knit_runtime::{Error, Reason, Result};
pub(crate) use knit_types::chain;

use crate::mark::Mark;

/// An error of the kernel, with what was attempted.
pub(crate) fn internal<E>(attempted: impl Display) -> impl FnOnce(E) -> Error
where
    E: StdError + Send + Sync + 'static,
{
    move |source| Error::new(Reason::Internal, format!("cannot {attempted}")).because(source)
}

/// What a check of an attachment found wrong, if anything.
pub(crate) fn damaged(mark: &Mark, wrong: &[String]) -> Result<()> {
    if wrong.is_empty() {
        return Ok(());
    }
    let message = format!(
        "interface {} of sandbox {} differs from what was created ({}): detach and attach it again",
        mark.interface,
        mark.sandbox,
        wrong.join("; ")
    );
    Err(Error::new(Reason::Damaged, message))
}
