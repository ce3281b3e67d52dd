//! Runs the embedded API alone:
//! `cargo run -p knit-apiserver --example serve -- 127.0.0.1:8001 KUBECONFIG [CRD.yaml...]`. Writes a
//! kubeconfig, then serves until it is stopped.

use std::error::Error;

use knit_apiserver::{Config, Server};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let listen = arguments.next().unwrap_or_else(|| "127.0.0.1:0".to_owned()).parse()?;
    let kubeconfig = arguments.next().unwrap_or_else(|| "kubeconfig".to_owned());
    let mut config = Config { listen, ..Config::default() };
    for file in arguments {
        config.store.crds.push(serde_saphyr::from_str(&std::fs::read_to_string(file)?)?);
    }
    let server = Server::start(config).await?;
    std::fs::write(&kubeconfig, server.kubeconfig())?;
    println!("listening on {}; try: kubectl --kubeconfig {kubeconfig} get namespaces", server.url());
    std::future::pending::<()>().await;
    Ok(())
}
