//! What is in the kernel and belongs to nobody, what is recorded and not in the kernel, and noted DELs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use knit_api::{Network, names};
use knit_kernel::handle::{LinkFilter, RouteFilter};
use knit_kernel::netns::NetNs;
use knit_kernel::route::Route;
use knit_kernel::{Error as KernelError, Handle, IfName, owner};
use knit_ledger::{AttachmentState, SandboxRecord};

use super::agent::some;
use super::{Node, chain};

/// What host ends of attachments have in their owner's mark: `pod SANDBOX INTERFACE ...`.
const POD: &str = "pod";

pub async fn look(node: &mut Node) {
    noted(node);
    attachments(node);
    routes(node);
    routers(node).await;
}

fn noted(node: &mut Node) {
    let folder = knit_cni::paths::spool(&node.args.run_dir);
    match knit_cni::spool::notes(&folder) {
        Ok(notes) if notes.is_empty() => node.good("noted DELs", "none waits"),
        Ok(notes) => node.warning(
            "noted DELs",
            format!(
                "{} DELs arrived while the agent was down and are pending in \
            {}",
                notes.len(),
                folder.display()
            ),
            "start the agent; once it is running, it carries them out within a minute, or its log \
            says why not",
        ),
        Err(error) => node.unknown("noted DELs", format!("cannot read {}: {error}", folder.display())),
    }
}

/// The node's namespace, and its routers by name.
fn spaces(node: &Node) -> Result<Vec<(String, NetNs)>, KernelError> {
    let routers = node.args.run_dir.join("netns");
    let mut spaces = vec![("the node".to_owned(), NetNs::current()?)];
    for (name, _) in NetNs::list(&routers)? {
        let space = NetNs::open(routers.join(&name))?;
        spaces.push((format!("router {name}"), space));
    }
    Ok(spaces)
}

/// Compares host ends in the kernel with the ledger.
fn attachments(node: &mut Node) {
    let check = "attachments";
    let Some(records) = &node.records else { return };
    let mut recorded: BTreeMap<(String, String), bool> = BTreeMap::new();
    let (mut lost, mut down) = (Vec::new(), Vec::new());
    let mut foreign = 0_usize;
    for record in records {
        for attachment in record.attachments() {
            let whole = matches!(attachment.state(), AttachmentState::Attached(_));
            let plan = attachment.plan();
            if plan.runtime == names::LINUX_RUNTIME {
                recorded.insert((record.sandbox().to_string(), plan.interface.to_string()), whole);
            } else if whole {
                // Another runtime's mark is its own; what every interface has is an end in the pod.
                foreign += 1;
                let words =
                    format!("{} of sandbox {} (runtime {})", plan.interface, record.sandbox(), plan.runtime);
                match inside(record, plan.interface.as_str()) {
                    Inside::Up => {}
                    Inside::Down => down.push(words),
                    Inside::Missing => lost.push(words),
                    Inside::Unknown => foreign -= 1,
                }
            }
        }
    }
    let found = spaces(node).and_then(|spaces| {
        let mut found = Vec::new();
        for (place, space) in spaces {
            let filter = LinkFilter { kind: Some("veth"), owned: true, ..LinkFilter::default() };
            for link in Handle::open(&space)?.links(&filter)? {
                let mut words = link.owner().unwrap_or_default().split(' ').map(str::to_owned);
                if words.next().as_deref() == Some(POD) {
                    let key = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
                    found.push((key, place.clone(), link));
                }
            }
        }
        Ok(found)
    });
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            return node.unknown(check, format!("cannot list links: {}; run this as root", chain(&error)));
        }
    };
    let mut strays = Vec::new();
    let mut seen = BTreeSet::new();
    for (key, place, link) in &found {
        if node.unreadable.iter().any(|record| record.key() == key.0) {
            // Whose it is, is known; whether it is as it should be, is not.
        } else if !recorded.contains_key(key) {
            strays.push(format!("{} in {place} (sandbox {})", link.name, key.0));
        } else if !link.running {
            down.push(format!("{} in {place} (interface {} of sandbox {})", link.name, key.1, key.0));
        }
        seen.insert(key.clone());
    }
    lost.extend(
        recorded
            .iter()
            .filter(|(key, whole)| **whole && !seen.contains(*key))
            .map(|((sandbox, interface), _)| format!("{interface} of sandbox {sandbox}")),
    );
    if node.damaged {
        // What a damaged ledger does not have may be a live pod's.
        strays.clear();
        let words = "their owners are not known while the ledger is damaged";
        node.unknown(check, format!("{} in the kernel; {words}", found.len()));
    }
    if strays.is_empty() && lost.is_empty() && down.is_empty() {
        if !node.damaged {
            node.good(check, format!("kernel and ledger agree on {} attachments", found.len() + foreign));
        }
        return;
    }
    if !strays.is_empty() {
        node.warning(
            check,
            format!("interfaces without a record: {}", some(&strays)),
            "restart the agent: it removes what is not recorded; if they persist, its log says why",
        );
    }
    if !lost.is_empty() {
        node.wrong(
            check,
            format!("recorded, but not in the kernel: {}", some(&lost)),
            "the agent recreates them within a minute; if not, delete the pods and read its log",
        );
    }
    if !down.is_empty() {
        node.wrong(
            check,
            format!("carry no packets: {}", some(&down)),
            "something in the pod or on the node set one end down; delete the pod, or set it up \
            again (ip link set NAME up)",
        );
    }
}

