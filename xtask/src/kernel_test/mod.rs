//! `cargo xtask kernel-test`: the tests with namespaces and packets, on another kernel than this machine's.
//!
//! The kernel is taken out of Debian packages, which are unpacked and not installed, and started by QEMU with
//! a file system in memory that has the test programs in it. Nothing of this machine can be reached from
//! there; what is printed on the guest's serial line is the result.

mod cpio;
mod guest;
mod kernel;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use knit_kernel::sandbox::die_with_parent;
use serde::Deserialize;

use crate::shim::target_dir;
use kernel::Kernel;

/// Runs tests in a virtual machine with another kernel.
#[derive(clap::Args)]
pub struct Args {
    /// Packages of the workspace whose tests run
    #[arg(default_values = PACKAGES)]
    packages: Vec<String>,
    /// Debian packages with a kernel and its modules, in place of the 6.1 kernel that apt knows
    #[arg(long = "deb", value_name = "FILE")]
    debs: Vec<PathBuf>,
    /// Run only tests whose names contain this
    #[arg(long, value_name = "WORD", default_value = "")]
    only: String,
    /// Memory of the virtual machine
    #[arg(long, value_name = "MiB", default_value_t = MEMORY)]
    memory: u32,
    /// Use the processor's own virtualisation, where this machine has it; otherwise instructions are
    /// translated, which works everywhere
    #[arg(long)]
    kvm: bool,
}

/// Those that talk to the kernel by themselves. Tests of whole agents (knit-enforcement, knit-services) want
/// certificates, and more speed than a translated processor has.
const PACKAGES: [&str; 5] = ["knit-kernel", "knit-linux", "knit-proxy-nft", "knit-policy-nft", "knit-drops"];
const MEMORY: u32 = 2048;

impl Default for Args {
    fn default() -> Self {
        let packages = PACKAGES.map(str::to_owned).into();
        Self { packages, debs: Vec::new(), only: String::new(), memory: MEMORY, kvm: false }
    }
}

/// One program of tests.
#[derive(Debug)]
struct Program {
    /// `knit-kernel links`.
    name: String,
    file: PathBuf,
    /// Where cargo would run it: the folder of its package.
    folder: PathBuf,
}

pub fn run(args: &Args) -> Result<()> {
    ensure!(cfg!(target_arch = "x86_64"), "there is no guest yet for {}", std::env::consts::ARCH);
    for (tool, package) in
        [("qemu-system-x86_64", "qemu-system-x86"), ("dpkg-deb", "dpkg"), ("strip", "binutils")]
    {
        let found = Command::new(tool).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        ensure!(found.is_ok(), "{tool} is not installed (apt install {package})");
    }
    let kernel = if args.debs.is_empty() { Kernel::of_apt()? } else { Kernel::of_debs(&args.debs)? };
    let programs = build(&args.packages)?;
    let folder = target_dir().join("kernel-test");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let system = folder.join("initramfs");
    let size = guest::write(&system, &folder, &kernel, &programs, &args.only)?;
    eprintln!(
        "{} programs of tests on Linux {} ({} MiB to load)",
        programs.len(),
        kernel.version,
        size >> 20
    );
    let start = Instant::now();
    let ended = start_guest(&kernel, &system, args)?;
    let failed: Vec<&str> = programs
        .iter()
        .filter(|program| !ended.iter().any(|(name, code)| *name == program.name && *code == 0))
        .map(|program| program.name.as_str())
        .collect();
    let seconds = start.elapsed().as_secs();
    ensure!(
        failed.is_empty(),
        "on Linux {}, these failed or did not end: {}",
        kernel.version,
        failed.join(", ")
    );
    eprintln!("all {} passed on Linux {} in {seconds} s", programs.len(), kernel.version);
    Ok(())
}

/// What cargo says that it built.
#[derive(Debug, Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

fn build(packages: &[String]) -> Result<Vec<Program>> {
    let mut command = crate::cargo::command();
    command.args(["test", "--no-run", "--lib", "--tests", "--message-format=json-render-diagnostics"]);
    for package in packages {
        command.args(["-p", package]);
    }
    let output = command.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    ensure!(output.status.success(), "the tests were not built");
    let mut programs = Vec::new();
    for line in output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let message: Message = serde_json::from_slice(line).context("cargo said what is not understood")?;
        let (Some(file), Some(target)) = (message.executable, message.target) else { continue };
        // The packages' own programs are built besides; they are not tests.
        if target.kind.iter().any(|kind| kind == "bin" || kind == "example") {
            continue;
        }
        let folder = message.manifest_path.parent().context("a manifest is in a folder")?.to_owned();
        let package = folder.file_name().unwrap_or_default().display().to_string();
        programs.push(Program { name: format!("{package} {}", target.name), file, folder });
    }
    ensure!(!programs.is_empty(), "there are no tests in {}", packages.join(", "));
    Ok(programs)
}

/// Starts the guest and shows what it prints; which programs ended, and how.
fn start_guest(kernel: &Kernel, system: &Path, args: &Args) -> Result<Vec<(String, i32)>> {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-machine", "q35", "-cpu", "max", "-smp", "2", "-m", &args.memory.to_string()])
        .args(["-accel", if args.kvm { "kvm" } else { "tcg,thread=multi" }])
        .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(system)
        .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off"]);
    qemu.stdin(Stdio::null()).stdout(Stdio::piped());
    die_with_parent(&mut qemu);
    let mut child = qemu.spawn().context("cannot run qemu-system-x86_64")?;
    let output = BufReader::new(child.stdout.take().context("a pipe")?);
    let mut ended = Vec::new();
    for line in output.split(b'\n') {
        let line = String::from_utf8_lossy(&line?).trim_end().to_owned();
        match guest::ended(&line) {
            Some(end) => ended.push(end),
            None => println!("{line}"),
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("qemu-system-x86_64 ended with {status}");
    }
    Ok(ended)
}
