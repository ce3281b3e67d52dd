//! What is known of a cluster, for policies: read once from the API or a folder.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::Result;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use knit_api::{Network, NetworkAttachment, names};
use knit_objects::{Kinds, Scope};
use knit_policy::cluster::Cluster;
use knit_policy::kubernetes as convert;
use knit_policy::kubernetes::{
    AdminNetworkPolicy, BaselineAdminNetworkPolicy, ClusterNetworkPolicy, Converted, MultiNetworkPolicy,
};
use knit_policy::model::{Alias, AliasEndpoint, Attachment, Labels, Name, Namespace, Pod, Policy, Protocol};

use crate::command::objects::Listing;

/// A cluster to judge.
pub struct Known {
    pub cluster: Cluster,
    pub pods: Vec<Pod>,
    pub networks: Vec<Name>,
    /// Whose cluster IP an address is.
    pub services: BTreeMap<IpAddr, String>,
    pub problems: Vec<String>,
}

/// Services that a primary Network reaches if it names none.
const CLUSTER_SERVICES: [(&str, &str); 2] = [("default", "kubernetes"), ("kube-system", "kube-dns")];

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
        services: BTreeMap::new(),
        problems: Vec::new(),
    };
    let networks: Vec<Network> = objects.list_if_there().await?;
    known.networks = networks.iter().filter_map(|n| n.metadata.name.as_deref()).map(Name::from).collect();
    known.cluster.set_networks(known.networks.clone());
    for node in objects.list::<core::Node>(None).await? {
        known.cluster.set_node(convert::node(&node));
    }
    let mut labels: BTreeMap<Name, Labels> = BTreeMap::new();
    for namespace in objects.list::<core::Namespace>(None).await? {
        let namespace = convert::namespace(&namespace);
        labels.insert(namespace.name.clone(), namespace.labels.clone());
        known.cluster.set_namespace(namespace);
    }
    let attachments: Vec<NetworkAttachment> = objects.list_if_there().await?;
    for pod in objects.list::<core::Pod>(None).await? {
        known.pod(&pod, &networks, &labels, &attachments);
    }
    known.policies(objects).await?;
    known.services(objects, &networks).await?;
    known.problems.extend(known.cluster.problems().iter().map(ToString::to_string));
    known.problems.extend(objects.problems());
    Ok(known)
}

impl Known {
    fn pod(
        &mut self,
        object: &core::Pod,
        networks: &[Network],
        labels: &BTreeMap<Name, Labels>,
        attachments: &[NetworkAttachment],
    ) {
        let Converted { object: Some(mut pod), problems } = convert::pod(object, None) else { return };
        self.problems.extend(problems.iter().map(ToString::to_string));
        let own = object.metadata.annotations.as_ref().and_then(|a| a.get(names::PRIMARY_ANNOTATION));
        let primary: Name = match own {
            Some(name) => name.trim().into(),
            None => self.primary_of(&pod.key.namespace, networks, labels),
        };
        // What a pod shows as its addresses are those of its primary Network.
        let first = pod.attachments.iter().flat_map(|a| a.addresses.iter().copied()).collect();
        let mut list = vec![Attachment { network: primary.clone(), primary: true, addresses: first }];
        for attachment in attachments {
            let of_pod = attachment.spec.pod == *pod.key.name
                && attachment.metadata.namespace.as_deref() == Some(&*pod.key.namespace);
            if of_pod && *attachment.spec.network != *primary {
                let listed = attachment.status.iter().flat_map(|s| &s.addresses);
                let addresses = listed.filter_map(|a| convert::parse_ip(&a.address)).collect();
                let network = attachment.spec.network.as_str().into();
                list.push(Attachment { network, primary: false, addresses });
            }
        }
        pod.attachments = list.into();
        self.pods.push(pod.clone());
        self.cluster.set_pod(pod);
    }

