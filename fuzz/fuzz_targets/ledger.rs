//! A ledger file of any bytes is opened, never panics, and what is kept of it can be opened again unchanged.
//! Each input is tried as it is, and as content behind sound checksums.
#![no_main]

use std::path::Path;

use knit_ledger::testing::FaultFs;
use knit_ledger::{Entry, Ledger, LedgerError, Options, Recovery, VERSION};
use libfuzzer_sys::fuzz_target;

fn check(bytes: Vec<u8>) {
    let path = Path::new("/ledger");
    let fs = FaultFs::new();
    fs.set_content(path, bytes);
    let open = || Ledger::<Entry, _>::open_with(fs.clone(), path, Options::default());
    let content = |ledger: &Ledger<Entry, FaultFs>| {
        let unreadable: Vec<_> = ledger.unreadable().cloned().collect();
        // What it holds can be made out of anything.
        unreadable.iter().for_each(|record| drop((record.holds(), record.pod(), record.netns())));
        (ledger.records().cloned().collect::<Vec<_>>(), unreadable)
    };
    let first = match open() {
        Ok(opened) => content(&opened.ledger),
        Err(LedgerError::NewerVersion { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    let second = open().expect("opened once already");
    assert_eq!(second.recovery, Recovery::Clean);
    assert_eq!(content(&second.ledger), first);
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes.to_vec());
    let mut sound = b"KNITLOG\n".to_vec();
    sound.extend_from_slice(&VERSION.to_le_bytes());
    sound.extend_from_slice(&crc32c::crc32c(&sound).to_le_bytes());
    let mut head = (bytes.len() as u32).to_le_bytes().to_vec();
    head.extend_from_slice(&crc32c::crc32c(bytes).to_le_bytes());
    head.extend_from_slice(&crc32c::crc32c(&head).to_le_bytes());
    sound.extend_from_slice(&head);
    sound.extend_from_slice(bytes);
    check(sound);
});
