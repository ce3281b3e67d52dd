//! Comparing all that this runtime made with what it should be, without changing anything and without holding
//! up anybody.
//!
//! Links, addresses, routes, neighbours, forwarding entries and settings are read each time: one listing of
//! each kind per namespace. Rules are read only where somebody else changed them since they were last
//! compared: every transaction is heard of, with who made it (`senses`). What calls of our own were changing
//! meanwhile (`moves`) is not known, and is not called damage; nor is what cannot be read.

use knit_nft::Family;
use knit_runtime::{Attachment, Damage, NotKnown, Result, Survey};

use crate::inspect::describe_with_ports;
use crate::networks::{Net, Networks};
use crate::rules;
use crate::shape::{Facts, RouterHome, Shape};
use crate::sight::{NamespaceSight, NetworkDamage};
use crate::strays;

/// Damage that follows from the node's own link having changed; what else there is of the kind says nothing
/// then.
const FOLLOWS_NODE: [&str; 2] = ["links", "routes"];

/// A Network that is looked at: what it was set up as, and for what node.
#[derive(Clone, Copy)]
pub(crate) struct Looked<'a> {
    pub net: &'a Net,
    pub shape: &'a Shape,
    pub facts: &'a Facts,
}

/// What is found by looking.
pub(crate) struct Found<'a> {
    /// The node's own namespace.
    pub node: &'a mut NamespaceSight,
    /// What is wrong with the Network.
    pub wrong: &'a mut NetworkDamage,
    /// Attachments that are to be made again.
    pub survey: &'a mut Survey,
}

/// Says what is not as it was made, and what is not known; and what was seen on the way.
pub(crate) fn survey(networks: &Networks) -> Result<(Survey, Option<Vec<Attachment>>)> {
    let (survey, listed) = look(networks)?;
    if survey.networks.is_empty() && survey.attachments.is_empty() {
        return Ok((survey, listed));
    }
    // A pod's namespace may have gone in the middle of it, with its link: that is seen as what it is by
    // now.
    look(networks)
}

fn look(networks: &Networks) -> Result<(Survey, Option<Vec<Attachment>>)> {
    let mut survey = Survey::default();
    let set_up = networks.set_up();
    if set_up.is_empty() {
        return Ok((survey, None));
    }
    let comparing = networks.moves.compare();
    let own_facts = networks.node.facts(None);
    let mut node = NamespaceSight::of(&networks.node, &networks.node.space)?;
    let mut all_compared = true;
    let mut lacking = networks.node.room.lacking(&networks.node.space);
    for (net, shape, set_up_for) in &set_up {
        let mut wrong = NetworkDamage::default();
        for family in std::mem::take(&mut lacking) {
            wrong.add("sysctls", format!("net/{family}/neigh/default/gc_thresh1 to 3 are too low"));
        }
        let mut unknown = None;
        let looked = Looked { net, shape, facts: set_up_for };
        let found = Found { node: &mut node, wrong: &mut wrong, survey: &mut survey };
        match shape.driver().compare(looked, &comparing, found) {
            Ok(motion) if motion.is_none() => {}
            Ok(_) => unknown = Some(NotKnown::Moving),
            // What cannot be read of one Network is that one's: others do not wait.
            Err(error) => unknown = Some(NotKnown::Failed(error.to_string())),
        }
        let found = node.take_wrong(&networks.node.space);
        found.into_iter().for_each(|what| wrong.add("rules", what));
        let parent = shape.driver().parent(&shape.network).map(|parent| networks.node.facts(Some(parent)));
        match parent.as_ref().unwrap_or(&own_facts) {
            Ok(facts) if *facts == **set_up_for => {}
            // It is set up again for that.
            Ok(_) => {
                wrong.0.retain(|damage| !FOLLOWS_NODE.contains(&damage.kind));
                wrong.add("node", "the node's own link, MTU or addresses have changed");
            }
            // What it is on has gone or is down. Setting it up again fails, and says so.
            Err(error) if parent.is_some() => wrong.add("node", error.to_string()),
            // All was compared with what the node was when it was set up; the node's own routes go with
            // its address.
            Err(error) => {
                wrong.0.retain(|damage| shape.home == RouterHome::Own || damage.kind != "routes");
                unknown = Some(NotKnown::Failed(error.to_string()));
            }
        }
        all_compared &= unknown.is_none() && wrong.0.iter().all(|damage| damage.kind != "rules");
        survey.unknown.extend(unknown.map(|unknown| (net.name.clone(), unknown)));
        if !wrong.0.is_empty() {
            survey.networks.insert(net.name.clone(), wrong.0);
        }
    }
    match strays::compare(networks, &node, &comparing) {
        Ok(Some(0)) => {}
        Ok(None) => all_compared = false,
        // What was found of Networks counts all the same.
        Err(error) => {
            all_compared = false;
            let error = crate::fail::chain(&error);
            tracing::debug!(error, "cannot tell what in the node's table belongs to nothing");
        }
        Ok(Some(strays)) => {
            all_compared = false;
            // Any of them takes it away when it is set up; the default one shares the table with all.
            let names = set_up.iter().map(|(net, _, _)| net);
            if let Some(net) = names.min_by_key(|net| (net.home != RouterHome::Node, &net.name)) {
                let message = format!(
                    "{strays} elements of table {} belong to no Network and no attachment of this node",
                    rules::table(Family::Inet)
                );
                let damage = Damage { kind: "rules", message };
                survey.networks.entry(net.name.clone()).or_default().push(damage);
            }
        }
    }
    // A port of the node that leads nowhere is found by reading them.
    if all_compared && survey.attachments.is_empty() {
        node.rules_are_right(&networks.node.space);
    }
    let listed = listed(networks, &mut node)?;
    Ok((survey, Some(listed)))
}

/// All attachments: those that were seen, and those of Networks that were not looked at.
fn listed(networks: &Networks, node: &mut NamespaceSight) -> Result<Vec<Attachment>> {
    let mut seen = std::mem::take(&mut node.seen);
    let (mut listed, mut of_node) = (Vec::new(), None);
    for net in networks.all()? {
        let ports = match seen.remove(&net.name) {
            Some(ports) => ports,
            None => net.list()?,
        };
        for (link, mark) in &ports {
            listed.push(describe_with_ports(&net, (link, mark), &mut of_node)?);
        }
    }
    Ok(listed)
}