    /// The primary Network of a namespace.
    fn primary_of(&mut self, namespace: &str, networks: &[Network], labels: &BTreeMap<Name, Labels>) -> Name {
        let unknown = Namespace::new(namespace, Labels::default()).labels;
        let labels = labels.get(namespace).unwrap_or(&unknown);
        let mut found = networks.iter().filter(|network| {
            let selector = network.spec.primary_for.as_ref().and_then(convert::selector);
            selector.is_some_and(|selector| selector.matches(labels)) && !is_refused(network)
        });
        let name = |n: &Network| Name::from(n.metadata.name.as_deref().unwrap_or_default());
        let first = found.next().map_or_else(|| names::DEFAULT_NETWORK.into(), name);
        if let Some(second) = found.next().map(name) {
            let problem = format!(
                "Namespace {namespace}: primaryFor of Networks {first} and {second} both select it: change \
                 one; \
                 {first} is taken here"
            );
            if !self.problems.contains(&problem) {
                self.problems.push(problem);
            }
        }
        first
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
    async fn services(&mut self, objects: &Listing, networks: &[Network]) -> Result<()> {
        let services: Vec<core::Service> = objects.list(None).await?;
        let slices: Vec<EndpointSlice> = objects.list(None).await?;
        for service in &services {
            let (namespace, name) = full_name(&service.metadata);
            for address in cluster_ips(service) {
                self.services.insert(address, format!("{namespace}/{name}"));
            }
        }
        for network in networks.iter().filter(|n| n.spec.primary_for.is_some()) {
            let Some(network_name) = network.metadata.name.as_deref() else { continue };
            let mut wanted: Vec<(&str, &str)> = CLUSTER_SERVICES.to_vec();
            if let Some(list) = &network.spec.cluster_services {
                wanted = list.iter().map(|s| (s.namespace.as_str(), s.name.as_str())).collect();
            }
            let listed = services.iter().filter(|s| wanted.contains(&full_name(&s.metadata)));
            let aliases: Vec<Alias> = listed.flat_map(|service| aliases(service, &slices)).collect();
            self.cluster.set_aliases(network_name, &aliases);
        }
        Ok(())
    }
}

fn is_refused(network: &Network) -> bool {
    let conditions = network.status.iter().flat_map(|s| &s.conditions);
    conditions.into_iter().any(|c| c.type_ == knit_api::conditions::network::ACCEPTED && c.status == "False")
}

fn full_name(metadata: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> (&str, &str) {
    (metadata.namespace.as_deref().unwrap_or("default"), metadata.name.as_deref().unwrap_or_default())
}

fn cluster_ips(service: &core::Service) -> Vec<IpAddr> {
    let spec = service.spec.as_ref();
    let listed = spec.and_then(|s| s.cluster_ips.as_ref()).into_iter().flatten();
    let mut all: Vec<IpAddr> = listed.filter_map(|ip| convert::parse_ip(ip)).collect();
    all.extend(spec.and_then(|s| convert::parse_ip(s.cluster_ip.as_deref()?)));
    all.sort_unstable();
    all.dedup();
    all
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
    let ports = service.spec.iter().flat_map(|s| s.ports.iter().flatten());
    let mut all = Vec::new();
    for port in ports {
        let protocol = Protocol::parse(port.protocol.as_deref().unwrap_or("TCP"));
        let (Some(protocol), Ok(number)) = (protocol, u16::try_from(port.port)) else { continue };
        for address in cluster_ips(service) {
            let mut endpoints: Vec<AliasEndpoint> = Vec::new();
            for slice in &slices {
                let same = slice.ports.iter().flatten().find(|p| {
                    p.name.as_deref().unwrap_or_default() == port.name.as_deref().unwrap_or_default()
                        && p.protocol.as_deref().unwrap_or("TCP") == protocol.to_string()
                });
                let Some(there) = same.and_then(|p| u16::try_from(p.port?).ok()) else { continue };
                let ready = slice
                    .endpoints
                    .iter()
                    .filter(|e| e.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true));
                let found = ready.filter_map(|e| convert::parse_ip(e.addresses.first()?));
                let family = found.filter(|a| a.is_ipv4() == address.is_ipv4());
                endpoints.extend(family.map(|address| AliasEndpoint { address, port: there }));
            }
            endpoints.sort_unstable();
            endpoints.dedup();
            all.push(Alias { address, protocol, port: number, endpoints: endpoints.into() });
        }
    }
    all
}
