//! The kernel's nftables, over nfnetlink.

use std::collections::BTreeMap;

use knit_nft::decode::{self, ListedElement};
use knit_nft::encode::{self, Encoded};
use knit_nft::expr::AnonymousSet;
use knit_nft::wire::{self, msg};
use knit_nft::{
    ChainState, ChannelError, Error, Family, Generation, Name, Nftables, Op, Result, RuleState, Set,
    SetState, TableId, TableState, Transaction,
};

use crate::netlink::attr::{Reader, Writer};
use crate::netlink::{self, Batch, Changed, Message, Protocol, Refusal, Socket};
use crate::netns::NetNs;

/// How often a listing is begun again because somebody changed the rule set meanwhile, before only the table
/// itself counts.
const ATTEMPTS: u32 = 3;
/// How often a table is read where others change theirs all the time, until two readings are the same.
const READINGS: u32 = 8;
/// In place of one family in a request for a listing.
const EVERY_FAMILY: u8 = 0;
/// What is kept free below the send buffer's size when a transaction is cut: no single change is longer.
const CHUNK_MARGIN: usize = 8 * 1024;

/// nftables of one network namespace.
#[derive(Debug)]
pub struct Kernel {
    socket: Socket,
    /// How many bytes one batch may have, as far as is known.
    limit: usize,
    /// What to do about lists that change while they are read.
    if_changed: Changed,
}

impl Kernel {
    /// Of the calling thread's network namespace.
    pub fn open() -> Result<Self> {
        Socket::open(Protocol::Netfilter).map(Self::with_socket).map_err(cannot_open)
    }

    /// Of another network namespace.
    pub fn open_in(namespace: &NetNs) -> Result<Self> {
        Socket::open_in(Protocol::Netfilter, namespace).map(Self::with_socket).map_err(cannot_open)
    }

    fn with_socket(socket: Socket) -> Self {
        Self { socket, limit: 0, if_changed: Changed::ReadAgain }
    }

    /// How many bytes one transaction may have, after asking for `wanted`.
    fn raise(&mut self, wanted: usize) -> Result<usize> {
        if self.limit < wanted {
            let raised = self.socket.raise_send_buffer(wanted);
            self.limit = raised.map_err(failed("raise the netlink send buffer"))?;
        }
        Ok(self.limit)
    }

    /// Encodes a transaction as one batch.
    fn encode(transaction: &Transaction, generation: Option<Generation>) -> Result<Encoded> {
        let mut encoded = Encoded::begin(generation.map(|generation| generation.0));
        for (index, op) in transaction.ops().iter().enumerate() {
            encoded.op(index, op).map_err(|source| Error::Invalid { operation: op.to_string(), source })?;
        }
        encoded.end();
        Ok(encoded)
    }

    fn commit_whole(&mut self, transaction: &Transaction, generation: Option<Generation>) -> Result<()> {
        if transaction.is_empty() {
            return Ok(());
        }
        let encoded = Self::encode(transaction, generation)?;
        self.send(encoded, transaction)
    }

    fn send(&mut self, mut encoded: Encoded, transaction: &Transaction) -> Result<()> {
        let bytes = encoded.batch.bytes();
        let limit = self.raise(bytes)?;
        if bytes > limit {
            return Err(Error::TooBig { bytes, limit });
        }
        let attempted = "commit an nftables transaction";
        let first = self.socket.send(&mut encoded.batch, 0).map_err(failed(attempted))?;
        // The kernel has carried out or refused the batch by now. It reports every refusal; the first is the
        // cause.
        let mut refused: Option<(usize, Refusal)> = None;
        self.socket
            .drain(|message| {
                let index = message.sequence.wrapping_sub(first) as usize;
                if let Some(Err(refusal)) = message.answer()
                    && index < encoded.origin.len()
                    && refused.as_ref().is_none_or(|(earlier, _)| index < *earlier)
                {
                    refused = Some((index, refusal));
                }
            })
            .map_err(failed(attempted))?;
        match refused {
            None => Ok(()),
            Some((message, refusal)) => Err(blame(&encoded, message, refusal, transaction)),
        }
    }

