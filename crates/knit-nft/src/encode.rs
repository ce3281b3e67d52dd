//! Operations to netlink messages: objects, elements, batches.

use std::ops::Range;
use std::time::Duration;

use knit_netlink::attr::Writer;
use knit_netlink::{Batch, flags};

use crate::data::Data;
use crate::encode_expr::{put_data, put_expr, put_verdict};
use crate::error::Invalid;
use crate::expr::{AnonymousSet, Expr};
use crate::object::{Chain, Element, ElementValue, Family, MAX_COMMENT, Name, Policy, Set, SetKind, TableId};
use crate::rule::Rule;
use crate::transaction::{ElementShape, IfExists, Op, Place, Ranges};
use crate::wire::{self, msg};

/// How many bytes of elements go into one message: its nested attribute must stay below 64 KiB.
const ELEMENT_BYTES: usize = 60 * 1024;

/// A batch, and which operation each of its messages belongs to.
#[derive(Debug, Default)]
pub struct Encoded {
    /// The messages.
    pub batch: Batch,
    /// For each message of the batch: the index of its operation, and the elements it carries. None for the
    /// frame.
    pub origin: Vec<Option<(usize, Option<Range<usize>>)>>,
    next_set_id: u32,
}

impl Encoded {
    /// Starts a batch: all operations until [`Encoded::end`] happen together. With a generation, only if
    /// nobody has changed anything since.
    pub fn begin(generation: Option<u32>) -> Self {
        let mut this = Self::default();
        this.batch.push(wire::BATCH_BEGIN, 0, |w| {
            w.fixed(&[0, 0, 0, wire::SUBSYSTEM as u8]);
            if let Some(generation) = generation {
                w.u32_be(wire::BATCH_GENID, generation);
            }
        });
        this.origin.push(None);
        this
    }

    /// Ends the batch.
    pub fn end(&mut self) {
        self.batch.push(wire::BATCH_END, 0, |w| {
            w.fixed(&[0, 0, 0, wire::SUBSYSTEM as u8]);
        });
        self.origin.push(None);
    }

    /// Whether it holds any operation.
    pub fn is_idle(&self) -> bool {
        self.origin.len() <= 1
    }

