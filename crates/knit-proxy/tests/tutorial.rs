//! The code in docs/write-your-own-service-proxy.md is the code of the examples, all of it and in order.

use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The blocks that follow a comment with the file's name, joined.
fn blocks(page: &str, file: &str) -> String {
    let mark = format!("<!-- {file} -->\n```rust\n");
    let blocks = page.split(&mark).skip(1).map(|rest| rest.split("\n```\n").next().unwrap_or_default());
    blocks.collect::<Vec<_>>().join("\n")
}

/// Without the blank lines, which fall between blocks.
fn lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.trim().is_empty()).collect()
}

#[test]
fn the_tutorial_shows_the_examples() {
    let page = read("../../docs/write-your-own-service-proxy.md");
    for file in ["print.rs", "userspace.rs", "cluster.rs"] {
        assert_eq!(lines(&blocks(&page, file)), lines(&read(&format!("examples/{file}"))), "{file}");
    }
    let rust = page.matches("```rust").count();
    assert_eq!(rust, page.matches("-->\n```rust").count(), "a block that belongs to no example");
}

#[test]
fn the_modules_that_the_readme_names_are_there() {
    let readme = read("README.md");
    let library = read("src/lib.rs");
    let named = readme.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let mut named: Vec<&str> = named.map(|(name, _)| name).collect();
    let there = library.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let mut there: Vec<&str> = there.collect();
    named.sort_unstable();
    there.sort_unstable();
    assert_eq!(named, there);
}

#[test]
fn the_tutorial_names_every_message_and_call_of_the_protocol() {
    let page = read("../../docs/write-your-own-service-proxy.md");
    let proto = read("proto/knit/proxy/v1alpha1/proxy.proto");
    let named = |line: &'_ str, before: &str| -> Option<String> {
        let rest = line.strip_prefix(before)?;
        Some(rest.split([' ', '(']).next()?.to_owned())
    };
    let names = proto.lines().filter_map(|line| named(line, "message ").or_else(|| named(line, "  rpc ")));
    let names: Vec<String> = names.collect();
    assert!(names.len() > 15, "{names:?}");
    for name in names {
        let is_there = page.contains(&format!("`{name}`"))
            || page.contains(&format!("`{name}("))
            || page.contains(&format!("({name})`"))
            || page.contains(&format!("`{name}`s"));
        assert!(is_there, "{name}");
    }
}
