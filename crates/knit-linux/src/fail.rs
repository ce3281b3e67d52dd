//! Errors of the kernel in the words of the protocol.

use std::error::Error as StdError;
use std::fmt::Display;

use knit_runtime::{Error, Reason};
pub(crate) use knit_types::chain;

/// An error of the kernel, with what was attempted.
pub(crate) fn internal<E>(attempted: impl Display) -> impl FnOnce(E) -> Error
where
    E: StdError + Send + Sync + 'static,
{
    move |source| Error::new(Reason::Internal, format!("cannot {attempted}")).because(source)
}
