//! The store: everything that is served, in process, and how it is read. The HTTP server is a thin layer on
//! top.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use knit_types::sync::{Locked, ReadWrite};
use serde_json::{Value, json};

use super::event::to_events_v1;
use super::kinds::{CrdError, Kind, Registry};
use super::object::Object;
use super::selector::Selector;
use super::state::{Key, Known, State};
use super::status::{ApiError, Result};
use super::watch::{WatchParams, Watcher};

/// How the store is set up.
#[derive(Clone)]
pub struct StoreOptions {
    /// CustomResourceDefinitions to serve from the start.
    pub crds: Vec<Value>,
    /// The default ServiceCIDR, at most one range per family.
    pub service_cidrs: Vec<String>,
    /// How many changes are kept per kind for watches to resume from.
    pub log_size: usize,
    /// The resourceVersion to start from. A server that replaces another one starts above it.
    pub first_resource_version: u64,
    /// The time.
    pub clock: fn() -> jiff::Timestamp,
}

impl StoreOptions {
    /// The default options with these CRDs, in whatever type they are at hand.
    pub fn with_crds<T: serde::Serialize>(crds: &[T]) -> Result<Self, serde_json::Error> {
        let crds = crds.iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
        Ok(Self { crds, ..Self::default() })
    }
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            crds: Vec::new(),
            service_cidrs: vec!["10.96.0.0/16".to_owned()],
            log_size: 4096,
            first_resource_version: 1,
            clock: jiff::Timestamp::now,
        }
    }
}

/// What to list.
#[derive(Debug, Clone, Default)]
pub struct ListParams {
    /// One namespace, or all.
    pub namespace: Option<String>,
    /// Which objects.
    pub selector: Selector,
    /// At most so many.
    pub limit: Option<usize>,
    /// Only what comes after this key, from a list that began at this version.
    pub after: Option<(u64, Key)>,
}

/// A list, or a page of it.
#[derive(Debug, Clone)]
pub struct List {
    /// The objects.
    pub items: Vec<Arc<Object>>,
    /// The version the list is of.
    pub resource_version: u64,
    /// The version of the first page and the last key, if there is more.
    pub more: Option<(u64, Key)>,
    /// How many are left, where that is known.
    pub remaining: Option<usize>,
}

struct Inner {
    registry: RwLock<Registry>,
    state: Mutex<State>,
    clock: fn() -> jiff::Timestamp,
}

/// The API in process. Clones share the same objects.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

