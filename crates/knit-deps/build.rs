//! Does nothing: Cargo takes notice of build-dependencies only where there is a build script.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}
