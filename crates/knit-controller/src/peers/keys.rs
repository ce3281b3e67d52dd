//! Which keys of labels slices of a Network say. There is room for so many, and what one namespace's policies
//! ask for must not take it from another's: without a key, they match no pod of another node by it.

use std::collections::{BTreeMap, BTreeSet};

use knit_policy::model::{Name, PolicyName};

/// How many bytes the keys of labels may take in a slice.
pub(super) const MAX_KEYS: usize = 64 * 1024;

/// How long a key may be: no object has a label with a longer one, and a slice has no room for it.
const MAX_KEY: usize = 317;

/// The keys that policies of one Network ask for.
#[derive(Debug, Default)]
pub(super) struct AskedKeys {
    /// By the namespace of the policy; those of the whole cluster have none.
    by_namespace: BTreeMap<Name, BTreeSet<Name>>,
    by_policy: BTreeMap<PolicyName, BTreeSet<Name>>,
}

/// What a policy asks for, and slices have no room for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Unheard {
    pub(crate) network: Name,
    /// One of the keys.
    pub(crate) key: Name,
    /// How many there are.
    pub(crate) keys: usize,
}

impl AskedKeys {
    pub(super) fn add(&mut self, policy: &PolicyName, keys: BTreeSet<Name>) {
        if keys.is_empty() {
            return;
        }
        self.by_namespace.entry(policy.namespace.clone()).or_default().extend(keys.iter().cloned());
        self.by_policy.entry(policy.clone()).or_default().extend(keys);
    }

    /// Those that there is room for: first what operators ask for, then one more of the namespace that has
    /// taken the least so far, again and again. So whoever asks for more than a share loses what is more, and
    /// nobody else does.
    pub(super) fn told(&self) -> BTreeSet<Name> {
        let (mut told, mut room) = (BTreeSet::new(), MAX_KEYS);
        let mut asking: BTreeSet<(bool, usize, &Name)> =
            self.by_namespace.keys().map(|namespace| (!namespace.is_empty(), 0, namespace)).collect();
        let mut rest: BTreeMap<&Name, _> =
            self.by_namespace.iter().map(|(namespace, keys)| (namespace, keys.iter())).collect();
        while let Some((is_tenant, taken, namespace)) = asking.pop_first() {
            let Some(key) = rest.get_mut(namespace).and_then(Iterator::next) else { continue };
            if key.len() > MAX_KEY {
                asking.insert((is_tenant, taken, namespace));
                continue;
            }
            // What another one has asked for costs nothing.
            let cost = if told.contains(key) { 0 } else { size(key) };
            if cost <= room {
                room -= cost;
                told.insert(key.clone());
                asking.insert((is_tenant, taken + cost, namespace));
            }
        }
        told
    }

    /// The policies that ask for others than these.
    pub(super) fn unheard(self, network: &Name, told: &BTreeSet<Name>) -> BTreeMap<PolicyName, Unheard> {
        let unheard = self.by_policy.into_iter().filter_map(|(policy, keys)| {
            let mut others = keys.difference(told);
            let key = others.next()?.clone();
            Some((policy, Unheard { network: network.clone(), key, keys: 1 + others.count() }))
        });
        unheard.collect()
    }
}

/// How many bytes a key takes.
pub(super) fn size(key: &Name) -> usize {
    key.len() + 8
}