/// RFC 3339 in whole seconds, as metadata has it.
pub fn seconds(time: jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

impl Store {
    /// A store with the four namespaces of every cluster, the default ServiceCIDR and the `kubernetes`
    /// Service.
    pub fn new(options: &StoreOptions) -> Result<Self, CrdError> {
        let registry = Registry::builtin();
        let table =
            |group: &str, plural: &str| registry.by_path(group, "v1", plural).map_or(0, |kind| kind.table);
        let known = Known {
            namespaces: table("", "namespaces"),
            pods: table("", "pods"),
            services: table("", "services"),
            ip_addresses: table("networking.k8s.io", "ipaddresses"),
            service_cidrs: table("networking.k8s.io", "servicecidrs"),
        };
        let state = State::new(
            registry.tables(),
            known,
            options.log_size.max(16),
            options.first_resource_version.max(1),
            options.clock,
        );
        let inner = Inner { registry: RwLock::new(registry), state: Mutex::new(state), clock: options.clock };
        let store = Self { inner: Arc::new(inner) };
        let mut first = vec![json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
                "metadata": {"name": "kubernetes"}, "spec": {"cidrs": options.service_cidrs}})];
        for name in ["default", "kube-system", "kube-public", "kube-node-lease"] {
            first.push(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}));
        }
        let mut api = json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "kubernetes", "namespace": "default", "labels": {"component": "apiserver",
                "provider": "kubernetes"}},
            "spec": {"ports": [{"name": "https", "port": 443, "targetPort": 6443, "protocol": "TCP"}]}});
        let range: Option<ipnet::IpNet> = options.service_cidrs.first().and_then(|cidr| cidr.parse().ok());
        if let Some(ip) = range.and_then(|net| net.hosts().find(|ip| *ip != net.network())) {
            api["spec"]["clusterIP"] = json!(ip.to_string());
        }
        first.push(api);
        for object in first {
            // These objects are ours; that they are accepted is tested.
            if let Err(error) = store.create_object(object) {
                tracing::error!(%error, "an initial object was refused");
            }
        }
        for crd in &options.crds {
            store.add_crd(crd)?;
        }
        Ok(store)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves whole objects behind: each change is one insertion.
        self.inner.state.locked()
    }

    /// The kinds, for reading.
    pub fn with_registry<T>(&self, read: impl FnOnce(&Registry) -> T) -> T {
        read(&self.inner.registry.reading())
    }

    /// The kind with an `apiVersion` and a `kind`.
    pub fn kind(&self, api_version: &str, kind: &str) -> Result<Arc<Kind>> {
        self.with_registry(|registry| registry.by_kind(api_version, kind)).ok_or_else(|| {
            let why = format!("no matches for kind {kind:?} in version {api_version:?}");
            ApiError::new(404, "NotFound", why)
        })
    }

    /// Takes the kind of a CRD out of the registry.
    pub(super) fn unregister_crd(&self, crd: &Value) -> Option<Arc<Kind>> {
        self.inner.registry.writing().remove_crd(crd)
    }

    /// The time of this store's clock.
    pub fn now(&self) -> jiff::Timestamp {
        (self.inner.clock)()
    }

    /// Serves the kind of a CRD, and stores the CRD.
    pub fn add_crd(&self, crd: &Value) -> Result<Arc<Kind>, CrdError> {
        let kind = self.register_crd(crd)?;
        let mut crd = crd.clone();
        crd["apiVersion"] = json!("apiextensions.k8s.io/v1");
        crd["kind"] = json!("CustomResourceDefinition");
        if let Err(error) = self.create_object(crd)
            && error.reason != "AlreadyExists"
        {
            tracing::warn!(%error, "a CustomResourceDefinition is served but cannot be listed");
        }
        Ok(kind)
    }

    pub(super) fn register_crd(&self, crd: &Value) -> Result<Arc<Kind>, CrdError> {
        let mut registry = self.inner.registry.writing();
        let kind = registry.add_crd(crd)?;
        self.lock().grow(registry.tables());
        Ok(kind)
    }

    /// One object.
    pub fn get(&self, kind: &Kind, namespace: &str, name: &str) -> Result<Arc<Object>> {
        let key = (namespace.to_owned(), name.to_owned());
        self.lock().get(kind.table, &key).cloned().ok_or_else(|| ApiError::not_found(kind, name))
    }

    /// Many objects.
    pub fn list(&self, kind: &Kind, params: &ListParams) -> Result<List> {
        let state = self.lock();
        if let Some((rv, _)) = &params.after
            && *rv < state.tables[kind.table].floor
        {
            return Err(ApiError::expired(
                "The provided continue parameter is too old to display a consistent list result. Start a new \
                 list \
                 without the continue parameter.",
            ));
        }
        let after = params.after.as_ref().map(|(_, key)| key);
        let mut objects = state
            .range(kind.table, params.namespace.as_deref(), after)
            .filter(|(_, object)| params.selector.matches(object));
        let limit = params.limit.filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        let items: Vec<Arc<Object>> =
            objects.by_ref().take(limit).map(|(_, object)| Arc::clone(object)).collect();
        let left = if items.len() == limit { objects.count() } else { 0 };
        let began = params.after.as_ref().map_or(state.rv, |(rv, _)| *rv);
        let more = match items.last() {
            Some(last) if left > 0 => Some((began, (last.namespace().to_owned(), last.name().to_owned()))),
            _ => None,
        };
        let remaining = (left > 0 && params.selector.is_empty()).then_some(left);
        Ok(List { items, resource_version: began, more, remaining })
    }

    /// A watch.
    pub fn watch(&self, kind: &Kind, params: WatchParams) -> Result<Watcher> {
        Watcher::start(self, kind, params)
    }

    /// The kind of a whole object.
    pub fn kind_of(&self, value: &Value) -> Result<Arc<Kind>> {
        let text = |field: &str| value[field].as_str().unwrap_or("");
        self.kind(text("apiVersion"), text("kind"))
    }
}

/// An object as the kind shows it.
pub fn from_stored<'a>(kind: &Kind, value: &'a Value) -> Cow<'a, Value> {
    if kind.is_events_v1() { Cow::Owned(to_events_v1(value)) } else { Cow::Borrowed(value) }
}
