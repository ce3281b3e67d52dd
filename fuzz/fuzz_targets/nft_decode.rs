//! Any datagram goes through every nftables decoder: none may panic or loop.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = knit_nft::decode_any(bytes);
});
