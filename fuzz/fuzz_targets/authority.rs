//! What a client sends on a gRPC socket, kubelet among them: any bytes pass the filter of authorities, the
//! same ones however the socket cuts them, and nothing but values of `:authority` changes. The first byte of
//! an input says how it is cut.
#![no_main]

use knit_runtime::wire::filtered;
use libfuzzer_sys::fuzz_target;

const PREFACE: usize = 24;
const HEADER: usize = 9;
const HEADERS: u8 = 1;

/// The frames of a stream, and what is left of the last one.
fn frames(sent: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let (mut found, mut rest) = (Vec::new(), sent.get(PREFACE..).unwrap_or_default());
    while let Some(length) = rest.get(..HEADER).map(|h| u32::from_be_bytes([0, h[0], h[1], h[2]]) as usize) {
        let Some((frame, next)) = rest.split_at_checked(HEADER + length) else { break };
        found.push(frame);
        rest = next;
    }
    (found, rest)
}

fuzz_target!(|case: &[u8]| {
    let Some((cut, sent)) = case.split_first() else { return };
    let whole = filtered(sent, sent.len());
    assert_eq!(whole, filtered(sent, usize::from(*cut)));
    assert_eq!(whole, filtered(&whole, whole.len()), "there is nothing left to replace");
    assert_eq!(whole.get(..PREFACE.min(sent.len())), sent.get(..PREFACE.min(sent.len())));
    let ((before, rest), (after, new_rest)) = (frames(sent), frames(&whole));
    assert_eq!((before.len(), rest), (after.len(), new_rest));
    for (before, after) in before.into_iter().zip(after) {
        assert_eq!(before[3..HEADER], after[3..HEADER]);
        assert!(before == after || (before[3] == HEADERS && after.len() <= before.len()));
    }
});
