//! Counters of queues. The scripts of several queues are sent together, so that many queues cost few round trips.

use std::collections::BTreeSet;
use std::sync::Arc;

use hapax_core::store::QueueTotals;
use hapax_core::{GroupId, QueueName, QueueStats, StoreError};

use super::call::{Answer, Fields};
use super::{CHANGES_MAX, Known, Queues, TOGETHER_MAX};
use crate::error::unexpected;
use crate::script::QueueScript;

/// Halted groups that one call counts or lists.
const HALTED_MAX: usize = 10_000;

/// An answer of the script.
struct Count {
    values: Fields,
    halted: u64,
    oldest_sent_ms: Option<u64>,
    halted_groups: Vec<String>,
}

impl Count {
    fn read(mut answer: Answer) -> Result<Self, StoreError> {
        let (values, halted) = (answer.values.fields()?, answer.values.number()?);
        let oldest_sent_ms = u64::try_from(answer.values.signed()?).ok();
        Ok(Self { values, halted, oldest_sent_ms, halted_groups: answer.values.texts()? })
    }

    fn stats(mut self) -> Result<QueueStats, StoreError> {
        let mut next = || self.values.number();
        let (_messages, bytes, _noisy, _letters) = (next()?, next()?, next()?, next()?);
        let (ready, delayed, in_flight, parked) = (next()?, next()?, next()?, next()?);
        let totals = QueueTotals {
            sent: next()?,
            duplicates: next()?,
            delivered: next()?,
            acked: next()?,
            retried: next()?,
            deferred: next()?,
            expired: next()?,
            dead: next()?,
            stale: next()?,
            retention_dropped: next()?,
            damaged: next()?,
        };
        let (halted, oldest_sent_ms) = (self.halted, self.oldest_sent_ms);
        Ok(QueueStats { ready, delayed, in_flight, parked, halted, bytes, oldest_sent_ms, totals })
    }
}

impl Queues {
    pub(super) async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        self.count_one(name).await?.stats()
    }

    /// The counters of several queues; `None` for one that does not exist.
    pub(super) async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        let mut all = Vec::with_capacity(names.len());
        for together in names.chunks(TOGETHER_MAX) {
            for count in self.count(together).await? {
                all.push(count.map(Count::stats).transpose()?);
            }
        }
        Ok(all)
    }

    pub(super) async fn halted(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        let groups: BTreeSet<GroupId> = self
            .count_one(name)
            .await?
            .halted_groups
            .into_iter()
            .map(|group| group.parse().map_err(|_| unexpected("stats")))
            .collect::<Result<_, _>>()?;
        Ok(groups.into_iter().collect())
    }

    async fn count_one(&self, name: &QueueName) -> Result<Count, StoreError> {
        let count = self.count(std::slice::from_ref(name)).await?.pop().flatten();
        count.ok_or_else(|| StoreError::NoSuchQueue(name.clone()))
    }

    /// Runs the scripts of all these queues, again for those whose settings were changed meanwhile.
    async fn count(&self, names: &[QueueName]) -> Result<Vec<Option<Count>>, StoreError> {
        let _ticket = self.asking.begin();
        let halted_max = HALTED_MAX.to_string();
        let mut counts: Vec<Option<Count>> = names.iter().map(|_| None).collect();
        let mut open: Vec<usize> = (0..names.len()).collect();
        for _ in 0..CHANGES_MAX {
            let asked: Vec<&QueueName> = open.iter().map(|at| &names[*at]).collect();
            let mut there: Vec<(usize, Arc<Known>)> = Vec::with_capacity(open.len());
            for (at, known) in open.drain(..).zip(self.known_of(&asked).await) {
                there.extend(known?.map(|known| (at, known)));
            }
            let call = |(_, known): &(usize, Arc<Known>)| {
                self.call(QueueScript::Stats, known, &[halted_max.as_bytes()])
            };
            let answers = self.runner.run(there.iter().map(call).collect()).await;
            for ((at, _), value) in there.into_iter().zip(answers) {
                let name = &names[at];
                let answer = Answer::read(QueueScript::Stats.name(), value?)?.check_open(name)?;
                match answer.status.as_str() {
                    "missing" => self.forget(name),
                    "changed" => {
                        self.forget(name);
                        open.push(at);
                    }
                    _ => {
                        self.after(name, &answer).await;
                        counts[at] = Some(Count::read(answer)?);
                    }
                }
            }
            if open.is_empty() {
                return Ok(counts);
            }
        }
        let name = &names[open[0]];
        Err(StoreError::Unavailable(format!("the settings of queue {name} change all the time; try again")))
    }
}
