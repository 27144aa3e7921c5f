//! Export of queues; the ledger's part is in its own module.

use async_trait::async_trait;
use hapax_core::transfer::PAGE_BYTES_MAX;
use hapax_core::{
    AdminError, Batch, CopyState, EntryId, ExportPage, ExportedItem, ExportedMessage, FailureCause, Fence,
    GroupId, Imported, MessageId, MessageState, QueueInfo, QueueName, RememberedId, SendError, StoreError,
    Transfer, TransferScope, policy, validate,
};

use super::Queues;
use super::message::Stored;
use crate::RedisStore;
use crate::error::unexpected;
use crate::keys::{Shard, shard_of_queue};
use crate::ledger::{LedgerState, whole};
use crate::run::Call;

/// Messages and bytes that are read together.
const READ_MAX: usize = 1_000;

/// Where a page begins.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Cursor {
    /// Messages behind this place.
    Messages(u64),
    /// Remembered deduplication ids: the number of those before.
    Dedup(u64),
}

impl Cursor {
    fn parse(text: Option<&str>) -> Result<Self, StoreError> {
        let wrong = || StoreError::Invalid("after: use the `next` of an earlier page".into());
        let Some(text) = text else { return Ok(Self::Messages(0)) };
        let place = |rest: &str| rest.parse().map_err(|_| wrong());
        match (text.strip_prefix('m'), text.strip_prefix('d')) {
            (Some(rest), _) => place(rest).map(Self::Messages),
            (_, Some("")) => Ok(Self::Dedup(0)),
            (_, Some(rest)) => place(rest).map(Self::Dedup),
            (None, None) => Err(wrong()),
        }
    }
}

/// The shard and the name of an entry that a message needs.
fn needed(need: &str) -> Result<(Shard, String), StoreError> {
    let (queue, member) = need.split_once(' ').ok_or_else(|| unexpected("export"))?;
    let queue = QueueName::new(queue).map_err(|_| unexpected("export"))?;
    Ok((shard_of_queue(&queue), member.to_owned()))
}

impl Queues {
    /// One page of a queue. The entries that messages need are asked of the ledger.
    async fn export(
        &self,
        ledger: &LedgerState,
        name: &QueueName,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ExportPage, AdminError> {
        let _ticket = self.asking.begin();
        let cursor = Cursor::parse(after)?;
        let info = self.read_info(name).await?.0;
        let Some(paused_ms) = info.paused.as_ref().map(|paused| paused.since_ms) else {
            let problem =
                format!("queue {name} is not paused, so it changes while it is exported; pause it first");
            return Err(AdminError::Refused(problem));
        };
        Ok(match cursor {
            Cursor::Messages(after) => self.export_messages(ledger, &info, after, limit, paused_ms).await?,
            Cursor::Dedup(from) => self.export_dedup(&info, from, limit).await?,
        })
    }

    async fn export_messages(
        &self,
        ledger: &LedgerState,
        info: &QueueInfo,
        after: u64,
        limit: usize,
        paused_ms: u64,
    ) -> Result<ExportPage, StoreError> {
        let undecided = if info.config.is_fifo() { self.undecided(&info.name).await? } else { Vec::new() };
        let waits = self.waits(&info.name, &undecided).await?;
        let (mut found, last, more) = self.view(&info.name, after, limit + 1, "-1", "").await?;
        let mut upto = found.get(limit).map(|message| message.sequence);
        found.truncate(limit);
        if upto.is_none() && more {
            upto = Some(last + 1);
        }
        let (mut placed, mut bytes) = (Vec::new(), 0);
        for message in found {
            let halts = undecided.iter().any(|(id, _)| *id == message.id);
            let sequence = message.sequence;
            let needs: Vec<_> = message.needs.iter().map(|need| needed(need)).collect::<Result<_, _>>()?;
            let mut entries: Vec<EntryId> = ledger.ids_of(&needs).await?.into_iter().flatten().collect();
            entries
                .sort_by(|a, b| (a.scope.as_str(), a.key.as_str()).cmp(&(b.scope.as_str(), b.key.as_str())));
            let item = exported(message, halts, entries, paused_ms);
            let size = item.bytes() + 1;
            if bytes > 0 && bytes + size > PAGE_BYTES_MAX {
                upto = Some(sequence);
                break;
            }
            bytes += size;
            placed.push((sequence, item));
        }
        let own =
            |place: u64| (place > after || (place, after) == (0, 0)) && upto.is_none_or(|upto| place < upto);
        placed.extend(waits.into_iter().filter(|(place, _)| own(*place)));
        placed.sort_by_key(|(place, _)| *place);
        let items = placed.into_iter().map(|(_, item)| item).collect();
        let next = upto.map_or_else(|| "d".to_owned(), |upto| format!("m{}", upto - 1));
        Ok(ExportPage { items, next: Some(next) })
    }

    /// What groups of a queue are halted for: the message, and the group.
    async fn undecided(&self, name: &QueueName) -> Result<Vec<(MessageId, GroupId)>, StoreError> {
        let mut command = redis::cmd("ZRANGE");
        command.arg(self.runner.keys.halted(name)).arg(0).arg(-1);
        let found = self.runner.one(Call::read("export", shard_of_queue(name), command)).await?;
        let found: Vec<String> = redis::from_redis_value(found).map_err(|_| unexpected("export"))?;
        let read = |member: String| {
            let (group, id) = member.split_once(' ')?;
            Some((id.parse().ok()?, group.parse().ok()?))
        };
        found.into_iter().map(|member| read(member).ok_or_else(|| unexpected("export"))).collect()
    }

    /// The queues that have messages of these ids.
    pub(super) async fn find_anywhere(
        &self,
        ids: &[MessageId],
    ) -> Result<Vec<(QueueName, MessageId)>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let names = self.names().await?;
        let look = |name: &QueueName| {
            let mut command = redis::cmd("HMGET");
            command.arg(self.runner.keys.ids(name));
            for id in ids {
                command.arg(id.to_string());
            }
            Call::read("export", shard_of_queue(name), command)
        };
        let mut found = Vec::new();
        for (name, value) in names.iter().zip(whole(self.runner.run(names.iter().map(look).collect()).await)?)
        {
            let places: Vec<Option<String>> =
                redis::from_redis_value(value).map_err(|_| unexpected("export"))?;
            let here = ids.iter().zip(places).filter(|(_, place)| place.is_some());
            found.extend(here.map(|(id, _)| (name.clone(), *id)));
        }
        Ok(found)
    }

