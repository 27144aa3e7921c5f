//! Receives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::store::QueueTotals;
use hapax_core::{Delivery, QueueName, Receive, Settle, StoreError, policy, validate};
use sqlx::{PgConnection, Row as _};
use tokio::sync::oneshot;

use super::feed::{Call, Handed};
use super::row::{COLUMNS, Message, Table};
use super::transaction::{finish, work_on};
use super::{Inner, Queue, write};
use crate::BoxFuture;
use crate::error::{Access, Failure};
use crate::seal::Seal;

/// Rounds of one look: each follows a change that another process has made, or what time has caused.
const ROUNDS_MAX: usize = 20;
/// The longest time between two looks.
const LOOK_MAX: Duration = Duration::from_hours(1);
/// Time to wait for another process that is ending leases.
const SWEEP_PAUSE: Duration = Duration::from_millis(5);
/// The shortest.
const LOOK_MIN: Duration = Duration::from_millis(20);

/// What a statement found.
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
}

/// Where to begin to look: the places of each priority, and the time of leases and delays.
struct Reach {
    floors: Vec<i64>,
    from_ms: i64,
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
            Err(_) => Err(StoreError::Unavailable("receive: the store was closed".into())),
        }
    }

    /// Looks for messages for calls; those that were answered are removed. Gives the time until the next look.
    pub(super) async fn serve(self: &Arc<Self>, name: &QueueName, calls: &mut Vec<Call>) -> Duration {
        match self.try_serve(name, calls).await {
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

    fn reach(&self, queue: &Queue) -> Reach {
        Reach { floors: self.floors(queue, &queue.priorities()), from_ms: self.sweep_from(queue.id) }
    }

    fn note_found(&self, queue: &Queue, found: &Found) {
        self.note_taken(queue, found.messages.iter().map(|(_, message)| message));
        if found.swept {
            self.note_swept(queue.id, found.now_ms);
        }
    }

    /// A look at a paused queue: time does not stand still there.
    async fn probe(&self, queue: &Queue, probe: bool) -> Result<Look, StoreError> {
        let (id, from_ms) = (queue.id, self.sweep_from(queue.id));
        let probed = self.base.pool.run_here("look at a queue", Access::Read, move |db| {
            Box::pin(async move {
                let sql = "SELECT due, next_ms, now_ms FROM hapax.q_probe($1, $2)";
                let row = sqlx::query(sql).bind(id).bind(from_ms).fetch_one(db).await?;
                let next_ms: Option<i64> = row.try_get("next_ms")?;
                let now_ms: i64 = row.try_get("now_ms")?;
                Ok((row.try_get::<bool, _>("due")?, now_ms as u64, next_ms.map(|ms| ms as u64)))
            })
        });
        let (due, now_ms, next_ms) = probed.await?;
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
        let mut slots: Vec<Slot> = Vec::new();
        let mut owners: Vec<usize> = Vec::new();
        for (at, call) in calls.iter().enumerate().filter(|(_, call)| call.ask.attempt_id.is_none()) {
            if !owners.is_empty() && slots.len() + call.ask.max > Receive::MAX {
                break;
            }
            slots.extend(std::iter::repeat_n(slot(queue, &call.ask, at), call.ask.max));
            owners.extend(std::iter::repeat_n(at, call.ask.max));
        }
        if slots.is_empty() {
            return Ok(done);
        }
        let asked = Arc::new((queue.clone(), slots, self.reach(queue)));
        let take = self.base.pool.repeat_here("receive", Access::Write, move |db| {
            let asked = asked.clone();
            Box::pin(async move { take(db, &asked.0, &asked.1, probe, &asked.2).await })
        });
        let Some(found) = take.await? else { return Ok(Look::Changed) };
        self.note_found(queue, &found);
        let Found { now_ms, messages, dropped, due, next_ms, .. } = found;
        let (messages, over) = within_limit(queue, messages);
        let delivered = messages.len() as u64;
        self.count(
            queue.id,
            &QueueTotals { delivered, retention_dropped: dropped, ..QueueTotals::default() },
        );
        let again = !over.is_empty() || (dropped > 0 && messages.is_empty());
        self.hand_out(queue, calls, &owners, messages, now_ms).await?;
        if !over.is_empty() {
            self.die_undelivered(queue, over).await?;
        }
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
        let (of, ask) = (queue.clone(), Arc::new(calls[at].ask.clone()));
        let from = Arc::new(self.reach(queue));
        let repeated = self.transact("receive", move |db| {
            let (queue, ask, from) = (of.clone(), ask.clone(), from.clone());
            Box::pin(async move { repeat(db, &queue, &ask, probe, &from).await }) as BoxFuture<'_, _>
        });
        let (found, new) = repeated.await?;
        let Some(found) = found else { return Ok(Look::Changed) };
        self.note_found(queue, &found);
        let Found { now_ms, messages, due, next_ms, .. } = found;
        let (messages, over) = within_limit(queue, messages);
        if new {
            let delivered = messages.len() as u64;
            self.count(queue.id, &QueueTotals { delivered, ..QueueTotals::default() });
        }
        if !over.is_empty() {
            self.die_undelivered(queue, over).await?;
        }
        if messages.is_empty() && due && probe {
            return Ok(Look::Sweep);
        }
        calls[at].looked = true;
        if !messages.is_empty() {
            let call = calls.remove(at);
            let deliveries =
                deliveries(&self.base.seal, messages.into_iter().map(|(_, message)| message), now_ms)?;
            // What a dropped call was given stays leased for its repetition.
            let _ = call.reply.send(Ok(Handed { deliveries, back: None }));
        }
        Ok(Look::Done { now_ms, next_ms })
    }

    async fn die_undelivered(&self, queue: &Queue, over: Vec<Message>) -> Result<(), StoreError> {
        let name = queue.name.clone();
        let seqs: Arc<Vec<u64>> = Arc::new(over.iter().map(|message| message.seq).collect());
        let died = self.transact("end messages that are out of attempts", move |db| {
            let (name, seqs) = (name.clone(), seqs.clone());
            Box::pin(async move {
                let queue = Queue::get_open(db, &name).await?;
                let dead = queue.dead_letters(db).await?;
                let (mut work, held) = work_on(db, &queue, dead.as_ref(), &seqs, &[]).await?;
                let held_now: Vec<u64> = work
                    .items
                    .values()
                    .filter(|item| item.table == Some(Table::Claim) && seqs.contains(&item.message.seq))
                    .map(|item| item.message.seq)
                    .collect();
                for seq in held_now {
                    work.die_undelivered(seq);
                }
                finish(db, &work, &held).await
            }) as BoxFuture<'_, _>
        });
        self.publish(&died.await?);
        Ok(())
    }

    /// Hands messages to the calls whose slots they are in.
    async fn hand_out(
        self: &Arc<Self>,
        queue: &Arc<Queue>,
        calls: &mut Vec<Call>,
        owners: &[usize],
        messages: Vec<(usize, Message)>,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let mut of_call: Vec<Vec<Message>> = calls.iter().map(|_| Vec::new()).collect();
        for (slot, message) in messages {
            of_call[owners[slot - 1]].push(message);
        }
        let mut left = Vec::new();
        for (call, messages) in std::mem::take(calls).into_iter().zip(of_call) {
            if messages.is_empty() {
                left.push(call);
                continue;
            }
            let deliveries = deliveries(&self.base.seal, messages.into_iter(), now_ms)?;
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
        Ok(())
    }
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

/// Answers the calls whose wait is over. Gives the time until the next look.
fn end_waits(calls: &mut Vec<Call>, now_ms: u64, next_ms: Option<u64>) -> Duration {
    // If it could not be done now, it is tried again a little later.
    let until = |next: u64| Duration::from_millis(next.saturating_sub(now_ms)).max(LOOK_MIN);
    let mut look = next_ms.map_or(LOOK_MAX, until);
    for mut call in std::mem::take(calls) {
        let from_ms = *call.from_ms.get_or_insert(now_ms);
        let left_ms = (from_ms + call.wait_ms).saturating_sub(now_ms);
        let left = call.deadline.saturating_duration_since(Instant::now());
        if left_ms == 0 || left.is_zero() {
            // Its caller may be gone.
            let _ = call.reply.send(Ok(Handed { deliveries: Vec::new(), back: None }));
            continue;
        }
        look = look.min(left);
        calls.push(call);
    }
    look
}

/// Deliveries within the limit of attempts, and those beyond it, which was lowered.
fn within_limit(queue: &Queue, messages: Vec<(usize, Message)>) -> (Vec<(usize, Message)>, Vec<Message>) {
    let Some(max) = queue.config.retry.limit() else { return (messages, Vec::new()) };
    let (within, over): (Vec<_>, Vec<_>) =
        messages.into_iter().partition(|(_, message)| message.attempts <= max);
    (within, over.into_iter().map(|(_, message)| message).collect())
}

fn deliveries(
    seal: &Seal,
    messages: impl Iterator<Item = Message>,
    now_ms: u64,
) -> Result<Vec<Delivery>, StoreError> {
    let damaged = |error: sqlx::Error| StoreError::Damaged(error.to_string());
    messages.map(|message| message.delivery(seal, now_ms).map_err(damaged)).collect()
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
        return Ok((
            Some(Found { now_ms, messages, dropped: 0, due: false, next_ms: None, swept: false }),
            false,
        ));
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
    let rows = if queue.config.is_fifo() {
        let limit = queue.config.retry.limit();
        let sql = "SELECT r.slot, r.now_ms AS at_ms, (r.m).* FROM hapax.q_recv_fifo($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) r";
        let take = sqlx::query(sql).bind(queue.id).bind(queue.version).bind(leases).bind(consumers);
        let take =
            take.bind(owners).bind(retention_ms).bind(limit.is_some()).bind(limit == Some(1)).bind(probe);
        take.bind(from.from_ms).fetch_all(db).await?
    } else {
        let priorities = queue.priorities();
        let noisy = if queue.grouped { Some(noisy(db, queue).await?) } else { None };
        let sql = "SELECT * FROM hapax.q_take($1, $2, $3, $4, $5, $6, $7, $8, $9)";
        let take = sqlx::query(sql).bind(queue.id).bind(queue.version).bind(priorities).bind(&from.floors);
        take.bind(leases)
            .bind(consumers)
            .bind(retention_ms)
            .bind(noisy)
            .bind(from.from_ms)
            .fetch_all(db)
            .await?
    };
    let mut found =
        Found { now_ms: 0, messages: Vec::new(), dropped: 0, due: false, next_ms: None, swept: false };
    for row in &rows {
        let (slot, at): (i32, Option<i64>) = (row.try_get("slot")?, row.try_get("at_ms")?);
        let at = at.map(|at| at as u64);
        match slot {
            -1 => return Ok(None),
            -2 => found.due = true,
            -3 => found.dropped += at.unwrap_or(0),
            -4 | -5 => (found.next_ms, found.swept) = (at, slot == -4),
            0 => found.now_ms = at.unwrap_or(0),
            slot => found.messages.push((slot as usize, Message::read(row)?)),
        }
    }
    found.messages.sort_by_key(|(slot, _)| *slot);
    Ok(Some(found))
}

/// Groups that have more than their share of a standard queue's deliveries: they are served after the others.
async fn noisy(db: &mut PgConnection, queue: &Queue) -> Result<Vec<String>, Failure> {
    let sql = "SELECT grp FROM hapax.q_claim WHERE queue_id = $1 AND grp IS NOT NULL GROUP BY grp HAVING count(*) >= 30 \
               AND count(*) * 10 > (SELECT count(*) FROM hapax.q_claim WHERE queue_id = $1)";
    Ok(sqlx::query_scalar(sql).bind(queue.id).fetch_all(db).await?)
}
