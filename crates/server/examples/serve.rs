//! Serves SQS over an embedded store: `cargo run -p hapax-server --example serve -- FOLDER [CONFIG.json]`.
//! The `hapax serve` command does the same with all features; this example shows the library.

use std::sync::Arc;

use hapax_embedded::{Embedded, Options};
use hapax_server::{Server, ServerConfig};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or_else(|| "hapax-data".to_owned());
    let config = match args.next() {
        Some(file) => serde_json::from_str(&std::fs::read_to_string(file)?)?,
        None => ServerConfig::default(),
    };
    let store = Arc::new(Embedded::open(&folder, Options::default())?);
    let server = Server::new(config, store)?;
    let listeners = server.bind().await?;
    for listener in &listeners {
        println!("listening on {}", listener.local_addr()?);
    }
    server.run(listeners, std::future::pending()).await;
    Ok(())
}
