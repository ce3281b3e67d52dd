//! What is done inside a pod's namespace.

use knit_kernel::netns::NetNs;
use knit_kernel::sysctl::{Scope, Sysctl, Sysctls};
use knit_kernel::{Handle, IfName, Op};
use knit_runtime::{Error, Result};
use knit_types::Family;

use crate::fail::internal;
use crate::networks::Net;
use crate::plan::Plan;

/// Does all of it in one batch; a second time if IPv6 had to be switched on first.
pub(crate) fn apply(net: &Net, plan: &Plan, pod: &NetNs, ops: &dyn Fn() -> Vec<Op<'static>>) -> Result<()> {
    let handle = Handle::open(pod).map_err(internal("open a socket in the pod's namespace"))?;
    let attempt = handle.apply(&ops());
    let Err(error) = attempt else { return Ok(()) };
    if !plan.shape.has(Family::V6) {
        return Err(internal("configure the pod's interface")(error));
    }
    // Some runtimes switch IPv6 off in new namespaces.
    let name = IfName::new(plan.mark.interface.as_str()).map_err(Error::from)?;
    let off = Sysctl::ipv6_disabled(Scope::Link(&name));
    let sysctls = Sysctls::of(pod).map_err(internal("open the pod's sysctls"))?;
    if !sysctls.get(&off).is_ok_and(|value| value == "1") {
        return Err(internal("configure the pod's interface")(error));
    }
    sysctls.set(&off, 0).map_err(internal("enable IPv6 in the pod"))?;
    let ops: Vec<Op<'_>> = ops().into_iter().map(again).collect();
    handle.apply(&ops).map_err(internal("configure the pod's interface"))?;
    net.attachments.switched_on(&plan.host);
    Ok(())
}

/// The same operation for a second attempt: what the first one made is fine.
fn again(op: Op<'static>) -> Op<'static> {
    match op {
        Op::Create(object) => Op::Replace(object),
        other => other,
    }
}
