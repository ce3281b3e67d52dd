//! A kill, a full disk or a short write at every single step: whatever was acknowledged is there afterwards,
//! and nothing else but perhaps the one change that was under way.

use std::collections::BTreeMap;
use std::path::Path;

use knit_ledger::testing::{Fault, FaultFs};
use knit_ledger::{Batch, Corruption, Ledger, LedgerError, Opened, Options, Record, Recovery, Scan, scan};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

const PATH: &str = "/run/knit/ledger";
/// Bytes of a write that arrive: none, some of the frame's head, all of it, some content, all but nothing.
const PARTS: [usize; 6] = [0, 1, 11, 12, 20, usize::MAX];

#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
struct Item {
    name: String,
    text: String,
}

impl Record for Item {
    fn key(&self) -> &str {
        &self.name
    }
}

type Change = Vec<(u8, Option<u8>)>;
type State = BTreeMap<String, Item>;

fn item(key: u8, value: u8) -> Item {
    Item { name: format!("k{key}"), text: "x".repeat(usize::from(value)) }
}

fn batch(change: &Change) -> Batch<Item> {
    change.iter().fold(Batch::new(), |batch, (key, value)| match value {
        Some(value) => batch.put(item(*key, *value)),
        None => batch.remove(format!("k{key}")),
    })
}

/// The state after each change, beginning with none.
fn states(changes: &[Change]) -> Vec<State> {
    let mut state = State::new();
    let mut all = vec![state.clone()];
    for change in changes {
        for (key, value) in change {
            match value {
                Some(value) => drop(state.insert(format!("k{key}"), item(*key, *value))),
                None => drop(state.remove(&format!("k{key}"))),
            }
        }
        all.push(state.clone());
    }
    all
}

/// Puts, replacements, removals and batches, enough for several compactions.
fn story() -> Vec<Change> {
    let mut changes: Vec<Change> = (0..24).map(|n| vec![(n % 5, (n % 4 != 3).then_some(n * 3))]).collect();
    changes.insert(7, vec![(1, Some(40)), (2, None), (3, Some(1))]);
    changes
}

fn options() -> Options {
    Options { compact_at: 400, compact_factor: 2, sync: false }
}

fn open(fs: &FaultFs) -> Result<Opened<Item, FaultFs>, LedgerError> {
    Ledger::open_with(fs.clone(), PATH, options())
}

fn records(ledger: &Ledger<Item, FaultFs>) -> State {
    ledger.records().map(|item| (item.name.clone(), item.clone())).collect()
}

/// Runs changes until the first that fails; how many succeeded.
fn run(ledger: &mut Ledger<Item, FaultFs>, changes: &[Change]) -> usize {
    changes.iter().take_while(|change| ledger.commit(batch(change)).is_ok()).count()
}

fn steps_of(changes: &[Change]) -> usize {
    let fs = FaultFs::new();
    let done = run(&mut open(&fs).unwrap().ledger, changes);
    assert_eq!(done, changes.len());
    fs.steps()
}

/// What must hold after a kill: at least what was acknowledged, at most one change more, and all works again.
fn check_after_kill(fs: &FaultFs, changes: &[Change], acknowledged: usize) {
    let states = states(changes);
    fs.restart();
    let Opened { mut ledger, recovery } = open(fs).unwrap();
    assert!(!matches!(recovery, Recovery::SetAside { .. }), "a kill is no damage: {recovery:?}");
    let found = records(&ledger);
    let next = states.get(acknowledged + 1);
    assert!(found == states[acknowledged] || Some(&found) == next, "after {acknowledged}: {found:?}");
    assert_eq!(fs.names().iter().filter(|n| n.to_str().unwrap().contains(".new")).count(), 0);
    ledger.put(item(99, 9)).unwrap();
    let expected = records(&ledger);
    drop(ledger);
    let again = open(fs).unwrap();
    assert_eq!(again.recovery, Recovery::Clean);
    assert_eq!(records(&again.ledger), expected);
}

