//! Administration of queues.

use hapax_core::copy::check_open;
use hapax_core::{
    AdminError, Browse, Discarded, EntryId, GroupId, IdempotencyKey, MessageId, MessageState, MessageView,
    Page, QueueConfig, QueueInfo, QueueName, QueuePause, Revision, StoreError, validate,
};
use redis::Value;

use super::Queues;
use super::call::{Answer, Fields};
use super::message::Stored;
use crate::error::unexpected;
use crate::keys::member;
use crate::ledger::whole;
use crate::run::Call;
use crate::script::QueueScript;

/// Scripts of one purge; each removes up to 500 dead letters that groups wait for.
const CLEAR_STEPS_MAX: usize = 10_000;
/// Scripts of one page: messages of other states are passed over.
const VIEW_STEPS_MAX: usize = 100;

/// A configuration with its revision, if the queue exists.
pub(super) type ReadInfo = Result<Option<(QueueInfo, String)>, StoreError>;

fn json(config: &QueueConfig) -> Vec<u8> {
    serde_json::to_vec(config).expect("a configuration is plain data")
}

/// Revision, configuration, times and pause.
pub(super) fn info(name: &QueueName, fields: &mut Fields) -> Result<(QueueInfo, String), StoreError> {
    let (revision, config) = (fields.text()?, fields.text()?);
    let (created_ms, modified_ms, pause) = (fields.number()?, fields.number()?, fields.text()?);
    let bad = |_| StoreError::Damaged(format!("the configuration of queue {name} cannot be read"));
    let paused = match pause.split_once(' ') {
        None => None,
        Some((since_ms, pause)) => {
            let pause: QueuePause = serde_json::from_str(pause).map_err(bad)?;
            Some(QueuePause { since_ms: since_ms.parse().map_err(|_| fields.unexpected())?, ..pause })
        }
    };
    let config = serde_json::from_str(&config).map_err(bad)?;
    let number = Revision(revision.parse().map_err(|_| fields.unexpected())?);
    let info = QueueInfo { name: name.clone(), config, revision: number, created_ms, modified_ms, paused };
    Ok((info, revision))
}

impl Queues {
    pub(super) async fn configure(
        &self,
        name: &QueueName,
        how: &str,
        [config, expected, interval, by, pause]: [&[u8]; 5],
    ) -> Result<Answer, StoreError> {
        let args = [how.as_bytes(), config, expected, interval, by, pause];
        let answer = Answer::read(
            "queue",
            self.runner.one(self.call(QueueScript::Configure, &self.any(name), &args)).await?,
        )?;
        if how != "get" {
            self.forget(name);
        }
        let answer = answer.check_open(name)?;
        if answer.status == "missing" { Err(StoreError::NoSuchQueue(name.clone())) } else { Ok(answer) }
    }

    pub(super) async fn read_info(&self, name: &QueueName) -> Result<(QueueInfo, String), StoreError> {
        let mut answer = self.configure(name, "get", [b"", b"", b"0", b"", b""]).await?;
        info(name, &mut answer.values)
    }

    /// The configuration of a queue, unless it is closed for a copy.
    pub(super) async fn open_config(&self, name: &QueueName) -> Result<QueueConfig, StoreError> {
        let (info, _) = self.read_info(name).await?;
        check_open(name, info.paused.as_ref())?;
        Ok(info.config)
    }

    /// Whether a configuration is valid, and its dead-letter queue exists.
    async fn check(&self, name: &QueueName, config: &QueueConfig) -> Result<(), AdminError> {
        let dead = match &config.dead_letter {
            None => None,
            Some(dead) => match self.read_info(&dead.queue).await {
                Ok((info, _)) => Some(info.config),
                Err(StoreError::NoSuchQueue(_)) => None,
                Err(error) => return Err(error.into()),
            },
        };
        validate::queue(name, config, |_| dead.as_ref())
    }

    pub(super) async fn create(
        &self,
        name: &QueueName,
        config: &QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        let _ticket = self.asking.begin();
        validate::interval(0, None, interval_ms, String::new)?;
        self.check(name, config).await?;
        let (config_json, interval) = (json(config), interval_ms.to_string());
        let args: [&[u8]; 5] = [&config_json, b"", interval.as_bytes(), b"", b""];
        let mut answer = self.configure(name, "create", args).await?;
        match answer.status.as_str() {
            "created" => Ok(true),
            "exists" => {
                let (there, _) = info(name, &mut answer.values)?;
                let differs = there.config.first_difference(config);
                differs.map_or(Ok(false), |field| Err(AdminError::Exists(name.clone(), field)))
            }
            "too-soon" => {
                let retry_after_ms = answer.values.last()?;
                Err(AdminError::TooSoon { what: format!("queue {name} was deleted"), retry_after_ms })
            }
            _ => Err(answer.values.unexpected().into()),
        }
    }

