//! What agent, controller, proxy and shim promise together, each on a lab of its own: real agents, real pods,
//! no root.

mod announced;
mod demo;
mod faults;
mod pods;
mod refused;
mod support;
mod tenants;
mod upgrade;
