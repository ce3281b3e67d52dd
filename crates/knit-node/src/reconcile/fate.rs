//! Whether the owner of a recorded sandbox is gone: by its network namespace, by the container runtime's
//! list, or by what is left of it in the kernel.

use knit_ledger::{SandboxRecord, Unreadable};
use knit_runtime::SandboxId;

use super::Reconciler;
use crate::clock;
use crate::cri::Verdict;
use crate::netns::{self, Processes};
use crate::request::Door;

/// What is to become of a sandbox's networks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum SandboxLiveness {
    /// As far as can be told, it lives.
    Lives,
    /// It lives, but its namespace is not to be seen from here: nothing can be done for it, and nothing may
    /// be removed.
    Hidden,
    /// It is gone, and why that is known.
    Gone(&'static str),
}

impl Reconciler {
    /// Why a sandbox that a garbage collection does not list is not removed all the same. A container runtime
    /// that has not found its sandboxes again yet sends a list without them, or none at all.
    pub(crate) fn spared(&self, record: &SandboxRecord, processes: &Processes) -> Option<&'static str> {
        let grace = self.config.sandbox_grace;
        let verdict = self
            .cri
            .as_ref()
            .map_or(Verdict::Unknown, |cri| cri.verdict(record.sandbox().as_str(), grace, clock::now()));
        let gone = netns::is_gone(record.netns()) || self.is_deleted(record);
        spared(verdict, gone, processes.inhabit(record.netns()), processes.blind)
    }

    /// Whether the API says that there is no such pod on this node. A static pod's object has another uid
    /// than its sandbox says, so only names count.
    fn is_deleted(&self, record: &SandboxRecord) -> bool {
        let world = self.world.get();
        let Some(pod) = record.pod().filter(|_| world.synced.pods) else { return false };
        !world.pods.contains_key(&(pod.namespace.clone(), pod.name.clone()))
    }

    /// Whether a sandbox is certainly gone whose record cannot be read.
    pub(crate) fn is_unreadable_gone(&self, sandbox: &SandboxId, record: &Unreadable) -> bool {
        let grace = self.config.sandbox_grace;
        let verdict = self.cri.as_ref().map(|cri| cri.verdict(sandbox.as_str(), grace, clock::now()));
        let netns = record.netns().filter(|netns| !netns.path.as_os_str().is_empty());
        is_certainly_gone(verdict.unwrap_or(Verdict::Unknown), netns.map(|netns| netns::is_gone(&netns)))
    }

    /// What is to become of a sandbox. `left` says whether anything of it is left in the kernel; nothing if
    /// that cannot be told.
    pub(crate) fn fate(&self, record: &SandboxRecord, left: Option<bool>) -> SandboxLiveness {
        let grace = self.config.sandbox_grace;
        let verdict = self
            .cri
            .as_ref()
            .map_or(Verdict::Unknown, |cri| cri.verdict(record.sandbox().as_str(), grace, clock::now()));
        if record.netns().path.as_os_str().is_empty() {
            // Found after the ledger was lost, and nobody knows where its namespace is. What is in a
            // namespace goes with it; so when nothing is left, the namespace is gone.
            return match left {
                Some(false) if verdict != Verdict::Lives => SandboxLiveness::Gone("nothing of it is left"),
                _ if verdict == Verdict::Gone => {
                    SandboxLiveness::Gone("the container runtime no longer has it")
                }
                _ => SandboxLiveness::Lives,
            };
        }
        if netns::is_gone(record.netns()) {
            return match verdict {
                Verdict::Lives => SandboxLiveness::Hidden,
                Verdict::Gone | Verdict::Unknown => SandboxLiveness::Gone("its network namespace is gone"),
            };
        }
        // Only pods are the container runtime's: what somebody attached by hand is not in its list.
        let pods = record.pod().is_some()
            && record
                .attachments()
                .iter()
                .map(knit_ledger::Attachment::details)
                .any(|d| (d.main && matches!(d.door, Door::Cni(_))) || d.door == Door::Nri);
        if pods && verdict == Verdict::Gone && !netns::is_inhabited(record.netns()) {
            return SandboxLiveness::Gone("the container runtime no longer has it");
        }
        SandboxLiveness::Lives
    }
}

/// The same, of what is known: what the container runtime says, and whether the namespace is gone, if the
/// record still says which one that is. Who attached it cannot be read either, and the container runtime's
/// list has only its own: that it is not listed there proves nothing.
fn is_certainly_gone(verdict: Verdict, namespace_is_gone: Option<bool>) -> bool {
    verdict != Verdict::Lives && namespace_is_gone == Some(true)
}

/// The same, of what is known: what the container runtime said before, whether namespace or pod are gone,
/// whether a process is in the namespace, and whether no process could be seen: then the list alone is not
/// enough, however long it is.
fn spared(verdict: Verdict, gone: bool, inhabited: bool, in_the_dark: bool) -> Option<&'static str> {
    match verdict {
        _ if inhabited => Some("a process is in its network namespace"),
        Verdict::Lives => Some("the container runtime reports it as running"),
        Verdict::Unknown if in_the_dark && !gone => {
            Some("its network namespace exists, and whether a process is in it cannot be determined")
        }
        Verdict::Gone | Verdict::Unknown => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_the_container_runtime_never_had_was_removed_when_its_record_could_not_be_read() {
        use Verdict::{Gone, Lives, Unknown};
        for verdict in [Gone, Unknown] {
            assert!(!is_certainly_gone(verdict, Some(false)), "{verdict:?}");
            assert!(!is_certainly_gone(verdict, None), "{verdict:?}");
            assert!(is_certainly_gone(verdict, Some(true)), "{verdict:?}");
        }
        assert!(!is_certainly_gone(Lives, Some(true)), "its namespace may be hidden from here");
    }

    #[test]
    fn a_garbage_collection_in_the_dark_removes_only_what_is_certainly_gone() {
        use Verdict::{Gone, Lives, Unknown};
        for (verdict, gone, inhabited, in_the_dark, stays) in [
            (Unknown, false, false, false, false),
            (Unknown, false, true, false, true),
            (Unknown, false, false, true, true),
            (Unknown, true, false, true, false),
            (Lives, false, false, false, true),
            (Lives, true, false, true, true),
            (Gone, false, false, true, false),
            (Gone, false, true, false, true),
        ] {
            let why = spared(verdict, gone, inhabited, in_the_dark);
            assert_eq!(why.is_some(), stays, "{verdict:?} {gone} {inhabited} {in_the_dark}: {why:?}");
        }
    }
}
