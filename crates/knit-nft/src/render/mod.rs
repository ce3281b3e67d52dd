//! Tables as text for people, close to what `nft list table` prints.
//!
//! It is for logs, plans and golden tests; it is not meant to be fed to `nft`.

mod rule;
mod value;

use std::fmt::{self, Write};
use std::time::Duration;

use super::datatype::KeyType;
use super::object::{BaseChain, Element, ElementValue, Set, SetKind};
use super::rule::Rule;
use super::state::{SetState, TableState};

/// A rule as text, without knowledge of the sets that it names.
pub(super) fn rule_text(rule: &Rule) -> String {
    rule::text(rule, &|_| None)
}

/// An element's key as text.
pub(super) fn element_text(key: &KeyType, element: &Element) -> String {
    match &element.key_end {
        None => value::key(key, element.key.as_slice()),
        Some(end) => value::range(key, element.key.as_slice(), end.as_slice()),
    }
}

/// A duration as `nft` writes it: `1h30m`.
fn duration(duration: Duration) -> String {
    let (mut seconds, millis) = (duration.as_secs(), duration.subsec_millis());
    let mut text = String::new();
    for (unit, length) in [("d", 86400), ("h", 3600), ("m", 60), ("s", 1)] {
        if seconds >= length {
            let _ = write!(text, "{}{unit}", seconds / length);
            seconds %= length;
        }
    }
    if millis > 0 || text.is_empty() {
        let _ = write!(text, "{millis}ms");
    }
    text
}

impl fmt::Display for TableState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "table {} {{", self.id())?;
        if let Some(comment) = &self.table.comment {
            writeln!(f, "\tcomment \"{comment}\"")?;
        }
        if self.table.dormant {
            writeln!(f, "\tflags dormant")?;
        }
        let mut first = true;
        let mut gap =
            |f: &mut fmt::Formatter<'_>| if std::mem::take(&mut first) { Ok(()) } else { writeln!(f) };
        for set in self.sets.values() {
            gap(f)?;
            write_set(f, set)?;
        }
        for chain in self.chains.values() {
            gap(f)?;
            writeln!(f, "\tchain {} {{", chain.chain.name)?;
            if let Some(comment) = &chain.chain.comment {
                writeln!(f, "\t\tcomment \"{comment}\"")?;
            }
            if let Some(base) = &chain.chain.base {
                writeln!(f, "\t\t{base}")?;
            }
            for rule in &chain.rules {
                let key = |name: &str| self.sets.get(name).map(|state| &state.set.key);
                writeln!(f, "\t\t{}", rule::text(&rule.rule, &key))?;
            }
            writeln!(f, "\t}}")?;
        }
        writeln!(f, "}}")
    }
}

impl fmt::Display for BaseChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "type {} hook {}", self.kind.name(), self.hook)?;
        match self.devices.as_slice() {
            [] => {}
            [only] => write!(f, " device \"{only}\"")?,
            several => {
                let names: Vec<String> = several.iter().map(|name| format!("\"{name}\"")).collect();
                write!(f, " devices = {{ {} }}", names.join(", "))?;
            }
        }
        let policy = match self.policy {
            super::object::Policy::Accept => "accept",
            super::object::Policy::Drop => "drop",
        };
        write!(f, " priority {}; policy {policy};", self.priority)
    }
}

fn write_set(f: &mut fmt::Formatter<'_>, state: &SetState) -> fmt::Result {
    let set = &state.set;
    writeln!(f, "\t{} {} {{", if set.kind == SetKind::Set { "set" } else { "map" }, set.name)?;
    writeln!(f, "\t\t{}", set_type(set))?;
    if let Some(size) = set.size {
        writeln!(f, "\t\tsize {size}")?;
    }
    let flags: Vec<&str> = [
        (set.constant, "constant"),
        (set.interval, "interval"),
        (set.timeouts && set.timeout.is_none(), "timeout"),
        (set.dynamic, "dynamic"),
    ]
    .into_iter()
    .filter_map(|(on, name)| on.then_some(name))
    .collect();
    if !flags.is_empty() {
        writeln!(f, "\t\tflags {}", flags.join(","))?;
    }
    if set.counter {
        writeln!(f, "\t\tcounter")?;
    }
    if let Some(timeout) = set.timeout {
        writeln!(f, "\t\ttimeout {}", duration(timeout))?;
    }
    if let Some(comment) = &set.comment {
        writeln!(f, "\t\tcomment \"{comment}\"")?;
    }
    for (index, element) in state.elements.values().enumerate() {
        let lead = if index == 0 { "\t\telements = {" } else { "\t\t            " };
        let tail = if index + 1 == state.elements.len() { " }" } else { "," };
        writeln!(f, "{lead} {}{tail}", whole_element(set, element))?;
    }
    writeln!(f, "\t}}")
}

fn set_type(set: &Set) -> String {
    match &set.kind {
        SetKind::Set => format!("type {}", set.key),
        SetKind::Map(data) => format!("type {} : {data}", set.key),
        SetKind::VerdictMap => format!("type {} : verdict", set.key),
    }
}

fn whole_element(set: &Set, element: &Element) -> String {
    let mut text = element_text(&set.key, element);
    if let Some(timeout) = element.timeout {
        let _ = write!(text, " timeout {}", duration(timeout));
    }
    if let Some(comment) = &element.comment {
        let _ = write!(text, " comment \"{comment}\"");
    }
    match (&element.value, &set.kind) {
        (ElementValue::Data(data), SetKind::Map(kind)) => {
            let _ = write!(text, " : {}", value::key(kind, data.as_slice()));
        }
        (ElementValue::Data(data), _) => {
            let _ = write!(text, " : {data:?}");
        }
        (ElementValue::Verdict(verdict), _) => {
            let _ = write!(text, " : {verdict}");
        }
        (ElementValue::None, _) => {}
    }
    text
}
