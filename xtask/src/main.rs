//! `cargo xtask`: the project's chores, one subcommand each.

fn main() {}
