//! What is known of attachments beyond what the kernel has, and which of them are being made.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};

use knit_kernel::IfName;
use knit_kernel::link::Link;
use knit_kernel::owner;
use knit_runtime::{Attachment, NetworkName, PortMapping};
use knit_types::sync::Locked;

use crate::mark::Mark;

/// The attachments of this node. The kernel's marks are what counts; this has what does not fit there, and
/// what is to be taken away when a link went without us.
#[derive(Debug, Default)]
pub(crate) struct Attachments {
    /// By the host end's name.
    known: Mutex<HashMap<String, Known>>,
    /// The ports of the node that led to host ends which were gone when this runtime began.
    lost_ports: Mutex<HashMap<String, Vec<PortMapping>>>,
    /// Host ends that are being made: their rules are there before they are.
    making: Mutex<HashSet<String>>,
    /// Host ends of attachments that are being made, for which IPv6 had to be switched on in the pod.
    switched_on: Mutex<HashSet<String>>,
}

/// What is known of one attachment.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub network: NetworkName,
    pub mark: Mark,
    /// The ports of the node that lead to it: those that were asked for or, if an earlier runtime made it,
    /// those that were found.
    pub ports: Vec<PortMapping>,
    /// What was answered, if this runtime made it.
    pub answer: Option<Attachment>,
    /// Where the pod's namespace was, if this runtime was told.
    pub netns: Option<PathBuf>,
    /// The MTU that its host end was made with: a Network may have another one since.
    pub mtu: u32,
    /// Whether IPv6 was off in the pod's namespace, and was switched on for this interface.
    pub ipv6_on: bool,
}

impl Attachments {
    /// What is known, by host end.
    pub fn known(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.known.locked()
    }

    /// Notes the ports that led to host ends which are gone.
    pub fn had_ports(&self, ports: impl IntoIterator<Item = (String, Vec<PortMapping>)>) {
        self.lost_ports.locked().extend(ports);
    }

    /// Whether all of these ports led to a host end that was gone when this runtime began. They are its own,
    /// whatever program came since.
    pub fn has_lost(&self, host: &IfName, ports: &[PortMapping]) -> bool {
        let plain = |mapping: &PortMapping| PortMapping {
            host_ip: mapping.host_ip.filter(|ip| !ip.is_unspecified()),
            ..*mapping
        };
        let lost = self.lost_ports.locked();
        lost.get(host.as_str()).is_some_and(|lost| ports.iter().all(|mapping| lost.contains(&plain(mapping))))
    }

    /// Forgets what led to a host end that was gone.
    pub fn forget_lost(&self, host: &IfName) {
        self.lost_ports.locked().remove(host.as_str());
    }

    /// Host ends that are being made.
    pub fn making(&self) -> MutexGuard<'_, HashSet<String>> {
        self.making.locked()
    }

    /// Notes that IPv6 was switched on in the pod of an attachment that is being made.
    pub fn switched_on(&self, host: &IfName) {
        let mut switched_on = self.switched_on.locked();
        switched_on.insert(host.to_string());
    }

    /// Whether that was noted, which is forgotten then.
    pub fn take_switched_on(&self, host: &IfName) -> bool {
        self.switched_on.locked().remove(host.as_str())
    }

    /// Whether a link is about to be deleted by us, or its making has not ended.
    pub fn is_in_flux(&self, link: &Link) -> bool {
        link.group == owner::GROUP + 1 || self.making().contains(link.name.as_str())
    }

    /// The MTU that an attachment's host end was made with.
    pub fn made_with(&self, link: &Link) -> Option<u32> {
        self.known().get(link.name.as_str()).map(|known| known.mtu)
    }
}
