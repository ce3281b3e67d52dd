//! `cargo xtask kube images`: what the upstream end-to-end tests run in their pods, made here because no
//! registry is asked. One Debian root with common tools stands for most of them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use super::components::Group;
use super::paths::Cache;
use super::{build, certs, images};
use crate::oci::{Entry, Image};

/// Which Debian. Its busybox is the first whose `wget -T` does not crash, which tests call.
const SUITE: &str = "trixie";
const MIRROR: &str = "http://deb.debian.org/debian";
/// What tests call in their pods.
const PACKAGES: &str = "busybox-static,ca-certificates,conntrack,curl,bind9-dnsutils,iperf,iproute2,\
                        iputils-ping,netcat-openbsd,socat";

/// Everything that the root serves as.
const ROOT_NAMES: [&str; 5] = [
    images::AGNHOST,
    "registry.k8s.io/e2e-test-images/agnhost:2.45",
    "registry.k8s.io/e2e-test-images/agnhost:2.55",
    "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.1.1",
    "registry.k8s.io/build-image/distroless-iptables:v0.9.7",
];
/// Tests of endpoints only want something that listens.
const NGINX: &str = "registry.k8s.io/e2e-test-images/nginx:1.27.0-2";
const REGRESSION: &str = "registry.k8s.io/e2e-test-images/regression-issue-74839:1.5";

/// Makes what is missing, the programs in them too, and returns the files.
pub fn make(cache: &Cache) -> Result<Vec<PathBuf>> {
    let folder = cache.images();
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // First, because it says at once when something is not installed.
    let root = root(cache)?;
    build::build(cache, &[Group::Core, Group::E2e])?;
    let agnhost = build::program(cache, "agnhost")?;
    let coredns = build::program(cache, "coredns")?;
    // Named after the builds of what is in it, and how many names it has.
    let [first, second] = [&agnhost, &coredns]
        .map(|program| program.parent().and_then(Path::file_name).unwrap_or_default().display().to_string());
    let tools = folder.join(format!("e2e-{SUITE}-{}-{first}-{second}.tar", ROOT_NAMES.len()));
    if !tools.is_file() {
        let certificates = folder.join("localhost");
        certs::self_signed(&certificates, "localhost")?;
        // Pods of tests read it under any user.
        fs::set_permissions(certificates.with_extension("key"), fs::Permissions::from_mode(0o644))?;
        let file = |path: &str, from: PathBuf| Entry::File { path: path.into(), from };
        let link = |path: &str, target: &str| Entry::Link { path: path.into(), target: target.into() };
        let image = Image {
            entrypoint: vec!["/agnhost".into()],
            cmd: vec!["pause".into()],
            env: images::env(),
            entries: vec![
                Entry::Root { from: root },
                file("/agnhost", agnhost.clone()),
                link("/agnhost-2", "/agnhost"),
                file("/coredns", coredns),
                Entry::Folder { path: "/uploads".into(), mode: 0o777 },
                file("/localhost.crt", certificates.with_extension("crt")),
                file("/localhost.key", certificates.with_extension("key")),
                link("/usr/bin/wget", "/usr/bin/busybox"),
            ],
            ..Image::default()
        };
        image.write(&tools, &ROOT_NAMES)?;
    }
    let web = Image {
        entrypoint: vec!["/agnhost".into()],
        cmd: vec!["netexec".into(), "--http-port=80".into()],
        entries: images::base("/agnhost", agnhost),
        ..Image::default()
    };
    let program = "/regression-issue-74839";
    let regression = Image {
        entrypoint: vec![program.into()],
        entries: images::base(program, build::program(cache, "regression-issue-74839")?),
        ..Image::default()
    };
    Ok(vec![tools, images::write(cache, NGINX, &web)?, images::write(cache, REGRESSION, &regression)?])
}

fn root_folder(cache: &Cache) -> PathBuf {
    cache.images().join(format!("{SUITE}-root"))
}

/// What the images cannot be made without, and is not here.
pub fn missing_tool(cache: &Cache) -> Option<&'static str> {
    let runs = || {
        let mut command = Command::new("debootstrap");
        command.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    (!root_folder(cache).is_dir() && !runs()).then_some(
        "debootstrap is not installed (apt install debootstrap): the images of the upstream tests are made \
         with it",
    )
}

/// The Debian root, made once by debootstrap.
fn root(cache: &Cache) -> Result<PathBuf> {
    let root = root_folder(cache);
    if root.is_dir() {
        return Ok(root);
    }
    ensure!(rustix::process::geteuid().is_root(), "debootstrap needs root: run it with sudo");
    if let Some(why) = missing_tool(cache) {
        bail!(why);
    }
    let mirror = std::env::var("DEBIAN_MIRROR").unwrap_or_else(|_| MIRROR.into());
    eprintln!("making a Debian root from {mirror} (another one: DEBIAN_MIRROR); this is done once");
    let partial = root.with_extension("partial");
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    let status = Command::new("debootstrap")
        .args(["--variant=minbase", &format!("--include={PACKAGES}"), SUITE])
        .arg(&partial)
        .arg(&mirror)
        .stdout(Stdio::null())
        .status()
        .context("cannot run debootstrap")?;
    ensure!(status.success(), "debootstrap failed ({status}); its log is {}/debootstrap", partial.display());
    for rest in
        ["dev", "proc", "sys", "var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"]
    {
        empty(&partial.join(rest))?;
    }
    fs::rename(&partial, &root)?;
    Ok(root)
}

/// Nothing in it is for an image: devices, caches, manuals.
fn empty(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
        fs::create_dir(folder)?;
    }
    Ok(())
}
