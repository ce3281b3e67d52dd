//! The ledger on a real file system: its lock, its modes, and real kills.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use knit_ledger::{Ledger, LedgerError, Opened, Options, RealFs, Record, Recovery, Scan, read};
use serde::{Deserialize, Serialize};

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

/// Held by a test that opens a ledger twice, and while another one starts a child: between fork and exec, a
/// child has a copy of every file of this process, and so holds its locks.
fn no_child_is_starting() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(path: &Path) -> Result<Opened<Item>, LedgerError> {
    Ledger::open_with(RealFs, path, Options { compact_at: 4096, compact_factor: 2, sync: false })
}

fn item(n: usize) -> Item {
    Item { name: format!("k{}", n % 7), text: format!("{n} {}", "x".repeat(n * 37 % 300)) }
}

#[test]
fn two_agents_never_share_one() {
    let _alone = no_child_is_starting();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/ledger");
    let first = open(&path).unwrap();
    assert_eq!(first.recovery, Recovery::Fresh);
    let error = open(&path).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "ledger {} is in use by another agent (pid {}): stop that one first",
            path.display(),
            std::process::id()
        )
    );
    // Somebody who only looks needs no lock.
    let (content, scan) = read::<Item>(&path).unwrap();
    assert_eq!((content.records.len(), scan), (0, Scan::Whole));
    drop(first);
    assert_eq!(open(&path).unwrap().recovery, Recovery::Clean);
    for (name, mode) in [("run", 0o700), ("run/ledger", 0o600), ("run/ledger.lock", 0o600)] {
        let found = std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(found & 0o077, 0, "{name} is {found:o}, not {mode:o}");
    }
}

#[test]
fn a_damaged_file_is_set_aside_under_a_free_name() {
    let _alone = no_child_is_starting();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    for n in 1..=2 {
        std::fs::write(&path, format!("junk {n}")).unwrap();
        let Recovery::SetAside { to, .. } = open(&path).unwrap().recovery else { panic!("not noticed") };
        assert_eq!(to, dir.path().join(format!("ledger.corrupt-{n}")));
        assert_eq!(std::fs::read_to_string(to).unwrap(), format!("junk {n}"));
    }
}

/// A child (this very test again) changes the ledger as fast as it can and says after each change that it is
/// done; it is killed at some moment, many times over.
#[test]
fn sigkill_at_any_instruction() {
    if let Some(path) = std::env::var_os("KNIT_LEDGER_CHILD") {
        let start = std::env::var("KNIT_LEDGER_START").unwrap().parse().unwrap();
        return child(Path::new(&path), start);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger");
    let mut done = 0;
    let mut killed_midway = 0;
    for round in 0..25_usize {
        let starting = no_child_is_starting();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sigkill_at_any_instruction", "--nocapture"])
            .env("KNIT_LEDGER_CHILD", &path)
            .env("KNIT_LEDGER_START", done.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        drop(starting);
        let patience = 1 + round * 97 % 211;
        let mut acknowledged = 0;
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            // Behind a kill the pipe still holds what was said before it.
            if line.unwrap().starts_with("done") {
                acknowledged += 1;
                if acknowledged == patience {
                    child.kill().unwrap();
                }
            }
        }
        child.wait().unwrap();
        assert!(acknowledged >= patience, "the child ended by itself");
        done += acknowledged;

        let Opened { ledger, recovery } = open(&path).unwrap();
        assert!(!matches!(recovery, Recovery::SetAside { .. } | Recovery::Fresh), "{recovery:?}");
        killed_midway += usize::from(matches!(recovery, Recovery::TornTailCut { .. }));
        let found: Vec<Item> = ledger.records().cloned().collect();
        if found != state(done) {
            done += 1;
            assert_eq!(
                found,
                state(done),
                "round {round}: what was acknowledged, and one change at most besides"
            );
        }
    }
    println!("{done} changes, {killed_midway} torn tails");
}

fn state(changes: usize) -> Vec<Item> {
    let mut state = BTreeMap::new();
    for n in 0..changes {
        let item = item(n);
        match n % 5 {
            4 => drop(state.remove(&item.name)),
            _ => drop(state.insert(item.name.clone(), item)),
        }
    }
    state.into_values().collect()
}

fn child(path: &Path, start: usize) {
    let mut ledger = open(path).unwrap().ledger;
    let mut out = std::io::stdout();
    for n in start.. {
        match n % 5 {
            4 => ledger.commit(knit_ledger::Batch::new().remove(item(n).name)).unwrap(),
            _ => ledger.put(item(n)).unwrap(),
        }
        // Whoever reads this is gone when this fails.
        if out.write_all(b"done\n").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}
