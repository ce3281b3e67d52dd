//! Clients whose `:authority` is the path of the socket. gRPC's libraries for C, Python and Go put the path
//! there, percent-encoded, when they dial a unix socket by it; the HTTP/2 library below us takes that for no
//! authority at all and resets the stream. On a unix socket nobody reads it, so it is replaced on its way in.
//!
//! Only the first frame of each header block is looked at, and in it only literals whose name is
//! `:authority`. Everything else passes as it came, and what cannot be understood is left to the HTTP/2
//! library to refuse.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// A client's connection, with an authority that is one.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    filter: Filter,
    /// What was read and filtered, and not yet given on.
    ready: Vec<u8>,
    given: usize,
}

/// What stands in for the client's authority. One character: so the entry in the header table of our side is
/// never larger than that in the client's, and nothing is dropped from ours that the client still refers to.
const AUTHORITY: &[u8] = b"k";

/// `:authority` in the static table, as text, and in HPACK's Huffman code.
const INDEX: usize = 1;
const NAME: &[u8] = b":authority";
const NAME_HUFFMAN: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

const PREFACE: usize = 24;
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 0x1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Larger frames than this are refused by our side, which never said that it takes them.
const MAX_FRAME: usize = 16_384;

/// What comes in, cut into frames.
#[derive(Debug)]
struct Filter {
    /// This many bytes more pass as they come.
    pass: usize,
    /// The beginning of a frame that is not complete.
    held: Vec<u8>,
}

// === impl Client ===

impl Client {
    /// The connection of a client that was accepted.
    #[must_use]
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, filter: Filter { pass: PREFACE, held: Vec::new() }, ready: Vec::new(), given: 0 }
    }
}

