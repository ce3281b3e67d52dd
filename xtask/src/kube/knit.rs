//! Knit on the bed, as a user installs it: its image, and an overlay of `deploy/`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::bed::Bed;

/// How long all nodes may take to be Ready after the manifests were applied.
const LIMIT: Duration = Duration::from_secs(120);

/// Builds Knit's image, loads it, applies `deploy/overlays/OVERLAY` and waits until all nodes are Ready.
pub fn install(bed: &Bed, overlay: &str) -> Result<()> {
    bed.load_image(&image()?)?;
    let overlay = root().join("deploy/overlays").join(overlay);
    let overlay = overlay.to_str().context("the overlay's path")?;
    bed.kubectl(&["apply", "--server-side", "-k", overlay])?;
    bed.wait_for_nodes(LIMIT)
}

/// The image of the sources as they are.
pub fn image() -> Result<PathBuf> {
    let file = root().join("target/image/knit.tar");
    let mut command = Command::new("/proc/self/exe");
    let status = command.args(["image", "--out"]).arg(&file).status().context("cannot build Knit's image")?;
    ensure!(status.success(), "Knit's image was not built ({status})");
    Ok(file)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
