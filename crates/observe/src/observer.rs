//! What this process has seen, and how it is recorded.

mod summary;

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use foldhash::fast::{FixedState, RandomState};
use hapax_core::metrics::{Metrics as _, Sample};
use hapax_core::policy::tier::{ObservedQueue, POISON_DELIVERIES};
use hapax_core::store::FailedAttempt;
use hapax_core::{
    Claim, ClaimEnding, ClaimError, Clock, Delivery, EndClaim, FailureCause, IdempotencyKey, MessageId,
    QueueName, Receipt, RemainingLease, Sent, SettleError, Settled, SystemClock, TokenError,
};

use self::summary::SettlementKind;
pub(crate) use self::summary::{ClaimSummary, SettleSummary};
use crate::figures::{DeliveryFigures, QueueFigures};
use crate::life::{Event, Life, Subject};
use crate::trace::SpanContext;

/// Maximum number of lives in memory.
const LIVES_MAX: usize = 20_000;
/// Maximum number of events of all lives in memory, looked at after each [`LOOK_EVERY`] events. In a long outage every
/// message that waits has a long life.
const EVENTS_TOTAL_MAX: usize = 200_000;
const LOOK_EVERY: usize = 256;
/// Lives that are copied at a time to be written: every call waits meanwhile.
const COPIED_MAX: usize = 1_000;
/// Maximum number of deliveries that are remembered until they are settled.
const GIVEN_MAX: usize = 100_000;
/// Maximum number of queues with figures of their own.
const QUEUES_MAX: usize = 10_000;
/// Of this many clean first runs one is kept.
const SAMPLED: u64 = 1_000;

hapax_core::metrics! {
    /// What this process keeps of the past.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct HistoryFigures is "hapax_history", kept by Process, labels [];
    plain {}
    nested {}
    /// Messages and keys whose life is in memory.
    gauge lives,
    /// Lives that were dropped from memory because there were too many.
    counter dropped,
    /// Lives that could not be written to the store.
    counter not_written,
}

/// One delivery that this process made.
#[derive(Debug, Clone)]
struct Given {
    queue: QueueName,
    id: MessageId,
    delivery: u32,
    attempt: u32,
    at_ms: u64,
    lease_ms: u64,
    /// When its lease ends; moves with each extension.
    until_ms: u64,
    consumer: Option<Arc<str>>,
    /// Other processes use the store, too: one of them may have extended the lease.
    shared: bool,
    /// It was settled, or a newer delivery was made.
    over: bool,
    /// A settle or an extension was refused because its lease had ended.
    late: bool,
    /// The context of its span, if it is traced.
    trace: Option<SpanContext>,
}

/// What most calls ask, and find out without the lock.
#[derive(Default)]
struct Flags {
    /// Deliveries with a recorded span that are remembered.
    traced: AtomicUsize,
    /// Lives are to be written to the store.
    unwritten: AtomicBool,
}

#[derive(Default)]
struct State {
    flags: Arc<Flags>,
    queues: HashMap<QueueName, QueueFigures, RandomState>,
    /// Deliveries by the hash of their receipt.
    given: HashMap<u64, Given, FixedState>,
    given_order: VecDeque<u64>,
    /// The latest delivery of each message.
    latest: HashMap<u128, u64, FixedState>,
    lives: HashMap<Subject, Life, RandomState>,
    lives_order: VecDeque<Subject>,
    /// Events since all of them were last counted.
    uncounted: usize,
    /// Lives that changed since they were last written to the store.
    unwritten: HashSet<Subject, RandomState>,
    acked: u64,
    history: HistoryFigures,
}

/// What one process observes. Shared by the store that it observes and those who ask.
pub struct Observer {
    state: Mutex<State>,
    flags: Arc<Flags>,
    clock: Arc<dyn Clock>,
    hasher: FixedState,
}

impl Default for Observer {
    fn default() -> Self {
        Self::with_clock(Arc::new(SystemClock::default()))
    }
}

