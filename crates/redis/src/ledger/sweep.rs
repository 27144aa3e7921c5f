//! The ledger's background work: recording which leases have ended, and removing entries whose time is over.

use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use hapax_core::StoreError;
use redis::Value;

use super::LedgerState;
use super::answer::Answer;
use super::operators::scored;
use crate::error::unexpected;
use crate::keys::{SHARDS, Shard};
use crate::run::Call;
use crate::script::Script;

/// Time between two sweeps, and the shards that one of them visits.
const EVERY: Duration = Duration::from_secs(1);
const SHARDS_EACH: usize = 16;
/// Entries of a shard that one step looks at, and the steps of one visit.
const DUE_MAX: usize = 100;
const STEPS_MAX: usize = 20;

/// Sweeps until the store is dropped or closed.
pub(crate) async fn run(ledger: Weak<LedgerState>) {
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(ledger) = ledger.upgrade() else { return };
        let first = {
            let mut next = ledger.next_shard.lock().unwrap_or_else(PoisonError::into_inner);
            let first = *next;
            *next = (first + SHARDS_EACH) % SHARDS;
            first
        };
        if let Err(error) = sweep(&ledger, (first..first + SHARDS_EACH).collect()).await {
            tracing::debug!(%error, "the ledger's sweep failed; it is tried again");
        }
    }
}

/// Visits all shards.
pub(super) async fn sweep_all(ledger: &Arc<LedgerState>) -> Result<(), StoreError> {
    sweep(ledger, (0..SHARDS).collect()).await
}

/// Visits shards until nothing is due in them, within bounds. A node that cannot be reached does not keep the shards of the
/// others from being swept; the first error is returned.
async fn sweep(ledger: &Arc<LedgerState>, mut shards: Vec<Shard>) -> Result<(), StoreError> {
    let mut swept = Ok(());
    for _ in 0..STEPS_MAX {
        let (mut calls, mut full) = (Vec::new(), Vec::new());
        let (found, asked) = due(ledger, &shards).await;
        swept = swept.and(asked);
        for (shard, members) in found {
            if members.len() == DUE_MAX {
                full.push(shard);
            }
            if !members.is_empty() {
                calls.push(call(ledger, shard, &members));
            }
        }
        for value in ledger.runner.run(calls).await {
            swept = swept.and(value.and_then(|value| pruned(ledger, value)));
        }
        shards = full;
        if shards.is_empty() {
            break;
        }
    }
    swept
}

fn pruned(ledger: &LedgerState, value: Value) -> Result<(), StoreError> {
    let mut answer = Answer::read("sweep", value)?;
    ledger.stats().pruned += answer.pruned;
    let damaged = answer.number()?;
    if damaged > 0 {
        tracing::error!(
            damaged,
            "entries of the ledger in Redis cannot be read; claims of their keys fail as damaged"
        );
    }
    Ok(())
}

fn call(ledger: &LedgerState, shard: Shard, members: &[String]) -> Call {
    let keys = &ledger.runner.keys;
    let mut all = keys.ledger(shard);
    all.extend(members.iter().map(|member| keys.entry(shard, member)));
    let clock = ledger.runner.clock();
    let first = [clock.as_bytes(), ledger.runner.touch()];
    Call::script(Script::Sweep, shard, &all, &first)
}

/// The entries of each shard that are due by the clock of its node, and whether all shards could be asked.
async fn due(ledger: &LedgerState, shards: &[Shard]) -> (Vec<(Shard, Vec<String>)>, Result<(), StoreError>) {
    let ask = |shard: &Shard| {
        let mut range = redis::cmd("ZRANGE");
        range.arg(ledger.runner.keys.due(*shard)).arg(0).arg(DUE_MAX - 1).arg("WITHSCORES");
        [Call::read("sweep", *shard, redis::cmd("TIME")), Call::read("sweep", *shard, range)]
    };
    let read = |time: Result<Value, StoreError>, range: Result<Value, StoreError>| {
        let now_ms = match &ledger.runner.options.clock {
            Some(clock) => clock.wall_ms(),
            None => now_ms(time?)?,
        };
        let due = scored(range?)?.into_iter().filter(|(_, at_ms)| *at_ms <= now_ms);
        Ok(due.map(|(member, _)| member).collect())
    };
    let (mut found, mut asked) = (Vec::with_capacity(shards.len()), Ok(()));
    let mut answers = ledger.runner.run(shards.iter().flat_map(ask).collect()).await.into_iter();
    for shard in shards {
        let (Some(time), Some(range)) = (answers.next(), answers.next()) else { break };
        match read(time, range) {
            Ok(members) => found.push((*shard, members)),
            Err(error) => asked = asked.and(Err(error)),
        }
    }
    (found, asked)
}

fn now_ms(time: Value) -> Result<u64, StoreError> {
    let (seconds, us): (u64, u64) = redis::from_redis_value(time).map_err(|_| unexpected("TIME"))?;
    Ok(seconds * 1000 + us / 1000)
}
