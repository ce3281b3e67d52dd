//! The kinds that are served: the built-in ones as a table, CRDs as they come.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::{apps, coordination, core, discovery, events, networking};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::schema::{Schema, SchemaError};
use super::shape::Shape;

/// What a built-in kind is, and how its values are decoded.
#[derive(Debug)]
pub struct Builtin {
    gv: (&'static str, &'static str),
    kind: &'static str,
    plural: &'static str,
    short: &'static [&'static str],
    namespaced: bool,
    status: bool,
    fields: &'static [&'static str],
    /// Decodes and encodes again, which drops every field that the type does not have.
    pub round_trip: fn(&Value) -> Result<Value, serde_json::Error>,
    /// The JSON schema of the type.
    pub schema: fn() -> Value,
}

/// A printer column of a CRD.
#[derive(Debug, Clone)]
pub struct Column {
    /// The heading.
    pub name: String,
    /// `string`, `integer`, `number`, `boolean` or `date`.
    pub kind: String,
    /// Where the value is.
    pub path: String,
    /// 0 always shown, above that only with `-o wide`.
    pub priority: i64,
    /// In words, for the table's definition.
    pub description: String,
}

/// What a CRD adds to a kind.
#[derive(Debug)]
pub struct Custom {
    /// Its schema, compiled.
    pub schema: Schema,
    /// Its schema as written.
    pub openapi: Value,
    /// Its printer columns.
    pub columns: Vec<Column>,
}

