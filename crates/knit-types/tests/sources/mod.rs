//! The sources of the workspace, for tests that read them.

use std::path::{Path, PathBuf};

/// All source files of the workspace's crates, without their tests.
pub fn sources() -> Vec<(PathBuf, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of crates");
    let mut files = Vec::new();
    let mut folders = vec![crates.to_owned(), crates.with_file_name("xtask")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder").map(|e| e.expect("an entry").path()) {
            let name = entry.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if entry.is_dir() && !["tests", "target", "examples"].contains(&name) {
                folders.push(entry);
            } else if entry.extension().is_some_and(|e| e == "rs") && !name.contains("tests.rs") {
                let text = std::fs::read_to_string(&entry).expect("a source file");
                files.push((entry, text));
            }
        }
    }
    assert!(files.len() > 300, "only {} files", files.len());
    // The tests of the chain itself have an error that does it wrong.
    files.retain(|(file, _)| !file.ends_with("knit-types/src/chain.rs"));
    files.sort();
    files
}
