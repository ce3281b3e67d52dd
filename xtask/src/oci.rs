//! Container images without a container engine: an OCI image layout in one tar file, the same bytes for the
//! same input.
//!
//! `ctr images import`, `docker load`, `podman load` and `kind load image-archive` take such a file. Layers
//! are made in memory: the largest image here is a few hundred megabytes.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

/// What an image holds and how it starts.
#[derive(Debug, Default)]
pub struct Image {
    /// What always runs.
    pub entrypoint: Vec<String>,
    /// Its arguments, where the pod names none.
    pub cmd: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Labels of the image, such as `org.opencontainers.image.version`.
    pub labels: Vec<(String, String)>,
    /// One layer, in this order.
    pub entries: Vec<Entry>,
}

/// One thing in the image's file system. Paths are absolute in the image.
#[derive(Debug)]
pub enum Entry {
    /// An empty folder with this mode.
    Folder { path: String, mode: u32 },
    /// A file with this content.
    Text { path: String, content: String },
    /// A copy of a file of this machine, with its mode, at `path`.
    File { path: String, from: PathBuf },
    /// A symbolic link.
    Link { path: String, target: String },
    /// A whole folder of this machine, as the image's root.
    Root { from: PathBuf },
}

impl Image {
    /// Writes the image to `file`, under all of `names` (`registry/repository:tag`).
    pub fn write(&self, file: &Path, names: &[&str]) -> Result<()> {
        ensure!(!names.is_empty(), "an image needs a name");
        let layer = self.layer()?;
        let layer_digest = digest(&layer);
        let labels: serde_json::Map<_, _> = self.labels.iter().map(|(k, v)| (k.clone(), json!(v))).collect();
        let config = serde_json::to_vec(&json!({
            "architecture": architecture()?,
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Cmd": self.cmd,
                "Env": self.env,
                "Labels": labels,
                "WorkingDir": "/",
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer_digest}")] },
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        }))?;
        let index = names.iter().map(|name| {
            let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
            // containerd reads the first; the second is the standard's, which has no place for a registry.
            entry["annotations"] = json!({
                "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": name.rsplit(':').next().unwrap_or("latest"),
            });
            entry
        });
        let index =
            serde_json::to_vec(&json!({ "schemaVersion": 2, "manifests": index.collect::<Vec<_>>() }))?;

        // First beside it, then in one step: a reader never sees half an image.
        let partial = file.with_extension("partial");
        let write = || -> io::Result<()> {
            let mut out = Builder::new(io::BufWriter::new(File::create(&partial)?));
            put(&mut out, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
            put(&mut out, "index.json", 0o644, &index)?;
            for blob in [&manifest, &config, &layer] {
                put(&mut out, &format!("blobs/sha256/{}", digest(blob)), 0o644, blob)?;
            }
            out.into_inner()?.flush()?;
            std::fs::rename(&partial, file)
        };
        write().with_context(|| format!("cannot write the image {}", file.display()))
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut layer = Builder::new(Vec::new());
        layer.follow_symlinks(false);
        for entry in &self.entries {
            add(&mut layer, entry).with_context(|| format!("cannot put {entry:?} into the image"))?;
        }
        Ok(layer.into_inner()?)
    }
}

fn add(layer: &mut Builder<Vec<u8>>, entry: &Entry) -> io::Result<()> {
    match entry {
        Entry::Folder { path, mode } => {
            let mut header = header(EntryType::Directory, *mode, 0);
            layer.append_data(&mut header, format!("{}/", relative(path)), io::empty())
        }
        Entry::Text { path, content } => put(layer, relative(path), 0o644, content.as_bytes()),
        Entry::File { path, from } => {
            let mode = std::fs::metadata(from)?.permissions().mode() & 0o7777;
            put(layer, relative(path), mode, &std::fs::read(from)?)
        }
        Entry::Link { path, target } => {
            let mut header = header(EntryType::Symlink, 0o777, 0);
            layer.append_link(&mut header, relative(path), target)
        }
        Entry::Root { from } => layer.append_dir_all(".", from),
    }
}

fn put<W: io::Write>(out: &mut Builder<W>, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    let mut header = header(EntryType::Regular, mode, content.len() as u64);
    out.append_data(&mut header, path, content)
}

/// Owned by root and of no date, so that the same input gives the same image.
fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header
}

fn relative(path: &str) -> &str {
    path.trim_start_matches('/')
}

fn descriptor(media_type: &str, blob: &[u8]) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": format!("sha256:{}", digest(blob)), "size": blob.len() })
}

fn digest(blob: &[u8]) -> String {
    Sha256::digest(blob).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// This machine's kind in the words of container images.
fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => anyhow::bail!("images for {other} are not written yet"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;

    fn image() -> Image {
        Image {
            entrypoint: vec!["/hello".into()],
            cmd: vec!["--loud".into()],
            entries: vec![
                Entry::Folder { path: "/tmp".into(), mode: 0o1777 },
                Entry::Text { path: "/etc/passwd".into(), content: "root:x:0:0::/:/hello\n".into() },
                Entry::Link { path: "/bin/hello".into(), target: "/hello".into() },
            ],
            ..Image::default()
        }
    }

    fn read(file: &Path) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(File::open(file).unwrap());
        archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut content = Vec::new();
                entry.read_to_end(&mut content).unwrap();
                (entry.path().unwrap().display().to_string(), content)
            })
            .collect()
    }

    #[test]
    fn every_digest_names_a_blob_that_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("image.tar");
        image().write(&file, &["example.org/hello:1"]).unwrap();
        let blobs = read(&file);
        for (path, content) in blobs.iter().filter(|(path, _)| path.starts_with("blobs/")) {
            assert_eq!(path, &format!("blobs/sha256/{}", digest(content)));
        }
        let blob = |descriptor: &serde_json::Value| -> serde_json::Value {
            let digest = descriptor["digest"].as_str().unwrap().replace("sha256:", "blobs/sha256/");
            assert_eq!(blobs[&digest].len() as u64, descriptor["size"].as_u64().unwrap());
            serde_json::from_slice(&blobs[&digest]).unwrap_or(serde_json::Value::Null)
        };
        let index: serde_json::Value = serde_json::from_slice(&blobs["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "example.org/hello:1");
        let manifest = blob(&index["manifests"][0]);
        let config = blob(&manifest["config"]);
        assert_eq!(config["config"]["Entrypoint"], json!(["/hello"]));
        assert_eq!(config["config"]["Cmd"], json!(["--loud"]));
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
    }

    #[test]
    fn the_same_input_gives_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("1.tar"), folder.path().join("2.tar"));
        image().write(&one, &["a:1", "b:2"]).unwrap();
        image().write(&two, &["a:1", "b:2"]).unwrap();
        assert_eq!(std::fs::read(one).unwrap(), std::fs::read(two).unwrap());
    }
}
