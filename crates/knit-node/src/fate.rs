//! Whether the owner of a recorded sandbox is gone: by its network namespace, by the container runtime's list, or by
//! what is left of it in the kernel.

use knit_ledger::SandboxRecord;

use crate::clock;
use crate::core::Core;
use crate::cri::Verdict;
use crate::netns;
use crate::record::details;
use crate::request::Door;

/// What is to become of a sandbox's networks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fate {
    /// As far as can be told, it lives.
    Lives,
    /// It lives, but its namespace is not to be seen from here: nothing can be done for it, and nothing may be removed.
    Hidden,
    /// It is gone, and why that is known.
    Gone(&'static str),
}

impl Core {
    /// What is to become of a sandbox. `left` says whether anything of it is left in the kernel; nothing if that cannot
    /// be told.
    pub(crate) fn fate(&self, record: &SandboxRecord, left: Option<bool>) -> Fate {
        let grace = self.config().sandbox_grace;
        let verdict =
            self.cri().map_or(Verdict::Unknown, |cri| cri.verdict(record.sandbox(), grace, clock::now()));
        if record.netns().path.as_os_str().is_empty() {
            // Found after the ledger was lost, and nobody knows where its namespace is. What is in a namespace goes
            // with it; so when nothing is left, the namespace is gone.
            return match left {
                Some(false) if verdict != Verdict::Lives => Fate::Gone("nothing of it is left"),
                _ if verdict == Verdict::Gone => Fate::Gone("the container runtime no longer has it"),
                _ => Fate::Lives,
            };
        }
        if netns::is_gone(record.netns()) {
            return match verdict {
                Verdict::Lives => Fate::Hidden,
                Verdict::Gone | Verdict::Unknown => Fate::Gone("its network namespace is gone"),
            };
        }
        // Only pods are the container runtime's: what somebody attached by hand is not in its list.
        let pods = record.pod().is_some()
            && record
                .attachments()
                .iter()
                .filter_map(details)
                .any(|d| d.main && matches!(d.door, Door::Cni(_)));
        if pods && verdict == Verdict::Gone && !netns::is_inhabited(record.netns()) {
            return Fate::Gone("the container runtime no longer has it");
        }
        Fate::Lives
    }
}
