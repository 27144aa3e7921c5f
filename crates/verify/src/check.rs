//! The checker: a pure function from a history to what is wrong with it.

mod claims;
mod messages;
mod register;
mod transactions;

use std::collections::{BTreeMap, HashMap, HashSet};

use hapax::OnDoubt;
use serde::{Deserialize, Serialize};

use crate::fault::OPEN_ORDER;
use crate::history::{Act, Answer, Effect, Event, Place};
use crate::workload::{Shape, Workload};

/// Maximum number of events of a witness.
pub const WITNESS_EVENTS_MAX: usize = 10;
/// Violations of each kind that are kept with their witness; all are counted.
const WITNESSES_MAX: usize = 3;

/// A kind of violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Anomaly {
    /// A send was answered with success; nothing took effect, and nothing is left to account for it.
    AcceptedButLost,
    /// A send was answered with success and nothing took effect; the message is left, although the store counted none.
    LeftUncounted,
    /// One intent, two effects.
    EffectTwice,
    /// A send was answered with an error that says that nothing was done, and it added a message.
    FailedButDone,
    /// An effect that no producer wanted.
    EffectWithoutIntent,
    /// Effects of one account in another order than its sends.
    OrderViolated,
    /// A settle or completion was accepted although a newer holder had the right.
    StaleSettleAccepted,
    /// A fence that did not grow.
    FenceBackwards,
    /// A duplicate was answered with another outcome than the first run.
    OutcomeDiffers,
    /// A delivery was acked, and the ledger has no outcome for its key: the next duplicate would run.
    CompletionLost,
    /// A dead letter that nothing rejected, or whose payment was made.
    DeadLetterUnaccounted,
    /// An order that took effect, and that its outbox still has as not published.
    PublishedNotMarked,
    /// Two messages for sends with one deduplication id.
    DuplicateAccepted,
    /// A key was granted although the lease of its holder had not ended.
    GrantedWhileHeld,
    /// The operations on a ledger key have no order in which one copy of its entry could have carried them out.
    RegisterNotLinearizable,
    /// A reader of committed records saw one of a transaction whose abort was answered with success.
    AbortedShown,
    /// Readers of committed records see some records of a transaction, and not the others; or none of one that was committed.
    TransactionTorn,
}

impl Anomaly {
    /// Its name, for example `effect-twice`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AcceptedButLost => "accepted-but-lost",
            Self::LeftUncounted => "left-uncounted",
            Self::EffectTwice => "effect-twice",
            Self::FailedButDone => "failed-but-done",
            Self::EffectWithoutIntent => "effect-without-intent",
            Self::OrderViolated => "order-violated",
            Self::StaleSettleAccepted => "stale-settle-accepted",
            Self::FenceBackwards => "fence-backwards",
            Self::OutcomeDiffers => "outcome-differs",
            Self::CompletionLost => "completion-lost",
            Self::DeadLetterUnaccounted => "dead-letter-unaccounted",
            Self::PublishedNotMarked => "published-not-marked",
            Self::DuplicateAccepted => "duplicate-accepted",
            Self::GrantedWhileHeld => "granted-while-held",
            Self::RegisterNotLinearizable => "register-not-linearizable",
            Self::AbortedShown => "aborted-shown",
            Self::TransactionTorn => "transaction-torn",
        }
    }
}

/// A violation with the events that show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Its kind.
    pub anomaly: Anomaly,
    /// The payment or key.
    pub id: String,
    /// What is wrong, in a sentence.
    pub says: String,
    /// The events that show it, in their order; at most [`WITNESS_EVENTS_MAX`].
    pub witness: Vec<Event>,
}

/// What a history says of one workload.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Findings {
    /// Operations: sends, bank calls, settles and claims.
    pub operations: u64,
    /// Payments that producers wanted, or keys.
    pub intents: u64,
    /// Payments whose send was answered with success.
    pub accepted: u64,
    /// Effects.
    pub effects: u64,
    /// Operations of this workload whose answer was lost, late, refused or repeated because of faults.
    pub hit: u64,
    /// Payments without a known answer to their send, and without effect: allowed.
    pub unknown: u64,
    /// Duplicates that were suppressed: replays, and calls that the bank recognised.
    pub suppressed: u64,
    /// Messages that were still in their queue at the end, or whose accepted payment was not made in time.
    pub unsettled: u64,
    /// Messages in the dead letters, parked or in doubt at the end.
    pub left: u64,
    /// Keys of the ledger whose operations overlap too much to search all their orders.
    pub undecided: u64,
    /// Violations of each kind.
    pub counts: BTreeMap<Anomaly, u64>,
    /// The first violations of each kind.
    pub violations: Vec<Violation>,
}

