//! The kernel's connection table: how many entries it may have, and how long they stay (rule 53).

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::Duration;

use knit_kernel::NetNs;
use knit_kernel::sysctl::{Sysctl, Sysctls};

use super::config;

/// What kube-proxy would set. A value that is `None` is left as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    max_per_core: u64,
    min: u64,
    settings: Vec<(&'static str, u64)>,
}

/// More entries than this are not asked for, however many cores there are.
const CAP: u64 = 1 << 20;

const MAX: &str = "net/netfilter/nf_conntrack_max";

impl Wanted {
    /// Reads the configuration; the defaults are kube-proxy's.
    pub fn of(config: &config::Conntrack) -> Self {
        let seconds = |value: Option<super::duration::GoDuration>, default: u64| {
            let value = value.map_or(Duration::from_secs(default), |d| d.0);
            // Zero leaves the kernel's own value; less than a second cannot be said.
            (!value.is_zero()).then(|| value.as_secs().max(1))
        };
        let mut settings = Vec::new();
        let mut set = |name, value: Option<u64>| settings.extend(value.map(|v| (name, v)));
        set(
            "net/netfilter/nf_conntrack_tcp_timeout_established",
            seconds(config.tcp_established_timeout, 86_400),
        );
        set(
            "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
            seconds(config.tcp_close_wait_timeout, 3_600),
        );
        set("net/netfilter/nf_conntrack_tcp_be_liberal", config.tcp_be_liberal.then_some(1));
        set("net/netfilter/nf_conntrack_udp_timeout", seconds(config.udp_timeout, 0));
        set("net/netfilter/nf_conntrack_udp_timeout_stream", seconds(config.udp_stream_timeout, 0));
        Self {
            max_per_core: config.max_per_core.unwrap_or(32_768),
            min: config.min.unwrap_or(131_072),
            settings,
        }
    }

    /// What to write on a machine with this many cores.
    pub fn plan(&self, cores: usize) -> Vec<(&'static str, u64)> {
        let max = (self.max_per_core > 0).then(|| {
            let scaled = self.max_per_core.saturating_mul(cores as u64).min(CAP);
            (MAX, scaled.max(self.min))
        });
        max.into_iter().chain(self.settings.iter().copied()).collect()
    }

    /// Writes it. Values that the kernel does not let us set (a namespace of our own, a container's read-only
    /// /proc/sys) are named in one line and left as they are: the proxy works without.
    pub fn apply(&self) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let sysctls = match NetNs::current().map_err(knit_kernel::Error::from).and_then(|ns| Sysctls::of(&ns))
        {
            Ok(sysctls) => sysctls,
            Err(error) => {
                tracing::warn!(error = %knit_output::report(&error), "cannot look at sysctls");
                return;
            }
        };
        let mut refused = Refused::default();
        for (name, value) in self.plan(cores) {
            let set = Sysctl::new(name).and_then(|sysctl| {
                if sysctls.get(&sysctl)? == value.to_string() {
                    return Ok(false);
                }
                sysctls.set(&sysctl, value).map(|()| true)
            });
            match set {
                Ok(true) => tracing::info!("set sysctl {name} to {value}"),
                Ok(false) => {}
                Err(error) => refused.add(name, value, &error),
            }
        }
        for line in refused.lines() {
            tracing::warn!("{line}");
        }
    }
}

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
                "the kernel lets only the host's own root, in the host's network, set them".to_owned()
            }
            knit_kernel::Error::Sysctl { source, .. } if source.kind() == ErrorKind::NotFound => {
                "this kernel has no such setting, or does not track connections yet".to_owned()
            }
            other => knit_output::report(other).to_string(),
        };
        self.0.entry(reason).or_default().push(format!("{name}={value}"));
    }

    /// One for each reason.
    fn lines(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(reason, settings)| {
            format!(
                "limits of the connection table stay as they are: {reason}. Services work without; where the limits \
                 matter, set them on the host: {}",
                settings.join(" ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::File;
    use super::*;

    fn plan(text: &str, cores: usize) -> Vec<String> {
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        let file = File::parse(&format!("{head}{text}")).unwrap();
        let plan = Wanted::of(&file.config.conntrack).plan(cores);
        plan.iter().map(|(name, value)| format!("{}={value}", name.rsplit('/').next().unwrap())).collect()
    }

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
    fn rule_53_the_limits_of_the_connection_table() {
        let timeouts =
            ["nf_conntrack_tcp_timeout_established=86400", "nf_conntrack_tcp_timeout_close_wait=3600"];
        let with = |max: &'static str| [&[max], &timeouts[..]].concat();
        assert_eq!(plan("", 2), with("nf_conntrack_max=131072"), "the least");
        assert_eq!(plan("", 8), with("nf_conntrack_max=262144"), "per core");
        assert_eq!(plan("", 128), with("nf_conntrack_max=1048576"), "the cap");
        assert_eq!(plan("conntrack: {maxPerCore: 0}", 8), timeouts, "left alone");
        let all = "conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 90s, tcpBeLiberal: true, \
                   udpTimeout: 10s, udpStreamTimeout: 1m}";
        let expected = [
            "nf_conntrack_tcp_timeout_close_wait=90",
            "nf_conntrack_tcp_be_liberal=1",
            "nf_conntrack_udp_timeout=10",
            "nf_conntrack_udp_timeout_stream=60",
        ];
        assert_eq!(plan(all, 8), expected);
    }
}
