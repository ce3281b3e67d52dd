//! `cargo xtask fuzz`: builds the fuzz targets and runs each for a while, with the compiler that the
//! workspace has.
//!
//! The instrumentation that libFuzzer goes by is the compiler's own and needs neither a nightly one nor
//! cargo-fuzz. A sanitizer does: `cargo +nightly fuzz run NAME` in `fuzz/` has one, and finds the same
//! targets and corpora.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

#[derive(clap::Args)]
pub struct Args {
    /// Which targets; all of them if none is named
    names: Vec<String>,
    /// How long each runs
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Only build them
    #[arg(long)]
    build: bool,
}

impl Args {
    /// All targets, each for so long.
    pub fn all_for(seconds: u32) -> Self {
        Self { names: Vec::new(), seconds, build: false }
    }
}

const INSTRUMENTED: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";

pub fn run(args: &Args) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = root.join("fuzz");
    let all = targets(&folder)?;
    if let Some(unknown) = args.names.iter().find(|name| !all.contains(name)) {
        bail!("there is no fuzz target {unknown}; there are {}", all.join(", "));
    }
    let programs = build(&root, &folder)?;
    if args.build {
        return Ok(());
    }
    let wanted = all.iter().filter(|name| args.names.is_empty() || args.names.contains(name));
    let failed: Vec<&str> =
        wanted.filter(|name| !runs(&folder, &programs, name, args.seconds)).map(String::as_str).collect();
    ensure!(
        failed.is_empty(),
        "found something in {}: the input is in fuzz/artifacts/, and the target runs it if it is named after \
         it",
        failed.join(", ")
    );
    Ok(())
}

/// One for each file.
fn targets(folder: &Path) -> Result<Vec<String>> {
    let files = folder.join("fuzz_targets");
    let entries = fs::read_dir(&files).with_context(|| format!("cannot read {}", files.display()))?;
    let paths: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    let names = paths.iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
    let mut names: Vec<String> =
        names.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}

/// Builds all, and says where they are.
fn build(root: &Path, folder: &Path) -> Result<PathBuf> {
    // The versions that the workspace has; what it does not have is added.
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).context("cannot copy Cargo.lock")?;
    // A target that is named keeps the instrumentation away from build scripts and macros.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut command = crate::cargo::command();
    command
        .args(["build", "--bins", "--target", &target])
        .current_dir(folder)
        .env("RUSTFLAGS", INSTRUMENTED)
        // Quick enough, and with the checks of a debug build.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env_remove("CARGO_TARGET_DIR");
    ensure!(command.status().context("cannot run cargo")?.success(), "the fuzz targets were not built");
    Ok(folder.join("target").join(target).join("debug"))
}

/// Runs one; says whether it found nothing.
fn runs(folder: &Path, programs: &Path, name: &str, seconds: u32) -> bool {
    let (corpus, artifacts) = (folder.join("corpus").join(name), folder.join("artifacts").join(name));
    let seeds = folder.join("seeds").join(name);
    println!("== {name}, {seconds} s");
    let run = || -> Result<bool> {
        fs::create_dir_all(&corpus)?;
        fs::create_dir_all(&artifacts)?;
        let status = Command::new(programs.join(name))
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            .args(["-print_final_stats=1", "-verbosity=0", "-rss_limit_mb=4096", "-timeout=20"])
            .arg(&corpus)
            .args(seeds.is_dir().then_some(&seeds))
            .status()?;
        Ok(status.success())
    };
    run().unwrap_or_else(|error| {
        eprintln!("cannot run {name}: {error:#}");
        false
    })
}