impl Findings {
    /// All violations.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    fn add(&mut self, anomaly: Anomaly, id: &str, says: String, events: &[&Event]) {
        let count = self.counts.entry(anomaly).or_default();
        *count += 1;
        if *count <= WITNESSES_MAX as u64 {
            let mut events = events.to_vec();
            events.sort_by_key(|event| event.n);
            events.dedup_by_key(|event| event.n);
            let witness = events.into_iter().take(WITNESS_EVENTS_MAX).cloned().collect();
            self.violations.push(Violation { anomaly, id: id.to_owned(), says, witness });
        }
    }
}

/// What is known of one payment.
#[derive(Default)]
struct Payment<'a> {
    intent: Option<&'a Event>,
    sent: Option<&'a Event>,
    /// Producers that wanted it: one more after each that was killed.
    intents: u64,
    /// Sends that were accepted, and those that were not answered.
    sends: u64,
    sends_unknown: u64,
    failed: Vec<&'a Event>,
    calls: Vec<&'a Event>,
    moved: Vec<&'a Event>,
    delivered: Vec<&'a Event>,
    settles: Vec<&'a Event>,
    acks: Vec<&'a Event>,
    replays: u64,
    left: Vec<(&'a Event, Place)>,
    entries: Vec<&'a Event>,
    responses: Vec<&'a Event>,
}

/// Checks a workload's part of a history.
pub fn check(history: &[Event], workload: &Workload) -> Findings {
    let own: Vec<&Event> = history.iter().filter(|event| event.event.workload == workload.name).collect();
    let is_drained = |event: &&Event| matches!(event.event.act, Act::Drained { empty: true, .. });
    // What the store counts wrongly is no fault of a control.
    let drained = history.iter().find(is_drained).filter(|_| !workload.is_control());
    let mut findings = Findings::default();
    let mut payments: BTreeMap<&str, Payment<'_>> = BTreeMap::new();
    for event in &own {
        let Some(id) = event.id() else { continue };
        let payment = payments.entry(id).or_default();
        findings.hit += u64::from(is_hit(&event.event.act, workload));
        match &event.event.act {
            Act::Intent { .. } => {
                payment.intents += 1;
                payment.intent = payment.intent.or(Some(event));
            }
            Act::Send { answer, .. } => {
                findings.operations += 1;
                match answer {
                    Answer::Ok => payment.sends += 1,
                    Answer::Unknown => payment.sends_unknown += 1,
                    Answer::Failed => payment.failed.push(event),
                }
                if *answer == Answer::Ok {
                    // A proxy answers a repeated request from its ledger.
                    let replayed = payment.sent.is_some() && matches!(workload.shape, Shape::Proxy(_));
                    findings.suppressed += u64::from(replayed);
                    payment.sent = payment.sent.or(Some(event));
                }
            }
            Act::Call { effect, .. } => {
                findings.operations += 1;
                payment.calls.push(event);
                match effect {
                    Effect::Moved => payment.moved.push(event),
                    Effect::Known => findings.suppressed += 1,
                    Effect::Closed => {}
                }
            }
            Act::Settle { ack, answer, ran, .. } => {
                findings.operations += 1;
                payment.settles.push(event);
                if *ack && *answer == Answer::Ok {
                    payment.acks.push(event);
                    payment.replays += u64::from(!ran);
                }
            }
            Act::Delivered { .. } => payment.delivered.push(event),
            Act::Shown { .. } => {
                findings.operations += 1;
                payment.moved.push(event);
            }
            Act::Left { place, .. } => payment.left.push((event, *place)),
            Act::Entry { .. } => payment.entries.push(event),
            Act::Response { .. } => payment.responses.push(event),
            _ => {}
        }
    }
    let listed = history.iter().find(|event| matches!(event.event.act, Act::Drained { .. }));
    let listed = listed.filter(|_| lists_entries(workload));
    let adds_once = adds_one_message(workload) && !history.iter().any(duplicates_sends);
    let forgets = history.iter().any(forgets_deliveries);
    let forgets_leases = forgets || history.iter().any(forgets_unsynced);
    for (id, payment) in &payments {
        check_payment(id, payment, drained, &mut findings);
        messages::check(id, &payment.settles, forgets, &mut findings);
        if !forgets_leases {
            messages::check_leases(id, &payment.delivered, &mut findings);
        }
        if adds_once {
            check_failed_sends(id, payment, &mut findings);
        }
        if let Some(listed) = listed {
            check_completion(id, payment, listed.n, &mut findings);
        }
        if workload.shape == Shape::Proxy(OnDoubt::Park) {
            check_responses(id, &payment.responses, &mut findings);
        }
        if workload.fifo {
            check_messages(id, &payment.acks, &mut findings);
        }
    }
    if workload.fifo {
        check_order(&own, &mut findings);
    }
    if workload.shape == Shape::Outbox {
        findings.hit += hits_of_relay(history);
    }
    let last_fault = history.iter().rfind(|event| matches!(event.event.act, Act::FaultEnds { .. }));
    claims::check(&own, last_fault.map_or(0, |event| event.n), &mut findings);
    transactions::check(&own, history.iter().any(|event| is_drained(&event)), &mut findings);
    findings
}

