//! ttrpc: requests and responses in a byte stream. A message is a header of ten bytes and its data.
//!
//! NRI has unary calls only: one request, one response with the same stream number, in any order.

use prost::Message as _;

use crate::wire::ttrpc::{Request, Response, Status};

/// The bytes before a message's data: length, stream, kind, flags.
pub const HEADER: usize = 10;

/// The longest data that a message may have.
pub const MAX_DATA: usize = 4 << 20;

/// Codes of a status, as gRPC numbers them.
pub mod code {
    /// Any error of a handler. A runtime takes "deadline exceeded" for a plugin that hangs, so that is never
    /// sent.
    pub const UNKNOWN: i32 = 2;
    /// What was sent cannot be read.
    pub const INVALID_ARGUMENT: i32 = 3;
    /// Too much at once.
    pub const RESOURCE_EXHAUSTED: i32 = 8;
    /// There is no such method. Runtimes fall back to `StateChange` for good when they see it.
    pub const UNIMPLEMENTED: i32 = 12;
}

/// A message, with its stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Which call it belongs to.
    pub stream: u32,
    /// The request or response.
    pub body: Body,
}

/// What a message is.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// A call.
    Request(Request),
    /// Its end.
    Response(Response),
}

/// Puts messages together from the bytes of one connection. It keeps one message at most, and grows with what
/// has arrived, not with what is announced.
#[derive(Debug, Default)]
pub struct Assembler {
    buffer: Vec<u8>,
}

/// The peer does not speak this protocol.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Garbled {
    /// More than a message may have.
    #[error("a message with {0} bytes of data is announced: at most {MAX_DATA} are allowed")]
    TooLong(usize),
    /// A kind of message that unary calls do not have.
    #[error("a message of kind {0} arrived: only requests (1) and responses (2) are known")]
    Kind(u8),
    /// Its data is not what its kind says.
    #[error("the data of a message cannot be decoded")]
    Data(#[source] prost::DecodeError),
}

// === impl Assembler ===

impl Assembler {
    /// Takes the next bytes of the connection, however they were cut, and gives the messages that they
    /// complete.
    ///
    /// # Errors
    /// When they are not messages. Nothing that follows can be read after that.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<Vec<Message>, Garbled> {
        let mut messages = Vec::new();
        loop {
            let wanted = match announced(&self.buffer)? {
                Some(length) => HEADER + length,
                None => HEADER,
            };
            let (now, later) = bytes.split_at(bytes.len().min(wanted - self.buffer.len()));
            self.buffer.extend_from_slice(now);
            bytes = later;
            if self.buffer.len() < wanted {
                return Ok(messages);
            }
            if announced(&self.buffer)?.is_some_and(|length| self.buffer.len() == HEADER + length) {
                messages.push(decode(&self.buffer)?);
                // A large one is not kept for the small ones that follow.
                self.buffer = Vec::new();
            }
        }
    }
}

/// How much data the message at the start of a buffer has, once its header is there.
fn announced(buffer: &[u8]) -> Result<Option<usize>, Garbled> {
    let Some([a, b, c, d]) = buffer.first_chunk().filter(|_| buffer.len() >= HEADER) else { return Ok(None) };
    let length = usize::try_from(u32::from_be_bytes([*a, *b, *c, *d])).unwrap_or(usize::MAX);
    if length > MAX_DATA {
        return Err(Garbled::TooLong(length));
    }
    Ok(Some(length))
}

fn decode(message: &[u8]) -> Result<Message, Garbled> {
    let (header, data) = message.split_at(HEADER);
    let stream = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
    let body = match header[8] {
        1 => Body::Request(Request::decode(data).map_err(Garbled::Data)?),
        2 => Body::Response(Response::decode(data).map_err(Garbled::Data)?),
        other => return Err(Garbled::Kind(other)),
    };
    Ok(Message { stream, body })
}

// === impl Message ===

