//! Network: a thing that pods attach to.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use knit_types::Topology;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::common::{AddressCounts, Route};

/// A thing that pods attach to. Addresses are unique inside one Network; two Networks may overlap.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "knit.dev",
    version = "v1alpha1",
    kind = "Network",
    shortname = "knet",
    category = "knit",
    category = "podnetwork",
    category = "podnetworks",
    status = "NetworkStatus",
    derive = "PartialEq",
    doc = "A thing that pods attach to. Addresses are unique inside one Network; two Networks may overlap.",
    printcolumn(name = "Topology", type_ = "string", json_path = ".spec.topology"),
    printcolumn(name = "Subnet", type_ = "string", json_path = ".spec.subnets[0].cidr"),
    printcolumn(name = "Subnet-2", type_ = "string", json_path = ".spec.subnets[1].cidr", priority = 1),
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.class", priority = 1),
    printcolumn(name = "ID", type_ = "integer", json_path = ".status.id", priority = 1),
    printcolumn(name = "Primary-In", type_ = "integer", json_path = ".status.primaryNamespaces"),
    printcolumn(name = "Used", type_ = "integer", json_path = ".status.addresses[0].used"),
    printcolumn(name = "Free", type_ = "integer", json_path = ".status.addresses[0].free"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.size() <= 63")
        .message("a Network's name becomes a label value: write at most 63 characters"),
    validation = Rule::new("self.metadata.name == 'default' || (has(self.spec.subnets) && size(self.spec.subnets) > 0)").message(
        "a Network needs at least one subnet, for example subnets: [{cidr: 10.77.0.0/16}]; only the Network default may take the Nodes' podCIDRs"
    ),
    validation = Rule::new("self.metadata.name != 'default' || !has(self.spec.services) || !has(self.spec.services.nodeAddresses)").message(
        "the Network default serves load-balancer addresses as kube-proxy does, whoever's they are: leave services.nodeAddresses out"
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.primaryFor) || !has(self.allowedNamespaces) || self.allowedNamespaces.from != 'None'")
        .message("primaryFor and allowedNamespaces: {from: None} exclude each other: leave allowedNamespaces out"),
)]
pub struct NetworkSpec {
    /// The NetworkClass, and with it the runtime, that serves this Network.
    #[serde(default = "default_class")]
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = ("self == oldSelf", "the class of a Network cannot change: make a new Network and move the pods"))]
    pub class: String,

    /// How pods reach each other: routed hop by hop, or switched on one segment.
    #[x_kube(validation = ("self == oldSelf", "the topology of a Network cannot change: make a new Network and move the pods"))]
    #[schemars(schema_with = "crate::common::topology_schema")]
    pub topology: Topology,

    /// Address ranges, at most one per family. A family may be added later; what is there stays.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    #[x_kube(
        validation = Rule::new("self.filter(s, isCIDR(s.cidr) && cidr(s.cidr).ip().family() == 4).size() <= 1")
            .message("one IPv4 subnet at most: put both ranges into one larger one, or make two Networks"),
        validation = Rule::new("self.filter(s, isCIDR(s.cidr) && cidr(s.cidr).ip().family() == 6).size() <= 1")
            .message("one IPv6 subnet at most: put both ranges into one larger one, or make two Networks"),
        validation = Rule::new("oldSelf.all(o, self.exists(s, s.cidr == o.cidr))")
            .message("a subnet cannot be changed or removed while the Network exists: make a new Network; you may add the other family"),
    )]
    pub subnets: Vec<Subnet>,

    /// The largest packet of a pod's interface; if it is left out, what the nodes' network allows less the
    /// overhead of the tunnel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1280, max = 65535))]
    pub mtu: Option<u16>,

    /// Namespaces whose pods have this Network as their primary one, in place of the default Network, with
    /// manifests unchanged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new(OPERATORS).message(OPERATORS_MESSAGE),
        validation = Rule::new(VALUES).message(VALUES_MESSAGE),
    )]
    pub primary_for: Option<LabelSelector>,

    /// Namespaces whose pods may ask for an attachment. Those of `primaryFor` always may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,

    /// Services of the default Network that pods whose primary this is can reach; if it is left out, the
    /// kube API (`default/kubernetes`) and cluster DNS (`kube-system/kube-dns`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub cluster_services: Option<Vec<ServiceReference>>,

    /// Whether pods reach the outside: what is neither node, service, nor any Network. If it is left out, a
    /// primary Network does, and any other does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outside: Option<Outside>,

    /// Which addresses outside the cluster Services of the namespaces that have this Network as their primary one may
    /// take. If it is left out: those that a load balancer gave them, and no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<NetworkServices>,

    /// Further routes that each pod gets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("self.all(r, isCIDR(r.destination))")
            .message("a route's destination must be an address range, for example 192.0.2.0/24"),
        validation = Rule::new("self.all(r, !has(r.via) || isIP(r.via))")
            .message("a route's via must be an address, for example 10.77.0.5"),
    )]
    pub routes: Vec<Route>,

    /// Whether the agent writes a NetworkAttachment for each attachment. If it is left out: yes, except for the
    /// Network `default`, whose pods show their addresses themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publish_attachments: Option<bool>,
}

