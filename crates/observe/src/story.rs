//! Why a message ran twice, or why it did not: the chain of causes, in sentences.

use std::collections::BTreeSet;

use hapax_core::{
    Browse, EntryId, EntryState, EntryView, IdempotencyKey, MessageId, MessageState, MessageView, QueueInfo,
    QueueName, Store, StoreError,
};
use serde::{Deserialize, Serialize};

use crate::kept;
use crate::life::{Event, Life, Moment, Subject};
use crate::observer::Observer;
use crate::record;

/// What is known about one message or key, and what it means.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Story {
    /// The message; `None` where a key was asked for that belongs to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<MessageId>,
    /// Identity of the intended effect, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<IdempotencyKey>,
    /// The message's state now; `None`: it is not in the queue any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<MessageState>,
    /// When it was sent, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_ms: Option<u64>,
    /// The state of its key in the ledger now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryState>,
    /// What happened, in order.
    pub moments: Vec<Moment>,
    /// Events that are left out between the first and the second of `moments`.
    #[serde(default)]
    pub left_out: u64,
    /// The chain of causes; the last sentences say what to do, where something can be done.
    pub because: Vec<String>,
}

/// Tells a message's life; `None` if nothing is known about it.
pub async fn of_message(
    store: &dyn Store,
    observer: Option<&Observer>,
    queue: &QueueName,
    id: MessageId,
) -> Result<Option<Story>, StoreError> {
    let info = store.queue(queue).await?;
    let browse = Browse { id: Some(id), limit: 1, ..Browse::default() };
    let view = store.browse(queue, browse).await?.items.pop();
    let subject = Subject::Message(id);
    let mut life = observer.and_then(|observer| observer.life(&subject));
    if let Some(kept) = kept::read(store, &subject).await? {
        life = Some(match life {
            Some(mut life) => {
                life.merge(kept);
                life
            }
            None => kept,
        });
    }
    // An id does not open the life of another queue's message.
    let life = life.filter(|life| life.queue.as_ref() == Some(queue));
    if life.is_none() && view.is_none() {
        return Ok(None);
    }
    let mut life = life.unwrap_or_else(|| Life::new(subject, Some(queue.clone())));
    if let Some(view) = &view {
        life.add_record(view.history.clone());
    }
    // A message whose sender gave no key has its id as the key.
    let key = life.key.clone().unwrap_or_else(|| id.into());
    let entry = store.entry(&EntryId::of_queue(queue, key)).await?;
    Ok(Some(tell(&info, Some(id), view.as_ref(), entry.as_ref(), life)))
}

/// Tells the lives that a key had in a queue: of each message with it, and of the key itself.
pub async fn of_key(
    store: &dyn Store,
    observer: Option<&Observer>,
    queue: &QueueName,
    key: &IdempotencyKey,
) -> Result<Vec<Story>, StoreError> {
    let info = store.queue(queue).await?;
    let mut subjects: Vec<Subject> = Vec::new();
    let known = observer.map(|observer| observer.lives_of_key(key)).unwrap_or_default();
    for life in known.into_iter().chain(kept::read_key(store, key).await?) {
        if life.queue.as_ref() == Some(queue) && !subjects.contains(&life.subject) {
            subjects.push(life.subject);
        }
    }
    subjects.sort();
    let mut stories = Vec::new();
    for subject in subjects {
        if let Subject::Message(id) = subject {
            stories.extend(of_message(store, observer, queue, id).await?);
        }
    }
    if stories.is_empty()
        && let Some(entry) = store.entry(&EntryId::of_queue(queue, key.clone())).await?
    {
        let life = Life {
            key: Some(key.clone()),
            ..Life::new(Subject::Entry(entry.id.clone()), Some(queue.clone()))
        };
        stories.push(tell(&info, None, None, Some(&entry), life));
    }
    Ok(stories)
}

fn tell(
    info: &QueueInfo,
    id: Option<MessageId>,
    view: Option<&MessageView>,
    entry: Option<&EntryView>,
    mut life: Life,
) -> Story {
    let mut because = Vec::new();
    record::complete(&mut life);
    let moments: Vec<Moment> = life.moments.into_iter().collect();
    repeats(&info.name, &moments, &mut because);
    claims(&moments, &mut because);
    state_now(info, view, entry, &moments, &mut because);
    if because.is_empty() {
        because.push(match moments.len() {
            0 => "It was not delivered yet.".to_owned(),
            _ => "It was delivered once, and nothing unusual happened.".to_owned(),
        });
    }
    Story {
        id,
        key: life.key.or_else(|| entry.map(|entry| entry.id.key.clone())),
        state: view.map(|view| view.state),
        sent_ms: view.map(|view| view.sent_ms).or(life.sent_ms),
        entry: entry.map(|entry| entry.state),
        moments,
        left_out: life.left_out,
        because,
    }
}

fn span(ms: u64) -> String {
    match ms {
        ..1_000 => format!("{ms} ms"),
        1_000..60_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        60_000..3_600_000 => format!("{} min {} s", ms / 60_000, ms % 60_000 / 1_000),
        _ => format!("{} h {} min", ms / 3_600_000, ms % 3_600_000 / 60_000),
    }
}

fn named(consumer: Option<&String>) -> String {
    consumer.map_or_else(|| "its consumer".to_owned(), ToString::to_string)
}

