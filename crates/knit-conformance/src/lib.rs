//! Checks any network runtime, through its socket, against what KNI v1alpha1 promises.
//!
//! Every case ([`case::Case`]) is one promise. Those of the core hold for every runtime; the others come with
//! a feature that the runtime announces, and are skipped where it does not. The suite makes Networks and pod
//! namespaces of its own (`bed`), looks into the namespaces, sends packets between them, and takes everything
//! away again. It needs the right to make network namespaces, and a directory that the runtime sees at the
//! same path.

mod bed;
mod case;
mod core;
mod extended;
mod packets;
mod report;
mod topologies;

pub use bed::{ADDRESSES, ExistingNetwork, Options};
pub use case::{Case, Problem, Profile, Verdict};
pub use report::{CaseReport, Outcome, ProfileReport, Report, RuntimeReport};

use std::time::Duration;

use knit_runtime::NetworkName;

use crate::bed::Bed;

/// How long one case may take. Deadlines of calls are shorter.
const CASE_DEADLINE: Duration = Duration::from_secs(90);

/// Why the suite could not run at all.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The runtime does not say who it is.
    #[error(
        "the runtime at {socket} does not report its capabilities: check that it is running and that this is \
         its socket"
    )]
    Runtime {
        /// The socket.
        socket: String,
        /// What came instead.
        #[source]
        source: knit_runtime::Error,
    },
    /// Nothing can be attached to.
    #[error(
        "the runtime does not set up Networks (feature NetworkSetup): name an existing one, and free \
         addresses in it"
    )]
    NoNetwork,
    /// There is no link for Networks of the only kind that it has.
    #[error("the runtime serves only Networks on links of nodes: name a link of this node")]
    NoParent,
    /// A Network is named that nobody needs.
    #[error("the runtime sets up Networks itself: leave out Network {network}, the suite creates its own")]
    SetsUp {
        /// The Network.
        network: NetworkName,
    },
    /// Not enough addresses for the pods that are attached at once.
    #[error(
        "{given} {family} addresses of Network {network} are given: give at least {ADDRESSES} that are not \
         in use"
    )]
    FewAddresses {
        /// The Network.
        network: NetworkName,
        /// The family.
        family: &'static str,
        /// How many there are.
        given: usize,
    },
    /// The addresses do not say what the Network is.
    #[error(
        "the addresses of Network {network} do not show whether it is routed or switched: give all of them \
         with the prefix length that pods have, /32 and /128 if it is routed, that of its subnets if it is \
         switched"
    )]
    MixedAddresses {
        /// The Network.
        network: NetworkName,
    },
    /// No directory for namespaces.
    #[error("cannot create the directory {directory} for pods' namespaces: specify another one")]
    Directory {
        /// The directory.
        directory: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// Network namespaces cannot be made here.
    #[error("cannot create pods' namespaces in {directory}: run as root, or in a user namespace")]
    Namespaces {
        /// The directory.
        directory: String,
        /// What the system said.
        #[source]
        source: knit_kernel::netns::Error,
    },
}

/// All cases, the core first.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut cases = core::cases();
    cases.extend(topologies::cases());
    cases.extend(extended::cases());
    cases
}

/// Runs all cases, one after the other; `progress` hears of each when it is done.
///
/// # Errors
/// When the suite cannot run here. What is wrong with the runtime is in the report, not an error.
pub async fn run(options: Options, mut progress: impl FnMut(&Case, &Outcome)) -> Result<Report, Error> {
    let bed = Bed::new(options).await?;
    let mut done = Vec::new();
    for case in cases() {
        let outcome = if !bed.announces(case.profile) {
            Outcome::Skipped("the runtime does not announce it".into())
        } else {
            let ended = tokio::time::timeout(CASE_DEADLINE, (case.run)(&bed, case.profile)).await;
            let verdict = ended
                .unwrap_or_else(|_| Err(Problem::Failed(format!("it did not end within {CASE_DEADLINE:?}"))));
            // What a case leaves would be blamed on the next one.
            let tidied = bed.tidy().await;
            match (verdict, tidied) {
                (Ok(()), Ok(())) => Outcome::Passed,
                (Ok(()), Err(problem)) | (Err(problem), _) => problem.into(),
            }
        };
        progress(&case, &outcome);
        done.push((case, outcome));
    }
    let report = Report::new(bed.info(), done);
    bed.close().await;
    Ok(report)
}
