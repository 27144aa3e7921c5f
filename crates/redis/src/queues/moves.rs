//! Messages that go from one queue to another, which may be on another node: dead letters and redrives.
//!
//! A script takes the message out of its queue and keeps it as an intent. Then, by the caller, or by a sweep if the caller
//! dies: the target takes it and remembers the move; the source ends the intent; the target forgets the move, and remembers
//! below which number all moves of that shard have ended. A step that is repeated changes nothing, however late, so the
//! message is in one queue in the end, whatever stops in between. The same for decisions
//! about dead letters: they are kept where the letter was until the groups that waited for it know.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use hapax_core::{MessageId, QueueConfig, QueueName, StoreError};
use redis::Value;

use super::call::{Answer, Fields};
use super::sweep::Left;
use super::{Known, Queues};
use crate::error::unexpected;
use crate::keys::{Shard, shard_of_queue};
use crate::run::Call;
use crate::script::QueueScript;

/// Decisions, or remembered moves, that one sweep looks at in a shard.
const SWEEP_MAX: usize = 100;
/// Pages of 100 moves that one sweep looks at in a shard.
const PAGES_MAX: usize = 100;
/// A move that is older than this was left by its caller.
const LEFT_MS: u64 = 5_000;

/// For tests: added to a step, the next move is to wait there; or it does.
pub(crate) const HELD: u8 = 100;
pub(crate) const WAITING: u8 = 200;

/// How a move has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// The target has the message.
    Done,
    /// There is no target: the message is parked where it was.
    Parked,
    /// There is no target: the message is where it was.
    Back,
}

/// A message on its way.
struct Intent {
    name: String,
    target: QueueName,
    kind: String,
    old_id: String,
    message: Vec<u8>,
    body: Vec<u8>,
    /// The name of its entry in the target, for a message that returns from the dead letters.
    entry: String,
}

/// The queue that a move comes from, and its number.
fn source_of(name: &str) -> Result<(QueueName, &str), StoreError> {
    let (source, number) = name.split_once(' ').ok_or_else(|| unexpected("move"))?;
    Ok((QueueName::new(source).map_err(|_| unexpected("move"))?, number))
}

impl Queues {
    /// Does what a script has left to its caller. What fails here is done by a sweep.
    pub(super) async fn after(&self, name: &QueueName, answer: &Answer) -> HashMap<String, Arrival> {
        let mut arrivals = HashMap::new();
        for moved in &answer.moves {
            match Box::pin(self.finish_move(moved)).await {
                Ok(Some(arrival)) => drop(arrivals.insert(moved.clone(), arrival)),
                Ok(None) => {}
                Err(error) => tracing::debug!(%error, queue = %name, "a move is finished later"),
            }
        }
        if !answer.checks.is_empty()
            && let Err(error) = Box::pin(self.drop_old(name, &answer.checks)).await
        {
            tracing::debug!(%error, queue = %name, "old dead letters are looked at later");
        }
        if answer.decisions > 0
            && let Err(error) = Box::pin(self.tell_decided(name)).await
        {
            tracing::debug!(%error, queue = %name, "a decision about a dead letter is told later");
        }
        for member in &answer.resumed {
            if let Err(error) = Box::pin(self.resume_parked(shard_of_queue(name), member)).await {
                tracing::debug!(%error, queue = %name, "messages that are parked for a doubt continue later");
            }
        }
        arrivals
    }

    /// The queue for a script that needs no settings but its kind.
    pub(super) fn any(&self, name: &QueueName) -> Known {
        let found = self.cache().get(name).map(|known| known.config.clone());
        let config = found
            .unwrap_or_else(|| if name.is_fifo() { QueueConfig::fifo() } else { QueueConfig::default() });
        Known::new(self.runner.keys.queue(name), name, config, "*")
    }

    async fn move_script(&self, queue: &QueueName, how: &str, moved: &str) -> Result<Answer, StoreError> {
        self.move_scripts(queue, &[how, moved]).await
    }

    pub(super) async fn move_scripts(&self, queue: &QueueName, args: &[&str]) -> Result<Answer, StoreError> {
        let args: Vec<&[u8]> = args.iter().map(|arg| arg.as_bytes()).collect();
        let call = self.call(QueueScript::Move, &self.any(queue), &args);
        Answer::read("move", self.runner.one(call).await?)
    }

