//! A list of changes that the kernel carries out all together or not at all.

use std::fmt;

use crate::datatype::KeyType;
use crate::object::{Chain, Element, Name, Set, Table, TableId};
use crate::rule::Rule;

/// What happens if the object is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfExists {
    /// Nothing, as long as it is the same.
    Keep,
    /// The transaction fails.
    Fail,
}

/// Where a rule goes in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// After all others.
    Last,
    /// Before all others.
    First,
    /// Right before the rule with this handle.
    Before(u64),
    /// Right after the rule with this handle.
    After(u64),
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields name the object that the variant is about")]
pub enum Op {
    /// Makes a table.
    AddTable { table: Table, if_exists: IfExists },
    /// Deletes a table with everything in it.
    DeleteTable { table: TableId },
    /// Deletes all rules of all chains of a table.
    FlushTable { table: TableId },
    /// Makes a chain, or changes the policy of one that is there.
    AddChain { table: TableId, chain: Chain, if_exists: IfExists },
    /// Deletes a chain with its rules.
    DeleteChain { table: TableId, chain: Name },
    /// Deletes all rules of a chain.
    FlushChain { table: TableId, chain: Name },
    /// Adds a rule.
    AddRule { table: TableId, chain: Name, rule: Rule, place: Place },
    /// Puts a rule in the place of the one with this handle.
    ReplaceRule { table: TableId, chain: Name, handle: u64, rule: Rule },
    /// Deletes the rule with this handle.
    DeleteRule { table: TableId, chain: Name, handle: u64 },
    /// Makes a set or map.
    AddSet { table: TableId, set: Set, if_exists: IfExists },
    /// Deletes a set or map with its elements.
    DeleteSet { table: TableId, set: Name },
    /// Deletes all elements of a set or map.
    FlushSet { table: TableId, set: Name },
    /// Adds elements. `shape` is the set that they are for, of which the encoding depends.
    AddElements { table: TableId, shape: ElementShape, elements: Vec<Element>, if_exists: IfExists },
    /// Deletes elements.
    DeleteElements { table: TableId, shape: ElementShape, elements: Vec<Element> },
}

/// What must be known of a set to write its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElementShape {
    /// The set's name.
    pub set: Name,
    /// The type of its keys, for messages.
    pub key: KeyType,
    /// How it keeps ranges.
    pub ranges: Ranges,
    /// Whether it is a map, for messages.
    pub map: bool,
}

/// How a set keeps ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranges {
    /// It has none.
    None,
    /// As a start and an end element.
    Pairs,
    /// With both ends in one element: concatenations.
    Concat,
}

/// A list of changes, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    ops: Vec<Op>,
}

// === impl ElementShape ===

impl From<&Set> for ElementShape {
    fn from(set: &Set) -> Self {
        let ranges = match (set.interval, set.is_concat_interval()) {
            (false, _) => Ranges::None,
            (true, false) => Ranges::Pairs,
            (true, true) => Ranges::Concat,
        };
        let map = set.kind != crate::object::SetKind::Set;
        Self { set: set.name.clone(), key: set.key.clone(), ranges, map }
    }
}

// === impl Transaction ===

impl Transaction {
    /// No changes.
    pub fn new() -> Self {
        Self::default()
    }

    /// The changes.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// How many changes.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Appends a change.
    pub fn push(&mut self, op: Op) -> &mut Self {
        self.ops.push(op);
        self
    }

    /// Appends all changes of another transaction.
    pub fn append(&mut self, other: Self) -> &mut Self {
        self.ops.extend(other.ops);
        self
    }

    /// Makes a table unless it is there.
    pub fn add_table(&mut self, table: impl Into<Table>) -> &mut Self {
        self.push(Op::AddTable { table: table.into(), if_exists: IfExists::Keep })
    }

    /// Makes a table; fails if it is there.
    pub fn create_table(&mut self, table: impl Into<Table>) -> &mut Self {
        self.push(Op::AddTable { table: table.into(), if_exists: IfExists::Fail })
    }