/// Where the rules of a kind come from.
#[derive(Debug)]
pub enum Logic {
    /// From this program.
    Builtin(&'static Builtin),
    /// From its definition.
    Custom(Box<Custom>),
}

/// One kind in one version, as served.
#[derive(Debug)]
pub struct Kind {
    /// Which table of the store holds its objects. The two kinds of Event share one.
    pub table: usize,
    /// The group, empty for core.
    pub group: String,
    /// The version.
    pub version: String,
    /// The kind, such as `Pod`.
    pub kind: String,
    /// The plural in paths, such as `pods`.
    pub plural: String,
    /// The singular for `kubectl`.
    pub singular: String,
    /// Short names for `kubectl`.
    pub short_names: Vec<String>,
    /// Categories for `kubectl`.
    pub categories: Vec<String>,
    /// Whether its objects live in namespaces.
    pub namespaced: bool,
    /// Whether status is written through a subresource only.
    pub status: bool,
    /// Whether there is a scale subresource.
    pub scale: bool,
    /// How its lists merge.
    pub shape: Shape,
    /// Its rules.
    pub logic: Logic,
    fields: Vec<String>,
}

impl Kind {
    /// `group/version`, or the version alone for core.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// `plural.group`, as messages name it.
    pub fn resource(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// The fields that can be selected by.
    pub fn selectable_fields(&self) -> &[String] {
        &self.fields
    }

    /// Whether this is `group/kind`.
    pub fn is(&self, group: &str, kind: &str) -> bool {
        self.group == group && self.kind == kind
    }

    /// Whether objects are stored in another form: as core Events.
    pub fn is_events_v1(&self) -> bool {
        self.is("events.k8s.io", "Event")
    }

    /// The CRD part, if this is one.
    pub fn custom(&self) -> Option<&Custom> {
        match &self.logic {
            Logic::Custom(custom) => Some(custom),
            Logic::Builtin(_) => None,
        }
    }

    /// Whether `metadata.generation` counts changes of the spec.
    pub fn has_generation(&self) -> bool {
        self.custom().is_some()
            || matches!(
                self.kind.as_str(),
                "Deployment" | "Pod" | "NetworkPolicy" | "EndpointSlice" | "CustomResourceDefinition"
            )
    }

    fn builtin(table: usize, builtin: &'static Builtin) -> Self {
        let mut fields = vec!["metadata.name".to_owned()];
        if builtin.namespaced {
            fields.push("metadata.namespace".to_owned());
        }
        fields.extend(builtin.fields.iter().map(|field| (*field).to_owned()));
        let all = matches!(builtin.kind, "Pod" | "Service" | "Deployment");
        Self {
            table,
            group: builtin.gv.0.to_owned(),
            version: builtin.gv.1.to_owned(),
            kind: builtin.kind.to_owned(),
            plural: builtin.plural.to_owned(),
            singular: builtin.kind.to_lowercase(),
            short_names: builtin.short.iter().map(|name| (*name).to_owned()).collect(),
            categories: if all { vec!["all".to_owned()] } else { Vec::new() },
            namespaced: builtin.namespaced,
            status: builtin.status,
            scale: builtin.kind == "Deployment",
            shape: Shape::of_builtin(builtin.kind),
            logic: Logic::Builtin(builtin),
            fields,
        }
    }

    /// The kind that a CustomResourceDefinition defines, in its stored version.
    fn of_crd(table: usize, crd: &Value) -> Result<Self, CrdError> {
        let name = crd["metadata"]["name"].as_str().unwrap_or("?").to_owned();
        let spec = &crd["spec"];
        let missing = |what: &'static str| CrdError::Missing { name: name.clone(), what };
        let text = |value: &Value, what: &'static str| {
            value.as_str().filter(|text| !text.is_empty()).map(str::to_owned).ok_or_else(|| missing(what))
        };
        let version = spec["versions"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|version| version["storage"] == true && version["served"] == true)
            .ok_or_else(|| missing("spec.versions[] with served and storage"))?;
        let openapi = version["schema"]["openAPIV3Schema"].clone();
        let schema = Schema::parse(&openapi)
            .map_err(|source| CrdError::Schema { name: name.clone(), source: Box::new(source) })?;
        let names = &spec["names"];
        let list = |value: &Value| -> Vec<String> {
            value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let kind = text(&names["kind"], "spec.names.kind")?;
        let namespaced = text(&spec["scope"], "spec.scope")? == "Namespaced";
        let mut fields = vec!["metadata.name".to_owned()];
        if namespaced {
            fields.push("metadata.namespace".to_owned());
        }
        for field in version["selectableFields"].as_array().into_iter().flatten() {
            fields.extend(field["jsonPath"].as_str().map(|path| path.trim_start_matches('.').to_owned()));
        }
        let column = |column: &Value| Column {
            name: column["name"].as_str().unwrap_or("").to_owned(),
            kind: column["type"].as_str().unwrap_or("string").to_owned(),
            path: column["jsonPath"].as_str().unwrap_or("").to_owned(),
            priority: column["priority"].as_i64().unwrap_or(0),
            description: column["description"].as_str().unwrap_or("").to_owned(),
        };
        let mut columns: Vec<Column> =
            version["additionalPrinterColumns"].as_array().into_iter().flatten().map(column).collect();
        if columns.is_empty() {
            columns.push(column(
                &json!({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}),
            ));
        }
        Ok(Self {
            table,
            group: text(&spec["group"], "spec.group")?,
            version: text(&version["name"], "spec.versions[].name")?,
            plural: text(&names["plural"], "spec.names.plural")?,
            singular: names["singular"].as_str().map_or_else(|| kind.to_lowercase(), str::to_owned),
            short_names: list(&names["shortNames"]),
            categories: list(&names["categories"]),
            namespaced,
            status: version["subresources"]["status"].is_object(),
            scale: false,
            shape: Shape::of_schema(&openapi),
            logic: Logic::Custom(Box::new(Custom { schema, openapi, columns })),
            kind,
            fields,
        })
    }
}

/// A CustomResourceDefinition that cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum CrdError {
    /// A field is missing.
    #[error("CustomResourceDefinition {name:?}: {what} is missing")]
    Missing {
        /// Which definition.
        name: String,
        /// Which field.
        what: &'static str,
    },
    /// Its schema is wrong.
    #[error("CustomResourceDefinition {name:?}: its schema cannot be used")]
    Schema {
        /// Which definition.
        name: String,
        /// The cause.
        #[source]
        source: Box<SchemaError>,
    },
}

/// All kinds that are served.
#[derive(Debug)]
pub struct Registry {
    kinds: Vec<Arc<Kind>>,
    by_path: HashMap<(String, String, String), Arc<Kind>>,
    tables: usize,
}

impl Registry {
    /// The built-in kinds.
    pub fn builtin() -> Self {
        let mut registry = Self { kinds: Vec::new(), by_path: HashMap::new(), tables: 0 };
        for builtin in BUILTINS {
            let shared =
                registry.kinds.iter().find(|kind| builtin.gv.0 == "events.k8s.io" && kind.kind == "Event");
            let table = shared.map_or(registry.tables, |kind| kind.table);
            registry.tables = registry.tables.max(table + 1);
            registry.put(Kind::builtin(table, builtin));
        }
        registry
    }

    fn put(&mut self, kind: Kind) -> Arc<Kind> {
        let kind = Arc::new(kind);
        self.kinds.retain(|old| (&old.group, &old.kind) != (&kind.group, &kind.kind));
        self.kinds.push(Arc::clone(&kind));
        let path = (kind.group.clone(), kind.version.clone(), kind.plural.clone());
        self.by_path.insert(path, Arc::clone(&kind));
        kind
    }

    /// Adds the kind of a CRD, or replaces it, keeping its objects.
    pub fn add_crd(&mut self, crd: &Value) -> Result<Arc<Kind>, CrdError> {
        let (group, kind) = (&crd["spec"]["group"], &crd["spec"]["names"]["kind"]);
        let old = self.kinds.iter().find(|old| group == &old.group && kind == &old.kind);
        let table = old.map_or(self.tables, |old| old.table);
        let kind = Kind::of_crd(table, crd)?;
        self.tables = self.tables.max(table + 1);
        Ok(self.put(kind))
    }

