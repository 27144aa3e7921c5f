//! Where messages and entries of the ledger meet: a settle may end a claim, and messages that are parked for a doubt continue
//! when it has ended. An entry is kept as long as a message needs it; `scripts/entries.lua` describes how.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use hapax_core::{ClaimEnding, EndClaim, LedgerStats, QueueName, StoreError};

use super::Queues;
use super::moves::name_in;
use crate::error::unexpected;
use crate::keys::{Shard, member};
use crate::ledger::waiters::Waiters;
use crate::run::Call;
use crate::script::QueueScript;

/// Messages that one step releases.
const STEP_MAX: usize = 100;

/// What a process knows about claims: those that wait for a key, and its counters.
#[derive(Clone, Default)]
pub(crate) struct Claims {
    pub waiters: Arc<Waiters>,
    pub stats: Arc<Mutex<LedgerStats>>,
}

impl Claims {
    /// A settle has ended a claim, if anything has changed.
    pub fn ended(&self, end: &EndClaim, changed: bool, stale: bool) {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        stats.stale += u64::from(stale);
        stats.completed += u64::from(changed && matches!(end.ending, ClaimEnding::Complete { .. }));
        drop(stats);
        if changed {
            self.waiters.freed(&member(&end.id));
        }
    }
}

impl Queues {
    /// Releases the messages that are parked for a doubt which has ended.
    pub async fn resume_parked(&self, shard: Shard, member: &str) -> Result<(), StoreError> {
        let keys = &self.runner.keys;
        let mut mark = redis::cmd("HGET");
        mark.arg(keys.resumed(shard)).arg(member);
        let mark = self.runner.one(Call::read("resume", shard, mark)).await?;
        let Ok(Some(mark)) = redis::from_redis_value::<Option<String>>(mark) else { return Ok(()) };
        let (mut after, end) = (format!("({member} "), format!("({member}!"));
        loop {
            let mut range = redis::cmd("ZRANGEBYLEX");
            range.arg(keys.needs(shard)).arg(&after).arg(&end).arg("LIMIT").arg(0).arg(STEP_MAX);
            let found = self.runner.one(Call::read("resume", shard, range)).await?;
            let found: Vec<String> = redis::from_redis_value(found).map_err(|_| unexpected("resume"))?;
            let Some(last) = found.last() else { break };
            after = format!("({last}");
            let mut queues: BTreeMap<QueueName, Vec<Vec<u8>>> = BTreeMap::new();
            for need in &found {
                let mut words = need.split(' ').skip(1);
                let (Some(queue), Some(id)) = (words.next(), words.next()) else { continue };
                let queue = QueueName::new(queue).map_err(|_| unexpected("resume"))?;
                queues.entry(queue).or_default().push(id.into());
            }
            for (queue, ids) in queues {
                self.release_parked(&queue, &ids).await?;
                // A dead letter may be parked for the entry of its source.
                let dead_letters = match self.known(&queue).await {
                    Ok(known) => known.config.dead_letter.as_ref().map(|dead| dead.queue.clone()),
                    Err(StoreError::NoSuchQueue(_)) => None,
                    Err(error) => return Err(error),
                };
                if let Some(dead_letters) = dead_letters {
                    self.release_parked(&dead_letters, &ids).await?;
                }
            }
            if found.len() < STEP_MAX {
                break;
            }
        }
        self.move_scripts(&name_in(shard)?, &["resumed", member, &mark]).await.map(|_| ())
    }

    async fn release_parked(&self, queue: &QueueName, ids: &[Vec<u8>]) -> Result<(), StoreError> {
        let args = || {
            let first = [b"resume".to_vec(), Vec::new(), Vec::new()];
            first.into_iter().chain(ids.iter().cloned()).collect()
        };
        match self.ask(QueueScript::Decide, queue, |_| args()).await {
            Ok(_) => self.waiters.freed(queue.as_str()),
            // Its messages are elsewhere, hence not parked.
            Err(StoreError::NoSuchQueue(_)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Does what callers have left. What cannot be done does not hold up the rest; the first error is returned.
    pub(super) async fn resume_all_in(&self, shard: Shard) -> Result<(), StoreError> {
        let mut command = redis::cmd("HRANDFIELD");
        command.arg(self.runner.keys.resumed(shard)).arg(STEP_MAX);
        let members = self.runner.one(Call::read("resume", shard, command)).await?;
        let members: Vec<String> = redis::from_redis_value(members).map_err(|_| unexpected("resume"))?;
        let mut resumed = Ok(());
        for member in members {
            match self.resume_parked(shard, &member).await {
                // It waits for a queue that is closed for a copy.
                Ok(()) | Err(StoreError::Moved(_)) => {}
                Err(error) => resumed = resumed.and(Err(error)),
            }
        }
        resumed
    }

    /// A message needs an entry in the shard of this queue (`need`), or no longer (`unneed`). There need not be such a queue.
    pub(super) async fn set_need(
        &self,
        how: &str,
        queue: &QueueName,
        member: &str,
        id: &str,
    ) -> Result<(), StoreError> {
        let args = [how, "", member, id].map(str::as_bytes);
        self.runner.one(self.call(QueueScript::Decide, &self.any(queue), &args)).await.map(|_| ())
    }
}
