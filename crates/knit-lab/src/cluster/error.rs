//! What can go wrong with a lab, in words.

use std::path::PathBuf;

use knit_apiserver::{ApiError, StartError};

/// A result of the lab.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with a lab.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The embedded API does not start.
    #[error("cannot start the lab's Kubernetes API")]
    Api(#[source] StartError),
    /// An object was refused.
    #[error("{kind} {name}: {error}", error = error.message)]
    Refused {
        /// Its kind.
        kind: String,
        /// Its namespace and name.
        name: String,
        /// What the API said.
        error: Box<ApiError>,
    },
    /// A manifest cannot be read.
    #[error("cannot read manifest {file}: {why}")]
    Manifest {
        /// Where it came from.
        file: String,
        /// The reason, in words.
        why: String,
    },
    /// Two things want the same addresses.
    #[error("{first} overlaps {second}: use another range; only primary Networks may overlap each other")]
    Overlap {
        /// The one.
        first: String,
        /// The other.
        second: String,
    },
    /// A pod asks for a Network that it cannot have.
    #[error("{who} requests Network {network}, which {why}")]
    Network {
        /// Who asks.
        who: String,
        /// The Network.
        network: String,
        /// Why not.
        why: String,
    },
    /// A part of the network was refused by the kernel.
    #[error("cannot create {what}")]
    Kernel {
        /// What could not be created.
        what: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file or a process.
    #[error("{what}")]
    Io {
        /// What was attempted.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// There is no such node.
    #[error("node {name} does not exist in this lab: `knit lab status` lists them")]
    NoSuchNode {
        /// The name that was given.
        name: String,
    },
    /// There is no such pod, or it does not run.
    #[error("pod {name} is not running in this lab: `knit lab status` lists those that are")]
    NoSuchPod {
        /// The name that was given.
        name: String,
    },
    /// A pod has no such container.
    #[error("pod {pod} has no container {name}: it has {has}")]
    NoSuchContainer {
        /// The pod.
        pod: String,
        /// The name that was given.
        name: String,
        /// The containers that there are.
        has: String,
    },
    /// Something did not come to be in time.
    #[error("after {seconds} s {what}{details}")]
    TooLate {
        /// How long was waited.
        seconds: u64,
        /// What is missing.
        what: String,
        /// What is known about it.
        details: String,
    },
    /// The shim said no.
    #[error("{0}")]
    Cni(String),
    /// The shim cannot be run.
    #[error("cannot run the CNI shim {program}", program = program.display())]
    Shim {
        /// The program.
        program: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn kernel<E>(what: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let what = what.into();
        move |source| Self::Kernel { what, source: source.into() }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