impl Message {
    /// Its bytes.
    ///
    /// # Errors
    /// When it is longer than a message may be.
    pub fn encode(&self) -> Result<Vec<u8>, Garbled> {
        let (kind, length) = match &self.body {
            Body::Request(request) => (1, request.encoded_len()),
            Body::Response(response) => (2, response.encoded_len()),
        };
        let announced = u32::try_from(length).ok().filter(|_| length <= MAX_DATA);
        let announced = announced.ok_or(Garbled::TooLong(length))?;
        let mut bytes = Vec::with_capacity(HEADER + length);
        bytes.extend_from_slice(&announced.to_be_bytes());
        bytes.extend_from_slice(&self.stream.to_be_bytes());
        bytes.extend_from_slice(&[kind, 0]);
        match &self.body {
            Body::Request(request) => request.encode_raw(&mut bytes),
            Body::Response(response) => response.encode_raw(&mut bytes),
        }
        Ok(bytes)
    }
}

// === impl Response ===

impl Response {
    /// A call that succeeded.
    #[must_use]
    pub fn success(payload: &impl prost::Message) -> Self {
        Self { status: None, payload: payload.encode_to_vec() }
    }

    /// A call that failed.
    #[must_use]
    pub fn failure(code: i32, message: impl Into<String>) -> Self {
        Self { status: Some(Status { code, message: message.into() }), payload: Vec::new() }
    }

    /// Why it failed, if it did.
    #[must_use]
    pub fn error(&self) -> Option<&Status> {
        self.status.as_ref().filter(|status| status.code != 0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(stream: u32, payload: Vec<u8>) -> Message {
        let request = Request { service: "s".into(), method: "m".into(), payload, timeout_nano: 5 };
        Message { stream, body: Body::Request(request) }
    }

    fn header(length: u32, kind: u8) -> Vec<u8> {
        [&length.to_be_bytes()[..], &1_u32.to_be_bytes(), &[kind, 0]].concat()
    }

    #[test]
    fn what_is_not_a_message_is_told_apart() {
        let feed = |bytes: &[u8]| Assembler::default().feed(bytes);
        let most = u32::try_from(MAX_DATA).expect("a length");
        assert_eq!(feed(&header(most + 1, 1)), Err(Garbled::TooLong(MAX_DATA + 1)));
        assert_eq!(feed(&header(u32::MAX, 1)), Err(Garbled::TooLong(u32::MAX as usize)));
        assert_eq!(feed(&header(0, 3)), Err(Garbled::Kind(3)));
        assert!(matches!(feed(&[header(1, 2), vec![0xff]].concat()), Err(Garbled::Data(_))));
        assert_eq!(feed(&header(most, 1)), Ok(Vec::new()), "it may still come");
    }

    #[test]
    fn nothing_is_set_aside_for_what_is_only_announced() {
        let mut assembler = Assembler::default();
        let most = u32::try_from(MAX_DATA).expect("a length");
        assembler.feed(&header(most, 1)).expect("a header");
        assert!(assembler.buffer.capacity() < 1024);
    }

    #[test]
    fn a_response_without_data_is_success() {
        let messages = Assembler::default().feed(&header(0, 2)).expect("a message");
        let [Message { stream: 1, body: Body::Response(response) }] = &messages[..] else {
            panic!("{messages:?}")
        };
        assert_eq!(response.error(), None);
    }

    proptest! {
        #[test]
        fn messages_survive_however_they_are_cut(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 0..6),
            cut in 1_usize..4000,
        ) {
            let sent: Vec<Message> = (1..).zip(payloads).map(|(n, payload)| match n % 2 {
                0 => {
                    let failure = Response::failure(2, format!("{payload:?}"));
                    Message { stream: n, body: Body::Response(failure) }
                }
                _ => request(n, payload),
            }).collect();
            let bytes: Vec<u8> = sent.iter().flat_map(|m| m.encode().expect("bytes")).collect();
            let (mut assembler, mut received) = (Assembler::default(), Vec::new());
            for part in bytes.chunks(cut) {
                received.extend(assembler.feed(part).expect("messages"));
            }
            prop_assert_eq!(received, sent);
        }

        #[test]
        fn garbage_is_messages_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Assembler::default().feed(&bytes);
        }
    }
}
