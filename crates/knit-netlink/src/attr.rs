//! Netlink attributes: a writer that appends to one buffer, and a reader that never panics.
//!
//! A streaming writer costs no allocation per attribute and can nest without measuring first, which matters
//! where a batch carries thousands of set elements. Numbers are in the machine's order unless the name says
//! `_be`.

use crate::error::Malformed;

/// Attribute carries further attributes.
pub const NESTED: u16 = 0x8000;
/// Attribute value is in network byte order (set by some families, ignored by all).
pub const NET_BYTEORDER: u16 = 0x4000;
/// What remains of the type without the two flags.
pub const TYPE_MASK: u16 = 0x3fff;

const HEADER: usize = 4;

/// Rounds up to netlink's alignment of 4.
pub const fn align(length: usize) -> usize {
    (length + 3) & !3
}

/// Appends attributes (and fixed headers) to a buffer.
///
/// An attribute's length field has 16 bits. What does not fit is remembered and makes [`Writer::finish`]
/// fail, so that a message is refused before it is sent instead of being cut.
#[derive(Debug)]
pub struct Writer<'a> {
    buffer: &'a mut Vec<u8>,
    too_long: Option<TooLong>,
}

/// An attribute is longer than its 16-bit length field can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("attribute {kind} would be {length} bytes long, 65535 is the most that fits; split the message")]
pub struct TooLong {
    /// The attribute's type.
    pub kind: u16,
    /// Its length with header.
    pub length: usize,
}

impl<'a> Writer<'a> {
    /// A writer that appends to `buffer`, which must end at a multiple of 4 bytes.
    pub fn new(buffer: &'a mut Vec<u8>) -> Self {
        debug_assert_eq!(buffer.len() % 4, 0, "attributes start aligned");
        Self { buffer, too_long: None }
    }

    /// Says whether everything fitted.
    pub fn finish(self) -> Result<(), TooLong> {
        self.too_long.map_or(Ok(()), Err)
    }

    /// Bytes written so far, everything before this writer included.
    pub fn position(&self) -> usize {
        self.buffer.len()
    }

    /// A fixed header: raw bytes without an attribute header, padded to 4.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        self.buffer.extend_from_slice(bytes);
        self.pad();
        self
    }

    /// So many bytes without an attribute header, as `fill` writes them, padded to 4: a message body that
    /// somebody else's type writes.
    pub fn raw(&mut self, length: usize, fill: impl FnOnce(&mut [u8])) -> &mut Self {
        let start = self.buffer.len();
        self.buffer.resize(start + length, 0);
        fill(&mut self.buffer[start..]);
        self.pad();
        self
    }

    /// An attribute with these bytes.
    pub fn bytes(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let length = HEADER + value.len();
        let field = self.length_field(kind, length);
        self.buffer.extend_from_slice(&field.to_ne_bytes());
        self.buffer.extend_from_slice(&kind.to_ne_bytes());
        self.buffer.extend_from_slice(value);
        self.pad();
        self
    }

    /// An attribute without a value: it says something by being there.
    pub fn flag(&mut self, kind: u16) -> &mut Self {
        self.bytes(kind, &[])
    }

    /// One byte.
    pub fn u8(&mut self, kind: u16, value: u8) -> &mut Self {
        self.bytes(kind, &[value])
    }

    /// A 16-bit number in the machine's order.
    pub fn u16(&mut self, kind: u16, value: u16) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// A 32-bit number in the machine's order.
    pub fn u32(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// A signed 32-bit number in the machine's order.
    pub fn i32(&mut self, kind: u16, value: i32) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// A 64-bit number in the machine's order.
    pub fn u64(&mut self, kind: u16, value: u64) -> &mut Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// A 16-bit number in network order.
    pub fn u16_be(&mut self, kind: u16, value: u16) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// A 32-bit number in network order.
    pub fn u32_be(&mut self, kind: u16, value: u32) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// A 64-bit number in network order.
    pub fn u64_be(&mut self, kind: u16, value: u64) -> &mut Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Text, with the NUL at its end that the kernel's string attributes have.
    pub fn string(&mut self, kind: u16, value: &str) -> &mut Self {
        let length = HEADER + value.len() + 1;
        let field = self.length_field(kind, length);
        self.buffer.extend_from_slice(&field.to_ne_bytes());
        self.buffer.extend_from_slice(&kind.to_ne_bytes());
        self.buffer.extend_from_slice(value.as_bytes());
        self.buffer.push(0);
        self.pad();
        self
    }

    /// An attribute that holds what `fill` writes. The nested flag is set.
    pub fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Writer<'_>)) -> &mut Self {
        self.nested_raw(kind | NESTED, fill)
    }

    /// Like [`nested`](Self::nested) without the nested flag, for the attributes where the kernel wants it
    /// absent.
    pub fn nested_raw(&mut self, kind: u16, fill: impl FnOnce(&mut Writer<'_>)) -> &mut Self {
        let start = self.buffer.len();
        self.buffer.extend_from_slice(&[0; HEADER]);
        let mut inner = Writer { buffer: self.buffer, too_long: self.too_long };
        fill(&mut inner);
        self.too_long = inner.too_long;
        let length = self.buffer.len() - start;
        let field = self.length_field(kind, length);
        self.buffer[start..start + 2].copy_from_slice(&field.to_ne_bytes());
        self.buffer[start + 2..start + 4].copy_from_slice(&kind.to_ne_bytes());
        self
    }

    fn length_field(&mut self, kind: u16, length: usize) -> u16 {
        u16::try_from(length).unwrap_or_else(|_| {
            self.too_long.get_or_insert(TooLong { kind: kind & TYPE_MASK, length });
            u16::MAX
        })
    }

    fn pad(&mut self) {
        self.buffer.resize(align(self.buffer.len()), 0);
    }
}