    pub(super) async fn set(
        &self,
        name: &QueueName,
        config: &QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        let _ticket = self.asking.begin();
        let conflict = |expected, actual| {
            Err(AdminError::RevisionConflict { what: format!("queue {name}"), expected, actual })
        };
        // In the order of the other stores: the queue, whether it is open, its revision, the settings.
        let (there, _) = self.read_info(name).await?;
        check_open(name, there.paused.as_ref())?;
        if let Some(expected) = expected.filter(|expected| *expected != there.revision) {
            return conflict(expected, there.revision);
        }
        self.check(name, config).await?;
        let (config, asked) =
            (json(config), expected.map(|revision| revision.to_string()).unwrap_or_default());
        let mut answer = self.configure(name, "set", [&config, asked.as_bytes(), b"0", b"", b""]).await?;
        let (now, _) = info(name, &mut answer.values)?;
        self.waiters.freed(name.as_str());
        match expected.filter(|_| answer.status == "conflict") {
            Some(expected) => conflict(expected, now.revision),
            None => Ok(now.revision),
        }
    }

    pub(super) async fn pause(
        &self,
        name: &QueueName,
        by: &str,
        reason: Option<&str>,
    ) -> Result<(), StoreError> {
        let _ticket = self.asking.begin();
        let pause = QueuePause::new(0, by, reason);
        let text = serde_json::to_vec(&pause).expect("a pause is plain data");
        self.configure(name, "pause", [b"", b"", b"0", pause.by.as_bytes(), &text]).await.map(|_| ())
    }

    pub(super) async fn resume(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        let _ticket = self.asking.begin();
        let by = QueuePause::new(0, by, None).by;
        self.configure(name, "resume", [b"", b"", b"0", by.as_bytes(), b""]).await?;
        self.waiters.freed(name.as_str());
        Ok(())
    }

    /// Purges or deletes a queue; the number of its messages.
    pub(super) async fn clear(
        &self,
        name: &QueueName,
        how: &str,
        interval_ms: u64,
    ) -> Result<u64, AdminError> {
        let _ticket = self.asking.begin();
        validate::interval(0, None, interval_ms, String::new)?;
        let args = || vec![how.into(), interval_ms.to_string().into_bytes()];
        let mut removed = 0;
        for _ in 0..CLEAR_STEPS_MAX {
            let mut answer = self.ask(QueueScript::Clear, name, |_| args()).await?;
            self.after(name, &answer).await;
            let number = answer.values.number()?;
            match answer.status.as_str() {
                "more" => removed += number,
                "too-soon" => {
                    let what = format!("queue {name} was purged");
                    return Err(AdminError::TooSoon { what, retry_after_ms: number });
                }
                _ => {
                    if how == "delete" {
                        self.forget(name);
                    }
                    self.waiters.freed(name.as_str());
                    return Ok(removed + number);
                }
            }
        }
        Err(StoreError::Unavailable(format!(
            "queue {name} has too many dead letters to purge at once; try again"
        ))
        .into())
    }

    pub(super) async fn infos(&self) -> Result<Vec<QueueInfo>, StoreError> {
        let names = self.names().await?;
        let mut found = Vec::with_capacity(names.len());
        for info in self.read_infos(&names.iter().collect::<Vec<_>>()).await {
            // Else the queue was deleted meanwhile.
            if let Some((info, revision)) = info? {
                self.remember(info.clone(), &revision);
                found.push(info);
            }
        }
        Ok(found)
    }

    /// The configurations of queues with their revisions, read together; `None` for a queue that does not exist.
    pub(super) async fn read_infos(&self, names: &[&QueueName]) -> Vec<ReadInfo> {
        let args: [&[u8]; 6] = [b"get", b"", b"", b"0", b"", b""];
        let call = |name: &&QueueName| self.call(QueueScript::Configure, &self.any(name), &args);
        let answers = self.runner.run(names.iter().map(call).collect()).await;
        let read = |(name, value): (&&QueueName, Result<Value, StoreError>)| {
            let mut answer = Answer::read("queues", value?)?;
            if answer.status == "done" { info(name, &mut answer.values).map(Some) } else { Ok(None) }
        };
        names.iter().zip(answers).map(read).collect()
    }

