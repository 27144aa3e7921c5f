//! Imports: each item is compared with what is there, so that an import can be repeated.

use hapax_core::store::FailedAttempt;
use hapax_core::transfer::RefusedGroups;
use hapax_core::{
    Batch, DedupScope, EntryId, ExportedItem, ExportedMessage, FailureCause, GroupId, Imported, MessageId,
    QueueConfig, QueueName, RememberedId, SendError, StoreError, policy, validate,
};
use serde_json::{Value as Json, json};

use super::Queues;
use super::call::{Fields, is_once};
use super::message::{packed, source_letter};
use super::moves::name_in;
use crate::keys::{member, shard_of};
use crate::ledger::transfer::damaged;
use crate::script::QueueScript;

type Answer = Result<Imported, SendError>;

fn invalid(problem: impl Into<String>) -> SendError {
    SendError::Invalid(problem.into())
}

/// A queue in the shard of an entry, by whose name the message's need is kept: that of the entry's scope, if it is one.
fn home(id: &EntryId) -> Result<QueueName, StoreError> {
    let of_scope = id.scope.as_str().strip_prefix("queue/").and_then(|name| QueueName::new(name).ok());
    of_scope.map_or_else(|| name_in(shard_of(&id.scope)), Ok)
}

/// What a halt that was imported is remembered under, so that a repeated import does not halt a group again that was
/// released since.
fn halt_id(queue: &QueueName, group: &GroupId, id: Option<MessageId>) -> MessageId {
    let what = format!("halted {queue} {}", id.map_or_else(String::new, |id| id.to_string()));
    MessageId(policy::dedup_hash(DedupScope::Group, Some(group), &what))
}

/// A text that may be missing, as the scripts keep it.
fn or_false(text: Option<&str>) -> Json {
    text.map_or(Json::Bool(false), Json::from)
}

/// The fields of a message in the order of `common.lua`.
fn fields(exported: &ExportedMessage, needs: &[String]) -> Json {
    let e = exported;
    let failed = |failed: &FailedAttempt| {
        let (error, consumer) = (or_false(failed.error.as_deref()), or_false(failed.consumer.as_deref()));
        json!([failed.attempt, failed.deliveries, failed.at_ms, failed.cause.as_str(), error, consumer])
    };
    let dead = e.dead.as_ref().map_or(Json::Bool(false), |dead| {
        json!([
            dead.source,
            dead.cause.as_str(),
            or_false(dead.error.as_deref()),
            dead.attempts,
            dead.deliveries,
            dead.first_received_ms,
            dead.died_ms
        ])
    });
    let reason = e.history.last().and_then(|failed| failed.error.as_deref());
    let state = if e.parked.is_some() { 3 } else { 0 };
    json!([
        e.id.to_string(),
        state,
        u8::from(e.undecided),
        0,
        0,
        e.sent_ms,
        e.retained_from_ms,
        e.first_received_ms,
        e.attempts,
        e.deliveries,
        e.group.as_ref().map_or("", GroupId::as_str),
        e.priority.0,
        dead,
        0,
        or_false(e.parked.map(FailureCause::as_str)),
        or_false(e.parked.and(reason)),
        e.history.iter().map(failed).collect::<Vec<_>>(),
        false,
        e.fence.0,
        0,
        e.bytes_counted(),
        0,
        e.dedup.as_ref().map_or("", |dedup| dedup.as_str()),
        e.key.as_str(),
        source_letter(e.key_source),
        [],
        needs,
        e.visible_ms,
    ])
}

impl Queues {
    pub(super) async fn import(
        &self,
        name: &QueueName,
        items: Vec<ExportedItem>,
    ) -> Batch<Imported, SendError> {
        let _ticket = self.asking.begin();
        let config = self.known(name).await?.config.clone();
        let (mut refused, mut answers) = (RefusedGroups::default(), Vec::with_capacity(items.len()));
        for item in &items {
            let answer = match refused.check(item) {
                Ok(()) => self.import_one(name, &config, item).await?,
                Err(error) => Err(error),
            };
            if answer.is_err() {
                refused.add(item.group().filter(|_| config.is_fifo()).cloned());
            }
            answers.push(answer);
        }
        self.waiters.freed(name.as_str());
        Ok(answers)
    }

    async fn import_one(
        &self,
        name: &QueueName,
        config: &QueueConfig,
        item: &ExportedItem,
    ) -> Result<Answer, StoreError> {
        Ok(match item {
            ExportedItem::Message(message) => self.import_message(name, config, message).await?,
            ExportedItem::Undecided { .. } if !config.is_fifo() => {
                Err(invalid("only a FIFO queue has groups that can be halted"))
            }
            ExportedItem::Undecided { group, id } => self.import_halt(name, group, *id).await?,
            ExportedItem::Dedup(remembered) => self.import_dedup(name, remembered).await?,
            ExportedItem::Damaged { what, problem } => Err(damaged(what, problem)),
            ExportedItem::Entry(_) => Err(invalid("an entry of the ledger is not for a queue")),
        })
    }

