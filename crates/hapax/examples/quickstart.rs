//! Sends a message, receives it, acks it; then shows the handling of a message that keeps failing.
//!
//! `cargo run --release --example quickstart`

use hapax::{Hapax, QueueConfig, Receive, RetryPolicy};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
struct Charge {
    order: u64,
    cents: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let hapax = Hapax::open(&format!("embedded:{}", folder.path().display())).await?;

    let charges = hapax.queue::<Charge>("charges")?;
    let config = QueueConfig::default().retry(RetryPolicy::at_once().attempts(2));
    let failed = charges.ensure_with_dead_letters(config).await?;

    let sent = charges.send_keyed(&Charge { order: 7, cents: 1999 }, "order-7").await?;
    println!("sent      {} (on disk when this line appears)", sent.id);
    for received in charges.receive(Receive::up_to(1)).await? {
        println!(
            "received  {:?}, attempt {}, fence {}",
            received.value()?,
            received.attempt(),
            received.fence()
        );
        received.ack().await?;
        println!("acked     {}", sent.id);
    }

    charges.send(&Charge { order: 8, cents: 0 }).await?;
    for _ in 0..2 {
        for received in charges.receive(Receive::up_to(1)).await? {
            let attempt = received.attempt();
            let outcome = received.retry("nothing to charge").await?;
            println!("failed    attempt {attempt}: {outcome:?}");
        }
    }
    for received in failed.receive(Receive::up_to(1)).await? {
        let dead = received.delivery().dead.as_ref().expect("a dead letter knows its story");
        println!(
            "dead      after {} attempts in {}: {}",
            dead.attempts,
            dead.source,
            dead.error.as_deref().unwrap_or("-")
        );
    }
    Ok(())
}
