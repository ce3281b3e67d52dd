//! Netlink messages: a batch to send, and an iterator over what was received.

use crate::attr::{Reader, TooLong, Writer, align};
use crate::error::{Errno, Malformed, Refusal};

/// Flags of the netlink header, as in linux/netlink.h.
pub mod flags {
    /// It is a request. Set on everything that a [`Batch`](super::Batch) carries.
    pub const REQUEST: u16 = 0x1;
    /// Part of several.
    pub const MULTI: u16 = 0x2;
    /// Answer also on success.
    pub const ACK: u16 = 0x4;
    /// Send the resulting notification back to the asker, too.
    pub const ECHO: u16 = 0x8;
    /// A dump changed while it was made.
    pub const DUMP_INTR: u16 = 0x10;
    /// List everything.
    pub const DUMP: u16 = 0x300;
    /// Replace what is there.
    pub const REPLACE: u16 = 0x100;
    /// Fail if it is there.
    pub const EXCL: u16 = 0x200;
    /// Make it if it is not there.
    pub const CREATE: u16 = 0x400;
    /// Add to the end.
    pub const APPEND: u16 = 0x800;
    /// In an answer: only the request's header is repeated.
    pub const CAPPED: u16 = 0x100;
    /// In an answer: attributes with the kernel's words follow.
    pub const ACK_TLVS: u16 = 0x200;
}

/// Types of messages that every netlink family has, as in linux/netlink.h.
pub mod kind {
    /// Nothing.
    pub const NOOP: u16 = 1;
    /// An ack, or a refusal.
    pub const ERROR: u16 = 2;
    /// The end of a dump.
    pub const DONE: u16 = 3;
    /// Messages were lost.
    pub const OVERRUN: u16 = 4;
}

const HEADER: usize = 16;

const ERRMSG_MESSAGE: u16 = 1;
const ERRMSG_OFFSET: u16 = 2;

/// Requests that go to the kernel in one `sendmsg`, in this order.
///
/// The kernel carries out one after the other and does not stop at one that fails (nfnetlink, between its
/// batch begin and end messages, is all or nothing).
#[derive(Debug, Default, Clone)]
pub struct Batch {
    buffer: Vec<u8>,
    starts: Vec<usize>,
    too_long: Option<TooLong>,
}

impl Batch {
    /// A batch with nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request; `body` writes what follows the netlink header. Returns its place in the batch.
    pub fn push(&mut self, kind: u16, message_flags: u16, body: impl FnOnce(&mut Writer<'_>)) -> usize {
        let start = self.buffer.len();
        self.starts.push(start);
        self.buffer.extend_from_slice(&[0; HEADER]);
        let mut writer = Writer::new(&mut self.buffer);
        body(&mut writer);
        if let Err(error) = writer.finish() {
            self.too_long.get_or_insert(error);
        }
        let length = (self.buffer.len() - start) as u32;
        let header = &mut self.buffer[start..start + HEADER];
        header[0..4].copy_from_slice(&length.to_ne_bytes());
        header[4..6].copy_from_slice(&kind.to_ne_bytes());
        header[6..8].copy_from_slice(&(message_flags | flags::REQUEST).to_ne_bytes());
        self.starts.len() - 1
    }

    /// How many requests there are.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// How many bytes would be sent.
    pub fn bytes(&self) -> usize {
        self.buffer.len()
    }

    /// The requests as they are sent, but for sequence numbers and port.
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer
    }

    /// Empties it and keeps its memory.
    pub fn clear(&mut self) {
        self.buffer.clear();
        self.starts.clear();
        self.too_long = None;
    }

    /// Says whether every attribute fitted: what does not is not to be sent.
    pub fn check(&self) -> Result<(), TooLong> {
        self.too_long.map_or(Ok(()), Err)
    }

    /// Writes sequence numbers from `first` on, our port, and further flags for the last request.
    pub fn number(&mut self, first: u32, port: u32, last_flags: u16) {
        let last = self.starts.len().saturating_sub(1);
        for (index, &start) in self.starts.iter().enumerate() {
            let header = &mut self.buffer[start..start + HEADER];
            if index == last {
                let now = u16::from_ne_bytes([header[6], header[7]]);
                header[6..8].copy_from_slice(&(now | last_flags).to_ne_bytes());
            }
            header[8..12].copy_from_slice(&first.wrapping_add(index as u32).to_ne_bytes());
            header[12..16].copy_from_slice(&port.to_ne_bytes());
        }
    }

    /// The type of the attribute at `offset` of request `index`.
    pub fn attribute_at(&self, index: usize, offset: u32) -> Option<u16> {
        let at = self.starts.get(index)?.checked_add(offset as usize)?;
        let end = self.starts.get(index + 1).copied().unwrap_or(self.buffer.len());
        let bytes = self.buffer.get(at + 2..at + 4).filter(|_| at + 4 <= end)?;
        Some(u16::from_ne_bytes([bytes[0], bytes[1]]) & crate::attr::TYPE_MASK)
    }
}

