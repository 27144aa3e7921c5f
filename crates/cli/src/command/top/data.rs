//! What `hapax top` reads.

use std::collections::HashMap;

use hapax::core::policy::tier::ObservedQueue;
use hapax::core::store::SharedStore;
use hapax::core::{LedgerStats, QueueInfo, QueueName, QueueStats, StoreError, Tier};
use hapax_client::Client;
use hapax_observe::advice::{self, Advice, Known};
use serde::Serialize;

use crate::remote::Remote;

/// Queues that are shown; a store may have many more.
const QUEUES_MAX: usize = 200;

/// Everything at one moment.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Snapshot {
    pub at_ms: u64,
    pub place: String,
    pub queues: Vec<QueueRow>,
    /// Queues that are not shown.
    pub more: usize,
    /// `None`: this key may not see it.
    pub ledger: Option<LedgerStats>,
    pub advice: Advice,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct QueueRow {
    pub name: String,
    pub tier: Tier,
    pub lease_ms: u64,
    pub paused: bool,
    pub stats: QueueStats,
    /// The latest minutes, as the server saw them.
    pub seen: ObservedQueue,
}

fn has_stopped(advice: &Advice) -> bool {
    advice.findings.iter().any(|located| located.finding.code == "store-stopped")
}

/// A server, or a store that is read directly: then nothing is observed.
pub(super) struct Reader {
    client: Option<Client>,
    store: SharedStore,
    place: String,
}

impl Reader {
    pub async fn connect(remote: &Remote) -> anyhow::Result<Self> {
        if remote.is_store() {
            let place = hapax::without_secrets(&remote.endpoint);
            return Ok(Self { client: None, store: remote.connect().await?, place });
        }
        let client = remote.client().await?;
        let place = client.endpoint().to_owned();
        Ok(Self { store: std::sync::Arc::new(client.clone()), client: Some(client), place })
    }

    pub async fn read(&self) -> anyhow::Result<Snapshot> {
        let advice = self.advice().await;
        let all = match self.store.queues().await {
            Ok(all) => all,
            // A store that has stopped lists no queues; its advice says so.
            Err(_) if advice.as_ref().is_ok_and(has_stopped) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let count = all.len();
        let shown: Vec<QueueInfo> = all.into_iter().take(QUEUES_MAX).collect();
        let names: Vec<QueueName> = shown.iter().map(|info| info.name.clone()).collect();
        let mut queues = Vec::with_capacity(names.len());
        for (info, figures) in shown.into_iter().zip(self.figures(&names).await?) {
            // Else it was deleted meanwhile, or this key may not see its counters.
            let Some((stats, seen)) = figures else { continue };
            queues.push(QueueRow {
                name: info.name.to_string(),
                tier: info.config.tier,
                lease_ms: info.config.lease_ms,
                paused: info.paused.is_some(),
                stats,
                seen,
            });
        }
        let more = count - queues.len();
        let ledger = self.store.ledger_stats().await.ok();
        let mut advice = advice?;
        advice.add_examination(self.store.as_ref()).await;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        Ok(Snapshot { at_ms, place: self.place.clone(), queues, more, ledger, advice })
    }

    async fn advice(&self) -> Result<Advice, StoreError> {
        match &self.client {
            // A key without the right to it sees the rest.
            Some(client) => Ok(client.advice(None).await.unwrap_or_default()),
            None => advice::of_store(self.store.as_ref(), &Known::default(), true).await,
        }
    }

    /// The counters of queues, and what a server saw of them.
    async fn figures(&self, names: &[QueueName]) -> anyhow::Result<Vec<Option<(QueueStats, ObservedQueue)>>> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        if let Some(client) = &self.client {
            let all = client.figures().await?.into_iter();
            let mut all: HashMap<QueueName, _> =
                all.map(|queue| (queue.name, (queue.stats, queue.observed))).collect();
            return Ok(names.iter().map(|name| all.remove(name)).collect());
        }
        let all = self.store.stats_of(names).await?.into_iter();
        Ok(all.map(|stats| Some((stats?, ObservedQueue::default()))).collect())
    }
}
