//! Receives.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::store::QueueTotals;
use hapax_core::{Delivery, GroupId, OnDead, QueueName, Receive, Settle, StoreError, policy, validate};
use sqlx::{PgConnection, Row as _};
use tokio::sync::oneshot;

use super::fair::{Fair, Noisy};
use super::feed::{Call, Handed};
use super::row::{COLUMNS, Message, Table};
use super::transaction::{finish, work_on};
use super::{Inner, Queue, floors, write};
use crate::BoxFuture;
use crate::error::{Access, Failure};

/// Rounds of one look: each follows a change that another process has made, or what time has caused.
const ROUNDS_MAX: usize = 20;
/// The longest time between two looks.
const LOOK_MAX: Duration = Duration::from_hours(1);
/// Time to wait for another process that is ending leases.
const SWEEP_PAUSE: Duration = Duration::from_millis(5);
/// The shortest.
const LOOK_MIN: Duration = Duration::from_millis(20);

/// What a statement found.
#[derive(Default)]
struct Found {
    now_ms: u64,
    /// With the number of its slot, from 1.
    messages: Vec<(usize, Message)>,
    /// How many were deleted instead, because they were too old.
    dropped: u64,
    /// Leases or delays have ended, and there may be more messages then.
    due: bool,
    /// When the next lease or delay ends.
    next_ms: Option<u64>,
    /// Whether nothing was due at `now_ms`, by a look that went through.
    swept: bool,
    /// Up to which places of priorities all are gone.
    gone: Vec<(i16, u64)>,
    /// The place before the first FIFO group that was locked by another transaction.
    missed: Option<u64>,
    /// The groups that have more than their share of the deliveries, if that may be used again.
    noisy: Option<Noisy>,
}

/// Where to begin to look: the places of each priority, and the time of leases and delays. Up to which fence the receive need
/// not wait for the disk.
struct Reach {
    floors: Vec<i64>,
    from_ms: i64,
    unsynced_upto: i64,
    /// Groups that have more than their share of the deliveries, where that need not be counted again.
    noisy: Option<Vec<String>>,
}

/// Room for one message.
#[derive(Clone)]
struct Slot {
    lease_ms: u64,
    consumer: Option<String>,
    /// The call that it belongs to.
    call: usize,
}

impl Inner {
    pub(super) async fn receive(
        self: &Arc<Self>,
        name: &QueueName,
        ask: Receive,
    ) -> Result<Vec<Delivery>, StoreError> {
        validate::receive(&ask)?;
        let queue = self.open_queue(name).await?;
        let wait_ms = ask.wait_ms.unwrap_or(queue.config.wait_ms);
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + Duration::from_millis(wait_ms);
        self.wait_for(queue.id, name, Call { ask, wait_ms, deadline, from_ms: None, looked: false, reply });
        match answer.await {
            Ok(handed) => Ok(handed?.arrived()),
            // What was leased for it, if anything, returns when its lease ends.
            Err(_) => Err(StoreError::Unavailable("receive: the call was interrupted; repeat it".into())),
        }
    }

    /// Looks for messages for calls; those that were answered are removed. Gives the time until the next look.
    pub(super) async fn serve(
        self: &Arc<Self>,
        queue_id: i32,
        name: &QueueName,
        calls: &mut Vec<Call>,
    ) -> Duration {
        match self.try_serve(queue_id, name, calls).await {
            Ok(look) => look,
            Err(error) => {
                for call in calls.drain(..) {
                    // Its caller may be gone.
                    let _ = call.reply.send(Err(error.clone()));
                }
                Duration::ZERO
            }
        }
    }

    async fn try_serve(
        self: &Arc<Self>,
        queue_id: i32,
        name: &QueueName,
        calls: &mut Vec<Call>,
    ) -> Result<Duration, StoreError> {
        for round in 0..ROUNDS_MAX {
            if self.is_closed() {
                return Err(StoreError::Unavailable("receive: the store is closed".into()));
            }
            let mut queue = self.queue(name).await?;
            if queue.paused.is_some() {
                // What is known of a pause may be out of date.
                queue = self.read_queue(name).await?;
                queue.check_open()?;
            }
            if queue.id != queue_id {
                // The queue was deleted and created again: its calls wait where the new one's are woken.
                for call in calls.drain(..) {
                    self.wait_for(queue.id, name, call);
                }
                return Ok(Duration::ZERO);
            }
            // A lease that another process is ending is waited for, but not for long.
            let probe = round + 1 < ROUNDS_MAX;
            let look = if queue.paused.is_some() {
                self.probe(&queue, probe).await?
            } else {
                self.look(&queue, calls, probe).await?
            };
            match look {
                Look::Changed => drop(self.read_queue(name).await?),
                Look::Sweep => {
                    if !self.sweep(&queue).await? {
                        tokio::time::sleep(SWEEP_PAUSE).await;
                    }
                }
                Look::Again => {}
                Look::Done { now_ms, next_ms } => return Ok(end_waits(calls, now_ms, next_ms)),
            }
            if calls.is_empty() {
                return Ok(Duration::ZERO);
            }
        }
        Ok(LOOK_MIN)
    }

