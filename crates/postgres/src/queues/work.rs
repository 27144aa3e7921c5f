//! Decisions about messages that a transaction has locked: pure, on rows in memory. The transaction writes what changed.

use std::collections::{BTreeMap, VecDeque};

use hapax_core::policy::{self, AfterFailure};
use hapax_core::store::{FailedAttempt, QueueTotals};
use hapax_core::{
    DeadLetter, Extend, FailureCause, GroupId, MessageId, OnDead, RemainingLease, SettleError, Settled,
    Settlement,
};

use super::Queue;
use super::receipt::Named;
use super::row::{Message, Table};
use super::write::Change;

/// Where a row was when it was locked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Was {
    pub table: Table,
    pub pos: u64,
}

/// A message in a transaction.
#[derive(Debug)]
pub(super) struct Item {
    pub was: Option<Was>,
    /// Where it is now; `None`: nowhere.
    pub table: Option<Table>,
    pub changed: bool,
    pub message: Message,
}

impl Item {
    fn in_flight(&self) -> bool {
        self.table == Some(Table::Claim)
    }
}

/// Messages of one queue in a transaction.
pub(super) struct Work<'a> {
    pub now_ms: u64,
    pub queue: &'a Queue,
    /// The queue's dead-letter queue, if there is one.
    pub dead: Option<&'a Queue>,
    pub items: BTreeMap<u64, Item>,
    /// New places, which were drawn for this transaction.
    pub numbers: VecDeque<u64>,
    /// Messages for which their groups are halted.
    pub halts: Vec<(GroupId, MessageId)>,
    /// Dead letters that were decided about: no group of any queue waits for them any more.
    pub decided: Vec<MessageId>,
    /// Messages that have ended.
    pub ended: Vec<u64>,
    /// Messages that have died: their places before and after.
    pub deaths: Vec<(u64, u64)>,
    pub totals: QueueTotals,
    /// Something can be received that could not before.
    pub freed: bool,
    pub died: bool,
    /// Deliveries were undone.
    given_back: bool,
}

impl<'a> Work<'a> {
    pub(super) fn new(
        now_ms: u64,
        queue: &'a Queue,
        dead: Option<&'a Queue>,
        numbers: VecDeque<u64>,
    ) -> Self {
        Self {
            now_ms,
            queue,
            dead,
            items: BTreeMap::new(),
            numbers,
            halts: Vec::new(),
            decided: Vec::new(),
            ended: Vec::new(),
            deaths: Vec::new(),
            totals: QueueTotals::default(),
            freed: false,
            died: false,
            given_back: false,
        }
    }

    /// What was done to the messages of FIFO groups. What comes from elsewhere may return to a place of its own.
    pub(super) fn change(&self) -> Change {
        let from_elsewhere =
            |item: &Item| !matches!(item.was.map(|was| was.table), Some(Table::Fifo | Table::Claim));
        let below = |item: &Item| item.changed && item.table == Some(Table::Fifo) && from_elsewhere(item);
        Change { given_back: self.given_back, below: self.items.values().any(below) }
    }

    pub(super) fn add(&mut self, table: Table, message: Message) {
        let was = Some(Was { table, pos: message.pos });
        let item = Item { was, table: Some(table), changed: false, message };
        self.items.insert(item.message.seq, item);
    }

    fn fifo(&self) -> bool {
        self.queue.config.is_fifo()
    }

    fn number(&mut self) -> u64 {
        self.numbers.pop_front().expect("as many places were drawn as can be needed")
    }

    fn item(&mut self, seq: u64) -> &mut Item {
        let item = self.items.get_mut(&seq).expect("it was found before");
        item.changed = true;
        item
    }

    /// The message that a receipt names.
    fn find(&mut self, named: &Named) -> Result<u64, SettleError> {
        let its = |item: &&Item| item.message.id == named.id && item.message.queue_id == self.queue.id;
        let Some(item) = self.items.get(&named.seq).filter(its).filter(|item| item.table.is_some()) else {
            let is_dead = |item: &Item| item.message.id == named.id && item.message.queue_id != self.queue.id;
            let died = self.items.values().any(is_dead);
            return Err(if died { SettleError::Dead } else { SettleError::Gone });
        };
        if item.message.fence != named.fence {
            self.totals.stale += 1;
            return Err(SettleError::Stale);
        }
        match (item.table, &item.message.story.parked) {
            (Some(Table::Parked), Some((FailureCause::InDoubt | FailureCause::Damaged, _)) | None) => {
                Err(SettleError::NotInFlight)
            }
            (Some(Table::Parked), Some(_)) => Err(SettleError::Dead),
            _ => Ok(named.seq),
        }
    }

