//! What an operator does in a run: create queues, redrive dead letters, resolve doubts, and read what is left.

use std::time::{Duration, Instant};

use anyhow::bail;
use hapax::core::ledger::TTL_MS_DEFAULT;
use hapax::core::{
    AdminError, EntryFilter, EntryState, EntryView, Json, MessageState, MessageView, RecordedOutcome,
    ResolveError, Scope,
};
use hapax::{Browse, Hapax, OnDoubt, QueueConfig, QueueName, RedriveFilter, RedriveRequest, Resolution};

use crate::cluster::Cluster;
use crate::history::{Act, Place};
use crate::orders;
use crate::recorder::{Payment, Reporter};
use crate::roles;
use crate::worker::transfers;
use crate::workload::{Shape, Workload};

/// How long the rest of the messages may take after the last fault.
const DRAIN: Duration = Duration::from_mins(1);
/// How long a relay may take to mark what was published, when nothing else is waiting.
const MARKED: Duration = Duration::from_secs(15);
const PAGE: usize = 1_000;
const BY: &str = "hapax verify";

/// Creates the queues of all workloads.
pub async fn create_queues(hapax: &Hapax, workloads: &[Workload], run: &str) -> anyhow::Result<()> {
    for workload in workloads.iter().filter(|workload| workload.has_queue()) {
        if let Some(dead) = workload.dead_queue(run) {
            hapax.store().create_queue(&dead, QueueConfig::default()).await?;
        }
        // The tier of a transactional worker is that of its handler, whatever the queue says.
        hapax.store().create_queue(&workload.queue(run), workload.config(run)).await?;
    }
    Ok(())
}

/// Lets what was rejected run again. The accounts are open meanwhile, and closed again for the payments after it.
pub async fn retry_rejected(
    hapax: &Hapax,
    reporter: &Reporter,
    workloads: &[Workload],
    run: &str,
) -> anyhow::Result<()> {
    redrive(hapax, reporter, workloads, run).await?;
    for workload in workloads.iter().filter(|workload| workload.rejects && workload.fifo) {
        release_rejected(hapax, reporter, workload, run).await?;
    }
    Ok(())
}

/// Releases what is parked in its queue; returns how many messages that were.
async fn release_rejected(
    hapax: &Hapax,
    reporter: &Reporter,
    workload: &Workload,
    run: &str,
) -> anyhow::Result<u64> {
    let queue = workload.queue(run);
    let parked = Browse { state: Some(MessageState::Parked), limit: PAGE, ..Browse::default() };
    let parked = hapax.store().browse(&queue, parked).await?.items;
    if parked.is_empty() {
        return Ok(0);
    }
    let ids = parked.iter().map(|message| message.id).collect();
    let count = hapax.store().release(&queue, ids).await?;
    reporter.report(workload.name, vec![Act::Operator { action: "release".into(), count }]).await?;
    Ok(parked.len() as u64)
}

async fn redrive(
    hapax: &Hapax,
    reporter: &Reporter,
    workloads: &[Workload],
    run: &str,
) -> anyhow::Result<()> {
    for workload in workloads {
        let Some(from) = workload.dead_queue(run) else { continue };
        let count = hapax.store().stats(&from).await?.ready;
        let (filter, by) = (RedriveFilter::default(), BY.to_owned());
        let request = RedriveRequest { from, to: None, filter, per_second: None, by };
        match hapax.store().start_redrive(request).await {
            Ok(_) | Err(AdminError::Store(_)) => {}
            // One is still running.
            Err(_) => continue,
        }
        reporter.report(workload.name, vec![Act::Operator { action: "redrive".into(), count }]).await?;
    }
    Ok(())
}

