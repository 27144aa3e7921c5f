//! What an operator does in a run: create queues, redrive dead letters, release what is parked, and resolve doubts.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hapax::core::ledger::TTL_MS_DEFAULT;
use hapax::core::{
    AdminError, EntryFilter, EntryState, EntryView, Json, MessageState, RecordedOutcome, ResolveError, Scope,
};
use hapax::{Browse, Hapax, OnDoubt, QueueConfig, RedriveFilter, RedriveRequest, Resolution};

use crate::cluster::Cluster;
use crate::history::Act;
use crate::recorder::Reporter;
use crate::workload::{LEASE_MS, Shape, Workload};

const PAGE: usize = 1_000;
const BY: &str = "hapax verify";
/// How long a key is in doubt before the operator decides: what its holder was doing when its lease ended has reached the bank
/// by then, or never will.
const DOUBT_AGE: Duration = Duration::from_millis(2 * LEASE_MS);

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
pub async fn release_rejected(
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

/// Redrives the dead letters of workloads that have some.
pub async fn redrive_if_dead(
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

/// The keys of a workload that have not ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenKeys {
    /// In doubt when they were listed.
    pub in_doubt: u64,
    /// Held by a worker.
    pub held: u64,
}

/// Decides about what is in doubt as an operator does: by asking the bank.
#[derive(Default)]
pub struct Doubts {
    /// When each doubt was first seen, by workload, key and fence.
    seen: HashMap<(&'static str, String, u64), Instant>,
}

impl Doubts {
    /// Resolves the doubts of a workload that parks them, if they are old enough. Returns the keys that had not ended before.
    pub async fn resolve(
        &mut self,
        hapax: &Hapax,
        cluster: &Cluster,
        reporter: &Reporter,
        workload: &Workload,
    ) -> anyhow::Result<OpenKeys> {
        if !matches!(workload.shape, Shape::Worker(OnDoubt::Park)) {
            return Ok(OpenKeys::default());
        }
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
        let held = ledger.entries(filter(EntryState::Processing)).await?.items.len() as u64;
        let open = OpenKeys { in_doubt: doubts.len() as u64, held };
        let due = self.due(workload.name, doubts, Instant::now());
        if due.is_empty() {
            return Ok(open);
        }
        let receipts = reporter.receipts(workload.name).await?;
        let mut count = 0;
        for entry in &due {
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
                Err(
                    ResolveError::NotInDoubt | ResolveError::NotFound(_) | ResolveError::InProgress { .. },
                ) => {}
                Err(error) => return Err(error.into()),
            }
        }
        reporter.report(workload.name, vec![Act::Operator { action: "resolve".into(), count }]).await?;
        Ok(open)
    }

    /// Notes what is in doubt; returns what has been for long enough.
    fn due(&mut self, workload: &'static str, doubts: Vec<EntryView>, now: Instant) -> Vec<EntryView> {
        let mut is_due = |entry: &EntryView| {
            let name = (workload, entry.id.key.to_string(), entry.fence.0);
            now.duration_since(*self.seen.entry(name).or_insert(now)) >= DOUBT_AGE
        };
        doubts.into_iter().filter(|entry| is_due(entry)).collect()
    }
}
