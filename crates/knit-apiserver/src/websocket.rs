//! As much of WebSocket (RFC 6455) as `kubectl exec` needs of a server: the handshake, and binary messages on
//! an upgraded connection.

use std::io;

use base64::Engine as _;
use bytes::{BufMut as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// What the protocol adds to a key before it is hashed.
const MAGIC: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// The longest message that is read.
const MAX_MESSAGE: usize = 1 << 20;

const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The `Sec-WebSocket-Accept` that answers a `Sec-WebSocket-Key`.
pub fn accept(key: &str) -> String {
    let digest = ring::digest::digest(
        &ring::digest::SHA1_FOR_LEGACY_USE_ONLY,
        format!("{}{MAGIC}", key.trim()).as_bytes(),
    );
    base64::engine::general_purpose::STANDARD.encode(digest.as_ref())
}

/// What came from the other side.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A message.
    Message(Vec<u8>),
    /// It wants to know whether anybody is there; what it sent goes back with [`send_pong`].
    Ping(Vec<u8>),
    /// It is through.
    Closed,
}

/// Reads frames until there is something to act on.
pub async fn receive(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Incoming> {
    let mut message = Vec::new();
    loop {
        let mut head = [0; 2];
        if let Err(error) = reader.read_exact(&mut head).await {
            return if error.kind() == io::ErrorKind::UnexpectedEof {
                Ok(Incoming::Closed)
            } else {
                Err(error)
            };
        }
        let (last, code) = (head[0] & 0x80 != 0, head[0] & 0x0f);
        let length = match head[1] & 0x7f {
            126 => u64::from(reader.read_u16().await?),
            127 => reader.read_u64().await?,
            short => u64::from(short),
        };
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length.saturating_add(message.len()) > MAX_MESSAGE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message of more than 1 MiB"));
        }
        if head[1] & 0x80 == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a client's frame without a mask"));
        }
        let mut mask = [0; 4];
        reader.read_exact(&mut mask).await?;
        let mut payload = vec![0; length];
        reader.read_exact(&mut payload).await?;
        for (byte, mask) in payload.iter_mut().zip(mask.iter().cycle()) {
            *byte ^= mask;
        }
        match code {
            CONTINUATION | TEXT | BINARY => {
                message.append(&mut payload);
                if last {
                    return Ok(Incoming::Message(message));
                }
            }
            CLOSE => return Ok(Incoming::Closed),
            PING => return Ok(Incoming::Ping(payload)),
            PONG => {}
            other => {
                let why = format!("a frame with the unknown code {other}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        }
    }
}

async fn send(writer: &mut (impl AsyncWrite + Unpin), code: u8, parts: &[&[u8]]) -> io::Result<()> {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    let mut frame = BytesMut::with_capacity(length + 10);
    frame.put_u8(0x80 | code);
    match length {
        0..126 => frame.put_u8(length as u8),
        126..=0xffff => {
            frame.put_u8(126);
            frame.put_u16(length as u16);
        }
        _ => {
            frame.put_u8(127);
            frame.put_u64(length as u64);
        }
    }
    parts.iter().for_each(|part| frame.put_slice(part));
    writer.write_all(&frame).await?;
    writer.flush().await
}

/// Sends a binary message on one of the channels of Kubernetes' remote commands: its number comes first.
pub async fn send_on(writer: &mut (impl AsyncWrite + Unpin), channel: u8, data: &[u8]) -> io::Result<()> {
    send(writer, BINARY, &[&[channel], data]).await
}

/// Answers a ping.
pub async fn send_pong(writer: &mut (impl AsyncWrite + Unpin), data: &[u8]) -> io::Result<()> {
    send(writer, PONG, &[data]).await
}

/// Says goodbye, with the code for a normal end.
pub async fn send_close(writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    send(writer, CLOSE, &[&1000_u16.to_be_bytes()]).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handshake_of_the_rfc() {
        assert_eq!(accept("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[tokio::test]
    async fn masked_fragments_become_one_message() {
        let mask = [1, 2, 3, 4];
        let frame = |head: u8, text: &[u8]| {
            let mut bytes = vec![head, 0x80 | text.len() as u8];
            bytes.extend(mask);
            bytes.extend(text.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
            bytes
        };
        let all = [
            frame(BINARY, b"\x00he"),
            frame(0x80 | PONG, b""),
            frame(0x80, b"llo"),
            frame(0x80 | PING, b"p"),
        ]
        .concat();
        let mut reader = all.as_slice();
        assert_eq!(receive(&mut reader).await.unwrap(), Incoming::Message(b"\x00hello".to_vec()));
        assert_eq!(receive(&mut reader).await.unwrap(), Incoming::Ping(b"p".to_vec()));
        assert_eq!(receive(&mut reader).await.unwrap(), Incoming::Closed);
        let unmasked = [0x82, 1, 0];
        assert!(receive(&mut unmasked.as_slice()).await.is_err());
    }

    #[tokio::test]
    async fn lengths_in_all_three_forms() {
        for length in [1, 200, 70_000] {
            let mut out = Vec::new();
            send_on(&mut out, 1, &vec![7; length]).await.unwrap();
            let head = match length {
                1 => 2,
                200 => 4,
                _ => 10,
            };
            assert_eq!(out.len(), head + 1 + length);
            assert_eq!(out[head], 1, "the channel comes first");
        }
    }
}