/// One attribute as read: its type without flags, and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr<'a> {
    /// The type, without the nested and byte-order flags.
    pub kind: u16,
    /// The value, without padding.
    pub value: &'a [u8],
}

impl<'a> Attr<'a> {
    /// The attributes inside this one.
    pub fn nested(&self) -> Reader<'a> {
        Reader::new(self.value)
    }

    /// One byte.
    pub fn u8(&self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// A 16-bit number in the machine's order.
    pub fn u16(&self) -> Result<u16, Malformed> {
        self.array().map(u16::from_ne_bytes)
    }

    /// A 32-bit number in the machine's order.
    pub fn u32(&self) -> Result<u32, Malformed> {
        self.array().map(u32::from_ne_bytes)
    }

    /// A signed 32-bit number in the machine's order.
    pub fn i32(&self) -> Result<i32, Malformed> {
        self.array().map(i32::from_ne_bytes)
    }

    /// A 64-bit number in the machine's order.
    pub fn u64(&self) -> Result<u64, Malformed> {
        self.array().map(u64::from_ne_bytes)
    }

    /// A 16-bit number in network order.
    pub fn u16_be(&self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    /// A 32-bit number in network order.
    pub fn u32_be(&self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    /// A 64-bit number in network order.
    pub fn u64_be(&self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// Text up to the first NUL or the end. What is no UTF-8 is shown by the replacement character.
    pub fn string(&self) -> String {
        let end = self.value.iter().position(|byte| *byte == 0).unwrap_or(self.value.len());
        String::from_utf8_lossy(&self.value[..end]).into_owned()
    }

    /// Exactly `N` bytes.
    pub fn array<const N: usize>(&self) -> Result<[u8; N], Malformed> {
        self.value.try_into().map_err(|_| Malformed::Attribute {
            kind: self.kind,
            wanted: N,
            found: self.value.len(),
        })
    }
}

/// Iterates over attributes. Stops at the first one that is cut or has a length below its header's, and
/// [`Reader::damaged`] tells.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
    damaged: bool,
}

impl<'a> Reader<'a> {
    /// Reads the attributes in `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes, damaged: false }
    }

    /// Whether reading ended at an attribute that did not make sense instead of at the end.
    pub fn damaged(&self) -> bool {
        self.damaged
    }

    /// The first attribute of this type. Meant for small attribute lists; iterate over long ones.
    pub fn get(&self, kind: u16) -> Option<Attr<'a>> {
        self.clone().find(|attr| attr.kind == kind)
    }
}

impl<'a> Iterator for Reader<'a> {
    type Item = Attr<'a>;

