//! krafka's transactions and consumer groups, driven by a test or a benchmark over arguments and standard input.

mod copy;
mod session;

use std::time::Duration;

use krafka::Kafka;
use krafka::auth::{AuthConfig, TlsConfig};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const USAGE: &str = "\
krafka-contestant session BOOTSTRAP CLIENT_ID REQUEST_TIMEOUT_MS [CA_FILE]
krafka-contestant copy BOOTSTRAP INPUT OUTPUT RECORDS BATCH COMMIT_MS";

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["session", bootstrap, client, timeout_ms] => {
            session::run(connect(bootstrap, client, timeout_ms, None).await?).await
        }
        ["session", bootstrap, client, timeout_ms, authority] => {
            session::run(connect(bootstrap, client, timeout_ms, Some(authority)).await?).await
        }
        ["copy", bootstrap, input, output, records, batch, commit_ms] => {
            copy::run(&copy::Flow {
                kafka: Kafka::builder(bootstrap).connect().await?,
                input: input.to_owned(),
                output: output.to_owned(),
                records: records.parse()?,
                batch: batch.parse()?,
                commit: Duration::from_millis(commit_ms.parse()?),
            })
            .await
        }
        _ => Err(USAGE.into()),
    }
}

async fn connect(bootstrap: &str, client: &str, timeout_ms: &str, authority: Option<&str>) -> Result<Kafka> {
    let timeout = Duration::from_millis(timeout_ms.parse()?);
    let mut builder =
        Kafka::builder(bootstrap).client_id(client).connect_timeout(timeout).request_timeout(timeout);
    if let Some(authority) = authority {
        builder = builder.security(AuthConfig::ssl(TlsConfig::new().with_ca_cert(authority)));
    }
    Ok(builder.connect().await?)
}