#[test]
fn a_kill_at_any_step() {
    let changes = story();
    let steps = steps_of(&changes);
    let mut compacting = 0;
    for step in 0..steps {
        for part in PARTS {
            let fs = FaultFs::new();
            fs.fail_at(step, Fault::Kill(part));
            let acknowledged = match open(&fs) {
                Ok(mut opened) => run(&mut opened.ledger, &changes),
                Err(_) => 0,
            };
            compacting += usize::from(fs.names().iter().any(|n| n.to_str().unwrap().ends_with(".new")));
            check_after_kill(&fs, &changes, acknowledged);
        }
    }
    assert!(compacting > PARTS.len(), "compactions were killed too");
}

#[test]
fn a_power_loss_at_any_step_where_writes_are_synced() {
    let changes = story();
    let synced = Options { sync: true, ..options() };
    let open = |fs: &FaultFs| Ledger::<Item, _>::open_with(fs.clone(), PATH, synced);
    let steps = {
        let fs = FaultFs::new();
        assert_eq!(run(&mut open(&fs).unwrap().ledger, &changes), changes.len());
        fs.steps()
    };
    let states = states(&changes);
    for step in 0..=steps {
        for (part, names_arrived) in PARTS.into_iter().flat_map(|part| [(part, false), (part, true)]) {
            let fs = FaultFs::new();
            fs.fail_at(step, Fault::Kill(part));
            let acknowledged = match open(&fs) {
                Ok(mut opened) => run(&mut opened.ledger, &changes),
                Err(_) => 0,
            };
            fs.lose_power(names_arrived);
            let Opened { mut ledger, recovery } = open(&fs).unwrap();
            assert!(!matches!(recovery, Recovery::SetAside { .. }), "step {step}: {recovery:?}");
            let found = records(&ledger);
            let next = states.get(acknowledged + 1);
            assert!(found == states[acknowledged] || Some(&found) == next, "step {step}: {found:?}");
            ledger.put(item(99, 9)).unwrap();
            let expected = records(&ledger);
            drop(ledger);
            fs.lose_power(false);
            assert_eq!(records(&open(&fs).unwrap().ledger), expected, "step {step}");
        }
    }
}

#[test]
fn a_full_disk_at_any_step() {
    let changes = story();
    let states = states(&changes);
    for step in 0..steps_of(&changes) {
        for part in PARTS {
            let fs = FaultFs::new();
            fs.fail_at(step, Fault::NoSpace(part));
            let mut ledger = match open(&fs) {
                Ok(opened) => opened.ledger,
                Err(error) => {
                    assert!(matches!(error, LedgerError::NoSpace { .. }), "{error}");
                    fs.free_space();
                    open(&fs).unwrap().ledger
                }
            };
            let done = run(&mut ledger, &changes);
            assert_eq!(records(&ledger), states[done], "what was refused is not there");
            if done < changes.len() {
                let refused = ledger.commit(batch(&changes[done])).unwrap_err();
                assert!(matches!(refused, LedgerError::NoSpace { .. }) && refused.retryable(), "{refused}");
                // Whoever opens the file now finds what was acknowledged, too.
                let copy = FaultFs::new();
                copy.set_content(Path::new(PATH), fs.content(Path::new(PATH)).unwrap());
                assert_eq!(records(&open(&copy).unwrap().ledger), states[done]);
            }
            fs.free_space();
            assert_eq!(
                run(&mut ledger, &changes[done..]),
                changes.len() - done,
                "goes on when there is room"
            );
            drop(ledger);
            let again = open(&fs).unwrap();
            assert_eq!(again.recovery, Recovery::Clean);
            assert_eq!(records(&again.ledger), states[changes.len()]);
        }
    }
}

#[test]
fn a_short_write_at_any_step() {
    let changes = story();
    for step in 0..steps_of(&changes) {
        for part in [1, 11, 20] {
            let fs = FaultFs::new();
            fs.fail_at(step, Fault::Short(part));
            assert_eq!(run(&mut open(&fs).unwrap().ledger, &changes), changes.len());
            let again = open(&fs).unwrap();
            assert_eq!(again.recovery, Recovery::Clean);
            assert_eq!(records(&again.ledger), states(&changes)[changes.len()]);
        }
    }
}

