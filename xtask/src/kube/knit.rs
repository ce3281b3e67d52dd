//! Knit on the bed, as a user installs it: its image, and an overlay of `deploy/`.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::bed::Bed;
use super::{dns, net};

/// How long all nodes may take to be Ready after the manifests were applied.
const LIMIT: Duration = Duration::from_secs(120);

/// Builds Knit's image, loads it, applies `deploy/overlays/OVERLAY` and waits until all nodes are Ready and
/// names are resolved.
pub fn install(bed: &Bed, overlay: &str) -> Result<()> {
    install_image(bed, overlay, &image()?)
}

/// The same with an image that is there.
pub fn install_image(bed: &Bed, overlay: &str, image: &Path) -> Result<()> {
    bed.load_image(image)?;
    if !bed.options().kube_proxy {
        // Nothing serves the API server's ClusterIP before Knit does: docs/install.md.
        bed.apply(&api_server(net::API_PORT))?;
    }
    apply(bed, overlay)?;
    bed.wait_for_nodes(LIMIT)?;
    // Whoever serves Services, they are served now.
    if bed.options().dns { dns::wait(bed) } else { Ok(()) }
}

/// Applies `deploy/overlays/OVERLAY`.
pub fn apply(bed: &Bed, overlay: &str) -> Result<()> {
    let overlay = root().join("deploy/overlays").join(overlay);
    let overlay = overlay.to_str().context("the overlay's path")?;
    bed.kubectl(&["apply", "--server-side", "--force-conflicts", "-k", overlay]).map(drop)
}

/// Where the API server is, for Knit's own pods.
pub fn api_server(port: u16) -> String {
    let address = net::control_plane_v4();
    format!(
        "{{apiVersion: v1, kind: Namespace, metadata: {{name: knit-system}}}}\n---\n\
         {{apiVersion: v1, kind: ConfigMap, metadata: {{name: knit-api-server, namespace: knit-system}}, \
         data: {{KUBERNETES_SERVICE_HOST: '{address}', KUBERNETES_SERVICE_PORT: '{port}'}}}}\n"
    )
}

/// The image that [`install`] takes, once it is made.
static MADE: OnceLock<PathBuf> = OnceLock::new();

/// From now on [`image`] is the one that is shipped.
pub fn use_release_image() -> Result<()> {
    let file = release_image()?;
    let used = MADE.get_or_init(|| file.clone());
    ensure!(*used == file, "another image is in use already: {}", used.display());
    Ok(())
}

/// `$KNIT_KUBE_IMAGE`, or the image of the sources as `cargo test` builds them. Made once.
pub fn image() -> Result<PathBuf> {
    if let Some(file) = std::env::var_os("KNIT_KUBE_IMAGE").map(PathBuf::from).or_else(|| MADE.get().cloned())
    {
        return Ok(file);
    }
    let file = crate::shim::target_dir().join("image/knit-test.tar");
    crate::image::build_for_tests(&file, &[crate::image::NAME]).context("Knit's image was not built")?;
    Ok(MADE.get_or_init(|| file).clone())
}

/// `$KNIT_KUBE_IMAGE`, or the image of the sources as it is shipped.
pub fn release_image() -> Result<PathBuf> {
    if let Some(file) = std::env::var_os("KNIT_KUBE_IMAGE") {
        return Ok(file.into());
    }
    let file = crate::shim::target_dir().join("image/knit-release.tar");
    crate::image::build(&file, &[crate::image::NAME], true).context("Knit's image was not built")?;
    Ok(file)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