    /// How many messages of a queue may be leased now, at most as many as asked for. If there is no room at all, a FIFO queue
    /// hands out nothing, and another one refuses.
    async fn room(&self, queue: &Queue, asked: usize) -> Result<usize, StoreError> {
        if asked == 0 {
            return Ok(0);
        }
        let asked = asked.min(Receive::MAX) as u64;
        let room = self.in_flight_room(queue, asked).await?;
        if room == 0 && !queue.config.is_fifo() {
            let in_flight = policy::IN_FLIGHT_MAX;
            return Err(StoreError::TooManyInFlight { queue: queue.name.clone(), in_flight });
        }
        Ok(room as usize)
    }

    fn reach(&self, queue: &Queue) -> Reach {
        Reach {
            floors: self.take_floors(queue, &floors::priorities(queue)),
            from_ms: self.sweep_from(queue.id),
            unsynced_upto: self.unsynced_upto(),
            noisy: self.noisy(queue.id),
        }
    }

    /// The next look begins where this one did, which has not looked at the groups: a look further back is made only now and then.
    fn note_unseen(&self, queue: &Queue, reach: &Reach) {
        let floors = reach.floors.iter().copied();
        self.note_seen(queue.id, floors::priorities(queue).into_iter().zip(floors));
    }

    /// The same of a look that failed, unless it was at everything: that may take longer than it is given, and would each time.
    fn note_failed(&self, queue: &Queue, reach: &Reach) {
        let places = floors::priorities(queue).into_iter().zip(reach.floors.iter().copied());
        self.note_seen(queue.id, places.filter(floors::is_bounded));
    }

    fn note_found(&self, queue: &Queue, reach: &Reach, found: &Found) {
        if found.due && queue.config.is_fifo() {
            // It ended before that.
            self.note_unseen(queue, reach);
        }
        if let Some(missed) = found.missed {
            self.note_seen(queue.id, std::iter::once((floors::GROUPS, missed as i64)));
        }
        self.note_taken(queue, &found.gone);
        if let Some(noisy) = &found.noisy {
            self.note_noisy(queue.id, noisy);
        }
        self.note_delivered(queue.id, found.messages.len() as u64);
        if found.swept {
            self.note_swept(queue.id, found.now_ms);
        }
    }

    /// Whether a lease or a delay is over, the store's time, and when the next one is over.
    async fn probed(&self, queue: &Queue) -> Result<(bool, u64, Option<u64>), StoreError> {
        let (id, from_ms) = (queue.id, self.sweep_from(queue.id));
        let probed = self.base.pool.run("look at a queue", Access::Read, move |db| {
            Box::pin(async move {
                let sql = "SELECT due, next_ms, now_ms FROM hapax.q_probe($1, $2)";
                let row = sqlx::query(sql).bind(id).bind(from_ms).fetch_one(db).await?;
                let next_ms: Option<i64> = row.try_get("next_ms")?;
                let now_ms: i64 = row.try_get("now_ms")?;
                Ok((row.try_get::<bool, _>("due")?, now_ms as u64, next_ms.map(|ms| ms as u64)))
            })
        });
        probed.await
    }

    /// A look at a queue that hands out nothing, since it is paused or has no room: time does not stand still there.
    async fn probe(&self, queue: &Queue, probe: bool) -> Result<Look, StoreError> {
        let (due, now_ms, next_ms) = self.probed(queue).await?;
        Ok(if due && probe { Look::Sweep } else { Look::Done { now_ms, next_ms } })
    }

