//! The Kubernetes API as the source of objects.

mod groups;
mod reader;

use std::path::PathBuf;
use std::time::Duration;

use http::uri::Scheme;
use kube::api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, DynamicObject, Request};
use kube::{Client, Config, Resource};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub(crate) use groups::{Found, Groups};
pub(crate) use reader::ApiReader;

use crate::error::{Attempt, Error, Result};
use crate::key::Key;
use crate::selector::Selection;
use crate::source::Lean;
use crate::write::{Operation, Part, Write};

/// A connection to an API server. Nothing is asked of the server before the first use.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) client: Client,
    pub(crate) url: String,
}

/// One page of a list.
#[derive(Deserialize)]
pub(crate) struct Page {
    #[serde(default)]
    metadata: PageMeta,
    items: Option<Vec<Lean>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMeta {
    #[serde(default)]
    resource_version: String,
    #[serde(default)]
    r#continue: Option<String>,
}

/// The longest that any answer but a watch may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// How many objects one answer holds.
const PAGE: u32 = 500;

// === impl Api ===

impl Api {
    /// KUBECONFIG or `~/.kube/config`, else the service account of the pod that this runs in.
    pub(crate) async fn infer() -> Result<Self> {
        let config = Config::infer().await.map_err(|e| Error::NoCluster(Box::new(e)))?;
        Self::from_config(config)
    }

    /// This kubeconfig.
    pub(crate) async fn kubeconfig(path: PathBuf, context: Option<String>) -> Result<Self> {
        let failed = |path: PathBuf| move |source| Error::Kubeconfig { path, source: Box::new(source) };
        let file = Kubeconfig::read_from(&path).map_err(failed(path.clone()))?;
        let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
        let config = Config::from_custom_kubeconfig(file, &options).await.map_err(failed(path))?;
        Self::from_config(config)
    }

    /// An API server that asks for no credentials, such as the lab's.
    pub(crate) fn url(url: &str) -> Result<Self> {
        let uri = url.parse().map_err(|source| Error::Url { url: url.to_owned(), source })?;
        Self::from_config(Config::new(uri))
    }

    fn from_config(mut config: Config) -> Result<Self> {
        let url = config.cluster_url.to_string();
        trust_nobody_without_need(&mut config);
        let client =
            Client::try_from(config).map_err(|e| Error::Client { url: url.clone(), source: Box::new(e) })?;
        Ok(Self { client, url })
    }

