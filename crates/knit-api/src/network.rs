//! Network: a thing that pods attach to.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use knit_types::{IPV6_MIN_MTU, Topology, UnderlayKind, UnderlayMode};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::common::{AddressCounts, Route};
use crate::router_rules;

/// A network that pods attach to. Addresses are unique inside one Network; two Networks may overlap.
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
    doc = "A network that pods attach to. Addresses are unique inside one Network; two Networks may overlap.",
    printcolumn(name = "Topology", type_ = "string", json_path = ".spec.topology"),
    printcolumn(name = "Subnet", type_ = "string", json_path = ".spec.subnets[0].cidr"),
    printcolumn(name = "Subnet-2", type_ = "string", json_path = ".spec.subnets[1].cidr", priority = 1),
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.class", priority = 1),
    printcolumn(name = "ID", type_ = "integer", json_path = ".status.id", priority = 1),
    printcolumn(name = "Primary-In", type_ = "integer", json_path = ".status.primaryNamespaces"),
    printcolumn(name = "Used", type_ = "integer", json_path = ".status.addresses[0].used"),
    printcolumn(name = "Free", type_ = "integer", json_path = ".status.addresses[0].free"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.size() <= 63")
        .message("a Network's name is used as a label value: use at most 63 characters"),
    validation = Rule::new("self.metadata.name == 'default' || (has(self.spec.subnets) && \
    size(self.spec.subnets) > 0)").message(
        "a Network needs at least one subnet, for example subnets: [{cidr: 10.77.0.0/16}]; only the \
        Network default may use the Nodes' podCIDRs"
    ),
    validation = Rule::new("self.metadata.name != 'default' || !has(self.spec.services) || \
    !has(self.spec.services.nodeAddresses)").message(
        "the Network default serves load-balancer addresses like kube-proxy, whoever they belong to: leave \
        services.nodeAddresses out"
    ),
    validation = router_rules::of_default(),
    validation = Rule::new("self.metadata.name != 'default' || !(has(self.spec.nodeSelector) || \
    has(self.spec.scheduling))").message(
        "the Network default is for every node and its addresses do not count in scheduling: leave \
        nodeSelector and scheduling out"
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.primaryFor) || !has(self.allowedNamespaces) || \
    self.allowedNamespaces.from != 'None'")
        .message("primaryFor and allowedNamespaces: {from: None} exclude each other: leave \
        allowedNamespaces out"),
    validation = Rule::new("(self.topology == 'Underlay') == has(self.underlay)")
        .message("topology: Underlay and underlay go together: name the nodes' links, for example underlay: \
        {parents: [{name: eth1}]}"),
    validation = router_rules::of_primary(),
    validation = router_rules::of_services(),
)]
pub struct NetworkSpec {
    /// The NetworkClass, which determines the runtime that serves this Network.
    #[serde(default = "default_class")]
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(validation = ("self == oldSelf", "the class of a Network cannot be changed: create a new \
    Network and move the pods"))]
    pub class: String,

    /// How pods reach each other: routed hop by hop, switched on one segment, or directly on a link of their
    /// node.
    #[x_kube(validation = ("self == oldSelf", "the topology of a Network cannot be changed: create a new \
    Network and move the pods"))]
    #[schemars(schema_with = "crate::common::topology_schema")]
    pub topology: Topology,

    /// Address ranges, at most one per family. A family may be added later; existing subnets cannot change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    #[x_kube(
        validation = Rule::new("self.filter(s, isCIDR(s.cidr) && cidr(s.cidr).ip().family() == 4).size() \
        <= 1")
            .message("at most one IPv4 subnet is allowed: use one larger subnet, or create two Networks"),
        validation = Rule::new("self.filter(s, isCIDR(s.cidr) && cidr(s.cidr).ip().family() == 6).size() \
        <= 1")
            .message("at most one IPv6 subnet is allowed: use one larger subnet, or create two Networks"),
        validation = Rule::new("oldSelf.all(o, self.exists(s, s.cidr == o.cidr))")
            .message("a subnet cannot be changed or removed while the Network exists: create a new \
            Network; adding a subnet of the other family is allowed"),
    )]
    pub subnets: Vec<Subnet>,

    /// Which links of the nodes the Network is on; with `topology: Underlay`, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub underlay: Option<Underlay>,

    /// The MTU of a pod's interface. Defaults to the MTU of the nodes' network minus the overhead of the
    /// tunnel, and with `topology: Underlay` to that of the parent link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = IPV6_MIN_MTU, max = 65535))]
    pub mtu: Option<u16>,

    /// Namespaces whose pods have this Network as their primary Network instead of the default one, with
    /// unchanged manifests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new(OPERATORS).message(OPERATORS_MESSAGE),
        validation = Rule::new(VALUES).message(VALUES_MESSAGE),
    )]
    pub primary_for: Option<LabelSelector>,

    /// Namespaces whose pods may request an attachment. Those selected by `primaryFor` always may.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,

    /// Services of the default Network that pods with this primary Network can reach. Defaults to the
    /// Kubernetes API (`default/kubernetes`) and cluster DNS (`kube-system/kube-dns`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub cluster_services: Option<Vec<ServiceReference>>,

    /// Whether pods can reach the outside: everything that is neither a node, a Service, nor any Network. By
    /// default, pods of a primary Network can, and those of any other cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outside: Option<Outside>,

    /// Which addresses outside the cluster may be used by Services of the namespaces that have this Network
    /// as their primary one. Defaults to those assigned by a load balancer, and no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<NetworkServices>,

    /// Who enforces policies in this Network, and what becomes of live connections when they change. By
    /// default Knit does, and cuts connections that are no longer allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<NetworkPolicySettings>,

    /// Additional routes for each pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    #[x_kube(
        validation = Rule::new("self.all(r, isCIDR(r.destination))")
            .message("a route's destination must be a CIDR, for example 192.0.2.0/24"),
        validation = Rule::new("self.all(r, !has(r.via) || isIP(r.via))")
            .message("a route's via must be an IP address, for example 10.77.0.5"),
    )]
    pub routes: Vec<Route>,

    /// Whether the agent writes a NetworkAttachment for each attachment. Defaults to true, except for the
    /// Network `default`, where the addresses are in the pods' own status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publish_attachments: Option<bool>,

    /// The nodes whose pods may attach; all nodes if it is left out. The scheduler knows it for pods that ask
    /// by a claim or an extended resource, and with `scheduling` for all; on any other node, a pod that asks
    /// for the Network does not start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new(OPERATORS).message(OPERATORS_MESSAGE),
        validation = Rule::new(VALUES).message(VALUES_MESSAGE),
    )]
    pub node_selector: Option<LabelSelector>,

    /// What the scheduler counts. With `Addresses`, pods can ask for the Network by the extended resource
    /// `networks.knit.dev/NAME`, and wait as Pending while it has no free address; so do pods that have it by
    /// annotation or as their main Network. Only where claims are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<Scheduling>,
}