    /// One look for all calls; those that were answered are removed.
    async fn look(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        calls: &mut Vec<Call>,
        probe: bool,
    ) -> Result<Look, StoreError> {
        let mut done = Look::Again;
        while let Some(at) = calls.iter().position(|call| call.ask.attempt_id.is_some() && !call.looked) {
            match self.look_repeatable(queue, calls, at, probe).await? {
                Look::Done { now_ms, next_ms } => done = Look::Done { now_ms, next_ms },
                other => return Ok(other),
            }
        }
        for call in calls.iter_mut() {
            call.looked = false;
        }
        let asked = calls.iter().filter(|call| call.ask.attempt_id.is_none()).map(|call| call.ask.max).sum();
        let room = self.room(queue, asked).await?;
        let mut slots: Vec<Slot> = Vec::new();
        let mut owners: Vec<usize> = Vec::new();
        for (at, call) in calls.iter().enumerate().filter(|(_, call)| call.ask.attempt_id.is_none()) {
            if !owners.is_empty() && slots.len() + call.ask.max > Receive::MAX {
                break;
            }
            slots.extend(std::iter::repeat_n(slot(queue, &call.ask, at), call.ask.max));
            owners.extend(std::iter::repeat_n(at, call.ask.max));
        }
        slots.truncate(room);
        if slots.is_empty() && asked > 0 {
            return self.probe(queue, probe).await;
        }
        if slots.is_empty() {
            return Ok(done);
        }
        let reach = Arc::new(self.reach(queue));
        let asked = Arc::new((queue.clone(), slots, reach.clone()));
        let take = self.base.pool.repeat_here("receive", Access::Write, move |db| {
            let asked = asked.clone();
            Box::pin(async move { take(db, &asked.0, &asked.1, probe, &asked.2).await })
        });
        let taken = take.await.inspect_err(|_| self.note_failed(queue, &reach))?;
        let Some(found) = taken else {
            self.note_unseen(queue, &reach);
            return Ok(Look::Changed);
        };
        self.note_found(queue, &reach, &found);
        let Found { now_ms, messages, dropped, due, next_ms, missed, .. } = found;
        let (deliveries, undeliverable) = self.deliveries(queue, messages, now_ms);
        let delivered = deliveries.len() as u64;
        self.count(
            queue.id,
            &QueueTotals { delivered, retention_dropped: dropped, ..QueueTotals::default() },
        );
        let nothing = deliveries.is_empty();
        let again = !undeliverable.is_empty() || (nothing && (dropped > 0 || missed.is_some()));
        self.hand_out(queue, calls, &owners, deliveries).await;
        self.end_undelivered(queue, undeliverable).await?;
        Ok(match (again, due && probe) {
            (true, _) => Look::Again,
            (_, true) => Look::Sweep,
            _ => Look::Done { now_ms, next_ms },
        })
    }

    /// The same for a call that can be repeated.
    async fn look_repeatable(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        calls: &mut Vec<Call>,
        at: usize,
        probe: bool,
    ) -> Result<Look, StoreError> {
        let mut ask = calls[at].ask.clone();
        ask.max = self.room(queue, ask.max).await?;
        if ask.max == 0 {
            calls[at].looked = true;
            return self.probe(queue, probe).await;
        }
        let (of, ask) = (queue.clone(), Arc::new(ask));
        let reach = Arc::new(Reach { unsynced_upto: 0, ..self.reach(queue) });
        let from = reach.clone();
        let repeated = self.transact("receive", move |db| {
            let (queue, ask, from) = (of.clone(), ask.clone(), from.clone());
            Box::pin(async move { repeat(db, &queue, &ask, probe, &from).await }) as BoxFuture<'_, _>
        });
        let (found, new) = repeated.await.inspect_err(|_| self.note_failed(queue, &reach))?;
        let Some(found) = found else {
            self.note_unseen(queue, &reach);
            return Ok(Look::Changed);
        };
        self.note_found(queue, &reach, &found);
        let Found { now_ms, messages, due, next_ms, missed, .. } = found;
        let (deliveries, undeliverable) = self.deliveries(queue, messages, now_ms);
        if new {
            let delivered = deliveries.len() as u64;
            self.count(queue.id, &QueueTotals { delivered, ..QueueTotals::default() });
        }
        let again = deliveries.is_empty() && (!undeliverable.is_empty() || missed.is_some());
        self.end_undelivered(queue, undeliverable).await?;
        if again {
            return Ok(Look::Again);
        }
        if deliveries.is_empty() && due && probe {
            return Ok(Look::Sweep);
        }
        calls[at].looked = true;
        if !deliveries.is_empty() {
            let call = calls.remove(at);
            let deliveries = deliveries.into_iter().map(|(_, delivery)| delivery).collect();
            // What a dropped call was given stays leased for its repetition.
            let _ = call.reply.send(Ok(Handed { deliveries, back: None }));
        }
        Ok(Look::Done { now_ms, next_ms })
    }