    /// Brings a message to its target, whatever was done before. `None`: there is nothing to do.
    pub(super) async fn finish_move(&self, name: &str) -> Result<Option<Arrival>, StoreError> {
        let (source, number) = source_of(name)?;
        let mut taken = self.move_script(&source, "take", name).await?;
        let Some(row) = taken.values.rows()?.into_iter().next() else { return Ok(None) };
        let intent = Intent::read(row)?;
        self.stop_at(1).await?;
        let target = match self.known(&intent.target).await {
            Ok(known) => Known::new(known.keys.clone(), &known.name, known.config.clone(), "*"),
            Err(StoreError::NoSuchQueue(_)) => self.any(&intent.target),
            Err(error) => return Err(error),
        };
        let shard = shard_of_queue(&source).to_string();
        let kind = intent.kind.split(' ').next().unwrap_or_default();
        let args = [shard.as_str(), name, number, kind, &intent.old_id].map(str::as_bytes);
        let has_entry: &[u8] = if intent.entry.is_empty() { b"0" } else { b"1" };
        let args = [args.as_slice(), &[&intent.message, &intent.body, has_entry]].concat();
        let entry = [intent.entry.clone()];
        let call = self.call_with(QueueScript::Arrive, &target, &entry, &args);
        let arrived = Answer::read("arrival", self.runner.one(call).await?)?.check_open(&intent.target)?;
        self.stop_at(2).await?;
        let arrival = if arrived.status == "missing" {
            self.forget(&intent.target);
            self.return_move(&source, &intent).await?
        } else {
            Arrival::Done
        };
        self.saw_fence(number.parse().map_err(|_| unexpected("move"))?);
        self.end_move(&source, &intent.target, name).await?;
        self.waiters.freed(intent.target.as_str());
        Ok(Some(arrival))
    }

    /// The source ends the move if it has not, and then the target forgets it.
    async fn end_move(&self, source: &QueueName, target: &QueueName, name: &str) -> Result<(), StoreError> {
        let mut ended = self.move_script(source, "done", name).await?;
        self.stop_at(3).await?;
        if ended.decisions > 0 {
            self.tell_decided(source).await?;
        }
        let ended_below = ended.values.last()?.to_string();
        let shard = shard_of_queue(source).to_string();
        let args = [shard.as_str(), name, &ended_below, "forget", "", "", "", "0"].map(str::as_bytes);
        let call = self.call_with(QueueScript::Arrive, &self.any(target), &[String::new()], &args);
        self.runner.one(call).await.map(|_| ())
    }

    /// The target is gone: a dead message is parked where it died, a redriven one stays where it was.
    async fn return_move(&self, source: &QueueName, intent: &Intent) -> Result<Arrival, StoreError> {
        let (how, arrival) =
            if intent.kind == "dead" { ("parked", Arrival::Parked) } else { ("back", Arrival::Back) };
        let returned = self.move_script(source, how, &intent.name).await?;
        if returned.decisions > 0 {
            self.tell_decided(source).await?;
        }
        Ok(arrival)
    }

