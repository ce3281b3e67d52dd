//! `cargo xtask kube build`: the components, built by `go` once and kept in the cache.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use knit_kernel::sandbox::die_with_parent;

use super::components::{self, Component, Group, Program};
use super::paths::Cache;
use super::wait::until;

/// No single program takes this long, not even on one slow core.
const LIMIT: Duration = Duration::from_secs(3600);
/// How often a long build says that it is still there.
const SIGN_OF_LIFE: Duration = Duration::from_secs(30);

/// Builds what is missing of these groups, and shows progress.
pub fn build(cache: &Cache, groups: &[Group]) -> Result<()> {
    let mut wanted = Vec::new();
    for component in components::of(groups) {
        let folder = cache.programs(component.name, &component.key()?);
        for program in component.programs {
            if !folder.join(program.name).is_file() {
                wanted.push((component, program, folder.clone()));
            }
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    check_tools(wanted.iter().any(|(component, ..)| component.cgo))?;
    let (start, all) = (Instant::now(), wanted.len());
    eprintln!("building {all} programs into {}; this is done once", cache.path().display());
    for (number, (component, program, folder)) in wanted.iter().enumerate() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let label = format!("[{}/{all}] {}", number + 1, program.name);
        build_one(component, program, folder, &label)?;
    }
    eprintln!("built {all} programs in {:.0} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Says what is missing, before minutes have passed.
fn check_tools(cgo: bool) -> Result<()> {
    if let Some(words) = missing_tool(cgo) {
        bail!(words);
    }
    if cgo && !components::seccomp_headers() {
        eprintln!("runc is built without seccomp. {NO_SECCOMP}");
    }
    Ok(())
}

/// Why the controller of Knit, which asks for a filter, would not start on the bed.
pub const NO_SECCOMP: &str = "libseccomp's headers are not installed (apt install libseccomp-dev): without \
                              them pods \
     with `seccompProfile: RuntimeDefault` do not start";

/// What cannot be done without, and is not here.
pub fn missing_tool(cgo: bool) -> Option<&'static str> {
    let runs = |program: &str, argument: &str| {
        Command::new(program)
            .arg(argument)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
    };
    if !runs("go", "version") {
        return Some(
            "Go is not installed: the cluster's components are built with it. Install Go 1.26 or newer \
             (https://go.dev/dl) and have `go` in the PATH",
        );
    }
    let no_compiler = cgo && !runs("cc", "--version") && !runs("gcc", "--version");
    no_compiler
        .then_some("no C compiler is installed: runc needs one. Install gcc (apt install gcc libc6-dev)")
}

fn build_one(component: &Component, program: &Program, folder: &Path, label: &str) -> Result<()> {
    eprintln!("{label} ...");
    let start = Instant::now();
    // First beside it: an interrupted build leaves nothing that looks finished.
    let partial = folder.join(format!("{}.partial", program.name));
    let log = folder.join(format!("{}.log", program.name));
    let mut command = component.build(program, &partial);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
    die_with_parent(&mut command);
    let mut child = command.spawn().context("cannot run go")?;
    let mut said = Instant::now();
    let status = until(program.name, LIMIT, || {
        if said.elapsed() > SIGN_OF_LIFE {
            said = Instant::now();
            eprintln!("{label} ... {:.0} s", start.elapsed().as_secs_f64());
        }
        Ok(child.try_wait()?)
    })?;
    if !status.success() {
        let words = fs::read_to_string(&log).unwrap_or_default();
        bail!("go could not build {} ({status}):\n{}", program.name, words.trim_end());
    }
    fs::remove_file(&log)?;
    let made = folder.join(program.name);
    fs::rename(&partial, &made).with_context(|| format!("go left no {}", partial.display()))?;
    let size = fs::metadata(&made)?.len() >> 20;
    eprintln!("{label}: {:.1} s, {size} MiB", start.elapsed().as_secs_f64());
    Ok(())
}

/// Whether all programs of a group are there.
pub fn is_built(cache: &Cache, group: Group) -> Result<bool> {
    for component in components::of(&[group]) {
        let folder = cache.programs(component.name, &component.key()?);
        if component.programs.iter().any(|program| !folder.join(program.name).is_file()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Where a program is in the cache.
pub fn program(cache: &Cache, name: &str) -> Result<PathBuf> {
    let found = components::ALL.iter().find(|c| c.programs.iter().any(|program| program.name == name));
    let component = found.with_context(|| format!("no component has a program {name}"))?;
    Ok(cache.programs(component.name, &component.key()?).join(name))
}

/// One folder with all that is built, for whoever wants to call it by name: tests, a PATH.
pub fn current(cache: &Cache) -> Result<PathBuf> {
    let folder = cache.path().join("current");
    // A new folder in place of the old one: another build may have replaced programs.
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot empty {}", folder.display()));
        }
        _ => link(cache, &folder)?,
    }
    Ok(folder)
}

/// Links everything that is built into a folder of programs: the bed's own, or the one above.
pub fn link(cache: &Cache, bin: &Path) -> Result<()> {
    fs::create_dir_all(bin)?;
    for component in &components::ALL {
        let folder = cache.programs(component.name, &component.key()?);
        for program in component.programs.iter().filter(|program| folder.join(program.name).is_file()) {
            let from = fs::canonicalize(folder.join(program.name))?;
            symlink(from, bin.join(program.name)).with_context(|| format!("cannot link {}", program.name))?;
        }
    }
    Ok(())
}