/// Whether a send, a bank's call or a settle was lost, late, refused or repeated because of a fault.
pub(crate) fn is_hit(act: &Act, workload: &Workload) -> bool {
    match act {
        Act::Send { answer, .. } | Act::Settle { answer, .. } => *answer != Answer::Ok,
        // What an operator has released is delivered again without any fault.
        Act::Call { effect, deliveries, takeover, .. } => {
            *deliveries > 1 && !workload.rejects || *takeover || *effect == Effect::Known
        }
        _ => false,
    }
}

/// Whether the ledger's entries of this workload's keys are listed at the end.
pub(crate) fn lists_entries(workload: &Workload) -> bool {
    matches!(workload.shape, Shape::Worker(_) | Shape::Outbox)
}

/// Whether each send of a workload adds a message, and nothing else does.
fn adds_one_message(workload: &Workload) -> bool {
    workload.has_queue()
        && !workload.is_relayed()
        && !workload.fifo
        && !workload.rejects
        && !workload.is_control()
}

/// Whether this is the begin of a fault that makes two requests of one.
fn duplicates_sends(event: &Event) -> bool {
    matches!(&event.event.act, Act::FaultBegins { fault, .. } if fault.starts_with("SendMessage: request duplicated"))
}

/// Whether this is the begin of a fault after which a store may count a delivery again: its count was not durable yet.
fn forgets_deliveries(event: &Event) -> bool {
    let is_such = |fault: &str| ["power cut", "failover"].iter().any(|name| fault.contains(name));
    matches!(&event.event.act, Act::FaultBegins { fault, .. } if is_such(fault))
}

/// Whether this is the begin of a fault after which a store may have forgotten a lease that was not synced yet: the message is
/// delivered again early.
fn forgets_unsynced(event: &Event) -> bool {
    matches!(&event.event.act, Act::FaultBegins { fault, .. } if fault.contains("kill -9 of the store"))
}

/// Requests of relays that were under way when their relay was killed, and orders that others have overtaken. What comes of them
/// is not seen: the queue recognises what is published again.
fn hits_of_relay(history: &[Event]) -> u64 {
    let mut of_relay = HashSet::new();
    let mut hit = 0;
    for event in history {
        match &event.event.act {
            Act::FaultBegins { number, fault } if fault.contains("relay") || fault.contains(OPEN_ORDER) => {
                of_relay.insert(*number);
            }
            Act::FaultEnds { number, hits, .. } if of_relay.contains(number) => hit += hits,
            _ => {}
        }
    }
    hit
}

