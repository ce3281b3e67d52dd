//! Netlink datagrams as a kernel might send them: the message and attribute readers, and the parsers of every
//! object.
#![no_main]

use knit_kernel::netlink::Messages;
use knit_kernel::{addr::Address, fdb::FdbEntry, link::Link, neigh::Neighbour, route::Route, rule::Rule};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for message in Messages::new(data).flatten() {
        let _ = message.answer();
        let parsed = usize::from(Link::parse(&message).is_some())
            + usize::from(Address::parse(&message).is_some())
            + usize::from(Route::parse(&message).is_some())
            + usize::from(Rule::parse(&message).is_some())
            + usize::from(knit_kernel::qdisc::Qdisc::parse(&message).is_some())
            + usize::from(knit_kernel::qdisc::Redirect::parse(&message).is_some())
            + usize::from(Neighbour::parse(&message).is_some())
            + usize::from(FdbEntry::parse(&message).is_some());
        assert!(parsed <= 1, "a message is one thing at most");
    }
});