/// Stops the producer, and waits until nothing is waiting any more; then reports what is left.
pub async fn drain(cluster: &mut Cluster, reporter: &Reporter, workloads: &[Workload]) -> anyhow::Result<()> {
    cluster.stop_producer();
    reporter.open_accounts(true).await?;
    let hapax = cluster.connect().await?;
    let deadline = Instant::now() + DRAIN;
    let mut idle = 0;
    let mut only_outbox: Option<Instant> = None;
    // Twice: a message may be between two places.
    while idle < 2 && Instant::now() < deadline && only_outbox.is_none_or(|since| since.elapsed() < MARKED) {
        cluster.check_alive()?;
        // What cannot be counted now is counted the next time.
        let waiting = count_waiting(&hapax, cluster, reporter, workloads).await.unwrap_or(1);
        let unpublished = if cluster.has_relay() {
            orders::count_unpublished(cluster.site()).await.unwrap_or(1)
        } else {
            0
        };
        only_outbox = (waiting == 0 && unpublished > 0).then(|| only_outbox.unwrap_or_else(Instant::now));
        idle = if waiting + unpublished == 0 { idle + 1 } else { 0 };
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    reporter.report("", vec![Act::Drained { empty: idle >= 2 }]).await?;
    if cluster.has_relay() && idle < 2 {
        let unmarked = only_outbox.is_some_and(|since| since.elapsed() >= MARKED);
        let place = if unmarked { Place::Unmarked } else { Place::Outbox };
        let left = roles::repeat(|| orders::list_unpublished(cluster.site())).await?;
        let acts = left.into_iter().map(|id| Act::Left { id, place }).collect();
        reporter.report(orders::WORKLOAD, acts).await?;
    }
    // A store that was just cut off may need some time.
    let cluster: &Cluster = cluster;
    for workload in workloads {
        roles::repeat(|| report_rest(&hapax, cluster, reporter, workload)).await?;
    }
    Ok(())
}

/// Resolves doubts and redrives dead letters; returns how many messages and keys are not done yet.
async fn count_waiting(
    hapax: &Hapax,
    cluster: &Cluster,
    reporter: &Reporter,
    workloads: &[Workload],
) -> anyhow::Result<u64> {
    let run = &cluster.site().run;
    let mut waiting = 0;
    for workload in workloads.iter().filter(|workload| workload.has_queue()) {
        let stats = hapax.store().stats(&workload.queue(run)).await?;
        waiting += stats.ready + stats.delayed + stats.in_flight;
        if matches!(workload.shape, Shape::Worker(OnDoubt::Park)) {
            waiting += resolve(hapax, cluster, reporter, workload).await?;
        }
        if let Some(dead) = workload.dead_queue(run) {
            let stats = hapax.store().stats(&dead).await?;
            waiting += stats.ready + stats.delayed + stats.in_flight;
        }
        if workload.rejects && workload.fifo {
            waiting += release_rejected(hapax, reporter, workload, run).await?;
        }
    }
    redrive_if_dead(hapax, reporter, workloads, run).await?;
    Ok(waiting)
}

async fn redrive_if_dead(
    hapax: &Hapax,
    reporter: &Reporter,
    workloads: &[Workload],
    run: &str,
) -> anyhow::Result<()> {
    for workload in workloads {
        let Some(dead) = workload.dead_queue(run) else { continue };
        if hapax.store().stats(&dead).await?.ready > 0 {
            redrive(hapax, reporter, std::slice::from_ref(workload), run).await?;
        }
    }
    Ok(())
}

/// Decides about what is in doubt as an operator does: by asking the bank. Returns how many are not decided yet.
async fn resolve(
    hapax: &Hapax,
    cluster: &Cluster,
    reporter: &Reporter,
    workload: &Workload,
) -> anyhow::Result<u64> {
    let ledger = match &cluster.site().ledger {
        Some(url) => Hapax::open(url).await?.ledger(),
        None => hapax.ledger(),
    };
    let scope = Scope::of_queue(&workload.queue(&cluster.site().run));
    let filter = |state| EntryFilter {
        scope: Some(scope.clone()),
        state: Some(state),
        limit: PAGE,
        ..EntryFilter::default()
    };
    let doubts = ledger.entries(filter(EntryState::InDoubt)).await?.items;
    let open = ledger.entries(filter(EntryState::Processing)).await?.items.len() as u64;
    if doubts.is_empty() {
        return Ok(open);
    }
    let receipts = reporter.receipts(workload.name).await?;
    let mut count = 0;
    for entry in &doubts {
        let resolution = match receipts.get(entry.id.key.as_str()) {
            Some(receipt) => Resolution::Completed {
                outcome: RecordedOutcome::done(Json::of(receipt)?),
                ttl_ms: TTL_MS_DEFAULT,
            },
            None => Resolution::Absent,
        };
        match ledger.resolve(&entry.id, resolution, BY).await {
            Ok(()) => count += 1,
            // Its holder has ended it, or it was claimed, since the list was read.
            Err(ResolveError::NotInDoubt | ResolveError::NotFound(_) | ResolveError::InProgress { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    reporter.report(workload.name, vec![Act::Operator { action: "resolve".into(), count }]).await?;
    Ok(open + doubts.len() as u64)
}

/// Reports what is left in queues and ledger, and what a bank's own table says.
async fn report_rest(
    hapax: &Hapax,
    cluster: &Cluster,
    reporter: &Reporter,
    workload: &Workload,
) -> anyhow::Result<()> {
    if !workload.has_queue() {
        return Ok(());
    }
    let site = cluster.site();
    let queue = workload.queue(&site.run);
    let mut acts = Vec::new();
    for message in browse(hapax, &queue).await? {
        let place = if message.parked.is_some() { Place::Parked } else { Place::Waiting };
        acts.extend(payment_of(&message).map(|id| Act::Left { id, place }));
    }
    if let Some(dead) = workload.dead_queue(&site.run) {
        let place = Place::Dead;
        let dead = browse(hapax, &dead).await?;
        acts.extend(dead.iter().filter_map(payment_of).map(|id| Act::Left { id, place }));
    }
    if workload.shape == Shape::Transactional {
        acts.extend(transfers::read(site).await?);
    }
    if matches!(workload.shape, Shape::Worker(_) | Shape::Outbox) {
        let ledger = match &site.ledger {
            Some(url) => Hapax::open(url).await?,
            None => hapax.clone(),
        };
        for entry in entries(&ledger, &queue).await? {
            let id = entry.id.key.to_string();
            if entry.state == EntryState::InDoubt {
                acts.push(Act::Left { id: id.clone(), place: Place::InDoubt });
            }
            let value = entry.outcome.and_then(|outcome| outcome.value);
            let outcome = value.and_then(|value| value.get::<u64>().ok());
            acts.push(Act::Entry { id, completed: entry.state == EntryState::Completed, outcome });
        }
    }
    for part in acts.chunks(PAGE) {
        reporter.report(workload.name, part.to_vec()).await?;
    }
    Ok(())
}

fn payment_of(message: &MessageView) -> Option<String> {
    let body = message.body.as_ref()?;
    serde_json::from_slice::<Payment>(body).ok().map(|payment| payment.id)
}

async fn browse(hapax: &Hapax, queue: &QueueName) -> anyhow::Result<Vec<MessageView>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = hapax.store().browse(queue, Browse { after, limit: PAGE, ..Browse::default() }).await?;
        all.extend(page.items);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

async fn entries(hapax: &Hapax, queue: &QueueName) -> anyhow::Result<Vec<EntryView>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let scope = Some(Scope::of_queue(queue));
        let filter = EntryFilter { scope, state: None, after, limit: PAGE };
        let page = hapax.ledger().entries(filter).await?;
        all.extend(page.items);
        if all.len() > 10_000_000 {
            bail!("the ledger's listing does not end");
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}
