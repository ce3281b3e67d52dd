//! `knit install`: puts shim and CNI configuration where the container runtime looks for them.
//!
//! The shim comes first and the configuration last, each in one step: at no moment does a runtime find a
//! configuration without its plugin, or half a file.

use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use knit_output::{Note, note};
use serde_json::json;

/// Install the CNI shim and its configuration where the container runtime looks for them
///
/// The pod of the node agent does this in an init container. The node stays NotReady until the agent is
/// serving.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  # As the init container does it, with the host's folders mounted at the same paths
  knit install

  # On a distribution with other folders (k3s)
  knit install --bin-dir /var/lib/rancher/k3s/data/cni --conf-dir /var/lib/rancher/k3s/agent/etc/cni/net.d

  # Rename the configurations of other CNI plugins, too; knit uninstall gives them their names back
  knit install --set-aside")]
pub struct Args {
    #[command(flatten)]
    pub places: Places,

    /// The shim to install [default: knit-cni beside this program]
    #[arg(long, value_name = "FILE")]
    shim: Option<PathBuf>,

    /// The agent's runtime directory, where its socket is
    #[arg(long, env = "KNIT_RUN_DIR", value_name = "DIR", default_value = knit_cni::paths::RUN_DIR)]
    run_dir: PathBuf,

    /// Rename other CNI configurations, so that nothing uses them by accident
    #[arg(long, env = "KNIT_SET_ASIDE")]
    set_aside: bool,
}

/// Where the container runtime looks.
#[derive(Clone, Debug, clap::Args)]
pub struct Places {
    /// Where the container runtime looks for CNI plugins
    #[arg(long, env = "KNIT_CNI_BIN_DIR", value_name = "DIR", default_value = "/opt/cni/bin")]
    pub bin_dir: PathBuf,

    /// Where the container runtime looks for CNI configurations
    #[arg(long, env = "KNIT_CNI_CONF_DIR", value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub conf_dir: PathBuf,

    /// File name of Knit's configuration: runtimes use the first one by name
    #[arg(long, env = "KNIT_CNI_CONF_NAME", value_name = "NAME", default_value = CONFIGURATION)]
    pub conf_name: String,
}

/// The name of the configuration unless another one is given. It sorts before what others are called.
pub const CONFIGURATION: &str = "05-knit.conflist";
/// The shim's name, as configurations have it.
pub const SHIM: &str = "knit-cni";
/// What a configuration that was set aside has behind its name.
pub const ASIDE: &str = "knit-aside";

// === impl Places ===

impl Places {
    pub fn shim(&self) -> PathBuf {
        self.bin_dir.join(SHIM)
    }

    pub fn configuration(&self) -> PathBuf {
        self.conf_dir.join(&self.conf_name)
    }

