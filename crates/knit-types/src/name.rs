//! Names of links, sandboxes and Networks, checked when they are made. Copies cost next to nothing: a link's
//! name is held in place, the others share one allocation.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The name of any link: what the kernel takes as one, in printable ASCII, without what has another meaning.
#[derive(Clone, Eq)]
pub struct IfName {
    len: u8,
    bytes: [u8; IfName::MAX],
}

/// The name of a pod's interface: an [`IfName`] other than that of the loopback link, which every pod has.
#[derive(Clone, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct InterfaceName(IfName);

/// The container runtime's name for a pod's sandbox. It becomes part of file names and owner marks.
#[derive(Clone, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SandboxId(Arc<str>);

/// The name of a Network. It is parsed once, where it comes in: from an object, a request, the ledger or a
/// runtime's answer.
///
/// The default Network needs no allocation, so that a cluster which has only that one pays nothing for the
/// idea.
#[derive(Clone, Default, Eq, PartialEq)]
pub struct NetworkName(Option<Arc<str>>);

/// A text that cannot be the name of an interface.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "invalid interface name {name:?}: {problem}; use 1 to 15 printable ASCII characters without spaces, '/', \
     ':' and '%'"
)]
pub struct InvalidInterfaceName {
    /// The text, shortened if it is long.
    pub name: String,
    /// What is wrong with it.
    pub problem: &'static str,
}

/// A text that cannot be the id of a sandbox.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "invalid sandbox id {0:?}: use 1 to 253 letters, digits, '.', '_' and '-', and no '.' at the beginning"
)]
pub struct InvalidSandboxId(String);

/// A text that cannot be the name of a Network.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0:?} is not a valid Network name: write one such as blue")]
pub struct InvalidNetworkName(String);

/// A stranger's text in a message: not longer than a line.
fn shortened(text: &str) -> String {
    const MOST: usize = 64;
    if text.chars().nth(MOST).is_none() {
        return text.to_owned();
    }
    text.chars().take(MOST).chain(['…']).collect()
}

// === impl IfName ===

impl IfName {
    /// The longest name, in bytes.
    pub const MAX: usize = 15;

    /// Checks a name.
    ///
    /// # Errors
    /// When no link can have it, or it would be mistaken for something else.
    pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidInterfaceName> {
        let name = name.as_ref();
        let problem = if name.is_empty() {
            "it is empty"
        } else if name.len() > Self::MAX {
            "it is longer than 15 bytes"
        } else if name.bytes().any(|b| matches!(b, b'/' | b':')) {
            "the kernel refuses '/' and ':'"
        } else if name.contains('%') {
            "'%' makes the kernel choose the name"
        } else if !name.bytes().all(|b| b.is_ascii_graphic()) {
            "it contains a space, a control character or a non-ASCII character"
        } else if matches!(name, "." | ".." | "all" | "default") {
            // Directories below /proc/sys/net/ipv4/conf that are not links; the kernel refuses the first two
            // itself.
            "it has a special meaning in /proc/sys/net"
        } else {
            return Ok(Self::of(name));
        };
        Err(InvalidInterfaceName { name: shortened(name), problem })
    }

    /// A name that the kernel reported: whatever it is, a link has it. The kernel's are never too long; what
    /// is, is cut.
    #[must_use]
    pub fn reported(name: &str) -> Self {
        Self::of(&name[..name.floor_char_boundary(Self::MAX)])
    }

    /// Holds a text that fits.
    fn of(name: &str) -> Self {
        let mut bytes = [0; Self::MAX];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Self { len: name.len() as u8, bytes }
    }

    /// The bytes of the name.
    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).expect("it was made of a text")
    }
}

