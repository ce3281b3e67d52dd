//! Netlink messages to objects: tables, chains, rules, sets, elements.
//!
//! Bytes come from the kernel, and still nothing in here trusts them: a message that makes no sense is
//! skipped or becomes a raw expression, and no input panics or loops.

use std::collections::BTreeMap;
use std::time::Duration;

use knit_netlink::attr::{Attr, Reader};

use crate::data::Data;
use crate::datatype::KeyType;
use crate::decode_expr;
use crate::expr::{AnonymousSet, Expr, SetRef};
use crate::object::{
    BaseChain, Chain, ChainKind, Element, ElementValue, Family, Hook, Name, Policy, Set, SetKind, Table,
    TableId,
};
use crate::rule::Rule;
use crate::state::RuleState;
use crate::wire;

/// A set as listed; anonymous ones belong to a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedSet {
    /// The set.
    pub set: Set,
    /// Whether it belongs to a rule.
    pub anonymous: bool,
}

/// A rule as listed, with the chain that it stands in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedRule {
    /// The chain's name.
    pub chain: Name,
    /// The rule.
    pub state: RuleState,
}

/// One element as listed, before the two halves of a range are joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedElement {
    /// The element.
    pub element: Element,
    /// Whether it is the end of a range.
    pub end: bool,
    /// How long it will stay.
    pub expires: Option<Duration>,
    /// Packets and bytes of its counter.
    pub counter: Option<(u64, u64)>,
}

/// The table in a `NEWTABLE` message.
pub fn table(family: Family, attrs: &Reader<'_>) -> Option<Table> {
    let name: Name = attrs.get(wire::table::NAME)?.string().into();
    let flags = number(attrs, wire::table::FLAGS).unwrap_or(0);
    let comment = comment(attrs, wire::table::USERDATA, wire::udata::TABLE_COMMENT);
    Some(Table { id: TableId { family, name }, dormant: flags & wire::TABLE_DORMANT != 0, comment })
}

/// The table's name and the chain in a `NEWCHAIN` message.
pub fn chain(family: Family, attrs: &Reader<'_>) -> Option<(Name, Chain)> {
    let table = attrs.get(wire::chain::TABLE)?.string().into();
    let name = attrs.get(wire::chain::NAME)?.string().into();
    let base = match attrs.get(wire::chain::HOOK) {
        None => None,
        Some(hook) => {
            let hook = hook.nested();
            let mut devices: Vec<Name> = match (hook.get(wire::hook::DEVS), hook.get(wire::hook::DEV)) {
                (Some(several), _) => several.nested().map(|attr| attr.string().into()).collect(),
                (None, Some(one)) => vec![one.string().into()],
                (None, None) => Vec::new(),
            };
            devices.sort();
            Some(BaseChain {
                kind: ChainKind::from_name(&attrs.get(wire::chain::TYPE)?.string())?,
                hook: Hook::from_number(family, number(&hook, wire::hook::NUM)?)?,
                priority: number(&hook, wire::hook::PRIORITY)? as i32,
                policy: match number(attrs, wire::chain::POLICY) {
                    Some(0) => Policy::Drop,
                    _ => Policy::Accept,
                },
                devices,
            })
        }
    };
    let comment = comment(attrs, wire::chain::USERDATA, wire::udata::CHAIN_COMMENT);
    Some((table, Chain { name, base, comment }))
}

/// The table's name and the rule in a `NEWRULE` message.
pub fn rule(attrs: &Reader<'_>) -> Option<(Name, ListedRule)> {
    let table = attrs.get(wire::rule::TABLE)?.string().into();
    let chain = attrs.get(wire::rule::CHAIN)?.string().into();
    let handle = attrs.get(wire::rule::HANDLE)?.u64_be().ok()?;
    let mut rule = Rule::new();
    let mut counter = None;
    for item in attrs.get(wire::rule::EXPRESSIONS).map(|list| list.nested()).into_iter().flatten() {
        let item = item.nested();
        counter = counter.or(decode_expr::counter(&item));
        rule.exprs.push(decode_expr::expr(&item));
    }
    rule.comment = comment(attrs, wire::rule::USERDATA, wire::udata::RULE_COMMENT);
    Some((table, ListedRule { chain, state: RuleState { handle, rule, counter } }))
}