    fn push(
        &mut self,
        origin: (usize, Option<Range<usize>>),
        family: Family,
        kind: u16,
        message_flags: u16,
        body: impl FnOnce(&mut Writer<'_>),
    ) {
        self.batch.push(kind, message_flags, |w| {
            w.fixed(&[family as u8, 0, 0, 0]);
            body(w);
        });
        self.origin.push(Some(origin));
    }

    /// Adds a whole operation.
    pub fn op(&mut self, index: usize, op: &Op) -> Result<(), Invalid> {
        let all = op.elements().map_or(0..0, |elements| 0..elements.len());
        let done = self.op_part(index, op, all.clone(), usize::MAX)?;
        debug_assert_eq!(done, all.end);
        Ok(())
    }

    /// Adds an operation, or as many of its elements from `part` as fit until the batch has `limit` bytes.
    /// Returns the first element that did not fit.
    pub fn op_part(
        &mut self,
        index: usize,
        op: &Op,
        part: Range<usize>,
        limit: usize,
    ) -> Result<usize, Invalid> {
        check(op)?;
        let at = (index, None);
        match op {
            Op::AddTable { table, if_exists } => {
                self.push(at, table.id.family, msg::NEWTABLE, create(*if_exists), |w| {
                    w.string(wire::table::NAME, &table.id.name);
                    w.u32_be(wire::table::FLAGS, if table.dormant { wire::TABLE_DORMANT } else { 0 });
                    put_comment(
                        w,
                        wire::table::USERDATA,
                        wire::udata::TABLE_COMMENT,
                        table.comment.as_deref(),
                    );
                });
            }
            Op::DeleteTable { table } => self.push(at, table.family, msg::DELTABLE, 0, |w| {
                w.string(wire::table::NAME, &table.name);
            }),
            Op::FlushTable { table } => self.push(at, table.family, msg::DELRULE, 0, |w| {
                w.string(wire::rule::TABLE, &table.name);
            }),
            Op::AddChain { table, chain, if_exists } => {
                self.push(at, table.family, msg::NEWCHAIN, create(*if_exists), |w| {
                    put_chain(w, table, chain);
                });
            }
            Op::DeleteChain { table, chain } => self.push(at, table.family, msg::DELCHAIN, 0, |w| {
                w.string(wire::chain::TABLE, &table.name).string(wire::chain::NAME, chain);
            }),
            Op::FlushChain { table, chain } => self.push(at, table.family, msg::DELRULE, 0, |w| {
                w.string(wire::rule::TABLE, &table.name).string(wire::rule::CHAIN, chain);
            }),
            Op::AddRule { table, chain, rule, place } => {
                let (extra, position) = match place {
                    Place::Last => (flags::APPEND, None),
                    Place::First => (0, None),
                    Place::Before(handle) => (0, Some(*handle)),
                    Place::After(handle) => (flags::APPEND, Some(*handle)),
                };
                self.rule(index, table, chain, rule, flags::CREATE | extra, |w| {
                    if let Some(position) = position {
                        w.u64_be(wire::rule::POSITION, position);
                    }
                });
            }
            Op::ReplaceRule { table, chain, handle, rule } => {
                self.rule(index, table, chain, rule, flags::REPLACE, |w| {
                    w.u64_be(wire::rule::HANDLE, *handle);
                });
            }
            Op::DeleteRule { table, chain, handle } => self.push(at, table.family, msg::DELRULE, 0, |w| {
                w.string(wire::rule::TABLE, &table.name).string(wire::rule::CHAIN, chain);
                w.u64_be(wire::rule::HANDLE, *handle);
            }),
            Op::AddSet { table, set, if_exists } => {
                let id = self.set_id();
                self.push(at, table.family, msg::NEWSET, create(*if_exists), |w| {
                    put_set(w, table, set, &set.name, id, 0);
                });
            }
            Op::DeleteSet { table, set } => self.push(at, table.family, msg::DELSET, 0, |w| {
                w.string(wire::set::TABLE, &table.name).string(wire::set::NAME, set);
            }),
            Op::FlushSet { table, set } => self.push(at, table.family, msg::DELSETELEM, 0, |w| {
                w.string(wire::elem_list::TABLE, &table.name).string(wire::elem_list::SET, set);
            }),
            Op::AddElements { table, shape, elements, if_exists } => {
                let message = (msg::NEWSETELEM, create(*if_exists));
                return Ok(self.elements(index, table, shape, None, message, elements, part, limit));
            }
            Op::DeleteElements { table, shape, elements } => {
                let message = (msg::DELSETELEM, 0);
                return Ok(self.elements(index, table, shape, None, message, elements, part, limit));
            }
        }
        Ok(part.end)
    }

    fn set_id(&mut self) -> u32 {
        self.next_set_id += 1;
        self.next_set_id
    }

    fn rule(
        &mut self,
        index: usize,
        table: &TableId,
        chain: &Name,
        rule: &Rule,
        message_flags: u16,
        place: impl FnOnce(&mut Writer<'_>),
    ) {
        let mut ids = Vec::with_capacity(rule.sets.len());
        for anonymous in &rule.sets {
            ids.push(self.anonymous_set(index, table, anonymous));
        }
        let expressions = |w: &mut Writer<'_>| {
            for expr in &rule.exprs {
                w.nested(wire::list::ELEM, |w| put_expr(w, expr, &ids));
            }
        };
        self.push((index, None), table.family, msg::NEWRULE, message_flags, |w| {
            w.string(wire::rule::TABLE, &table.name).string(wire::rule::CHAIN, chain);
            place(w);
            w.nested(wire::rule::EXPRESSIONS, expressions);
            put_comment(w, wire::rule::USERDATA, wire::udata::RULE_COMMENT, rule.comment.as_deref());
        });
    }

    fn anonymous_set(
        &mut self,
        index: usize,
        table: &TableId,
        anonymous: &AnonymousSet,
    ) -> (&'static str, u32) {
        let id = self.set_id();
        let template = match anonymous.set.kind {
            SetKind::Set => "__set%d",
            SetKind::Map(_) | SetKind::VerdictMap => "__map%d",
        };
        self.push((index, None), table.family, msg::NEWSET, flags::CREATE, |w| {
            put_set(w, table, &anonymous.set, template, id, wire::set_flag::ANONYMOUS);
        });
        let mut shape = ElementShape::from(&anonymous.set);
        shape.set = template.into();
        let elements = &anonymous.elements;
        let message = (msg::NEWSETELEM, flags::CREATE);
        self.elements(index, table, &shape, Some(id), message, elements, 0..elements.len(), usize::MAX);
        (template, id)
    }

    #[expect(clippy::too_many_arguments, reason = "the hot path: everything is passed by reference, once")]
    fn elements(
        &mut self,
        index: usize,
        table: &TableId,
        shape: &ElementShape,
        set_id: Option<u32>,
        (kind, message_flags): (u16, u16),
        elements: &[Element],
        part: Range<usize>,
        limit: usize,
    ) -> usize {
        let mut next = part.start;
        while next < part.end && self.batch.bytes() < limit {
            let first = next;
            let room = ELEMENT_BYTES.min(limit - self.batch.bytes());
            let origin = self.origin.len();
            self.push((index, None), table.family, kind, message_flags, |w| {
                w.string(wire::elem_list::TABLE, &table.name).string(wire::elem_list::SET, &shape.set);
                if let Some(id) = set_id {
                    w.u32_be(wire::elem_list::SET_ID, id);
                }
                w.nested(wire::elem_list::ELEMENTS, |w| {
                    let start = w.position();
                    while next < part.end && w.position() - start < room {
                        put_element(w, shape.ranges, &elements[next]);
                        next += 1;
                    }
                });
            });
            self.origin[origin] = Some((index, Some(first..next)));
        }
        next
    }
}

fn create(if_exists: IfExists) -> u16 {
    match if_exists {
        IfExists::Keep => flags::CREATE,
        IfExists::Fail => flags::CREATE | flags::EXCL,
    }
}

fn put_chain(w: &mut Writer<'_>, table: &TableId, chain: &Chain) {
    w.string(wire::chain::TABLE, &table.name).string(wire::chain::NAME, &chain.name);
    if let Some(base) = &chain.base {
        w.nested(wire::chain::HOOK, |w| {
            w.u32_be(wire::hook::NUM, base.hook.number(table.family));
            w.u32_be(wire::hook::PRIORITY, base.priority as u32);
            match base.devices.as_slice() {
                [] => {}
                [only] => {
                    w.string(wire::hook::DEV, only);
                }
                several => {
                    w.nested(wire::hook::DEVS, |w| {
                        for device in several {
                            w.string(wire::device::NAME, device);
                        }
                    });
                }
            }
        });
        w.u32_be(wire::chain::POLICY, u32::from(base.policy == Policy::Accept));
        w.string(wire::chain::TYPE, base.kind.name());
    }
    put_comment(w, wire::chain::USERDATA, wire::udata::CHAIN_COMMENT, chain.comment.as_deref());
}

fn put_set(w: &mut Writer<'_>, table: &TableId, set: &Set, name: &str, id: u32, more_flags: u32) {
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    let set_flags = more_flags
        | flag(set.constant, wire::set_flag::CONSTANT)
        | flag(set.interval, wire::set_flag::INTERVAL)
        | flag(set.is_concat_interval(), wire::set_flag::CONCAT)
        | flag(set.kind != SetKind::Set, wire::set_flag::MAP)
        | flag(set.timeouts, wire::set_flag::TIMEOUT)
        | flag(set.dynamic, wire::set_flag::EVAL)
        | flag(set.counter, wire::set_flag::EXPR);
    w.string(wire::set::TABLE, &table.name).string(wire::set::NAME, name);
    w.u32_be(wire::set::FLAGS, set_flags);
    w.u32_be(wire::set::KEY_TYPE, set.key.id()).u32_be(wire::set::KEY_LEN, set.key.len());
    match &set.kind {
        SetKind::Set => {}
        SetKind::Map(value) => {
            w.u32_be(wire::set::DATA_TYPE, value.id()).u32_be(wire::set::DATA_LEN, value.len());
        }
        SetKind::VerdictMap => {
            w.u32_be(wire::set::DATA_TYPE, wire::DATA_VERDICT).u32_be(wire::set::DATA_LEN, 16);
        }
    }
    if set.size.is_some() || set.is_concat_interval() {
        w.nested(wire::set::DESC, |w| {
            if let Some(size) = set.size {
                w.u32_be(wire::set_desc::SIZE, size);
            }
            if set.is_concat_interval() {
                w.nested(wire::set_desc::CONCAT, |w| {
                    for field in set.key.fields() {
                        w.nested(wire::list::ELEM, |w| {
                            w.u32_be(wire::set_field::LEN, field.size());
                        });
                    }
                });
            }
        });
    }
    w.u32_be(wire::set::ID, id);
    if let Some(timeout) = set.timeout {
        w.u64_be(wire::set::TIMEOUT, millis(timeout));
    }
    if set.counter {
        w.nested(wire::set::EXPR, |w| put_expr(w, &Expr::Counter, &[]));
    }
    put_comment(w, wire::set::USERDATA, wire::udata::SET_COMMENT, set.comment.as_deref());
}

fn put_element(w: &mut Writer<'_>, ranges: Ranges, element: &Element) {
    w.nested(wire::list::ELEM, |w| {
        put_data(w, wire::elem::KEY, &element.key);
        if ranges == Ranges::Concat {
            put_data(w, wire::elem::KEY_END, element.last_key());
        }
        match &element.value {
            ElementValue::None => {}
            ElementValue::Data(data) => put_data(w, wire::elem::DATA, data),
            ElementValue::Verdict(verdict) => {
                w.nested(wire::elem::DATA, |w| put_verdict(w, verdict));
            }
        }
        if let Some(timeout) = element.timeout {
            w.u64_be(wire::elem::TIMEOUT, millis(timeout));
        }
        put_comment(w, wire::elem::USERDATA, wire::udata::ELEM_COMMENT, element.comment.as_deref());
    });
    // The end of a range is an element of its own, one past the last key; the last key of all needs none.
    if ranges == Ranges::Pairs
        && let Some(end) = element.last_key().successor()
    {
        put_interval_end(w, &end);
    }
}

fn put_interval_end(w: &mut Writer<'_>, end: &Data) {
    w.nested(wire::list::ELEM, |w| {
        put_data(w, wire::elem::KEY, end);
        w.u32_be(wire::elem::FLAGS, wire::ELEM_INTERVAL_END);
    });
}

/// User data as `nft` writes it: a list of (type, length, value), here one NUL-terminated comment.
fn put_comment(w: &mut Writer<'_>, attribute: u16, kind: u16, comment: Option<&str>) {
    if let Some(comment) = comment {
        let mut value = [0; MAX_COMMENT + 3];
        value[0] = kind as u8;
        value[1] = comment.len() as u8 + 1;
        value[2..2 + comment.len()].copy_from_slice(comment.as_bytes());
        w.bytes(attribute, &value[..comment.len() + 3]);
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Refuses what cannot be said on the wire, before anything is sent.
fn check(op: &Op) -> Result<(), Invalid> {
    match op {
        Op::AddTable { table, .. } => {
            check_name(&table.id.name)?;
            check_comment(table.comment.as_deref())
        }
        Op::AddChain { chain, .. } => {
            check_name(&chain.name)?;
            check_comment(chain.comment.as_deref())
        }
        Op::AddSet { set, .. } => {
            check_name(&set.name)?;
            check_comment(set.comment.as_deref())
        }
        Op::AddRule { rule, .. } | Op::ReplaceRule { rule, .. } => {
            check_comment(rule.comment.as_deref())?;
            rule.sets
                .iter()
                .flat_map(|set| &set.elements)
                .try_for_each(|e| check_comment(e.comment.as_deref()))?;
            rule.fault.map_or(Ok(()), |fault| Err(Invalid::Rule(fault)))
        }
        Op::AddElements { elements, .. } | Op::DeleteElements { elements, .. } => {
            elements.iter().try_for_each(|element| check_comment(element.comment.as_deref()))
        }
        _ => Ok(()),
    }
}

fn check_name(name: &str) -> Result<(), Invalid> {
    if name.is_empty() || name.len() > 255 || name.contains('\0') {
        return Err(Invalid::Name(name.into()));
    }
    Ok(())
}

fn check_comment(comment: Option<&str>) -> Result<(), Invalid> {
    match comment {
        Some(text) if text.len() > MAX_COMMENT || text.contains('\0') => Err(Invalid::Comment(text.into())),
        _ => Ok(()),
    }
}

/// Which element of `part` lies at this offset of the message that carries the part.
pub fn element_at(op: &Op, part: Range<usize>, offset: usize) -> Option<usize> {
    let (Op::AddElements { table, shape, elements, .. } | Op::DeleteElements { table, shape, elements, .. }) =
        op
    else {
        return None;
    };
    let mut scratch = Vec::new();
    let mut w = Writer::new(&mut scratch);
    // Netlink header, nfgenmsg, the two names, and the header of the list.
    w.fixed(&[0; 20]).string(wire::elem_list::TABLE, &table.name).string(wire::elem_list::SET, &shape.set);
    w.fixed(&[0; 4]);
    for index in part {
        put_element(&mut w, shape.ranges, &elements[index]);
        if w.position() > offset {
            return Some(index);
        }
    }
    None
}
