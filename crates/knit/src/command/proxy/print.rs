//! A backend that makes nothing: it says on standard output what another one would do.

use std::io::Write;

use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::view::{Action, Changes, NodeView, PortKey, PortView, Route};

/// Prints every service port that is new, changed or gone.
pub struct Print<W>(pub W);

impl<W: Write> Print<W> {
    fn set(&mut self, key: &PortKey, port: &PortView) -> std::io::Result<()> {
        writeln!(self.0, "set {key}")?;
        for frontend in &port.frontends {
            write!(self.0, "  {frontend}")?;
            self.route(port, frontend.route)?;
            for (who, route) in [("pods here", frontend.from_pods), ("this node", frontend.from_node)] {
                if let Some(route) = route {
                    write!(self.0, "    from {who}")?;
                    self.route(port, route)?;
                }
            }
        }
        Ok(())
    }

    fn route(&mut self, port: &PortView, route: Route) -> std::io::Result<()> {
        write!(self.0, " -> {route}")?;
        if let Action::Endpoints(scope) = route.action {
            write!(self.0, ":")?;
            port.targets(scope).iter().try_for_each(|target| write!(self.0, " {target}"))?;
        }
        writeln!(self.0)
    }
}

impl<W: Write> Backend for Print<W> {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let all = state.ports.iter().try_for_each(|(key, port)| self.set(key, port));
        outcome(all.and_then(|()| self.0.flush()))
    }

    fn apply(&mut self, changes: &Changes, _: &NodeView) -> Outcome {
        let all = changes.ports.iter().try_for_each(|change| match &change.new {
            Some(port) => self.set(&change.key, port),
            None => writeln!(self.0, "delete {}", change.key),
        });
        outcome(all.and_then(|()| self.0.flush()))
    }
}

fn outcome(written: std::io::Result<()>) -> Outcome {
    written.map_or_else(|error| Outcome::Failed(format!("cannot print: {error}")), |()| Outcome::Done)
}
