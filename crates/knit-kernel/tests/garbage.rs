//! Bytes that claim to be from the kernel never make a parser panic. The same bodies are fuzzed in `fuzz/`.

use knit_kernel::addr::Address;
use knit_kernel::fdb::FdbEntry;
use knit_kernel::link::Link;
use knit_kernel::neigh::Neighbour;
use knit_kernel::netlink::attr::Writer;
use knit_kernel::netlink::{Batch, Message, Messages};
use knit_kernel::qdisc::{Qdisc, Redirect};
use knit_kernel::route::Route;
use knit_kernel::rule::Rule;
use proptest::prelude::*;

/// Every parser of this crate's route side; how many made sense of the message.
fn parse_all(message: &Message<'_>) -> usize {
    let _ = message.answer();
    usize::from(Link::parse(message).is_some())
        + usize::from(Address::parse(message).is_some())
        + usize::from(Route::parse(message).is_some())
        + usize::from(Rule::parse(message).is_some())
        + usize::from(Neighbour::parse(message).is_some())
        + usize::from(FdbEntry::parse(message).is_some())
        + usize::from(Qdisc::parse(message).is_some())
        + usize::from(Redirect::parse(message).is_some())
}

/// A body with a plausible header and attributes of any type and content, some of them nested.
fn bodies() -> impl Strategy<Value = Vec<u8>> {
    let value = prop::collection::vec(any::<u8>(), 0..20);
    let attrs = prop::collection::vec((0u16..64, value, any::<bool>()), 0..12);
    let family = prop::sample::select(vec![0u8, 2, 7, 10]);
    (family, prop::collection::vec(any::<u8>(), 15), attrs, 8usize..17).prop_map(
        |(family, rest, attrs, length)| {
            let mut body = vec![family];
            body.extend(&rest[..length / 4 * 4 - 1]);
            let mut writer = Writer::new(&mut body);
            for (kind, value, nest) in attrs {
                if nest {
                    writer.nested(kind, |inner| {
                        inner.bytes(kind, &value).string(1, "bridge").bytes(2, &value).nested(5, |w| {
                            w.bytes(4, &value);
                        });
                    });
                } else {
                    writer.bytes(kind, &value);
                }
            }
            body
        },
    )
}

proptest! {
    #[test]
    fn any_datagram(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        for message in Messages::new(&bytes).flatten() {
            parse_all(&message);
        }
        knit_kernel::conntrack::decode_any(&bytes);
        let _ = knit_kernel::nflog::decode_any(&bytes);
    }

    #[test]
    fn plausible_bodies_of_every_type(kind in 16u16..48, body in bodies()) {
        let message = Message { kind, flags: 0, sequence: 1, port: 1, payload: &body };
        // A message is one thing at most.
        prop_assert!(parse_all(&message) <= 1);
    }

    #[test]
    fn cut_bodies(kind in 16u16..48, body in bodies(), cut in 0usize..200) {
        let payload = &body[..cut.min(body.len())];
        parse_all(&Message { kind, flags: 0, sequence: 1, port: 1, payload });
    }

    #[test]
    fn logged_packets(
        attrs in prop::collection::vec((0u16..20, prop::collection::vec(any::<u8>(), 0..90)), 0..10),
    ) {
        let mut batch = Batch::new();
        batch.push(4 << 8, 0, |w| {
            w.fixed(&[2, 0, 0, 0]);
            for (kind, value) in &attrs {
                w.bytes(*kind, value);
            }
        });
        prop_assert_eq!(knit_kernel::nflog::decode_any(batch.as_bytes()), 1);
    }
}
