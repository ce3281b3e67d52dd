//! What nftables' notifications are about, and the number that moves on with each of its transactions.

use knit_nft::wire::{self, msg};
use knit_nft::{Family, Generation, TableId};

use crate::netlink::attr::Reader;
use crate::netlink::{Answers, Batch, Error, Message, Result, Socket};

/// The state that the rule set of the socket's namespace has now.
pub(crate) fn generation_by(socket: &mut Socket) -> Result<Generation> {
    let mut batch = Batch::new();
    batch.push(msg::GETGEN, 0, |w| {
        w.fixed(&[0; 4]);
    });
    let replies = socket.request(&mut batch).and_then(Answers::all)?;
    let number = replies.iter().find_map(|(_, kind, payload)| number(*kind, payload));
    number.ok_or(Error::NoAnswer)
}

/// The state that a transaction led to, if that is what a notification says.
pub(crate) fn new_generation(message: &Message<'_>) -> Option<Generation> {
    number(message.kind, message.payload)
}

/// The table that a notification is about: it is the first attribute of every object's.
pub(crate) fn table_of(message: &Message<'_>) -> Option<TableId> {
    if message.kind >> 8 != wire::SUBSYSTEM {
        return None;
    }
    let ([family, ..], attrs) = message.split::<4>().ok()?;
    let name = attrs.get(wire::table::NAME)?.string();
    Some(TableId::new(Family::from_number(family)?, name.as_str()))
}

fn number(kind: u16, payload: &[u8]) -> Option<Generation> {
    let attrs = Reader::new(payload.get(4..).filter(|_| kind == msg::NEWGEN)?);
    attrs.get(wire::gen_id::ID)?.u32_be().ok().map(Generation)
}