/// What [`crate::claims::read`] can read, for the API server: one selector that nobody can read would be every namespace's trouble.
const OPERATORS: &str = "!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in ['In', 'NotIn', 'Exists', 'DoesNotExist'])";
const OPERATORS_MESSAGE: &str = "the operators of a selector are In, NotIn, Exists and DoesNotExist";
const VALUES: &str = "!has(self.matchExpressions) || self.matchExpressions.all(e, (e.operator in ['In', 'NotIn']) == (has(e.values) && size(e.values) > 0))";
const VALUES_MESSAGE: &str = "In and NotIn need values, Exists and DoesNotExist take none";

/// One address range of a Network.
#[derive(Clone, Debug, Default, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!isCIDR(self.cidr) || !has(self.gateway) || (isIP(self.gateway) && cidr(self.cidr).containsIP(self.gateway))")
        .message("the gateway must be an address inside the subnet; leave it out for the first one"),
    validation = Rule::new("!isCIDR(self.cidr) || !has(self.reserved) || self.reserved.all(r, isCIDR(r) && cidr(self.cidr).containsCIDR(r))")
        .message("each reserved range must be a range inside the subnet, for example 10.77.0.0/28"),
)]
pub struct Subnet {
    /// The range, for example `10.77.0.0/16` or `fd77::/64`.
    #[schemars(length(min = 3, max = 43))]
    #[x_kube(
        validation = Rule::new("isCIDR(self)")
            .message("write an address range, for example 10.77.0.0/16 or fd77::/64"),
        validation = Rule::new("!isCIDR(self) || cidr(self) == cidr(self).masked()")
            .message("the address has bits set behind the prefix: write the first address of the range, for example 10.77.0.0/16"),
        validation = Rule::new("!isCIDR(self) || (cidr(self).ip().family() == 4 ? cidr(self).prefixLength() <= 29 : cidr(self).prefixLength() <= 125)")
            .message("the range is too small for a gateway, a router and a pod: write at most /29 (IPv4) or /125 (IPv6)"),
    )]
    pub cidr: String,

    /// The pods' gateway, the same on every node; the range's first address if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 39))]
    pub gateway: Option<String>,

    /// Ranges that are never given out by themselves; a pod can still ask for one of these addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(min = 3, max = 43)))]
    pub reserved: Vec<String>,
}

/// Which namespaces may attach.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(self.from == 'Selector') == has(self.selector)")
        .message("selector goes with from: Selector, and from: Selector needs one"),
)]
pub struct AllowedNamespaces {
    /// Where the right to attach comes from.
    #[serde(default)]
    pub from: AllowedNamespacesFrom,
    /// The namespaces' labels, with `from: Selector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new(OPERATORS).message(OPERATORS_MESSAGE),
        validation = Rule::new(VALUES).message(VALUES_MESSAGE),
    )]
    pub selector: Option<LabelSelector>,
}

/// Where the right to attach comes from.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum AllowedNamespacesFrom {
    /// No namespace may, except those of `primaryFor`.
    #[default]
    None,
    /// Every namespace may.
    All,
    /// Namespaces that the selector matches may.
    Selector,
}

/// A Service by its name.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceReference {
    /// The Service's namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The Service's name.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
}

/// Whether pods reach what is neither node, service, nor any Network.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum Outside {
    /// They do, behind their node's address.
    Masquerade,
    /// They do not.
    Closed,
}

/// Which addresses outside the cluster Services of a Network may take, besides node ports.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkServices {
    /// Whether `spec.externalIPs` of Services are served. Whoever may write a Service chooses those addresses, and takes
    /// what clients outside the cluster send there through a node. If it is left out: `Deny`; for the Network `default`
    /// `Allow`, as kube-proxy does.
    #[serde(default, rename = "externalIPs", skip_serializing_if = "Option::is_none")]
    pub external_ips: Option<Permission>,

    /// Whether a load-balancer address may be one of a node's own, as k3s' ServiceLB and kube-vip have them. Whoever may
    /// write a Service chooses its ports, and takes them from whatever else listens there, the kubelet included. If it
    /// is left out: `Deny`. Not for the Network `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_addresses: Option<Permission>,
}

/// Whether something is allowed.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum Permission {
    /// It is not.
    Deny,
    /// It is.
    Allow,
}

impl NetworkSpec {
    /// Whether `spec.externalIPs` of Services are served, in the Network of this name.
    #[must_use]
    pub fn serves_external_ips(&self, name: &str) -> bool {
        let said = self.services.as_ref().and_then(|services| services.external_ips);
        said.map_or(name == crate::names::DEFAULT_NETWORK, |said| said == Permission::Allow)
    }

    /// Whether a load-balancer address may be one of a node's own.
    #[must_use]
    pub fn serves_node_addresses(&self) -> bool {
        self.services.as_ref().and_then(|services| services.node_addresses) == Some(Permission::Allow)
    }
}

/// What the controller and the nodes know about a Network.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkStatus {
    /// `Accepted` and `Ready`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// The Network's number, unique in the cluster and never changed: it is the tunnel's VNI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16777215))]
    pub id: Option<u32>,
    /// Addresses used and free in the whole Network, one entry per family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AddressCounts>,
    /// How many namespaces have it as their primary Network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub primary_namespaces: Option<i32>,
}

fn default_class() -> String {
    crate::names::DEFAULT_CLASS.into()
}
