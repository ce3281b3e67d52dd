//! Taking a Network away from this node.

use knit_nft::{self as nft, Family, Nftables, Transaction};
use knit_runtime::{Error, Reason, Result};
use knit_types::sync::ReadWrite;

use crate::core::Core;
use crate::fail::internal;
use crate::moves::MovingSubject;
use crate::networks::Net;
use crate::node::Node;
use crate::node_tables::NodeTables;
use crate::rules;
use crate::setup::links_of;
use crate::shape::RouterHome;
use crate::wanted::{found, take};

impl Core {
    /// Takes away what setting a Network up made. One that is not there is fine.
    pub fn remove_network(&self, name: &str) -> Result<()> {
        let Some(net) = self.networks.get(name)? else {
            // Its namespace may have gone without us, which took the rest along.
            return self.sweep_left();
        };
        let _moving = self.moves.begin(MovingSubject::Network(name.to_owned()));
        let _alone = net.gate.writing();
        let attached = net.attachments()?.len();
        if attached > 0 {
            let message =
                format!("{attached} pods of this node are attached to Network {name}: detach them first");
            return Err(Error::new(Reason::InUse, message).on(name));
        }
        net.driver().take_down(self, &net).map_err(|error| error.on(name))?;
        self.networks.forget(name);
        Ok(())
    }

    /// Takes a Network's router away.
    pub fn take_router_down(&self, net: &Net) -> Result<()> {
        match net.home {
            RouterHome::Node => self.remove_default(net),
            RouterHome::Own => net.remove_router(),
        }
    }

    fn remove_default(&self, net: &Net) -> Result<()> {
        let handle = self.node.space.links()?;
        if let Some(shape) = net.shape() {
            let tunnel = crate::tunnel::node_tunnel(shape.id());
            let facts = self.node.facts(None)?;
            let links = links_of(&handle, [facts.uplink.as_str(), tunnel.as_str()], &[])?;
            let there = found(&handle, &links).map_err(internal("read routes and neighbors"))?;
            let there: Vec<_> = there.into_iter().collect();
            take(&*handle, &links, &there).map_err(internal("delete the routes to other nodes"))?;
            if let Some(index) = links.get(tunnel.as_str()) {
                handle.delete_link(*index).map_err(internal("delete the tunnel"))?;
            }
        }
        let mut tables = self.node.tables();
        let others = self.networks.all()?.iter().any(|other| other.home == RouterHome::Own);
        if others {
            // Their uplinks need the table.
            let id = net.shape().map_or(0, |shape| shape.id());
            return self.node.clear_part(&mut tables, RouterHome::Node, id);
        }
        *tables = NodeTables::default();
        self.node.drop_node_tables()
    }
}

impl Node {
    /// Deletes the node's tables.
    pub fn drop_node_tables(&self) -> Result<()> {
        let mut kernel = self.space.rules()?;
        for family in [Family::Inet, Family::Arp] {
            let mut transaction = Transaction::new();
            transaction.delete_table(&rules::table(family));
            match kernel.commit(&transaction) {
                Err(error) if !error.is_not_found() => {
                    return Err(internal::<nft::Error>("delete the node's rules")(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
