//! What operators do: looking at entries, listing them, and deciding about those in doubt.

use hapax_core::{EntryFilter, EntryId, EntryState, EntryView, Page, Resolution, ResolveError, StoreError};
use redis::Value;

use super::answer::Answer;
use super::{LedgerState, whole};
use crate::error::unexpected;
use crate::keys::{SHARDS, Shard, member, shard_of};
use crate::run::Call;
use crate::script::Script;

/// Entries that one page looks at. A page that found fewer than it may have says where to continue.
const SCAN_MAX: usize = 1_000;
/// Entries that are read together: their outcomes may be large.
const READ_MAX: usize = 50;
/// Bits of a page's position that name the shard; the others are the fence.
const SHARD_BITS: u32 = SHARDS.trailing_zeros();

/// An operator's decision.
pub(super) enum Decision {
    Resolve(Resolution),
    Forget,
}

/// An entry in the order of the listing: by fence, and by shard where fences are equal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Found {
    fence: u64,
    pub shard: Shard,
    pub member: String,
}

impl Found {
    pub fn position(&self) -> u64 {
        self.fence << SHARD_BITS | self.shard as u64
    }
}

impl LedgerState {
    pub(super) async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        let call = self.call_member(Script::Look, shard_of(&id.scope), &member(id), &[]);
        let value = self.runner.one(call).await?;
        Ok(self.view(value)?.filter(|view| view.id == *id))
    }

    fn view(&self, value: Value) -> Result<Option<EntryView>, StoreError> {
        let mut answer = Answer::read("entry", value)?;
        self.stats().pruned += answer.pruned;
        if answer.status != "entry" {
            return Ok(None);
        }
        let (id, entry) = answer.entry()?;
        Ok(Some(entry.view(id, answer.now_ms)))
    }

    pub(super) async fn entries(&self, filter: &EntryFilter) -> Result<Page<EntryView>, StoreError> {
        let (found, is_more) = self.scan(filter).await?;
        let mut items = Vec::new();
        let mut seen = 0;
        for part in found.chunks(READ_MAX) {
            let looks = part.iter().map(|one| self.call_member(Script::Look, one.shard, &one.member, &[]));
            for value in whole(self.runner.run(looks.collect()).await)? {
                seen += 1;
                let fits = |view: &EntryView| {
                    filter.scope.as_ref().is_none_or(|scope| *scope == view.id.scope)
                        && filter.state.is_none_or(|state| state == view.state)
                };
                items.extend(self.view(value)?.filter(fits));
                if items.len() == filter.limit {
                    let is_last = seen == found.len() && !is_more;
                    let next = (!is_last).then(|| found[seen - 1].position());
                    return Ok(Page { items, next });
                }
            }
        }
        let next = found.last().filter(|_| is_more).map(Found::position);
        Ok(Page { items, next })
    }

    /// The next entries in order, and whether there are more.
    pub(super) async fn scan(&self, filter: &EntryFilter) -> Result<(Vec<Found>, bool), StoreError> {
        let shards = match &filter.scope {
            Some(scope) => shard_of(scope)..shard_of(scope) + 1,
            None => 0..SHARDS,
        };
        let is_open = matches!(filter.state, Some(EntryState::Processing | EntryState::InDoubt));
        let after = filter.after.unwrap_or_default();
        let (fence, last_shard) = (after >> SHARD_BITS, (after % SHARDS as u64) as usize);
        let range = |shard: Shard| {
            let keys = &self.runner.keys;
            let key = if is_open { keys.open(shard) } else { keys.all(shard) };
            let min = if shard > last_shard { fence.to_string() } else { format!("({fence}") };
            let mut command = redis::cmd("ZRANGEBYSCORE");
            command.arg(key).arg(min).arg("+inf").arg("WITHSCORES").arg("LIMIT").arg(0).arg(SCAN_MAX + 1);
            Call::read("entries", shard, command)
        };
        let answers = whole(self.runner.run(shards.clone().map(range).collect()).await)?;
        let mut found = Vec::new();
        for (shard, value) in shards.zip(answers) {
            for (member, fence) in scored(value)? {
                found.push(Found { fence, shard, member });
            }
        }
        found.sort_unstable();
        let is_more = found.len() > SCAN_MAX;
        found.truncate(SCAN_MAX);
        Ok((found, is_more))
    }

    pub(super) async fn decide(
        &self,
        id: &EntryId,
        decision: &Decision,
        by: &str,
    ) -> Result<(), ResolveError> {
        let value = self.runner.one(self.decide_call(id, decision, by)).await?;
        let mut answer = Answer::read("decide", value)?;
        self.stats().pruned += answer.pruned;
        match answer.status.as_str() {
            "done" => {
                self.waiters.freed(&member(id));
                self.resume(id, &answer.resumed).await;
                Ok(())
            }
            "absent" => Err(ResolveError::NotFound(id.clone())),
            "held" => Err(ResolveError::InProgress { retry_after_ms: answer.number()? }),
            "ended" => Err(ResolveError::NotInDoubt),
            _ => Err(unexpected("decide").into()),
        }
    }
}

/// The members of a sorted set with their scores.
pub(super) fn scored(value: Value) -> Result<Vec<(String, u64)>, StoreError> {
    let pairs: Vec<(String, f64)> = redis::from_redis_value(value).map_err(|_| unexpected("entries"))?;
    Ok(pairs.into_iter().map(|(member, score)| (member, score as u64)).collect())
}
