//! Export and import of entries, and the ledger that is closed for a copy.

use hapax_core::ledger::protocol::{LedgerEntry, Stage};
use hapax_core::transfer::{FENCE_BOUND_MAX, PAGE_BYTES_MAX};
use hapax_core::{
    CopyState, EntryFilter, EntryId, ExportPage, ExportedEntry, ExportedItem, ExportedStage, Fence, Imported,
    SendError, StoreError, validate,
};
use redis::Value;

use super::answer::Answer;
use super::operators::Found;
use super::{LedgerState, whole};
use crate::copy;
use crate::error::unexpected;
use crate::keys::{SHARDS, Shard};
use crate::run::Call;
use crate::script::Script;

/// Entries that are read together: their outcomes may be large.
const READ_MAX: usize = 50;

fn exported(id: EntryId, entry: LedgerEntry, now_ms: u64) -> ExportedEntry {
    let stage = match entry.stage {
        Stage::Processing { until_ms, on_doubt, .. } => {
            ExportedStage::InDoubt { since_ms: until_ms.min(now_ms), on_doubt }
        }
        Stage::Completed { at_ms, ttl_ms, outcome } => ExportedStage::Completed { at_ms, ttl_ms, outcome },
    };
    ExportedEntry {
        id,
        owner: entry.owner,
        fingerprint: entry.fingerprint,
        claimed_ms: entry.claimed_ms,
        takeovers: entry.takeovers,
        stage,
    }
}

fn exported_entry(value: Value) -> Result<Option<ExportedItem>, StoreError> {
    let mut answer = Answer::read("export", value)?;
    if answer.status != "entry" {
        return Ok(None);
    }
    let (id, entry) = answer.entry()?;
    Ok(Some(ExportedItem::Entry(Box::new(exported(id, entry, answer.now_ms)))))
}

impl LedgerState {
    /// One page of the ledger, behind a position of the listing.
    pub async fn export(&self, after: Option<&str>, limit: usize) -> Result<ExportPage, StoreError> {
        let wrong = |_| StoreError::Invalid("after: use the `next` of an earlier page".into());
        let after = after.map(str::parse).transpose().map_err(wrong)?;
        let filter = EntryFilter { after, limit, ..EntryFilter::default() };
        let (mut found, mut is_more) = self.scan(&filter).await?;
        is_more |= found.len() > limit;
        found.truncate(limit);
        let (mut page, mut bytes, mut last) = (ExportPage::default(), 0, after.unwrap_or_default());
        for part in found.chunks(READ_MAX) {
            let looks = part.iter().map(|one| self.call_member(Script::Look, one.shard, &one.member, &[]));
            for (one, value) in part.iter().zip(self.runner.run(looks.collect()).await) {
                let item = match value {
                    Ok(value) => exported_entry(value)?,
                    Err(StoreError::Damaged(problem)) => {
                        Some(ExportedItem::Damaged { what: format!("ledger entry {}", one.member), problem })
                    }
                    Err(error) => return Err(error),
                };
                if let Some(item) = item {
                    bytes += item.bytes() + 1;
                    if bytes > PAGE_BYTES_MAX && !page.items.is_empty() {
                        page.next = Some(last.to_string());
                        return Ok(page);
                    }
                    page.items.push(item);
                }
                last = Found::position(one);
            }
        }
        page.next = is_more.then(|| last.to_string());
        Ok(page)
    }

    /// The ids of entries that are there, by their shards and names.
    pub async fn ids_of(&self, entries: &[(Shard, String)]) -> Result<Vec<Option<EntryId>>, StoreError> {
        let looks = entries.iter().map(|(shard, member)| self.call_member(Script::Look, *shard, member, &[]));
        let mut ids = Vec::with_capacity(entries.len());
        for value in whole(self.runner.run(looks.collect()).await)? {
            let mut answer = Answer::read("export", value)?;
            let is_there = answer.status == "entry";
            ids.push(if is_there { Some(answer.entry()?.0) } else { None });
        }
        Ok(ids)
    }

