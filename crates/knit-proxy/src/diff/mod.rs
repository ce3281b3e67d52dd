//! Turning states into differences: a keyed [`Store`], and [`Slots`] for endpoints.

mod slots;
mod store;

pub use slots::{SlotChange, SlotOp, Slots};
pub use store::{Delta, Store};
