//! Redrives: dead letters go back, as a task that the sweepers of all processes continue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::{
    AdminError, MessageId, QueueName, RedriveFilter, RedriveRequest, RedriveState, RedriveTask, StoreError,
    validate,
};
use sqlx::{PgConnection, Row as _};

use super::row::{Message, Table, id_of, low_of, new_high};
use super::transaction::{Effects, finish, work_on};
use super::work::Item;
use super::write;
use super::{Inner, Queue, browse, entries};
use crate::BoxFuture;
use crate::error::{Access, Failure};

/// Letters of one transaction.
const BATCH: usize = 100;
/// A transaction takes no further letter after this time: it has to fit into the time limit of an operation, also if the
/// database is slow or far away.
const STEP_TIME: Duration = Duration::from_millis(500);
/// Ended tasks that are kept for a queue.
const KEPT_MAX: i64 = 1_000;

fn selects(filter: &RedriveFilter, message: &Message) -> bool {
    message.story.dead.is_some() && filter.selects(message.id, message.story.dead.as_ref().map(Into::into))
}

fn read(row: &sqlx::postgres::PgRow) -> Result<RedriveTask, Failure> {
    let damaged = |error| StoreError::Damaged(format!("hapax.q_redrive: {error}"));
    let mut task: RedriveTask = serde_json::from_str(row.try_get("task")?).map_err(damaged)?;
    task.id = row.try_get::<i64, _>("id")? as u64;
    task.moved = row.try_get::<i64, _>("moved")? as u64;
    Ok(task)
}

fn json(task: &RedriveTask) -> String {
    serde_json::to_string(task).expect("a task is plain data")
}

async fn start(
    db: &mut PgConnection,
    ask: &RedriveRequest,
) -> Result<Result<RedriveTask, AdminError>, Failure> {
    let from = Queue::get_open(db, &ask.from).await?;
    let to = match &ask.to {
        Some(to) => Some(Queue::get_open(db, to).await?),
        None => None,
    };
    let per_second = match validate::redrive(ask, &from.config, to.as_ref().map(|to| &to.config)) {
        Ok(per_second) => per_second,
        Err(error) => return Ok(Err(error)),
    };
    let lock = "SELECT 1 FROM hapax.q_queue WHERE id = $1 FOR NO KEY UPDATE";
    sqlx::query(lock).bind(from.id).execute(&mut *db).await?;
    let running = "SELECT 1 FROM hapax.q_redrive WHERE queue_id = $1 AND running";
    if sqlx::query(running).bind(from.id).fetch_optional(&mut *db).await?.is_some() {
        return Ok(Err(AdminError::RedriveRunning(ask.from.clone())));
    }
    let (now_ms, numbers) = write::draw(db, 1).await?;
    let upto = numbers[0];
    let (mut total, mut wanted, mut after) = (0, 0, 0);
    loop {
        let page = browse::behind(db, &from, &Table::ALL, after, 500).await?;
        let Some((_, last)) = page.last() else { break };
        after = last.seq;
        let letters = || page.iter().filter(|(_, message)| message.story.dead.is_some());
        total += letters().count() as u64;
        wanted += letters().filter(|(_, message)| selects(&ask.filter, message)).count() as u64;
    }
    let mut task = RedriveTask {
        id: 0,
        from: ask.from.clone(),
        to: ask.to.clone(),
        filter: ask.filter.clone(),
        per_second,
        by: ask.by.clone(),
        state: RedriveState::Running,
        started_ms: now_ms,
        ended_ms: None,
        total,
        moved: 0,
        left: total - wanted,
        failure: None,
    };
    let sql = "INSERT INTO hapax.q_redrive (queue_id, from_name, task, running, started_ms, per_second, upto_seq) \
               VALUES ($1, $2, $3, true, $4, $5, $6) RETURNING id";
    let add = sqlx::query_scalar::<_, i64>(sql).bind(from.id).bind(ask.from.as_str()).bind(json(&task));
    let add = add.bind(now_ms as i64).bind(i64::from(per_second)).bind(upto as i64);
    task.id = add.fetch_one(&mut *db).await? as u64;
    let old = "DELETE FROM hapax.q_redrive WHERE from_name = $1 AND NOT running AND id <= $2 - $3";
    sqlx::query(old).bind(ask.from.as_str()).bind(task.id as i64).bind(KEPT_MAX).execute(db).await?;
    Ok(Ok(task))
}

async fn end(
    db: &mut PgConnection,
    id: i64,
    task: &mut RedriveTask,
    state: RedriveState,
    failure: Option<String>,
) -> Result<(), Failure> {
    let (now_ms, _) = write::draw(db, 0).await?;
    (task.state, task.ended_ms, task.failure) = (state, Some(now_ms), failure);
    if state == RedriveState::Completed {
        task.left = task.total.saturating_sub(task.moved);
    }
    let sql = "UPDATE hapax.q_redrive SET running = false, task = $2 WHERE id = $1";
    sqlx::query(sql).bind(id).bind(json(task)).execute(db).await?;
    Ok(())
}