/// The table's name and the set in a `NEWSET` message.
pub fn set(attrs: &Reader<'_>) -> Option<(Name, ListedSet)> {
    let table = attrs.get(wire::set::TABLE)?.string().into();
    let name: Name = attrs.get(wire::set::NAME)?.string().into();
    let flags = number(attrs, wire::set::FLAGS).unwrap_or(0);
    let has = |flag: u32| flags & flag != 0;
    let key = KeyType::from_id(number(attrs, wire::set::KEY_TYPE)?, number(attrs, wire::set::KEY_LEN)?);
    let kind = match number(attrs, wire::set::DATA_TYPE) {
        _ if !has(wire::set_flag::MAP) => SetKind::Set,
        Some(wire::DATA_VERDICT) => SetKind::VerdictMap,
        id => SetKind::Map(KeyType::from_id(id?, number(attrs, wire::set::DATA_LEN)?)),
    };
    let mut set = Set::untyped(name, key, kind);
    set.interval = has(wire::set_flag::INTERVAL);
    set.constant = has(wire::set_flag::CONSTANT);
    set.timeouts = has(wire::set_flag::TIMEOUT);
    set.dynamic = has(wire::set_flag::EVAL);
    set.counter =
        attrs.get(wire::set::EXPR).is_some_and(|expr| decode_expr::counter(&expr.nested()).is_some());
    set.timeout = duration(attrs, wire::set::TIMEOUT);
    set.size = attrs.get(wire::set::DESC).and_then(|desc| number(&desc.nested(), wire::set_desc::SIZE));
    set.comment = comment(attrs, wire::set::USERDATA, wire::udata::SET_COMMENT);
    Some((table, ListedSet { set, anonymous: has(wire::set_flag::ANONYMOUS) }))
}

/// The elements in a `NEWSETELEM` message.
pub fn elements(attrs: &Reader<'_>) -> impl Iterator<Item = ListedElement> {
    let list = attrs.get(wire::elem_list::ELEMENTS).map(|list| list.nested());
    list.into_iter().flatten().filter_map(element)
}

fn element(attr: Attr<'_>) -> Option<ListedElement> {
    let attrs = attr.nested();
    let key = decode_expr::data(&attrs, wire::elem::KEY)?;
    let value = match decode_expr::data(&attrs, wire::elem::DATA) {
        Some(data) => ElementValue::Data(data),
        None => {
            decode_expr::verdict(&attrs, wire::elem::DATA).map_or(ElementValue::None, ElementValue::Verdict)
        }
    };
    let element = Element {
        key,
        key_end: decode_expr::data(&attrs, wire::elem::KEY_END).map(Box::new),
        value,
        timeout: duration(&attrs, wire::elem::TIMEOUT),
        comment: comment(&attrs, wire::elem::USERDATA, wire::udata::ELEM_COMMENT),
    };
    let end = number(&attrs, wire::elem::FLAGS).unwrap_or(0) & wire::ELEM_INTERVAL_END != 0;
    let counter = attrs.get(wire::elem::EXPR).and_then(|expr| decode_expr::counter(&expr.nested()));
    Some(ListedElement { element, end, expires: duration(&attrs, wire::elem::EXPIRATION), counter })
}

/// Joins starts and ends of ranges, where the set keeps them apart, and brings everything to one form.
pub fn join_ranges(set: &Set, mut listed: Vec<ListedElement>) -> Vec<ListedElement> {
    if set.interval && !set.is_concat_interval() {
        // At the same key one range ends before the next begins.
        listed.sort_by(|a, b| a.element.key.cmp(&b.element.key).then(b.end.cmp(&a.end)));
        let mut joined: Vec<ListedElement> = Vec::with_capacity(listed.len() / 2 + 1);
        let mut open = false;
        for item in listed {
            if open && let (Some(last), Some(before)) = (joined.last_mut(), item.element.key.predecessor()) {
                last.element.key_end = Some(Box::new(before));
            }
            open = !item.end;
            if open {
                joined.push(item);
            }
        }
        if open && let Some(last) = joined.last_mut() {
            let all_ones = vec![0xff; last.element.key.len()];
            last.element.key_end = Some(Box::new(Data::from_slice(&all_ones)));
        }
        listed = joined;
    }
    for item in &mut listed {
        item.element.make_canonical(set);
    }
    listed
}

/// Gives rules the anonymous sets that they look into.
pub fn adopt_sets(rule: &mut Rule, anonymous: &mut BTreeMap<Name, AnonymousSet>) {
    for expr in &mut rule.exprs {
        if let Expr::Lookup { set, .. } = expr
            && let SetRef::Named(name) = set
            && let Some(mut own) = anonymous.remove(name)
        {
            own.set.name = "".into();
            own.elements.sort_by(|a, b| a.key.cmp(&b.key));
            rule.sets.push(own);
            *set = SetRef::Anonymous(rule.sets.len() - 1);
        }
    }
}

fn number(attrs: &Reader<'_>, attribute: u16) -> Option<u32> {
    attrs.get(attribute)?.u32_be().ok()
}

fn duration(attrs: &Reader<'_>, attribute: u16) -> Option<Duration> {
    let millis = attrs.get(attribute)?.u64_be().ok()?;
    (millis > 0).then(|| Duration::from_millis(millis))
}

/// The comment in user data: a list of (type, length, value).
fn comment(attrs: &Reader<'_>, attribute: u16, kind: u16) -> Option<Box<str>> {
    let mut rest = attrs.get(attribute)?.value;
    while let [found, len, after @ ..] = rest {
        let value = after.get(..usize::from(*len))?;
        if u16::from(*found) == kind {
            let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
            return Some(String::from_utf8_lossy(text).into());
        }
        rest = &after[value.len()..];
    }
    None
}
