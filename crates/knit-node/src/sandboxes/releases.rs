//! Which claims were released since a request began. Requests go on when who asked no longer waits, and are
//! overtaken by the release of what they are about: nobody would ever free what they reserve then.

use std::collections::VecDeque;
use std::sync::Mutex;

use knit_types::sync::Locked as _;

/// How many releases are remembered; a request that began before all of these is refused.
const REMEMBERED: u64 = 1024;

/// The latest releases.
#[derive(Debug, Default)]
pub(crate) struct Releases {
    state: Mutex<State>,
}

/// When something began, counted in releases.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Began(u64);

#[derive(Debug, Default)]
struct State {
    /// How many there were.
    count: u64,
    /// The uids of the last ones, the oldest first.
    uids: VecDeque<String>,
}

// === impl Releases ===

impl Releases {
    /// Now.
    pub(crate) fn now(&self) -> Began {
        Began(self.state.locked().count)
    }

    /// Notes that the claim with this uid is released.
    pub(crate) fn note(&self, uid: &str) {
        let mut state = self.state.locked();
        state.count += 1;
        state.uids.push_back(uid.to_owned());
        if state.uids.len() as u64 > REMEMBERED {
            state.uids.pop_front();
        }
    }

    /// Whether the claim with this uid may have been released since then.
    pub(crate) fn may_have(&self, uid: &str, since: Began) -> bool {
        let state = self.state.locked();
        let later = usize::try_from(state.count - since.0).unwrap_or(usize::MAX);
        later > state.uids.len() || state.uids.iter().rev().take(later).any(|released| released == uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_known_to_who_began_before_it() {
        let releases = Releases::default();
        let before = releases.now();
        releases.note("a");
        let between = releases.now();
        releases.note("b");
        assert!(releases.may_have("a", before) && releases.may_have("b", before));
        assert!(!releases.may_have("a", between) && releases.may_have("b", between));
        assert!(!releases.may_have("b", releases.now()) && !releases.may_have("c", before));
        (0..REMEMBERED - 1).for_each(|_| releases.note("x"));
        assert!(releases.may_have("c", before), "what is forgotten may have been anybody's");
        assert!(!releases.may_have("c", between), "nothing of that is forgotten");
        assert_eq!(releases.state.locked().uids.len() as u64, REMEMBERED);
    }
}
