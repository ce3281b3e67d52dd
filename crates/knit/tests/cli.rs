//! The command line as people meet it.

use std::process::{Command, Output};

fn knit(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_knit")).args(args).output().expect("knit runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn version_and_help() {
    let output = knit(&["--version"]);
    assert_eq!(text(&output.stdout), format!("knit {}\n", env!("CARGO_PKG_VERSION")));
    let help = text(&knit(&["--help"]).stdout);
    for word in ["completions", "man"] {
        assert!(help.contains(word), "{help}");
    }
}

#[test]
fn completions_name_the_subcommands() {
    let script = text(&knit(&["completions", "bash"]).stdout);
    assert!(script.contains("knit") && script.contains("completions"), "{script}");
}

#[test]
fn errors_are_one_line_and_a_cause() {
    let output = knit(&["man", "/nonexistent/folder"]);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert!(error.starts_with("error: cannot write manual pages to /nonexistent/folder"), "{error}");
    assert!(error.contains("\n  because: "), "{error}");
}
