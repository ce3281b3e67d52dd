//! `cargo xtask style`: what STYLE.md asks for and neither rustfmt nor clippy checks: no line of Rust is too
//! long, docs/security.md names tests that exist, and ARCHITECTURE.md files and crates that do.
//!
//! rustfmt leaves comments, strings and macros as they are, so that its own limit holds for the rest only.

mod architecture;
mod named_tests;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// Checks lines that rustfmt leaves alone, and what docs/security.md and ARCHITECTURE.md name.
#[derive(clap::Args)]
pub struct Args {}

/// `max_width` of rustfmt.toml.
const COLUMNS: usize = 110;
/// Where Rust is.
const FOLDERS: [&str; 3] = ["crates", "xtask", "fuzz"];
/// The page whose tables name the test for each guarantee.
const SECURITY: &str = "docs/security.md";
/// The page that says where things are.
const ARCHITECTURE: &str = "ARCHITECTURE.md";

pub fn run(_: &Args) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for folder in FOLDERS {
        find(&root.join(folder), &mut files)?;
    }
    files.sort();
    ensure!(files.len() > 100, "only {} files of Rust were found below {}", files.len(), root.display());
    let mut found = Vec::new();
    let mut functions = BTreeSet::new();
    for file in &files {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let name = file.strip_prefix(&root).unwrap_or(file).display().to_string();
        let lines = too_long(&text).into_iter();
        found.extend(lines.map(|(line, columns)| format!("{name}:{line}: {columns} columns")));
        functions.extend(named_tests::functions(&text).map(str::to_owned));
    }
    ensure!(
        found.is_empty(),
        "{} lines are longer than {COLUMNS} columns:\n{}",
        found.len(),
        found.join("\n")
    );
    let page = fs::read_to_string(root.join(SECURITY)).with_context(|| format!("cannot read {SECURITY}"))?;
    let missing = named_tests::missing(&page, &functions).into_iter();
    let missing: Vec<String> = missing.map(|(line, name)| format!("{SECURITY}:{line}: {name}")).collect();
    ensure!(missing.is_empty(), "{SECURITY} names tests that do not exist:\n{}", missing.join("\n"));
    let page = fs::read_to_string(root.join(ARCHITECTURE));
    let page = page.with_context(|| format!("cannot read {ARCHITECTURE}"))?;
    let wrong = architecture::problems(&page, &root)?;
    ensure!(wrong.is_empty(), "{ARCHITECTURE} is not exact:\n{}", wrong.join("\n"));
    Ok(())
}

/// Every file of Rust in a folder, without what cargo built there.
fn find(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if entry.file_name() != "target" {
                find(&path, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Number and length of each line that is too long. One word (an address, a digest) and a row of a table
/// cannot be broken.
fn too_long(text: &str) -> Vec<(usize, usize)> {
    let lines = text.lines().enumerate().map(|(number, line)| (number + 1, line.chars().count(), line));
    let breakable = |line: &str| {
        let line = line.trim_start_matches(['/', '!', ' ', '*', '-']);
        line.contains(' ') && !line.starts_with('|')
    };
    lines
        .filter(|(_, columns, line)| *columns > COLUMNS && breakable(line))
        .map(|(number, columns, _)| (number, columns))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_is_found_by_its_characters() {
        let fits = "é".repeat(COLUMNS - 2) + " x";
        let text = format!("{fits}\n{fits}y\nshort\n// {}\n//! | a | {fits} |\n", "u".repeat(COLUMNS));
        assert_eq!(too_long(&text), [(2, COLUMNS + 1)]);
    }
}
