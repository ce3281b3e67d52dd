//! The policy kinds that come as CRDs: what is read of them, with what is not known kept, so that it can fail
//! closed.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::lenient::{self, UNREADABLE, Unreadable};

/// Fields that this version does not know.
pub type Unknown = BTreeMap<String, Value>;

/// `policy.networking.k8s.io/v1alpha2` ClusterNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct ClusterNetworkPolicy {
    /// Name, labels, annotations.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says.
    #[serde(default, deserialize_with = "lenient::part")]
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
    #[serde(default, deserialize_with = "lenient::word")]
    pub tier: String,
    /// 0 to 1000, lower first.
    #[serde(default, deserialize_with = "lenient::priority")]
    pub priority: i32,
    /// The pods that it acts on.
    #[serde(default, deserialize_with = "lenient::part")]
    pub subject: NamespacedSubject,
    /// Rules for traffic to them, in order.
    #[serde(default, deserialize_with = "lenient::list")]
    pub ingress: Vec<ClusterRule>,
    /// Rules for traffic from them, in order.
    #[serde(default, deserialize_with = "lenient::list")]
    pub egress: Vec<ClusterRule>,
}

/// A rule of a ClusterNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRule {
    /// Its own name.
    pub name: Option<String>,
    /// `Accept`, `Deny` or `Pass`.
    #[serde(default, deserialize_with = "lenient::word")]
    pub action: String,
    /// The other side, of ingress.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub from: Vec<PolicyPeer>,
    /// The other side, of egress.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub to: Vec<PolicyPeer>,
    /// Which traffic; all if there are none.
    #[serde(default, deserialize_with = "lenient::or_default")]
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
    #[serde(default, deserialize_with = "lenient::part")]
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
    #[serde(default, deserialize_with = "lenient::part")]
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
    #[serde(default, deserialize_with = "lenient::priority")]
    pub priority: i32,
    /// The pods that it acts on.
    #[serde(default, deserialize_with = "lenient::part")]
    pub subject: NamespacedSubject,
    /// Rules for traffic to them, in order.
    #[serde(default, deserialize_with = "lenient::list")]
    pub ingress: Vec<AdminRule>,
    /// Rules for traffic from them, in order.
    #[serde(default, deserialize_with = "lenient::list")]
    pub egress: Vec<AdminRule>,
}

/// A rule of an AdminNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdminRule {
    /// Its own name.
    pub name: Option<String>,
    /// `Allow`, `Deny` or `Pass`.
    #[serde(default, deserialize_with = "lenient::word")]
    pub action: String,
    /// The other side, of ingress.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub from: Vec<PolicyPeer>,
    /// The other side, of egress.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub to: Vec<PolicyPeer>,
    /// Which traffic; all if there are none.
    #[serde(default, deserialize_with = "lenient::or_default")]
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
    #[serde(default, deserialize_with = "lenient::some_selector")]
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
    #[serde(default, deserialize_with = "lenient::selector")]
    pub namespace_selector: LabelSelector,
    /// The pods in them; all if it is empty.
    #[serde(default, deserialize_with = "lenient::selector")]
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
    #[serde(default, deserialize_with = "lenient::some_selector")]
    pub namespaces: Option<LabelSelector>,
    /// These pods of these namespaces.
    pub pods: Option<NamespacedPods>,
    /// Nodes, for egress.
    #[serde(default, deserialize_with = "lenient::some_selector")]
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
#[serde(rename_all = "camelCase", deny_unknown_fields)]
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
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NumberedPort {
    /// TCP if it is left out.
    pub protocol: Option<String>,
    /// The number.
    #[serde(default)]
    pub port: i32,
}

/// `networking.k8s.io/v1` NetworkPolicy, read as strictly as the others.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct NetworkPolicy {
    /// Namespace and name.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says.
    #[serde(default, deserialize_with = "lenient::part")]
    pub spec: NamespacePolicySpec,
}