    fn next(&mut self) -> Option<Attr<'a>> {
        if self.rest.len() < HEADER {
            // Fewer than four trailing zero bytes is padding; anything else was meant to be an attribute.
            self.damaged |= self.rest.iter().any(|byte| *byte != 0);
            self.rest = &[];
            return None;
        }
        let length = usize::from(u16::from_ne_bytes([self.rest[0], self.rest[1]]));
        let kind = u16::from_ne_bytes([self.rest[2], self.rest[3]]) & TYPE_MASK;
        if length < HEADER || length > self.rest.len() {
            self.damaged = true;
            self.rest = &[];
            return None;
        }
        let value = &self.rest[HEADER..length];
        self.rest = self.rest.get(align(length)..).unwrap_or(&[]);
        Some(Attr { kind, value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A tree of attributes, to be written and read back.
    #[derive(Debug, Clone, PartialEq)]
    enum Tree {
        Leaf(u16, Vec<u8>),
        Node(u16, Vec<Tree>),
    }

    fn trees() -> impl Strategy<Value = Vec<Tree>> {
        let leaf =
            (0..=TYPE_MASK, prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(k, v)| Tree::Leaf(k, v));
        let tree = leaf.prop_recursive(4, 64, 6, |inner| {
            (0..=TYPE_MASK, prop::collection::vec(inner, 0..6)).prop_map(|(k, v)| Tree::Node(k, v))
        });
        prop::collection::vec(tree, 0..6)
    }

    fn write(trees: &[Tree], writer: &mut Writer<'_>) {
        for tree in trees {
            match tree {
                Tree::Leaf(kind, value) => {
                    writer.bytes(*kind, value);
                }
                Tree::Node(kind, inner) => {
                    writer.nested(*kind, |writer| write(inner, writer));
                }
            }
        }
    }

    fn same(trees: &[Tree], mut reader: Reader<'_>) {
        for tree in trees {
            let attr = reader.next().expect("as many attributes as were written");
            match tree {
                Tree::Leaf(kind, value) => assert_eq!((attr.kind, attr.value), (*kind, value.as_slice())),
                Tree::Node(kind, inner) => {
                    assert_eq!(attr.kind, *kind);
                    same(inner, attr.nested());
                }
            }
        }
        assert_eq!(reader.next(), None);
        assert!(!reader.damaged());
    }

    /// Reads everything there is to any depth; the test is that it returns.
    fn walk(bytes: &[u8], depth: usize) -> usize {
        let attrs = Reader::new(bytes);
        attrs.map(|attr| 1 + if depth == 0 { 0 } else { walk(attr.value, depth - 1) }).sum()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(trees in trees()) {
            let mut buffer = Vec::new();
            let mut writer = Writer::new(&mut buffer);
            write(&trees, &mut writer);
            writer.finish().expect("small attributes fit");
            prop_assert_eq!(buffer.len() % 4, 0);
            same(&trees, Reader::new(&buffer));
        }

        #[test]
        fn numbers_and_text_keep_their_value(a: u8, b: u16, c: u32, d: u64, e: i32, text in "[^\0]{0,50}") {
            let mut buffer = Vec::new();
            let mut w = Writer::new(&mut buffer);
            w.u8(1, a).u16(2, b).u16_be(3, b).u32(4, c).u32_be(5, c).u64(6, d).u64_be(7, d).i32(8, e);
            w.string(9, &text).flag(10);
            w.finish().expect("fits");
            let r = Reader::new(&buffer);
            let get = |kind| r.get(kind).expect("written");
            prop_assert_eq!(get(1).u8(), Ok(a));
            prop_assert_eq!((get(2).u16(), get(3).u16_be()), (Ok(b), Ok(b)));
            prop_assert_eq!((get(4).u32(), get(5).u32_be()), (Ok(c), Ok(c)));
            prop_assert_eq!((get(6).u64(), get(7).u64_be()), (Ok(d), Ok(d)));
            prop_assert_eq!(get(8).i32(), Ok(e));
            prop_assert_eq!(get(9).string(), text);
            prop_assert_eq!(get(10).value, &[] as &[u8]);
            prop_assert_eq!(get(3).value, &b.to_be_bytes());
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(walk(&bytes, 8) <= bytes.len());
        }
    }

    #[test]
    fn too_long_an_attribute_is_refused_even_when_nested() {
        let mut buffer = Vec::new();
        let mut writer = Writer::new(&mut buffer);
        writer.nested(7, |inner| {
            inner.bytes(1, &vec![0; 40_000]).bytes(2, &vec![0; 40_000]);
        });
        assert_eq!(writer.finish().expect_err("must not fit").kind, 7);
        let mut buffer = Vec::new();
        let mut writer = Writer::new(&mut buffer);
        writer.nested(7, |inner| {
            inner.bytes(3, &vec![0; 65_532]);
        });
        let error = writer.finish().expect_err("must not fit");
        assert_eq!((error.kind, error.length), (3, 65_536));
    }

    #[test]
    fn wrong_lengths_are_told() {
        let attr = Attr { kind: 5, value: &[1, 2, 3] };
        assert_eq!(attr.u32(), Err(Malformed::Attribute { kind: 5, wanted: 4, found: 3 }));
        let mut reader = Reader::new(&[3, 0, 1, 0]);
        assert_eq!(reader.next(), None);
        assert!(reader.damaged(), "a length below the header's is damage");
        let mut reader = Reader::new(&[0, 0]);
        assert_eq!(reader.next(), None);
        assert!(!reader.damaged(), "zero padding is not");
    }
}
