//! What ARCHITECTURE.md names is there: each crate is in its map, each file and folder exists, and the walk
//! of a request names each file once.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// How the sections begin in which a request is followed from file to file.
const WALK: &str = "## The path of ";
/// Where paths begin that are written from the root of the tree.
const FOLDERS: [&str; 6] = ["crates/", "deploy/", "docs/", "fuzz/", "xtask/", ".ci/"];

/// What a page names that is not in the tree, and what it should name and does not.
pub(super) fn problems(page: &str, root: &Path) -> Result<Vec<String>> {
    let crates = crates(root)?;
    let mut found: Vec<String> = crates
        .iter()
        .filter(|name| !page.lines().any(|line| in_map(line) == Some(name)))
        .map(|name| format!("the map does not have crates/{name}"))
        .collect();
    let is_gone = |name: &&str| name.starts_with("knit-") && !crates.contains(*name);
    let gone = page.lines().filter_map(in_map).filter(is_gone);
    found.extend(gone.map(|name| format!("the map has {name}, and crates/ does not")));
    let mut there = Vec::new();
    list(root, Path::new(""), &mut there)?;
    // Where a line says which crate it is about, paths are written from some folder of it.
    let exists = |path: &str| there.iter().any(|file| file.ends_with(path.trim_end_matches('/')));
    let mut walked = BTreeSet::new();
    let mut is_walk = false;
    let mut of_crate = "";
    for (number, line) in page.lines().enumerate() {
        if line.starts_with("## ") {
            is_walk = line.starts_with(WALK);
            (of_crate, walked) = ("", BTreeSet::new());
        }
        let drawn = line.starts_with("    ");
        let named: Vec<&str> = if drawn { paths(line).collect() } else { quoted(line).collect() };
        of_crate = crate_of(line).unwrap_or(of_crate);
        for path in named {
            if !exists(path) {
                found.push(format!("line {}: {path} does not exist", number + 1));
            } else if is_walk && drawn && path.contains('.') && !walked.insert((of_crate, path)) {
                found.push(format!("line {}: {path} is named twice in this walk", number + 1));
            }
        }
    }
    Ok(found)
}

/// The names of all crates.
fn crates(root: &Path) -> Result<BTreeSet<String>> {
    let folder = root.join("crates");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Every file and folder of the tree, without what is built or hidden there.
fn list(root: &Path, folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let full = root.join(folder);
    for entry in fs::read_dir(&full).with_context(|| format!("cannot read {}", full.display()))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() && entry.file_name() != "target" && entry.file_name() != ".git" {
            list(root, &path, found)?;
        }
        found.push(path);
    }
    Ok(())
}

/// The crate that a line of a walk says its files are in: `knit-linux: attach.rs`.
fn crate_of(line: &str) -> Option<&str> {
    line.split_whitespace().filter_map(|word| word.strip_suffix(':')).find(|word| word.starts_with("knit-"))
}

/// The crate that a line of the map is about.
fn in_map(line: &str) -> Option<&str> {
    let (name, text) = line.strip_prefix("    ")?.split_once(' ')?;
    (name.starts_with("knit-") || name == "knit" && text.starts_with(' ')).then_some(name)
}

/// The paths in a drawing: files of Rust, and folders.
fn paths(line: &str) -> impl Iterator<Item = &str> {
    let part_of_path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '/' | '.');
    let words = line.split(move |c: char| !part_of_path(c));
    words.filter(|word| is_path(word)).map(|word| word.trim_end_matches('.'))
}

fn is_path(word: &str) -> bool {
    let folder = word.len() > 1 && word.ends_with('/') && !word.starts_with('/');
    word.ends_with(".rs") || folder
}

/// The paths in prose, between backticks.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '/' | '.');
    quoted.filter(move |text| text.chars().all(plain)).filter(|text| {
        is_path(text) || FOLDERS.iter().any(|folder| text.starts_with(folder) && text.len() > folder.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for file in ["crates/knit-a/src/one.rs", "crates/knit-a/src/steps/two.rs", "crates/knit-b/src/lib.rs"]
        {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, "").expect("written");
        }
        root
    }

    const RIGHT: &str = "## The map\n    knit-a     first; steps/ has its steps\n    knit-b second\n\
        ## The path of a thing\n    kubelet ─ exec   one.rs\n      then   knit-a: steps/two.rs,\n\
        A file is `one.rs`, and `crates/knit-b/src/lib.rs` another one; `Some/Type` is none.\n";

    #[test]
    fn what_is_there_is_no_problem() {
        let root = tree();
        assert_eq!(problems(RIGHT, root.path()).expect("read"), Vec::<String>::new());
    }

    #[test]
    fn what_went_or_came_is_found() {
        let root = tree();
        let cases = [
            ("one.rs\n", "gone.rs\n", "line 5: gone.rs does not exist"),
            ("steps/ has", "stops/ has", "line 2: stops/ does not exist"),
            ("`one.rs`", "`three.rs`", "line 7: three.rs does not exist"),
            ("knit-b/src/lib.rs`", "knit-b/src/bin.rs`", "line 7: crates/knit-b/src/bin.rs does not exist"),
            ("steps/two.rs,", "lib.rs, lib.rs", "line 6: lib.rs is named twice in this walk"),
            ("    knit-b second\n", "", "the map does not have crates/knit-b"),
            ("    knit-b ", "    knit-c     third\n    knit-b ", "the map has knit-c, and crates/ does not"),
        ];
        for (from, to, problem) in cases {
            let page = RIGHT.replacen(from, to, 1);
            assert_eq!(problems(&page, root.path()).expect("read"), [problem]);
        }
    }
}