impl Observer {
    /// Observes by this clock.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        let state = State::default();
        let flags = state.flags.clone();
        Self { state: Mutex::new(state), flags, clock, hasher: FixedState::default() }
    }

    /// Now, in milliseconds since 1970.
    pub fn now_ms(&self) -> u64 {
        self.clock.wall_ms()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a delivery is found by here.
    pub(crate) fn hash(&self, receipt: &Receipt) -> u64 {
        self.hasher.hash_one(receipt)
    }

    /// The counters, for a page of metrics.
    pub fn samples(&self) -> Vec<Sample> {
        let state = self.state();
        let mut queues: Vec<_> =
            state.queues.iter().map(|(name, queue)| (name.clone(), queue.read())).collect();
        let history = HistoryFigures { lives: state.lives.len() as u64, ..state.history };
        // Every call waits for the lock: what takes time is done without it.
        drop(state);
        queues.sort_by(|one, other| one.0.cmp(&other.0));
        let mut samples: Vec<Sample> =
            queues.into_iter().flat_map(|(name, figures)| figures.samples(&[name.as_str()])).collect();
        samples.extend(history.samples(&[]));
        samples
    }

    /// The figures of one queue.
    pub fn figures(&self, queue: &QueueName) -> DeliveryFigures {
        self.state().queues.get(queue).map(QueueFigures::read).unwrap_or_default()
    }

    /// The latest minutes of one queue; `None` if nothing was seen of it.
    pub fn window(&self, queue: &QueueName) -> Option<ObservedQueue> {
        let now_ms = self.now_ms();
        Some(self.state().queues.get(queue)?.window(now_ms))
    }

    /// Messages that were delivered [`POISON_DELIVERIES`] times or more and were not seen to end, by queue and ordered by id. One
    /// whose last lease ran out may be dead meanwhile.
    pub fn poison_candidates(&self) -> HashMap<QueueName, Vec<MessageId>> {
        let state = self.state();
        let mut found = HashMap::<QueueName, Vec<MessageId>>::new();
        for life in state.lives.values() {
            if let (Subject::Message(id), Some(queue)) = (&life.subject, &life.queue)
                && life.deliveries() >= POISON_DELIVERIES
                && !life.has_ended()
            {
                found.entry(queue.clone()).or_default().push(*id);
            }
        }
        drop(state);
        for ids in found.values_mut() {
            ids.sort();
        }
        found
    }

    /// The life of a message or key, as far as this process saw it. A message that is on its first delivery has one, too.
    pub fn life(&self, subject: &Subject) -> Option<Life> {
        let state = self.state();
        if let Some(life) = state.lives.get(subject) {
            return Some(life.clone());
        }
        let Subject::Message(id) = subject else { return None };
        let given = state.latest.get(&id.0).and_then(|hash| state.given.get(hash))?;
        let mut life = Life::new(subject.clone(), Some(given.queue.clone()));
        life.push(given.at_ms, given.event());
        Some(life)
    }

    /// The lives in memory that have this key.
    pub fn lives_of_key(&self, key: &IdempotencyKey) -> Vec<Life> {
        let state = self.state();
        let has = |life: &&Life| life.key.as_ref() == Some(key);
        state.lives.values().filter(has).cloned().collect()
    }

    /// Some of the lives that are to be written to the store; they count as written until told otherwise.
    pub(crate) fn take_unwritten(&self) -> Vec<Life> {
        let mut state = self.state();
        let subjects: Vec<Subject> = state.unwritten.iter().take(COPIED_MAX).cloned().collect();
        for subject in &subjects {
            state.unwritten.remove(subject);
        }
        state.flag_unwritten();
        subjects.iter().filter_map(|subject| state.lives.get(subject).cloned()).collect()
    }

    pub(crate) fn not_written(&self, lives: usize) {
        self.state().history.not_written += lives as u64;
    }

    /// The contexts of the spans of these deliveries, each if it is traced and out; `None` if none is, as most often.
    pub(crate) fn traces_of(&self, hashes: impl Iterator<Item = u64>) -> Option<Vec<Option<SpanContext>>> {
        if self.flags.traced.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let state = self.state();
        let (mut contexts, mut untraced) = (Vec::new(), 0);
        for hash in hashes {
            let given = state.given.get(&hash);
            match given.and_then(Given::recorded) {
                None if contexts.is_empty() => untraced += 1,
                context => {
                    if contexts.is_empty() {
                        contexts.resize(untraced, None);
                    }
                    contexts.push(context);
                }
            }
        }
        (!contexts.is_empty()).then_some(contexts)
    }

    pub(crate) fn has_unwritten(&self) -> bool {
        self.flags.unwritten.load(Ordering::Relaxed)
    }

    /// A queue's policy was changed.
    pub(crate) fn policy_changed(&self, queue: &QueueName) {
        if let Some(figures) = self.state().queues.get_mut(queue) {
            figures.policy_changed();
        }
    }

    /// A queue was deleted.
    pub(crate) fn queue_deleted(&self, queue: &QueueName) {
        self.state().queues.remove(queue);
    }

    pub(crate) fn sent(&self, queue: &QueueName, sent: &[Result<Sent, hapax_core::SendError>]) {
        if !sent.iter().any(|one| one.as_ref().is_ok_and(|sent| sent.duplicate)) {
            return;
        }
        let (mut state, now_ms) = (self.state(), self.now_ms());
        for sent in sent.iter().flatten().filter(|sent| sent.duplicate) {
            state.life(&Subject::Message(sent.id), Some(queue)).push(now_ms, Event::SentAgain);
        }
    }

    pub(crate) fn heard(&self, queue: &QueueName, consumer: Option<&str>) {
        if let Some(consumer) = consumer {
            let now_ms = self.now_ms();
            self.state().queue(queue).asked(now_ms, consumer);
        }
    }

    pub(crate) fn delivered(
        &self,
        queue: &QueueName,
        consumer: Option<&str>,
        how: HandOut,
        deliveries: &[Delivery],
    ) -> Vec<UncertainRepeat> {
        if deliveries.is_empty() {
            return Vec::new();
        }
        let consumer: Option<Arc<str>> = consumer.map(Into::into);
        let (mut state, now_ms) = (self.state(), self.now_ms());
        let mut uncertain = Vec::new();
        for delivery in deliveries {
            let hash = self.hash(&delivery.receipt);
            uncertain.extend(state.delivered(queue, now_ms, hash, consumer.as_ref(), how, delivery));
        }
        uncertain
    }

    /// Records why a message was delivered again, by what the store has on record about it; `None`: it could not be asked.
    pub(crate) fn explained(
        &self,
        queue: &QueueName,
        repeat: UncertainRepeat,
        record: Option<Vec<FailedAttempt>>,
    ) {
        self.state().explained(queue, repeat, record.unwrap_or_default());
    }

    pub(crate) fn settled(
        &self,
        queue: &QueueName,
        asked: &[SettleSummary],
        answers: &[Result<Settled, SettleError>],
    ) {
        let (mut state, now_ms) = (self.state(), self.now_ms());
        for (asked, answer) in asked.iter().zip(answers) {
            let hash = asked.delivery;
            match answer {
                Ok(settled) => state.settled(queue, now_ms, hash, asked, *settled),
                Err(SettleError::Claim(_)) => {
                    if let Some(id) = state.given.get(&hash).map(|given| given.id) {
                        state.life(&Subject::Message(id), Some(queue)).push(now_ms, Event::StaleClaim);
                    }
                }
                Err(error) => state.refused(queue, now_ms, hash, error),
            }
        }
    }

    pub(crate) fn extended(
        &self,
        queue: &QueueName,
        asked: &[(u64, u64)],
        answers: &[Result<RemainingLease, SettleError>],
    ) {
        let (mut state, now_ms) = (self.state(), self.now_ms());
        for (&(hash, lease_ms), answer) in asked.iter().zip(answers) {
            match (answer, state.given.get_mut(&hash)) {
                (Ok(_), Some(given)) if lease_ms > 0 => {
                    given.until_ms = now_ms + lease_ms;
                    if let Some(consumer) = given.consumer.clone() {
                        state.queue(queue).heard(now_ms, &consumer);
                    }
                }
                // SQS's way to give a message back.
                (Ok(_), Some(_)) => {
                    state.returned(queue, now_ms, hash, Event::Returned { error: None, after_ms: 0 });
                }
                (Err(error), Some(_)) => state.refused(queue, now_ms, hash, error),
                (_, None) => {}
            }
        }
    }

    pub(crate) fn claimed(&self, asked: &[ClaimSummary], answers: &[Result<Claim, ClaimError>]) {
        let (mut state, now_ms) = (self.state(), self.now_ms());
        for (asked, answer) in asked.iter().zip(answers) {
            let of_message = asked.delivery.as_ref().and_then(|(queue, hash)| {
                let id = state.given.get(hash)?.id;
                Some((Subject::Message(id), Some(queue)))
            });
            if let Some((queue, _)) = &asked.delivery {
                state.queue(queue).claimed(now_ms, answer);
            }
            let event = match answer {
                Ok(Claim::Granted(grant)) => Event::Claimed { takeover: grant.takeover },
                Ok(Claim::Completed { .. }) => Event::Replayed,
                Ok(Claim::InProgress { .. }) => Event::InProgress,
                Ok(Claim::InDoubt { .. }) => Event::InDoubt,
                Err(ClaimError::Mismatch) => Event::Mismatch,
                Err(_) => continue,
            };
            let (subject, queue) = of_message.unwrap_or_else(|| (Subject::Entry(asked.id.clone()), None));
            // A first claim is remembered if something happened to its message before; else it is the ordinary case.
            if event == (Event::Claimed { takeover: false }) && !state.lives.contains_key(&subject) {
                continue;
            }
            let life = state.life(&subject, queue);
            life.key.get_or_insert_with(|| asked.id.key.clone());
            life.push(now_ms, event);
        }
    }

    pub(crate) fn ended(&self, asked: &[EndClaim], answers: &[Result<(), TokenError>]) {
        let (mut state, now_ms) = (self.state(), self.now_ms());
        for (asked, answer) in asked.iter().zip(answers) {
            let subject = Subject::Entry(asked.id.clone());
            let event = match (answer, &asked.ending) {
                (Ok(()), ClaimEnding::Complete { .. }) if state.lives.contains_key(&subject) => {
                    Event::Completed
                }
                (Ok(()), ClaimEnding::Doubt) => Event::InDoubt,
                (Err(TokenError::Stale), _) => Event::StaleClaim,
                _ => continue,
            };
            let life = state.life(&subject, None);
            life.key.get_or_insert_with(|| asked.id.key.clone());
            life.push(now_ms, event);
        }
    }
}