impl PartialEq for IfName {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

/// By text: a map of names is searched by text, too.
impl Hash for IfName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl Ord for IfName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl PartialOrd for IfName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

// === impl InterfaceName ===

impl InterfaceName {
    /// Checks the name of a pod's interface.
    ///
    /// # Errors
    /// When no link can have it, it would be mistaken for something else, or it is that of the loopback link.
    pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidInterfaceName> {
        let name = IfName::new(name)?;
        if name.as_str() == "lo" {
            let problem = "every pod has a loopback interface of that name";
            return Err(InvalidInterfaceName { name: "lo".to_owned(), problem });
        }
        Ok(Self(name))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl From<InterfaceName> for IfName {
    fn from(name: InterfaceName) -> Self {
        name.0
    }
}

impl AsRef<IfName> for InterfaceName {
    fn as_ref(&self) -> &IfName {
        &self.0
    }
}

// === impl SandboxId ===

impl SandboxId {
    /// The longest id, in bytes.
    pub const MAX: usize = 253;

    /// Checks a sandbox's id.
    ///
    /// # Errors
    /// When it is not 1 to 253 letters, digits and `._-`, or begins with a dot.
    pub fn new(id: impl AsRef<str>) -> Result<Self, InvalidSandboxId> {
        let id = id.as_ref();
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if id.is_empty() || id.len() > Self::MAX || !id.bytes().all(fits) || id.starts_with('.') {
            return Err(InvalidSandboxId(shortened(id)));
        }
        Ok(Self(id.into()))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// === impl NetworkName ===

impl NetworkName {
    /// What the default Network is called.
    pub const DEFAULT: &'static str = "default";

    /// The longest name, in bytes: it is the value of labels.
    pub const MAX: usize = 63;

    /// Checks a name that somebody asks for.
    ///
    /// # Errors
    /// When no Network can have it: it is not 1 to 63 lower-case letters, digits, dots and hyphens, with a
    /// letter or digit at both ends.
    pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidNetworkName> {
        let name = name.as_ref();
        let edge = |b: Option<&u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        let inner = |b: &u8| edge(Some(b)) || matches!(b, b'-' | b'.');
        let bytes = name.as_bytes();
        let fits = bytes.len() <= Self::MAX && bytes.iter().all(inner);
        if !fits || !edge(bytes.first()) || !edge(bytes.last()) {
            return Err(InvalidNetworkName(shortened(name)));
        }
        Ok(Self((name != Self::DEFAULT).then(|| name.into())))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or(Self::DEFAULT)
    }

    /// Whether it is the default Network.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.0.is_none()
    }
}

/// A name that is written in the program. Any other comes by [`NetworkName::new`].
///
/// # Panics
/// When no Network can have it.
impl From<&'static str> for NetworkName {
    fn from(name: &'static str) -> Self {
        Self::new(name).expect("a name in the program is a valid one")
    }
}

impl From<&Self> for NetworkName {
    fn from(name: &Self) -> Self {
        name.clone()
    }
}

/// A name is looked up and shown as the text that it is.
impl Deref for NetworkName {
    type Target = str;

    fn deref(&self) -> &str {
        self.as_str()
    }
}

/// By text: a map of names is searched by text, too.
impl Hash for NetworkName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl Ord for NetworkName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl PartialOrd for NetworkName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq<&Self> for NetworkName {
    fn eq(&self, other: &&Self) -> bool {
        self == *other
    }
}

impl PartialEq<String> for NetworkName {
    fn eq(&self, other: &String) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<NetworkName> for str {
    fn eq(&self, other: &NetworkName) -> bool {
        self == other.as_str()
    }
}

impl PartialEq<NetworkName> for String {
    fn eq(&self, other: &NetworkName) -> bool {
        self == other.as_str()
    }
}

impl PartialEq<NetworkName> for &str {
    fn eq(&self, other: &NetworkName) -> bool {
        *self == other.as_str()
    }
}

// === What all have in common ===

macro_rules! text {
    ($($type:ident),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.as_str(), f)
            }
        }

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                self.as_str()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.as_str().to_owned()
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    )*};
}

macro_rules! checked {
    ($($type:ident: $error:ident),*) => {$(
        /// The order and the hash are those of the text, so that a map is searched by text, too.
        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                self.as_str()
            }
        }

        impl PartialEq<str> for $type {
            fn eq(&self, other: &str) -> bool {
                self.as_str() == other
            }
        }

        impl PartialEq<&str> for $type {
            fn eq(&self, other: &&str) -> bool {
                self.as_str() == *other
            }
        }

        impl FromStr for $type {
            type Err = $error;

            fn from_str(text: &str) -> Result<Self, $error> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $type {
            type Error = $error;

            fn try_from(text: String) -> Result<Self, $error> {
                Self::new(text)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;

                impl de::Visitor<'_> for Text {
                    type Value = $type;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("a name")
                    }

                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$type, E> {
                        $type::new(text).map_err(E::custom)
                    }
                }

                deserializer.deserialize_str(Text)
            }
        }
    )*};
}