    /// Deletes a table with everything in it.
    pub fn delete_table(&mut self, table: &TableId) -> &mut Self {
        self.push(Op::DeleteTable { table: table.clone() })
    }

    /// Deletes all rules of a table.
    pub fn flush_table(&mut self, table: &TableId) -> &mut Self {
        self.push(Op::FlushTable { table: table.clone() })
    }

    /// Makes a chain unless it is there; changes its policy if that differs.
    pub fn add_chain(&mut self, table: &TableId, chain: Chain) -> &mut Self {
        self.push(Op::AddChain { table: table.clone(), chain, if_exists: IfExists::Keep })
    }

    /// Makes a chain; fails if it is there.
    pub fn create_chain(&mut self, table: &TableId, chain: Chain) -> &mut Self {
        self.push(Op::AddChain { table: table.clone(), chain, if_exists: IfExists::Fail })
    }

    /// Deletes a chain with its rules; fails as long as something leads to it.
    pub fn delete_chain(&mut self, table: &TableId, chain: impl Into<Name>) -> &mut Self {
        self.push(Op::DeleteChain { table: table.clone(), chain: chain.into() })
    }

    /// Deletes all rules of a chain.
    pub fn flush_chain(&mut self, table: &TableId, chain: impl Into<Name>) -> &mut Self {
        self.push(Op::FlushChain { table: table.clone(), chain: chain.into() })
    }

    /// Adds a rule after all others.
    pub fn add_rule(&mut self, table: &TableId, chain: impl Into<Name>, rule: Rule) -> &mut Self {
        self.place_rule(table, chain, rule, Place::Last)
    }

    /// Adds a rule before all others.
    pub fn insert_rule(&mut self, table: &TableId, chain: impl Into<Name>, rule: Rule) -> &mut Self {
        self.place_rule(table, chain, rule, Place::First)
    }

    /// Adds a rule at a place.
    pub fn place_rule(
        &mut self,
        table: &TableId,
        chain: impl Into<Name>,
        rule: Rule,
        place: Place,
    ) -> &mut Self {
        self.push(Op::AddRule { table: table.clone(), chain: chain.into(), rule, place })
    }

    /// Puts a rule in the place of another.
    pub fn replace_rule(
        &mut self,
        table: &TableId,
        chain: impl Into<Name>,
        handle: u64,
        rule: Rule,
    ) -> &mut Self {
        self.push(Op::ReplaceRule { table: table.clone(), chain: chain.into(), handle, rule })
    }

    /// Deletes a rule.
    pub fn delete_rule(&mut self, table: &TableId, chain: impl Into<Name>, handle: u64) -> &mut Self {
        self.push(Op::DeleteRule { table: table.clone(), chain: chain.into(), handle })
    }

    /// Makes a set or map unless it is there.
    pub fn add_set(&mut self, table: &TableId, set: Set) -> &mut Self {
        self.push(Op::AddSet { table: table.clone(), set, if_exists: IfExists::Keep })
    }

    /// Makes a set or map; fails if it is there.
    pub fn create_set(&mut self, table: &TableId, set: Set) -> &mut Self {
        self.push(Op::AddSet { table: table.clone(), set, if_exists: IfExists::Fail })
    }

    /// Deletes a set or map; fails as long as a rule uses it.
    pub fn delete_set(&mut self, table: &TableId, set: impl Into<Name>) -> &mut Self {
        self.push(Op::DeleteSet { table: table.clone(), set: set.into() })
    }

    /// Deletes all elements of a set or map.
    pub fn flush_set(&mut self, table: &TableId, set: impl Into<Name>) -> &mut Self {
        self.push(Op::FlushSet { table: table.clone(), set: set.into() })
    }

    /// Adds elements; those that are there with the same value stay.
    pub fn add_elements(&mut self, table: &TableId, set: &Set, elements: Vec<Element>) -> &mut Self {
        let (table, shape) = (table.clone(), set.into());
        self.push(Op::AddElements { table, shape, elements, if_exists: IfExists::Keep })
    }

