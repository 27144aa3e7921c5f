//! One queue of the model: what its own messages tell.

use super::{Message, ModelPlace, Queue};

impl Queue {
    pub(super) fn index(&self, place: u64) -> usize {
        self.messages.iter().position(|message| message.place == place).expect("it is there")
    }

    pub(super) fn by_place(&self, place: u64) -> &Message {
        &self.messages[self.index(place)]
    }

    /// Groups no longer wait for these messages; says whether any had. What was kept in a group that is not halted any more
    /// has its whole retention again.
    pub(super) fn unhalt(&mut self, now_ms: u64, decided: impl Fn(u64, u8) -> bool) -> bool {
        let (gone, left): (Vec<_>, Vec<_>) =
            self.undecided.iter().copied().partition(|(seq, group)| decided(*seq, *group));
        let from_ms = now_ms - self.config.retention_ms;
        let free = |group| {
            gone.iter().any(|(_, other)| Some(*other) == group)
                && !left.iter().any(|(_, other)| Some(*other) == group)
        };
        for message in self.messages.iter_mut().filter(|message| free(message.group)) {
            if matches!(message.at, ModelPlace::Ready | ModelPlace::Delayed) && message.base_ms < from_ms {
                message.base_ms = now_ms;
            }
        }
        self.undecided = left;
        !gone.is_empty()
    }

    pub fn waiting_in_halted(&self) -> u64 {
        let halted = |group: Option<u8>| self.undecided.iter().any(|(_, other)| Some(*other) == group);
        let waits = |message: &&Message| matches!(message.at, ModelPlace::Ready | ModelPlace::Delayed);
        self.messages.iter().filter(waits).filter(|message| halted(message.group)).count() as u64
    }

    pub fn count(&self, at: ModelPlace) -> u64 {
        self.messages.iter().filter(|message| message.at == at).count() as u64
    }

    /// When the oldest message was sent; several answers where several are equally old.
    pub fn oldest_sent_ms(&self) -> Vec<u64> {
        let waiting = || self.messages.iter().filter(|message| message.at != ModelPlace::Parked);
        let Some(oldest_ms) = waiting().map(|message| message.base_ms).min() else { return Vec::new() };
        waiting().filter(|message| message.base_ms == oldest_ms).map(|message| message.sent_ms).collect()
    }

    pub(super) fn first_due(&self, now_ms: u64) -> Option<usize> {
        let timed = |message: &&Message| matches!(message.at, ModelPlace::Delayed | ModelPlace::InFlight);
        let due = self.messages.iter().filter(timed).filter(|message| message.due_ms <= now_ms);
        due.min_by_key(|message| (message.due_ms, message.place)).map(|message| self.index(message.place))
    }

    pub(super) fn in_flight(&self, group: Option<u8>) -> usize {
        self.messages
            .iter()
            .filter(|message| message.group == group && message.at == ModelPlace::InFlight)
            .count()
    }

    /// The places of the messages that come next, all of one group.
    pub(super) fn next(&self, max: usize) -> Vec<u64> {
        let mut waiting: Vec<_> = self
            .messages
            .iter()
            .filter(|message| matches!(message.at, ModelPlace::Ready | ModelPlace::Delayed))
            .collect();
        waiting.sort_by_key(|message| (u8::MAX - message.priority, message.place.max(message.requeue_order)));
        if !self.config.is_fifo() {
            waiting.retain(|message| message.at == ModelPlace::Ready);
            let highest = waiting.first().map(|message| message.priority);
            waiting.retain(|message| Some(message.priority) == highest);
            let total = self.count(ModelPlace::InFlight) as usize;
            let noisy = |message: &&&Message| {
                let in_flight = self.in_flight(message.group);
                message.group.is_some() && in_flight >= 30 && in_flight * 10 > total
            };
            let quiet = waiting.iter().find(|message| !noisy(message));
            let next = quiet.or_else(|| waiting.iter().min_by_key(|message| self.in_flight(message.group)));
            return next.map(|message| message.place).into_iter().collect();
        }
        let halted = |group: Option<u8>| self.undecided.iter().any(|(_, other)| Some(*other) == group);
        // The first place of a group that is in flight: nothing behind it can be delivered.
        let first_in_flight = |group: Option<u8>| {
            let in_flight = self.messages.iter().filter(|m| m.group == group && m.at == ModelPlace::InFlight);
            in_flight.map(|message| message.place).min().unwrap_or(u64::MAX)
        };
        let heads = waiting.iter().filter(|message| {
            let ahead =
                waiting.iter().any(|other| other.group == message.group && other.place < message.place);
            !ahead
                && message.at == ModelPlace::Ready
                && !halted(message.group)
                && message.place < first_in_flight(message.group)
        });
        let requeue_order = |group: Option<u8>| {
            self.requeue_orders
                .iter()
                .find(|(other, _)| Some(*other) == group)
                .map_or(0, |(_, requeue_order)| *requeue_order)
        };
        let Some(head) = heads.min_by_key(|message| message.place.max(requeue_order(message.group))) else {
            return Vec::new();
        };
        let (group, until) = (head.group, first_in_flight(head.group));
        let of_group = waiting.iter().filter(|message| message.group == group);
        let in_a_row =
            of_group.take_while(|message| message.at == ModelPlace::Ready && message.place < until).take(max);
        in_a_row.map(|message| message.place).collect()
    }
}
