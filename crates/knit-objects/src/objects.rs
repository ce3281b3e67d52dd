//! The handle over either source.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use knit_types::sync::Locked;
use kube::Resource;
use kube::core::ApiResource;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::api::{Api, ApiReader, Found, Groups};
use crate::backoff::{Backoff, jitter};
use crate::error::{Attempt, Error, Result};
use crate::folder::{Folder, FolderOptions};
use crate::key::{Key, Object};
use crate::problem::Problem;
use crate::selector::{Filter, Selection};
use crate::source::{Delta, Lean, Reader};
use crate::watch::Watch;
use crate::write::Write;

/// Where objects come from and where writes go. Clones share everything.
#[derive(Clone, Debug)]
pub struct Objects {
    inner: Arc<Inner>,
}

/// Which objects to open.
#[derive(Clone, Debug)]
pub enum Source {
    /// The cluster that kubectl would use here, or the one that this pod runs in.
    Infer,
    /// The cluster of this kubeconfig.
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Its context, if not the current one.
        context: Option<String>,
    },
    /// An API server that asks for no credentials, such as the lab's.
    Url(String),
    /// A folder of files.
    Folder(FolderOptions),
}

#[derive(Debug)]
struct Inner {
    backend: Backend,
    problems: watch::Sender<Arc<Vec<Problem>>>,
    /// Objects of the API that could not be understood, by kind and key.
    not_understood: Mutex<BTreeMap<(String, Key), Problem>>,
    groups: Groups,
}

#[derive(Debug)]
enum Backend {
    Api(Api),
    Folder(Folder),
}

// === impl Source ===

impl Source {
    /// A folder, with `status` in it for what is written.
    #[must_use]
    pub fn folder(path: impl Into<PathBuf>) -> Self {
        Self::Folder(FolderOptions::new(path))
    }
}

// === impl Objects ===

impl Objects {
    /// Opens a source. A cluster is not asked anything yet, so this works while it is away; a folder must be
    /// there, and is read once. Needs a tokio runtime.
    pub async fn open(source: Source) -> Result<Self> {
        let problems = watch::Sender::default();
        let backend = match source {
            Source::Infer => Backend::Api(Api::infer().await?),
            Source::Kubeconfig { path, context } => Backend::Api(Api::kubeconfig(path, context).await?),
            Source::Url(url) => Backend::Api(Api::url(&url)?),
            Source::Folder(options) => Backend::Folder(Folder::open(options, problems.clone()).await?),
        };
        Ok(Self::new(backend, problems))
    }

    fn new(backend: Backend, problems: watch::Sender<Arc<Vec<Problem>>>) -> Self {
        Self {
            inner: Arc::new(Inner {
                backend,
                problems,
                not_understood: Mutex::default(),
                groups: Groups::default(),
            }),
        }
    }

    /// Every question about a kind is asked again: for tests, while nobody else has these objects.
    #[cfg(test)]
    pub(crate) fn without_fresh_groups(&mut self) {
        let inner = Arc::get_mut(&mut self.inner).expect("nobody else has them");
        inner.groups = Groups::never_fresh();
    }

    /// The client, if the source is the Kubernetes API.
    #[must_use]
    pub fn client(&self) -> Option<&kube::Client> {
        match &self.inner.backend {
            Backend::Api(api) => Some(&api.client),
            Backend::Folder(_) => None,
        }
    }

    /// Reads all objects of kind `K` and follows their changes; what it returns narrows that down.
    pub fn watch<K: Object>(&self) -> Watch<K> {
        Watch::new(self.clone())
    }

    /// One object as it is now, or nothing. Asks the API server: for what is needed again and again, use a
    /// cache.
    pub async fn get<K: Object>(&self, key: &Key) -> Result<Option<K>> {
        let resource = ApiResource::erase::<K>(&());
        match &self.inner.backend {
            Backend::Api(api) => api.get(&resource, key).await,
            Backend::Folder(folder) => {
                let mut reader = folder.reader(&resource, Filter::parse(&Selection::default())?);
                let found = whole_set(&mut reader).await.into_iter().find(|(k, _)| k == key);
                found.map(|(key, object)| decode(&resource, &key, object)).transpose()
            }
        }
    }

    /// The selected objects as they are now. Asks the API server: for what is needed again and again, use a
    /// cache.
    pub async fn list<K: Object>(&self, selection: &Selection) -> Result<Vec<K>> {
        let resource = ApiResource::erase::<K>(&());
        let filter = Filter::parse(selection)?;
        let objects = match &self.inner.backend {
            Backend::Api(api) => {
                let list = api.list(&resource, selection).await?;
                list.into_iter().filter_map(|o| Some((Key::of_value(o.value())?, o))).collect()
            }
            Backend::Folder(folder) => whole_set(&mut folder.reader(&resource, filter)).await,
        };
        objects.into_iter().map(|(key, object)| decode(&resource, &key, object)).collect()
    }

