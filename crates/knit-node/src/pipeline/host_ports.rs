//! Whether a pod may have the ports of the node that it asks for: none is the node port of another tenant.

use knit_api::names;
use knit_runtime::Pod;
use tokio::time::Instant;

use super::Pipeline;
use super::resolve::Wanted;
use crate::error::{Error, Reason, Result};
use crate::proxy::ServiceProxy;
use crate::request::pod_name;

impl Pipeline {
    /// A port of the node that is another tenant's node port would take what is meant for that one's Service.
    pub(super) async fn check_host_ports(
        &self,
        pod: &Pod,
        wanted: &[Wanted],
        deadline: Instant,
    ) -> Result<()> {
        let Some(proxy) = self.networks.proxy() else { return Ok(()) };
        if wanted.iter().any(|wanted| !wanted.ports.is_empty()) {
            let of_others = |w: &Wanted| !w.ports.is_empty() && w.network != names::DEFAULT_NETWORK;
            let is_default = !wanted.iter().any(of_others);
            self.wait_for_node_ports(proxy, pod, is_default, deadline).await?;
        }
        for mapping in wanted.iter().flat_map(|wanted| &wanted.ports) {
            let owner = proxy.owner_of_node_port(mapping.protocol, mapping.host_port);
            let Some((namespace, name)) =
                owner.filter(|(namespace, _)| Some(namespace) != pod.namespace.as_ref())
            else {
                continue;
            };
            let message = format!(
                "{}: host port {} is the node port of Service {namespace}/{name}: give the pod another one",
                pod_name(pod),
                mapping.host_port
            );
            return Err(Error::new(Reason::Refused, message));
        }
        Ok(())
    }

    /// Waits until it is known whose each node port is: right after a start of the agent, what an earlier one
    /// left is in force, and nobody has said yet whose it is.
    async fn wait_for_node_ports(
        &self,
        proxy: &dyn ServiceProxy,
        pod: &Pod,
        is_default: bool,
        deadline: Instant,
    ) -> Result<()> {
        // While nobody answers, nobody makes pods or Services either: what starts was here before.
        let away = || self.world.get().before.networks_away;
        let deadline = if away() { Instant::now() } else { deadline };
        if tokio::time::timeout_at(deadline, proxy.node_ports_known()).await.unwrap_or(false) {
            return Ok(());
        }
        let who = pod_name(pod);
        if away() {
            tracing::warn!("{who}: assigning host ports without checking node ports: no API server answers");
            return Ok(());
        }
        // As it is with Services: they will not come, and the API server may need a pod of the default
        // Network.
        if let Some(stopped) = proxy.stopped() {
            if is_default {
                tracing::warn!("{who}: assigning host ports without checking node ports: {}", stopped.why);
                return Ok(());
            }
            return Err(Error::new(Reason::NotReady, format!("{who}: {}", stopped.why)));
        }
        let message = format!(
            "{who}: the Services of the cluster have not been listed yet, and a host port could be the node \
             port of one: retrying; if this persists, check that the agent's role allows listing Services"
        );
        Err(Error::new(Reason::NotReady, message))
    }
}
