//! Sends.

use hapax_core::{
    Batch, DedupId, EntryId, IdempotencyKey, MessageId, MessageKey, NewMessage, QueueConfig, QueueName,
    SendError, Sent, StoreError, policy, validate,
};
use sha2::{Digest as _, Sha256};

use super::Queues;
use super::call::{Fields, is_once};
use super::message::{packed, source_letter};
use crate::keys::member;
use crate::script::QueueScript;

/// Messages and bytes that one script takes.
const STEP_MAX: usize = 100;
const STEP_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// A new id for a message, random but for the version of a UUID.
pub(super) fn new_id() -> MessageId {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    let random = u128::from_be_bytes(bytes);
    MessageId(random & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62)
}

/// Whether a message fits a queue. That its time is not too far ahead, Redis decides by its own clock.
fn check(config: &QueueConfig, message: &NewMessage) -> Result<(), SendError> {
    validate::message(config, message.into(), message.deliver_at_ms.unwrap_or_default()).map(|_| ())
}

/// A message's key, and the message as arguments of the script.
fn arguments(config: &QueueConfig, id: MessageId, message: &NewMessage) -> (IdempotencyKey, [Vec<u8>; 11]) {
    let content = || DedupId::new(policy::content_id(&Sha256::digest(&message.body).into())).ok();
    let dedup = message.dedup.clone().or_else(|| config.dedup.content_based.then(content).flatten());
    let hash = dedup.as_ref().map(|id| {
        format!("{:032x}", policy::dedup_hash(config.dedup.scope, message.group.as_ref(), id.as_str()))
    });
    let explicit = MessageKey::explicit(&message.attributes, &message.body, config.key_pointer.as_deref());
    let key = MessageKey::decide(explicit, dedup.as_ref().map(DedupId::as_str), id);
    let number = |value: Option<u64>| value.map_or_else(|| "-1".to_owned(), |value| value.to_string());
    let delay_ms = message.delay_ms.unwrap_or(config.delay_ms);
    let args = [
        id.to_string().into_bytes(),
        packed(&message.attributes, &message.body),
        message.bytes().to_string().into_bytes(),
        delay_ms.to_string().into_bytes(),
        number(message.deliver_at_ms).into_bytes(),
        message.group.as_ref().map_or("", |group| group.as_str()).into(),
        dedup.as_ref().map_or("", DedupId::as_str).into(),
        hash.unwrap_or_default().into_bytes(),
        message.priority.0.to_string().into_bytes(),
        key.key.as_str().into(),
        source_letter(key.source).into(),
    ];
    (key.key, args)
}

impl Queues {
    pub(super) async fn send(&self, name: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        validate::batch("messages", batch.len())?;
        let _ticket = self.asking.begin();
        let mut answers: Vec<Option<Result<Sent, SendError>>> = batch.iter().map(|_| None).collect();
        if batch.is_empty() {
            // A queue that is missing is told all the same.
            self.known(name).await?;
        }
        let mut begun = false;
        let mut rest: Vec<(usize, MessageId, NewMessage)> =
            batch.into_iter().enumerate().map(|(at, message)| (at, new_id(), message)).collect();
        while !rest.is_empty() {
            let (mut count, mut bytes) = (0, 0);
            for (_, _, message) in rest.iter().take(STEP_MAX) {
                bytes += message.bytes();
                if count > 0 && bytes > STEP_BYTES_MAX {
                    break;
                }
                count += 1;
            }
            let step: Vec<_> = rest.drain(..count).collect();
            let done = self.send_step(name, &step, &mut answers).await;
            done.map_err(|error| partly(error, begun))?;
            begun = true;
        }
        self.waiters.freed(name.as_str());
        Ok(answers.into_iter().flatten().collect())
    }

    async fn send_step(
        &self,
        name: &QueueName,
        step: &[(usize, MessageId, NewMessage)],
        answers: &mut [Option<Result<Sent, SendError>>],
    ) -> Result<(), StoreError> {
        let args = |config: &QueueConfig| {
            let (mut entries, mut args) = (Vec::new(), Vec::new());
            for (_, id, message) in step.iter().filter(|(_, _, message)| check(config, message).is_ok()) {
                let (key, element) = arguments(config, *id, message);
                if is_once(config) {
                    entries.push(member(&EntryId::of_queue(name, key)));
                }
                args.extend(element);
            }
            (entries, args)
        };
        let mut answer = self.ask_with(QueueScript::Send, name, args).await?;
        let config = answer.config()?;
        let mut rows = answer.values.rows()?.into_iter();
        for (at, _, message) in step {
            answers[*at] = Some(if let Err(error) = check(&config, message) {
                Err(error)
            } else {
                let row = rows.next().ok_or_else(|| answer.values.unexpected())?;
                told(row, &config, message)?
            });
        }
        self.after(name, &answer).await;
        Ok(())
    }
}

/// What the script says about one message.
fn told(
    mut row: Fields,
    config: &QueueConfig,
    message: &NewMessage,
) -> Result<Result<Sent, SendError>, StoreError> {
    let (status, id, number) = (row.text()?, row.text()?, row.number()?);
    let full = |quota: &str, max: Option<u64>| {
        Err(SendError::QuotaExceeded { quota: quota.to_owned(), used: number, max: max.unwrap_or_default() })
    };
    Ok(match status.as_str() {
        "sent" | "duplicate" => {
            let id = id.parse().map_err(|_| row.unexpected())?;
            Ok(Sent { id, sequence: number, duplicate: status == "duplicate" })
        }
        "messages" => full("quota.messages_max", config.quota.messages_max),
        "bytes" => full("quota.bytes_max", config.quota.bytes_max),
        "ahead" => match validate::message(config, message.into(), number) {
            Err(error) => Err(error),
            Ok(_) => return Err(row.unexpected()),
        },
        _ => return Err(row.unexpected()),
    })
}

/// If a part of a batch was done, it is not true that nothing was.
pub(super) fn partly(error: StoreError, begun: bool) -> StoreError {
    match error {
        StoreError::OutcomeUnknown(_) => error,
        error if begun => StoreError::OutcomeUnknown(format!("a part of the batch was done: {error}")),
        error => error,
    }
}
