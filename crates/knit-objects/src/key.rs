//! What an object is called: its key (namespace and name), and its kind on the way to the API.

use std::fmt;
use std::sync::Arc;

use kube::core::ApiResource;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A kind of object that can be read: any `k8s-openapi` or Knit type.
pub trait Object:
    kube::Resource<DynamicType = ()> + DeserializeOwned + Clone + fmt::Debug + Send + Sync + 'static
{
}

impl<K> Object for K where
    K: kube::Resource<DynamicType = ()> + DeserializeOwned + Clone + fmt::Debug + Send + Sync + 'static
{
}

/// An object's namespace and name. Cheap to clone: caches, watches and callers share the text.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Key {
    namespace: Option<Arc<str>>,
    name: Arc<str>,
}

/// One object among all kinds: what a write is aimed at.
#[derive(Clone, Debug)]
pub struct Target {
    /// The kind, with the names that the API's paths need.
    pub resource: ApiResource,
    /// Namespace and name.
    pub key: Key,
}

// === impl Key ===

impl Key {
    /// The key of a cluster-scoped object.
    #[must_use]
    pub fn cluster(name: impl Into<Arc<str>>) -> Self {
        Self { namespace: None, name: name.into() }
    }

    /// The key of an object in a namespace.
    #[must_use]
    pub fn namespaced(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: Some(namespace.into()), name: name.into() }
    }

    /// The key of this object. An object without a name has the empty one.
    #[must_use]
    pub fn of<K: kube::Resource>(object: &K) -> Self {
        let meta = object.meta();
        Self {
            namespace: meta.namespace.as_deref().map(Arc::from),
            name: meta.name.as_deref().unwrap_or_default().into(),
        }
    }

    /// The namespace, if the object is in one.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The key in an object's JSON, if it has a name.
    pub(crate) fn of_value(object: &Value) -> Option<Self> {
        let meta = object.get("metadata")?;
        let name = meta.get("name")?.as_str()?;
        let namespace = meta.get("namespace").and_then(Value::as_str).filter(|n| !n.is_empty());
        Some(Self { namespace: namespace.map(Arc::from), name: name.into() })
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

// === impl Target ===

impl Target {
    /// The object of kind `K` with this key.
    #[must_use]
    pub fn of<K: kube::Resource<DynamicType = ()>>(key: Key) -> Self {
        Self { resource: ApiResource::erase::<K>(&()), key }
    }

    /// The part that tells one target from another: group, kind and key.
    pub(crate) fn identity(&self) -> (&str, &str, &Key) {
        (&self.resource.group, &self.resource.kind, &self.key)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.resource.kind, self.key)
    }
}

impl PartialEq for Target {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Target {}

impl std::hash::Hash for Target {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

/// `networks.knit.dev`, or `pods` for the core group: how roles and messages name a resource.
pub(crate) fn resource_name(resource: &ApiResource) -> String {
    if resource.group.is_empty() {
        resource.plural.clone()
    } else {
        format!("{}.{}", resource.plural, resource.group)
    }
}
