//! `cargo xtask upgrade-test`: agents of an earlier commit are replaced by this tree's in a lab, one node
//! after another, while datagrams go between pods and to a Service and pods start. Nothing may be lost.
//!
//! The earlier program is built from its own sources, which are taken out of git into the target directory;
//! neither the work tree nor the index is touched.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::shim::target_dir;

/// A commit from before ledger records were typed, the tunnel was closed to everybody but nodes, and Networks
/// were compared in every pass: what its agents made differs most from what is made today.
const EARLIER: &str = "e3f7f38";

#[derive(clap::Args)]
pub struct Args {
    /// The commit whose agents are replaced
    #[arg(long, value_name = "COMMIT", default_value = EARLIER)]
    from: String,
    /// A program of that commit, in place of one that is built
    #[arg(long, value_name = "KNIT", conflicts_with = "from")]
    program: Option<PathBuf>,
}

impl Default for Args {
    fn default() -> Self {
        Self { from: EARLIER.into(), program: None }
    }
}

pub fn run(args: &Args) -> Result<()> {
    let program = match &args.program {
        Some(program) => program.clone(),
        None => build(&args.from)?,
    };
    let program = program.canonicalize().with_context(|| format!("there is no {}", program.display()))?;
    let mut test = crate::cargo::command();
    test.args(["test", "-p", "knit", "--test", "lab", "--", "--ignored", "--exact", "--nocapture"])
        .arg("upgrade::agents_of_an_earlier_version_are_replaced_without_loss")
        // A machine on which no lab can be started has shown nothing.
        .env("KNIT_TEST_STRICT", "1")
        .env("KNIT_TEST_EARLIER", &program)
        .stderr(Stdio::inherit());
    let output = test.output().context("cannot run cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    knit_output::print(&said)?;
    ensure!(output.status.success(), "something was lost between {} and this tree", args.from);
    // A name that no test has is no failure for cargo.
    ensure!(said.contains("1 passed"), "the test did not run");
    Ok(())
}

/// The program of an earlier commit; built once, and kept in the target directory.
fn build(commit: &str) -> Result<PathBuf> {
    let commit = full_name(commit)?;
    let folder = target_dir().join("upgrade-test");
    let (sources, program) = (folder.join(&commit), folder.join(format!("knit-{commit}")));
    if program.is_file() {
        return Ok(program);
    }
    std::fs::create_dir_all(&sources).with_context(|| format!("cannot create {}", sources.display()))?;
    unpack(&commit, &sources)?;
    let target = folder.join("target");
    let mut command = crate::cargo::command();
    command.args(["build", "--locked", "--package", "knit", "--bin", "knit", "--manifest-path"]);
    command.arg(sources.join("Cargo.toml")).arg("--target-dir").arg(&target);
    ensure!(command.status().context("cannot run cargo")?.success(), "knit of {commit} was not built");
    std::fs::rename(target.join("debug/knit"), &program).context("cargo built no program knit")?;
    // What it was built from and with takes gigabytes, and nothing needs it again.
    for folder in [sources, target] {
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(program)
}

fn full_name(commit: &str) -> Result<String> {
    let output =
        git().args(["rev-parse", "--verify", "--quiet"]).arg(format!("{commit}^{{commit}}")).output();
    let output = output.context("cannot run git")?;
    ensure!(
        output.status.success(),
        "git does not have commit {commit}: fetch the whole history, or name a program with --program"
    );
    Ok(String::from_utf8(output.stdout).context("git printed no text")?.trim().to_owned())
}

fn unpack(commit: &str, to: &Path) -> Result<()> {
    let mut archive =
        git().args(["archive", commit]).stdout(Stdio::piped()).spawn().context("cannot run git")?;
    let tar = archive.stdout.take().context("a pipe")?;
    let unpacked = Command::new("tar").arg("-x").arg("-C").arg(to).stdin(tar).status();
    let unpacked = unpacked.context("cannot run tar")?.success();
    ensure!(archive.wait()?.success() && unpacked, "{commit} could not be unpacked");
    Ok(())
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.arg("-C").arg(env!("CARGO_MANIFEST_DIR"));
    git
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_that_git_does_not_have_is_named() {
        let error = full_name("0000000000000000000000000000000000000001").unwrap_err().to_string();
        assert!(error.contains("git does not have commit 0000"), "{error}");
    }
}
