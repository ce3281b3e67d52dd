//! Which families the kernel has at all.

use std::net::{Ipv6Addr, UdpSocket};

use knit_proxy::model::PerFamily;

/// The families that this kernel has. One without IPv6 (`ipv6.disable=1`, or built without it) refuses all of
/// it forever.
#[must_use]
pub fn kernel_families() -> PerFamily<bool> {
    let opened = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
    PerFamily { v4: true, v6: opened.err().is_none_or(|error| !is_no_family(&error)) }
}

/// Whether the kernel does not know the family, as opposed to being short of something.
fn is_no_family(error: &std::io::Error) -> bool {
    /// Linux' number; the standard library has no name for it.
    const EAFNOSUPPORT: i32 = 97;
    error.raw_os_error() == Some(EAFNOSUPPORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_18_a_kernel_without_ipv6_is_told_from_one_that_is_short_of_something() {
        assert!(is_no_family(&std::io::Error::from_raw_os_error(97)));
        for errno in [13, 23, 24, 98, 99] {
            assert!(!is_no_family(&std::io::Error::from_raw_os_error(errno)), "{errno}");
        }
        assert!(kernel_families().v4);
    }
}
