//! The settings of a namespace that Networks need: what they are to be, compared and set in one visit each.

use knit_kernel::IfName;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_runtime::Result;
use knit_types::Family;

use crate::fail::{chain, internal};
use crate::shape::Shape;
use crate::space::NamespaceSockets;

/// A setting as it is to be.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    name: Sysctl,
    value: &'static str,
    need: Need,
}

/// What it is to a Network.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Need {
    /// Nothing works without.
    Always,
    /// A kernel may not have it.
    IfThere,
    /// Only where it is on.
    IfOn,
}

impl Setting {
    /// The same where a kernel that does not have it is fine: it was said when the Network was set up.
    pub fn if_there(self) -> Self {
        Self { need: Need::IfThere, ..self }
    }
}

/// A setting that is not as it should be.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct WrongSetting {
    pub name: Sysctl,
    pub value: &'static str,
}

/// Forwarding. With IPv6 forwarding the kernel stops to take router advertisements, unless told otherwise on
/// the link that they come by; that comes first.
pub(crate) fn forwarding(shape: &Shape, uplink: Option<&str>) -> Vec<Setting> {
    let mut all = Vec::new();
    let uplink = uplink.and_then(|name| IfName::new(name).ok()).filter(|_| shape.has(Family::V6));
    all.extend(uplink.map(|name| Setting {
        name: Sysctl::accept_ra(Scope::Link(&name)),
        value: "2",
        need: Need::IfOn,
    }));
    let on = |name| Setting { name, value: "1", need: Need::Always };
    all.extend(shape.has(Family::V4).then(|| on(Sysctl::ipv4_forwarding())));
    all.extend(shape.has(Family::V6).then(|| on(Sysctl::ipv6_forwarding())));
    all
}

/// Bridged packets pass the router's hooks: services and policy need it.
pub(crate) fn bridge_filter() -> Vec<Setting> {
    let both = [Sysctl::bridge_nf_call_iptables(), Sysctl::bridge_nf_call_ip6tables()];
    both.map(|name| Setting { name, value: "1", need: Need::Always }).into()
}

/// A link of a router does not ask who has an address: everybody that it can reach there is a permanent
/// neighbour. A packet to any other address is dropped at once, and the entry that the kernel makes can go at
/// once, too.
pub(crate) fn ask_nobody(link: &str) -> Vec<Setting> {
    let mut all = Vec::new();
    for family in ["ipv4", "ipv6"] {
        for kind in ["mcast_solicit", "ucast_solicit", "app_solicit"] {
            let name = Sysctl::new(format!("net/{family}/neigh/{link}/{kind}"));
            // A kernel without IPv6 has no such table.
            all.extend(name.map(|name| Setting { name, value: "0", need: Need::IfThere }));
        }
    }
    all
}

/// Those that are not as they should be.
pub(crate) fn wrong(space: &NamespaceSockets, settings: &[Setting]) -> Result<Vec<WrongSetting>> {
    let sysctls = Sysctls::of(space.namespace()).map_err(internal("open the sysctls of a namespace"))?;
    let names: Vec<Sysctl> = settings.iter().map(|setting| setting.name.clone()).collect();
    let found = sysctls.get_all(&names).map_err(internal("open the sysctls of a namespace"))?;
    let mut wrong = Vec::new();
    for (setting, found) in settings.iter().zip(found) {
        let Setting { name, value, need } = setting;
        let is_wrong = match (found, need) {
            (Ok(found), Need::IfOn) => found == "1",
            (Ok(found), _) => found != *value,
            (Err(error), Need::Always) => return Err(internal(format!("read sysctl {name}"))(error)),
            (Err(_), _) => false,
        };
        if is_wrong {
            wrong.push(WrongSetting { name: name.clone(), value });
        }
    }
    Ok(wrong)
}

/// Sets those that are not as they should be.
pub(crate) fn settle(space: &NamespaceSockets, settings: &[Setting]) -> Result<()> {
    let wrong = wrong(space, settings)?;
    if wrong.is_empty() {
        return Ok(());
    }
    let sysctls = Sysctls::of(space.namespace()).map_err(internal("open the sysctls of a namespace"))?;
    let values: Vec<_> = wrong.into_iter().map(|wrong| (wrong.name, wrong.value.to_owned())).collect();
    sysctls.set_all(&values).map_err(internal("change the settings of a namespace"))
}

/// Sets those that are not as they should be, where that is possible; `consequence` is what it means where it
/// is not.
pub(crate) fn settle_if_possible(space: &NamespaceSockets, settings: &[Setting], consequence: &str) {
    if let Err(error) = settle(space, settings) {
        tracing::warn!(error = chain(&error), "{consequence}");
    }
}
