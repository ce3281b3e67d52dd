//! Which container runtime asks, and which of its known mistakes a plugin has to work around.

/// A container runtime, as it says in `Configure`.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Runtime {
    /// `containerd` or `cri-o`.
    pub name: String,
    /// With or without a `v` before it, and with whatever a packager put after it.
    pub version: String,
}

/// What a runtime does with a sandbox whose `RunPodSandbox` a plugin refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RefusedSandbox {
    /// It is removed; kubelet makes another.
    Removed,
    /// Its record stays, and the runtime's next start fails because of it. Containers must be refused in
    /// place of the sandbox.
    Leaked,
}

// === impl Runtime ===

impl Runtime {
    /// What becomes of a sandbox that is refused. A containerd whose version is unknown counts as one that
    /// leaks: a container that is refused is as safe as a sandbox that is.
    #[must_use]
    pub fn refused_sandbox(&self) -> RefusedSandbox {
        if self.name != "containerd" {
            return RefusedSandbox::Removed;
        }
        // The first releases that remove it: 2.2.6, 2.3.3, and all of 2.4.
        match self.numbers() {
            Some((2, 2, patch)) if patch >= 6 => RefusedSandbox::Removed,
            Some((2, 3, patch)) if patch >= 3 => RefusedSandbox::Removed,
            Some((2, minor, _)) if minor >= 4 => RefusedSandbox::Removed,
            Some((major, _, _)) if major >= 3 => RefusedSandbox::Removed,
            _ => RefusedSandbox::Leaked,
        }
    }

    fn numbers(&self) -> Option<(u32, u32, u32)> {
        let text = self.version.strip_prefix('v').unwrap_or(&self.version);
        let mut parts = text.splitn(3, '.');
        let (major, minor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let patch = parts.next()?;
        let digits = patch.find(|c: char| !c.is_ascii_digit()).unwrap_or(patch.len());
        Some((major, minor, patch[..digits].parse().ok()?))
    }
}

impl std::fmt::Display for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_leak_are_told_apart() {
        let leaks =
            ["1.7.27", "v2.0.5", "2.1.4", "v2.2.5", "2.2.0-rc.1", "2.3.2", "v2.3.0-beta.1", "", "main"];
        let removes =
            ["v2.2.6", "2.2.7~ds1", "2.3.3", "v2.3.10+k3s1", "v2.4.0", "2.4.2-4-gabc.m", "2.10.0", "v3.0.0"];
        for (versions, expected) in
            [(&leaks[..], RefusedSandbox::Leaked), (&removes[..], RefusedSandbox::Removed)]
        {
            for version in versions {
                let runtime = Runtime { name: "containerd".into(), version: (*version).into() };
                assert_eq!(runtime.refused_sandbox(), expected, "{version}");
            }
        }
        let other = Runtime { name: "cri-o".into(), version: "1.34.0".into() };
        assert_eq!(other.refused_sandbox(), RefusedSandbox::Removed);
    }
}