    /// A message by its id.
    pub(super) async fn by_id(&self, queue: &QueueName, id: MessageId) -> Result<Option<Stored>, StoreError> {
        Ok(self.view(queue, 0, 1, "-1", &id.to_string()).await?.0.pop())
    }

    /// Dead letters elsewhere that groups wait for, by the places that they return to; 0 if that is not known.
    async fn waits(
        &self,
        name: &QueueName,
        undecided: &[(MessageId, GroupId)],
    ) -> Result<Vec<(u64, ExportedItem)>, StoreError> {
        let ids: Vec<MessageId> = undecided.iter().map(|(id, _)| *id).collect();
        let mut found = Vec::new();
        for part in ids.chunks(READ_MAX) {
            found.extend(self.find_anywhere(part).await?);
        }
        let mut waits = Vec::new();
        for (id, group) in undecided {
            let place = found.iter().find(|(_, found)| found == id).map(|(queue, _)| queue);
            if place == Some(name) {
                // It says so itself.
                continue;
            }
            let letter = match place {
                Some(queue) => self.by_id(queue, *id).await?,
                None => None,
            };
            let is_home = |letter: &&Stored| letter.dead.as_ref().is_some_and(|dead| dead.source == *name);
            let place = letter.as_ref().filter(is_home).map_or(0, |letter| letter.died_at);
            let item = ExportedItem::Undecided { group: group.clone(), id: letter.map(|_| *id) };
            waits.push((place, item));
        }
        Ok(waits)
    }

