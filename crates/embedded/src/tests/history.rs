//! What clients were told, and what must follow from it. It knows only the engine's answers, and the content of the
//! queues after each wave.

use std::collections::{BTreeMap, HashMap};

use hapax_core::{SettleError, Settled, Settlement};

use crate::receipt::DeliveryRef;
use crate::writer::RawDelivery;

/// Whether a send took effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Accepted {
    No,
    Maybe,
    Yes,
}

/// Whether a message may be gone, or must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gone {
    No,
    Maybe,
    Yes,
}

/// A delivery that a client received.
#[derive(Debug, Clone)]
struct MadeDelivery {
    delivery: DeliveryRef,
    group: Option<String>,
    until_ms: u64,
    commit: u64,
    /// Its holder may rely on it.
    live: bool,
}

/// One message as its sender knows it; a repeated send counts as the same message.
#[derive(Debug)]
pub(super) struct Message {
    pub queue: usize,
    pub group: Option<u8>,
    pub dedup: Option<String>,
    /// Its send can be repeated: it has a deduplication id, and no purge has removed that id.
    pub repeatable: bool,
    pub first_try_ms: u64,
    pub outcome: Accepted,
    gone: Gone,
    id: Option<u128>,
    made: Vec<MadeDelivery>,
    /// A client received it, even if a power cut has undone that since.
    seen: bool,
}

#[derive(Debug, Default)]
pub(super) struct History {
    pub messages: Vec<Message>,
    fence_max: u64,
    /// The position of the latest first delivery, by queue and group of FIFO queues.
    first_places: HashMap<(u32, String), u64>,
    /// Deliveries that a repeated receive may return again.
    pub repeated: Vec<DeliveryRef>,
}

pub(super) fn body(message: usize) -> String {
    format!("m{message}")
}

pub(super) fn number(body: &[u8]) -> usize {
    std::str::from_utf8(&body[1..]).expect("text").parse().expect("a number")
}

impl History {
    pub fn new_message(&mut self, queue: usize, group: Option<u8>, dedup: bool, now_ms: u64) -> usize {
        let number = self.messages.len();
        let dedup = dedup.then(|| format!("d{number}"));
        let (outcome, gone) = (Accepted::No, Gone::No);
        let message = Message {
            queue,
            group,
            repeatable: dedup.is_some(),
            dedup,
            first_try_ms: now_ms,
            outcome,
            gone,
            id: None,
            made: Vec::new(),
            seen: false,
        };
        self.messages.push(message);
        number
    }

    /// A send was answered, or (`None`) its outcome is unknown.
    pub fn sent(&mut self, message: usize, answer: Option<&hapax_core::Sent>) {
        let message = &mut self.messages[message];
        let Some(sent) = answer else {
            if message.outcome == Accepted::No {
                message.outcome = Accepted::Maybe;
            }
            return;
        };
        match message.outcome {
            Accepted::No => assert!(!sent.duplicate, "a first send is no duplicate"),
            Accepted::Maybe => {}
            Accepted::Yes => assert!(sent.duplicate, "a repeated send made another message"),
        }
        assert!(message.id.is_none_or(|id| id == sent.id.0), "a repeated send got another id");
        (message.outcome, message.id) = (Accepted::Yes, Some(sent.id.0));
    }

    /// Deliveries were given to a client in the wave of commit number `commit`.
    pub fn delivered(&mut self, raw: &[RawDelivery], fifo: bool, acked: bool, now_ms: u64, commit: u64) {
        for raw in raw {
            let delivery = raw.leased.delivery;
            let at = number(&raw.content.body);
            let group = raw.group.as_ref().map(ToString::to_string);
            let message = &mut self.messages[at];
            let first = !std::mem::replace(&mut message.seen, true) && raw.dead.is_none();
            assert_ne!(message.gone, Gone::Yes, "message {at} was acked and comes again");
            assert_ne!(message.outcome, Accepted::No, "message {at} was never accepted");
            let until_ms = now_ms + raw.lease_ms;
            if let Some(made) = message.made.iter_mut().find(|made| made.delivery == delivery) {
                assert!(self.repeated.contains(&delivery), "message {at}: one delivery was handed out twice");
                made.until_ms = until_ms;
                continue;
            }
            for made in &message.made {
                assert!(made.delivery.fence < delivery.fence, "message {at}: fences grow");
                let held = made.live && made.until_ms > now_ms;
                assert!(!held, "message {at} is delivered while {:?} still holds it", made.delivery);
            }
            message.made.push(MadeDelivery { delivery, group: group.clone(), until_ms, commit, live: true });
            if acked {
                message.gone = Gone::Yes;
            }
            assert!(delivery.fence < 1 << 53);
            if fifo && first {
                let key = (delivery.queue, group.expect("a FIFO message has a group"));
                let before = self.first_places.insert(key, raw.leased.entry.order);
                assert!(before < Some(raw.leased.entry.order), "message {at} overtook its group");
            }
        }
    }

    /// Checks all fences of one wave against all earlier ones.
    pub fn fences(&mut self, mut fences: Vec<u64>) {
        fences.sort_unstable();
        assert!(fences.windows(2).all(|pair| pair[0] < pair[1]), "two deliveries have the same fence");
        assert!(fences.first().is_none_or(|first| *first > self.fence_max), "a fence did not grow");
        self.fence_max = fences.last().copied().unwrap_or(self.fence_max);
    }

