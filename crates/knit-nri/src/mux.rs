//! The multiplexer: several byte streams ("connections") over one socket.
//!
//! A frame is a connection's number, a length and as many bytes, and means nothing but more bytes of that
//! connection: nobody opens or closes one. Nothing is kept of a frame but its header, so that a peer decides
//! over no memory here.

/// The connection on which the runtime calls the plugin.
pub const PLUGIN: u32 = 1;

/// The connection on which the plugin calls the runtime.
pub const RUNTIME: u32 = 2;

/// The bytes before a frame's content.
pub const HEADER: usize = 8;

/// The longest content that runtimes send and take: the largest ttrpc message with its header.
pub const MAX_CONTENT: usize = crate::ttrpc::HEADER + crate::ttrpc::MAX_DATA;

/// The longest frame that may begin with a message's header. Runtimes written in Go read a header through a
/// buffer of this size, and lose the connection over a frame that does not fit into it.
pub const MAX_FIRST: usize = 4096;

/// Takes a socket's bytes apart.
#[derive(Debug, Default)]
pub struct Demux {
    header: [u8; HEADER],
    /// How much of the next header has arrived.
    arrived: usize,
    /// The frame that is being read, and how much of its content is missing.
    frame: Option<(u32, usize)>,
}

/// The peer does not speak this protocol.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a frame of {length} bytes arrived on connection {connection}: at most {MAX_CONTENT} are allowed")]
pub struct TooLong {
    /// The frame's connection.
    pub connection: u32,
    /// How long it says that it is.
    pub length: usize,
}

// === impl Demux ===

impl Demux {
    /// Takes the next bytes of the socket, however they were cut, and passes each connection's on.
    ///
    /// # Errors
    /// When a frame is too long, or when `sink` fails. Nothing that follows can be read after that.
    pub fn feed<E: From<TooLong>>(
        &mut self,
        mut bytes: &[u8],
        mut sink: impl FnMut(u32, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while !bytes.is_empty() {
            match &mut self.frame {
                Some((connection, missing)) => {
                    let (now, later) = bytes.split_at(bytes.len().min(*missing));
                    *missing -= now.len();
                    let connection = *connection;
                    if *missing == 0 {
                        self.frame = None;
                    }
                    bytes = later;
                    sink(connection, now)?;
                }
                None => {
                    let (now, later) = bytes.split_at(bytes.len().min(HEADER - self.arrived));
                    self.header[self.arrived..self.arrived + now.len()].copy_from_slice(now);
                    self.arrived += now.len();
                    bytes = later;
                    if self.arrived == HEADER {
                        self.arrived = 0;
                        self.begin()?;
                    }
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), TooLong> {
        let [a, b, c, d, e, f, g, h] = self.header;
        let connection = u32::from_be_bytes([a, b, c, d]);
        let length = usize::try_from(u32::from_be_bytes([e, f, g, h])).unwrap_or(usize::MAX);
        if length > MAX_CONTENT {
            return Err(TooLong { connection, length });
        }
        self.frame = (length > 0).then_some((connection, length));
        Ok(())
    }
}

/// Frames that carry one ttrpc message, as runtimes written in Go can read them: in one frame if it is short,
/// its header alone in one and the rest in another otherwise.
///
/// # Errors
/// When the message is longer than any frame may be.
pub fn frames(connection: u32, message: &[u8]) -> Result<Vec<u8>, TooLong> {
    if message.len() > MAX_CONTENT {
        return Err(TooLong { connection, length: message.len() });
    }
    let first = if message.len() > MAX_FIRST { crate::ttrpc::HEADER } else { message.len() };
    let mut bytes = Vec::with_capacity(message.len() + 2 * HEADER);
    let (header, rest) = message.split_at(first);
    for part in [header, rest].into_iter().filter(|part| !part.is_empty()) {
        bytes.extend_from_slice(&connection.to_be_bytes());
        let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(part);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq)]
    struct Broken;

    impl From<TooLong> for Broken {
        fn from(_: TooLong) -> Self {
            Self
        }
    }

    fn streams(bytes: &[u8], cut: usize) -> Result<BTreeMap<u32, Vec<u8>>, Broken> {
        let (mut demux, mut streams) = (Demux::default(), BTreeMap::<u32, Vec<u8>>::new());
        for part in bytes.chunks(cut.max(1)) {
            demux.feed::<Broken>(part, |connection, bytes| {
                streams.entry(connection).or_default().extend_from_slice(bytes);
                Ok(())
            })?;
        }
        Ok(streams)
    }

    #[test]
    fn a_frame_that_is_too_long_ends_it_before_its_content_arrives() {
        let length = u32::try_from(MAX_CONTENT + 1).expect("a length");
        let mut bytes = 1_u32.to_be_bytes().to_vec();
        bytes.extend(length.to_be_bytes());
        assert_eq!(streams(&bytes, 3), Err(Broken));
        assert!(frames(1, &vec![0; MAX_CONTENT + 1]).is_err());
    }

    #[test]
    fn no_frame_that_begins_a_message_is_too_long_for_go() {
        for length in [10, 4096, 4097, 100_000, MAX_CONTENT] {
            let bytes = frames(2, &vec![7; length]).expect("frames");
            let first = u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            assert!(usize::try_from(first).expect("a length") <= MAX_FIRST, "{length}");
            assert_eq!(streams(&bytes, 1000).expect("streams")[&2].len(), length);
        }
    }

    #[test]
    fn an_empty_frame_is_nothing() {
        let mut bytes = vec![0, 0, 0, 9, 0, 0, 0, 0];
        bytes.extend(frames(1, b"abc").expect("frames"));
        assert_eq!(streams(&bytes, 2).expect("streams"), BTreeMap::from([(1, b"abc".to_vec())]));
    }

    proptest! {
        #[test]
        fn what_is_sent_arrives_however_it_is_cut(
            messages in prop::collection::vec((1_u32..4, prop::collection::vec(any::<u8>(), 0..9000)), 0..6),
            cut in 1_usize..5000,
        ) {
            let (mut bytes, mut expected) = (Vec::new(), BTreeMap::<u32, Vec<u8>>::new());
            for (connection, message) in &messages {
                bytes.extend(frames(*connection, message).expect("frames"));
                if !message.is_empty() {
                    expected.entry(*connection).or_default().extend(message);
                }
            }
            prop_assert_eq!(streams(&bytes, cut).expect("streams"), expected);
        }

        #[test]
        fn garbage_is_bytes_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            cut in 1_usize..50,
        ) {
            let whole = streams(&bytes, bytes.len());
            prop_assert_eq!(streams(&bytes, cut).is_ok(), whole.is_ok());
        }
    }
}
