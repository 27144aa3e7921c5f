//! Redrives: moving dead letters back, at a rate, by whichever process comes first. The cursor of a task is compared and set,
//! so a letter is moved by one of them.

use std::sync::Arc;

use hapax_core::store::RedriveFilter;
use hapax_core::{
    AdminError, EntryId, QueueName, RedriveRequest, RedriveState, RedriveTask, StoreError, validate,
};
use serde::{Deserialize, Serialize};

use super::Queues;
use super::call::{Answer, Fields};
use super::message::Stored;
use super::moves::name_in;
use super::send::new_id;
use crate::error::unexpected;
use crate::keys::{SHARDS, Shard, member, shard_of_queue};
use crate::script::QueueScript;

/// Letters that one step looks at.
const STEP_MAX: usize = 100;

/// The time for one letter, or the shortest between two steps.
fn step_ms(per_second: u32) -> u64 {
    1_000_u64.div_ceil(per_second.max(1).into()).max(100)
}

/// What was asked for, as it is kept.
#[derive(Serialize, Deserialize)]
struct Asked {
    to: Option<QueueName>,
    filter: RedriveFilter,
    per_second: u32,
    by: String,
}

/// A redrive with its place in the queue.
pub(super) struct Running {
    task: RedriveTask,
    /// The last sequence that was looked at, and the last one to look at.
    cursor: u64,
    last: u64,
}

impl Running {
    fn read(mut row: Fields) -> Result<Self, StoreError> {
        let id = row.parsed()?;
        let mut task = row.fields()?;
        let from = task.parsed()?;
        let state = match task.text()?.as_str() {
            "running" => RedriveState::Running,
            "completed" => RedriveState::Completed,
            "cancelled" => RedriveState::Cancelled,
            "failed" => RedriveState::Failed,
            _ => return Err(task.unexpected()),
        };
        let (started_ms, ended_ms) = (task.number()?, Some(task.number()?).filter(|ended_ms| *ended_ms > 0));
        let (total, moved, left) = (task.number()?, task.number()?, task.number()?);
        let (cursor, last) = (task.number()?, task.number()?);
        let asked: Asked = serde_json::from_str(&task.text()?).map_err(|_| task.unexpected())?;
        let failure = Some(task.text()?).filter(|failure| !failure.is_empty());
        let Asked { to, filter, per_second, by } = asked;
        let task = RedriveTask {
            id,
            from,
            to,
            filter,
            per_second,
            by,
            state,
            started_ms,
            ended_ms,
            total,
            moved,
            left,
            failure,
        };
        Ok(Self { task, cursor, last })
    }
}

impl Queues {
    async fn redrive(&self, queue: &QueueName, args: &[&[u8]]) -> Result<Answer, StoreError> {
        let call = self.call(QueueScript::Redrive, &self.any(queue), args);
        Answer::read("redrive", self.runner.one(call).await?)?.check_open(queue)
    }

    pub(super) async fn start_redrive(
        self: &Arc<Self>,
        request: RedriveRequest,
    ) -> Result<RedriveTask, AdminError> {
        let ticket = self.asking.begin();
        let from = self.open_config(&request.from).await?;
        let to = match &request.to {
            Some(to) => Some(self.open_config(to).await?),
            None => None,
        };
        let per_second = validate::redrive(&request, &from, to.as_ref())?;
        let RedriveRequest { from, to, filter, by, .. } = request;
        let asked =
            serde_json::to_vec(&Asked { to, filter, per_second, by }).expect("a request is plain data");
        let shard = shard_of_queue(&from).to_string();
        let args =
            || vec![b"start".to_vec(), Vec::new(), asked.clone(), shard.clone().into_bytes(), Vec::new()];
        let mut answer = self.ask(QueueScript::Redrive, &from, |_| args()).await?;
        self.after(&from, &answer).await;
        if answer.status == "running" {
            return Err(AdminError::RedriveRunning(from));
        }
        let running = Running::read(answer.values.fields()?)?;
        // The first letters move at once; the sweep does the rest.
        let (queues, task) = (self.clone(), running.task.clone());
        tokio::spawn(async move {
            let _ticket = ticket;
            if let Err(error) = queues.step_redrive(running).await {
                tracing::debug!(%error, "a redrive is continued later");
            }
        });
        Ok(task)
    }

    /// The redrives that move messages from or to a queue.
    pub(super) async fn running_redrive(&self, queue: &QueueName) -> Result<Option<QueueName>, StoreError> {
        for shard in 0..SHARDS {
            for Running { task, .. } in self.list_redrives(&name_in(shard)?, "running").await? {
                if task.from == *queue || task.to.as_ref() == Some(queue) {
                    return Ok(Some(task.from));
                }
            }
        }
        Ok(None)
    }

    /// The redrives of a queue's shard: all, or those that are `running`.
    async fn list_redrives(&self, queue: &QueueName, which: &str) -> Result<Vec<Running>, StoreError> {
        let mut answer = self.redrive(queue, &[b"list", b"", which.as_bytes(), b"0", b""]).await?;
        answer.values.rows()?.into_iter().map(Running::read).collect()
    }

