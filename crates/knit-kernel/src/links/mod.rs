//! A seam: the links of one namespace, real or not. What makes, finds and takes away links is written over
//! it, and is tested without a kernel ([`FakeLinks`], with the feature `testing`).

#[cfg(feature = "testing")]
mod fake;

#[cfg(feature = "testing")]
pub use fake::FakeLinks;

use crate::error::{Error, Result};
use crate::handle::{Created, Handle, LinkFilter};
use crate::link::{Link, NewLink};
use crate::name::IfName;
use crate::op::Op;

/// The links of a namespace that is perhaps another one: what can be done there from here.
pub trait LinkList {
    /// The link with this name, or `None`.
    fn link_by_name(&self, name: &IfName) -> Result<Option<Link>>;

    /// The links that the filter accepts, in the order of their indexes.
    fn links(&self, filter: &LinkFilter<'_>) -> Result<Vec<Link>>;

    /// Deletes a link: whether there was one.
    fn delete_link(&self, index: u32) -> Result<bool>;
}

/// The links of one namespace.
pub trait Links: LinkList {
    /// Makes a link with all that it is to have. On an error nothing is left of it.
    fn create_link(&self, new: &NewLink<'_>) -> Result<Created>;

    /// Applies operations in order. One that is refused does not stop those after it.
    fn apply(&self, ops: &[Op<'_>]) -> Result<()>;

    /// The index of a link that must be there.
    fn index_of(&self, name: &IfName) -> Result<u32> {
        let missing = || Error::NotFound { object: format!("link {name}"), namespace: "this one".into() };
        self.link_by_name(name)?.map(|link| link.index).ok_or_else(missing)
    }
}

impl LinkList for Handle {
    fn link_by_name(&self, name: &IfName) -> Result<Option<Link>> {
        Handle::link_by_name(self, name)
    }

    fn links(&self, filter: &LinkFilter<'_>) -> Result<Vec<Link>> {
        Handle::links(self, filter)
    }

    fn delete_link(&self, index: u32) -> Result<bool> {
        Handle::delete_link(self, index)
    }
}

impl Links for Handle {
    fn create_link(&self, new: &NewLink<'_>) -> Result<Created> {
        Handle::create_link(self, new)
    }

    fn apply(&self, ops: &[Op<'_>]) -> Result<()> {
        Handle::apply(self, ops)
    }

    fn index_of(&self, name: &IfName) -> Result<u32> {
        Handle::index_of(self, name)
    }
}