    /// For tests: ends a move as if its process had died behind this step, or lets it wait there.
    async fn stop_at(&self, step: u8) -> Result<(), StoreError> {
        let (asked, waits) = (step + HELD, step + WAITING);
        let _ = self.dies_at.compare_exchange(asked, waits, Ordering::SeqCst, Ordering::SeqCst);
        while self.dies_at.load(Ordering::SeqCst) == waits {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        if self.dies_at.load(Ordering::Relaxed) == step {
            return Err(StoreError::Unavailable("a test ends the move here".to_owned()));
        }
        Ok(())
    }

    /// Tells the groups that wait for messages of this queue's shard what was decided.
    pub(super) async fn tell_decided(&self, queue: &QueueName) -> Result<(), StoreError> {
        self.tell_decided_in(shard_of_queue(queue)).await
    }

    async fn tell_decided_in(&self, shard: Shard) -> Result<(), StoreError> {
        let mut command = redis::cmd("HRANDFIELD");
        command.arg(self.runner.keys.decided(shard)).arg(SWEEP_MAX).arg("WITHVALUES");
        let value = self.runner.one(Call::read("decided", shard, command)).await?;
        let found: Vec<(String, String)> =
            redis::from_redis_value(value).map_err(|_| unexpected("decided"))?;
        for (id, queues) in found {
            for told in queues.split(' ') {
                // A queue with a group that waits for the message, or one with an entry that it needs.
                let (queue, member) =
                    told.split_once(':').map_or((told, None), |(queue, it)| (queue, Some(it)));
                let queue = QueueName::new(queue).map_err(|_| unexpected("decided"))?;
                if let Some(member) = member {
                    self.set_need("unneed", &queue, member, &id).await?;
                    continue;
                }
                let args: [&[u8]; 4] = [b"unhalt", b"", b"", id.as_bytes()];
                match self.ask(QueueScript::Decide, &queue, |_| args.map(<[u8]>::to_vec).into()).await {
                    Ok(_) | Err(StoreError::NoSuchQueue(_)) => self.waiters.freed(queue.as_str()),
                    Err(error) => return Err(error),
                }
            }
            // Any name of the shard: the script needs no queue.
            self.move_script(&name_in(shard)?, "told", &id).await?;
        }
        Ok(())
    }

    /// Deletes old dead letters that no group waits for any more.
    async fn drop_old(&self, name: &QueueName, checks: &[[String; 3]]) -> Result<(), StoreError> {
        let mut drops = Vec::new();
        for [sequence, id, queues] in checks {
            let mut waits = false;
            for queue in queues.split(' ') {
                let queue = QueueName::new(queue).map_err(|_| unexpected("sweep"))?;
                let mut command = redis::cmd("HEXISTS");
                command.arg(self.runner.keys.side(&queue)).arg(format!("u:{id}"));
                let shard = shard_of_queue(&queue);
                waits |= self.runner.one(Call::read("sweep", shard, command)).await? == Value::Int(1);
            }
            if !waits {
                drops.push(sequence.clone().into_bytes());
            }
        }
        if !drops.is_empty() {
            self.ask(QueueScript::Tick, name, |_| drops.clone()).await?;
        }
        Ok(())
    }

    /// Whether a queue has a message.
    pub(super) async fn is_there(&self, queue: &QueueName, id: MessageId) -> Result<bool, StoreError> {
        let mut command = redis::cmd("HEXISTS");
        command.arg(self.runner.keys.ids(queue)).arg(id.to_string());
        let shard = shard_of_queue(queue);
        Ok(self.runner.one(Call::read("settle", shard, command)).await? == Value::Int(1))
    }

    /// Finishes what callers have left in a shard: moves, decisions, and moves that their targets still remember. What cannot
    /// be finished does not hold up the rest; the first error is returned.
    pub(super) async fn sweep_moves(&self, left: &Left) -> Result<(), StoreError> {
        let mut swept = Ok(());
        if left.moves {
            swept = swept.and(self.finish_left(left.shard).await);
        }
        if left.decided {
            swept = swept.and(self.tell_decided_in(left.shard).await);
        }
        if left.arrived {
            swept = swept.and(self.forget_arrived(left.shard).await);
        }
        if left.resumed {
            swept = swept.and(self.resume_all_in(left.shard).await);
        }
        swept
    }

    /// Moves that were left `age_ms` ago or earlier, behind a number, and the number to continue with.
    pub(super) async fn due_moves(
        &self,
        shard: Shard,
        age_ms: &str,
        after: &str,
    ) -> Result<(Vec<String>, Option<String>), StoreError> {
        let mut due = self.move_scripts(&name_in(shard)?, &["due", age_ms, after]).await?;
        let (moves, last) = (due.values.texts()?, due.values.text()?);
        Ok((moves, Some(last).filter(|last| !last.is_empty())))
    }

    async fn finish_left(&self, shard: Shard) -> Result<(), StoreError> {
        let (mut finished, mut after) = (Ok(()), "0".to_owned());
        for _ in 0..PAGES_MAX {
            let (moves, last) = self.due_moves(shard, &LEFT_MS.to_string(), &after).await?;
            for moved in moves {
                match self.finish_move(&moved).await {
                    // It waits for a queue that is closed for a copy.
                    Ok(_) | Err(StoreError::Moved(_)) => {}
                    Err(error) => finished = finished.and(Err(error)),
                }
            }
            let Some(last) = last else { break };
            after = last;
        }
        finished
    }

    /// A move that its source has ended is forgotten. One that is under way has its intent there.
    async fn forget_arrived(&self, shard: Shard) -> Result<(), StoreError> {
        let mut command = redis::cmd("HRANDFIELD");
        command.arg(self.runner.keys.arrived(shard)).arg(SWEEP_MAX);
        let value = self.runner.one(Call::read("sweep", shard, command)).await?;
        let moves: Vec<String> = redis::from_redis_value(value).map_err(|_| unexpected("sweep"))?;
        for moved in moves {
            let (source, _) = source_of(&moved)?;
            let at = shard_of_queue(&source);
            let mut command = redis::cmd("ZSCORE");
            command.arg(self.runner.keys.moves(at)).arg(&moved);
            if self.runner.one(Call::read("sweep", at, command)).await? == Value::Nil {
                self.end_move(&source, &name_in(shard)?, &moved).await?;
            }
        }
        Ok(())
    }
}

/// A name whose keys are in this shard. There need not be such a queue.
pub(super) fn name_in(shard: Shard) -> Result<QueueName, StoreError> {
    let mut names = (0_u32..1_000_000).filter_map(|number| QueueName::new(number.to_string()).ok());
    names.find(|name| shard_of_queue(name) == shard).ok_or_else(|| unexpected("sweep"))
}

impl Intent {
    fn read(mut row: Fields) -> Result<Self, StoreError> {
        Ok(Self {
            name: row.text()?,
            target: row.parsed()?,
            kind: row.text()?,
            old_id: row.text()?,
            message: row.bytes()?,
            body: row.bytes()?,
            entry: row.text()?,
        })
    }
}