/// A file with a few frames, never compacted.
fn plain_file() -> (Vec<u8>, Vec<Change>) {
    let changes: Vec<Change> = vec![vec![(1, Some(9))], vec![(2, Some(3)), (1, None)], vec![(3, Some(4))]];
    let fs = FaultFs::new();
    run(&mut open(&fs).unwrap().ledger, &changes);
    (fs.content(Path::new(PATH)).unwrap(), changes)
}

#[test]
fn any_damaged_byte_is_noticed_and_set_aside_even_through_a_kill() {
    let (bytes, changes) = plain_file();
    let states = states(&changes);
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        for kill in (0..14).map(Some).chain([None]) {
            let fs = FaultFs::new();
            fs.set_content(Path::new(PATH), damaged.clone());
            let mut first = None;
            if let Some(step) = kill {
                fs.fail_at(step, Fault::Kill(3));
                first = open(&fs).ok().map(|opened| opened.recovery);
                fs.restart();
            }
            let opened = open(&fs).unwrap();
            assert!(states.contains(&records(&opened.ledger)), "byte {at}: what stood before the damage");
            let recovery = first.unwrap_or(opened.recovery);
            let Recovery::SetAside { to, saved, .. } = recovery else {
                // The first start did all of it before it was killed.
                assert!(kill.is_some(), "byte {at} was not noticed: {recovery:?}");
                let aside = Path::new("/run/knit/ledger.corrupt-1");
                assert_eq!(fs.content(aside), Some(damaged.clone()));
                continue;
            };
            assert_eq!(fs.content(&to), Some(damaged.clone()), "kept for a look");
            assert_eq!(saved, opened.ledger.len());
        }
    }
}

#[test]
fn any_cut_is_a_torn_tail() {
    let (bytes, changes) = plain_file();
    let states = states(&changes);
    for len in 0..bytes.len() {
        let fs = FaultFs::new();
        fs.set_content(Path::new(PATH), bytes[..len].to_vec());
        let opened = open(&fs).unwrap();
        assert!(states.contains(&records(&opened.ledger)));
        let frame_end = matches!(opened.recovery, Recovery::Clean);
        match opened.recovery {
            Recovery::SetAside { why: Corruption::Header, .. } => assert!(len < 16),
            Recovery::TornTailCut { .. } | Recovery::Clean => assert!(len >= 16),
            other => panic!("{len}: {other:?}"),
        }
        drop(opened.ledger);
        assert_eq!(open(&fs).unwrap().recovery, Recovery::Clean, "{frame_end}");
    }
}

#[test]
fn a_newer_format_is_left_alone() {
    let mut head = b"KNITLOG\n".to_vec();
    head.extend_from_slice(&7_u32.to_le_bytes());
    head.extend_from_slice(&crc32c::crc32c(&head).to_le_bytes());
    head.extend_from_slice(b"who knows");
    let fs = FaultFs::new();
    fs.set_content(Path::new(PATH), head.clone());
    let error = open(&fs).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ledger /run/knit/ledger has format 7, this agent supports up to 1: run the newer version again, or \
         drain the \
         node and remove the file"
    );
    assert_eq!(fs.content(Path::new(PATH)), Some(head));
}

#[test]
fn the_file_stays_in_proportion_to_what_it_holds() {
    let fs = FaultFs::new();
    let mut ledger: Ledger<Item, _> =
        Ledger::open_with(fs, PATH, Options { compact_at: 4096, compact_factor: 4, sync: false })
            .unwrap()
            .ledger;
    let mut most = 0;
    for n in 0..10_000_u32 {
        ledger.put(item((n % 10) as u8, 50)).unwrap();
        most = most.max(ledger.bytes());
    }
    assert!(most < 3 * 4096, "{most}");
    assert!(ledger.compaction_error().is_none());
}

