//! What is known of a cluster, for policies: read once from the API or a folder.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Result;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use knit_api::{NetworkAttachment, PolicyEnforcement, names};
use knit_model::{Claim, Claims, Labels, Network, attached_addresses};
use knit_objects::{Kinds, Scope};
use knit_policy::cluster::Cluster;
use knit_policy::kubernetes as convert;
use knit_policy::kubernetes::{
    AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy, Converted, MultiNetworkPolicy,
    NetworkPolicy,
};
use knit_policy::model::{Alias, Attachment, Name, Namespace, Pod, Policy};
use knit_types::NetworkName;

use crate::command::objects::Listing;

/// A cluster to judge.
pub struct Known {
    pub cluster: Cluster,
    pub pods: Vec<Pod>,
    pub networks: Vec<Name>,
    /// The Networks that leave policies to others.
    pub left_to_others: Vec<Name>,
    /// Whose cluster IP an address is.
    pub services: BTreeMap<IpAddr, String>,
    pub problems: Vec<String>,
}

/// What Kubernetes labels a namespace with.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// The kinds that files may hold: all that Knit reads, and policies.
pub fn kinds() -> Kinds {
    Kinds::default()
        .with::<ClusterNetworkPolicy>(Scope::Cluster)
        .with::<AdminNetworkPolicy>(Scope::Cluster)
        .with::<BaselineAdminNetworkPolicy>(Scope::Cluster)
        .with::<MultiNetworkPolicy>(Scope::Namespaced)
}

pub async fn read(objects: &Listing) -> Result<Known> {
    let mut known = Known {
        cluster: Cluster::new(),
        pods: Vec::new(),
        networks: Vec::new(),
        left_to_others: Vec::new(),
        services: BTreeMap::new(),
        problems: Vec::new(),
    };
    let mut networks: Vec<Arc<Network>> = Vec::new();
    for network in objects.list_if_there::<knit_api::Network>().await? {
        match Network::try_from(network) {
            Ok(network) => networks.push(Arc::new(network)),
            Err(error) => known.problems.push(format!("a Network cannot be read and is left out: {error}")),
        }
    }
    let claims = Claims::of(&networks);
    known.networks = networks.iter().map(|network| Name::from(network.name().as_str())).collect();
    known.cluster.set_networks(known.networks.clone());
    let others = networks.iter().filter(|network| {
        let policy = network.object().spec.policy.unwrap_or_default();
        policy.enforcement == PolicyEnforcement::Others
    });
    known.left_to_others = others.map(|network| Name::from(network.name().as_str())).collect();
    for node in objects.list::<core::Node>(None).await? {
        known.cluster.set_node(convert::node(&node));
    }
    let mut labels: BTreeMap<String, Labels> = BTreeMap::new();
    for namespace in objects.list::<core::Namespace>(None).await? {
        known.cluster.set_namespace(convert::namespace(&namespace));
        let metadata = namespace.metadata;
        labels.insert(metadata.name.unwrap_or_default(), metadata.labels.unwrap_or_default());
    }
    let attachments: Vec<NetworkAttachment> = objects.list_if_there().await?;
    for pod in objects.list::<core::Pod>(None).await? {
        known.pod(&pod, &claims, &labels, &attachments);
    }
    known.namespaces_of_pods(&labels);
    known.policies(objects).await?;
    known.services(objects, &networks).await?;
    known.problems.extend(known.cluster.problems().iter().map(ToString::to_string));
    known.problems.extend(objects.problems());
    Ok(known)
}

impl Known {
    /// A namespace that files do not have has its name as a label, and no other.
    fn namespaces_of_pods(&mut self, there: &BTreeMap<String, Labels>) {
        for pod in &self.pods {
            if !there.contains_key(&*pod.key.namespace) {
                let namespace = Namespace::new(&pod.key.namespace, Default::default());
                self.cluster.set_namespace(namespace);
            }
        }
    }