/// How deliveries are handed out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandOut {
    /// Acked on receive.
    pub acked: bool,
    /// Their attributes carry the contexts of their spans.
    pub traced: bool,
    /// Other processes may use the same store: what this one did not see may have happened there.
    pub shared: bool,
}

/// A message was delivered again, and this process did not see how the delivery before it ended.
#[derive(Debug)]
pub(crate) struct UncertainRepeat {
    pub id: MessageId,
    /// Number of the delivery before.
    before: u32,
    /// The delivery before, if this process made it.
    earlier: Option<Given>,
    at_ms: u64,
}

impl QueueFigures {
    fn claimed(&mut self, now_ms: u64, answer: &Result<Claim, ClaimError>) {
        match answer {
            Ok(Claim::Granted(grant)) => {
                self.figures.granted += 1;
                self.figures.takeovers += u64::from(grant.takeover);
            }
            Ok(Claim::Completed { .. }) => self.figures.replayed += 1,
            Ok(Claim::InProgress { .. }) => self.conflict(now_ms),
            Ok(Claim::InDoubt { .. }) => self.figures.in_doubt += 1,
            Err(ClaimError::Mismatch) => self.figures.mismatches += 1,
            Err(_) => {}
        }
    }
}

impl Given {
    /// The context of its span, if that is recorded.
    fn recorded(&self) -> Option<SpanContext> {
        self.trace.filter(|trace| trace.sampled)
    }

