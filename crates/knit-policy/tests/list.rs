//! The list of rules and the tests that it names agree.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const RULES: u32 = 38;

/// The last column of each rule's row.
fn rows(page: &str) -> BTreeMap<u32, String> {
    let mut rows = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [number, _, proven] = cells.as_slice() else { continue };
        let Ok(number) = number.parse() else { continue };
        assert!(rows.insert(number, (*proven).to_owned()).is_none(), "rule {number} is there twice");
    }
    rows
}

/// The names of all test functions of this crate.
fn test_names() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut names, mut folders) = (BTreeSet::new(), vec![root.join("src"), root.join("tests")]);
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path())
        {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a file");
            let mut lines = text.lines().map(str::trim);
            while let Some(line) = lines.next() {
                if line == "#[test]"
                    && let Some(name) = lines.next().and_then(|l| l.strip_prefix("fn ")?.split('(').next())
                {
                    names.insert(name.to_owned());
                }
            }
        }
    }
    names
}

#[test]
fn every_rule_is_in_the_list_with_tests_that_exist() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/network-policy-rules.md");
    let rows = rows(&std::fs::read_to_string(page).expect("the list"));
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), (1..=RULES).collect::<Vec<_>>());
    let known = test_names();
    let mut named_anywhere = BTreeSet::new();
    for (number, proven) in rows {
        let named: Vec<&str> = proven.split('`').skip(1).step_by(2).collect();
        let own = format!("rule_{number:02}_");
        assert!(named.iter().any(|name| name.starts_with(&own)), "rule {number}: name a test {own}…");
        for name in named {
            assert!(known.contains(name), "rule {number}: there is no test {name}");
            named_anywhere.insert(name.to_owned());
        }
    }
    for name in known.iter().filter(|name| name.starts_with("rule_")) {
        assert!(named_anywhere.contains(name), "{name} is a rule's test, and its rule does not name it");
    }
}