/// Why it was delivered more than once.
fn repeats(queue: &QueueName, moments: &[Moment], because: &mut Vec<String>) {
    let number = |moment: &Moment| match moment.event {
        Event::Delivered { delivery, .. } => Some(delivery),
        _ => None,
    };
    let deliveries: BTreeSet<u32> = moments.iter().filter_map(number).collect();
    if deliveries.len() > 1 {
        because.push(format!("It was delivered {} times, as far as is known.", deliveries.len()));
    }
    let holder = |wanted: u32| {
        moments.iter().find_map(|moment| match &moment.event {
            Event::Delivered { delivery, consumer, lease_ms, .. } if *delivery == wanted => {
                Some((named(consumer.as_ref()), *lease_ms))
            }
            _ => None,
        })
    };
    let late = |wanted: u32| {
        moments.iter().find_map(|moment| match &moment.event {
            Event::Refused { delivery, held_ms, .. } if *delivery == wanted => Some(*held_ms),
            _ => None,
        })
    };
    for moment in moments {
        match &moment.event {
            Event::Expired { delivery, held_ms } => {
                let (consumer, lease_ms) = holder(*delivery).unwrap_or_else(|| ("its consumer".to_owned(), 0));
                let lease = match (lease_ms, held_ms) {
                    (0, _) => "its lease".to_owned(),
                    (lease, held) if held > &(lease + lease / 2) => {
                        format!("its lease of {}, extended to {} in all,", span(lease), span(*held))
                    }
                    (lease, _) => format!("its lease of {}", span(lease)),
                };
                because.push(format!(
                    "Delivery {delivery} went to {consumer}; {lease} ran out before it was settled, so the message was delivered again."
                ));
                because.push(match late(*delivery) {
                    Some(held_ms) => format!(
                        "{consumer} was still at work: it settled after {}, too late, and was refused. The work takes longer than \
                         the lease: set a lease well above {} (`hapax queue set {queue} --lease`), use `auto`, or extend it by \
                         heartbeats.",
                        span(held_ms),
                        span(held_ms)
                    ),
                    None => format!(
                        "Nothing more was heard of {consumer} about it: it crashed, hung, was stopped, or is still at work."
                    ),
                });
            }
            Event::Returned { error, .. } => because.push(match error {
                Some(error) => format!("Its consumer gave it back: {error}"),
                None => "Its consumer gave it back without a reason.".to_owned(),
            }),
            Event::Deferred { .. } => {
                because.push("It was put back without an attempt: its turn had not come, or its key was in progress.".to_owned());
            }
            Event::CauseUnknown => because.push(
                "It had been delivered before by another process, or before this one started; what came of that was not kept."
                    .to_owned(),
            ),
            Event::SentAgain => because.push(
                "A producer sent it again with the same deduplication id; the copy was suppressed, so it did not run twice for that."
                    .to_owned(),
            ),
            _ => {}
        }
    }
}

/// What its key had to do with it.
fn claims(moments: &[Moment], because: &mut Vec<String>) {
    for moment in moments {
        let sentence = match &moment.event {
            Event::Replayed => {
                "Its key had a recorded outcome: the handler was not run again, the outcome was given instead. The effect \
                 happened once."
            }
            Event::Claimed { takeover: true } => {
                "The handler ran again although an earlier run may have acted (on_doubt = retry): the effect happened once only if \
                 it honours the derived key."
            }
            Event::InProgress => {
                "Another delivery or request with the same key was at work, so this one waited."
            }
            Event::InDoubt => {
                "Its key is in doubt: an earlier run may have acted and did not say how it ended, so it was not run again."
            }
            Event::Mismatch => {
                "Its key was used before for another content, so it was refused: two different effects share a key."
            }
            Event::StaleClaim => {
                "The outcome of a run was refused: its claim had lapsed and passed to another run."
            }
            _ => continue,
        };
        if !because.iter().any(|said| said == sentence) {
            because.push(sentence.to_owned());
        }
    }
}

/// Why it does not run now.
fn state_now(
    info: &QueueInfo,
    view: Option<&MessageView>,
    entry: Option<&EntryView>,
    moments: &[Moment],
    because: &mut Vec<String>,
) {
    let ended = |event: &Event| matches!(event, Event::Acked { .. });
    if let Some(Event::Died { error }) =
        moments.iter().map(|moment| &moment.event).find(|event| matches!(event, Event::Died { .. }))
    {
        let why = error.as_deref().unwrap_or("its lease ran out on the last attempt");
        // Since then it may have been redriven, released or deleted.
        because.push(match &info.config.dead_letter {
            Some(dead) => format!(
                "It died and went to {}: {why}. `hapax dead list` and `hapax dead redrive` look after such messages.",
                dead.queue
            ),
            None => format!(
                "It died and was parked: {why}. `hapax parked list` and `hapax parked release` look after such messages."
            ),
        });
    }
    match view {
        None if moments.iter().any(|moment| ended(&moment.event)) => {
            because.push("It is done: it was acked.".to_owned());
        }
        None => {}
        Some(view) => match (view.state, &view.parked) {
            (MessageState::Parked, Some((cause, reason))) => because.push(format!(
                "It is parked ({}): {}. It waits for `hapax ledger resolve` or `hapax parked release`.",
                cause.as_str(),
                reason.as_deref().unwrap_or("no reason was given")
            )),
            (MessageState::Delayed, _) => {
                because.push("It waits for its delay or its next attempt.".to_owned());
            }
            (MessageState::InFlight, _) => because.push("A consumer holds it now.".to_owned()),
            (MessageState::Ready, _) if info.paused.is_some() => {
                because.push("The queue is paused: `hapax queue resume`.".to_owned());
            }
            (MessageState::Ready, _) => {
                because
                    .push("It is ready and waits for a consumer, or for its turn in its group.".to_owned());
            }
            (MessageState::Parked, None) => because.push("It is parked.".to_owned()),
        },
    }
    if entry.is_some_and(|entry| entry.state == EntryState::InDoubt) {
        because.push("Its key waits for a decision: `hapax ledger resolve`.".to_owned());
    }
}