    /// The deliveries of leased messages by their slots, and the messages that cannot be delivered: they are damaged, or
    /// beyond the limit of attempts, which was lowered.
    fn deliveries(
        &self,
        queue: &Queue,
        messages: Vec<(usize, Message)>,
        now_ms: u64,
    ) -> (Vec<(usize, Delivery)>, Vec<Undeliverable>) {
        let limit = queue.config.retry.limit();
        let (mut deliveries, mut undeliverable) = (Vec::new(), Vec::new());
        for (slot, message) in messages {
            let damage = match message.delivery(&self.base.seal, now_ms) {
                Ok(delivery) if limit.is_none_or(|max| message.attempts <= max) => {
                    deliveries.push((slot, delivery));
                    continue;
                }
                Ok(_) => None,
                Err(damage) => Some(damage),
            };
            undeliverable.push(Undeliverable { seq: message.seq, group: message.group, damage });
        }
        if queue.config.on_dead == OnDead::HaltGroup {
            // They halt their groups: what is behind them is taken back.
            deliveries.retain(|(_, delivery): &(usize, Delivery)| {
                let halts = |one: &Undeliverable| one.group == delivery.group && one.seq < delivery.sequence;
                !undeliverable.iter().any(halts)
            });
        }
        (deliveries, undeliverable)
    }

    /// Ends leases of messages that are not delivered: they die, or are set aside.
    async fn end_undelivered(&self, queue: &Queue, all: Vec<Undeliverable>) -> Result<(), StoreError> {
        if all.is_empty() {
            return Ok(());
        }
        let (name, all) = (queue.name.clone(), Arc::new(all));
        let ended = self.transact("end messages that cannot be delivered", move |db| {
            let (name, all) = (name.clone(), all.clone());
            Box::pin(async move {
                let queue = Queue::get_open(db, &name).await?;
                let dead = queue.dead_letters(db).await?;
                let seqs: Vec<u64> = all.iter().map(|one| one.seq).collect();
                let (mut work, held) = work_on(db, &queue, dead.as_ref(), &seqs, &[]).await?;
                for one in all.iter() {
                    let item = work.items.get(&one.seq);
                    if item.is_none_or(|item| item.table != Some(Table::Claim)) {
                        continue;
                    }
                    match &one.damage {
                        Some(damage) => work.set_aside(one.seq, damage),
                        None => work.die_undelivered(one.seq),
                    }
                }
                finish(db, &work, &held).await
            }) as BoxFuture<'_, _>
        });
        self.publish(&ended.await?);
        Ok(())
    }

    /// Hands deliveries to the calls whose slots they are in.
    async fn hand_out(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        calls: &mut Vec<Call>,
        owners: &[usize],
        deliveries: Vec<(usize, Delivery)>,
    ) {
        let mut of_call: Vec<Vec<Delivery>> = calls.iter().map(|_| Vec::new()).collect();
        for (slot, delivery) in deliveries {
            of_call[owners[slot - 1]].push(delivery);
        }
        let mut left = Vec::new();
        for (call, deliveries) in std::mem::take(calls).into_iter().zip(of_call) {
            if deliveries.is_empty() {
                left.push(call);
                continue;
            }
            let mut handed = Handed { deliveries, back: Some((self.clone(), queue.name.clone())) };
            if call.ask.ack_on_receive && !call.reply.is_closed() {
                let acks = handed.deliveries.iter().map(|d| Settle::ack(d.receipt.clone())).collect();
                if let Err(error) = self.settle(&queue.name, acks).await {
                    let _ = call.reply.send(Err(error));
                    continue;
                }
                handed.back = None;
            }
            // If the caller is gone, dropping them gives them back.
            let _ = call.reply.send(Ok(handed));
        }
        *calls = left;
    }
}

/// A leased message that cannot be delivered.
struct Undeliverable {
    seq: u64,
    group: Option<GroupId>,
    /// `None`: it is out of attempts.
    damage: Option<String>,
}

/// What a look found.
enum Look {
    /// The queue has changed: read it, and look again.
    Changed,
    /// Leases or delays have ended: end them, and look again.
    Sweep,
    Again,
    Done {
        now_ms: u64,
        /// When time has something to do next.
        next_ms: Option<u64>,
    },
}