fn check_payment(id: &str, payment: &Payment<'_>, drained: Option<&Event>, findings: &mut Findings) {
    let Payment { intent, sent, calls, moved, acks, left, .. } = payment;
    findings.suppressed += payment.replays;
    // A payment that its producer has sent twice is replayed without any fault.
    findings.hit += if payment.sends <= 1 { payment.replays } else { 0 };
    let is_at = |place: Place| left.iter().any(|(_, at)| *at == place);
    findings.intents += u64::from(intent.is_some());
    findings.accepted += u64::from(sent.is_some());
    findings.effects += moved.len() as u64;
    let not_made = sent.is_some() && moved.is_empty() && !left.is_empty();
    findings.unsettled += u64::from(is_at(Place::Waiting) || not_made);
    findings.left += u64::from(is_at(Place::Dead) || is_at(Place::Parked) || is_at(Place::InDoubt));
    findings.unknown += u64::from(intent.is_some() && sent.is_none() && moved.is_empty());

    if let (Some(sent), true, true) = (sent, moved.is_empty(), left.is_empty()) {
        let mut shown: Vec<&Event> = intent.iter().copied().chain([*sent]).collect();
        shown.extend(calls.iter().chain(acks).take(WITNESS_EVENTS_MAX - 2).copied());
        let says = "the send was answered with success; the payment was never made, and is neither waiting, parked nor dead";
        findings.add(Anomaly::AcceptedButLost, id, says.to_owned(), &shown);
    }
    if let (Some(sent), true, Some(drained)) = (sent, not_made, drained) {
        let mut shown: Vec<&Event> = vec![sent, drained];
        shown.extend(left.iter().map(|(event, _)| *event));
        let says = "the store counted no message any more; this one is left, and its payment was not made";
        findings.add(Anomaly::LeftUncounted, id, says.to_owned(), &shown);
    }
    if moved.len() > 1 {
        let mut shown: Vec<&Event> = intent.iter().copied().collect();
        shown.extend(moved.iter().take(3).copied());
        shown.extend(acks.iter().take(2).copied());
        let says = format!("the payment was made {} times", moved.len());
        findings.add(Anomaly::EffectTwice, id, says, &shown);
    }
    if let Some(first) = moved.first() {
        match intent {
            None => {
                let says = "no producer wanted this payment".to_owned();
                findings.add(Anomaly::EffectWithoutIntent, id, says, &[first]);
            }
            Some(intent) if intent.n > first.n || subject(intent) != subject(first) => {
                let says = "the payment is not the one that its producer wanted".to_owned();
                findings.add(Anomaly::EffectWithoutIntent, id, says, &[intent, first]);
            }
            Some(_) => {}
        }
    }
    let unmarked = left.iter().find(|(_, place)| *place == Place::Unmarked);
    if let (Some((unmarked, _)), Some(made)) = (unmarked, moved.first()) {
        let says = "the order took effect, and its outbox still has it as not published".to_owned();
        findings.add(Anomaly::PublishedNotMarked, id, says, &[made, unmarked]);
    }
    check_fences(id, calls, findings);
    for entry in &payment.entries {
        check_outcome(id, entry, moved, findings);
    }
    if let Some((dead, _)) = left.iter().find(|(_, place)| *place == Place::Dead) {
        let is_closed = |call: &&&Event| matches!(&call.event.act, Act::Call { effect: Effect::Closed, .. });
        let rejected = calls.iter().find(is_closed);
        if rejected.is_none() || !moved.is_empty() {
            let says = if moved.is_empty() { "nothing rejected it" } else { "the payment was made" };
            let shown: Vec<&Event> =
                intent.iter().copied().chain(moved.iter().copied()).chain([*dead]).collect();
            let says = format!("it is in the dead letters, but {says}");
            findings.add(Anomaly::DeadLetterUnaccounted, id, says, &shown);
        }
    }
}

/// The account and number of an intent or a call.
fn subject(event: &Event) -> Option<(&str, u64)> {
    match &event.event.act {
        Act::Intent { account, number, .. }
        | Act::Call { account, number, .. }
        | Act::Shown { account, number, .. } => Some((account, *number)),
        _ => None,
    }
}

/// A run calls the bank once, so two calls with the same fence are two holders of the same right.
fn check_fences(id: &str, calls: &[&Event], findings: &mut Findings) {
    let mut seen: HashMap<u64, &Event> = HashMap::new();
    for call in calls {
        let Act::Call { fence, .. } = &call.event.act else { continue };
        // Controls have no fences.
        if let Some(earlier) = (*fence > 0).then(|| seen.insert(*fence, call)).flatten() {
            let says = format!("two runs had the fence {fence}");
            findings.add(Anomaly::FenceBackwards, id, says, &[earlier, call]);
        }
    }
}

