//! The host side of one attachment: found, made and taken away again.
//!
//! Written over seams ([`Links`], [`Nftables`]), so that half-made links, names that are taken and the order
//! of undoing are tested without a kernel.

use knit_kernel::handle::Created;
use knit_kernel::link::{Link, NewLink};
use knit_kernel::links::Links;
use knit_kernel::{IfName, owner};
use knit_nft::{self as nft, Nftables, TableId};
use knit_runtime::{Error, Reason, Result};

use crate::fail::internal;
use crate::mark::{HOST_PREFIX, Mark};
use crate::rules::{self, SetElement};
use crate::wanted::{Links as Numbers, put, take};

/// The host side of one attachment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port<'a> {
    /// The host end's name.
    pub host: &'a IfName,
    /// Whose it is.
    pub mark: &'a Mark,
}

/// What is there under a port's name.
#[derive(Debug, PartialEq)]
pub(crate) enum FoundPort {
    Nothing,
    /// The link of a making that was cut off.
    HalfMade(u32),
    /// This attachment's, as asked for or not.
    Ours(Box<(Link, Mark)>),
}

/// Whether a link is an attachment's that a killed runtime did not finish. The kernel takes a link's group
/// when it makes it, and its alias only afterwards; a kill in between leaves a link of ours that does not say
/// whose it is.
pub(crate) fn is_half_made(link: &Link, being_made: bool) -> bool {
    link.kind == "veth"
        && link.alias.is_none()
        && link.group == owner::GROUP
        && link.name.as_str().starts_with(HOST_PREFIX)
        && !being_made
}

impl Port<'_> {
    /// Looks what is there under its name. What is another's is a conflict, and stays.
    pub fn find(&self, links: &dyn Links, being_made: bool) -> Result<FoundPort> {
        let found = links.link_by_name(self.host).map_err(internal("look for the attachment"))?;
        let Some(link) = found else { return Ok(FoundPort::Nothing) };
        let conflict = |message: String| Err(Error::new(Reason::Conflict, message));
        let Some(mark) = link.owner().and_then(Mark::parse) else {
            if is_half_made(&link, being_made) {
                return Ok(FoundPort::HalfMade(link.index));
            }
            return conflict(format!(
                "link {} already exists and is not an attachment of Knit: delete it",
                self.host
            ));
        };
        if (&mark.sandbox, &mark.interface) != (&self.mark.sandbox, &self.mark.interface) {
            return conflict(format!(
                "link {} belongs to interface {} of sandbox {}: try again with another sandbox id",
                self.host, mark.interface, mark.sandbox
            ));
        }
        Ok(FoundPort::Ours(Box::new((link, mark))))
    }

    /// Makes it: its rules first, so that it is never without them; then the pair of links; then what is
    /// inside the pod, which `pod` does; then what the router has for it. If anything fails, all of it is
    /// taken away again.
    pub fn make(
        &self,
        links: &dyn Links,
        rules: &mut dyn Nftables,
        new: &NewLink<'_>,
        pod: impl FnOnce(Created) -> Result<()>,
    ) -> Result<Created> {
        let made = self.try_make(links, rules, new, pod);
        if made.is_err() {
            self.undo(links, rules);
        }
        made
    }

    fn try_make(
        &self,
        links: &dyn Links,
        rules: &mut dyn Nftables,
        new: &NewLink<'_>,
        pod: impl FnOnce(Created) -> Result<()>,
    ) -> Result<Created> {
        let driver = self.mark.driver();
        let allow = SetElement::add(&self.sources(), &driver.sources());
        rules.commit(&allow).map_err(internal("allow the pod's addresses"))?;
        let created = links.create_link(new).map_err(|error| self.refused(error))?;
        pod(created)?;
        let mut numbers: Numbers = [(self.host.to_string(), created.index)].into();
        let master = driver.master().zip(new.master);
        numbers.extend(master.map(|(master, index)| (master.name.to_owned(), index)));
        let entries = driver.pod_entries(self.host.as_str(), self.mark);
        put(links, &numbers, &entries).map_err(internal("add the routes to the pod"))?;
        Ok(created)
    }

    /// Takes away what was made of it. Another's link of its name is not ours to delete.
    fn undo(&self, links: &dyn Links, rules: &mut dyn Nftables) {
        let look = links.link_by_name(self.host).map_err(internal("look for what was created"));
        let undone = look.and_then(|link| {
            let ours = link.filter(|link| link.owner().is_none_or(|owner| Mark::parse(owner).is_some()));
            self.unmake(links, rules, ours.map(|link| link.index))
        });
        if let Err(error) = undone {
            let error = crate::fail::chain(&error);
            tracing::error!(error, host = %self.host, "a failed attachment could not be undone");
        }
    }

    /// Takes it away: its link first, so that nothing more is sent, then what allowed it to.
    pub fn unmake(&self, links: &dyn Links, rules: &mut dyn Nftables, link: Option<u32>) -> Result<()> {
        if let Some(index) = link {
            links.delete_link(index).map_err(internal(format!("delete link {}", self.host)))?;
        }
        self.take_left(links)?;
        take_elements(rules, &self.sources(), &self.mark.driver().sources())
    }

    /// Takes away what the router has for the pod that does not go with its link.
    fn take_left(&self, links: &dyn Links) -> Result<()> {
        let left = self.mark.driver().left_by(self.mark);
        let Some(name) = left.first().and_then(|entry| IfName::new(entry.link()).ok()) else { return Ok(()) };
        let there = links.link_by_name(&name).map_err(internal(format!("look for link {name}")))?;
        let numbers: Numbers = there.into_iter().map(|link| (name.to_string(), link.index)).collect();
        take(links, &numbers, &left).map_err(internal("delete the pod's entries in the router"))
    }

    fn sources(&self) -> Vec<SetElement> {
        rules::source_elements(self.host.as_str(), self.mark.mac, self.mark.ips())
    }

    fn refused(&self, error: knit_kernel::Error) -> Error {
        if error.is_exists() {
            let message = format!(
                "sandbox {} already has an interface {} that Knit did not create: use another name",
                self.mark.sandbox, self.mark.interface
            );
            return Error::new(Reason::Conflict, message).because(error);
        }
        internal("create the pod's interface")(error)
    }
}

/// Takes elements away; those that are gone already are fine.
pub(crate) fn take_elements(kernel: &mut dyn Nftables, puts: &[SetElement], table: &TableId) -> Result<()> {
    if puts.is_empty() {
        return Ok(());
    }
    let failed = || internal::<nft::Error>("delete the pod's rules");
    match kernel.commit(&SetElement::delete(puts, table)) {
        Ok(()) => return Ok(()),
        Err(error) if error.is_not_found() => {}
        Err(error) => return Err(failed()(error)),
    }
    // Some are gone: find out which, the slow way.
    for put in puts {
        match kernel.commit(&SetElement::delete(std::slice::from_ref(put), table)) {
            Ok(()) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(failed()(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "port_tests.rs"]
mod tests;
