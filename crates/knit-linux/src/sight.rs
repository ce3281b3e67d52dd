//! What is in one namespace, read once for a comparison; and what is wrong with a Network, in words.

use std::collections::{HashMap, HashSet};

use knit_kernel::handle::LinkFilter;
use knit_kernel::link::Link;
use knit_nft::Family;
use knit_runtime::{Damage, Result};
use knit_types::NetworkName;

use crate::fail::internal;
use crate::links::{WantedLink, marked};
use crate::mark::{Mark, host_name};
use crate::moves::InMotion;
use crate::node::Node;
use crate::rules;
use crate::settings::{self, Setting};
use crate::space::NamespaceSockets;
use crate::tables::Comparison;
use crate::wanted::{Difference, Links, Reading};

/// How many differences of one kind are put into words.
const MAX_WORDED_DIFFERENCES: usize = 3;

/// What is in one namespace.
pub(crate) struct NamespaceSight {
    pub links: HashMap<String, Link>,
    pub ports: Vec<(Link, Mark)>,
    pub reading: Reading,
    /// What the rules are compared with; none if nobody else changed them since they were.
    pub rules: Option<Comparison>,
    /// How often others had changed them before they were read.
    changed: u64,
    /// The host ends of Networks that were looked at, here and in their routers.
    pub seen: HashMap<NetworkName, Vec<(Link, Mark)>>,
}

/// What is wrong with one Network.
#[derive(Default)]
pub(crate) struct NetworkDamage(pub Vec<Damage>);

impl NamespaceSight {
    /// What is in a namespace now: all of it is read before any of it is compared.
    pub fn of(node: &Node, space: &NamespaceSockets) -> Result<Self> {
        let changed = space.rules_seen.now();
        let trusted = node.senses.is_untouched(space, space.rules_seen.last_compared())?;
        let tables = [Family::Inet, Family::Arp, Family::Bridge].map(rules::table);
        let rules = if trusted { None } else { Some(Comparison::of(space, &tables)?) };
        let handle = space.links()?;
        let links = handle.links(&LinkFilter::default()).map_err(internal("list links"))?;
        let reading = Reading::of(&handle).map_err(internal("read addresses, routes and neighbors"))?;
        let ports = links.iter().filter_map(|link| Some((link.clone(), marked(link)?))).collect();
        let links = links.into_iter().map(|link| (link.name.to_string(), link)).collect();
        Ok(Self { links, ports, reading, rules, changed, seen: HashMap::new() })
    }

    /// The numbers of links, with those of all ports if wanted.
    pub fn links_of(&self, names: &[&str], ports: bool) -> Links {
        let number = |name: &&str| self.links.get(*name).map(|link| ((*name).to_owned(), link.index));
        let mut links: Links = names.iter().filter_map(number).collect();
        if ports {
            links.extend(self.ports.iter().map(|(link, _)| (link.name.to_string(), link.index)));
        }
        links
    }

    /// The host ends that are there, under whichever name: by the names that they were given.
    pub fn hosts(&self) -> HashSet<String> {
        self.ports.iter().map(|(_, mark)| host_name(&mark.sandbox, &mark.interface).to_string()).collect()
    }

    /// The host ends whose attachments were not being changed.
    pub fn settled(&self, motion: &InMotion) -> Vec<(Link, Mark)> {
        self.ports.iter().filter(|(link, _)| motion.has_settled(link)).cloned().collect()
    }

    /// What is wrong with the rules of this namespace, since this was last asked.
    pub fn take_wrong(&mut self, space: &NamespaceSockets) -> Vec<String> {
        let wrong = self.rules.as_mut().map(|rules| std::mem::take(&mut rules.wrong)).unwrap_or_default();
        if !wrong.is_empty() {
            // However it came about, and though nobody was heard: the set-up that follows must not go by what
            // it remembers, which says that all is done.
            space.rules_seen.touch();
        }
        wrong
    }

    /// All of the rules were compared, and are as they should be: they need not be read again.
    pub fn rules_are_right(&self, space: &NamespaceSockets) {
        space.rules_seen.compared(self.changed);
    }
}

impl NetworkDamage {
    pub fn add(&mut self, kind: &'static str, message: impl Into<String>) {
        self.0.push(Damage { kind, message: message.into() });
    }

    pub fn link(&mut self, like: &WantedLink, link: &Link) {
        if let Some((_, message)) = like.fix(link) {
            self.add("links", message);
        }
    }

    pub fn settings(&mut self, space: &NamespaceSockets, settings: &[Setting]) -> Result<()> {
        for wrong in settings::wrong(space, settings)? {
            self.add("sysctls", format!("sysctl {} is not {}", wrong.name, wrong.value));
        }
        Ok(())
    }

    /// What is missing or not wanted, but for what was being changed.
    pub fn entries(&mut self, difference: &Difference, motion: &InMotion) {
        let counts = |entry: &&crate::wanted::Entry| !motion.is_about(entry);
        let missing = difference.put.iter().filter(counts).map(|entry| format!("missing: {entry}"));
        let foreign = difference.take.iter().filter(counts).map(|entry| format!("unexpected: {entry}"));
        let mut words: Vec<String> = missing.chain(foreign).collect();
        if words.is_empty() {
            return;
        }
        let more = words.len().saturating_sub(MAX_WORDED_DIFFERENCES);
        words.truncate(MAX_WORDED_DIFFERENCES);
        if more > 0 {
            words.push(format!("and {more} more"));
        }
        self.add("routes", words.join("; "));
    }
}