    pub(super) fn settle(&mut self, named: &Named, settlement: Settlement) -> Result<Settled, SettleError> {
        let seq = self.find(named)?;
        if !self.items[&seq].in_flight() {
            match settlement {
                Settlement::Ack if !self.fifo() => {}
                Settlement::Ack => return Err(SettleError::Expired),
                _ => return Err(SettleError::NotInFlight),
            }
        }
        Ok(match settlement {
            Settlement::Ack => self.ack(seq),
            Settlement::Retry { after_ms, error } => {
                self.totals.retried += 1;
                self.take_back_behind(seq);
                self.item(seq).message.received_ms = None;
                self.fail(seq, FailureCause::Retry, error.as_deref(), after_ms)
            }
            Settlement::Defer { after_ms } => {
                self.totals.deferred += 1;
                self.take_back_behind(seq);
                self.put_back(seq, after_ms);
                let message = &mut self.item(seq).message;
                (message.attempts, message.received_ms) = (message.attempts.saturating_sub(1), None);
                Settled::Returned { after_ms }
            }
            Settlement::Park { reason } => {
                self.take_back_behind(seq);
                self.remember(seq, FailureCause::InDoubt, Some(&reason));
                self.halt(seq);
                let message = &mut self.item(seq).message;
                message.attempts = message.attempts.saturating_sub(1);
                self.park(seq, FailureCause::InDoubt, Some(reason));
                Settled::Parked
            }
            Settlement::Reject { reason } => {
                self.take_back_behind(seq);
                self.remember(seq, FailureCause::Rejected, Some(&reason));
                self.die(seq, FailureCause::Rejected, Some(&reason))
            }
        })
    }

    fn ack(&mut self, seq: u64) -> Settled {
        self.totals.acked += 1;
        self.end(seq);
        Settled::Acked
    }

    /// The message is gone for good.
    pub(super) fn end(&mut self, seq: u64) {
        let fifo = self.fifo();
        let item = self.item(seq);
        item.table = None;
        let (id, is_letter) = (item.message.id, item.message.story.dead.is_some());
        self.decided.extend((fifo && is_letter).then_some(id));
        self.ended.push(seq);
        self.freed |= fifo;
    }

    pub(super) fn extend(&mut self, named: &Named, extend: &Extend) -> Result<RemainingLease, SettleError> {
        let (seq, now_ms, fifo) = (self.find(named)?, self.now_ms, self.fifo());
        let item = &self.items[&seq];
        let (message, in_flight) = (&item.message, item.in_flight());
        let (received_ms, own) = match (in_flight, message.received_ms) {
            (true, received_ms) => (received_ms.unwrap_or(now_ms), message.own || extend.own_lease),
            (false, Some(received_ms)) if !fifo => {
                if extend.lease_ms == 0 {
                    // At a place of its own: behind its former one, receives may have passed.
                    let number = self.number();
                    let item = self.item(seq);
                    (item.table, item.message.until_ms, item.message.pos) =
                        (Some(Table::Ready), None, number);
                    self.freed = true;
                    return Ok(RemainingLease { lease_ms: 0 });
                }
                (received_ms, extend.own_lease)
            }
            _ => return Err(SettleError::NotInFlight),
        };
        let until_ms = policy::extend_deadline(received_ms, now_ms, extend.lease_ms)?;
        let item = self.item(seq);
        let deliveries = item.message.deliveries;
        let failed_late = |failed: &FailedAttempt| failed.deliveries == deliveries && !in_flight;
        if item.message.story.history.last().is_some_and(failed_late) {
            item.message.story.history.pop();
        }
        if extend.lease_ms == 0 {
            self.totals.retried += 1;
            self.fail(seq, FailureCause::Retry, None, Some(0));
        } else {
            (item.table, item.message.until_ms) = (Some(Table::Claim), Some(until_ms));
            (item.message.lease_ms, item.message.own) = (Some(extend.lease_ms), own);
        }
        Ok(RemainingLease { lease_ms: extend.lease_ms })
    }

    /// A delivery failed: by policy it is retried or becomes a dead letter.
    fn fail(&mut self, seq: u64, cause: FailureCause, error: Option<&str>, asked_ms: Option<u64>) -> Settled {
        self.remember(seq, cause, error);
        let attempts = self.items[&seq].message.attempts;
        let random = fastrand::u64(..);
        match policy::after_failure(&self.queue.config.retry, attempts, asked_ms, random) {
            AfterFailure::Dead => self.die(seq, cause, error),
            AfterFailure::Retry { after_ms } => {
                self.put_back(seq, after_ms);
                Settled::Returned { after_ms }
            }
        }
    }

