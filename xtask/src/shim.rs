//! `cargo xtask shim`: the CNI shim as one small static file, for any Linux of this machine's kind.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Builds the static CNI shim.
#[derive(clap::Args)]
pub struct Args {
    /// Where to put it, besides the target directory
    #[arg(long)]
    out: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    let (file, size) = build(args.out.as_deref())?;
    knit_output::print(&format!("{} ({} KiB)\n", file.display(), size / 1024))?;
    Ok(())
}

/// Builds it, and copies it to `out`; where cargo put it, and its size.
///
/// With musl where its target is installed: a program that lives for a millisecond pays for each thing that
/// its C library does at start. glibc asks the processor about itself (CPUID) 68 times, and on a virtual
/// machine each time is a way to the hypervisor and back.
pub fn build(out: Option<&Path>) -> Result<(PathBuf, u64)> {
    let host = host()?;
    let small = host.replace("-gnu", "-musl");
    let target = if is_installed(&small)? {
        small
    } else {
        eprintln!(
            "the shim is built with glibc; one with musl starts in a third of the time: rustup target add \
             {small}"
        );
        host
    };
    let file = build_for(&target, "knit-cni", "shim")?;
    let size = std::fs::metadata(&file).context("the shim's size")?.len();
    if let Some(out) = out {
        std::fs::copy(&file, out).with_context(|| format!("cannot copy the shim to {}", out.display()))?;
    }
    Ok((file, size))
}

/// Builds the program of a package as one static file, which needs nothing of the system that it runs on;
/// where it is.
pub fn build_static(package: &str, profile: &str) -> Result<PathBuf> {
    build_for(&host()?, package, profile)
}

fn build_for(target: &str, package: &str, profile: &str) -> Result<PathBuf> {
    // A target by name, so that the flags are not applied to build scripts and macros. Static code at a fixed
    // address starts without a loader and without relocations.
    let status = crate::cargo::command()
        .args(["build", "-p", package, "--bin", package, "--profile", profile, "--target", target])
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static")
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "{package} was not built");
    let file = target_dir().join(target).join(profile).join(package);
    file.canonicalize().with_context(|| {
        format!("cargo built no {}: is another target directory configured?", file.display())
    })
}

/// What programs are built for here.
fn host() -> Result<String> {
    let version = rustc(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV does not say what it builds for")
}

/// Whether there is a standard library for this target.
fn is_installed(target: &str) -> Result<bool> {
    let folder = rustc(&["--print", "target-libdir", "--target", target])?;
    Ok(Path::new(folder.trim()).is_dir())
}

fn rustc(arguments: &[&str]) -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).args(arguments).output().context("cannot run rustc")?;
    ensure!(output.status.success(), "rustc {}: {}", arguments.join(" "), output.status);
    String::from_utf8(output.stdout).context("rustc printed no text")
}

/// Where cargo builds.
pub fn target_dir() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}
