//! Node set-up: brings this node's side of a Network to what is described, whatever is there.
//!
//! The same pass makes, changes, repairs and upgrades: it lays down what is wanted, reads what is there and
//! is ours, and applies the difference. Rules come first, so that nothing is ever reachable that should not
//! be.

use std::sync::Arc;

use knit_runtime::{Error, Network, Result};
use knit_types::sync::ReadWrite;

use crate::fail::chain;
use crate::host_ports;
use crate::moves::MovingSubject;
use crate::networks::{Net, Networks};
use crate::remove::remove_network;
use crate::shape::{Facts, RouterHome, Shape};
use crate::strays;
use crate::topology::{self, Driver};

/// A pod's namespace may go at any time, and its link with it: then what there is is listed again.
const LIST_ATTEMPTS: usize = 5;

/// Makes this node ready for a Network's pods, or brings it to what has changed.
pub(crate) fn setup_network(networks: &Networks, network: &Network) -> Result<()> {
    let node = &networks.node;
    let _moving = networks.moves.begin(MovingSubject::Network(network.name.clone()));
    let about = |error: Error| error.on(&network.name);
    node.room.make(&node.space);
    strays::sweep(networks);
    let home = networks.home(&network.name);
    let driver = topology::of(network.topology);
    take_other_kind_down(networks, network, driver).map_err(about)?;
    let facts = node.facts(driver.parent(network));
    let worked_out = facts.and_then(|facts| Ok((Shape::of(network, &facts, home)?, facts)));
    let (shape, facts) = worked_out.map_err(|error| {
        if let Err(error) = hold_closed(networks, network, driver) {
            let error = chain(&error);
            tracing::error!(network = %network.name, error, "cannot keep the rules of a Network in force");
        }
        about(error)
    })?;
    let shape = Arc::new(shape);
    let set_up = || set_up(networks, &shape, &facts);
    let mut done = set_up();
    for _ in 1..LIST_ATTEMPTS {
        match &done {
            Err(error) if is_of_gone_link(error) => done = set_up(),
            _ => break,
        }
    }
    done.map_err(about)?;
    if let Err(error) = strays::sweep_left(networks) {
        let error = chain(&error);
        tracing::error!(error, "cannot remove what Networks left that are gone");
    }
    Ok(())
}

/// Has a Network's driver make or repair it, alone with it.
fn set_up(networks: &Networks, shape: &Arc<Shape>, facts: &Facts) -> Result<()> {
    let driver = shape.driver();
    driver.check_node(&networks.node, shape, facts)?;
    let net = networks.ensure(&shape.network.name, driver)?;
    let _alone = net.gate.writing();
    net.keep_mounted()?;
    driver.set_up(&net, shape, facts)?;
    net.set_shape(Arc::clone(shape), facts);
    // Ports of the node are the default Network's affair, whichever Network the pods are in.
    if net.home == RouterHome::Node { host_ports::sweep(networks) } else { Ok(()) }
}

/// Takes the namespace away that a Network of another kind had under this name before this runtime began.
fn take_other_kind_down(networks: &Networks, network: &Network, driver: &dyn Driver) -> Result<()> {
    let there = networks.get(&network.name)?;
    let other = |net: &Net| net.driver().topology().has_router() != driver.topology().has_router();
    match there {
        Some(net) if other(&net) => remove_network(networks, &network.name),
        _ => Ok(()),
    }
}

/// A Network that cannot be set up as it should be now keeps the rules that it has, and gets those back that
/// somebody took away: its pods run on, and what keeps Networks apart does not depend on why it cannot be set
/// up.
fn hold_closed(networks: &Networks, network: &Network, driver: &dyn Driver) -> Result<()> {
    let net = networks.get(&network.name)?;
    let net = net.filter(|net| net.home == RouterHome::Own || net.shape().is_some());
    let _alone = net.as_ref().map(|net| net.gate.writing());
    driver.hold_closed(&networks.node, net.as_deref())
}

/// Whether something was to be put on a link that has just gone.
fn is_of_gone_link(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(knit_kernel::Error::is_not_found)
}
