//! The policy kinds that come as CRDs: what is read of them, with what is not known kept, so that it can fail
//! closed.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Fields that this version does not know.
pub type Unknown = BTreeMap<String, Value>;

/// `policy.networking.k8s.io/v1alpha2` ClusterNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct ClusterNetworkPolicy {
    /// Name, labels, annotations.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says.
    #[serde(default)]
    pub spec: ClusterPolicySpec,
    /// Written by implementations, read by nobody here.
    #[serde(default)]
    pub status: Option<Value>,
}

/// What a ClusterNetworkPolicy says.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterPolicySpec {
    /// `Admin` or `Baseline`.
    #[serde(default)]
    pub tier: String,
    /// 0 to 1000, lower first.
    #[serde(default)]
    pub priority: i32,
    /// The pods that it acts on.
    #[serde(default)]
    pub subject: NamespacedSubject,
    /// Rules for traffic to them, in order.
    #[serde(default)]
    pub ingress: Vec<ClusterRule>,
    /// Rules for traffic from them, in order.
    #[serde(default)]
    pub egress: Vec<ClusterRule>,
}

/// A rule of a ClusterNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRule {
    /// Its own name.
    pub name: Option<String>,
    /// `Accept`, `Deny` or `Pass`.
    #[serde(default)]
    pub action: String,
    /// The other side, of ingress.
    #[serde(default)]
    pub from: Vec<PolicyPeer>,
    /// The other side, of egress.
    #[serde(default)]
    pub to: Vec<PolicyPeer>,
    /// Which traffic; all if there are none.
    #[serde(default)]
    pub protocols: Vec<ProtocolMatch>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// `policy.networking.k8s.io/v1alpha1` AdminNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct AdminNetworkPolicy {
    /// Name, labels, annotations.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says.
    #[serde(default)]
    pub spec: AdminPolicySpec,
    /// Written by implementations, read by nobody here.
    #[serde(default)]
    pub status: Option<Value>,
}

/// `policy.networking.k8s.io/v1alpha1` BaselineAdminNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct BaselineAdminNetworkPolicy {
    /// Its name is `default`.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says; it has no priority.
    #[serde(default)]
    pub spec: AdminPolicySpec,
    /// Written by implementations, read by nobody here.
    #[serde(default)]
    pub status: Option<Value>,
}

/// What an AdminNetworkPolicy or its baseline says.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdminPolicySpec {
    /// 0 to 1000, lower first.
    #[serde(default)]
    pub priority: i32,
    /// The pods that it acts on.
    #[serde(default)]
    pub subject: NamespacedSubject,
    /// Rules for traffic to them, in order.
    #[serde(default)]
    pub ingress: Vec<AdminRule>,
    /// Rules for traffic from them, in order.
    #[serde(default)]
    pub egress: Vec<AdminRule>,
}

/// A rule of an AdminNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdminRule {
    /// Its own name.
    pub name: Option<String>,
    /// `Allow`, `Deny` or `Pass`.
    #[serde(default)]
    pub action: String,
    /// The other side, of ingress.
    #[serde(default)]
    pub from: Vec<PolicyPeer>,
    /// The other side, of egress.
    #[serde(default)]
    pub to: Vec<PolicyPeer>,
    /// Which traffic; all if there are none.
    #[serde(default)]
    pub ports: Vec<AdminPort>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// The pods that a policy of the cluster acts on: exactly one field.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacedSubject {
    /// All pods of these namespaces.
    pub namespaces: Option<LabelSelector>,
    /// These pods of these namespaces.
    pub pods: Option<NamespacedPods>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// Pods of namespaces.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacedPods {
    /// The namespaces; all if it is empty.
    #[serde(default)]
    pub namespace_selector: LabelSelector,
    /// The pods in them; all if it is empty.
    #[serde(default)]
    pub pod_selector: LabelSelector,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// The other side of a rule: exactly one field.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyPeer {
    /// All pods of these namespaces.
    pub namespaces: Option<LabelSelector>,
    /// These pods of these namespaces.
    pub pods: Option<NamespacedPods>,
    /// Nodes, for egress.
    pub nodes: Option<LabelSelector>,
    /// CIDRs, for egress.
    pub networks: Option<Vec<String>>,
    /// Names in DNS, for egress.
    pub domain_names: Option<Vec<String>>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// Traffic of a ClusterNetworkPolicy's rule: exactly one field.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProtocolMatch {
    /// TCP.
    pub tcp: Option<TransportMatch>,
    /// UDP.
    pub udp: Option<TransportMatch>,
    /// SCTP.
    pub sctp: Option<TransportMatch>,
    /// A port by the name that the destination pod gives it.
    pub destination_named_port: Option<String>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// Ports of one protocol.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TransportMatch {
    /// The destination's port.
    pub destination_port: Option<PortChoice>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A port or a range: exactly one field.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortChoice {
    /// One port.
    pub number: Option<i32>,
    /// Several.
    pub range: Option<PortRange>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// Ports from one to another, both included.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortRange {
    /// Only in an AdminNetworkPolicy: the protocol; TCP if it is left out.
    pub protocol: Option<String>,
    /// The first.
    #[serde(default)]
    pub start: i32,
    /// The last.
    #[serde(default)]
    pub end: i32,
}