    pub(crate) async fn get<K: DeserializeOwned>(
        &self,
        resource: &ApiResource,
        key: &Key,
    ) -> Result<Option<K>> {
        let attempt = Attempt::new("get", resource, Some(key));
        let request = path(resource, key.namespace()).get(key.name(), &GetParams::default());
        match self.ask::<Lean>(attempt.clone(), request).await {
            Ok(lean) => lean.decode().map(Some).map_err(|source| Error::Decode { attempt, source }),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Every object that is selected, page by page.
    pub(crate) async fn list(&self, resource: &ApiResource, selection: &Selection) -> Result<Vec<Lean>> {
        let (mut objects, mut token) = (Vec::new(), None);
        loop {
            let page = self.page(resource, selection, token).await?;
            token = page.next_token();
            objects.extend(page.items.unwrap_or_default());
            if token.is_none() {
                return Ok(objects);
            }
        }
    }

    pub(crate) async fn page(
        &self,
        resource: &ApiResource,
        selection: &Selection,
        token: Option<String>,
    ) -> Result<Page> {
        let params = ListParams {
            label_selector: selection.labels.clone(),
            field_selector: selection.fields.clone(),
            limit: Some(PAGE),
            continue_token: token,
            ..ListParams::default()
        };
        let request = path(resource, selection.namespace.as_deref()).list(&params);
        self.ask(Attempt::new("list", resource, None), request).await
    }

    pub(crate) async fn write(&self, write: &Write) -> Result<Value> {
        let attempt = write.attempt();
        let (resource, key) = (&write.target.resource, &write.target.key);
        let at = path(resource, key.namespace());
        let name = key.name();
        let body = |value: &Value| value.to_string().into_bytes();
        let request = match &write.operation {
            Operation::Create(object) => at.create(&PostParams::default(), body(object)),
            Operation::Replace(object) => at.replace(name, &PostParams::default(), body(object)),
            Operation::Apply { body, part, manager } => {
                let params = PatchParams::apply(manager).force();
                patch(&at, name, *part, &params, &Patch::Apply(body))
            }
            Operation::Merge { patch: body, part } => {
                patch(&at, name, *part, &PatchParams::default(), &Patch::Merge(body))
            }
            Operation::Delete { uid, version } => {
                let only = Preconditions { uid: uid.clone(), resource_version: version.clone() };
                let preconditions = (uid.is_some() || version.is_some()).then_some(only);
                at.delete(name, &DeleteParams { preconditions, ..DeleteParams::default() })
            }
        };
        match self.ask::<Value>(attempt, request).await {
            Err(Error::NotFound { .. }) if matches!(write.operation, Operation::Delete { .. }) => {
                Ok(Value::Null)
            }
            // Another object has the name by now: the one that was meant is gone.
            Err(Error::Conflict { .. })
                if matches!(write.operation, Operation::Delete { uid: Some(_), version: None }) =>
            {
                Ok(Value::Null)
            }
            result => result,
        }
    }

    /// Sends a request and reads the whole answer.
    async fn ask<T: DeserializeOwned>(
        &self,
        attempt: Box<Attempt>,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<T> {
        let answer = match request {
            Ok(request) => tokio::time::timeout(REQUEST_TIMEOUT, self.client.request(request))
                .await
                .unwrap_or_else(|_| Err(timed_out("no answer", REQUEST_TIMEOUT))),
            Err(error) => Err(kube::Error::BuildRequest(error)),
        };
        answer.map_err(|error| Error::from_kube(attempt, error))
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("url", &self.url).finish_non_exhaustive()
    }
}

// === impl Page ===

impl Page {
    fn next_token(&self) -> Option<String> {
        self.metadata.r#continue.clone().filter(|token| !token.is_empty())
    }
}

/// Where the objects of a kind are.
pub(crate) fn path(resource: &ApiResource, namespace: Option<&str>) -> Request {
    Request::new(DynamicObject::url_path(resource, namespace))
}

pub(crate) fn timed_out(what: &str, after: Duration) -> kube::Error {
    let text = format!("{what} within {} s", after.as_secs());
    kube::Error::Service(std::io::Error::new(std::io::ErrorKind::TimedOut, text).into())
}

fn patch(
    at: &Request,
    name: &str,
    part: Part,
    params: &PatchParams,
    patch: &Patch<&Value>,
) -> Result<http::Request<Vec<u8>>, kube::core::request::Error> {
    match part {
        Part::Whole => at.patch(name, params, patch),
        Part::Status => at.patch_subresource("status", name, params, patch),
    }
}

/// Over plain HTTP nobody's certificate is checked. A client that is not told so reads all that the system
/// trusts when it is made, which takes milliseconds.
fn trust_nobody_without_need(config: &mut Config) {
    if config.cluster_url.scheme() == Some(&Scheme::HTTP) && config.proxy_url.is_none() {
        config.root_cert.get_or_insert_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_needs_no_certificates_is_without_those_of_the_system() {
        let roots = |url: &str, proxy: Option<&str>| {
            let mut config = Config::new(url.parse().expect("a URL"));
            config.proxy_url = proxy.map(|proxy| proxy.parse().expect("a URL"));
            trust_nobody_without_need(&mut config);
            config.root_cert
        };
        assert_eq!(roots("http://127.0.0.1:8080", None), Some(Vec::new()));
        assert_eq!(roots("https://127.0.0.1:6443", None), None);
        assert_eq!(roots("http://127.0.0.1:8080", Some("https://proxy:3128")), None);
    }
}
