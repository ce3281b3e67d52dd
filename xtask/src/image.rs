//! `cargo xtask image`: Knit's own image, with everything in it and nothing else, made without a container
//! engine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::oci::{Entry, Image};
use crate::shim;

/// Builds Knit's image.
#[derive(clap::Args)]
pub struct Args {
    /// The file to write [default: target/image/knit.tar]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Names of the image, where it should not be called as deploy/ calls it
    #[arg(long, value_name = "NAME:TAG")]
    name: Vec<String>,
    /// Optimise all the way, as for a release: takes several times as long
    #[arg(long)]
    release: bool,
}

/// What deploy/ calls the image: a name that no registry answers for.
pub const NAME: &str = concat!("localhost/knit:", env!("CARGO_PKG_VERSION"));

pub fn run(args: &Args) -> Result<()> {
    let default = shim::target_dir().join("image/knit.tar");
    let out = args.out.as_deref().unwrap_or(&default);
    let names: Vec<&str> =
        if args.name.is_empty() { vec![NAME] } else { args.name.iter().map(String::as_str).collect() };
    let size = build(out, &names, args.release)?;
    knit_output::print(&format!("{} ({} MiB): {}\n", out.display(), size >> 20, names.join(", ")))?;
    Ok(())
}

/// Builds program and shim, static both, and writes the image to `out`; its size.
pub fn build(out: &Path, names: &[&str], release: bool) -> Result<u64> {
    let profile = if release { "release" } else { "image" };
    let program = shim::build_static("knit", profile)?;
    write(out, names, program, &[])
}

/// The same with the program that `cargo test` has built already, and the libraries that it is linked with:
/// for the test bed. It checks more (overflows, debug assertions), and nothing is compiled twice.
pub fn build_for_tests(out: &Path, names: &[&str]) -> Result<u64> {
    // Together with this package, which has every feature of the tests' dependencies: otherwise all of them
    // would be built again, with fewer.
    let status =
        crate::cargo::command().args(["build", "-p", "knit", "-p", "xtask", "--bin", "knit"]).status();
    ensure!(status.context("cannot run cargo")?.success(), "knit was not built");
    let built = shim::target_dir().join("debug/knit");
    let program = out.with_extension("program");
    folder_of(out)?;
    // Names of functions and lines are most of it, and every node unpacks it.
    let stripped = Command::new("strip").arg("-o").arg(&program).arg(&built).status();
    ensure!(
        stripped.context("cannot run strip (apt install binutils)")?.success(),
        "knit cannot be stripped"
    );
    let libraries = libraries(&program)?;
    write(out, names, program, &libraries)
}

fn write(out: &Path, names: &[&str], program: PathBuf, libraries: &[PathBuf]) -> Result<u64> {
    let (shim, _) = shim::build(None)?;
    folder_of(out)?;
    let mut image = image(program, shim);
    let mut folders = BTreeSet::new();
    for library in libraries {
        folders.extend(library.ancestors().skip(1).filter(|folder| folder.parent().is_some()));
    }
    // `/usr` and what else is there already may come twice; the last one counts.
    let path = |path: &Path| path.display().to_string();
    image.entries.extend(folders.into_iter().map(|folder| Entry::Folder { path: path(folder), mode: 0o755 }));
    image
        .entries
        .extend(libraries.iter().map(|library| Entry::File { path: path(library), from: library.clone() }));
    image.write(out, names)?;
    Ok(std::fs::metadata(out)?.len())
}

fn folder_of(out: &Path) -> Result<()> {
    let folder = out.parent().context("an image is in a folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

/// The shared libraries of a program, and the loader, where it looks for them.
pub fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let paths = text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(paths.filter(|path| path.is_file()).collect())
}

fn image(program: PathBuf, shim: PathBuf) -> Image {
    let folder = |path: &str, mode| Entry::Folder { path: path.into(), mode };
    let label = |name: &str, value: &str| (format!("org.opencontainers.image.{name}"), value.to_owned());
    Image {
        entrypoint: vec!["/usr/bin/knit".into()],
        cmd: vec!["--help".into()],
        env: vec!["PATH=/usr/bin".into()],
        labels: vec![
            label("title", "knit"),
            label("description", "Kubernetes networking: node agent, controller, service proxy, CNI shim"),
            label("version", env!("CARGO_PKG_VERSION")),
            label("licenses", env!("CARGO_PKG_LICENSE")),
        ],
        entries: vec![
            folder("/etc", 0o755),
            Entry::Text {
                path: "/etc/passwd".into(),
                content: "root:x:0:0:root:/:/sbin/nologin\nknit:x:65532:65532:knit:/:/sbin/nologin\n".into(),
            },
            Entry::Text { path: "/etc/group".into(), content: "root:x:0:\nknit:x:65532:\n".into() },
            folder("/run", 0o755),
            folder("/tmp", 0o1777),
            folder("/usr", 0o755),
            folder("/usr/bin", 0o755),
            Entry::File { path: "/usr/bin/knit".into(), from: program },
            Entry::File { path: "/usr/bin/knit-cni".into(), from: shim },
            Entry::Link { path: "/usr/bin/kubectl-knit".into(), target: "knit".into() },
            folder("/var", 0o755),
            // Container runtimes name namespaces of pods by either path.
            Entry::Link { path: "/var/run".into(), target: "../run".into() },
        ],
    }
}
