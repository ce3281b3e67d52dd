//! Any datagram goes through the conntrack decoder: it may not panic or loop.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = knit_kernel::conntrack::decode_any(bytes);
});