    /// Adds elements; fails if one of them is there.
    pub fn create_elements(&mut self, table: &TableId, set: &Set, elements: Vec<Element>) -> &mut Self {
        let (table, shape) = (table.clone(), set.into());
        self.push(Op::AddElements { table, shape, elements, if_exists: IfExists::Fail })
    }

    /// Deletes elements; fails if one of them is not there.
    pub fn delete_elements(&mut self, table: &TableId, set: &Set, elements: Vec<Element>) -> &mut Self {
        self.push(Op::DeleteElements { table: table.clone(), shape: set.into(), elements })
    }
}

/// One line for each change, as in `nft -f`.
impl fmt::Display for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ops.iter().try_for_each(|op| writeln!(f, "{op}"))
    }
}

// === impl Op ===

impl Op {
    /// The elements that it is about.
    pub fn elements(&self) -> Option<&[Element]> {
        match self {
            Self::AddElements { elements, .. } | Self::DeleteElements { elements, .. } => Some(elements),
            _ => None,
        }
    }

    /// What is said when the kernel refuses one of its elements.
    pub fn describe_element(&self, element: &Element) -> String {
        let text = |shape: &ElementShape| crate::render::element_text(&shape.key, element);
        match self {
            Self::AddElements { table, shape, if_exists, .. } => {
                format!("{} element {} to {shape} {table} {}", verb(*if_exists), text(shape), shape.set)
            }
            Self::DeleteElements { table, shape, .. } => {
                format!("delete element {} of {shape} {table} {}", text(shape), shape.set)
            }
            other => other.to_string(),
        }
    }
}

fn verb(if_exists: IfExists) -> &'static str {
    match if_exists {
        IfExists::Keep => "add",
        IfExists::Fail => "create",
    }
}

impl fmt::Display for ElementShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.map { "map" } else { "set" })
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddTable { table, if_exists } => write!(f, "{} table {}", verb(*if_exists), table.id),
            Self::DeleteTable { table } => write!(f, "delete table {table}"),
            Self::FlushTable { table } => write!(f, "flush table {table}"),
            Self::AddChain { table, chain, if_exists } => {
                write!(f, "{} chain {table} {}", verb(*if_exists), chain.name)?;
                chain.base.as_ref().map_or(Ok(()), |base| write!(f, " {{ {base} }}"))
            }
            Self::DeleteChain { table, chain } => write!(f, "delete chain {table} {chain}"),
            Self::FlushChain { table, chain } => write!(f, "flush chain {table} {chain}"),
            Self::AddRule { table, chain, rule, place } => {
                match place {
                    Place::Last => write!(f, "add rule {table} {chain}")?,
                    Place::First => write!(f, "insert rule {table} {chain}")?,
                    Place::Before(handle) => write!(f, "insert rule {table} {chain} before {handle}")?,
                    Place::After(handle) => write!(f, "add rule {table} {chain} after {handle}")?,
                }
                write!(f, " {}", crate::render::rule_text(rule))
            }
            Self::ReplaceRule { table, chain, handle, rule } => {
                write!(f, "replace rule {table} {chain} {handle} {}", crate::render::rule_text(rule))
            }
            Self::DeleteRule { table, chain, handle } => {
                write!(f, "delete rule {table} {chain} handle {handle}")
            }
            Self::AddSet { table, set, if_exists } => {
                write!(f, "{} {} {table} {}", verb(*if_exists), ElementShape::from(set), set.name)
            }
            Self::DeleteSet { table, set } => write!(f, "delete set {table} {set}"),
            Self::FlushSet { table, set } => write!(f, "flush set {table} {set}"),
            Self::AddElements { table, shape, elements, if_exists } => {
                let verb = verb(*if_exists);
                write!(f, "{verb} {} element(s) to {shape} {table} {}", elements.len(), shape.set)
            }
            Self::DeleteElements { table, shape, elements } => {
                write!(f, "delete {} element(s) of {shape} {table} {}", elements.len(), shape.set)
            }
        }
    }
}