/// Answers the calls whose wait is over by the store's clock or by ours. Gives the time until the next look.
fn end_waits(calls: &mut Vec<Call>, now_ms: u64, next_ms: Option<u64>) -> Duration {
    // If it could not be done now, it is tried again a little later.
    let until = |next: u64| Duration::from_millis(next.saturating_sub(now_ms)).max(LOOK_MIN);
    let look = next_ms.map_or(LOOK_MAX, until);
    for mut call in std::mem::take(calls) {
        let from_ms = *call.from_ms.get_or_insert(now_ms);
        let left_ms = (from_ms + call.wait_ms).saturating_sub(now_ms);
        if left_ms == 0 || call.is_over() {
            call.answer_nothing();
        } else {
            calls.push(call);
        }
    }
    look
}

fn slot(queue: &Queue, ask: &Receive, call: usize) -> Slot {
    let lease_ms = ask.lease_ms.unwrap_or(queue.config.lease_ms);
    Slot { lease_ms, consumer: ask.consumer.clone(), call }
}

/// A receive that can be repeated: what is still held of the deliveries that it gave, else new ones. Says whether they
/// are new.
async fn repeat(
    db: &mut PgConnection,
    queue: &Queue,
    ask: &Receive,
    probe: bool,
    from: &Reach,
) -> Result<(Option<Found>, bool), Failure> {
    let name = ask.attempt_id.as_deref().unwrap_or_default();
    let lock = "SELECT pg_advisory_xact_lock($1, hashtext($2))";
    sqlx::query(lock).bind(queue.id).bind(name).execute(&mut *db).await?;
    let (now_ms, _) = write::draw(db, 0).await?;
    let held = still_held(db, queue, name, now_ms).await?;
    if !held.is_empty() {
        let lease_ms = slot(queue, ask, 0).lease_ms;
        let mut messages = Vec::new();
        for (at, mut message) in held.into_iter().take(ask.max).enumerate() {
            let until_ms = message.until_ms.unwrap_or(now_ms);
            let received_ms = message.received_ms.unwrap_or(now_ms);
            let renewed = policy::extend_deadline(received_ms, now_ms, lease_ms).unwrap_or(until_ms);
            message.until_ms = Some(until_ms.max(renewed));
            let sql = "UPDATE hapax.q_claim SET until_ms = $3 WHERE seq = $1 AND fence = $2";
            let renew = sqlx::query(sql).bind(message.seq as i64).bind(message.fence as i64);
            renew.bind(until_ms.max(renewed) as i64).execute(&mut *db).await?;
            messages.push((at + 1, message));
        }
        return Ok((Some(Found { now_ms, messages, ..Found::default() }), false));
    }
    let found = take(db, queue, &vec![slot(queue, ask, 0); ask.max], probe, from).await?;
    if let Some(Found { messages, .. }) = &found
        && !messages.is_empty()
    {
        let sql = "INSERT INTO hapax.q_attempt (queue_id, name, since_ms, seqs, fences) VALUES ($1, $2, $3, $4, $5) \
                   ON CONFLICT (queue_id, name) DO UPDATE SET since_ms = excluded.since_ms, seqs = excluded.seqs, \
                   fences = excluded.fences";
        let remember = sqlx::query(sql).bind(queue.id).bind(name).bind(now_ms as i64);
        let (seqs, fences): (Vec<i64>, Vec<i64>) =
            messages.iter().map(|(_, message)| (message.seq as i64, message.fence as i64)).unzip();
        remember.bind(seqs).bind(fences).execute(db).await?;
    }
    Ok((found, true))
}