    /// The selected objects as writes left them: in a folder, where what is written is not read back, those
    /// beside it.
    pub async fn written<K: Object>(&self, selection: &Selection) -> Result<Vec<K>> {
        let Backend::Folder(folder) = &self.inner.backend else { return self.list(selection).await };
        let resource = ApiResource::erase::<K>(&());
        let filter = Filter::parse(selection)?;
        let (output, kind) = (folder.output.clone(), resource.clone());
        let found = match tokio::task::spawn_blocking(move || output.list(&kind)).await {
            Ok(found) => found,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let path = folder.output.folder().to_owned();
        let attempt = Attempt::new("list", &resource, None);
        let found = found.map_err(|source| Error::Output { attempt, path, source })?;
        let selected = found.into_iter().filter(|object| filter.matches(object));
        // Whatever else somebody put there is not ours.
        Ok(selected.filter_map(|object| serde_json::from_value(object).ok()).collect())
    }

    /// Carries out one write, once. In a folder it goes to a file of the object's own, beside what is read.
    /// Returns the object as it is then (nothing after a delete).
    pub async fn write(&self, write: &Write) -> Result<Value> {
        tracing::debug!(%write, "write");
        match &self.inner.backend {
            Backend::Api(api) => api.write(write).await,
            Backend::Folder(folder) => {
                let (output, write) = (folder.output.clone(), write.clone());
                match tokio::task::spawn_blocking(move || output.write(&write)).await {
                    Ok(result) => result,
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                }
            }
        }
    }

    /// Makes an object with its status, or brings both up to date, once: by two requests where an API server
    /// keeps the two apart, by one file in a folder. Returns the object as it is then.
    pub async fn publish<K: Resource<DynamicType = ()> + Serialize>(
        &self,
        object: &K,
        status: &impl Serialize,
        manager: &'static str,
    ) -> Result<Value> {
        if let Backend::Folder(_) = &self.inner.backend {
            return self.write(&Write::replace(object)).await;
        }
        self.write(&Write::apply(object, manager)).await?;
        self.write(&Write::status::<K>(Key::of(object), status, manager)).await
    }

    /// Carries out one write, again and again while it makes sense and the deadline allows.
    pub async fn write_retrying(
        &self,
        write: &Write,
        mut backoff: Backoff,
        deadline: Instant,
    ) -> Result<Value> {
        loop {
            let error = match self.write(write).await {
                Err(error) if error.retryable() => error,
                result => return result,
            };
            let wait = backoff.next(jitter()).max(error.retry_after().unwrap_or_default());
            if Instant::now() + wait >= deadline {
                return Err(error);
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// Whether the source has a kind, such as one of a CRD that may not be installed; nothing if it does not
    /// answer. A folder has every kind.
    pub async fn serves<K: Resource<DynamicType = ()>>(&self) -> Option<bool> {
        let Some(client) = self.client() else { return Some(true) };
        let failed = |error: kube::Error| {
            tracing::debug!(kind = %K::kind(&()), %error, "cannot determine whether the API serves a kind");
        };
        let version = K::api_version(&());
        match self.inner.groups.find(client, &version).await {
            Ok(Found::Listed | Found::Unlisted) => {}
            Ok(Found::Missing) => return Some(false),
            Err(error) => {
                failed(error);
                return None;
            }
        }
        match client.list_api_group_resources(&version).await {
            Ok(list) => Some(list.resources.iter().any(|resource| resource.name == K::plural(&()))),
            Err(kube::Error::Api(status)) if status.code == 404 => {
                self.inner.groups.is_missing(&version).await;
                Some(false)
            }
            Err(error) => {
                failed(error);
                None
            }
        }
    }

    /// What is wrong with objects that were read, now and on changes.
    #[must_use]
    pub fn problems(&self) -> watch::Receiver<Arc<Vec<Problem>>> {
        self.inner.problems.subscribe()
    }

    /// Where the objects come from, for people.
    #[must_use]
    pub fn origin(&self) -> String {
        match &self.inner.backend {
            Backend::Api(api) => api.url.clone(),
            Backend::Folder(folder) => folder.path().display().to_string(),
        }
    }

    /// Where writes go, if they go to files.
    #[must_use]
    pub fn output_folder(&self) -> Option<PathBuf> {
        match &self.inner.backend {
            Backend::Api(_) => None,
            Backend::Folder(folder) => Some(folder.output.folder().to_owned()),
        }
    }

    pub(crate) fn reader<K: Object>(&self, selection: &Selection) -> Result<Reader> {
        let resource = ApiResource::erase::<K>(&());
        // The API server would refuse a wrong selector with every attempt; here it is refused at once.
        let filter = Filter::parse(selection)?;
        Ok(match &self.inner.backend {
            Backend::Api(api) => {
                Reader::Api(Box::new(ApiReader::new(api.clone(), resource, selection.clone())))
            }
            Backend::Folder(folder) => Reader::Folder(folder.reader(&resource, filter)),
        })
    }

    /// An object could not be understood: its last good version stays.
    pub(crate) fn report(&self, kind: &str, key: &Key, problem: Problem) {
        problem.log();
        self.change_problems(|known| {
            known.insert((kind.to_owned(), key.clone()), problem);
            true
        });
    }

    /// An object was understood, or is gone.
    pub(crate) fn solve(&self, kind: &str, key: &Key) {
        self.change_problems(|known| {
            !known.is_empty() && known.remove(&(kind.to_owned(), key.clone())).is_some()
        });
    }

    fn change_problems(&self, change: impl FnOnce(&mut BTreeMap<(String, Key), Problem>) -> bool) {
        // A folder checks its objects when it reads them, and reports the whole list itself.
        if matches!(self.inner.backend, Backend::Folder(_)) {
            return;
        }
        let mut known = self.inner.not_understood.locked();
        if change(&mut known) {
            self.inner.problems.send_replace(Arc::new(known.values().cloned().collect()));
        }
    }
}

fn decode<K: Object>(resource: &ApiResource, key: &Key, object: Lean) -> Result<K> {
    object
        .decode()
        .map_err(|source| Error::Decode { attempt: Attempt::new("read", resource, Some(key)), source })
}

/// What a folder holds of a kind now.
async fn whole_set(reader: &mut crate::folder::FolderReader) -> Vec<(Key, Lean)> {
    let mut objects = Vec::new();
    loop {
        match reader.next().await {
            Delta::Begin | Delta::Gone(_) => {}
            Delta::Object { key, object, .. } => objects.push((key, object)),
            Delta::Complete => return objects,
        }
    }
}
