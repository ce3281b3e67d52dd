//! Any packet of a pod goes through the header parser: it may not panic, and its addresses are of one family.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some(headers) = knit_kernel::nflog::Headers::parse(bytes) {
        assert_eq!(headers.source.is_ipv4(), headers.destination.is_ipv4());
    }
});
