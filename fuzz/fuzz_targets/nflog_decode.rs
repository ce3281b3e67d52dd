//! Any datagram goes through the decoder of logged packets: it may not panic or loop.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = knit_kernel::nflog::decode_any(bytes);
});
