//! A backend that prints what a real one would do. Run it: `cargo run -p knit-proxy --example print`

use knit_proxy::backend::{Backend, Outcome};
use knit_proxy::engine::{Engine, EngineConfig, SystemClock};
use knit_proxy::model::{EndpointGroup, NodeInfo, Protocol, Service};
use knit_proxy::source::Event;
use knit_proxy::view::{Action, Changes, ListKind, NodeView, PortKey, PortView};

/// Prints every service port that changes.
pub struct Print<W>(pub W);

impl<W: std::io::Write> Print<W> {
    fn set(&mut self, key: &PortKey, port: &PortView) -> std::io::Result<()> {
        writeln!(self.0, "set {key}")?;
        for frontend in &port.frontends {
            write!(self.0, "  {frontend} -> {}", frontend.route)?;
            if let Action::Endpoints(scope) = frontend.route.action {
                port.targets(scope).iter().try_for_each(|target| write!(self.0, " {target}"))?;
            }
            writeln!(self.0)?;
        }
        Ok(())
    }
}

impl<W: std::io::Write> Backend for Print<W> {
    fn sync(&mut self, state: &NodeView) -> Outcome {
        let written = state.ports.iter().try_for_each(|(key, port)| self.set(key, port));
        written.map_or_else(|e| Outcome::Failed(e.to_string()), |()| Outcome::Done)
    }

    fn apply(&mut self, changes: &Changes, _: &NodeView) -> Outcome {
        let written = changes.ports.iter().try_for_each(|change| match &change.new {
            Some(port) => self.set(&change.key, port),
            None => writeln!(self.0, "delete {}", change.key),
        });
        written.map_or_else(|e| Outcome::Failed(e.to_string()), |()| Outcome::Done)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut engine = Engine::new(EngineConfig::default(), NodeInfo::new("node-a"), Print(std::io::stdout()));
    let service = Service::new("shop/web").cluster_ip("10.0.0.1".parse()?).port(Protocol::Tcp, 80);
    let addresses = ["192.0.2.1".parse()?, "192.0.2.2".parse()?];
    let group = EndpointGroup::of_addresses("shop/web-1", "shop/web", Protocol::Tcp, 8080, &addresses);
    let now = std::time::Instant::now();
    engine.handle(Event::SetService(Box::new(service)), now);
    engine.handle(Event::SetGroup(Box::new(group)), now);
    engine.handle(Event::ListDone(ListKind::Services), now);
    engine.handle(Event::ListDone(ListKind::Groups), now);
    engine.poll(&SystemClock);
    Ok(())
}