/// A send that failed has added no message. Sends of a producer that was killed are not all known, and are left out.
fn check_failed_sends(id: &str, payment: &Payment<'_>, findings: &mut Findings) {
    let mut messages: BTreeMap<&str, &Event> = BTreeMap::new();
    for event in &payment.settles {
        if let Act::Settle { message, .. } = &event.event.act {
            messages.entry(message).or_insert(event);
        }
    }
    let sends = payment.sends + payment.sends_unknown;
    let (Some(failed), 1, Some(sent)) = (payment.failed.first(), payment.intents, payment.sent) else {
        return;
    };
    if messages.len() as u64 > sends {
        let says = format!(
            "{sends} sends may have added a message, the others failed, and there are {}",
            messages.len()
        );
        let shown: Vec<&Event> = [*failed, sent].into_iter().chain(messages.into_values().take(4)).collect();
        findings.add(Anomaly::FailedButDone, id, says, &shown);
    }
}

/// Ack and completion are one step, or the completion comes first: what was acked has an outcome for duplicates. Entries were
/// listed after the event with the number `listed`.
fn check_completion(id: &str, payment: &Payment<'_>, listed: u64, findings: &mut Findings) {
    let is_completed = |entry: &&Event| matches!(&entry.event.act, Act::Entry { completed: true, .. });
    if let Some(ack) = payment.acks.first().filter(|ack| ack.n < listed)
        && !payment.entries.iter().any(is_completed)
    {
        let mut shown: Vec<&Event> = payment.moved.iter().take(2).copied().collect();
        shown.push(ack);
        shown.extend(payment.entries.first());
        let says = "a delivery was acked, and the ledger has no outcome for duplicates of it".to_owned();
        findings.add(Anomaly::CompletionLost, id, says, &shown);
    }
}

/// The service runs once, so all responses of success are the same.
fn check_responses(id: &str, responses: &[&Event], findings: &mut Findings) {
    let digest = |event: &&Event| match &event.event.act {
        Act::Response { digest, .. } => Some(*digest),
        _ => None,
    };
    let Some(first) = responses.first() else { return };
    if let Some(other) = responses.iter().find(|response| digest(response) != digest(first)) {
        let says = "two responses of success to one request differ".to_owned();
        findings.add(Anomaly::OutcomeDiffers, id, says, &[first, other]);
    }
}

/// Sends with one deduplication id add one message.
fn check_messages(id: &str, acks: &[&Event], findings: &mut Findings) {
    let message = |event: &&Event| match &event.event.act {
        Act::Settle { message, .. } => Some(message.clone()),
        _ => None,
    };
    let Some(first) = acks.first() else { return };
    if let Some(other) = acks.iter().find(|ack| message(ack) != message(first)) {
        let says = "two messages were added for one deduplication id".to_owned();
        findings.add(Anomaly::DuplicateAccepted, id, says, &[first, other]);
    }
}

/// The outcome that duplicates get is that of the payment.
fn check_outcome(id: &str, entry: &Event, moved: &[&Event], findings: &mut Findings) {
    let Act::Entry { completed: true, outcome, .. } = &entry.event.act else { return };
    let receipts: HashSet<u64> = moved
        .iter()
        .filter_map(|call| match &call.event.act {
            Act::Call { receipt, .. } => Some(*receipt),
            _ => None,
        })
        .collect();
    if !outcome.is_some_and(|outcome| receipts.contains(&outcome)) {
        let shown: Vec<&Event> = moved.iter().take(2).copied().chain([entry]).collect();
        let says =
            format!("the ledger answers duplicates with {outcome:?}, the bank's receipt is {receipts:?}");
        findings.add(Anomaly::OutcomeDiffers, id, says, &shown);
    }
}

/// The first effects of each account are in the order of its sends.
fn check_order(own: &[&Event], findings: &mut Findings) {
    let mut last: HashMap<&str, (u64, &Event)> = HashMap::new();
    let mut seen = HashSet::new();
    for event in own {
        let Some((id, account, number)) = event.event.act.effect() else { continue };
        if !seen.insert(id) {
            continue;
        }
        match last.get(account) {
            Some((before, earlier)) if number < *before => {
                let says = format!("payment {number} of {account} was made after payment {before}");
                findings.add(Anomaly::OrderViolated, id, says, &[earlier, event]);
            }
            _ => drop(last.insert(account, (number, event))),
        }
    }
}
