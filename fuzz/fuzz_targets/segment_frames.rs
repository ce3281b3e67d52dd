//! Any frame of a segment goes through the parser of ARP and neighbor discovery: it may not panic, and what
//! it says is about an address that a host can have.
#![no_main]

use knit_kernel::packet::frame;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(heard) = frame::parse(bytes) {
        assert!(!heard.address.is_unspecified() && !heard.address.is_multicast());
        // What it says can be said again.
        assert!(frame::parse(&frame::probe(heard.mac, heard.address)).is_some());
        assert!(frame::parse(&frame::announcement(heard.mac, heard.address)).is_some());
    }
});
