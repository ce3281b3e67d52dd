//! Where a running lab is found on this machine: a directory with its lock, its socket and its kubeconfig.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use knit_lab::cluster::control::{self, Request};
use serde_json::Value;

/// Which lab is meant
#[derive(Clone, Debug, clap::Args)]
pub struct Which {
    /// The lab's name, if there are several
    #[arg(long, env = "KNIT_LAB", value_name = "NAME", default_value = "lab")]
    pub name: String,
}

/// The directory of one lab.
#[derive(Clone, Debug)]
pub struct LabDirectory {
    name: String,
    dir: PathBuf,
}

/// Who holds this runs the lab.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Which {
    pub fn place(&self) -> Result<LabDirectory> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if self.name.is_empty() || self.name.len() > 32 || !self.name.chars().all(plain) {
            bail!("{:?} is not a valid lab name: use up to 32 letters, digits and dashes", self.name);
        }
        let base = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_dir()) {
            Some(dir) => PathBuf::from(dir).join("knit-lab"),
            None => {
                // In a sandbox the numbers differ; there the path comes from outside.
                let uid = rustix::process::geteuid().as_raw();
                std::env::temp_dir().join(format!("knit-lab-{uid}"))
            }
        };
        Ok(LabDirectory { name: self.name.clone(), dir: base.join(&self.name) })
    }
}

impl LabDirectory {
    /// A lab's directory, as another process of it has named it.
    pub fn at(name: &str, dir: PathBuf) -> Self {
        Self { name: name.to_owned(), dir }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("control.sock")
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    fn lock_file(&self) -> PathBuf {
        self.dir.with_extension("lock")
    }

    /// Takes the lab's place. What an earlier one left that was killed is taken away; one that runs is an
    /// error.
    pub fn take(&self) -> Result<Lock> {
        use std::os::unix::fs::DirBuilderExt as _;
        let parent = self.dir.parent().unwrap_or(Path::new("/"));
        let make = |dir: &Path| std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        make(parent).with_context(|| format!("cannot create directory {}", parent.display()))?;
        let path = self.lock_file();
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        if file.try_lock().is_err() {
            bail!(
                "a lab named {0} is already running: stop it with `knit lab down --name {0}`, or \
                give this one another --name",
                self.name
            );
        }
        if self.dir.exists() {
            std::fs::remove_dir_all(&self.dir)
                .with_context(|| format!("cannot remove what a killed lab left in {}", self.dir.display()))?;
            knit_output::note(
                knit_output::Note::Info,
                format!("removed what a killed lab left in {}", self.dir.display()),
            );
        }
        make(&self.dir).with_context(|| format!("cannot create directory {}", self.dir.display()))?;
        Ok(Lock { _file: file })
    }

    /// Whether a lab runs here.
    pub fn is_running(&self) -> bool {
        File::open(self.lock_file()).is_ok_and(|file| file.try_lock().is_err())
    }

    /// Takes the directory away. The lock's file goes last, while it is held.
    pub fn remove(&self, lock: Lock) {
        let _ = std::fs::remove_dir_all(&self.dir);
        let _ = std::fs::remove_file(self.lock_file());
        drop(lock);
        self.remove_parent();
    }

    /// Takes away the directory of all labs, if no other one is there.
    pub fn remove_parent(&self) {
        if let Some(parent) = self.dir.parent() {
            let _ = std::fs::remove_dir(parent);
        }
    }

    /// Asks the running lab; `streams` says whether it gets our standard streams.
    pub fn ask(&self, request: &Request, streams: bool) -> Result<Value> {
        let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
        let all = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
        let streams = if streams { &all[..] } else { &[] };
        match control::ask(&self.socket(), request, streams) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(words)) => bail!(words),
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
                ) =>
            {
                bail!("no lab named {} is running here: start one with `knit lab up`", self.name)
            }
            Err(error) => Err(error).context("the lab does not answer"),
        }
    }
}
