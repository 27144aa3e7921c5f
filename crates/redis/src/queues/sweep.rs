//! Background work of the queues: what time causes, and what callers that died have left.

use std::sync::Weak;
use std::time::Duration;

use hapax_core::{QueueName, StoreError};
use redis::Value;

use super::Queues;
use super::call::Answer;
use crate::error::unexpected;
use crate::keys::{SHARDS, Shard};
use crate::ledger::whole;
use crate::run::Call;
use crate::script::QueueScript;

/// Time between two sweeps.
const EVERY: Duration = Duration::from_secs(1);
/// Steps of one visit of a queue, and of a redrive.
const STEPS_MAX: usize = 50;

/// Sweeps until the store is dropped or closed.
pub(crate) async fn run(queues: Weak<Queues>) {
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(queues) = queues.upgrade() else { return };
        if let Err(error) = queues.sweep_all().await {
            tracing::debug!(%error, "the sweep of the queues failed; it is tried again");
        }
    }
}

/// What is in a shard beside its queues.
#[derive(Debug, Clone, Copy)]
pub(super) struct Left {
    pub shard: Shard,
    pub moves: bool,
    pub decided: bool,
    pub arrived: bool,
    pub resumed: bool,
    redrives: bool,
}

impl Queues {
    /// The names of all queues.
    pub(super) async fn names(&self) -> Result<Vec<QueueName>, StoreError> {
        self.names_in(&(0..SHARDS).collect::<Vec<_>>()).await
    }

    async fn names_in(&self, shards: &[Shard]) -> Result<Vec<QueueName>, StoreError> {
        let list = |shard: &Shard| {
            let mut command = redis::cmd("ZRANGE");
            command.arg(self.runner.keys.queues(*shard)).arg(0).arg(-1);
            Call::read("queues", *shard, command)
        };
        let mut names = Vec::new();
        for value in whole(self.runner.run(shards.iter().map(list).collect()).await)? {
            let found: Vec<String> = redis::from_redis_value(value).map_err(|_| unexpected("queues"))?;
            for name in found {
                names.push(QueueName::new(name).map_err(|_| unexpected("queues"))?);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The shards in which there is anything of queues, and whether all could be asked.
    async fn used_shards(&self) -> (Vec<Shard>, Result<(), StoreError>) {
        let keys = &self.runner.keys;
        let look = |shard| {
            let mut command = redis::cmd("EXISTS");
            command.arg(keys.queues(shard)).arg(keys.moves(shard)).arg(keys.decided(shard));
            command.arg(keys.arrived(shard)).arg(keys.redrives(shard)).arg(keys.resumed(shard));
            Call::read("sweep", shard, command)
        };
        let (mut used, mut asked) = (Vec::new(), Ok(()));
        for (shard, found) in self.runner.run((0..SHARDS).map(look).collect()).await.into_iter().enumerate() {
            match found {
                Ok(Value::Int(0)) => {}
                Ok(_) => used.push(shard),
                Err(error) => asked = asked.and(Err(error)),
            }
        }
        (used, asked)
    }

    /// Visits all queues.
    pub(super) async fn sweep_all(&self) -> Result<(), StoreError> {
        let _ticket = self.asking.begin();
        // A node that cannot be reached does not keep the shards of the others from being swept. The first error is returned.
        let (shards, mut swept) = self.used_shards().await;
        let left = self.left_in(&shards).await?;
        for left in &left {
            swept = swept.and(self.sweep_moves(left).await);
        }
        let names = self.names_in(&shards).await?;
        let mut queues = Vec::with_capacity(names.len());
        for known in self.known_of(&names.iter().collect::<Vec<_>>()).await {
            match known {
                Ok(known) => queues.extend(known),
                Err(error) => swept = swept.and(Err(error)),
            }
        }
        let ticks = queues.iter().map(|known| self.call(QueueScript::Tick, known, &[])).collect();
        for (known, answer) in queues.iter().zip(self.runner.run(ticks).await) {
            swept = swept.and(self.ticked(&known.name, answer).await);
        }
        for left in left.iter().filter(|left| left.redrives) {
            swept = swept.and(self.sweep_redrives(left.shard, STEPS_MAX).await);
        }
        swept
    }

    /// Does what a tick of a queue has left to its caller.
    async fn ticked(&self, name: &QueueName, value: Result<Value, StoreError>) -> Result<(), StoreError> {
        let mut answer = Answer::read("sweep", value?)?;
        match answer.status.as_str() {
            "missing" => self.forget(name),
            "changed" => {
                self.forget(name);
                self.sweep(name).await?;
            }
            _ => {
                self.after(name, &answer).await;
                if answer.values.number()? == 1 {
                    self.sweep(name).await?;
                }
            }
        }
        Ok(())
    }

    /// What callers may have left in shards.
    async fn left_in(&self, shards: &[Shard]) -> Result<Vec<Left>, StoreError> {
        let keys = &self.runner.keys;
        let look = |shard: &Shard| {
            let exists = |key: String| {
                let mut command = redis::cmd("EXISTS");
                command.arg(key);
                Call::read("sweep", *shard, command)
            };
            let left = [
                keys.moves(*shard),
                keys.decided(*shard),
                keys.arrived(*shard),
                keys.redrives(*shard),
                keys.resumed(*shard),
            ];
            left.map(exists)
        };
        let found = whole(self.runner.run(shards.iter().flat_map(look).collect()).await)?;
        let left = |(shard, found): (&Shard, &[Value])| {
            let is_there = |at: usize| found.get(at) == Some(&Value::Int(1));
            let (moves, decided) = (is_there(0), is_there(1));
            Left {
                shard: *shard,
                moves,
                decided,
                arrived: is_there(2),
                redrives: is_there(3),
                resumed: is_there(4),
            }
        };
        Ok(shards.iter().zip(found.chunks(5)).map(left).collect())
    }

    async fn sweep(&self, name: &QueueName) -> Result<(), StoreError> {
        for _ in 0..STEPS_MAX {
            let mut answer = match self.ask(QueueScript::Tick, name, |_| Vec::new()).await {
                Ok(answer) => answer,
                // It was deleted meanwhile.
                Err(StoreError::NoSuchQueue(_)) => return Ok(()),
                Err(error) => return Err(error),
            };
            self.after(name, &answer).await;
            if answer.values.number()? == 0 {
                break;
            }
        }
        Ok(())
    }
}