/// Traffic of an AdminNetworkPolicy's rule: exactly one field.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdminPort {
    /// One port.
    pub port_number: Option<NumberedPort>,
    /// A port by the name that the destination pod gives it.
    pub named_port: Option<String>,
    /// Several ports.
    pub port_range: Option<PortRange>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// One port of one protocol.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NumberedPort {
    /// TCP if it is left out.
    pub protocol: Option<String>,
    /// The number.
    #[serde(default)]
    pub port: i32,
}

/// `k8s.cni.cncf.io/v1beta1` MultiNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct MultiNetworkPolicy {
    /// Name, and the annotation that says for which Networks it is.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says.
    #[serde(default)]
    pub spec: MultiPolicySpec,
    /// Written by implementations, read by nobody here.
    #[serde(default)]
    pub status: Option<Value>,
}

/// What a MultiNetworkPolicy says: the same as a NetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MultiPolicySpec {
    /// The pods that it acts on.
    pub pod_selector: Option<LabelSelector>,
    /// `Ingress`, `Egress`.
    #[serde(default)]
    pub policy_types: Vec<String>,
    /// What may come in.
    pub ingress: Option<Vec<MultiPolicyRule>>,
    /// What may go out.
    pub egress: Option<Vec<MultiPolicyRule>>,
}

/// A rule of a MultiNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MultiPolicyRule {
    /// The other side, of ingress.
    #[serde(default)]
    pub from: Vec<MultiPolicyPeer>,
    /// The other side, of egress.
    #[serde(default)]
    pub to: Vec<MultiPolicyPeer>,
    /// Which traffic; all if there are none.
    #[serde(default)]
    pub ports: Vec<MultiPolicyPort>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// The other side of a MultiNetworkPolicy's rule.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MultiPolicyPeer {
    /// Pods, of the policy's namespace unless namespaces are selected.
    pub pod_selector: Option<LabelSelector>,
    /// Namespaces.
    pub namespace_selector: Option<LabelSelector>,
    /// Addresses.
    pub ip_block: Option<MultiPolicyBlock>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A CIDR without some others.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MultiPolicyBlock {
    /// The CIDR.
    #[serde(default)]
    pub cidr: String,
    /// The others.
    #[serde(default)]
    pub except: Vec<String>,
}

/// Ports of a MultiNetworkPolicy's rule.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MultiPolicyPort {
    /// TCP if it is left out.
    pub protocol: Option<String>,
    /// A number or a name; all if it is left out.
    pub port: Option<IntOrString>,
    /// The last of a range (v1beta2).
    pub end_port: Option<i32>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

macro_rules! resource {
    ($type:ident, $group:literal, $version:literal, $plural:literal, $scope:ty) => {
        impl k8s_openapi::Resource for $type {
            const API_VERSION: &'static str = concat!($group, "/", $version);
            const GROUP: &'static str = $group;
            const KIND: &'static str = stringify!($type);
            const VERSION: &'static str = $version;
            const URL_PATH_SEGMENT: &'static str = $plural;
            type Scope = $scope;
        }

        impl k8s_openapi::Metadata for $type {
            type Ty = ObjectMeta;
            fn metadata(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn metadata_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(
    ClusterNetworkPolicy,
    "policy.networking.k8s.io",
    "v1alpha2",
    "clusternetworkpolicies",
    ClusterResourceScope
);
resource!(
    AdminNetworkPolicy,
    "policy.networking.k8s.io",
    "v1alpha1",
    "adminnetworkpolicies",
    ClusterResourceScope
);
resource!(
    BaselineAdminNetworkPolicy,
    "policy.networking.k8s.io",
    "v1alpha1",
    "baselineadminnetworkpolicies",
    ClusterResourceScope
);
resource!(MultiNetworkPolicy, "k8s.cni.cncf.io", "v1beta1", "multi-networkpolicies", NamespaceResourceScope);
