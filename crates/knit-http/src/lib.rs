//! A small HTTP server for health and numbers: it changes nothing, and lets no client keep it from others.
//!
//! What is answered is the caller's: [`serve`] takes a function from what was asked to a [`Reply`];
//! [`Answer`] makes the usual ones. [`Limits`] say how many connections there are at once, of one client and
//! of all, and how long they last. [`open_patiently`] waits for a port that somebody else has, or an address
//! that comes later.

mod answer;
mod cached;
mod guests;
mod limits;
mod open;
mod server;

pub use answer::Answer;
pub use cached::Cached;
pub use guests::Guests;
pub use limits::Limits;
pub use open::{OPEN_RETRY_DELAY, open_patiently};
pub use server::{Asked, Later, Reply, only_get, only_get_later, serve};