    /// One element of the script: its status and a number.
    async fn import_script(
        &self,
        name: &QueueName,
        own: Option<&EntryId>,
        element: [&[u8]; 4],
    ) -> Result<(String, u64), StoreError> {
        let entries: Vec<String> = own.into_iter().map(member).collect();
        let place: &[u8] = if own.is_some() { b"1" } else { b"0" };
        let args: Vec<Vec<u8>> = element.into_iter().chain([place]).map(<[u8]>::to_vec).collect();
        let mut answer =
            self.ask_with(QueueScript::Import, name, |_| (entries.clone(), args.clone())).await?;
        let mut row: Fields =
            answer.values.rows()?.into_iter().next().ok_or_else(|| answer.values.unexpected())?;
        Ok((row.text()?, row.number()?))
    }

    async fn import_message(
        &self,
        name: &QueueName,
        config: &QueueConfig,
        message: &ExportedMessage,
    ) -> Result<Answer, StoreError> {
        if let Err(error) = validate::import(config, message) {
            return Ok(Err(error));
        }
        let own = EntryId::of_queue(name, message.key.clone());
        // What it needed in its former store. Nothing of it is removed before the message is there.
        let id = message.id.to_string();
        let mut needs = Vec::with_capacity(message.entries.len());
        for entry in &message.entries {
            let (queue, member) = (home(entry)?, member(entry));
            self.set_need("need", &queue, &member, &id).await?;
            needs.push(format!("{queue} {member}"));
        }
        let own = Some(&own).filter(|own| is_once(config) && !message.entries.contains(own));
        let fields = serde_json::to_vec(&fields(message, &needs)).expect("a message is plain data");
        let body = packed(&message.attributes, &message.body);
        let (status, number) =
            self.import_script(name, own, [b"message", id.as_bytes(), &fields, &body]).await?;
        let full = |quota: &str, max: Option<u64>| {
            let (quota, max) = (quota.to_owned(), max.unwrap_or_default());
            Err(SendError::QuotaExceeded { quota, used: number, max })
        };
        let answer = match status.as_str() {
            "added" => return Ok(Ok(Imported::Added)),
            "there" => return Ok(Ok(Imported::AlreadyThere)),
            "messages" => full("quota.messages_max", config.quota.messages_max),
            _ => full("quota.bytes_max", config.quota.bytes_max),
        };
        for (entry, need) in message.entries.iter().zip(&needs) {
            let member = need.split_once(' ').map_or("", |(_, member)| member);
            self.set_need("unneed", &home(entry)?, member, &id).await?;
        }
        Ok(answer)
    }

    /// A group that is halted for a dead letter. Each step can be repeated: the letter learns that the group waits for it
    /// before the group is halted.
    async fn import_halt(
        &self,
        name: &QueueName,
        group: &GroupId,
        id: Option<MessageId>,
    ) -> Result<Answer, StoreError> {
        let done = halt_id(name, group, id).to_string();
        let (status, place) = self.import_script(name, None, [b"place", done.as_bytes(), b"", b""]).await?;
        if status == "there" {
            return Ok(Ok(Imported::AlreadyThere));
        }
        if let Some(id) = id {
            let Some((queue, _)) = self.find_anywhere(&[id]).await?.into_iter().next() else {
                return Ok(Err(invalid(format!(
                    "dead letter {id}, which group {group} waits for, is not there; import its queue first, and do not \
                     discard it before its group is imported"
                ))));
            };
            let (waiting, letter) = (format!("{name} {place}"), id.to_string());
            let args = ["await", "", &waiting, &letter].map(|arg| arg.as_bytes().to_vec());
            let mut answer = self.ask(QueueScript::Decide, &queue, |_| args.clone().into()).await?;
            if answer.values.number()? == 0 {
                // It is not among the dead letters any more: it was decided about.
                return Ok(Ok(Imported::AlreadyThere));
            }
        }
        let awaited = id.map_or_else(|| done.clone(), |id| id.to_string());
        let element = [b"halt".as_slice(), done.as_bytes(), group.as_str().as_bytes(), awaited.as_bytes()];
        let (status, _) = self.import_script(name, None, element).await?;
        Ok(Ok(if status == "added" { Imported::Added } else { Imported::AlreadyThere }))
    }

    async fn import_dedup(&self, name: &QueueName, remembered: &RememberedId) -> Result<Answer, StoreError> {
        let RememberedId { hash, id, sent_ms } = remembered;
        if hash.len() != 32 || u128::from_str_radix(hash, 16).is_err() {
            return Ok(Err(invalid(format!("hash {hash:?} is not valid: use 32 hexadecimal digits"))));
        }
        if *sent_ms >= 1 << 53 {
            return Ok(Err(invalid(format!("sent_ms: {sent_ms} is out of range"))));
        }
        let (id, sent_ms) = (id.to_string(), sent_ms.to_string());
        let element = [b"dedup".as_slice(), hash.as_bytes(), id.as_bytes(), sent_ms.as_bytes()];
        let (status, _) = self.import_script(name, None, element).await?;
        Ok(Ok(if status == "added" { Imported::Added } else { Imported::AlreadyThere }))
    }
}