/// The deliveries of an earlier receive that are still held.
async fn still_held(
    db: &mut PgConnection,
    queue: &Queue,
    name: &str,
    now_ms: u64,
) -> Result<Vec<Message>, Failure> {
    let sql =
        "SELECT seqs, fences FROM hapax.q_attempt WHERE queue_id = $1 AND name = $2 AND since_ms + $3 > $4";
    let find =
        sqlx::query(sql).bind(queue.id).bind(name).bind(policy::ATTEMPT_ID_MS as i64).bind(now_ms as i64);
    let Some(row) = find.fetch_optional(&mut *db).await? else { return Ok(Vec::new()) };
    let (seqs, fences): (Vec<i64>, Vec<i64>) = (row.try_get("seqs")?, row.try_get("fences")?);
    let sql = format!(
        "SELECT {COLUMNS} FROM hapax.q_claim WHERE queue_id + 0 = $1 AND seq = ANY($2) \
         AND greatest(until_ms, hapax.started_ms() + lease_ms) > $3 FOR UPDATE"
    );
    let rows = sqlx::query(&sql).bind(queue.id).bind(&seqs).bind(now_ms as i64).fetch_all(db).await?;
    let mut found = rows.iter().map(Message::read).collect::<Result<Vec<_>, _>>()?;
    let mut held = Vec::new();
    for (seq, fence) in seqs.into_iter().zip(fences) {
        let its = |message: &Message| (message.seq, message.fence) == (seq as u64, fence as u64);
        held.extend(found.iter().position(its).map(|at| found.swap_remove(at)));
    }
    Ok(held)
}

/// Leases messages for slots; `None`: the queue has changed.
async fn take(
    db: &mut PgConnection,
    queue: &Queue,
    slots: &[Slot],
    probe: bool,
    from: &Reach,
) -> Result<Option<Found>, Failure> {
    let leases: Vec<i64> = slots.iter().map(|slot| slot.lease_ms as i64).collect();
    let owners: Vec<i32> = slots.iter().map(|slot| slot.call as i32).collect();
    // Most receives name no consumer: no array then.
    let named = slots.iter().any(|slot| slot.consumer.is_some());
    let consumers: Option<Vec<Option<&str>>> =
        named.then(|| slots.iter().map(|slot| slot.consumer.as_deref()).collect());
    let retention_ms = queue.config.retention_ms as i64;
    let mut gone: HashMap<i16, u64> = HashMap::new();
    let mut counted = None;
    let rows = if queue.config.is_fifo() {
        let limit = queue.config.retry.limit();
        let sql = "SELECT r.slot, r.now_ms AS at_ms, (r.m).* \
                   FROM hapax.q_recv_fifo($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) r";
        let take = sqlx::query(sql).bind(queue.id).bind(queue.version).bind(leases).bind(consumers);
        let take =
            take.bind(owners).bind(retention_ms).bind(limit.is_some()).bind(limit == Some(1)).bind(probe);
        take.bind(from.from_ms).bind(from.floors[0]).fetch_all(db).await?
    } else {
        let priorities = queue.priorities();
        let mut noisy = None;
        if queue.grouped {
            let fair = Fair::read(db, queue, &from.floors, from.from_ms, from.noisy.is_none()).await?;
            gone.extend(priorities.iter().zip(fair.firsts).filter_map(|(prio, pos)| Some((*prio, pos? - 1))));
            noisy = fair.noisy.as_ref().map(|noisy| noisy.groups.clone()).or_else(|| from.noisy.clone());
            counted = fair.noisy;
        }
        let sql = "SELECT * FROM hapax.q_take($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)";
        let take = sqlx::query(sql).bind(queue.id).bind(queue.version).bind(priorities).bind(&from.floors);
        take.bind(leases)
            .bind(consumers)
            .bind(retention_ms)
            .bind(noisy)
            .bind(from.from_ms)
            .bind(from.unsynced_upto)
            .fetch_all(db)
            .await?
    };
    let mut found = Found { noisy: counted, ..Found::default() };
    for row in &rows {
        let (slot, at): (i32, Option<i64>) = (row.try_get("slot")?, row.try_get("at_ms")?);
        let at = at.map(|at| at as u64);
        match slot {
            -1 => return Ok(None),
            -2 => found.due = true,
            -3 => found.dropped += at.unwrap_or(0),
            -4 | -5 => {
                // What is over and locked by a transaction is still to be swept.
                let over = at.is_some_and(|at| at <= found.now_ms);
                (found.next_ms, found.swept) = (at, slot == -4 && !over);
            }
            -6 => drop(gone.insert(floors::GROUPS, at.unwrap_or(0))),
            -7 => found.missed = at,
            0 => found.now_ms = at.unwrap_or(0),
            slot => found.messages.push((slot as usize, Message::read(row)?)),
        }
    }
    if !queue.config.is_fifo() && !queue.grouped {
        // They are taken in the order of their places.
        for (_, message) in &found.messages {
            let pos = gone.entry(message.priority.0.into()).or_default();
            *pos = message.pos.max(*pos);
        }
    }
    found.gone = gone.into_iter().collect();
    found.messages.sort_by_key(|(slot, _)| *slot);
    Ok(Some(found))
}
