//! What is done with traffic, apart from whose it is: few behaviours, shared by many services.
//!
//! A [`Leaf`] does one thing (one of five cluster endpoints, masqueraded). A [`Behaviour`] picks a leaf by
//! where the traffic comes from. Both become small chains with a name that says what they do, so that after a
//! restart they are found again by their names.

use std::fmt;

use knit_proxy::view::{Action, Frontend, FrontendKind, Masquerade, PortView, Route, Scope, Sources};

use crate::layout::Layout;

/// The slots of local endpoints begin here, those of cluster endpoints at 0.
pub(crate) const LOCAL_SLOTS: u32 = 0x8000_0000;

/// One thing that may be done with traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Leaf {
    Reject,
    Drop,
    Endpoints {
        scope: Scope,
        count: u32,
        affinity: Option<Sticky>,
        masquerade: Masquerade,
        /// The frontend is a port on any address of the node, so its key has no address.
        any_address: bool,
    },
}

/// Clients are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Sticky {
    /// For how long.
    pub seconds: u32,
    /// In which set, so that one service's clients do not fill the others'.
    pub set: u32,
}

/// What is done with the traffic of one frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Behaviour {
    /// Nothing is taken that goes to an address of the namespace itself.
    pub not_own: bool,
    /// What comes from routers apart from the node is not taken.
    pub not_routers: bool,
    /// Sources are checked first.
    pub checked: bool,
    pub route: Leaf,
    pub from_node: Option<Leaf>,
    pub from_pods: Option<Leaf>,
}

impl Leaf {
    /// The set where clients are remembered.
    pub(crate) fn clients(&self) -> Option<u32> {
        match self {
            Self::Endpoints { affinity, .. } => affinity.map(|sticky| sticky.set),
            Self::Reject | Self::Drop => None,
        }
    }
}

impl Behaviour {
    pub(crate) fn of(frontend: &Frontend, view: &PortView, any_address: bool, layout: &Layout) -> Self {
        let leaf = |route: Route| match route.action {
            Action::Reject => Leaf::Reject,
            Action::Drop => Leaf::Drop,
            Action::Endpoints(scope) => match u32::try_from(view.targets(scope).len()) {
                // The view promises at least one; a random number below zero would be refused.
                Ok(0) | Err(_) => Leaf::Reject,
                Ok(count) => Leaf::Endpoints {
                    scope,
                    count,
                    affinity: view.affinity_seconds.map(|seconds| Sticky { seconds, set: 0 }),
                    masquerade: route.masquerade,
                    any_address,
                },
            },
        };
        let route = leaf(frontend.route);
        // A short cut that leads where everybody goes is none.
        let other = |short: Option<Route>| short.map(leaf).filter(|short| *short != route);
        Self {
            not_own: layout.keeps_own_addresses && frontend.kind == FrontendKind::ExternalIp,
            // These are addresses outside: what other Networks send there goes there.
            not_routers: layout.has_routers()
                && matches!(frontend.kind, FrontendKind::ExternalIp | FrontendKind::LoadBalancerIp),
            checked: frontend.kind == FrontendKind::LoadBalancerIp && frontend.sources != Sources::Any,
            route,
            from_node: other(frontend.from_node),
            from_pods: other(frontend.from_pods),
        }
    }

    /// The same with clients remembered in this set, if they are.
    pub(crate) fn remembering_in(mut self, set: u32) -> Self {
        let leaves = [Some(&mut self.route), self.from_node.as_mut(), self.from_pods.as_mut()];
        for leaf in leaves.into_iter().flatten() {
            if let Leaf::Endpoints { affinity: Some(sticky), .. } = leaf {
                sticky.set = set;
            }
        }
        self
    }

    /// Whether it is nothing but its leaf.
    pub(crate) fn is_plain(&self) -> bool {
        !self.not_own
            && !self.not_routers
            && !self.checked
            && self.from_node.is_none()
            && self.from_pods.is_none()
    }

    /// Whether it draws from the frontend's own endpoints of a scope. With affinity it does not: then the
    /// service port has slots for all of its frontends.
    pub(crate) fn draws(&self, scope: Scope) -> bool {
        let draws = |leaf| matches!(leaf, Leaf::Endpoints { scope: s, affinity: None, .. } if s == scope);
        self.leaves().any(draws)
    }

    /// The same for up to `distance` endpoints more or less, if it is nothing but its leaf and others may use
    /// it.
    pub(crate) fn near(&self, distance: u32) -> impl Iterator<Item = Self> + use<> {
        let (plain, this) = (self.is_plain(), *self);
        let leaf = match self.route {
            Leaf::Endpoints { count, affinity: None, .. } if plain => Some(count),
            _ => None,
        };
        let counts = leaf
            .into_iter()
            .flat_map(move |count| count.saturating_sub(distance).max(1)..=count.saturating_add(distance));
        counts.map(move |near| {
            let mut other = this;
            if let Leaf::Endpoints { count, .. } = &mut other.route {
                *count = near;
            }
            other
        })
    }

    pub(crate) fn leaves(&self) -> impl Iterator<Item = Leaf> {
        [Some(self.route), self.from_node, self.from_pods].into_iter().flatten()
    }
}

/// The chain's name: `cluster-5`, `local-2-masquerade`.
impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Endpoints { scope, count, affinity, masquerade, any_address } = self else {
            return f.write_str(if *self == Self::Reject { "reject" } else { "drop" });
        };
        f.write_str(match scope {
            Scope::Cluster => "cluster",
            Scope::Local => "local",
        })?;
        write!(f, "-{count}")?;
        f.write_str(match masquerade {
            Masquerade::HairpinOnly => "",
            Masquerade::NotPods => "-masquerade-unless-pod",
            Masquerade::All => "-masquerade",
        })?;
        if let Some(Sticky { seconds, set }) = affinity {
            write!(f, "-affinity-{seconds}-in-{set}")?;
        }
        f.write_str(if *any_address { "-node" } else { "" })
    }
}

/// The chain's name.
impl fmt::Display for Behaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.not_own {
            f.write_str("not-own+")?;
        }
        if self.not_routers {
            f.write_str("not-routers+")?;
        }
        if self.checked {
            f.write_str("checked+")?;
        }
        write!(f, "{}", self.route)?;
        if let Some(leaf) = self.from_node {
            write!(f, "+node-{leaf}")?;
        }
        if let Some(leaf) = self.from_pods {
            write!(f, "+pods-{leaf}")?;
        }
        Ok(())
    }
}