    /// Takes the kind of a CRD away.
    pub fn remove_crd(&mut self, crd: &Value) -> Option<Arc<Kind>> {
        let (group, kind) = (&crd["spec"]["group"], &crd["spec"]["names"]["kind"]);
        let index = self.kinds.iter().position(|old| group == &old.group && kind == &old.kind)?;
        let kind = self.kinds.remove(index);
        self.by_path.remove(&(kind.group.clone(), kind.version.clone(), kind.plural.clone()));
        Some(kind)
    }

    /// How many tables the store needs.
    pub fn tables(&self) -> usize {
        self.tables
    }

    /// Every kind, in the order in which `kubectl` should find them.
    pub fn all(&self) -> &[Arc<Kind>] {
        &self.kinds
    }

    /// The kind at a path.
    pub fn by_path(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        self.by_path.get(&(group.to_owned(), version.to_owned(), plural.to_owned())).cloned()
    }

    /// The kind with an `apiVersion` and a `kind`.
    pub fn by_kind(&self, api_version: &str, kind: &str) -> Option<Arc<Kind>> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        self.kinds.iter().find(|k| k.group == group && k.version == version && k.kind == kind).cloned()
    }
}

fn round_trip<T: DeserializeOwned + Serialize>(value: &Value) -> Result<Value, serde_json::Error> {
    serde_json::to_value(T::deserialize(value)?)
}

fn schema_of<T: schemars::JsonSchema>() -> Value {
    schemars::generate::SchemaSettings::openapi3().into_generator().into_root_schema_for::<T>().to_value()
}

macro_rules! builtin {
    ($type:ty, $group:literal, $version:literal, $kind:literal, $plural:literal, $short:expr,
        $namespaced:literal, $status:literal, $fields:expr) => {
        Builtin {
            gv: ($group, $version),
            kind: $kind,
            plural: $plural,
            short: $short,
            namespaced: $namespaced,
            status: $status,
            fields: $fields,
            round_trip: round_trip::<$type>,
            schema: schema_of::<$type>,
        }
    };
}

const POD_FIELDS: &[&str] = &[
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "spec.hostNetwork",
    "status.phase",
    "status.podIP",
    "status.nominatedNodeName",
];

const EVENT_FIELDS: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "regarding.kind",
    "regarding.namespace",
    "regarding.name",
    "regarding.uid",
    "reason",
    "reportingComponent",
    "reportingController",
    "source",
    "type",
];

static BUILTINS: &[Builtin] = &[
    builtin!(
        core::v1::Namespace,
        "",
        "v1",
        "Namespace",
        "namespaces",
        &["ns"],
        false,
        true,
        &["status.phase"]
    ),
    builtin!(core::v1::Node, "", "v1", "Node", "nodes", &["no"], false, true, &["spec.unschedulable"]),
    builtin!(core::v1::Pod, "", "v1", "Pod", "pods", &["po"], true, true, POD_FIELDS),
    builtin!(
        core::v1::Service,
        "",
        "v1",
        "Service",
        "services",
        &["svc"],
        true,
        true,
        &["spec.clusterIP", "spec.type"]
    ),
    builtin!(core::v1::ConfigMap, "", "v1", "ConfigMap", "configmaps", &["cm"], true, false, &[]),
    builtin!(core::v1::Secret, "", "v1", "Secret", "secrets", &[], true, false, &["type"]),
    builtin!(
        core::v1::ServiceAccount,
        "",
        "v1",
        "ServiceAccount",
        "serviceaccounts",
        &["sa"],
        true,
        false,
        &[]
    ),
    builtin!(core::v1::Event, "", "v1", "Event", "events", &["ev"], true, false, EVENT_FIELDS),
    builtin!(events::v1::Event, "events.k8s.io", "v1", "Event", "events", &["ev"], true, false, EVENT_FIELDS),
    builtin!(apps::v1::Deployment, "apps", "v1", "Deployment", "deployments", &["deploy"], true, true, &[]),
    builtin!(coordination::v1::Lease, "coordination.k8s.io", "v1", "Lease", "leases", &[], true, false, &[]),
    builtin!(
        discovery::v1::EndpointSlice,
        "discovery.k8s.io",
        "v1",
        "EndpointSlice",
        "endpointslices",
        &[],
        true,
        false,
        &[]
    ),
    builtin!(
        networking::v1::NetworkPolicy,
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
        "networkpolicies",
        &["netpol"],
        true,
        false,
        &[]
    ),
    builtin!(
        networking::v1::ServiceCIDR,
        "networking.k8s.io",
        "v1",
        "ServiceCIDR",
        "servicecidrs",
        &[],
        false,
        true,
        &[]
    ),
    builtin!(
        networking::v1::IPAddress,
        "networking.k8s.io",
        "v1",
        "IPAddress",
        "ipaddresses",
        &["ip"],
        false,
        false,
        &[]
    ),
    builtin!(
        apiextensions::v1::CustomResourceDefinition,
        "apiextensions.k8s.io",
        "v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        &["crd", "crds"],
        false,
        true,
        &[]
    ),
];