    /// Messages and bytes of all queues.
    pub(super) async fn sums(&self) -> Result<(u64, u64), StoreError> {
        let call = |name: &QueueName| {
            let mut command = redis::cmd("HMGET");
            command.arg(self.runner.keys.info(name)).arg("counts");
            Call::read("status", crate::keys::shard_of_queue(name), command)
        };
        let calls = self.names().await?.iter().map(call).collect();
        let (mut messages, mut bytes) = (0, 0);
        for value in whole(self.runner.run(calls).await)? {
            let mut counts = Fields::of("status", value)?;
            if !counts.is_none() {
                // Behind the last sequence.
                let mut counts = counts.unpacked()?;
                counts.number()?;
                messages += counts.number()?;
                bytes += counts.number()?;
            }
        }
        Ok((messages, bytes))
    }

    pub(super) async fn browse(
        &self,
        name: &QueueName,
        browse: &Browse,
    ) -> Result<Page<MessageView>, StoreError> {
        validate::page(browse.limit)?;
        let _ticket = self.asking.begin();
        let state = match browse.state {
            None => "-1",
            Some(MessageState::Ready) => "0",
            Some(MessageState::Delayed) => "1",
            Some(MessageState::InFlight) => "2",
            Some(MessageState::Parked) => "3",
        };
        let id = browse.id.map(|id| id.to_string()).unwrap_or_default();
        let (mut items, mut after) = (Vec::new(), browse.after.unwrap_or_default());
        for _ in 0..VIEW_STEPS_MAX {
            let (stored, last, more) = self.view(name, after, browse.limit - items.len(), state, &id).await?;
            items.extend(stored.into_iter().map(Stored::view));
            after = last;
            if !more {
                return Ok(Page { items, next: None });
            }
            if items.len() == browse.limit {
                break;
            }
        }
        Ok(Page { items, next: Some(after) })
    }

    /// Messages behind a sequence; the last sequence that was looked at, and whether there may be more.
    pub(super) async fn view(
        &self,
        name: &QueueName,
        after: u64,
        limit: usize,
        state: &str,
        id: &str,
    ) -> Result<(Vec<Stored>, u64, bool), StoreError> {
        let args = || {
            vec![
                after.to_string().into_bytes(),
                limit.to_string().into_bytes(),
                state.into(),
                id.as_bytes().to_vec(),
            ]
        };
        let mut answer = self.ask(QueueScript::View, name, |_| args()).await?;
        self.after(name, &answer).await;
        let stored = answer.values.rows()?.into_iter().map(Stored::read).collect::<Result<_, _>>()?;
        let (last, more) = (answer.values.number()?, answer.values.number()? == 1);
        Ok((stored, last, more))
    }

    async fn decide(
        &self,
        name: &QueueName,
        [how, by, group]: [&str; 3],
        ids: &[MessageId],
        entries: &[String],
    ) -> Result<(u64, Vec<String>), StoreError> {
        let _ticket = self.asking.begin();
        let args = || {
            let first = [how, by, group].map(|text| text.as_bytes().to_vec());
            first.into_iter().chain(ids.iter().map(|id| id.to_string().into_bytes())).collect()
        };
        let mut answer = self.ask_with(QueueScript::Decide, name, |_| (entries.to_vec(), args())).await?;
        self.after(name, &answer).await;
        self.waiters.freed(name.as_str());
        Ok((answer.values.number()?, answer.values.texts()?))
    }

    pub(super) async fn discard(
        &self,
        name: &QueueName,
        ids: &[MessageId],
        by: &str,
    ) -> Result<Discarded, StoreError> {
        validate::batch("ids", ids.len())?;
        let by = QueuePause::new(0, by, None).by;
        let (count, in_flight) = self.decide(name, ["discard", &by, ""], ids, &[]).await?;
        let parse = |id: String| id.parse().map_err(|_| unexpected("discard"));
        Ok(Discarded { count, in_flight: in_flight.into_iter().map(parse).collect::<Result<_, _>>()? })
    }

    pub(super) async fn release(&self, name: &QueueName, ids: &[MessageId]) -> Result<u64, StoreError> {
        validate::batch("ids", ids.len())?;
        // A script has to be given the names of the entries. A message keeps its key.
        let (_, found) = self.decide(name, ["keys", "", ""], ids, &[]).await?;
        let (mut parked, mut entries) = (Vec::new(), Vec::new());
        for pair in found.chunks_exact(2) {
            parked.push(pair[0].parse().map_err(|_| unexpected("release"))?);
            let key = IdempotencyKey::new(&pair[1]).map_err(|_| unexpected("release"))?;
            entries.push(member(&EntryId::of_queue(name, key)));
        }
        Ok(self.decide(name, ["release", "", ""], &parked, &entries).await?.0)
    }

    pub(super) async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        match self.decide(name, ["release-group", "", group.as_str()], &[], &[]).await?.0 {
            0 => Err(AdminError::NotFound(format!("halted group {group}"))),
            _ => Ok(()),
        }
    }
}
