//! Linux networking, spoken directly: the only crate that talks to the kernel, and the only one with `unsafe`.