/// `k8s.cni.cncf.io/v1beta1` MultiNetworkPolicy.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct MultiNetworkPolicy {
    /// Name, and the annotation that says for which Networks it is.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says.
    #[serde(default, deserialize_with = "lenient::part")]
    pub spec: NamespacePolicySpec,
    /// Written by implementations, read by nobody here.
    #[serde(default)]
    pub status: Option<Value>,
}

/// What a NetworkPolicy or a MultiNetworkPolicy says.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacePolicySpec {
    /// The pods that it acts on.
    #[serde(default, deserialize_with = "lenient::some_selector")]
    pub pod_selector: Option<LabelSelector>,
    /// `Ingress`, `Egress`.
    #[serde(default, deserialize_with = "lenient::words")]
    pub policy_types: Vec<String>,
    /// What may come in.
    #[serde(default, deserialize_with = "lenient::some_list")]
    pub ingress: Option<Vec<NamespacePolicyRule>>,
    /// What may go out.
    #[serde(default, deserialize_with = "lenient::some_list")]
    pub egress: Option<Vec<NamespacePolicyRule>>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A rule of either.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacePolicyRule {
    /// The other side, of ingress.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub from: Vec<NamespacePolicyPeer>,
    /// The other side, of egress.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub to: Vec<NamespacePolicyPeer>,
    /// Which traffic; all if there are none.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub ports: Vec<NamespacePolicyPort>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// The other side of such a rule.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacePolicyPeer {
    /// Pods, of the policy's namespace unless namespaces are selected.
    #[serde(default, deserialize_with = "lenient::some_selector")]
    pub pod_selector: Option<LabelSelector>,
    /// Namespaces.
    #[serde(default, deserialize_with = "lenient::some_selector")]
    pub namespace_selector: Option<LabelSelector>,
    /// Addresses.
    pub ip_block: Option<NamespacePolicyBlock>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// A CIDR without some others.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NamespacePolicyBlock {
    /// The CIDR.
    #[serde(default)]
    pub cidr: String,
    /// The others.
    #[serde(default, deserialize_with = "lenient::or_default")]
    pub except: Vec<String>,
}

/// Ports of such a rule.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacePolicyPort {
    /// TCP if it is left out.
    pub protocol: Option<String>,
    /// A number or a name; all if it is left out.
    pub port: Option<Value>,
    /// The last of a range (v1beta2).
    pub end_port: Option<Value>,
    /// What is not known.
    #[serde(flatten)]
    pub unknown: Unknown,
}

/// The one field that stands for what could not be read.
fn unreadable(why: String) -> Unknown {
    [(UNREADABLE.to_owned(), Value::String(why))].into()
}

impl Unreadable for NamespacePolicySpec {
    fn unreadable(_: &Value, why: String) -> Self {
        Self { unknown: unreadable(why), ..Self::default() }
    }
}

impl Unreadable for NamespacePolicyRule {
    fn unreadable(_: &Value, why: String) -> Self {
        Self { unknown: unreadable(why), ..Self::default() }
    }
}

/// Without a tier or a subject they are not used, and that is told.
impl Unreadable for ClusterPolicySpec {
    fn unreadable(_: &Value, _: String) -> Self {
        Self::default()
    }
}

impl Unreadable for AdminPolicySpec {
    fn unreadable(_: &Value, _: String) -> Self {
        Self::default()
    }
}

impl Unreadable for NamespacedSubject {
    fn unreadable(_: &Value, why: String) -> Self {
        Self { unknown: unreadable(why), ..Self::default() }
    }
}

/// Which way a rule fails depends on its action.
fn action_of(rule: &Value) -> String {
    rule.get("action").and_then(Value::as_str).unwrap_or_default().to_owned()
}

impl Unreadable for ClusterRule {
    fn unreadable(value: &Value, why: String) -> Self {
        Self { action: action_of(value), unknown: unreadable(why), ..Self::default() }
    }
}

impl Unreadable for AdminRule {
    fn unreadable(value: &Value, why: String) -> Self {
        Self { action: action_of(value), unknown: unreadable(why), ..Self::default() }
    }
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

resource!(NetworkPolicy, "networking.k8s.io", "v1", "networkpolicies", NamespaceResourceScope);
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