/// How an interface looks in its pod.
enum Inside {
    Up,
    Down,
    Missing,
    /// The pod's namespace is gone or cannot be entered: that is said elsewhere.
    Unknown,
}

fn inside(record: &SandboxRecord, interface: &str) -> Inside {
    let look = || -> Result<Inside, KernelError> {
        let name = IfName::new(interface)?;
        let pod = NetNs::open(&record.netns().path)?;
        if pod.id().ino != record.netns().inode {
            return Ok(Inside::Unknown);
        }
        Ok(match Handle::open(&pod)?.link_by_name(&name)? {
            Some(link) if link.up => Inside::Up,
            Some(_) => Inside::Down,
            None => Inside::Missing,
        })
    };
    look().unwrap_or(Inside::Unknown)
}

/// Routes to single pods of this node that it does not have.
fn routes(node: &mut Node) {
    let check = "routes";
    if node.damaged {
        return node.unknown(check, "their owners are not known while the ledger is damaged");
    }
    let Some(records) = &node.records else { return };
    let leased = records.iter().flat_map(SandboxRecord::leases);
    let held = node.unreadable.iter().flat_map(knit_ledger::Unreadable::holds);
    let leased: BTreeSet<IpAddr> = leased
        .flat_map(|lease| lease.addresses.iter().collect::<Vec<_>>())
        .chain(held.flat_map(|holding| holding.addresses))
        .collect();
    let found = spaces(node).and_then(|spaces| {
        let mut strays = Vec::new();
        let mut count = 0_usize;
        for (place, space) in spaces {
            let handle = Handle::open(&space)?;
            // Towards pods: their own links, and the uplinks into the routers of primary Networks.
            let links = handle.links(&LinkFilter { owned: true, ..LinkFilter::default() })?;
            let to_pods = |link: &knit_kernel::link::Link| {
                link.owner().is_some_and(|mark| mark.starts_with(POD) || mark.starts_with("uplink"))
            };
            let links: BTreeMap<u32, String> =
                links.iter().filter(|l| to_pods(l)).map(|l| (l.index, l.name.to_string())).collect();
            let ours = RouteFilter { table: Some(Route::MAIN), protocol: Some(owner::PROTOCOL) };
            for route in handle.routes(&ours)? {
                let Some(link) = route.interface.and_then(|index| links.get(&index)) else { continue };
                let to = route.destination;
                if to.prefix_len() != to.max_prefix_len() {
                    continue;
                }
                count += 1;
                if !leased.contains(&to.addr()) {
                    strays.push(format!("{} by {link} in {place}", to.addr()));
                }
            }
        }
        Ok((count, strays))
    });
    match found {
        Ok((count, strays)) if strays.is_empty() => {
            node.good(check, format!("{count} routes to pods of this node, all of them recorded"));
        }
        Ok((_, strays)) => node.warning(
            check,
            format!("routes to pods that this node does not have: {}", some(&strays)),
            "restart the agent: setting up a Network removes unneeded routes; if they persist, its \
            log says why",
        ),
        Err(error) => node.unknown(check, format!("cannot list routes: {}; run this as root", chain(&error))),
    }
}

/// Routers of Networks that nobody knows any more.
async fn routers(node: &mut Node) {
    let check = "routers";
    let directory = node.args.run_dir.join("netns");
    let routers: Vec<String> = match NetNs::list(&directory) {
        Ok(found) => found.into_iter().map(|(name, _)| name).collect(),
        Err(error) => return node.unknown(check, format!("{}; run this as root", chain(&error))),
    };
    let Some(known) = networks(node).await else {
        return node
            .unknown(check, format!("{} routers; the existing Networks are not known", routers.len()));
    };
    let known: BTreeSet<String> = known.into_iter().filter_map(|n| n.metadata.name).collect();
    let used: BTreeSet<&str> = node
        .records
        .iter()
        .flatten()
        .flat_map(SandboxRecord::attachments)
        .map(|a| a.plan().network.as_str())
        .collect();
    let nobodys: Vec<&String> =
        routers.iter().filter(|name| !known.contains(*name) && !used.contains(name.as_str())).collect();
    if nobodys.is_empty() {
        return node.good(check, format!("{} router namespaces, each of an existing Network", routers.len()));
    }
    node.warning(
        check,
        format!("router namespaces of Networks that are gone: {}", some(&nobodys)),
        "restart the agent while the API is available: it removes them at startup",
    );
}

/// The Networks: from where the flags say, or else what the agent keeps on disk.
pub async fn networks(node: &Node) -> Option<Vec<Network>> {
    if node.args.from.is_given() {
        let listing = node.args.from.open().await.ok()?;
        return listing.list::<Network>(None).await.ok();
    }
    let world = knit_node::world::boot::BootLog::read(&node.args.state_dir)?;
    Some(world.networks.values().map(|network| network.object().clone()).collect())
}