/// What of a Network the scheduler counts.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum Scheduling {
    /// Its addresses.
    Addresses,
}

/// What `knit_model::selector::read` accepts, for the API server: one invalid selector would affect every
/// namespace.
const OPERATORS: &str = "!has(self.matchExpressions) || self.matchExpressions.all(e, e.operator in \
['In', 'NotIn', 'Exists', 'DoesNotExist'])";
const OPERATORS_MESSAGE: &str = "the operator of a selector must be In, NotIn, Exists or DoesNotExist";
const VALUES: &str = "!has(self.matchExpressions) || self.matchExpressions.all(e, (e.operator in \
['In', 'NotIn']) == (has(e.values) && size(e.values) > 0))";
const VALUES_MESSAGE: &str = "In and NotIn need values, Exists and DoesNotExist take none";

/// The links of nodes that a Network is on.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.kind != 'Bridge' || self.mode != 'Vepa'")
        .message("mode Vepa is for kind Macvlan: with kind Bridge write Bridge or Private"),
)]
pub struct Underlay {
    /// What a pod's interface is: `Macvlan`, a child of the link, or `Bridge`, a port of it, for links that
    /// are bridges. Pods on a bridge and their own node reach each other by it.
    #[serde(default)]
    #[x_kube(validation = ("self == oldSelf", "the kind of an Underlay Network cannot be changed: create a \
    new Network and move the pods"))]
    #[schemars(schema_with = "crate::common::underlay_kind_schema")]
    pub kind: UnderlayKind,
    /// Links of nodes. A node takes the first one whose `nodeSelector` matches its labels; one that none
    /// matches does not have the Network.
    #[schemars(length(min = 1, max = 64))]
    pub parents: Vec<UnderlayParent>,
    /// How pods of one node reach each other: `Bridge` directly, `Private` not at all, `Vepa` by a switch
    /// that sends frames back. All of them reach what is on the wire.
    #[serde(default)]
    #[schemars(schema_with = "crate::common::underlay_mode_schema")]
    pub mode: UnderlayMode,
    /// For how many milliseconds a node asks, before a pod uses its addresses, whether somebody else on the
    /// segment has them; 0 does not ask. Defaults to 200.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 2000))]
    pub duplicate_check_milliseconds: Option<u16>,
}

/// A link of nodes, by its name.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnderlayParent {
    /// The link's name on these nodes.
    #[schemars(length(min = 1, max = 15), regex(pattern = r"^[^/\s]+$"))]
    pub name: String,
    /// The labels of these nodes; all nodes if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,
}

