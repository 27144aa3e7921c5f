//! What clients of a queue saw, and what must hold of it: nothing that was accepted is lost or ends twice, no message has two
//! holders, fences grow, stale receipts change nothing, FIFO groups keep their order.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use hapax_core::{GroupId, MessageId, SettleError};

use super::queues::LEASE_MS;

/// An accepted message.
pub(super) struct Accepted {
    pub id: MessageId,
    pub body: String,
}

/// A message that one receive was given.
pub(super) struct Given {
    /// The number of the receive.
    pub call: u64,
    pub begun: Instant,
    pub answered: Instant,
    pub id: MessageId,
    pub body: String,
    pub fence: u64,
    pub sequence: u64,
    pub group: Option<GroupId>,
}

/// An attempt to end or to extend a delivery.
pub(super) struct Attempt {
    pub begun: Instant,
    pub id: MessageId,
    pub fence: u64,
    pub ack: bool,
    /// `None`: unknown.
    pub done: Option<Result<(), SettleError>>,
}

#[derive(Default)]
pub(super) struct History {
    pub accepted: Vec<Accepted>,
    pub given: Vec<Given>,
    pub attempts: Vec<Attempt>,
}

impl History {
    /// `letters`: what has died.
    pub fn check(&self, fifo: bool, letters: &BTreeMap<MessageId, String>) {
        check_ends(self, letters);
        check_fences(self);
        check_holders(self);
        check_stale(self);
        if fifo {
            check_order(self, letters);
        }
    }
}

/// Everything accepted has ended once; one body is one message.
fn check_ends(history: &History, letters: &BTreeMap<MessageId, String>) {
    let mut acked: HashMap<MessageId, u64> = HashMap::new();
    let mut maybe: BTreeSet<MessageId> = BTreeSet::new();
    for attempt in history.attempts.iter().filter(|attempt| attempt.ack) {
        match &attempt.done {
            Some(Ok(())) => *acked.entry(attempt.id).or_default() += 1,
            None => drop(maybe.insert(attempt.id)),
            Some(Err(_)) => {}
        }
    }
    let mut ids: HashMap<&str, MessageId> = HashMap::new();
    let given = history.given.iter().map(|given| (&given.body, given.id));
    let accepted = history.accepted.iter().map(|accepted| (&accepted.body, accepted.id));
    for (body, id) in given.chain(accepted) {
        assert_eq!(*ids.entry(body).or_insert(id), id, "{body} was accepted as two messages");
    }
    for (body, id) in ids {
        let acks = acked.get(&id).copied().unwrap_or(0);
        let dead = letters.contains_key(&id);
        assert!(acks <= 1, "{body} was acked {acks} times");
        assert!(acks == 0 || !dead, "{body} was acked and is dead");
        assert!(acks == 1 || dead || maybe.contains(&id), "{body} is lost");
    }
}

fn by_message(history: &History) -> HashMap<MessageId, Vec<&Given>> {
    let mut all: HashMap<MessageId, Vec<&Given>> = HashMap::new();
    for given in &history.given {
        all.entry(given.id).or_default().push(given);
    }
    all
}

fn check_fences(history: &History) {
    for (id, given) in by_message(history) {
        let fences: BTreeSet<u64> = given.iter().map(|given| given.fence).collect();
        assert_eq!(fences.len(), given.len(), "{id}: two deliveries have one fence");
        for one in &given {
            for two in given.iter().filter(|two| one.answered < two.begun) {
                assert!(one.fence < two.fence, "{id}: fence {} after {}", two.fence, one.fence);
            }
        }
    }
}

/// When each delivery's holder first did something, by message and fence.
fn first_attempts(history: &History) -> HashMap<(MessageId, u64), Instant> {
    let mut first: HashMap<(MessageId, u64), Instant> = HashMap::new();
    for attempt in &history.attempts {
        let begun = first.entry((attempt.id, attempt.fence)).or_insert(attempt.begun);
        *begun = attempt.begun.min(*begun);
    }
    first
}

/// A delivery is certainly held to the end of its lease, or until its holder does something.
fn check_holders(history: &History) {
    let first = first_attempts(history);
    for (id, given) in by_message(history) {
        for one in &given {
            let lease_ends = one.begun + Duration::from_millis(LEASE_MS);
            let until = first.get(&(id, one.fence)).map_or(lease_ends, |begun| lease_ends.min(*begun));
            for two in given.iter().filter(|two| two.fence > one.fence) {
                assert!(two.answered >= until, "{id}: delivered again while it was held");
            }
        }
    }
}

/// What has a newer delivery is not changed by an older receipt.
fn check_stale(history: &History) {
    let given = by_message(history);
    for attempt in history.attempts.iter().filter(|attempt| attempt.done == Some(Ok(()))) {
        for newer in given[&attempt.id].iter().filter(|given| given.fence > attempt.fence) {
            assert!(newer.answered >= attempt.begun, "{}: a stale receipt was accepted", attempt.id);
        }
    }
}

/// A message is delivered only after all before it in its group have ended, or together with them.
fn check_order(history: &History, letters: &BTreeMap<MessageId, String>) {
    let mut groups: HashMap<&GroupId, BTreeMap<u64, MessageId>> = HashMap::new();
    for given in &history.given {
        groups.entry(given.group.as_ref().unwrap()).or_default().insert(given.sequence, given.id);
    }
    let mut ended: HashMap<MessageId, Instant> = HashMap::new();
    for attempt in history.attempts.iter().filter(|attempt| attempt.ack) {
        if matches!(attempt.done, None | Some(Ok(()))) {
            let first = ended.entry(attempt.id).or_insert(attempt.begun);
            *first = (*first).min(attempt.begun);
        }
    }
    let mut calls: HashMap<u64, BTreeSet<MessageId>> = HashMap::new();
    for given in &history.given {
        calls.entry(given.call).or_default().insert(given.id);
    }
    let is_over = |id: &MessageId, at: Instant| {
        letters.contains_key(id) || ended.get(id).is_some_and(|begun| *begun <= at)
    };
    // For each message, when all before it in its group had ended; `None`: not all have.
    let mut all_ended: HashMap<MessageId, Option<Option<Instant>>> = HashMap::new();
    for group in groups.values() {
        let mut last: Option<Option<Instant>> = Some(None);
        for id in group.values() {
            all_ended.insert(*id, last);
            if !letters.contains_key(id) {
                last = last.and_then(|last| Some(last.max(Some(*ended.get(id)?))));
            }
        }
    }
    for given in &history.given {
        if all_ended[&given.id].is_some_and(|last| last <= Some(given.answered)) {
            continue;
        }
        let group = given.group.as_ref().unwrap();
        for (before, id) in groups[group].range(..given.sequence) {
            assert!(
                is_over(id, given.answered) || calls[&given.call].contains(id),
                "group {group}: {} was delivered while {before} before it had not ended",
                given.sequence
            );
        }
    }
}
