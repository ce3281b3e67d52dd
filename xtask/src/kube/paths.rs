//! Where the bed keeps things: what is built once (the cache), and what belongs to a running bed (the state).

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// What is built once and never again: programs and images.
#[derive(Debug, Clone)]
pub struct Cache(PathBuf);

/// Everything of one running bed; gone after `down`.
#[derive(Debug, Clone)]
pub struct State(PathBuf);

/// Nodes have overlays of their own over these, so the state cannot be below one of them.
pub const OVERLAID: [&str; 4] = ["/etc", "/var/lib", "/var/log", "/opt"];

/// The kernel's limit for the path of a Unix socket is 107 bytes, and ours are below the state's folder.
const LONGEST: usize = 60;

impl Cache {
    /// `$KNIT_KUBE_CACHE`, or `knit/kube` in the user's cache folder.
    pub fn find() -> Result<Self> {
        if let Some(path) = std::env::var_os("KNIT_KUBE_CACHE") {
            return Ok(Self(path.into()));
        }
        let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
        let cache = xdg.or(home).context("neither KNIT_KUBE_CACHE nor HOME is set: set one of them")?;
        Ok(Self(cache.join("knit/kube")))
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The programs of one component.
    pub fn programs(&self, component: &str, key: &str) -> PathBuf {
        self.0.join("bin").join(format!("{component}-{key}"))
    }

    /// The images.
    pub fn images(&self) -> PathBuf {
        self.0.join("images")
    }

    /// Logs of tests and beds that failed.
    pub fn failed(&self) -> PathBuf {
        self.0.join("failed")
    }
}

impl State {
    /// `$KNIT_KUBE_STATE`, or `state` in the cache.
    pub fn find(cache: &Cache) -> Result<Self> {
        let path = std::env::var_os("KNIT_KUBE_STATE").map_or_else(|| cache.0.join("state"), PathBuf::from);
        let path = std::path::absolute(path).context("the state's folder")?;
        let length = path.as_os_str().len();
        let place = path.display();
        ensure!(
            length <= LONGEST,
            "{place} is too long for sockets below it: set KNIT_KUBE_STATE to a shorter path"
        );
        for overlaid in OVERLAID {
            ensure!(
                !path.starts_with(overlaid),
                "{place} is below {overlaid}, which nodes have of their own: set KNIT_KUBE_STATE to another \
                 path"
            );
        }
        Ok(Self(path))
    }

    /// A state folder that somebody named.
    pub fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Links to all programs of the bed.
    pub fn bin(&self) -> PathBuf {
        self.0.join("bin")
    }

    /// One program.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin().join(name)
    }

    /// Certificates and keys.
    pub fn pki(&self) -> PathBuf {
        self.0.join("pki")
    }

    /// Log files, one for each daemon.
    pub fn logs(&self) -> PathBuf {
        self.0.join("log")
    }

    /// Who may do everything; good on this machine's loopback and in the control plane's namespace.
    pub fn kubeconfig(&self) -> PathBuf {
        self.0.join("admin.kubeconfig")
    }

    /// The kubeconfig of a component.
    pub fn kubeconfig_of(&self, component: &str) -> PathBuf {
        self.0.join("conf").join(format!("{component}.kubeconfig"))
    }

    /// What belongs to one machine: the control plane, or a node.
    pub fn machine(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// What the bed is: its options.
    pub fn description(&self) -> PathBuf {
        self.0.join("bed.json")
    }
}
