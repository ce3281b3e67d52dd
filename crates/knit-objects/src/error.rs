//! Everything that can go wrong between Knit and its objects, each with what to do about it.

pub(crate) use knit_types::chain;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kube::core::{ApiResource, Status};

use crate::key::{Key, resource_name};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong with the source of objects.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Neither a kubeconfig nor a pod's service account was found.
    #[error(
        "found no Kubernetes API: there is no usable kubeconfig and this is not a pod with a service \
        account; set KUBECONFIG, specify a kubeconfig, or specify a folder of objects"
    )]
    NoCluster(#[source] Box<kube::config::InferConfigError>),

    /// The kubeconfig that was named cannot be used.
    #[error("cannot use the kubeconfig {path}: specify one that works with kubectl --kubeconfig",
        path = path.display())]
    Kubeconfig {
        /// Where it was looked for.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<kube::config::KubeconfigError>,
    },

    /// The text is no URL.
    #[error("{url:?} is not the URL of a Kubernetes API: use one such as https://10.0.0.1:6443")]
    Url {
        /// The text as it was given.
        url: String,
        /// What is wrong with it.
        source: http::uri::InvalidUri,
    },

    /// No client could be made out of a configuration that was found.
    #[error(
        "cannot create a client for the Kubernetes API at {url}: check the certificates and credentials in \
        the kubeconfig"
    )]
    Client {
        /// The API server.
        url: String,
        /// What is wrong.
        source: Box<kube::Error>,
    },

    /// The folder is not there or cannot be read.
    #[error("cannot read the folder of objects {path}: create it, or specify another \
    one", path = path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },

    /// The system does not let us watch the folder.
    #[error("cannot watch the folder of objects {path}: the inotify limit may have been reached, see \
    /proc/sys/fs/inotify",
        path = path.display())]
    FolderWatch {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },

    /// A file beside the folder could not be written.
    #[error("{attempt}: cannot write {path}", path = path.display())]
    Output {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },

    /// A selector that is no selector.
    #[error("{text:?} is not a valid {what} selector: {problem}; for example: {example}")]
    Selector {
        /// `label` or `field`.
        what: &'static str,
        /// The selector as it was given.
        text: String,
        /// What is wrong with it.
        problem: String,
        /// What one looks like.
        example: &'static str,
    },

    /// The API server did not answer.
    #[error("{attempt}: the Kubernetes API does not answer")]
    Unreachable {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The cause.
        source: Box<kube::Error>,
    },

    /// The API server refused: a role is missing.
    #[error("{attempt}: forbidden; give the account a role with {rule}", rule = attempt.rule())]
    Forbidden {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The answer.
        source: Box<Status>,
    },

    /// The API server does not know the account.
    #[error(
        "{attempt}: the Kubernetes API does not accept the credentials; check the kubeconfig or the service \
         account's token"
    )]
    Unauthorized {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The answer.
        source: Box<Status>,
    },

    /// The API server does not serve the kind.
    #[error("{attempt}: the Kubernetes API has no {kind} in {api_version}; {hint}",
        kind = attempt.resource.kind,
        api_version = attempt.resource.api_version, hint = attempt.unknown_kind_hint())]
    UnknownKind {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The answer.
        source: Box<Status>,
    },

    /// The object is not there.
    #[error("{attempt}: the object does not exist")]
    NotFound {
        /// What was tried.
        attempt: Box<Attempt>,
    },

    /// The object is there already.
    #[error("{attempt}: the object already exists")]
    AlreadyExists {
        /// What was tried.
        attempt: Box<Attempt>,
    },

    /// Somebody else changed the object in between.
    #[error("{attempt}: the object was changed in the meantime; read it again and retry")]
    Conflict {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The answer.
        source: Box<Status>,
    },

    /// The API server found the object wrong.
    #[error("{attempt}: the Kubernetes API refuses the object")]
    Invalid {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The answer; it says which field.
        source: Box<Status>,
    },

    /// The list or watch is older than what the API server remembers: a new list is needed.
    #[error("{attempt}: the requested version is too old")]
    Expired {
        /// What was tried.
        attempt: Box<Attempt>,
    },

    /// Any other answer of the API server.
    #[error("{attempt}: the Kubernetes API returned an error")]
    Api {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The answer.
        source: Box<Status>,
    },

    /// The object cannot be turned into JSON, or the answer not into the object.
    #[error("{attempt}: the object cannot be decoded as a {kind}", kind = attempt.resource.kind)]
    Decode {
        /// What was tried.
        attempt: Box<Attempt>,
        /// What is wrong.
        source: serde_json::Error,
    },

    /// An object without a name, or with one that cannot be a name.
    #[error("{attempt}: {name:?} is not a valid object name")]
    Name {
        /// What was tried.
        attempt: Box<Attempt>,
        /// The name.
        name: String,
    },

    /// Waited as long as the caller allowed.
    #[error("{what} did not arrive within {waited:?}{because}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// For how long.
        waited: Duration,
        /// The state of the source, if it explains the wait.
        because: String,
    },
}