impl Connected for Client {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.given == this.ready.len() {
            let mut bytes = [0; 8 << 10];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            this.ready.clear();
            this.given = 0;
            if read.filled().is_empty() {
                // The end; what was held back of a frame that was cut off goes first.
                this.ready.append(&mut this.filter.held);
                if this.ready.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                break;
            }
            this.filter.take(read.filled(), &mut this.ready);
        }
        let rest = &this.ready[this.given..];
        let now = rest.len().min(out.remaining());
        out.put_slice(&rest[..now]);
        this.given += now;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Client {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

// === impl Filter ===

impl Filter {
    /// Takes what came, and puts what goes on behind `out`.
    fn take(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            if self.pass > 0 {
                let (now, rest) = bytes.split_at(self.pass.min(bytes.len()));
                out.extend_from_slice(now);
                self.pass -= now.len();
                bytes = rest;
                continue;
            }
            let wanted = match self.held.get(..FRAME_HEADER) {
                None => FRAME_HEADER,
                Some(header) => FRAME_HEADER + payload(header),
            };
            let (now, rest) = bytes.split_at((wanted - self.held.len()).min(bytes.len()));
            self.held.extend_from_slice(now);
            bytes = rest;
            if self.held.len() < FRAME_HEADER {
                continue;
            }
            let length = payload(&self.held);
            if self.held[3] != HEADERS || length > MAX_FRAME {
                self.pass = length;
                out.append(&mut self.held);
            } else if self.held.len() == FRAME_HEADER + length {
                match rewrite(&self.held) {
                    Some(frame) => out.extend_from_slice(&frame),
                    None => out.extend_from_slice(&self.held),
                }
                self.held.clear();
            }
        }
    }
}

/// What our side reads of what a client sends, where it arrives in pieces of so many bytes.
#[cfg(feature = "testing")]
#[must_use]
pub fn filtered(sent: &[u8], piece: usize) -> Vec<u8> {
    let (mut filter, mut out) = (Filter { pass: PREFACE, held: Vec::new() }, Vec::new());
    sent.chunks(piece.max(1)).for_each(|bytes| filter.take(bytes, &mut out));
    assert!(filter.held.len() < FRAME_HEADER + MAX_FRAME, "no more than a frame is held back");
    out.append(&mut filter.held);
    out
}

/// The length of a frame's payload.
fn payload(header: &[u8]) -> usize {
    usize::from(header[0]) << 16 | usize::from(header[1]) << 8 | usize::from(header[2])
}

/// A HEADERS frame with another authority; none if it has none, or cannot be read.
fn rewrite(frame: &[u8]) -> Option<Vec<u8>> {
    let flags = frame[4];
    let mut start = FRAME_HEADER;
    let mut end = frame.len();
    if flags & PADDED != 0 {
        end = end.checked_sub(usize::from(*frame.get(start)?))?;
        start += 1;
    }
    if flags & PRIORITY != 0 {
        start += 5;
    }
    let block = frame.get(start..end)?;
    let mut at = 0;
    while at < block.len() {
        let (value, next) = representation(block, at)?;
        if let Some(from) = value {
            let mut new = frame[..start + from].to_vec();
            new.push(u8::try_from(AUTHORITY.len()).ok()?);
            new.extend_from_slice(AUTHORITY);
            new.extend_from_slice(&frame[start + next..]);
            let length = new.len() - FRAME_HEADER;
            new[..3].copy_from_slice(&u32::try_from(length).ok()?.to_be_bytes()[1..]);
            return Some(new);
        }
        at = next;
    }
    None
}

/// One representation of a header block (RFC 7541, 6): where the value of an authority begins, if it is one,
/// and where the next one begins. None if it is not complete.
fn representation(block: &[u8], at: usize) -> Option<(Option<usize>, usize)> {
    let first = *block.get(at)?;
    let bits = match first {
        0x80.. => return Some((None, integer(block, at, 7)?.1)),
        0x40.. => 6,
        0x20.. => return Some((None, integer(block, at, 5)?.1)),
        _ => 4,
    };
    let (index, mut at) = integer(block, at, bits)?;
    let mut authority = index == INDEX;
    if index == 0 {
        let huffman = block.get(at)? & 0x80 != 0;
        let (from, next) = string(block, at)?;
        authority = block[from..next] == *if huffman { NAME_HUFFMAN } else { NAME };
        at = next;
    }
    let (from, next) = string(block, at)?;
    Some(((authority && from < next).then_some(at), next))
}

/// A string: where it begins, and where it ends.
fn string(block: &[u8], at: usize) -> Option<(usize, usize)> {
    let (length, from) = integer(block, at, 7)?;
    let end = from.checked_add(length)?;
    (end <= block.len()).then_some((from, end))
}

/// An integer with a prefix of some bits (RFC 7541, 5.1), and where it ends.
fn integer(block: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
    let limit = (1 << bits) - 1;
    let value = usize::from(*block.get(at)?) & limit;
    if value < limit {
        return Some((value, at + 1));
    }
    let (mut value, mut shift) = (limit, 0);
    for (offset, byte) in block.get(at + 1..)?.iter().enumerate().take(4) {
        value = value.checked_add(usize::from(byte & 0x7f) << shift)?;
        if byte & 0x80 == 0 {
            return Some((value, at + 2 + offset));
        }
        shift += 7;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// What comes out, however the bytes are cut.
    fn filtered(input: &[u8]) -> Vec<u8> {
        let whole = {
            let mut out = Vec::new();
            Filter { pass: 0, held: Vec::new() }.take(input, &mut out);
            out
        };
        for size in [1, 2, 7, 11] {
            let mut filter = Filter { pass: 0, held: Vec::new() };
            let mut out = Vec::new();
            input.chunks(size).for_each(|chunk| filter.take(chunk, &mut out));
            assert_eq!(out, whole, "in pieces of {size}");
        }
        whole
    }

    fn string(text: &[u8]) -> Vec<u8> {
        [&[u8::try_from(text.len()).expect("short")], text].concat()
    }

    const PATH: &[u8] = b"%2Frun%2Fknit%2Fkni.sock";

    #[test]
    fn an_authority_is_replaced_in_every_form() {
        let rest = [&[0x83, 0x86][..], &[0x44], &string(b"/kni/List")].concat();
        for name in [
            vec![0x41],
            vec![0x01],
            vec![0x11],
            [&[0x40][..], &string(NAME)].concat(),
            [&[0x40, 0x88][..], NAME_HUFFMAN].concat(),
        ] {
            let block = |value: &[u8]| {
                [&rest[..], &name, &string(value), &[0x5f], &string(b"application/grpc")].concat()
            };
            let data = frame(0, 1, b"hello");
            let sent = [frame(HEADERS, 4, &block(PATH)), data.clone()].concat();
            assert_eq!(filtered(&sent), [frame(HEADERS, 4, &block(AUTHORITY)), data].concat(), "{name:x?}");
        }
        // With padding and priority around it.
        let block = |value: &[u8]| [&[3, 0, 0, 0, 0, 9][..], &[0x41], &string(value), &[0; 3]].concat();
        let sent = frame(HEADERS, 4 | PADDED | PRIORITY, &block(PATH));
        assert_eq!(filtered(&sent), frame(HEADERS, 4 | PADDED | PRIORITY, &block(AUTHORITY)));
    }

    #[test]
    fn all_else_passes_as_it_came() {
        for kept in [
            frame(4, 0, &[]),
            frame(0, 0, &[0x41, 0x03, b'%', b'2', b'F']),
            frame(HEADERS, 4, &[0x83, 0xbe]),
            // Not complete, or nonsense.
            frame(HEADERS, 4, &[0x41, 0x7f]),
            frame(HEADERS, 4, &[0x41, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff]),
            frame(HEADERS, 4 | PADDED, &[200, 0x41, 1]),
            frame(HEADERS, 4 | PADDED, &[]),
            frame(HEADERS, 4 | PRIORITY, &[1, 2]),
            frame(HEADERS, 4, &[]),
        ] {
            assert_eq!(filtered(&kept), kept);
        }
    }

    /// The frames of a stream: what kind each is, and what is in it.
    fn frames(mut stream: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut found = Vec::new();
        while !stream.is_empty() {
            let (header, rest) = stream.split_at(FRAME_HEADER);
            let (body, rest) = rest.split_at(payload(header));
            found.push((header[3..].to_vec(), body.to_vec()));
            stream = rest;
        }
        found
    }

    /// Pieces of header blocks, right and wrong ones.
    fn piece() -> impl Strategy<Value = Vec<u8>> {
        let name = prop_oneof![
            Just(vec![0x41]),
            Just(vec![0x01]),
            Just(vec![0x44]),
            Just([&[0x40][..], &string(NAME)].concat()),
            Just([&[0x00, 0x88][..], NAME_HUFFMAN].concat()),
        ];
        let value = prop::collection::vec(any::<u8>(), 0..20);
        prop_oneof![
            3 => (name, value).prop_map(|(name, value)| [name, string(&value)].concat()),
            1 => prop::collection::vec(any::<u8>(), 0..12),
            1 => Just(vec![0x83]),
        ]
    }

    fn any_frame() -> impl Strategy<Value = Vec<u8>> {
        let body = prop::collection::vec(piece(), 0..5).prop_map(|pieces| pieces.concat());
        let kind = prop_oneof![2 => Just(HEADERS), 1 => any::<u8>()];
        (kind, any::<u8>(), body).prop_map(|(kind, flags, body)| frame(kind, flags, &body))
    }

    proptest! {
        #[test]
        fn nothing_but_an_authority_changes(sent in prop::collection::vec(any_frame(), 0..5)) {
            let sent = sent.concat();
            let passed = filtered(&sent);
            let (before, after) = (frames(&sent), frames(&passed));
            prop_assert_eq!(before.len(), after.len());
            for ((header, body), (new_header, new_body)) in before.iter().zip(&after) {
                prop_assert_eq!(header, new_header);
                // A value is never longer than it was, and what is around it is as it came.
                let same = body.iter().zip(new_body).take_while(|(a, b)| a == b).count();
                let rest = &new_body[same..];
                prop_assert!(header[0] == HEADERS || body == new_body);
                prop_assert!(new_body.len() <= body.len());
                prop_assert!(rest.is_empty() || rest.iter().any(|byte| AUTHORITY.contains(byte)));
            }
            prop_assert_eq!(filtered(&passed), passed, "there is nothing left to replace");
        }

        #[test]
        fn any_bytes_are_passed_on_or_held_back(sent in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut filter = Filter { pass: 0, held: Vec::new() };
            let mut out = Vec::new();
            filter.take(&sent, &mut out);
            prop_assert!(out.len() + filter.held.len() <= sent.len());
            prop_assert!(filter.held.len() < FRAME_HEADER + MAX_FRAME);
            filtered(&sent);
        }
    }
}
