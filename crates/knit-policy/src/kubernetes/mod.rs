//! Kubernetes objects to the [`model`](crate::model).
//!
//! What cannot be understood is named in a [`Problem`], and what is made of the rest never allows more than
//! the object meant: a core policy loses the peer or port (rule 11), a rule of a ClusterNetworkPolicy that
//! accepts matches nothing, and one that denies or passes denies everything, as its API asks for. Fields that
//! an API server would fill in are taken as it would fill them in (rules 3 and 4), so that objects written by
//! hand in files mean the same as those in a cluster.

mod admin;
mod aliases;
mod cluster_policy;
mod lenient;
mod limits;
mod network_policy;
mod objects;
mod parse;
mod types;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

use crate::model::{Kind, Labels, Operator, Policy, PolicyName, Problem, Requirement, Selector};

pub use admin::{admin_network_policy, baseline_admin_network_policy};
pub use aliases::{aliases, cluster_ips};
pub use cluster_policy::cluster_network_policy;
pub use knit_types::{parse_ip, parse_net};
pub use network_policy::{POLICY_FOR_ANNOTATION, multi_network_policy, network_policy};
pub use objects::{namespace, node, pod};
pub use types::{
    AdminNetworkPolicy, AdminPolicySpec, AdminPort, AdminRule, BaselineAdminNetworkPolicy,
    ClusterNetworkPolicy, ClusterPolicySpec, ClusterRule, MultiNetworkPolicy, NamespacePolicyPeer,
    NamespacePolicyPort, NamespacePolicyRule, NamespacePolicySpec, NamespacedPods, NamespacedSubject,
    NetworkPolicy, NumberedPort, PolicyPeer, PortChoice, PortRange, ProtocolMatch, TransportMatch,
};

/// The most rules of one direction that are read of an object, the most peers or ports of one rule, and the
/// most values of one selector. No object that an API server stores comes near; what is beyond is left out,
/// and named.
pub const MAX_ITEMS: usize = 100_000;

/// What became of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted<T> {
    /// What to tell; nothing if the object cannot be used at all.
    pub object: Option<T>,
    /// What in it could not be used.
    pub problems: Vec<Problem>,
}

/// Reads a selector; nothing if it cannot be understood.
#[must_use]
pub fn selector(selector: &LabelSelector) -> Option<Selector> {
    Problems::of("", String::new()).selector(selector, "")
}

/// Namespace and name; an object without a namespace is in `default`, as an API server would have it.
pub(crate) fn full_name(metadata: &ObjectMeta) -> (&str, &str) {
    let namespace = metadata.namespace.as_deref().filter(|n| !n.is_empty()).unwrap_or("default");
    (namespace, metadata.name.as_deref().unwrap_or_default())
}

pub(crate) fn policy_name(kind: Kind, metadata: &ObjectMeta) -> PolicyName {
    let (namespace, name) = full_name(metadata);
    let namespaced = matches!(kind, Kind::Network | Kind::Multi);
    PolicyName { kind, namespace: if namespaced { namespace.into() } else { "".into() }, name: name.into() }
}

pub(crate) fn labels(metadata: &ObjectMeta) -> Labels {
    metadata.labels.iter().flatten().map(|(k, v)| (k.as_str(), v.as_str())).collect()
}

/// Collects what is wrong with one object.
pub(crate) struct Problems {
    kind: &'static str,
    object: String,
    list: Vec<Problem>,
}

impl Problems {
    pub(crate) fn of(kind: &'static str, object: String) -> Self {
        Self { kind, object, list: Vec::new() }
    }

    pub(crate) fn of_policy(name: &PolicyName) -> Self {
        Self::of(name.kind.as_str(), name.full())
    }

    pub(crate) fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        // One object with a hundred thousand faults does not need as many messages.
        if self.list.len() < 100 {
            self.list.push(Problem {
                kind: self.kind,
                object: self.object.as_str().into(),
                field: field.into(),
                message: message.into(),
            });
        }
    }

    pub(crate) fn into_policy(self, policy: Option<Policy>) -> Converted<Policy> {
        Converted { object: policy, problems: self.list }
    }

    pub(crate) fn into_list(self) -> Vec<Problem> {
        self.list
    }

    /// As many of a list as are read.
    pub(crate) fn limited<'a, T>(&mut self, list: &'a [T], field: &str) -> (&'a [T], bool) {
        if list.len() <= MAX_ITEMS {
            return (list, true);
        }
        self.add(field, format!("more than {MAX_ITEMS} items: the others are ignored; split the policy"));
        (&list[..MAX_ITEMS], false)
    }

    /// Reads a selector; nothing if it cannot be understood (rule 2).
    pub(crate) fn selector(&mut self, selector: &LabelSelector, field: &str) -> Option<Selector> {
        let mut requirements = Vec::new();
        for (key, value) in selector.match_labels.iter().flatten() {
            requirements.push(Requirement::new(key.as_str(), Operator::In, [value.as_str()]));
        }
        for (i, expression) in selector.match_expressions.iter().flatten().enumerate() {
            let at = || format!("{field}.matchExpressions[{i}]");
            let values = expression.values.as_deref().unwrap_or_default();
            let operator = match expression.operator.as_str() {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                other => {
                    self.add(at(), format!("{other:?} must be In, NotIn, Exists or DoesNotExist"));
                    return None;
                }
            };
            let with_values = matches!(operator, Operator::In | Operator::NotIn);
            if with_values == values.is_empty() {
                let needs = if with_values { "needs values" } else { "takes no values" };
                self.add(at(), format!("{} {needs}", expression.operator));
                return None;
            }
            if expression.key.is_empty() || values.len() > MAX_ITEMS {
                self.add(at(), format!("a key, and at most {MAX_ITEMS} values, are needed"));
                return None;
            }
            let values = values.iter().map(String::as_str);
            requirements.push(Requirement::new(expression.key.as_str(), operator, values));
        }
        if requirements.len() > MAX_ITEMS {
            self.add(field, format!("more than {MAX_ITEMS} requirements"));
            return None;
        }
        Some(requirements.into_iter().collect())
    }
}