/// One address range of a Network.
#[derive(Clone, Debug, Default, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!isCIDR(self.cidr) || !has(self.gateway) || (isIP(self.gateway) && \
    cidr(self.cidr).containsIP(self.gateway))")
        .message("the gateway must be an address inside the subnet; omit it to use the first one"),
    validation = Rule::new("!isCIDR(self.cidr) || !has(self.reserved) || self.reserved.all(r, isCIDR(r) && \
    cidr(self.cidr).containsCIDR(r))")
        .message("each reserved range must be a CIDR inside the subnet, for example 10.77.0.0/28"),
)]
pub struct Subnet {
    /// The range, for example `10.77.0.0/16` or `fd77::/64`.
    #[schemars(length(min = 3, max = 43))]
    #[x_kube(
        validation = Rule::new("isCIDR(self)")
            .message("must be a CIDR, for example 10.77.0.0/16 or fd77::/64"),
        validation = Rule::new("!isCIDR(self) || cidr(self) == cidr(self).masked()")
            .message("the CIDR has host bits set: use the first address of the range, for example \
            10.77.0.0/16"),
        validation = Rule::new("!isCIDR(self) || (cidr(self).ip().family() == 4 ? \
        cidr(self).prefixLength() <= 29 : cidr(self).prefixLength() <= 125)")
            .message("the range is too small for a gateway, a router and a pod: use a prefix length of at \
            most 29 (IPv4) or 125 (IPv6)"),
    )]
    pub cidr: String,

    /// The pods' gateway, the same on every node. Defaults to the first address of the range. With `topology:
    /// Underlay` it is a router of the segment's own, and pods have none if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 2, max = 39))]
    pub gateway: Option<String>,

    /// Ranges that are never assigned automatically; a pod can still request one of these addresses. With
    /// `topology: Underlay` they are other hosts', and no pod gets one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(min = 3, max = 43)))]
    pub reserved: Vec<String>,
}

/// Which namespaces may attach.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(self.from == 'Selector') == has(self.selector)")
        .message("selector requires from: Selector, and from: Selector requires a selector"),
)]
pub struct AllowedNamespaces {
    /// How namespaces get permission to attach.
    #[serde(default)]
    pub from: AllowedNamespacesFrom,
    /// Selects namespaces by their labels; only with `from: Selector`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new(OPERATORS).message(OPERATORS_MESSAGE),
        validation = Rule::new(VALUES).message(VALUES_MESSAGE),
    )]
    pub selector: Option<LabelSelector>,
}

/// How namespaces get permission to attach.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum AllowedNamespacesFrom {
    /// No namespace may, except those selected by `primaryFor`.
    #[default]
    None,
    /// Every namespace may.
    All,
    /// Namespaces that match the selector may.
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

/// Whether pods can reach everything that is neither a node, a Service, nor any Network.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum Outside {
    /// They can, behind their node's address.
    Masquerade,
    /// They cannot.
    Closed,
}

/// Which addresses outside the cluster Services of a Network may use, besides node ports.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkServices {
    /// Whether `spec.externalIPs` of Services are served. Anyone who may write a Service chooses those
    /// addresses, and receives what clients outside the cluster send there through a node. Defaults to
    /// `Deny`; for the Network `default` to `Allow`, as in kube-proxy.
    #[serde(default, rename = "externalIPs", skip_serializing_if = "Option::is_none")]
    pub external_ips: Option<Permission>,

    /// Whether a load-balancer address may be one of a node's own addresses, as with k3s' ServiceLB and
    /// kube-vip. Anyone who may write a Service chooses its ports, and takes them over from whatever else
    /// listens there, including the kubelet. Defaults to `Deny`. Not for the Network `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_addresses: Option<Permission>,
}

/// How policies are enforced in a Network.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicySettings {
    /// Who enforces policies: `Knit`, or `Others`, such as Calico or kube-network-policies on the same nodes,
    /// or nobody. Knit then leaves all traffic in this Network alone.
    #[serde(default)]
    pub enforcement: PolicyEnforcement,
    /// What becomes of live connections that policies no longer allow: `Cut`, or `Keep` until they end by
    /// themselves.
    #[serde(default)]
    pub live_connections: LiveConnections,
}

/// Who enforces policies in a Network.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum PolicyEnforcement {
    /// Knit does.
    #[default]
    Knit,
    /// Others do, or nobody.
    Others,
}

/// What becomes of live connections that policies no longer allow.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum LiveConnections {
    /// They are cut, in both directions.
    #[default]
    Cut,
    /// They go on until they end by themselves.
    Keep,
}

/// Whether something is allowed.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum Permission {
    /// It is not.
    Deny,
    /// It is.
    Allow,
}

/// What the controller and the nodes know about a Network.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkStatus {
    /// `Accepted` and `Ready`; with `topology: Underlay` also `ServicesServed` and `NetworkPolicyEnforced`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// The Network's number, unique in the cluster and never changed: it is the tunnel's VNI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16777215))]
    pub id: Option<u32>,
    /// Used and free addresses in the whole Network, one entry per family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AddressCounts>,
    /// Number of namespaces that have it as their primary Network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub primary_namespaces: Option<i32>,
}

fn default_class() -> String {
    crate::names::DEFAULT_CLASS.into()
}