async fn cancel(db: &mut PgConnection, id: u64) -> Result<Option<RedriveTask>, Failure> {
    let sql = "SELECT id, task, moved, running FROM hapax.q_redrive WHERE id = $1 FOR UPDATE";
    let Some(row) = sqlx::query(sql).bind(id as i64).fetch_optional(&mut *db).await? else { return Ok(None) };
    let mut task = read(&row)?;
    if row.try_get("running")? {
        end(db, id as i64, &mut task, RedriveState::Cancelled, None).await?;
    }
    Ok(Some(task))
}

/// A step of a redrive: the effects, and whether there is more to do now.
type Step = (Vec<Effects>, bool);

/// Moves some letters of a redrive that no other process works on.
async fn step(db: &mut PgConnection, id: i64) -> Result<Step, Failure> {
    let begun = Instant::now();
    let sql = "SELECT id, task, moved, started_ms, per_second, after_seq, upto_seq FROM hapax.q_redrive \
               WHERE id = $1 AND running FOR UPDATE SKIP LOCKED";
    let Some(row) = sqlx::query(sql).bind(id).fetch_optional(&mut *db).await? else {
        return Ok((Vec::new(), false));
    };
    let mut task = read(&row)?;
    let number = |name: &str| row.try_get::<i64, _>(name).map(|n| n as u64);
    let (after, upto, started_ms) = (number("after_seq")?, number("upto_seq")?, number("started_ms")?);
    let Some(from) = Queue::find(db, &task.from).await? else {
        let gone = format!("queue {} was deleted", task.from);
        end(db, id, &mut task, RedriveState::Failed, Some(gone)).await?;
        return Ok((Vec::new(), false));
    };
    if let Some(to) = &task.to
        && Queue::find(db, to).await?.is_none()
    {
        let gone = format!("queue {to} was deleted");
        end(db, id, &mut task, RedriveState::Failed, Some(gone)).await?;
        return Ok((Vec::new(), false));
    }
    let (now_ms, _) = write::draw(db, 0).await?;
    let allowed = u64::from(task.per_second) * now_ms.saturating_sub(started_ms) / 1000 + 1;
    let mut room = allowed.saturating_sub(task.moved).min(BATCH as u64);
    if room == 0 {
        return Ok((Vec::new(), false));
    }
    let page = browse::behind(db, &from, &Table::ALL, after, BATCH).await?;
    let ended = page.len() < BATCH || page.last().is_some_and(|(_, message)| message.seq >= upto);
    let (mut at, mut effects, mut whole) = (after, Vec::new(), true);
    for (table, message) in page {
        if message.seq >= upto {
            break;
        }
        if room == 0 || (at > after && begun.elapsed() >= STEP_TIME) {
            whole = false;
            break;
        }
        at = message.seq;
        let waits = matches!(table, Table::Ready | Table::Due | Table::Fifo);
        if !waits || !selects(&task.filter, &message) {
            continue;
        }
        if let Some(effect) = move_one(db, &from, task.to.as_ref(), &message).await? {
            effects.extend(effect);
            task.moved += 1;
            room -= 1;
        }
    }
    let sql = "UPDATE hapax.q_redrive SET moved = $2, after_seq = $3 WHERE id = $1";
    sqlx::query(sql).bind(id).bind(task.moved as i64).bind(at as i64).execute(&mut *db).await?;
    if ended && whole {
        end(db, id, &mut task, RedriveState::Completed, None).await?;
        return Ok((effects, false));
    }
    Ok((effects, true))
}

