//! The kinds that a folder may hold, and what is checked of each.

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::{IPAddress, NetworkPolicy, ServiceCIDR};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use knit_api::{
    AddressBlock, BlockSlice, Network, NetworkAttachment, NetworkClass, NodeNetwork, NodeSlice,
    PolicyPeerSlice,
};
use kube::core::ApiResource;
use serde_json::Value;

use super::parse::yaml_options;
use crate::key::Object;

/// The kinds that a folder may hold. The default are those that Knit reads.
#[derive(Clone, Debug)]
pub struct Kinds {
    known: BTreeMap<(String, String), Kind>,
}

/// One kind.
#[derive(Clone, Debug)]
pub(crate) struct Kind {
    pub(crate) group: String,
    pub(crate) kind: String,
    pub(crate) scope: Scope,
    /// Reads the object as its type; fields that the type does not know go to the list.
    pub(crate) check: fn(&Value, &mut Vec<String>) -> Result<(), FieldError>,
    /// The line of the first thing in this YAML document that does not fit the type.
    pub(crate) locate: fn(&str) -> Option<u64>,
}

/// Where the objects of a kind live.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// In the cluster as a whole.
    Cluster,
    /// In a namespace each.
    Namespaced,
}

/// A field that does not fit its type.
#[derive(Debug)]
pub(crate) struct FieldError {
    pub(crate) path: String,
    pub(crate) message: String,
}

// === impl Kinds ===

impl Default for Kinds {
    fn default() -> Self {
        Self { known: BTreeMap::new() }
            .with::<Node>(Scope::Cluster)
            .with::<Namespace>(Scope::Cluster)
            .with::<Pod>(Scope::Namespaced)
            .with::<Service>(Scope::Namespaced)
            .with::<EndpointSlice>(Scope::Namespaced)
            .with::<NetworkPolicy>(Scope::Namespaced)
            .with::<ServiceCIDR>(Scope::Cluster)
            .with::<IPAddress>(Scope::Cluster)
            .with::<Lease>(Scope::Namespaced)
            .with::<DeviceClass>(Scope::Cluster)
            .with::<ResourceClaim>(Scope::Namespaced)
            .with::<ResourceSlice>(Scope::Cluster)
            .with::<NetworkClass>(Scope::Cluster)
            .with::<Network>(Scope::Cluster)
            .with::<NetworkAttachment>(Scope::Namespaced)
            .with::<NodeNetwork>(Scope::Cluster)
            .with::<AddressBlock>(Scope::Cluster)
            .with::<NodeSlice>(Scope::Cluster)
            .with::<BlockSlice>(Scope::Cluster)
            .with::<PolicyPeerSlice>(Scope::Cluster)
    }
}

impl Kinds {
    /// These, and `K`.
    #[must_use]
    pub fn with<K: Object>(mut self, scope: Scope) -> Self {
        let resource = ApiResource::erase::<K>(&());
        let kind = Kind {
            group: resource.group,
            kind: resource.kind.clone(),
            scope,
            check: check::<K>,
            locate: locate::<K>,
        };
        self.known.insert((resource.api_version, resource.kind), kind);
        self
    }

    pub(crate) fn get(&self, api_version: &str, kind: &str) -> Option<&Kind> {
        self.known.get(&(api_version.to_owned(), kind.to_owned()))
    }

    /// The versions of a kind of this name, for the message to who wrote another one.
    pub(crate) fn api_versions_of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a str> {
        self.known.keys().filter(move |(_, k)| k == kind).map(|(v, _)| v.as_str())
    }
}

fn check<K: Object>(value: &Value, unknown: &mut Vec<String>) -> Result<(), FieldError> {
    let mut track = serde_path_to_error::Track::new();
    let tracked = serde_path_to_error::Deserializer::new(value, &mut track);
    let result = serde_ignored::deserialize::<_, _, K>(tracked, |path| {
        // serde_ignored marks an Option on the way with a question mark; people do not write that.
        unknown.push(path.to_string().replace(".?", "").replace("?.", ""));
    });
    // What the object is was looked at before; not every type reads it again.
    unknown.retain(|field| field != "apiVersion" && field != "kind");
    match result {
        Ok(_) => Ok(()),
        Err(error) => Err(FieldError { path: track.path().to_string(), message: error.to_string() }),
    }
}

fn locate<K: Object>(document: &str) -> Option<u64> {
    serde_saphyr::from_str_with_options::<K>(document, yaml_options()).err()?.location().map(|l| l.line())
}