    fn event(&self) -> Event {
        Event::Delivered {
            delivery: self.delivery,
            attempt: self.attempt,
            consumer: self.consumer.as_deref().map(str::to_owned),
            lease_ms: self.lease_ms,
        }
    }
}

impl State {
    fn queue(&mut self, queue: &QueueName) -> &mut QueueFigures {
        if self.queues.len() >= QUEUES_MAX
            && !self.queues.contains_key(queue)
            && let Some(name) = self.queues.keys().next().cloned()
        {
            self.queues.remove(&name);
        }
        // The name is shared, and hashed once.
        self.queues.entry(queue.clone()).or_default()
    }

    /// The life of a subject, made if there is none; it is to be written.
    fn life(&mut self, subject: &Subject, queue: Option<&QueueName>) -> &mut Life {
        self.uncounted += 1;
        if self.uncounted >= LOOK_EVERY {
            self.uncounted = 0;
            self.trim_events();
        }
        if !self.lives.contains_key(subject) {
            while self.lives.len() >= LIVES_MAX && self.drop_oldest_life().is_some() {}
            self.lives_order.push_back(subject.clone());
            self.lives.insert(subject.clone(), Life::new(subject.clone(), queue.cloned()));
        }
        self.unwritten.insert(subject.clone());
        self.flag_unwritten();
        self.lives.get_mut(subject).expect("it was inserted if it was missing")
    }

