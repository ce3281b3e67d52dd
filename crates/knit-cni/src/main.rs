//! `knit-cni`: what a container runtime runs to give a pod its networks. All of it is in [`knit_cni::shim`].

use std::process::ExitCode;

fn main() -> ExitCode {
    knit_cni::shim::main()
}