    /// The elements of a set with what only the kernel knows of them: counters, and how long they will stay.
    pub fn elements(&mut self, table: &TableId, set: &Set) -> Result<Vec<ListedElement>> {
        let body = |w: &mut Writer<'_>| {
            w.string(wire::elem_list::TABLE, &table.name).string(wire::elem_list::SET, &set.name);
        };
        let listed =
            self.list(msg::GETSETELEM, table.family, body, |_, attrs, out: &mut Vec<ListedElement>| {
                out.extend(decode::elements(attrs));
            });
        let listed = listed.map_err(listing(|| format!("the elements of {table} {}", set.name)))?;
        Ok(decode::join_ranges(set, listed))
    }

    /// The rules of one chain, with what they counted: without the sets that they have of their own, and
    /// without the rest of the table. None if there is no such chain.
    pub fn rules(&mut self, table: &TableId, chain: &str) -> Result<Vec<RuleState>> {
        let body = |w: &mut Writer<'_>| {
            w.string(wire::rule::TABLE, &table.name).string(wire::rule::CHAIN, chain);
        };
        let listed = self.list(msg::GETRULE, table.family, body, |_, attrs, out: &mut Vec<_>| {
            out.extend(decode::rule(attrs));
        });
        let listed = listed.map_err(listing(|| format!("the rules of {table} {chain}")))?;
        let ours = listed.into_iter().filter(|(name, rule)| *name == table.name && &*rule.chain == chain);
        Ok(ours.map(|(_, rule)| rule.state).collect())
    }

    /// Sends a listing request for one family and decodes what comes back.
    fn list<T: Default>(
        &mut self,
        kind: u16,
        family: Family,
        body: impl Fn(&mut Writer<'_>),
        each: impl Fn(Family, &Reader<'_>, &mut T),
    ) -> netlink::Result<T> {
        self.list_of(kind, family as u8, body, each)
    }

    /// The same for the number of a family.
    fn list_of<T: Default>(
        &mut self,
        kind: u16,
        family: u8,
        body: impl Fn(&mut Writer<'_>),
        each: impl Fn(Family, &Reader<'_>, &mut T),
    ) -> netlink::Result<T> {
        let request = |w: &mut Writer<'_>| {
            w.fixed(&[family, 0, 0, 0]);
            body(w);
        };
        self.socket.dump_as(self.if_changed, kind, request, T::default, |out, message: Message<'_>| {
            let ([family, ..], attrs) = message.split::<4>()?;
            if let Some(family) = Family::from_number(family) {
                each(family, &attrs, out);
            }
            Ok(())
        })
    }

    /// The state that the rule set has now. It costs one system call, whatever there is.
    pub fn generation(&mut self) -> Result<Generation> {
        super::generation_by(&mut self.socket)
            .map_err(listing(|| "the generation of the rule set".to_owned()))
    }

    fn read_table(&mut self, id: &TableId) -> Result<Option<TableState>> {
        let fail = |what: &'static str| listing(move || format!("{what} of table {id}"));
        let tables = self.list(
            msg::GETTABLE,
            id.family,
            |_| {},
            |family, attrs, out: &mut Vec<_>| {
                out.extend(decode::table(family, attrs));
            },
        );
        let Some(table) = tables.map_err(fail("flags"))?.into_iter().find(|table| table.id == *id) else {
            return Ok(None);
        };
        let mut state = TableState::new(table);

        let chains = self.list(
            msg::GETCHAIN,
            id.family,
            |_| {},
            |family, attrs, out: &mut Vec<_>| {
                out.extend(decode::chain(family, attrs));
            },
        );
        for (table, chain) in chains.map_err(fail("chains"))? {
            if table == id.name {
                state.chains.insert(chain.name.clone(), ChainState { chain, rules: Vec::new() });
            }
        }

        let by_table = |w: &mut Writer<'_>| {
            w.string(wire::set::TABLE, &id.name);
        };
        let sets = self.list(msg::GETSET, id.family, by_table, |_, attrs, out: &mut Vec<_>| {
            out.extend(decode::set(attrs));
        });
        let mut anonymous: BTreeMap<Name, AnonymousSet> = BTreeMap::new();
        for (table, listed) in sets.map_err(fail("sets"))? {
            if table != id.name {
                continue;
            }
            let set = listed.set;
            let elements = self.elements(id, &set)?.into_iter().map(|listed| listed.element);
            if listed.anonymous {
                let elements = elements.collect();
                anonymous.insert(set.name.clone(), AnonymousSet { set, elements });
            } else {
                let elements = elements.map(|element| (element.key.clone(), element)).collect();
                state.sets.insert(set.name.clone(), SetState { set, elements });
            }
        }

        let rules = self.list(msg::GETRULE, id.family, by_table, |_, attrs, out: &mut Vec<_>| {
            out.extend(decode::rule(attrs));
        });
        for (table, mut listed) in rules.map_err(fail("rules"))? {
            if table == id.name
                && let Some(chain) = state.chains.get_mut(&listed.chain)
            {
                decode::adopt_sets(&mut listed.state.rule, &mut anonymous);
                chain.rules.push(listed.state);
            }
        }
        Ok(Some(state))
    }
}

