//! A lease that is too short: consumers that send no heartbeats, as a program with an AWS SDK, are slower than their lease now
//! and then. What was observed says what happens and what to set, and explains one duplicate; after the change there are none.
//!
//! `--lease URL` makes the same payments through a server, for half a minute: `hapax top` and `hapax doctor` look on, and the lease is
//! changed by `hapax queue set`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hapax::core::policy::RetryPolicy;
use hapax::observe::{advice, story};
use hapax::{Hapax, MessageId, QueueConfig, QueueName, Receive};

use crate::bank::Payment;
use crate::summary::holds;

const PAYMENTS: usize = 60;
const CONSUMERS: usize = 6;
const ROUNDS_MAX: usize = 20;
const LEASE_MS: u64 = 300;
/// The bank takes this long, every third time.
const SLOW: Duration = Duration::from_millis(400);
const QUICK: Duration = Duration::from_millis(10);

const QUEUE: &str = "slow-payments";

fn short_lease() -> QueueConfig {
    QueueConfig { lease_ms: LEASE_MS, retry: RetryPolicy::exponential(0, 0), ..QueueConfig::default() }
}

/// How often each payment was made.
type Made = Arc<Mutex<HashMap<MessageId, usize>>>;

pub async fn show() -> anyhow::Result<bool> {
    let folder = tempfile::tempdir()?;
    let hapax = Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    let name = QueueName::new(QUEUE)?;
    let config = short_lease();
    hapax.queue::<Payment>(name.as_str())?.ensure(config.clone()).await?;
    let observer = hapax.observer().context("an embedded store is observed")?.clone();

    // How many duplicates a round makes depends on the machine: it is repeated until they are many enough for advice.
    let known = advice::Known { observer: Some(&observer), ..advice::Known::default() };
    let (mut made, mut finding, mut rounds) = (HashMap::new(), None, 0);
    while finding.is_none() && rounds < ROUNDS_MAX {
        made.extend(pay_all(&hapax, &name).await?);
        rounds += 1;
        let advised = advice::of_store(hapax.store().as_ref(), &known, true).await?;
        finding = advised.findings.into_iter().find(|located| located.finding.code == "leases-expire");
    }
    let (payments, doubles) = (made.len(), made.values().filter(|count| **count > 1).count());
    println!("lease {LEASE_MS} ms: {payments} payments, {doubles} of them made more than once\n");
    let mut all = holds("a lease below the work makes duplicates", doubles > 0);
    all &= holds("the advisor says so", finding.is_some());
    if let Some(located) = &finding {
        println!("\n  {}\n", located.finding);
    }
    let duplicate = made.iter().find(|(_, count)| **count > 1).map(|(id, _)| *id).context("no duplicate")?;
    let told = story::of_message(hapax.store().as_ref(), Some(&observer), &name, duplicate).await?;
    println!("  why {duplicate}?");
    for sentence in told.context("nothing is known about a duplicate")?.because {
        println!("    {sentence}");
    }

    let seen = observer.window(&name).context("nothing was seen")?;
    // Well above it: a machine that stalls for a moment makes no duplicates.
    let lease_ms = (2 * seen.held_p99_ms.context("nothing was settled")?).max(5_000);
    hapax.store().set_queue(&name, QueueConfig { lease_ms, ..config }, None).await?;
    let made = pay_all(&hapax, &name).await?;
    let doubles = made.values().filter(|count| **count > 1).count();
    println!(
        "\nlease {lease_ms} ms, well above the P99: {PAYMENTS} payments, {doubles} of them made more than once\n"
    );
    all &= holds("after the change there are none", doubles == 0 && made.len() == PAYMENTS);
    Ok(all)
}

/// The same through a server. A queue that is there keeps the lease that it was given.
pub async fn show_at(url: &str) -> anyhow::Result<bool> {
    const FOR: Duration = Duration::from_secs(30);
    let hapax = Hapax::open(url).await?;
    let name = QueueName::new(QUEUE)?;
    let created = hapax.queue::<Payment>(QUEUE)?.ensure(short_lease()).await;
    if let Err(error) = created
        && error.code() != "queue-exists"
    {
        return Err(error.into());
    }
    let lease_ms = hapax.store().queue(&name).await?.config.lease_ms;
    println!("lease {lease_ms} ms; payments are made for {} s. Meanwhile:", FOR.as_secs());
    println!("  hapax top --endpoint {url}\n  hapax doctor --endpoint {url}\n");
    let (mut made, start) = (HashMap::new(), Instant::now());
    while start.elapsed() < FOR {
        made.extend(pay_all(&hapax, &name).await?);
    }
    let (payments, doubles) = (made.len(), made.values().filter(|count| **count > 1).count());
    println!("{payments} payments, {doubles} of them made more than once");
    if let Some((duplicate, _)) = made.iter().find(|(_, count)| **count > 1) {
        println!("  hapax why {QUEUE} {duplicate} --endpoint {url}");
    }
    Ok(true)
}

/// Sends the payments and makes them, until the queue is empty.
async fn pay_all(hapax: &Hapax, name: &QueueName) -> anyhow::Result<HashMap<MessageId, usize>> {
    let queue = hapax.queue::<Payment>(name.as_str())?;
    for number in 1..=PAYMENTS {
        queue.send(&Payment { id: format!("p-{number:02}"), cents: 100 }).await?;
    }
    let made = Made::default();
    let consumers =
        (0..CONSUMERS).map(|number| tokio::spawn(consume(hapax.clone(), name.clone(), number, made.clone())));
    for consumer in consumers.collect::<Vec<_>>() {
        consumer.await??;
    }
    let made = made.lock().expect("no consumer panics").clone();
    Ok(made)
}

async fn consume(hapax: Hapax, name: QueueName, number: usize, made: Made) -> anyhow::Result<()> {
    let queue = hapax.queue::<Payment>(name.as_str())?;
    loop {
        let consumer = Some(format!("consumer-{number}"));
        let receive = Receive { consumer, wait_ms: Some(0), ..Receive::default() };
        let Some(received) = queue.receive(receive).await?.pop() else {
            let stats = hapax.store().stats(&name).await?;
            if stats.ready + stats.delayed + stats.in_flight == 0 {
                return Ok(());
            }
            tokio::time::sleep(QUICK).await;
            continue;
        };
        tokio::time::sleep(if fastrand::u32(..3) == 0 { SLOW } else { QUICK }).await;
        *made.lock().expect("no consumer panics").entry(received.delivery().id).or_default() += 1;
        // Too late for some: another consumer has the payment, and will make it again.
        let _ = received.ack().await;
    }
}