    fn pod(
        &mut self,
        object: &core::Pod,
        claims: &Claims,
        labels: &BTreeMap<String, Labels>,
        attachments: &[NetworkAttachment],
    ) {
        let Converted { object: Some(mut pod), problems } = convert::pod(object, None) else { return };
        self.problems.extend(problems.iter().map(ToString::to_string));
        let own = object.metadata.annotations.as_ref().and_then(|a| a.get(names::PRIMARY_ANNOTATION));
        let primary: Name = match own {
            Some(name) => name.trim().into(),
            None => self.primary_of(&pod.key.namespace, claims, labels),
        };
        // What a pod shows as its addresses are those of its primary Network.
        let first = pod.attachments.iter().flat_map(|a| a.addresses.iter().copied()).collect();
        let mut list = vec![Attachment { network: primary.clone(), primary: true, addresses: first }];
        for attachment in attachments {
            let of_pod = attachment.spec.pod == *pod.key.name
                && attachment.metadata.namespace.as_deref() == Some(&*pod.key.namespace);
            if of_pod && *attachment.spec.network != *primary {
                let addresses = attachment.status.iter().flat_map(attached_addresses).collect();
                let network = attachment.spec.network.as_str().into();
                list.push(Attachment { network, primary: false, addresses });
            }
        }
        pod.attachments = list.into();
        self.pods.push(pod.clone());
        self.cluster.set_pod(pod);
    }

    /// The primary Network of a namespace, as agents see it.
    fn primary_of(&mut self, namespace: &str, claims: &Claims, labels: &BTreeMap<String, Labels>) -> Name {
        let mut labels = labels.get(namespace).cloned().unwrap_or_default();
        labels.entry(NAME_LABEL.to_owned()).or_insert_with(|| namespace.to_owned());
        let mut selecting = claims.selecting(&labels);
        let (first, second) = (selecting.next(), selecting.next());
        let problem = match (claims.of_namespace(&labels), first.zip(second)) {
            (Claim::Unknown { network, problem }, _) => Some(format!(
                "Namespace {namespace}: primaryFor of Network {network} may select it, but cannot be \
                 understood ({problem}): correct it; until then no pod starts there"
            )),
            (_, Some((first, second))) => Some(format!(
                "Namespace {namespace}: primaryFor of Networks {first} and {second} both select it: change \
                 one; {first}, the older one, has it"
            )),
            _ => None,
        };
        self.problems.extend(problem.filter(|problem| !self.problems.contains(problem)));
        first.map_or(names::DEFAULT_NETWORK, NetworkName::as_str).into()
    }

    async fn policies(&mut self, objects: &Listing) -> Result<()> {
        let mut all: Vec<Converted<Policy>> = Vec::new();
        all.extend(objects.list::<NetworkPolicy>(None).await?.iter().map(convert::network_policy));
        all.extend(objects.list_if_there().await?.iter().map(convert::cluster_network_policy));
        all.extend(objects.list_if_there().await?.iter().map(convert::admin_network_policy));
        all.extend(objects.list_if_there().await?.iter().map(convert::baseline_admin_network_policy));
        all.extend(objects.list_if_there().await?.iter().map(convert::multi_network_policy));
        for converted in all {
            self.problems.extend(converted.problems.iter().map(ToString::to_string));
            if let Some(policy) = converted.object {
                self.cluster.set_policy(policy);
            }
        }
        Ok(())
    }

    /// Whose address is a Service's, and which of them Networks reach over the uplink (rules 29 and 38).
    async fn services(&mut self, objects: &Listing, networks: &[Arc<Network>]) -> Result<()> {
        let services: Vec<core::Service> = objects.list(None).await?;
        let slices: Vec<EndpointSlice> = objects.list(None).await?;
        for service in &services {
            let (namespace, name) = full_name(&service.metadata);
            for address in convert::cluster_ips(service) {
                self.services.insert(address, format!("{namespace}/{name}"));
            }
        }
        for network in networks.iter().filter(|network| network.primary_for().is_some()) {
            let wanted: Vec<(&str, &str)> = network.cluster_services().collect();
            let listed = services.iter().filter(|s| wanted.contains(&full_name(&s.metadata)));
            let aliases: Vec<Alias> = listed.flat_map(|service| aliases(service, &slices)).collect();
            self.cluster.set_aliases(network.name(), &aliases);
        }
        Ok(())
    }
}

fn full_name(metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> (&str, &str) {
    (metadata.namespace.as_deref().unwrap_or("default"), metadata.name.as_deref().unwrap_or_default())
}

/// Each address and port of a Service, with its ready endpoints of the same family.
fn aliases(service: &core::Service, slices: &[EndpointSlice]) -> Vec<Alias> {
    let (namespace, name) = full_name(&service.metadata);
    let of_service = |slice: &&EndpointSlice| {
        let labels = slice.metadata.labels.as_ref();
        let to = labels.and_then(|l| l.get("kubernetes.io/service-name"));
        full_name(&slice.metadata).0 == namespace && to.is_some_and(|to| to == name)
    };
    let slices: Vec<&EndpointSlice> = slices.iter().filter(of_service).collect();
    convert::aliases(service, &slices)
}