/// Moves a letter back; `None` if it cannot be moved now.
async fn move_one(
    db: &mut PgConnection,
    from: &Queue,
    to: Option<&QueueName>,
    letter: &Message,
) -> Result<Option<Vec<Effects>>, Failure> {
    let Some(dead) = &letter.story.dead else { return Ok(None) };
    let target = match to {
        Some(to) => Queue::find(db, to).await?,
        None => Queue::find(db, &dead.source).await?,
    };
    let Some(target) = target.filter(|target| !target.is_closed()) else { return Ok(None) };
    let source =
        if target.name == dead.source { Some(target.clone()) } else { Queue::find(db, &dead.source).await? };
    let (mut work, mut held) = work_on(db, from, Some(&target), &[letter.seq], &[letter.id]).await?;
    let waits = |item: &Item| {
        matches!(item.table, Some(Table::Ready | Table::Due | Table::Fifo)) && item.message.id == letter.id
    };
    if !work.items.get(&letter.seq).is_some_and(waits) {
        return Ok(None);
    }
    let freed = write::unhalt_everywhere(db, &[letter.id], work.now_ms).await?;
    // Into the group that waited for it, it returns to its place.
    let home = source.as_ref().is_some_and(|source| {
        source.id == target.id && freed.iter().any(|(queue_id, _)| *queue_id == source.id)
    });
    let now_ms = work.now_ms;
    let (_, numbers) = write::draw(db, 1).await?;
    let mut message = work.items[&letter.seq].message.clone();
    let item = work.items.get_mut(&letter.seq).expect("it waits");
    (item.table, item.changed) = (None, true);
    let seq = if home { message.story.died_at.unwrap_or(numbers[0]) } else { numbers[0] };
    // The key stays, also if it was the former id.
    message.key = Some(message.key());
    message.id = id_of(new_high(now_ms, fastrand::u64(..)), low_of(seq));
    if home {
        // A place that was used before: an id of its own, or it would be the former one.
        message.id = MessageId(message.id.0 ^ (u128::from(fastrand::u64(..)) << 64 & (0xfff << 64)));
    }
    (message.queue_id, message.seq, message.pos) = (target.id, seq, numbers[0].max(seq));
    if !home {
        message.pos = seq;
    }
    (message.sent_ms, message.retained_ms, message.first_ms) = (now_ms, now_ms, None);
    (message.attempts, message.deliveries, message.received_ms) = (0, 0, None);
    (message.until_ms, message.lease_ms, message.consumer) = (None, None, None);
    message.story = super::row::Story::default();
    let table = Some(if target.config.is_fifo() { Table::Fifo } else { Table::Ready });
    held.groups
        .extend(message.group.clone().filter(|_| target.config.is_fifo()).map(|group| (target.id, group)));
    work.items.insert(seq, Item { was: None, table, changed: true, message });
    let mut effects = finish(db, &work, &held).await?;
    let moved = &work.items[&seq].message;
    entries::link_redriven(db, (from, letter.seq), source.as_ref(), &target, moved).await?;
    effects.freed.insert(target.id);
    effects.freed.extend(freed.iter().map(|(queue_id, _)| *queue_id));
    effects.freed.extend(source.map(|source| source.id));
    Ok(Some(vec![effects]))
}

impl Inner {
    pub(super) async fn start_redrive(&self, ask: RedriveRequest) -> Result<RedriveTask, AdminError> {
        let ask = Arc::new(ask);
        let started = self.transact("start a redrive", move |db| {
            let ask = ask.clone();
            Box::pin(async move { start(db, &ask).await }) as BoxFuture<'_, _>
        });
        let started: Result<RedriveTask, AdminError> = started.await?;
        let task = started?;
        // The first letters move at once, the sweeper moves the others.
        if let Err(error) = self.redrive_step(task.id as i64).await {
            tracing::debug!(%error, "the redrive moves its first letters later");
        }
        self.sweeper.now();
        Ok(task)
    }

    pub(super) async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        let from = from.clone();
        let listed = self.base.pool.run("list redrives", Access::Read, move |db| {
            Box::pin(async move {
                let sql = "SELECT id, task, moved FROM hapax.q_redrive WHERE from_name = $1 ORDER BY id DESC LIMIT $2";
                let rows = sqlx::query(sql).bind(from.as_str()).bind(KEPT_MAX).fetch_all(db).await?;
                rows.iter().map(read).collect()
            })
        });
        listed.await
    }

    pub(super) async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        let cancelled = self.transact("cancel a redrive", move |db| {
            Box::pin(async move { cancel(db, id).await }) as BoxFuture<'_, _>
        });
        let cancelled: Option<RedriveTask> = cancelled.await?;
        cancelled.ok_or_else(|| AdminError::NotFound(format!("redrive {id}")))
    }

    /// Moves the redrives on that may move now; says whether there are any.
    pub(super) async fn redrive_on(&self) -> Result<bool, StoreError> {
        let list = self.base.pool.run_here("look at redrives", Access::Read, |db| {
            Box::pin(async move {
                Ok(sqlx::query_scalar::<_, i64>("SELECT id FROM hapax.q_redrive WHERE running")
                    .fetch_all(db)
                    .await?)
            })
        });
        let running = list.await?;
        for id in &running {
            while self.redrive_step(*id).await? {}
        }
        Ok(!running.is_empty())
    }

    /// Moves some letters; says whether more can be moved now.
    async fn redrive_step(&self, id: i64) -> Result<bool, StoreError> {
        let moved = self
            .transact("redrive", move |db| Box::pin(async move { step(db, id).await }) as BoxFuture<'_, _>);
        let (effects, more): Step = moved.await?;
        for effects in &effects {
            self.publish(effects);
        }
        Ok(more)
    }
}