/// One received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its type.
    pub kind: u16,
    /// Its flags.
    pub flags: u16,
    /// The sequence number of the request that it answers; 0 in a notification.
    pub sequence: u32,
    /// The port of the socket whose request it answers; mostly 0 in notifications.
    pub port: u32,
    /// What follows the netlink header.
    pub payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// The fixed header of `N` bytes, and the attributes after it.
    pub fn split<const N: usize>(&self) -> Result<([u8; N], Reader<'a>), Malformed> {
        let fixed = self.payload.get(..N).and_then(|bytes| bytes.try_into().ok());
        let fixed = fixed.ok_or(Malformed::Header { kind: self.kind })?;
        Ok((fixed, Reader::new(self.payload.get(align(N)..).unwrap_or(&[]))))
    }

    /// If this is an answer (ack, refusal, end of a dump): how it went. `None` for anything else.
    pub fn answer(&self) -> Option<Result<(), Refusal>> {
        if self.kind != kind::ERROR && self.kind != kind::DONE {
            return None;
        }
        let code = self.payload.get(..4).map_or(0, |b| i32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        if code == 0 {
            return Some(Ok(()));
        }
        let mut refusal =
            Refusal { errno: Errno(code.saturating_abs()), message: None, offset: None, attribute: None };
        if self.flags & flags::ACK_TLVS != 0 {
            for attr in Reader::new(self.extended()) {
                match attr.kind {
                    ERRMSG_MESSAGE => refusal.message = Some(attr.string()),
                    ERRMSG_OFFSET => refusal.offset = attr.u32().ok(),
                    _ => {}
                }
            }
        }
        Some(Err(refusal))
    }

    /// Where the extended ack's attributes begin: after the error code and the request as far as it is
    /// repeated.
    fn extended(&self) -> &'a [u8] {
        if self.kind == kind::DONE {
            return self.payload.get(4..).unwrap_or(&[]);
        }
        let request = match self.payload.get(4..8) {
            Some(b) if self.flags & flags::CAPPED == 0 => {
                align(u32::from_ne_bytes([b[0], b[1], b[2], b[3]]) as usize)
            }
            _ => HEADER,
        };
        self.payload.get(4usize.saturating_add(request)..).unwrap_or(&[])
    }
}

/// Iterates over the messages of one datagram.
#[derive(Debug, Clone)]
pub struct Messages<'a> {
    rest: &'a [u8],
}

impl<'a> Messages<'a> {
    /// Reads the messages in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let available = self.rest.len();
        let word = |at: usize| {
            let bytes = self.rest.get(at..at + 4)?;
            Some(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        let (Some(length), Some(kind_flags), Some(sequence), Some(port)) =
            (word(0), word(4), word(8), word(12))
        else {
            self.rest = &[];
            return Some(Err(Malformed::Message { claimed: HEADER, available }));
        };
        let length = length as usize;
        if length < HEADER || length > available {
            self.rest = &[];
            return Some(Err(Malformed::Message { claimed: length, available }));
        }
        let [a, b, c, d] = kind_flags.to_ne_bytes();
        let payload = &self.rest[HEADER..length];
        self.rest = self.rest.get(align(length)..).unwrap_or(&[]);
        Some(Ok(Message {
            kind: u16::from_ne_bytes([a, b]),
            flags: u16::from_ne_bytes([c, d]),
            sequence,
            port,
            payload,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            for message in Messages::new(&bytes).flatten() {
                let _ = message.answer();
                let _ = message.split::<16>();
            }
        }

        #[test]
        fn a_damaged_answer_never_panics(kind in 2u16..4, message_flags: u16,
            body in prop::collection::vec(any::<u8>(), 0..80)) {
            let message = Message { kind, flags: message_flags, sequence: 1, port: 2, payload: &body };
            prop_assert!(message.answer().is_some());
        }

        #[test]
        fn a_batch_reads_back(bodies in prop::collection::vec((16u16..100, any::<u16>(),
            prop::collection::vec(any::<u8>(), 0..50)), 0..8)) {
            let mut batch = Batch::new();
            for (kind, message_flags, body) in &bodies {
                batch.push(*kind, *message_flags, |writer| { writer.fixed(&[1, 2, 3, 4]).bytes(9, body); });
            }
            batch.number(70, 80, flags::ACK);
            let read: Vec<_> = Messages::new(&batch.buffer).collect::<Result<_, _>>().expect("well formed");
            prop_assert_eq!(read.len(), bodies.len());
            for (index, (message, (kind, message_flags, body))) in read.iter().zip(&bodies).enumerate() {
                let ack = if index + 1 == bodies.len() { flags::ACK } else { 0 };
                prop_assert_eq!((message.kind, message.flags), (*kind, *message_flags | flags::REQUEST |
                    ack));
                prop_assert_eq!((message.sequence, message.port), (70 + index as u32, 80));
                let (fixed, attrs) = message.split::<4>().expect("four bytes are there");
                prop_assert_eq!(fixed, [1, 2, 3, 4]);
                prop_assert_eq!(attrs.get(9).expect("written").value, body.as_slice());
                prop_assert_eq!(batch.attribute_at(index, 20), Some(9));
            }
        }
    }
}