    /// Adds entries under keys that this store does not know.
    pub async fn import(
        &self,
        items: &[ExportedItem],
    ) -> Result<Vec<Result<Imported, SendError>>, StoreError> {
        let mut answers = Vec::with_capacity(items.len());
        for item in items {
            answers.push(match item {
                ExportedItem::Entry(entry) => match validate::import_entry(entry) {
                    Ok(()) => Ok(self.import_entry(entry).await?),
                    Err(error) => Err(error),
                },
                ExportedItem::Damaged { what, problem } => Err(damaged(what, problem)),
                _ => Err(SendError::Invalid("what belongs to a queue is not for the ledger".into())),
            });
        }
        Ok(answers)
    }

    async fn import_entry(&self, entry: &ExportedEntry) -> Result<Imported, StoreError> {
        let answer = Answer::read("import", self.runner.one(self.import_call(entry)).await?)?;
        match answer.status.as_str() {
            "added" => Ok(Imported::Added),
            "there" => Ok(Imported::AlreadyThere),
            _ => Err(unexpected("import")),
        }
    }

    /// A script about a whole shard, in all of them; the first one last.
    async fn in_all_shards(&self, [how, value, by, what]: [&str; 4]) -> Result<(), StoreError> {
        let call = |shard: Shard| {
            let keys = [self.runner.keys.meta(shard), self.runner.keys.audit(shard)];
            let what = if shard == 0 { what } else { "" };
            Call::script(Script::Shard, shard, &keys, &[how, value, by, what].map(str::as_bytes))
        };
        whole(self.runner.run((1..SHARDS).map(call).collect()).await)?;
        self.runner.one(call(0)).await.map(|_| ())
    }

    /// Above every fence that was given out.
    pub async fn fence_bound(&self) -> Result<Fence, StoreError> {
        let last = |shard: Shard| {
            let mut command = redis::cmd("HGET");
            command.arg(self.runner.keys.meta(shard)).arg("fence");
            Call::read("fence", shard, command)
        };
        let mut bound = 0;
        for value in whole(self.runner.run((0..SHARDS).map(last).collect()).await)? {
            let fence: Option<f64> = redis::from_redis_value(value).map_err(|_| unexpected("fence"))?;
            bound = bound.max(fence.unwrap_or_default() as u64);
        }
        Ok(Fence(bound + 1))
    }

    pub async fn raise_fence(&self, bound: Fence) -> Result<(), StoreError> {
        validate::within("fence", bound.0, 0, FENCE_BOUND_MAX)?;
        let what = format!("raised fences to {bound} for an import");
        self.in_all_shards(["raise", &bound.0.to_string(), "import", &what]).await
    }

    /// The first shard is closed and opened last: what it says holds for all.
    pub async fn set_copy(&self, state: Option<CopyState>, by: &str) -> Result<(), StoreError> {
        match state {
            Some(state) => {
                let what = format!("closed the ledger: {}", state.ledger_refusal());
                self.in_all_shards(["close", &copy::stored(&state), by, &what]).await
            }
            None => self.in_all_shards(["open", "", by, "opened the ledger after a copy"]).await,
        }
    }

    pub async fn copy_state(&self) -> Result<Option<CopyState>, StoreError> {
        let mut command = redis::cmd("HGET");
        command.arg(self.runner.keys.meta(0)).arg("closed");
        let value = self.runner.one(Call::read("copy", 0, command)).await?;
        let stored: Option<String> = redis::from_redis_value(value).map_err(|_| unexpected("copy"))?;
        stored.map(|stored| copy::read(&stored)).transpose()
    }
}

pub(crate) fn damaged(what: &str, problem: &str) -> SendError {
    SendError::Invalid(format!("{what} was damaged when it was exported ({problem})"))
}
