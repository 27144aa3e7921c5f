//! Queues that are closed for a copy to another store, or from one.

use hapax_core::copy::pause_for_copy;
use hapax_core::{AdminError, CopyState, QueueName, QueuePause, StoreError};

use super::Queues;
use super::call::Answer;
use crate::copy;
use crate::keys::SHARDS;
use crate::run::Call;

/// An age that every move has.
const EVERYTHING: &str = "-9000000000000";
/// How often a queue is closed again because its pause was changed meanwhile.
const TRIES_MAX: usize = 10;

/// A pause as the scripts keep it.
fn stored(pause: Option<&QueuePause>) -> String {
    pause.map_or_else(String::new, |pause| {
        format!("{} {}", pause.since_ms, serde_json::to_string(pause).expect("a pause is plain data"))
    })
}

impl Queues {
    pub(super) async fn set_copy(
        &self,
        name: &QueueName,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        let _ticket = self.asking.begin();
        let closes = matches!(state, Some(CopyState::To { .. }));
        if closes {
            // What is on its way arrives while both ends are open.
            self.finish_moves_of(name).await?;
        }
        let before = self.change_copy(name, state, by).await?;
        self.waiters.freed(name.as_str());
        if !closes {
            return Ok(());
        }
        if let Some(from) = self.running_redrive(name).await? {
            self.change_copy(name, before.and_then(|pause| pause.copy), by).await?;
            return Err(AdminError::RedriveRunning(from));
        }
        self.finish_moves_of(name).await?;
        Ok(())
    }

    /// Sets why a queue is closed; gives its pause until now.
    async fn change_copy(
        &self,
        name: &QueueName,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<Option<QueuePause>, AdminError> {
        for _ in 0..TRIES_MAX {
            let (now_ms, raw, before) = self.read_pause(name).await?;
            let pause = pause_for_copy(before.clone(), state.clone(), now_ms, by);
            let (pause, why) = (stored(pause.as_ref()), state.as_ref().map(copy::stored).unwrap_or_default());
            let args = [why.as_bytes(), raw.as_bytes(), b"0", by.as_bytes(), pause.as_bytes()];
            let Answer { status, .. } = self.configure(name, "copy", args).await?;
            if status == "done" {
                return Ok(before);
            }
        }
        let problem = format!("queue {name} is paused and resumed all the time; try again");
        Err(StoreError::Unavailable(problem).into())
    }

    /// The time, and the pause of a queue, also as it is kept.
    async fn read_pause(&self, name: &QueueName) -> Result<(u64, String, Option<QueuePause>), StoreError> {
        let mut answer = self.configure(name, "get", [b"", b"", b"0", b"", b""]).await?;
        let raw = answer.values.peek_text(4)?;
        Ok((answer.now_ms, raw, super::admin::info(name, &mut answer.values)?.0.paused))
    }

    /// Ends the moves from and to a queue.
    async fn finish_moves_of(&self, name: &QueueName) -> Result<(), StoreError> {
        let shards: Vec<usize> = (0..SHARDS).collect();
        let count = |shard: &usize| {
            let mut command = redis::cmd("ZCARD");
            command.arg(self.runner.keys.moves(*shard));
            Call::read("copy", *shard, command)
        };
        let counts = crate::ledger::whole(self.runner.run(shards.iter().map(count).collect()).await)?;
        for (shard, count) in shards.into_iter().zip(counts) {
            if count == redis::Value::Int(0) {
                continue;
            }
            // All of that shard: to know their targets, they have to be read.
            let mut after = "0".to_owned();
            loop {
                let (moves, last) = self.due_moves(shard, EVERYTHING, &after).await?;
                for moved in moves {
                    self.finish_move(&moved).await.map_err(|error| {
                        StoreError::Unavailable(format!(
                            "queue {name} cannot be closed while messages are on their way: {error}"
                        ))
                    })?;
                }
                let Some(last) = last else { break };
                after = last;
            }
        }
        Ok(())
    }
}