impl Nftables for Kernel {
    fn commit(&mut self, transaction: &Transaction) -> Result<()> {
        self.commit_whole(transaction, None)
    }

    fn commit_if(&mut self, generation: Generation, transaction: &Transaction) -> Result<()> {
        self.commit_whole(transaction, Some(generation))
    }

    fn commit_chunked(&mut self, transaction: &Transaction) -> Result<usize> {
        let whole = Self::encode(transaction, None)?;
        if transaction.is_empty() {
            return Ok(0);
        }
        if whole.batch.bytes() <= self.raise(whole.batch.bytes())? {
            return self.send(whole, transaction).map(|()| 1);
        }
        drop(whole);
        let limit = self.limit.saturating_sub(CHUNK_MARGIN).max(CHUNK_MARGIN);
        let total = transaction.len();
        let mut chunks = 0;
        // Changes before this one are in force.
        let mut done = 0;
        let mut encoded = Encoded::begin(None);
        for (index, op) in transaction.ops().iter().enumerate() {
            let end = op.elements().map_or(0, <[_]>::len);
            let mut next = 0;
            loop {
                if encoded.batch.bytes() >= limit {
                    let full = std::mem::replace(&mut encoded, Encoded::begin(None));
                    self.send_chunk(full, transaction)
                        .map_err(|source| partial(chunks, done, total, source))?;
                    chunks += 1;
                    done = index;
                }
                let invalid = |source| Error::Invalid { operation: op.to_string(), source };
                next = encoded.op_part(index, op, next..end, limit).map_err(invalid)?;
                if next >= end {
                    break;
                }
            }
        }
        if !encoded.is_idle() {
            self.send_chunk(encoded, transaction).map_err(|source| partial(chunks, done, total, source))?;
            chunks += 1;
        }
        Ok(chunks)
    }

    fn generation(&mut self) -> Result<Generation> {
        Self::generation(self)
    }

    fn tables(&mut self) -> Result<Vec<TableId>> {
        let listed = self.list_of(
            msg::GETTABLE,
            EVERY_FAMILY,
            |_| {},
            |family, attrs, out: &mut Vec<_>| {
                out.extend(decode::table(family, attrs));
            },
        );
        let listed = listed.map_err(listing(|| "all tables".to_owned()))?;
        let mut found: Vec<TableId> = listed.into_iter().map(|table| table.id).collect();
        found.sort();
        Ok(found)
    }

