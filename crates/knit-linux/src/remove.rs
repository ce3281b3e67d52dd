//! Taking a Network away from this node.

use knit_runtime::{Error, NetworkName, Reason, Result};
use knit_types::sync::ReadWrite;

use crate::moves::MovingSubject;
use crate::networks::{Net, Networks};
use crate::shape::RouterHome;
use crate::strays;

/// Takes away what setting a Network up made. One that is not there is fine.
pub(crate) fn remove_network(networks: &Networks, name: &NetworkName) -> Result<()> {
    let Some(net) = networks.get(name)? else {
        // Its namespace may have gone without us, which took the rest along.
        return strays::sweep_left(networks);
    };
    let _moving = networks.moves.begin(MovingSubject::Network(name.to_owned()));
    let _alone = net.gate.writing();
    let attached = net.list()?.len();
    if attached > 0 {
        let message =
            format!("{attached} pods of this node are attached to Network {name}: detach them first");
        return Err(Error::new(Reason::InUse, message).on(name));
    }
    net.driver().take_down(&net).map_err(|error| error.on(name))?;
    if net.home == RouterHome::Node {
        leave_node_tables(networks, &net).map_err(|error| error.on(name))?;
    }
    networks.forget(name);
    Ok(())
}

/// Takes the default Network out of the node's tables; with the last Network these go.
fn leave_node_tables(networks: &Networks, net: &Net) -> Result<()> {
    let mut tables = net.node.tables();
    let others = networks.all()?.iter().any(|other| other.home == RouterHome::Own);
    if others {
        // Their uplinks need the table.
        let id = net.shape().map_or(0, |shape| shape.id());
        return tables.clear_part(&net.node, RouterHome::Node, id);
    }
    tables.delete(&net.node)
}
