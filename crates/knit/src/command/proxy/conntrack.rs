//! What a KubeProxyConfiguration says about the kernel's connection table (rule 53).

use std::time::Duration;

use knit_proxy_nft::Limits;

use super::config;
use super::duration::GoDuration;

/// Reads the configuration; the defaults are kube-proxy's.
pub fn wanted(config: &config::Conntrack) -> Limits {
    let default = Limits::default();
    // Zero leaves the kernel's own value.
    let time = |value: Option<GoDuration>, default: Option<Duration>| {
        value.map_or(default, |d| Some(d.0)).filter(|d| !d.is_zero())
    };
    Limits {
        max_per_core: config.max_per_core.unwrap_or(default.max_per_core),
        min: config.min.unwrap_or(default.min),
        tcp_established: time(config.tcp_established_timeout, default.tcp_established),
        tcp_close_wait: time(config.tcp_close_wait_timeout, default.tcp_close_wait),
        tcp_be_liberal: config.tcp_be_liberal,
        udp: time(config.udp_timeout, default.udp),
        udp_stream: time(config.udp_stream_timeout, default.udp_stream),
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::File;
    use super::*;

    fn plan(text: &str, cores: usize) -> Vec<String> {
        let head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
        let file = File::parse(&format!("{head}{text}")).unwrap();
        let plan = wanted(&file.config.conntrack).plan(cores);
        plan.iter().map(|(name, value)| format!("{}={value}", name.rsplit('/').next().unwrap())).collect()
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
        let all = "conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 90s, \
                   tcpBeLiberal: true, \
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