    /// Makes a message visible behind the ready ones; its FIFO group then waits behind the other groups.
    fn put_back(&mut self, seq: u64, after_ms: u64) {
        let (number, now_ms, fifo) = (self.number(), self.now_ms, self.fifo());
        let item = self.item(seq);
        item.table = Some(match (fifo, after_ms) {
            (true, _) => Table::Fifo,
            (false, 0) => Table::Ready,
            (false, _) => Table::Due,
        });
        item.message.pos = number;
        item.message.until_ms = (after_ms > 0).then_some(now_ms + after_ms);
        (item.message.lease_ms, item.message.own) = (None, false);
        self.freed = true;
    }

    fn remember(&mut self, seq: u64, cause: FailureCause, error: Option<&str>) {
        let now_ms = self.now_ms;
        let message = &mut self.item(seq).message;
        let failed = FailedAttempt {
            attempt: message.attempts,
            deliveries: message.deliveries,
            at_ms: now_ms,
            cause,
            error: error.map(|error| policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned()),
            consumer: message.consumer.take(),
        };
        let history = &mut message.story.history;
        history.push(failed);
        if history.len() > policy::HISTORY_MAX as usize {
            history.remove(0);
        }
    }

    fn park(&mut self, seq: u64, cause: FailureCause, error: Option<String>) {
        let error = error.map(|error| policy::truncate(&error, policy::ERROR_BYTES_MAX).to_owned());
        let item = self.item(seq);
        item.table = Some(Table::Parked);
        item.message.story.parked = Some((cause, error));
        (item.message.until_ms, item.message.lease_ms, item.message.own) = (None, None, false);
        self.freed |= self.fifo();
    }

    /// Out of attempts or rejected: to the dead letters, or parked where there are none.
    pub(super) fn die(&mut self, seq: u64, cause: FailureCause, error: Option<&str>) -> Settled {
        self.totals.dead += 1;
        self.halt(seq);
        let Some(target) = self.dead else {
            self.park(seq, cause, error.map(str::to_owned));
            return Settled::Parked;
        };
        let (number, now_ms, source) = (self.number(), self.now_ms, self.queue.name.clone());
        let item = self.item(seq);
        item.table = None;
        let mut letter = item.message.clone();
        let last = || letter.story.history.iter().rev().find_map(|failed| failed.error.clone());
        let error =
            error.map(|error| policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned()).or_else(last);
        letter.story.dead = Some(DeadLetter {
            source,
            cause,
            error,
            attempts: letter.attempts,
            deliveries: letter.deliveries,
            first_received_ms: letter.first_ms.unwrap_or(now_ms),
            died_ms: now_ms,
        });
        letter.story.died_at = Some(seq);
        (letter.queue_id, letter.seq, letter.pos) = (target.id, number, number);
        (letter.attempts, letter.received_ms, letter.first_ms) = (0, None, None);
        (letter.until_ms, letter.lease_ms, letter.own) = (None, None, false);
        let fifo = target.config.is_fifo();
        if fifo {
            letter.retained_ms = now_ms;
        }
        let table = Some(if fifo { Table::Fifo } else { Table::Ready });
        self.deaths.push((seq, number));
        self.items.insert(number, Item { was: None, table, changed: true, message: letter });
        (self.died, self.freed) = (true, self.freed || self.fifo());
        Settled::Dead
    }

    /// A message is parked or dead: where the queue says so, its group is halted for it.
    fn halt(&mut self, seq: u64) {
        if self.queue.config.on_dead != OnDead::HaltGroup {
            return;
        }
        let message = &self.items[&seq].message;
        let (group, id) = (message.group.clone(), message.id);
        self.halts.extend(group.map(|group| (group, id)));
        self.take_back_behind(seq);
    }

    /// Puts back, uncounted, the messages in flight behind a message of a FIFO group.
    fn take_back_behind(&mut self, seq: u64) {
        self.take_back(seq, |_| true);
    }

    fn take_back(&mut self, seq: u64, which: impl Fn(&Message) -> bool) {
        if !self.fifo() {
            return;
        }
        let group = self.items[&seq].message.group.clone();
        for item in self.items.range_mut(seq + 1..).map(|(_, item)| item) {
            if item.in_flight() && item.message.group == group && which(&item.message) {
                (item.changed, item.table) = (true, Some(Table::Fifo));
                item.message.attempts = item.message.attempts.saturating_sub(1);
                (item.message.until_ms, item.message.lease_ms, item.message.own) = (None, None, false);
                item.message.consumer = None;
            }
        }
    }

