//! What a backend under test can do, how long it has, and what came of it.

use std::time::Duration;

use knit_proxy::backend::Outcome;
use knit_proxy::model::{Family, Protocol};

use crate::case::Flow;

/// How cases are run. The default is a backend that can do everything, works before its call returns, and a
/// machine that may be busy.
pub struct Options<'a> {
    /// It serves UDP.
    pub udp: bool,
    /// It serves IPv6.
    pub ipv6: bool,
    /// An endpoint can see who the client is. A proxy that opens connections of its own hides that.
    pub keeps_client_addresses: bool,
    /// It can drop in silence. A proxy that accepts a connection before it knows whose it is can only close
    /// it; then a flow that should be dropped must not be answered, however that comes about.
    pub drops: bool,
    /// How long an answer may take. A minute by default: it is what a case that fails costs.
    pub answer: Duration,
    /// How long silence has to last to count as a drop.
    pub silence: Duration,
    /// Called after each step; returns when what the backend was told is in force, or why it never will be.
    /// For backends whose work is done elsewhere, such as those that follow a stream.
    pub settled: Box<dyn Fn() -> Result<(), String> + 'a>,
    /// Told of each case as it ends, so that people see something happen.
    pub told: Told<'a>,
}

/// Hears of a case that ended: its name, and what came of it.
pub type Told<'a> = Box<dyn Fn(&str, &Report) + 'a>;

/// What came of some cases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// How many flows went as they should.
    pub passed: usize,
    /// What did not.
    pub wrong: Vec<String>,
    /// What was left out because the backend cannot do it, and why. Look at it: what is left out is not
    /// tested.
    pub left_out: Vec<String>,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            udp: true,
            ipv6: true,
            keeps_client_addresses: true,
            drops: true,
            answer: Duration::from_secs(60),
            silence: Duration::from_millis(300),
            settled: Box::new(|| Ok(())),
            told: Box::new(|_, _| {}),
        }
    }
}

impl Options<'_> {
    /// Why a flow is left out.
    pub(crate) fn cannot(&self, flow: &Flow) -> Option<&'static str> {
        if !self.serves(flow.to.protocol, Family::of(flow.to.socket.ip())) {
            return Some("left out: this protocol or family is not served");
        }
        (!self.keeps_client_addresses && flow.masqueraded == Some(false))
            .then_some("left out: client addresses are hidden")
    }

    /// Whether an outcome is what such a backend has to say.
    pub(crate) fn expected(&self, outcome: &Outcome) -> bool {
        let rest = || {
            let failures = outcome.failures().iter();
            failures.map(|failure| &failure.key).all(|key| !self.serves(key.protocol, key.family))
        };
        match outcome {
            Outcome::Done => true,
            Outcome::Partly(_) => rest(),
            Outcome::FamilyFailed { family, .. } => !self.serves(Protocol::Tcp, *family) && rest(),
            Outcome::Failed(_) => false,
        }
    }

    fn serves(&self, protocol: Protocol, family: Family) -> bool {
        (self.udp || protocol != Protocol::Udp) && (self.ipv6 || family != Family::V6)
    }
}