    /// Other configurations, sorted by name.
    fn others(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.conf_dir)
            .with_context(|| format!("cannot read {}", self.conf_dir.display()))?;
        let is_configuration = |path: &Path| {
            matches!(path.extension().and_then(OsStr::to_str), Some("conflist" | "conf" | "json"))
        };
        let mut others: Vec<PathBuf> = entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| is_configuration(path) && path.file_name() != Some(OsStr::new(&self.conf_name)))
            .collect();
        others.sort();
        Ok(others)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let places = &args.places;
    if !is_plain_conflist(&places.conf_name) {
        bail!(
            "--conf-name {:?} is not a file name for a CNI configuration; write one such as {CONFIGURATION}",
            places.conf_name
        );
    }
    let shim = match &args.shim {
        Some(shim) => shim.clone(),
        None => std::env::current_exe().context("this program's own path")?.with_file_name(SHIM),
    };
    let program = fs::read(&shim)
        .with_context(|| format!("cannot read the shim {}: specify it with --shim", shim.display()))?;
    for folder in [&places.bin_dir, &places.conf_dir] {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    put(&places.shim(), &program, 0o755)?;
    put(&places.configuration(), configuration(&args.run_dir).as_bytes(), 0o600)?;
    for other in places.others()? {
        if args.set_aside {
            let mut aside = other.clone().into_os_string();
            aside.push(format!(".{ASIDE}"));
            fs::rename(&other, &aside).with_context(|| format!("cannot rename {}", other.display()))?;
            note(Note::Info, format!("{} is set aside", other.display()));
        } else if other.file_name() < Some(OsStr::new(&places.conf_name)) {
            note(
                Note::Warning,
                format!(
                    "{} sorts before {}, and container runtimes use the first: remove it, or \
                    install with --set-aside",
                    other.display(),
                    places.conf_name
                ),
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn is_plain_conflist(name: &str) -> bool {
    let path = Path::new(name);
    path.file_name() == Some(OsStr::new(name)) && path.extension() == Some(OsStr::new("conflist"))
}

/// The configuration: all that a runtime must know. The rest are objects.
fn configuration(run_dir: &Path) -> String {
    let mut plugin = json!({
        "type": SHIM,
        "capabilities": { "portMappings": true, "io.kubernetes.cri.pod-annotations": true },
    });
    if run_dir != Path::new(knit_cni::paths::RUN_DIR) {
        plugin["socket"] = json!(knit_cni::paths::socket(run_dir));
    }
    let list = json!({ "cniVersion": "1.1.0", "name": "knit", "plugins": [plugin] });
    format!("{list:#}\n")
}

/// Writes a file beside its place and moves it there in one step, durably. One that is there with the same
/// bytes stays.
fn put(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    let same_mode = |path: &Path| fs::metadata(path).is_ok_and(|m| m.permissions().mode() & 0o7777 == mode);
    if fs::read(path).is_ok_and(|found| found == content) && same_mode(path) {
        note(Note::Info, format!("{} already exists", path.display()));
        return Ok(());
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // A name that no runtime takes for a configuration, and that a crash leaves only once.
    let partial = path.with_file_name(format!(".{name}.partial"));
    let written = || -> std::io::Result<()> {
        match fs::remove_file(&partial) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&partial)?;
        file.write_all(content)?;
        // The umask may have taken bits away.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        drop(file);
        fs::rename(&partial, path)?;
        fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    };
    if let Err(error) = written() {
        let _ = fs::remove_file(&partial);
        return Err(error).with_context(|| format!("cannot write {}", path.display()));
    }
    note(Note::Info, format!("{} is installed", path.display()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(root: &Path) -> Args {
        let shim = root.join("shim");
        fs::write(&shim, b"a program").expect("written");
        let places = Places {
            bin_dir: root.join("opt/cni/bin"),
            conf_dir: root.join("etc/cni/net.d"),
            conf_name: CONFIGURATION.into(),
        };
        Args { places, shim: Some(shim), run_dir: knit_cni::paths::RUN_DIR.into(), set_aside: false }
    }

    fn files(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn shim_and_configuration_are_there_with_their_modes_and_nothing_else() {
        let root = tempfile::tempdir().expect("a folder");
        let args = args(root.path());
        for _ in 0..2 {
            run(&args).expect("installed");
        }
        assert_eq!(files(&args.places.bin_dir), [SHIM]);
        assert_eq!(files(&args.places.conf_dir), [CONFIGURATION]);
        let mode = |path: PathBuf| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!(mode(args.places.shim()), 0o755);
        assert_eq!(mode(args.places.configuration()), 0o600);
        let text = fs::read(args.places.configuration()).expect("there");
        let list: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(list["cniVersion"], "1.1.0");
        let plugin = &list["plugins"][0];
        assert_eq!(plugin["type"], SHIM);
        assert_eq!(plugin["capabilities"]["io.kubernetes.cri.pod-annotations"], true);
        assert_eq!(plugin.get("socket"), None, "the shim knows the usual place");
    }

    #[test]
    fn a_changed_shim_is_replaced_and_what_a_crash_left_does_no_harm() {
        let root = tempfile::tempdir().expect("a folder");
        let args = args(root.path());
        fs::create_dir_all(&args.places.bin_dir).expect("a folder");
        fs::write(args.places.bin_dir.join(".knit-cni.partial"), b"half").expect("written");
        run(&args).expect("installed");
        fs::write(args.shim.as_ref().expect("a shim"), b"a newer program").expect("written");
        run(&args).expect("installed");
        assert_eq!(fs::read(args.places.shim()).expect("there"), b"a newer program");
        assert_eq!(files(&args.places.bin_dir), [SHIM]);
    }

    #[test]
    fn other_configurations_stay_unless_told_otherwise() {
        let root = tempfile::tempdir().expect("a folder");
        let mut args = args(root.path());
        fs::create_dir_all(&args.places.conf_dir).expect("a folder");
        fs::write(args.places.conf_dir.join("10-other.conflist"), b"{}").expect("written");
        run(&args).expect("installed");
        assert_eq!(files(&args.places.conf_dir), [CONFIGURATION, "10-other.conflist"]);
        args.set_aside = true;
        run(&args).expect("installed");
        assert_eq!(files(&args.places.conf_dir), [CONFIGURATION, "10-other.conflist.knit-aside"]);
        crate::command::uninstall::files(&args.places).expect("uninstalled");
        assert_eq!(files(&args.places.conf_dir), ["10-other.conflist"]);
        assert_eq!(files(&args.places.bin_dir), Vec::<String>::new());
    }

    #[test]
    fn another_run_directory_is_named_in_the_configuration() {
        let list: serde_json::Value =
            serde_json::from_str(&configuration(Path::new("/run/two"))).expect("JSON");
        assert_eq!(list["plugins"][0]["socket"], "/run/two/cni.sock");
    }

    #[test]
    fn names_that_are_no_configurations_are_refused() {
        let root = tempfile::tempdir().expect("a folder");
        for name in ["../x.conflist", "x.conf", "", "a/b.conflist"] {
            let mut args = args(root.path());
            args.places.conf_name = name.into();
            assert!(run(&args).is_err(), "{name:?}");
        }
    }
}