    /// Parks a damaged message. No consumer has received its delivery, if it is in flight.
    pub(super) fn set_aside(&mut self, seq: u64, problem: &str) {
        let in_flight = self.items[&seq].in_flight();
        self.halt(seq);
        let (queue, message) = (&self.queue.name, &self.items[&seq].message);
        tracing::error!(%queue, message_id = %message.id, problem, "a damaged message is parked");
        self.totals.damaged += 1;
        let message = &mut self.item(seq).message;
        if in_flight {
            message.attempts = message.attempts.saturating_sub(1);
            message.deliveries = message.deliveries.saturating_sub(1);
        }
        message.damage = None;
        self.park(seq, FailureCause::Damaged, Some(problem.to_owned()));
    }

    /// Parks the messages whose rows could not be read whole: what was left out would be lost if they were written back
    /// as if they were sound.
    fn set_damaged_aside(&mut self) {
        let queue_id = self.queue.id;
        let waits = |item: &Item| !matches!(item.table, None | Some(Table::Parked));
        let damaged: Vec<(u64, String)> = self
            .items
            .iter()
            .filter(|(_, item)| waits(item) && item.message.queue_id == queue_id)
            .filter_map(|(seq, item)| Some((*seq, item.message.damage.clone()?)))
            .collect();
        for (seq, problem) in damaged {
            self.set_aside(seq, &problem);
        }
    }

    /// Does what time has caused, after damaged messages were set aside. Leases that are over: each of these deliveries has
    /// failed, unless one of its batch before it has returned it.
    pub(super) fn lapse(&mut self, started_ms: u64) {
        self.set_damaged_aside();
        let (now_ms, queue_id) = (self.now_ms, self.queue.id);
        let over = |item: &Item| {
            let ended = |until_ms: u64| until_ms <= now_ms;
            let restarted = started_ms + item.message.lease_ms.unwrap_or(0) <= now_ms;
            let ours = item.in_flight() && item.message.queue_id == queue_id;
            ours && restarted && item.message.until_ms.is_some_and(ended)
        };
        let mut all: Vec<(Option<u64>, u64)> = self
            .items
            .iter()
            .filter(|(_, item)| over(item))
            .map(|(seq, item)| (item.message.until_ms, *seq))
            .collect();
        all.sort_unstable();
        for (_, seq) in all {
            if self.items.get(&seq).is_some_and(over) {
                self.totals.expired += 1;
                if !self.items[&seq].message.own {
                    self.take_back(seq, |message| !message.own);
                }
                self.fail(seq, FailureCause::Expired, None, None);
            }
        }
    }

    /// A delivery beyond the limit of attempts, which was lowered: it is undone, and the message dies.
    pub(super) fn die_undelivered(&mut self, seq: u64) {
        let message = &mut self.item(seq).message;
        message.attempts = message.attempts.saturating_sub(1);
        message.deliveries = message.deliveries.saturating_sub(1);
        let last = message.story.history.last().cloned();
        let (cause, error) =
            last.map_or((FailureCause::Expired, None), |failed| (failed.cause, failed.error));
        self.die(seq, cause, error.as_deref());
    }

    /// A delivery that reached no receiver: the message is where it was.
    pub(super) fn give_back(&mut self, named: &Named) {
        let Ok(seq) = self.find(named) else { return };
        if !self.items[&seq].in_flight() {
            return;
        }
        let fifo = self.fifo();
        self.given_back = true;
        let item = self.item(seq);
        item.table = Some(if fifo { Table::Fifo } else { Table::Ready });
        let message = &mut item.message;
        message.attempts = message.attempts.saturating_sub(1);
        message.deliveries = message.deliveries.saturating_sub(1);
        if message.deliveries == 0 {
            message.first_ms = None;
        }
        (message.until_ms, message.lease_ms, message.received_ms) = (None, None, None);
        (message.own, message.consumer) = (false, None);
        self.freed = true;
    }

    /// An operator lets a parked message continue.
    pub(super) fn release(&mut self, seq: u64) {
        let (number, now_ms, fifo) = (self.number(), self.now_ms, self.fifo());
        let item = self.item(seq);
        item.table = Some(if fifo { Table::Fifo } else { Table::Ready });
        let message = &mut item.message;
        (message.attempts, message.received_ms, message.retained_ms) = (0, None, now_ms);
        message.story.parked = None;
        message.story.history.clear();
        if !fifo {
            message.pos = number;
        }
        self.freed = true;
    }
}