    fn snapshot(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)> {
        for _ in 0..ATTEMPTS {
            let before = self.generation()?;
            match self.read_table(table) {
                Ok(state) if self.generation()? == before => return Ok((before, state)),
                Ok(_) => {}
                // Something that was listed is gone by the time that it is looked into.
                Err(error) if error.is_not_found() || is_inconsistent(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.if_changed = Changed::Take;
        let read = self.snapshot_among_others(table);
        self.if_changed = Changed::ReadAgain;
        read
    }

    fn has_chain(&mut self, table: &TableId, chain: &str) -> Result<bool> {
        let mut batch = Batch::new();
        batch.push(msg::GETCHAIN, 0, |w| {
            w.fixed(&[table.family as u8, 0, 0, 0]);
            w.string(wire::chain::TABLE, &table.name).string(wire::chain::NAME, chain);
        });
        match self.socket.request(&mut batch).and_then(netlink::Answers::all) {
            Ok(_) => Ok(true),
            Err(netlink::Error::Refused(refusal)) if refusal.is_not_found() => Ok(false),
            Err(error) => Err(listing(|| format!("chain {chain} of table {table}"))(error)),
        }
    }
}

impl Kernel {
    /// The generation is the whole namespace's, and where other programs commit many times a second none
    /// lasts for as long as a large table takes to be read. What they commit is in their tables: this one is
    /// whole if two readings in a row are the same, but for what packets write into it.
    fn snapshot_among_others(&mut self, table: &TableId) -> Result<(Generation, Option<TableState>)> {
        let mut last: Option<Option<TableState>> = None;
        for _ in 0..READINGS {
            let generation = self.generation()?;
            match self.read_table(table) {
                Ok(state) if last.as_ref().is_some_and(|last| same(last.as_ref(), state.as_ref())) => {
                    return Ok((generation, state));
                }
                Ok(state) => last = Some(state),
                Err(error) if error.is_not_found() => last = None,
                Err(error) => return Err(error),
            }
        }
        Err(Error::Unstable(ATTEMPTS + READINGS))
    }

    fn send_chunk(&mut self, mut encoded: Encoded, transaction: &Transaction) -> Result<()> {
        encoded.end();
        self.send(encoded, transaction)
    }
}

/// Whether two readings of a table are the same, but for elements that packets write.
fn same(one: Option<&TableState>, other: Option<&TableState>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return one.is_none() && other.is_none() };
    let same_set = |a: &SetState, b: &SetState| a.set == b.set && (a.set.dynamic || a.elements == b.elements);
    one.table == other.table
        && one.chains == other.chains
        && one.sets.len() == other.sets.len()
        && one.sets.iter().all(|(name, set)| other.sets.get(name).is_some_and(|found| same_set(set, found)))
}

fn is_inconsistent(error: &Error) -> bool {
    let Error::List { source, .. } = error else { return false };
    matches!(source.inner().downcast_ref(), Some(netlink::Error::Inconsistent(_)))
}

fn cannot_open(source: netlink::Error) -> Error {
    failed("open an nfnetlink socket")(source)
}

fn failed(attempted: &'static str) -> impl FnOnce(netlink::Error) -> Error {
    move |source| Error::Socket { attempted, source: channel(source) }
}

fn listing(what: impl FnOnce() -> String) -> impl FnOnce(netlink::Error) -> Error {
    move |source| Error::List { what: what(), source: channel(source) }
}

fn channel(error: netlink::Error) -> ChannelError {
    ChannelError::new(error.errno().map(|errno| errno.0), error)
}

fn partial(chunks: usize, done: usize, total: usize, source: Error) -> Error {
    if chunks == 0 { source } else { Error::Partial { done, total, source: Box::new(source) } }
}

/// Says which change, and which element if the kernel told, was refused.
fn blame(encoded: &Encoded, message: usize, refusal: Refusal, transaction: &Transaction) -> Error {
    let origin = encoded.origin.get(message).cloned().flatten();
    let Some((index, part)) = origin else {
        // The frame of the batch: the generation, the privilege, or the check of all chains together.
        let operation = match transaction.ops() {
            [only] => only.to_string(),
            ops => format!("commit {} changes together, the first being: {}", ops.len(), ops[0]),
        };
        return Error::Refused { operation, index: None, element: None, source: refusal };
    };
    let op: &Op = &transaction.ops()[index];
    let element = part.zip(op.elements()).and_then(|(part, elements)| match (part.len(), refusal.offset) {
        (1, _) => Some(&elements[part.start]),
        (_, Some(offset)) => encode::element_at(op, part, offset as usize).map(|at| &elements[at]),
        _ => None,
    });
    let operation = element.map_or_else(|| op.to_string(), |element| op.describe_element(element));
    let element = element.map(|element| Box::new(element.key.clone()));
    Error::Refused { operation, index: Some(index), element, source: refusal }
}