/// What was being done, to which object: the first words of every error about one.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The verb as roles name it: get, list, watch, create, update, patch, delete.
    pub verb: &'static str,
    /// The kind.
    pub resource: ApiResource,
    /// The object, if it is about one.
    pub key: Option<Key>,
    /// Whether it is about the object's status.
    pub status: bool,
}

// === impl Error ===

impl Error {
    /// Whether the same attempt may succeed later without anybody's doing: retry with backoff.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Output { .. } | Self::Timeout { .. } | Self::Expired { .. } => {
                true
            }
            // Roles, tokens and CRDs are often put in place after the program that needs them has started.
            Self::Forbidden { .. } | Self::Unauthorized { .. } | Self::UnknownKind { .. } => true,
            Self::Api { source, .. } => source.code == 429 || source.code >= 500,
            _ => false,
        }
    }

    /// Whether what was attempted was certainly not done: the API server said no. Of anything else it is not
    /// known, such as a write to which no answer came in time.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Forbidden { .. }
            | Self::Unauthorized { .. }
            | Self::UnknownKind { .. }
            | Self::NotFound { .. }
            | Self::AlreadyExists { .. }
            | Self::Conflict { .. }
            | Self::Invalid { .. }
            | Self::Expired { .. }
            | Self::Name { .. } => true,
            Self::Api { source, .. } => (400..500).contains(&source.code) && source.code != 408,
            _ => false,
        }
    }

    /// The error and everything that caused it, on one line, for logs and statuses.
    #[must_use]
    pub fn with_causes(&self) -> String {
        chain(self)
    }

    /// How long the API server asked us to wait, if it did.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let Self::Api { source, .. } = self else { return None };
        let seconds = source.details.as_ref()?.retry_after_seconds;
        (seconds > 0).then(|| Duration::from_secs(seconds.into()))
    }

    /// The error of a request, by what the API server answered.
    pub(crate) fn from_kube(attempt: Box<Attempt>, error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::from_status(attempt, status),
            kube::Error::SerdeError(source) => Self::Decode { attempt, source },
            source => Self::Unreachable { attempt, source: Box::new(source) },
        }
    }

    /// The error that a Status stands for.
    pub(crate) fn from_status(attempt: Box<Attempt>, source: Box<Status>) -> Self {
        let names_object = source.details.as_ref().is_some_and(|d| !d.name.is_empty());
        match source.code {
            401 => Self::Unauthorized { attempt, source },
            403 => Self::Forbidden { attempt, source },
            // Creating in a namespace that is not there names the namespace; a kind that is not there names
            // nothing.
            404 if attempt.key.is_none() || !names_object => Self::UnknownKind { attempt, source },
            404 => Self::NotFound { attempt },
            409 if source.reason == "AlreadyExists" => Self::AlreadyExists { attempt },
            409 => Self::Conflict { attempt, source },
            410 => Self::Expired { attempt },
            400 | 422 => Self::Invalid { attempt, source },
            _ => Self::Api { attempt, source },
        }
    }
}

// === impl Attempt ===

impl Attempt {
    pub(crate) fn new(verb: &'static str, resource: &ApiResource, key: Option<&Key>) -> Box<Self> {
        Box::new(Self { verb, resource: resource.clone(), key: key.cloned(), status: false })
    }

    /// The rule of a Role that would allow it.
    fn rule(&self) -> String {
        format!(
            "verbs: [{}], resources: [{}{}], apiGroups: [{:?}]",
            self.verb,
            self.resource.plural,
            if self.status { "/status" } else { "" },
            self.resource.group,
        )
    }

    fn unknown_kind_hint(&self) -> &'static str {
        if self.resource.group == knit_api::GROUP {
            "apply Knit's CustomResourceDefinitions (deploy/crds) first"
        } else {
            "the API server is too old for it, or its feature is off"
        }
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, resource_name(&self.resource))?;
        if self.status {
            f.write_str("/status")?;
        }
        if let Some(key) = &self.key {
            write!(f, " {key}")?;
        }
        Ok(())
    }
}
