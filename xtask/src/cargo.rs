//! Cargo, started by one of these chores.

use std::process::Command;

/// A command that runs the cargo that runs us. It does not see what that one told us about this package:
/// build scripts such as ring's would take it for a change, and everything above them would be built again,
/// and once more by the next cargo that runs outside.
pub fn command() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_about_this_package) {
            command.env_remove(name);
        }
    }
    command
}

fn is_about_this_package(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|prefix| variable.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_within_cargo_does_not_see_whose_chore_it_is() {
        let removed: Vec<_> = command()
            .get_envs()
            .filter(|(_, value)| value.is_none())
            .map(|(name, _)| name.to_owned())
            .collect();
        // Tests run below cargo, too.
        for name in ["CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"] {
            assert!(removed.iter().any(|removed| removed == name), "{name} is still there");
        }
        assert!(!is_about_this_package("CARGO_INCREMENTAL") && !is_about_this_package("CARGO_TARGET_DIR"));
    }
}
