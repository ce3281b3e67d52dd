//! The README's first command: it shows what it says, and leaves nothing.

use std::process::{Command, Stdio};

use knit_kernel::testing::skip;

const STEPS: [&str; 7] =
    ["two nodes", "two tenants", "across nodes", "same addresses", "isolation", "services", "agents die"];

#[test]
fn the_demo_shows_every_step_and_its_map() {
    let dir = tempfile::tempdir().expect("a directory");
    let map = dir.path().join("map.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_knit"))
        .args(["lab", "demo", "--svg"])
        .arg(&map)
        .env("XDG_RUNTIME_DIR", dir.path())
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .output()
        .expect("knit runs");
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    if said.contains("namespaces are forbidden") || said.contains("was refused inside") {
        return skip(&said);
    }
    assert!(output.status.success(), "{said}");
    let steps = said.lines().filter_map(|line| line.split_once("✓ ")?.1.split_once(':'));
    let steps: Vec<&str> = steps.map(|(name, _)| name).collect();
    assert_eq!(steps, STEPS, "{said}");
    assert!(said.contains(", 0 lost"), "{said}");
    assert!(said.contains("Everything is removed again"), "{said}");
    let picture = std::fs::read_to_string(&map).expect("the map");
    for what in ["<svg", "node-1", "node-2", "10.77.0."] {
        assert!(picture.contains(what), "the map has no {what}");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).expect("a directory").flatten().collect();
    assert_eq!(left.len(), 1, "something is left beside the map: {left:?}");
}
