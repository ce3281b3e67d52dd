//! `.ci/packages` on a machine where nothing is installed and apt-get fails, or works.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output};

/// Runs it with nothing in the PATH but a shell and this apt-get.
fn packages(apt_get: &str, strict: Option<&str>) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("apt-get");
    fs::write(&path, format!("#!/bin/bash\n{apt_get}\n")).expect("a program");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    for tool in ["bash", "cat"] {
        symlink(Path::new("/bin").join(tool), folder.path().join(tool)).expect("a link");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/packages");
    let mut command = Command::new("/bin/bash");
    command.arg(script).env("PATH", folder.path()).env_remove("KNIT_TEST_STRICT");
    if let Some(strict) = strict {
        command.env("KNIT_TEST_STRICT", strict);
    }
    command.output().expect("bash runs")
}

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn a_failed_install_fails_loudly() {
    for strict in [None, Some("1")] {
        let output = packages("exit 100", strict);
        assert!(!output.status.success(), "{}", said(&output));
        assert!(said(&output).contains("apt-get could not install: nftables "), "{}", said(&output));
    }
}

#[test]
fn a_failed_install_is_told_where_skips_are_wanted() {
    let output = packages("exit 100", Some("0"));
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("apt-get could not install: nftables "), "{}", said(&output));
}

#[test]
fn what_is_missing_is_installed() {
    let output = packages("echo apt-get \"$@\"", None);
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("apt-get install -y -qq --no-install-recommends nftables "),
        "{}",
        said(&output)
    );
}
