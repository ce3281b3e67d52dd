//! `cargo xtask shim`: the CNI shim as one small static file, for any Linux of this machine's kind.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

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
pub fn build(out: Option<&Path>) -> Result<(PathBuf, u64)> {
    let file = build_static("knit-cni", "shim")?;
    let size = std::fs::metadata(&file).context("the shim's size")?.len();
    if let Some(out) = out {
        std::fs::copy(&file, out).with_context(|| format!("cannot copy the shim to {}", out.display()))?;
    }
    Ok((file, size))
}

/// Builds the program of a package as one static file, which needs nothing of the system that it runs on; where it is.
pub fn build_static(package: &str, profile: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(&rustc).arg("-vV").output().context("cannot run rustc")?;
    let version = String::from_utf8(version.stdout).context("rustc -vV printed no text")?;
    let Some(target) = version.lines().find_map(|line| line.strip_prefix("host: ")) else {
        bail!("rustc -vV does not say what it builds for");
    };
    // A target by name, so that the flags are not applied to build scripts and macros. Static code at a fixed address
    // starts without a loader and without relocations.
    let status = Command::new(cargo)
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

/// Where cargo builds.
pub fn target_dir() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}
