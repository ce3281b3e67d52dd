//! The bytes of a ledger, and how to read them without trusting them.
//!
//! ```text
//! file   = header frame* header = "KNITLOG\n"  version: u32  crc32c of the 12 bytes before: u32 frame  =
//! length of the content: u32  crc32c of the content: u32  crc32c of the 8 bytes before: u32  content
//! ```
//!
//! Numbers are little-endian; the content is a JSON list of changes that hold together or not at all. A
//! killed writer leaves a prefix of a frame at the end. Because a frame's length has a checksum of its own,
//! that is never mistaken for damage in the middle, nor damage for that.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::Corruption;
use crate::ledger::Record;
use crate::unreadable::Unreadable;

/// The format that this code writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// The most that one frame holds.
pub(crate) const MAX_CONTENT: usize = 16 << 20;
pub(crate) const HEADER_LEN: usize = 16;
const FRAME_LEN: usize = 12;
const MAGIC: &[u8; 8] = b"KNITLOG\n";

/// One change.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Change<R> {
    /// This record is there now, in place of one with the same key.
    Put(R),
    /// No record with this key is there any more.
    Remove(String),
}

/// One change as it was read.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Found<R> {
    /// This record is there now, in place of one with the same key.
    Put(R),
    /// This one is there, too, and cannot be read.
    Unreadable(Unreadable),
    /// No record with this key is there any more.
    Remove(String),
}

/// What was found in a ledger's bytes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Scan {
    /// All of it is sound.
    Whole,
    /// The last write was cut off: everything before this byte is sound.
    TornTail {
        /// Where the sound part ends.
        sound: u64,
    },
    /// Somebody else damaged it: everything before this byte is sound.
    Corrupt {
        /// Where the sound part ends.
        sound: u64,
        /// What is wrong.
        why: Corruption,
    },
    /// A newer program wrote it; nothing was read.
    Newer {
        /// Its format.
        version: u32,
    },
}

/// The first bytes of each ledger.
pub(crate) fn header(version: u32) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..12]);
    bytes[12..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Appends one frame with these changes to a buffer.
pub(crate) fn encode<R: Serialize>(
    buffer: &mut Vec<u8>,
    changes: &[Change<R>],
) -> Result<usize, serde_json::Error> {
    let start = buffer.len();
    buffer.extend_from_slice(&[0; FRAME_LEN]);
    serde_json::to_writer(&mut *buffer, changes)?;
    let content = &buffer[start + FRAME_LEN..];
    let len = content.len();
    let crc = crc32c::crc32c(content);
    // A length beyond 32 bits is beyond MAX_CONTENT, which the caller refuses.
    buffer[start..start + 4].copy_from_slice(&(len as u32).to_le_bytes());
    buffer[start + 4..start + 8].copy_from_slice(&crc.to_le_bytes());
    let crc = crc32c::crc32c(&buffer[start..start + 8]);
    buffer[start + 8..start + FRAME_LEN].copy_from_slice(&crc.to_le_bytes());
    Ok(len)
}

/// Reads a ledger's bytes up to their end or to the first thing that is wrong. `apply` sees each change in
/// order; a batch that is not sound is not seen at all. A record that is sound and cannot be read is seen as
/// what it is, and hides none of the others.
pub fn scan<R: Record>(bytes: &[u8], mut apply: impl FnMut(Found<R>)) -> Scan {
    let Some((head, _)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        return Scan::Corrupt { sound: 0, why: Corruption::Header };
    };
    let version = number(&head[8..]);
    if *head != header(version) {
        return Scan::Corrupt { sound: 0, why: Corruption::Header };
    }
    if version > VERSION {
        return Scan::Newer { version };
    }
    let mut offset = HEADER_LEN;
    while offset < bytes.len() {
        let at = offset as u64;
        let Some((frame, rest)) = bytes[offset..].split_first_chunk::<FRAME_LEN>() else {
            return Scan::TornTail { sound: at };
        };
        let len = number(frame) as usize;
        if crc32c::crc32c(&frame[..8]) != number(&frame[8..]) || len > MAX_CONTENT {
            return Scan::Corrupt { sound: at, why: Corruption::Frame { at } };
        }
        let Some(content) = rest.get(..len) else {
            return Scan::TornTail { sound: at };
        };
        if crc32c::crc32c(content) != number(&frame[4..]) {
            return Scan::Corrupt { sound: at, why: Corruption::Checksum { at } };
        }
        let Ok(changes) = serde_json::from_slice::<Vec<Change<&RawValue>>>(content) else {
            return Scan::Corrupt { sound: at, why: Corruption::Content { at } };
        };
        for change in changes {
            apply(match change {
                Change::Remove(key) => Found::Remove(key),
                Change::Put(text) => match serde_json::from_str(text.get()) {
                    Ok(record) => Found::Put(record),
                    Err(why) => Found::Unreadable(Unreadable::new::<R>(text, &why)),
                },
            });
        }
        offset += FRAME_LEN + len;
    }
    Scan::Whole
}

/// The number in the first four bytes.
fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |chunk| u32::from_le_bytes(*chunk))
}
