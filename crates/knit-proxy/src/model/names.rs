//! Names of services, endpoint groups and networks: cheap to clone, compared by content.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

macro_rules! namespaced_name {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        ///
        /// One allocation holds `namespace/name`, shared by all clones.
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(Arc<str>);

        impl $type {
            /// Joins the two parts. The namespace must not contain a slash; Kubernetes names never do.
            #[must_use]
            pub fn new(namespace: &str, name: &str) -> Self {
                Self(format!("{namespace}/{name}").into())
            }

            /// The part before the slash.
            #[must_use]
            pub fn namespace(&self) -> &str {
                self.0.split_once('/').map_or("", |(namespace, _)| namespace)
            }

            /// The part after the slash.
            #[must_use]
            pub fn name(&self) -> &str {
                self.0.split_once('/').map_or(&*self.0, |(_, name)| name)
            }

            /// `namespace/name`.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        /// From `namespace/name`; without a slash the namespace is empty.
        impl From<&str> for $type {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }
    };
}

namespaced_name! {
    /// The name of a service.
    ServiceName
}

namespaced_name! {
    /// The name of an endpoint group (an EndpointSlice, where it comes from Kubernetes).
    GroupName
}

/// Gives equal strings one allocation: node names, zones and port names repeat in every endpoint.
#[derive(Debug, Default)]
pub struct Interner {
    strings: HashSet<Arc<str>>,
    sweep_at: usize,
}

impl Interner {
    /// The shared copy of a string.
    pub fn get(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.strings.get(text) {
            return Arc::clone(known);
        }
        if self.strings.len() >= self.sweep_at.max(1024) {
            // Doubling keeps the cost of forgetting unused strings constant per new string.
            self.strings.retain(|s| Arc::strong_count(s) > 1);
            self.sweep_at = self.strings.len() * 2;
        }
        let new: Arc<str> = text.into();
        self.strings.insert(Arc::clone(&new));
        new
    }

    /// How many strings are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.strings.len()
    }

    /// Whether nothing is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_two_parts() {
        let name = ServiceName::new("shop", "web");
        assert_eq!((name.namespace(), name.name(), name.as_str()), ("shop", "web", "shop/web"));
        assert_eq!(ServiceName::from("web").namespace(), "");
    }

    #[test]
    fn the_interner_shares_and_forgets() {
        let mut interner = Interner::default();
        let a = interner.get("node-a");
        assert!(Arc::ptr_eq(&a, &interner.get("node-a")));
        for i in 0..5000 {
            interner.get(&format!("gone-{i}"));
        }
        assert!(interner.len() < 2100, "unused strings are dropped: {}", interner.len());
        assert!(Arc::ptr_eq(&a, &interner.get("node-a")));
    }
}
