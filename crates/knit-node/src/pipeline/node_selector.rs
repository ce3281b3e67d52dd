//! Whether this node is one of those that a pod's Networks are limited to (`spec.nodeSelector`).

use super::Pipeline;
use super::resolve::Wanted;
use crate::error::{Error, Reason, Result};

impl Pipeline {
    /// A Network that is limited to some nodes is for pods of those alone, whatever the scheduler was told.
    pub(super) fn check_node(&self, wanted: &[Wanted], who: &str) -> Result<()> {
        let world = self.world.get();
        let node = world.nodes.get(&self.config.node);
        for name in wanted.iter().map(|wanted| &wanted.network) {
            let network = world.networks.get(name);
            let Some(network) = network.filter(|network| network.object().spec.node_selector.is_some())
            else {
                continue;
            };
            let node = node.ok_or_else(|| {
                let message = format!("{who}: the labels of this node are not known yet; it will be retried");
                Error::new(Reason::NotReady, message)
            })?;
            let here = network.is_for_node(&node.labels).map_err(|error| {
                let message = format!("{who}: spec.nodeSelector of Network {name} cannot be read");
                Error::new(Reason::NotReady, message).because(error.clone())
            })?;
            if !here {
                let message = format!(
                    "{who}: the nodeSelector of Network {name} does not match node {}: request the Network \
                     with a claim or with the extended resource networks.knit.dev/{name}, or select matching \
                     nodes in the pod",
                    self.config.node
                );
                return Err(Error::new(Reason::Refused, message));
            }
        }
        Ok(())
    }
}