    /// The message and delivery that a receipt names.
    fn made(&mut self, delivery: DeliveryRef) -> Option<(&mut Message, usize)> {
        self.messages.iter_mut().find_map(|message| {
            let at = message.made.iter().position(|made| made.delivery == delivery)?;
            Some((message, at))
        })
    }

    /// Deliveries of this one's group may have been put back.
    fn end_group(&mut self, delivery: DeliveryRef) {
        let Some((message, at)) = self.made(delivery) else { return };
        let group = message.made[at].group.clone();
        let all = self.messages.iter_mut().flat_map(|message| &mut message.made);
        for made in all.filter(|made| made.delivery.queue == delivery.queue && made.group == group) {
            made.live = false;
        }
    }

    /// A settle was answered, or (`None`) its outcome is unknown.
    pub fn settled(
        &mut self,
        delivery: DeliveryRef,
        settlement: &Settlement,
        fifo: bool,
        now_ms: u64,
        answer: Option<&Result<Settled, SettleError>>,
    ) {
        let Some((message, at)) = self.made(delivery) else { return };
        match answer {
            Some(Err(error)) => {
                let made = &message.made[at];
                let held = made.live && made.until_ms > now_ms && message.gone == Gone::No;
                assert!(!held, "{delivery:?} is held, yet its settle was refused: {error}");
                return;
            }
            Some(Ok(_)) => {
                let newer = message.made.iter().any(|made| made.delivery.fence > delivery.fence);
                assert!(!newer, "a stale receipt settled {delivery:?}");
                assert_ne!(message.gone, Gone::Yes, "{delivery:?} was acked before");
            }
            None => {}
        }
        message.made[at].live = false;
        if *settlement == Settlement::Ack {
            let known = if answer.is_some() { Gone::Yes } else { Gone::Maybe };
            message.gone = if message.gone == Gone::Yes { Gone::Yes } else { known };
        } else if fifo {
            self.end_group(delivery);
        }
    }

    /// An extension was answered with the new lease, or (`None`) its outcome is unknown.
    pub fn extended(
        &mut self,
        delivery: DeliveryRef,
        asked_ms: u64,
        fifo: bool,
        now_ms: u64,
        answer: Option<&Result<u64, SettleError>>,
    ) {
        let Some((message, at)) = self.made(delivery) else { return };
        let newer = message.made.iter().any(|made| made.delivery.fence > delivery.fence);
        let made = &mut message.made[at];
        match answer {
            Some(Ok(lease_ms)) => {
                assert!(!newer, "a stale receipt extended {delivery:?}");
                made.until_ms = now_ms + lease_ms;
                made.live &= *lease_ms > 0;
            }
            Some(Err(error)) => {
                let held = made.live && made.until_ms > now_ms && message.gone == Gone::No;
                assert!(!held, "{delivery:?} is held, yet its extension was refused: {error}");
            }
            None => made.live = false,
        }
        // If the lease may be shorter now, the time at which it puts back the rest of its group is unknown.
        let may_return = asked_ms == 0 || answer.is_none();
        if may_return && fifo && !matches!(answer, Some(Err(_))) {
            self.end_group(delivery);
        }
    }

    /// The holder of this delivery of a FIFO group cannot rely on it any more, nor can the other holders of the group.
    pub fn uncertain(&mut self, delivery: DeliveryRef) {
        self.end_group(delivery);
    }

    /// Expired leases of FIFO groups may have put back the rest of their batch.
    pub fn expire(&mut self, now_ms: u64) {
        let made = self.messages.iter().flat_map(|message| &message.made);
        let over: Vec<_> =
            made.filter(|made| made.live && made.until_ms <= now_ms).map(|made| made.delivery).collect();
        for delivery in over {
            self.end_group(delivery);
        }
    }

    /// Any of these messages may be gone from now on.
    pub fn maybe_gone(&mut self, numbers: impl Iterator<Item = usize>) {
        for number in numbers {
            let message = &mut self.messages[number];
            if message.gone == Gone::No {
                message.gone = Gone::Maybe;
            }
            message.made.iter_mut().for_each(|made| made.live = false);
        }
    }

    /// A power cut: deliveries after commit number `commit` are lost, and leases may be shorter again.
    pub fn power_loss(&mut self, commit: u64, lost: bool) {
        for message in &mut self.messages {
            message.made.retain(|made| made.commit <= commit);
            message.made.iter_mut().for_each(|made| made.live &= !lost);
        }
    }

    /// Checks that the queues' content agrees with the answers. Each entry is a message and its queue.
    pub fn census(&self, there: &[(usize, u32)]) {
        let mut seen = BTreeMap::new();
        for (number, queue) in there {
            let before = seen.insert(*number, *queue);
            assert_eq!(before, None, "message {number} is there twice");
            let message = &self.messages[*number];
            assert_ne!(message.outcome, Accepted::No, "message {number} was refused, yet it is there");
            assert_ne!(message.gone, Gone::Yes, "message {number} was acked, yet it is there");
        }
        for (number, message) in self.messages.iter().enumerate() {
            if message.outcome == Accepted::Yes && message.gone == Gone::No {
                assert!(seen.contains_key(&number), "message {number} was accepted and is lost: {message:?}");
            }
        }
    }
}
