//! The whole node, from end to end: the real `knit node` on a folder of objects, driven by the real CNI shim
//! as a container runtime drives it, with namespaces for nodes and pods.
//!
//! Faults that are tested elsewhere, closer to what must stand them: a kill at every step of the ledger in
//! `knit-ledger/tests/crash.rs` and `knit-node/tests/crash.rs`; garbage, huge and truncated JSON on the
//! shim's input in `knit-cni/tests/shim`; garbage and silent clients on the agent's socket in
//! `knit-node/tests/agent.rs`; pods that lie about MAC, IP or ARP, or send to the port of tunnels, in
//! `knit-linux/tests/spoofing.rs`, `switched.rs` and `routers.rs`.

mod cnitool;
mod connectivity;
mod container;
mod crash;
mod doctor;
mod folder;
mod foreign;
mod full;
mod get;
mod kni;
mod peer;
mod policies;
mod python;
mod replace;
mod requests;
mod support;