    pub(super) async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        let _ticket = self.asking.begin();
        self.read_info(from).await?;
        let all = self.list_redrives(from, "").await?;
        let mut tasks: Vec<RedriveTask> =
            all.into_iter().map(|running| running.task).filter(|task| task.from == *from).collect();
        tasks.sort_by_key(|task| std::cmp::Reverse(task.id));
        Ok(tasks)
    }

    pub(super) async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        let _ticket = self.asking.begin();
        let any = name_in(id as usize % SHARDS)?;
        let number = id.to_string();
        let mut answer = self.redrive(&any, &[b"cancel", number.as_bytes(), b"", b"0", b""]).await?;
        if answer.status == "none" {
            return Err(AdminError::NotFound(format!("redrive {id}")));
        }
        Ok(Running::read(answer.values.fields()?)?.task)
    }

    /// Continues the redrives of a shard that are running.
    pub(super) async fn sweep_redrives(&self, shard: Shard, steps_max: usize) -> Result<(), StoreError> {
        let mut swept = Ok(());
        for running in self.list_redrives(&name_in(shard)?, "running").await? {
            swept = swept.and(self.steps_of_redrive(running, steps_max).await);
        }
        swept
    }

    async fn steps_of_redrive(&self, mut running: Running, steps_max: usize) -> Result<(), StoreError> {
        for _ in 0..steps_max {
            let before = running.cursor;
            running = self.step_redrive(running).await?;
            if running.task.state != RedriveState::Running || running.cursor == before {
                break;
            }
        }
        Ok(())
    }

    /// Moves the next letters, as many as the rate allows.
    async fn step_redrive(&self, running: Running) -> Result<Running, StoreError> {
        let Running { task, cursor, last } = &running;
        let (id, from) = (task.id.to_string(), task.from.clone());
        let now_ms = match self.configure_now(&from).await {
            Ok(now_ms) => now_ms,
            Err(StoreError::NoSuchQueue(_)) => {
                // The script notes that the queue is gone.
                let args = [b"step".as_slice(), id.as_bytes(), b"", b"0", b""];
                let mut answer = self.redrive(&from, &args).await?;
                return Running::read(answer.values.fields()?);
            }
            Err(error) => return Err(error),
        };
        if let Some(to) = &task.to
            && let Err(StoreError::NoSuchQueue(_)) = self.read_info(to).await
        {
            let failure = format!("queue {to} was deleted");
            let args = [b"fail".as_slice(), id.as_bytes(), failure.as_bytes(), b"0", b""];
            let mut answer = self.redrive(&from, &args).await?;
            return Running::read(answer.values.fields()?);
        }
        let due = u64::from(task.per_second) * now_ms.saturating_sub(task.started_ms) / 1000 + 1;
        let mut allowed = due.saturating_sub(task.moved);
        let (stored, seen, more) = self.view(&from, *cursor, STEP_MAX, "-1", "").await?;
        let (mut elements, mut is_cut) = (Vec::new(), false);
        for letter in stored.iter().filter(|letter| letter.sequence <= *last) {
            let target = self.target(task, letter).await?;
            if target.is_some() {
                if allowed == 0 {
                    is_cut = true;
                    break;
                }
                allowed -= 1;
            }
            elements.push(letter.sequence.to_string().into_bytes());
            elements.push(new_id().to_string().into_bytes());
            let entry =
                target.as_ref().map(|to| member(&EntryId::of_queue(to, letter.key.clone())).into_bytes());
            elements.push(target.map(|target| target.as_str().into()).unwrap_or_default());
            elements.push(entry.unwrap_or_default());
        }
        // Not at once: a target that is deleted right after the start is noticed, as in the other stores.
        let is_new = now_ms < task.started_ms + step_ms(task.per_second);
        let ends = !is_cut && !is_new && (!more || seen >= *last);
        if elements.is_empty() && !ends {
            return Ok(running);
        }
        let cursor_text = cursor.to_string();
        let ends: &[u8] = if ends { b"end" } else { b"" };
        let args = || {
            let first = [b"step".as_slice(), id.as_bytes(), b"", cursor_text.as_bytes(), ends];
            first.into_iter().map(<[u8]>::to_vec).chain(elements.iter().cloned()).collect()
        };
        let mut answer = self.ask(QueueScript::Redrive, &from, |_| args()).await?;
        self.after(&from, &answer).await;
        Running::read(answer.values.fields()?)
    }

    /// Where a letter goes; `None`: it stays.
    async fn target(&self, task: &RedriveTask, letter: &Stored) -> Result<Option<QueueName>, StoreError> {
        let Some(dead) = letter.dead.as_ref() else { return Ok(None) };
        if !task.filter.selects(letter.id, Some(dead.into())) {
            return Ok(None);
        }
        let target = task.to.clone().unwrap_or_else(|| dead.source.clone());
        match self.read_info(&target).await {
            Ok(_) => Ok(Some(target)),
            Err(StoreError::NoSuchQueue(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The time of Redis, if there is such a queue.
    async fn configure_now(&self, name: &QueueName) -> Result<u64, StoreError> {
        let mut answer = self.ask(QueueScript::Tick, name, |_| Vec::new()).await?;
        self.after(name, &answer).await;
        answer.values.number().map_err(|_| unexpected("redrive"))?;
        Ok(answer.now_ms)
    }
}
