//! The kernel's connection table: how many entries it may have, and how long they stay (rule 53). A service
//! proxy has them set, because every connection to a service has an entry.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::sync::OnceLock;
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::sysctl::{Sysctl, Sysctls};

use crate::table::report;

/// How many connections the kernel's table takes.
const MOST: &str = "net/netfilter/nf_conntrack_max";

/// What is wanted of the connection table. The default is kube-proxy's; what is `None`, zero or false is left
/// as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Entries for each core; zero: their number is left as it is.
    pub max_per_core: u64,
    /// Entries at least, however few cores there are.
    pub min: u64,
    /// How long a TCP connection stays on which nothing is sent.
    pub tcp_established: Option<Duration>,
    /// How long a TCP connection stays of which one side has closed.
    pub tcp_close_wait: Option<Duration>,
    /// TCP packets outside of the window do not count as invalid.
    pub tcp_be_liberal: bool,
    /// How long a UDP flow stays that was not answered.
    pub udp: Option<Duration>,
    /// How long one stays that was.
    pub udp_stream: Option<Duration>,
}

/// More entries than this are not asked for, however many cores there are.
const CAP: u64 = 1 << 20;

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_per_core: 32_768,
            min: 131_072,
            tcp_established: Some(Duration::from_secs(86_400)),
            tcp_close_wait: Some(Duration::from_secs(3_600)),
            tcp_be_liberal: false,
            udp: None,
            udp_stream: None,
        }
    }
}

/// How many processors this process may use. Looked up once: the standard library reads the list of mounts
/// for it.
#[must_use]
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

impl Limits {
    /// The same without the number of entries, which is the whole machine's.
    #[must_use]
    pub fn of_router(self) -> Self {
        Self { max_per_core: 0, ..self }
    }

    /// What to write on a machine with this many cores.
    pub fn plan(&self, cores: usize) -> Vec<(&'static str, u64)> {
        // Less than a second cannot be said.
        let seconds = |value: Option<Duration>| value.map(|value| value.as_secs().max(1));
        let max = (self.max_per_core > 0)
            .then(|| self.max_per_core.saturating_mul(cores as u64).min(CAP).max(self.min));
        let all = [
            (MOST, max),
            ("net/netfilter/nf_conntrack_tcp_timeout_established", seconds(self.tcp_established)),
            ("net/netfilter/nf_conntrack_tcp_timeout_close_wait", seconds(self.tcp_close_wait)),
            ("net/netfilter/nf_conntrack_tcp_be_liberal", self.tcp_be_liberal.then_some(1)),
            ("net/netfilter/nf_conntrack_udp_timeout", seconds(self.udp)),
            ("net/netfilter/nf_conntrack_udp_timeout_stream", seconds(self.udp_stream)),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }

    /// Writes it. Values that the kernel does not let us set (a namespace of our own, a container's read-only
    /// /proc/sys) are named in one line and left as they are: a proxy works without.
    pub fn apply(&self, namespace: &NetNs) {
        self.keep(namespace, &mut RefusedLimits::default());
    }

    /// Writes what is not as it should be, and says how many values that were. What was refused before is
    /// neither tried nor told again.
    pub fn keep(&self, namespace: &NetNs, before: &mut RefusedLimits) -> usize {
        let sysctls = match Sysctls::of(namespace) {
            Ok(sysctls) => sysctls,
            Err(error) => {
                tracing::warn!(error = report(&error), "cannot read sysctls");
                return 0;
            }
        };
        let (mut refused, mut written) = (Refused::default(), 0);
        for (name, value) in self.plan(cores()) {
            if before.0.contains(name) {
                continue;
            }
            let set = Sysctl::new(name).and_then(|sysctl| {
                let now = sysctls.get(&sysctl)?;
                // Whoever made the table larger had a reason.
                let enough = name == MOST && now.trim().parse().is_ok_and(|now: u64| now >= value);
                if enough || now == value.to_string() {
                    return Ok(false);
                }
                sysctls.set(&sysctl, value).map(|()| true)
            });
            match set {
                Ok(true) => {
                    written += 1;
                    tracing::info!("set sysctl {name} to {value}");
                }
                Ok(false) => {}
                Err(error) => {
                    before.0.insert(name);
                    refused.add(name, value, &error);
                }
            }
        }
        for line in refused.lines() {
            tracing::warn!("{line}");
        }
        written
    }
}

/// The values that the kernel did not let us set.
#[derive(Debug, Default)]
pub struct RefusedLimits(BTreeSet<&'static str>);

/// What could not be set, by the reason.
#[derive(Debug, Default)]
struct Refused(BTreeMap<String, Vec<String>>);

impl Refused {
    fn add(&mut self, name: &str, value: u64, error: &knit_kernel::Error) {
        let reason = match error {
            knit_kernel::Error::Sysctl { source, .. } if source.kind() == ErrorKind::ReadOnlyFilesystem => {
                "/proc/sys is read-only in this container".to_owned()
            }
            knit_kernel::Error::Sysctl { source, .. } if source.kind() == ErrorKind::PermissionDenied => {
                "the kernel lets only the host's root user, in the host's network namespace, set \
                them"
                    .to_owned()
            }
            knit_kernel::Error::Sysctl { source, .. } if source.kind() == ErrorKind::NotFound => {
                "this kernel has no such setting, or does not track connections yet".to_owned()
            }
            other => report(other),
        };
        self.0.entry(reason).or_default().push(format!("{name}={value}"));
    }

    /// One for each reason.
    fn lines(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(reason, settings)| {
            format!(
                "limits of the connection table are not changed: {reason}. Services work without \
                them; if the limits matter, set them on the host: {}",
                settings.join(" ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_refused_for_one_reason_are_one_line() {
        let error = |errno| knit_kernel::Error::Sysctl {
            attempted: "set it".into(),
            namespace: "net:[1]".into(),
            source: std::io::Error::from_raw_os_error(errno),
        };
        let (read_only, denied) = (error(30), error(13));
        let mut refused = Refused::default();
        refused.add("net/netfilter/a", 1, &read_only);
        refused.add("net/netfilter/b", 2, &denied);
        refused.add("net/netfilter/c", 3, &read_only);
        let lines: Vec<_> = refused.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].contains("/proc/sys is read-only in this container"), "{lines:?}");
        assert!(lines[0].ends_with("set them on the host: net/netfilter/a=1 net/netfilter/c=3"), "{lines:?}");
        assert!(lines[1].ends_with("set them on the host: net/netfilter/b=2"), "{lines:?}");
    }

    #[test]
    fn a_router_leaves_the_number_of_entries_alone() {
        let plan = Limits::default().of_router().plan(8);
        assert!(plan.iter().all(|(name, _)| *name != "net/netfilter/nf_conntrack_max"), "{plan:?}");
        assert!(plan.contains(&("net/netfilter/nf_conntrack_tcp_timeout_close_wait", 3600)), "{plan:?}");
    }
}
