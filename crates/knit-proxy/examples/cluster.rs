//! A whole proxy: reads Services from a cluster or from a folder of files, logs what is wrong, ends on
//! Ctrl-C.
//!
//! `cargo run -p knit-proxy --features objects --example cluster -- NODE FOLDER` reads YAML and JSON files
//! and follows their changes; without FOLDER it reads from the cluster that kubectl would use here, or that
//! its pod runs in.

#[allow(dead_code, reason = "its main is another program")]
#[path = "print.rs"]
mod print;

use knit_proxy::engine::{Engine, EngineConfig, Level, Log, WaitFor, run};
use knit_proxy::model::NodeInfo;
use knit_proxy::objects::{Objects, Origin, Source};
use knit_proxy::source;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().ok_or("usage: cluster NODE [FOLDER]")?;
    let node = NodeInfo::new(&name);
    let origin = args.next().map_or(Origin::Infer, Origin::folder);

    // The engine works on a thread of its own. Its observer is how anybody hears of problems and failures.
    let log = Log::new(|level, line| {
        if level >= Level::Info {
            eprintln!("{level:?}: {line}");
        }
    });
    // Nothing is programmed before everything is known: half a list would remove the other half's services.
    let wait_for = WaitFor { node: true, ..WaitFor::default() };
    let config = EngineConfig { wait_for, ..EngineConfig::default() };
    let engine =
        Engine::new(config, node.clone(), print::Print(std::io::stdout())).observed_by(Box::new(log));
    let (handle, inbox) = source::handle();
    let thread = std::thread::spawn(move || run(engine, &inbox));

    let objects = Objects::open(origin).await?;
    eprintln!("reading from {}", objects.origin());
    // What cannot be read at all, such as a broken file, never becomes an event.
    let mut unreadable = objects.problems();
    let feed = Source::new(node).open(&objects)?.send_to(&handle);
    tokio::pin!(feed);
    loop {
        tokio::select! {
            fed = &mut feed => break fed?,
            changed = unreadable.changed() => {
                changed?;
                unreadable.borrow_and_update().iter().for_each(|problem| eprintln!("Warn: {problem}"));
            }
            asked = tokio::signal::ctrl_c() => break asked?,
        }
    }
    // What the backend made stays: connections go on while a proxy is restarted.
    handle.stop();
    thread.join().map_err(|_| "the engine's thread panicked")?;
    Ok(())
}
