//! A value on disk through kills, power losses, full disks and damage at every step.

use std::path::Path;

use knit_ledger::testing::{Fault, FaultFs};
use knit_ledger::{DurableError, DurableFile, Loaded, Source};

const PATH: &str = "/var/lib/knit/sticky";

fn file(fs: &FaultFs) -> DurableFile<Vec<String>, FaultFs> {
    DurableFile::with_fs(fs.clone(), PATH)
}

fn value(n: usize) -> Vec<String> {
    vec!["lease".repeat(n + 1); 3]
}

/// Stores values until one fails; how many succeeded.
fn store_some(fs: &FaultFs) -> usize {
    (1..=4).take_while(|n| file(fs).store(&value(*n)).is_ok()).count()
}

#[test]
fn nothing_then_the_last_value() {
    let fs = FaultFs::new();
    assert_eq!(file(&fs).load().unwrap(), Loaded { value: None, source: Source::Nothing });
    assert_eq!(store_some(&fs), 4);
    assert_eq!(file(&fs).load().unwrap(), Loaded { value: Some(value(4)), source: Source::Current });
}

#[test]
fn a_kill_or_a_power_loss_at_any_step_leaves_the_old_or_the_new_value() {
    let clean = FaultFs::new();
    store_some(&clean);
    for step in 0..clean.steps() {
        for part in [0, 9, 40, usize::MAX] {
            for power in [None, Some(false), Some(true)] {
                let fs = FaultFs::new();
                fs.fail_at(step, Fault::Kill(part));
                let stored = store_some(&fs);
                match power {
                    None => fs.restart(),
                    Some(names_arrived) => fs.lose_power(names_arrived),
                }
                let loaded = file(&fs).load().unwrap();
                let old = (stored > 0).then(|| value(stored));
                let new = Some(value(stored + 1));
                assert!(loaded.value == old || loaded.value == new, "step {step}, {power:?}: {loaded:?}");
                // And it works again.
                file(&fs).store(&value(9)).unwrap();
                fs.lose_power(false);
                assert_eq!(file(&fs).load().unwrap().value, Some(value(9)));
            }
        }
    }
}

#[test]
fn a_full_disk_at_any_step_keeps_what_was_stored() {
    let clean = FaultFs::new();
    store_some(&clean);
    for step in 0..clean.steps() {
        for part in [0, 9, 40] {
            let fs = FaultFs::new();
            fs.fail_at(step, Fault::NoSpace(part));
            let stored = store_some(&fs);
            if stored < 4 {
                let error = file(&fs).store(&value(7)).unwrap_err();
                assert!(matches!(error, DurableError::Io { .. }), "{error}");
                assert!(error.to_string().contains("free some space"), "{error}");
            }
            let expected = (stored > 0).then(|| value(stored));
            assert_eq!(file(&fs).load().unwrap().value, expected);
            fs.free_space();
            file(&fs).store(&value(9)).unwrap();
            assert_eq!(file(&fs).load().unwrap().value, Some(value(9)));
        }
    }
}

#[test]
fn damage_falls_back_to_the_value_before_and_says_so() {
    let fs = FaultFs::new();
    store_some(&fs);
    let sound = fs.content(Path::new(PATH)).unwrap();
    for at in 0..sound.len() {
        let mut damaged = sound.clone();
        damaged[at] ^= 0x04;
        fs.set_content(Path::new(PATH), damaged);
        let loaded = file(&fs).load().unwrap();
        assert_eq!(loaded.value, Some(value(3)), "byte {at}");
        assert!(matches!(loaded.source, Source::Previous { .. }), "byte {at}");
    }
    // The damaged value does not push out the sound one before it.
    file(&fs).store(&value(5)).unwrap();
    fs.set_content(Path::new(PATH), b"junk".to_vec());
    let loaded = file(&fs).load().unwrap();
    assert_eq!(loaded.value, Some(value(3)));
    assert_eq!(loaded.source, Source::Previous { why: "it has no first line".into() });
    fs.set_content(Path::new("/var/lib/knit/sticky.previous"), Vec::new());
    assert_eq!(file(&fs).load().unwrap().value, None);
}

#[test]
fn on_a_real_disk() {
    let dir = tempfile::tempdir().unwrap();
    let file: DurableFile<Vec<String>> = DurableFile::new(dir.path().join("state/sticky"));
    file.store(&value(1)).unwrap();
    file.store(&value(2)).unwrap();
    std::fs::write(file.path(), "junk").unwrap();
    assert_eq!(file.load().unwrap().value, Some(value(1)));
}