    /// Drops the oldest lives until the events of the others are few enough.
    fn trim_events(&mut self) {
        let mut events: usize = self.lives.values().map(Life::kept_events).sum();
        while events > EVENTS_TOTAL_MAX
            && let Some(dropped) = self.drop_oldest_life()
        {
            events -= dropped;
        }
    }

    /// Drops the oldest life; gives the number of its events.
    fn drop_oldest_life(&mut self) -> Option<usize> {
        let oldest = self.lives_order.pop_front()?;
        let Some(life) = self.lives.remove(&oldest) else { return Some(0) };
        self.history.dropped += 1;
        self.unwritten.remove(&oldest);
        self.flag_unwritten();
        Some(life.kept_events())
    }

    fn flag_unwritten(&self) {
        self.flags.unwritten.store(!self.unwritten.is_empty(), Ordering::Relaxed);
    }

    /// Remembers a delivery until it is settled.
    fn remember(&mut self, hash: u64, given: Given) {
        if given.recorded().is_some() {
            self.flags.traced.fetch_add(1, Ordering::Relaxed);
        }
        let before = self.given.insert(hash, given);
        if before.is_some_and(|before| before.recorded().is_some()) {
            self.flags.traced.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Forgets a delivery.
    fn forget(&mut self, hash: u64) -> Option<Given> {
        let given = self.given.remove(&hash)?;
        if given.recorded().is_some() {
            self.flags.traced.fetch_sub(1, Ordering::Relaxed);
        }
        Some(given)
    }

    /// The life of a delivered message. A new one begins with the delivery.
    fn life_of(&mut self, queue: &QueueName, given: &Given) -> &mut Life {
        let life = self.life(&Subject::Message(given.id), Some(queue));
        if life.moments.is_empty() {
            life.push(given.at_ms, given.event());
        }
        life
    }

    fn delivered(
        &mut self,
        queue: &QueueName,
        now_ms: u64,
        hash: u64,
        consumer: Option<&Arc<str>>,
        how: HandOut,
        delivery: &Delivery,
    ) -> Option<UncertainRepeat> {
        let HandOut { acked, traced, shared } = how;
        let before = self.latest.get(&delivery.id.0).copied();
        if before == Some(hash) {
            // The repeat of a receive gives the same delivery again.
            return None;
        }
        self.queue(queue).delivered(
            now_ms,
            delivery.lease_ms,
            delivery.group.as_ref().map(hapax_core::GroupId::as_str),
        );
        let given = Given {
            queue: queue.clone(),
            id: delivery.id,
            delivery: delivery.deliveries,
            attempt: delivery.attempt,
            at_ms: now_ms,
            lease_ms: delivery.lease_ms,
            until_ms: now_ms + delivery.lease_ms,
            consumer: consumer.cloned(),
            shared,
            over: acked,
            late: false,
            trace: traced.then(|| SpanContext::of(&delivery.attributes)).flatten(),
        };
        let is_repeat = delivery.deliveries > 1 || before.is_some();
        let uncertain =
            is_repeat.then(|| self.repeated(queue, now_ms, before, shared, &given, delivery)).flatten();
        if acked {
            return uncertain;
        }
        self.latest.insert(delivery.id.0, hash);
        self.remember(hash, given);
        self.given_order.push_back(hash);
        self.trim_given();
        uncertain
    }

    fn repeated(
        &mut self,
        queue: &QueueName,
        now_ms: u64,
        before: Option<u64>,
        shared: bool,
        given: &Given,
        delivery: &Delivery,
    ) -> Option<UncertainRepeat> {
        let earlier = before.and_then(|hash| self.given.get_mut(&hash));
        let open = earlier.as_ref().is_some_and(|earlier| !earlier.over);
        let earlier = earlier.map(|earlier| {
            earlier.over = true;
            earlier.clone()
        });
        self.queue(queue).figures.repeated += 1;
        let subject = Subject::Message(given.id);
        let was_returned = self.lives.get(&subject).is_some_and(Life::was_returned);
        // Deliveries that are missing in between were made by other processes.
        let seen =
            self.lives.get(&subject).map(Life::deliveries).max(earlier.as_ref().map(|one| one.delivery));
        let gap = shared && seen.is_some_and(|seen| seen + 1 < given.delivery);
        let earlier = earlier.filter(|_| !gap);
        let mut uncertain = false;
        match &earlier {
            Some(earlier) if open && !shared => self.expired(queue, now_ms, earlier),
            // It may have been settled through another process.
            Some(earlier) if open => {
                uncertain = true;
                self.life_of(queue, earlier);
            }
            Some(_) => self.queue(queue).figures.repeated_after_return += 1,
            None if was_returned && !gap => self.queue(queue).figures.repeated_after_return += 1,
            None => uncertain = true,
        }
        let life = self.life(&subject, Some(queue));
        life.key.get_or_insert_with(|| delivery.key.clone());
        life.sent_ms.get_or_insert(delivery.sent_ms);
        life.push(now_ms, given.event());
        let earlier = earlier.filter(|_| open);
        let before = given.delivery.saturating_sub(1);
        uncertain.then_some(UncertainRepeat { id: given.id, before, earlier, at_ms: now_ms })
    }

    /// The lease of a delivery ran out, as was noticed when its message was delivered again.
    fn expired(&mut self, queue: &QueueName, now_ms: u64, earlier: &Given) {
        self.queue(queue).expired(now_ms, earlier.at_ms, earlier.consumer.as_deref());
        let held_ms = earlier.until_ms.min(now_ms).saturating_sub(earlier.at_ms);
        let at_ms = earlier.until_ms.min(now_ms);
        self.life_of(queue, earlier).push(at_ms, Event::Expired { delivery: earlier.delivery, held_ms });
    }

    fn explained(&mut self, queue: &QueueName, repeat: UncertainRepeat, record: Vec<FailedAttempt>) {
        let UncertainRepeat { id, before, earlier, at_ms } = repeat;
        let failed = record.iter().find(|failed| failed.deliveries == before);
        match (failed.map(|failed| failed.cause), &earlier) {
            (Some(FailureCause::Expired), Some(earlier)) => self.expired(queue, at_ms, earlier),
            (Some(FailureCause::Expired), None) => {
                let consumer = failed.and_then(|failed| failed.consumer.as_deref());
                // When it was delivered is not known here: a consumer that was heard of since its lease ended is there.
                let ended_ms = failed.map_or(at_ms, |failed| failed.at_ms);
                self.queue(queue).expired(at_ms, ended_ms, consumer);
            }
            (Some(_), _) => self.queue(queue).figures.repeated_after_return += 1,
            // Nothing is on record, for example because the message was settled meanwhile: then time tells.
            (None, Some(earlier)) if earlier.until_ms <= at_ms => self.expired(queue, at_ms, earlier),
            (None, _) => {
                self.queue(queue).figures.repeated_cause_unknown += 1;
                self.life(&Subject::Message(id), Some(queue)).push(at_ms, Event::CauseUnknown);
            }
        }
        if !record.is_empty() {
            self.life(&Subject::Message(id), Some(queue)).add_record(record);
        }
    }

    fn settled(
        &mut self,
        queue: &QueueName,
        now_ms: u64,
        hash: u64,
        asked: &SettleSummary,
        settled: Settled,
    ) {
        let given = match settled {
            Settled::Acked => self.forget(hash),
            _ => self.given.get(&hash).cloned(),
        };
        let Some(given) = given else {
            // Another process made the delivery.
            return self.settled_elsewhere(queue, now_ms, asked, settled);
        };
        let held_ms = now_ms.saturating_sub(given.at_ms);
        let figures = self.queue(queue);
        // Deferred deliveries did not run.
        if !matches!(asked.settlement, SettlementKind::Deferred) {
            figures.held(now_ms, held_ms, given.until_ms < now_ms && !given.shared);
            figures.figures.near_expiry += u64::from(given.until_ms < now_ms + given.lease_ms / 5);
        }
        if let Some(consumer) = &given.consumer {
            figures.heard(now_ms, consumer);
        }
        let error = match &asked.settlement {
            SettlementKind::Failed(error) => error.clone(),
            SettlementKind::Ack | SettlementKind::Deferred => None,
        };
        match settled {
            Settled::Acked => {
                self.acked += 1;
                let sampled = self.acked.is_multiple_of(SAMPLED);
                let subject = Subject::Message(given.id);
                if sampled || self.lives.contains_key(&subject) {
                    let life = self.life_of(queue, &given);
                    if asked.completes {
                        life.push(now_ms, Event::Completed);
                    }
                    life.push(
                        now_ms,
                        Event::Acked { delivery: Some(given.delivery), held_ms: Some(held_ms) },
                    );
                }
                self.latest.remove(&given.id.0);
            }
            Settled::Returned { after_ms } => {
                let event = match asked.settlement {
                    SettlementKind::Deferred => Event::Deferred { after_ms },
                    _ => Event::Returned { error, after_ms },
                };
                self.returned(queue, now_ms, hash, event);
            }
            Settled::Dead => {
                self.queue(queue).died(now_ms, error.as_deref());
                self.returned(queue, now_ms, hash, Event::Died { error });
            }
            Settled::Parked => {
                self.queue(queue).figures.parked += 1;
                self.returned(queue, now_ms, hash, Event::Parked { reason: error });
            }
        }
    }

    /// A settle of a delivery of which only the receipt is known here.
    fn settled_elsewhere(&mut self, queue: &QueueName, now_ms: u64, asked: &SettleSummary, settled: Settled) {
        match (settled, &asked.settlement) {
            (Settled::Dead, SettlementKind::Failed(error)) => {
                self.queue(queue).died(now_ms, error.as_deref());
            }
            (Settled::Dead, _) => self.queue(queue).died(now_ms, None),
            (Settled::Parked, _) => self.queue(queue).figures.parked += 1,
            (Settled::Acked | Settled::Returned { .. }, _) => {}
        }
    }

    /// A delivery is over, and its message is not done.
    fn returned(&mut self, queue: &QueueName, now_ms: u64, hash: u64, event: Event) {
        let Some(given) = self.given.get_mut(&hash) else { return };
        given.over = true;
        let given = given.clone();
        self.life_of(queue, &given).push(now_ms, event);
    }

    /// A settle or an extension was refused. One that asks for what no delivery can get is not late.
    fn refused(&mut self, queue: &QueueName, now_ms: u64, hash: u64, error: &SettleError) {
        let passed_on = match error {
            SettleError::Stale | SettleError::Gone | SettleError::Dead => true,
            // The message is still to be delivered again; then its lease ran out.
            SettleError::Expired | SettleError::NotInFlight => false,
            _ => return,
        };
        let Some(given) = self.given.get_mut(&hash).filter(|given| !given.late) else { return };
        given.late = true;
        let given = given.clone();
        if passed_on {
            self.forget(hash);
            if self.latest.get(&given.id.0) == Some(&hash) {
                self.latest.remove(&given.id.0);
            }
        }
        let held_ms = now_ms.saturating_sub(given.at_ms);
        let figures = self.queue(queue);
        figures.late(now_ms);
        figures.held(now_ms, held_ms, given.until_ms < now_ms);
        if let Some(consumer) = &given.consumer {
            figures.heard(now_ms, consumer);
        }
        let event = Event::Refused { delivery: given.delivery, held_ms, code: error.code().to_owned() };
        self.life_of(queue, &given).push(now_ms, event);
    }

    /// Forgets the oldest deliveries: consumers that never settled them, or settled them elsewhere.
    fn trim_given(&mut self) {
        if self.given_order.len() > 2 * self.given.len() + 1_024 {
            let given = &self.given;
            self.given_order.retain(|hash| given.contains_key(hash));
        }
        while self.given.len() > GIVEN_MAX
            && let Some(oldest) = self.given_order.pop_front()
        {
            if let Some(given) = self.forget(oldest)
                && self.latest.get(&given.id.0) == Some(&oldest)
            {
                self.latest.remove(&given.id.0);
            }
        }
    }
}

#[cfg(test)]
mod tests;