    async fn export_dedup(
        &self,
        info: &QueueInfo,
        from: u64,
        limit: usize,
    ) -> Result<ExportPage, StoreError> {
        let (keys, shard) = (&self.runner.keys, shard_of_queue(&info.name));
        let mut range = redis::cmd("ZRANGE");
        range.arg(keys.dedup_at(&info.name)).arg(from).arg(from + limit as u64 - 1);
        let hashes = self.runner.one(Call::read("export", shard, range)).await?;
        let hashes: Vec<String> = redis::from_redis_value(hashes).map_err(|_| unexpected("export"))?;
        let mut page = ExportPage::default();
        if hashes.is_empty() {
            return Ok(page);
        }
        let mut read = redis::cmd("HMGET");
        read.arg(keys.dedup(&info.name)).arg(&hashes);
        let known = self.runner.one(Call::read("export", shard, read)).await?;
        let known: Vec<Option<String>> = redis::from_redis_value(known).map_err(|_| unexpected("export"))?;
        let now_ms = self.configure(&info.name, "get", [b"", b"", b"0", b"", b""]).await?.now_ms;
        let is_full = hashes.len() == limit;
        for (hash, known) in hashes.into_iter().zip(known) {
            let Some(known) = known else { continue };
            let mut words = known.split(' ');
            let (sent_ms, id) = (words.next().and_then(|ms| ms.parse().ok()), words.next());
            let (Some(sent_ms), Some(id)) = (sent_ms, id.and_then(|id| id.parse().ok())) else {
                return Err(unexpected("export"));
            };
            if policy::is_duplicate(sent_ms, info.config.dedup.window_ms, now_ms) {
                page.items.push(ExportedItem::Dedup(RememberedId { hash, id, sent_ms }));
            }
        }
        page.next = is_full.then(|| format!("d{}", from + limit as u64));
        Ok(page)
    }
}

fn exported(message: Stored, undecided: bool, entries: Vec<EntryId>, paused_ms: u64) -> ExportedItem {
    let parked = message.parked.map(|(cause, _)| cause).filter(|_| message.state == MessageState::Parked);
    if parked == Some(FailureCause::Damaged) {
        let problem = "it was parked as damaged".to_owned();
        return ExportedItem::Damaged { what: format!("message {}", message.id), problem };
    }
    let visible_ms = match message.state {
        // In flight counts as returned when the queue was paused: the same time on every page.
        MessageState::InFlight => paused_ms,
        MessageState::Delayed => message.until_ms,
        _ if message.visible_ms > 0 => message.visible_ms,
        _ => message.sent_ms,
    };
    ExportedItem::Message(Box::new(ExportedMessage {
        id: message.id,
        sequence: message.sequence,
        attributes: message.attributes,
        key: message.key,
        key_source: message.key_source,
        body: message.body,
        group: message.group,
        dedup: message.dedup,
        priority: message.priority,
        sent_ms: message.sent_ms,
        retained_from_ms: message.retained_ms,
        visible_ms,
        first_received_ms: message.first_received_ms,
        attempts: message.attempts,
        deliveries: message.deliveries,
        fence: Fence(message.fence),
        parked,
        undecided,
        dead: message.dead,
        history: message.history,
        entries,
    }))
}

#[async_trait]
impl Transfer for RedisStore {
    async fn fence_bound(&self) -> Result<Fence, StoreError> {
        self.base.begin()?;
        self.base.ledger.fence_bound().await
    }

    async fn raise_fence(&self, bound: Fence) -> Result<(), StoreError> {
        self.base.begin()?;
        self.base.ledger.raise_fence(bound).await
    }

    async fn set_copy(
        &self,
        scope: &TransferScope,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        self.base.begin()?;
        match scope {
            TransferScope::Queue(name) => self.base.queues.set_copy(name, state, by).await,
            TransferScope::Ledger => Ok(self.base.ledger.set_copy(state, by).await?),
        }
    }

    async fn ledger_copy(&self) -> Result<Option<CopyState>, StoreError> {
        self.base.begin()?;
        self.base.ledger.copy_state().await
    }

    async fn export(
        &self,
        from: &TransferScope,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ExportPage, AdminError> {
        validate::page(limit)?;
        self.base.begin()?;
        match from {
            TransferScope::Queue(name) => {
                self.base.queues.export(&self.base.ledger, name, after, limit).await
            }
            TransferScope::Ledger => Ok(self.base.ledger.export(after, limit).await?),
        }
    }

    async fn import(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError> {
        validate::batch("items", items.len())?;
        self.base.begin()?;
        match to {
            TransferScope::Queue(name) => self.base.queues.import(name, items).await,
            TransferScope::Ledger => self.base.ledger.import(&items).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        assert_eq!(Cursor::parse(Some("m17")), Ok(Cursor::Messages(17)));
        assert_eq!(Cursor::parse(Some("d")), Ok(Cursor::Dedup(0)));
        assert_eq!(Cursor::parse(Some("d500")), Ok(Cursor::Dedup(500)));
        for wrong in ["", "m", "x", "dx"] {
            assert!(Cursor::parse(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