text!(IfName, InterfaceName, SandboxId, NetworkName);
checked!(
    IfName: InvalidInterfaceName,
    InterfaceName: InvalidInterfaceName,
    SandboxId: InvalidSandboxId,
    NetworkName: InvalidNetworkName
);

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn interface_names_follow_the_kernels_rule() {
        for good in ["a", "eth0", "knit-0123456789", "br_x.7", "a+b", "fifteen-charact", "net1@x"] {
            assert_eq!(InterfaceName::new(good).expect(good).as_str(), good);
        }
        for bad in [
            "",
            "sixteencharacter",
            "a/b",
            "a b",
            "eth0:1",
            "eth%d",
            ".",
            "..",
            "all",
            "default",
            "é",
            "a\n",
            "\u{7f}",
        ] {
            let error = IfName::new(bad).expect_err(bad).to_string();
            assert!(error.contains("use 1 to 15 printable"), "{error}");
        }
    }

    #[test]
    fn lo_is_a_link_but_no_interface_that_a_pod_asks_for() {
        IfName::new("lo").expect("every namespace has one");
        let error = InterfaceName::new("lo").expect_err("every pod has one").to_string();
        assert!(error.contains("every pod has a loopback interface"), "{error}");
    }

    #[test]
    fn hostile_sandbox_ids_are_refused() {
        for id in ["", "../../etc", ".hidden", "a b", "a/b", &"x".repeat(254)] {
            SandboxId::new(id).expect_err(id);
        }
        SandboxId::new("f0e1.d2_c3-b4").expect("a sandbox id");
        let error = SandboxId::new("/".repeat(10_000)).expect_err("too long").to_string();
        assert!(error.len() < 300, "a stranger's text is shortened: {error}");
    }

    #[test]
    fn the_default_network_is_the_default() {
        assert_eq!(NetworkName::from("default"), NetworkName::default());
        assert!(NetworkName::from("default").is_default() && !NetworkName::from("blue").is_default());
    }

    #[test]
    fn a_network_can_have_the_names_that_the_api_server_and_labels_take() {
        for good in ["blue", "a", "9", "tenant-1.blue", &"x".repeat(63)] {
            assert_eq!(NetworkName::new(good).expect(good).as_str(), good);
        }
        for bad in
            ["", "Blue", "-a", "a-", ".a", "a.", "a b", "a_b", "ns/blue", "blue\n", "é", &"x".repeat(64)]
        {
            let error = NetworkName::new(bad).expect_err(bad).to_string();
            assert!(error.ends_with("is not a valid Network name: write one such as blue"), "{error}");
            assert!(error.len() < 300 && !error.contains('\n'), "{error}");
            let json = serde_json::to_string(bad).expect("JSON");
            assert!(serde_json::from_str::<NetworkName>(&json).is_err(), "{bad:?} was read");
        }
    }

    #[test]
    fn maps_are_searched_by_text() {
        let id = SandboxId::new("s1").expect("an id");
        assert_eq!(BTreeMap::from([(id.clone(), 1)]).get("s1"), Some(&1));
        assert_eq!(HashMap::from([(id, 1)]).get("s1"), Some(&1));
        let name = InterfaceName::new("eth0").expect("a name");
        assert_eq!(BTreeMap::from([(name.clone(), 1)]).get("eth0"), Some(&1));
        assert_eq!(HashMap::from([(name, 1)]).get("eth0"), Some(&1));
        let networks = BTreeMap::from(["blue", "default", "red"].map(|name| (NetworkName::from(name), name)));
        assert!(networks.iter().all(|(name, text)| name == text && networks.get(*text) == Some(text)));
        assert_eq!(networks.values().copied().collect::<Vec<_>>(), ["blue", "default", "red"], "by text");
        assert_eq!(HashMap::from([(NetworkName::default(), 1)]).get("default"), Some(&1));
    }

    #[test]
    fn what_the_kernel_reports_is_kept_even_if_nobody_may_ask_for_it() {
        for name in ["", "all", "a b", "fifteen-charact"] {
            assert_eq!(IfName::reported(name).as_str(), name);
        }
        assert_eq!(IfName::reported("\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}").as_str().len(), 15);
    }

    proptest! {
        #[test]
        fn a_name_that_is_taken_is_one_that_the_kernel_takes(name in "\\PC{0,18}|[ -~]{0,18}") {
            if let Ok(taken) = InterfaceName::new(&name) {
                // dev_valid_name() of the kernel.
                prop_assert!(!name.is_empty() && name.len() < 16 && name != "." && name != "..");
                prop_assert!(name.bytes().all(|b| b != b'/' && b != b':' && !b.is_ascii_whitespace()));
                prop_assert_eq!(taken.as_str(), &name);
                let json = serde_json::to_string(&taken).expect("JSON");
                prop_assert_eq!(serde_json::from_str::<InterfaceName>(&json).expect("a name"), taken);
            } else {
                let json = serde_json::to_string(&name).expect("JSON");
                prop_assert!(serde_json::from_str::<InterfaceName>(&json).is_err());
            }
        }

        #[test]
        fn a_sandbox_id_is_always_one_file_name(id in "[a-zA-Z0-9./_ -]{0,20}") {
            if let Ok(taken) = SandboxId::new(&id) {
                prop_assert!(!taken.as_str().contains('/') && !taken.as_str().starts_with('.'));
                prop_assert_eq!(serde_json::to_string(&taken).expect("JSON"), format!("\"{id}\""));
            }
        }
    }
}