/// One pod that comes and goes on a disk of 96 KB filled it with the ledger, and no pod was taken any more.
#[test]
fn what_is_old_never_fills_a_small_disk() {
    let fs = FaultFs::new();
    fs.limit(96 << 10);
    let mut ledger: Ledger<Item, _> = Ledger::open_with(fs, PATH, Options::default()).unwrap().ledger;
    for n in 0..2_000_u32 {
        ledger.put(Item { name: format!("pod-{n}"), text: "x".repeat(1500) }).unwrap();
        ledger.remove(&format!("pod-{n}")).unwrap();
        assert!(ledger.bytes() < 40 << 10, "{} after {n} pods", ledger.bytes());
    }
}

#[test]
fn a_full_disk_is_no_reason_to_refuse_while_what_is_old_takes_the_room() {
    let fs = FaultFs::new();
    let never = Options { compact_at: 1 << 30, compact_factor: 4, sync: false };
    let mut ledger: Ledger<Item, _> = Ledger::open_with(fs.clone(), PATH, never).unwrap().ledger;
    (0..20).for_each(|n| ledger.put(item(1, n)).unwrap());
    // Room for a copy with one record, and not for a further one behind all that is old.
    fs.limit(fs.content(Path::new(PATH)).unwrap().len() + 120);
    ledger.put(Item { name: "large".into(), text: "y".repeat(200) }).unwrap();
    let expected = records(&ledger);
    drop(ledger);
    let again: Opened<Item, _> = Ledger::open_with(fs, PATH, never).unwrap();
    assert_eq!((again.recovery, records(&again.ledger)), (Recovery::Clean, expected));
}

#[test]
fn a_restart_writes_a_file_anew_that_is_mostly_old() {
    let fs = FaultFs::new();
    let never = Options { compact_at: 1 << 30, compact_factor: 4, sync: false };
    let mut ledger: Ledger<Item, _> = Ledger::open_with(fs.clone(), PATH, never).unwrap().ledger;
    (0..200).for_each(|n| ledger.put(item(1, n)).unwrap());
    let (before, expected) = (ledger.bytes(), records(&ledger));
    drop(ledger);
    let again: Opened<Item, _> = Ledger::open_with(fs, PATH, never).unwrap();
    assert!(again.ledger.bytes() * 4 < before, "{} of {before}", again.ledger.bytes());
    assert_eq!((again.recovery, records(&again.ledger)), (Recovery::Clean, expected));
}

fn change() -> impl Strategy<Value = Change> {
    prop::collection::vec((0..6_u8, prop::option::weighted(0.7, 0..80_u8)), 1..4)
}

proptest! {
    /// Any story, any fault anywhere, over several lives.
    #[test]
    fn any_story_with_any_faults(
        changes in prop::collection::vec(change(), 1..40),
        kills in prop::collection::vec((0..60_usize, 0..120_usize), 0..5),
    ) {
        let fs = FaultFs::new();
        let states = states(&changes);
        let mut done = 0;
        for (step, part) in kills {
            fs.restart();
            fs.fail_at(step, Fault::Kill(part));
            if let Ok(mut opened) = open(&fs) {
                let found = records(&opened.ledger);
                prop_assert!(found == states[done] || Some(&found) == states.get(done + 1));
                if found != states[done] {
                    done += 1;
                }
                done += run(&mut opened.ledger, &changes[done..]);
            }
        }
        check_after_kill(&fs, &changes, done);
    }

    /// Bytes from anywhere neither panic nor hang, and are never read as more than they hold.
    #[test]
    fn garbage(bytes in prop::collection::vec(any::<u8>(), 0..300), sound_head in any::<bool>()) {
        let mut file = if sound_head { plain_file().0 } else { Vec::new() };
        file.extend_from_slice(&bytes);
        let found = scan::<Item>(&file, |_| {});
        match found {
            Scan::Whole => prop_assert!(sound_head && bytes.is_empty()),
            Scan::TornTail { sound } | Scan::Corrupt { sound,
                .. } => prop_assert!(sound as usize <= file.len()),
            Scan::Newer { .. } => prop_assert!(false, "no such file is made here"),
        }
        let fs = FaultFs::new();
        fs.set_content(Path::new(PATH), file);
        prop_assert!(open(&fs).is_ok());
    }
}
