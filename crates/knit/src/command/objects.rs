//! Where a command reads objects from: the flags that `knit get`, `knit doctor` and `knit explain` share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use knit_objects::{FolderOptions, Key, Kinds, Object, Objects, Selection, Source};

/// How long an API server may take to answer.
const LIST_TIMEOUT: Duration = Duration::from_secs(15);

/// Where objects are read from.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct From {
    /// Read objects from the files in this folder instead of a cluster
    #[arg(long, env = "KNIT_OBJECTS_FROM", value_name = "FOLDER", conflicts_with_all = ["kubeconfig",
        "api_url"])]
    pub objects_from: Option<PathBuf>,

    /// Where the agents of that folder write statuses [default: FOLDER/status]
    #[arg(long, value_name = "FOLDER", requires = "objects_from")]
    pub objects_to: Option<PathBuf>,

    /// Use the cluster of this kubeconfig [default: the one that kubectl uses]
    #[arg(long, env = "KNIT_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// URL of an API server that needs no credentials, such as the lab's
    #[arg(long, env = "KNIT_API_URL", value_name = "URL", conflicts_with = "kubeconfig")]
    pub api_url: Option<String>,
}

/// Objects that can be listed.
pub struct Listing {
    objects: Objects,
    /// What agents wrote beside the folder.
    written: Option<Objects>,
}

// === impl From ===

impl From {
    /// Whether a place is named at all.
    pub fn is_given(&self) -> bool {
        self.objects_from.is_some() || self.kubeconfig.is_some() || self.api_url.is_some()
    }

    pub async fn open(&self) -> Result<Listing> {
        self.open_with(Kinds::default()).await
    }

    /// Opens them for a command that reads other kinds too, which the files may hold then.
    pub async fn open_with(&self, kinds: Kinds) -> Result<Listing> {
        let mut written = None;
        let source = if let Some(folder) = &self.objects_from {
            let output = self.objects_to.clone().unwrap_or_else(|| folder.join("status"));
            if output.is_dir() {
                written = Some(Objects::open(Source::folder(&output)).await?);
            }
            Source::Folder(FolderOptions { kinds, ..FolderOptions::new(folder) })
        } else if let Some(url) = &self.api_url {
            Source::Url(url.clone())
        } else if let Some(path) = &self.kubeconfig {
            Source::Kubeconfig { path: path.clone(), context: None }
        } else {
            Source::Infer
        };
        Ok(Listing { objects: Objects::open(source).await?, written })
    }
}

// === impl Listing ===

impl Listing {
    /// All objects of a kind, by namespace and name. Of one that is in both folders, what was written counts.
    pub async fn list<K: Object>(&self, namespace: Option<&str>) -> Result<Vec<K>> {
        let selection = Selection { namespace: namespace.map(str::to_owned), ..Selection::default() };
        let mut found = BTreeMap::new();
        for source in std::iter::once(&self.objects).chain(&self.written) {
            let listed = tokio::time::timeout(LIST_TIMEOUT, source.list::<K>(&selection)).await;
            let listed = listed.with_context(|| {
                format!(
                    "{} did not answer within {} s: check that it is running",
                    source.origin(),
                    LIST_TIMEOUT.as_secs()
                )
            })??;
            found.extend(listed.into_iter().map(|object| (Key::of(&object).to_string(), object)));
        }
        Ok(found.into_values().collect())
    }

    /// All objects of a kind that the cluster need not have: none if it does not.
    pub async fn list_if_there<K: Object>(&self) -> Result<Vec<K>> {
        match self.list::<K>(None).await {
            Err(error) if matches!(error.downcast_ref(), Some(knit_objects::Error::UnknownKind { .. })) => {
                Ok(Vec::new())
            }
            listed => listed,
        }
    }

    /// What is wrong with the files of a folder.
    pub fn problems(&self) -> Vec<String> {
        let sources = std::iter::once(&self.objects).chain(&self.written);
        sources
            .flat_map(|s| s.problems().borrow().iter().map(ToString::to_string).collect::<Vec<_>>())
            .collect()
    }
}
