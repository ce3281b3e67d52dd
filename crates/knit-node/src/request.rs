//! The one internal request that every front door makes.

use std::net::IpAddr;
use std::path::PathBuf;

use knit_ipam::Mac;
pub use knit_ledger::{Door, ObjectDoor};
use knit_runtime::{Dns, InterfaceName, Pod, PortMapping};
use knit_types::{NetworkName, ObjectRef, PodRef};

/// This pod, in this sandbox, is to have these interfaces.
#[derive(Clone, Debug)]
pub struct PodRequest {
    /// The pod and its sandbox.
    pub pod: Pod,
    /// What a sandbox gets that starts. None for one that runs, which gets more of what it has.
    pub start: Option<Start>,
    /// What the pod asks for.
    pub wishes: Wishes,
    /// Claims that are the pod's: what was reserved for them, its sandbox gets.
    pub claims: Vec<ObjectRef>,
    /// Who asks.
    pub door: Door,
}

/// This claim is to have these Networks, before there is a sandbox that uses it.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The claim. Its namespace is the one whose rights count.
    pub claim: ObjectRef,
    /// What it asks for. Those that name no interface get one that is free in the claim.
    pub networks: Vec<Asked>,
    /// The pod that it is for, where that is known.
    pub pod: Option<PodRef>,
}

/// What a sandbox gets when it starts, whatever else it asks for.
#[derive(Clone, Debug)]
pub struct Start {
    /// Where its network namespace can be opened.
    pub netns: PathBuf,
    /// Its main interface.
    pub main: Main,
}

/// Who gives a sandbox its main interface.
#[derive(Clone, Debug)]
pub enum Main {
    /// The agent, like this.
    Ours(MainInterface),
    /// Another CNI plugin, and this is the interface's name: the agent makes further ones only, and never
    /// touches this one.
    Foreign(InterfaceName),
}

/// The main interface that a sandbox gets.
#[derive(Clone, Debug)]
pub struct MainInterface {
    /// The interface's name.
    pub interface: InterfaceName,
    /// Ports of the node that lead to the main interface.
    pub ports: Vec<PortMapping>,
    /// Addresses that the main interface must have.
    pub addresses: Vec<IpAddr>,
    /// The MAC that the main interface must have.
    pub mac: Option<Mac>,
    /// Name servers, for the answer.
    pub dns: Dns,
}

/// What a pod asks for, as far as whoever calls knows. A door parses; what is wrong is answered where
/// everything else is that a pod cannot have, so that its events say so.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Wishes {
    /// This.
    Said(Wish),
    /// Something that cannot be understood, and what to write instead.
    Wrong(String),
    /// The caller does not know: the pod's own object says it.
    AsThePodSays,
}

/// Networks that a pod asks for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Wish {
    /// The Network of its main interface, in place of its namespace's primary one.
    pub primary: Option<NetworkName>,
    /// Further ones.
    pub further: Vec<Asked>,
}

/// One further Network that a pod asks for.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Asked {
    /// The Network's name.
    pub network: NetworkName,
    /// The interface's name, if the pod cares.
    pub interface: Option<InterfaceName>,
    /// Addresses that the interface must have.
    pub addresses: Vec<IpAddr>,
    /// The MAC that the interface must have.
    pub mac: Option<Mac>,
    /// Whether the pod's default route goes out here.
    pub default_route: bool,
}

// === impl Main ===

impl Main {
    /// The interface's name.
    #[must_use]
    pub fn name(&self) -> &InterfaceName {
        match self {
            Self::Ours(main) => &main.interface,
            Self::Foreign(name) => name,
        }
    }

    /// What the agent makes, if that is the agent's.
    #[must_use]
    pub fn ours(&self) -> Option<&MainInterface> {
        match self {
            Self::Ours(main) => Some(main),
            Self::Foreign(_) => None,
        }
    }
}

// === impl Wish ===

impl Wish {
    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.primary.is_none() && self.further.is_empty()
    }
}

// === impl Wishes ===

impl Wishes {
    /// These further Networks, and the namespace's primary one.
    #[must_use]
    pub fn further(asked: Vec<Asked>) -> Self {
        Self::Said(Wish { primary: None, further: asked })
    }
}

impl Default for Wishes {
    /// Nothing beyond what its namespace has.
    fn default() -> Self {
        Self::Said(Wish::default())
    }
}

/// How errors and logs call a pod.
#[must_use]
pub fn pod_name(pod: &Pod) -> String {
    match (&pod.namespace, &pod.name) {
        (Some(namespace), Some(name)) => format!("pod {namespace}/{name}"),
        _ => format!("sandbox {}", pod.sandbox),
    }
}
