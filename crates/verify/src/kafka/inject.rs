//! What is done for each fault of a run on Kafka.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use hapax_faults::{Action, FaultHandle, Match};

use super::fault::{KafkaFault, KafkaWireFault};
use super::processes::{PROCESSORS, Processes};
use super::site::TRANSACTION;
use crate::fault::{PART, PARTITIONED, WINDOW};
use crate::recorder::Reporter;
use crate::workload::{Shape, Workload};

/// How long a kill waits for an open transaction, or for one more control in the same process.
const WAIT: Duration = Duration::from_secs(1);
/// How long a kill waits for a control that was not hit yet. A dead member keeps its partitions until its session ends.
const AIM: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(5);
/// Beyond the time that a pause has to last.
const MARGIN: Duration = Duration::from_millis(1_500);
/// How long a zombie runs after it was woken.
const AWAKE: Duration = Duration::from_secs(2);
/// How long one more member is there.
const JOINED: Duration = Duration::from_secs(3);
/// How long the request that is to be late, and the end of the next transaction, are waited for. A killed librdkafka leaves a
/// transaction and a session behind, which its next start waits for.
const ENDS: Duration = Duration::from_secs(15);
/// How long commits stay unanswered: past the time of a transaction, and of the last request in it.
const UNANSWERED: Duration = Duration::from_secs(12);
/// Frames hit in each part of a window.
const HITS_PER_PART: u64 = 2;
/// Faults after which a run gives up on a control, and is invalid.
const OWED_MAX: u32 = 12;

/// What a fault hit.
pub struct Hit {
    /// Frames, or processes.
    pub hits: u64,
    /// Transactions of the processor that were open at the moment.
    pub transactions: u64,
}

/// Aims faults at the controls: a run whose controls were never hit in the middle of their work shows nothing.
pub struct Injector<'a> {
    reporter: &'a Reporter,
    workloads: &'a [Workload],
    /// Naive controls that were not killed in their gap yet.
    missing: BTreeSet<&'static str>,
    owed: u32,
}

impl<'a> Injector<'a> {
    pub fn new(reporter: &'a Reporter, workloads: &'a [Workload]) -> Self {
        let naive = |shape| matches!(shape, Shape::ProduceCommit | Shape::CommitProduce);
        let missing = workloads.iter().filter(|workload| naive(workload.shape)).map(|workload| workload.name);
        Self { reporter, workloads, missing: missing.collect(), owed: 0 }
    }

    /// The fault that a run still needs, so that its controls can be caught.
    pub async fn owed(&mut self, wanted: &[KafkaFault]) -> anyhow::Result<Option<KafkaFault>> {
        self.owed += 1;
        if self.owed > OWED_MAX {
            return Ok(None);
        }
        let late = self.late_control().await?.map(|_| KafkaFault::LateEnd);
        let kill = (!self.missing.is_empty()).then_some(KafkaFault::KillProcessor);
        Ok([kill, late].into_iter().flatten().find(|fault| wanted.contains(fault)))
    }

    /// The control with librdkafka's transactions, until it was caught.
    async fn late_control(&self) -> anyhow::Result<Option<&'a Workload>> {
        let control = self.workloads.iter().find(|workload| workload.shape == Shape::Librdkafka);
        let Some(control) = control else { return Ok(None) };
        let counts = self.reporter.counts().await?;
        let doubles = counts.per_workload.get(control.name).map_or(0, |progress| progress.doubles);
        Ok((doubles == 0).then_some(control))
    }

    /// Injects a fault.
    pub async fn inject(
        &mut self,
        all: &mut Processes,
        fault: KafkaFault,
        random: &mut fastrand::Rng,
    ) -> anyhow::Result<Hit> {
        let place = random.usize(..all.processors.len());
        match fault {
            KafkaFault::KillProcessor => self.kill(all, place).await,
            KafkaFault::CrashBroker => {
                let transactions = self.open(all).await?.len() as u64;
                all.broker.restart()?;
                Ok(Hit { hits: 1, transactions })
            }
            KafkaFault::PauseBroker => {
                let transactions = self.open(all).await?.len() as u64;
                all.broker.pause(true);
                tokio::time::sleep(PARTITIONED).await;
                all.broker.pause(false);
                Ok(Hit { hits: 1, transactions })
            }
            KafkaFault::Pause => {
                let transactions = self.pause(all, place).await?;
                tokio::time::sleep(longer_than_all(all)).await;
                all.processors[place].process.resume();
                Ok(Hit { hits: 1, transactions })
            }
            KafkaFault::Zombie => {
                let transactions = self.pause(all, place).await?;
                let successor = all.processor(all.processors[place].number)?;
                tokio::time::sleep(longer_than_all(all)).await;
                let mut zombie = std::mem::replace(&mut all.processors[place], successor).process;
                zombie.resume();
                tokio::time::sleep(AWAKE).await;
                zombie.kill();
                Ok(Hit { hits: 1, transactions })
            }
            KafkaFault::Join => {
                let mut joined = all.processor(PROCESSORS)?;
                tokio::time::sleep(JOINED).await;
                let transactions = u64::from(self.is_open(joined.process.id()).await?);
                joined.process.kill();
                Ok(Hit { hits: 1, transactions })
            }
            KafkaFault::Partition => {
                let transactions = self.open(all).await?.len() as u64;
                all.broker.proxy().partition(true);
                tokio::time::sleep(PARTITIONED).await;
                all.broker.proxy().partition(false);
                Ok(Hit { hits: 1, transactions })
            }
            KafkaFault::LateEnd => {
                let hits = if let Some(control) = self.late_control().await? {
                    delay_a_commit(all, &all.site.transactional_id(control, 0)).await
                } else {
                    let number = all.processors[place].number;
                    delay_an_end(all, &all.site.transactional_id(&self.workloads[0], number)).await
                };
                Ok(Hit { hits, transactions: 0 })
            }
            KafkaFault::Unanswered => {
                let id = all.site.transactional_id(&self.workloads[0], all.processors[place].number);
                Ok(Hit { hits: self.leave_unanswered(all, &id).await?, transactions: 0 })
            }
            KafkaFault::Wire(wire) => Ok(Hit { hits: break_wire(all, wire).await, transactions: 0 }),
        }
    }

    /// Kills a processor in which controls that were not hit before are between their two steps; else one with an open transaction.
    async fn kill(&mut self, all: &mut Processes, place: usize) -> anyhow::Result<Hit> {
        let place = if self.missing.is_empty() {
            self.with_transaction(all, place).await?
        } else {
            self.reporter.aim(self.missing.iter().copied()).await?;
            self.with_controls(all, place).await?
        };
        let id = all.restart_processor(place)?;
        self.reporter.aim([]).await?;
        // What is in its gap in a dead process stays there.
        let hit = self.missing_in(id).await?;
        self.missing.retain(|name| !hit.contains(name));
        Ok(Hit { hits: 1, transactions: u64::from(self.is_open(id).await?) })
    }

    /// Waits for a processor with an open transaction.
    async fn with_transaction(&self, all: &Processes, place: usize) -> anyhow::Result<usize> {
        let end = Instant::now() + WAIT;
        while Instant::now() < end {
            let open = self.open(all).await?;
            let found = all.processors.iter().position(|processor| open.contains(&processor.process.id()));
            if let Some(found) = found {
                return Ok(found);
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(place)
    }

    /// Waits for a processor in which all controls that were not hit yet are in their gap; after a while one will do.
    async fn with_controls(&self, all: &Processes, place: usize) -> anyhow::Result<usize> {
        let start = Instant::now();
        loop {
            let mut most = (0, place);
            for (place, processor) in all.processors.iter().enumerate() {
                let count = self.missing_in(processor.process.id()).await?.len();
                if count > most.0 {
                    most = (count, place);
                }
            }
            let waited = start.elapsed();
            if most.0 == self.missing.len() || most.0 > 0 && waited > WAIT || waited > AIM {
                return Ok(most.1);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The controls that were not hit yet and are in their gap in a process.
    async fn missing_in(&self, process: u32) -> anyhow::Result<Vec<&'static str>> {
        let who = Reporter::name("processor", process);
        let gaps = self.reporter.gaps().await?;
        let is_there = |name: &&str| gaps.iter().any(|(by, of)| *by == who && of == name);
        Ok(self.missing.iter().copied().filter(is_there).collect())
    }

    /// Drops the answers to all commits of this id until one is of unknown outcome to its sender. Returns how many were dropped.
    async fn leave_unanswered(&self, all: &Processes, id: &str) -> anyhow::Result<u64> {
        let unknown = async || anyhow::Ok(self.reporter.counts().await?.caused.transactions_unknown);
        let (before, end) = (unknown().await?, Instant::now() + UNANSWERED);
        let answers = Match::answer_to(format!("EndTxn {id} commit"));
        let dropped = all.broker.proxy().inject(answers, Action::Drop);
        while Instant::now() < end && unknown().await? == before {
            tokio::time::sleep(POLL).await;
        }
        dropped.remove();
        Ok(dropped.count())
    }

    /// Stops a processor, preferably with an open transaction; returns how many it has.
    async fn pause(&self, all: &Processes, place: usize) -> anyhow::Result<u64> {
        let (process, end) = (&all.processors[place].process, Instant::now() + WAIT);
        while Instant::now() < end && !self.is_open(process.id()).await? {
            tokio::time::sleep(POLL).await;
        }
        process.pause();
        Ok(u64::from(self.is_open(process.id()).await?))
    }

    async fn is_open(&self, process: u32) -> anyhow::Result<bool> {
        let open = (Reporter::name("processor", process), self.workloads[0].name.to_owned());
        Ok(self.reporter.gaps().await?.contains(&open))
    }

    /// The processors that have an open transaction.
    async fn open(&self, all: &Processes) -> anyhow::Result<Vec<u32>> {
        let mut open = Vec::new();
        for processor in &all.processors {
            if self.is_open(processor.process.id()).await? {
                open.push(processor.process.id());
            }
        }
        Ok(open)
    }
}

fn longer_than_all(all: &Processes) -> Duration {
    Duration::from_millis(all.site.session_ms).max(TRANSACTION) + MARGIN
}

/// Hits requests for a while. Returns how many.
async fn break_wire(all: &Processes, wire: KafkaWireFault) -> u64 {
    let (end, mut hits) = (Instant::now() + WINDOW, 0);
    while Instant::now() < end {
        let injected =
            all.broker.proxy().inject(wire.on(&all.site.prefix()), wire.action).times(HITS_PER_PART);
        tokio::time::sleep(PART).await;
        injected.remove();
        hits += injected.count();
    }
    hits
}

/// Holds a request that ends a transaction of this id. Its sender repeats it, and begins the next transaction; when the request
/// that ends that one is on its way, the broker gets the held one first. Returns 1 if that happened.
async fn delay_an_end(all: &Processes, id: &str) -> u64 {
    let proxy = all.broker.proxy();
    let label = format!("EndTxn {id} ");
    let first = proxy.inject(Match::request(label.as_str()), Action::Hold).times(1);
    // The first of the requests that follow is the repeated one.
    let second = proxy.inject(Match::request(label.as_str()), Action::Hold).after(1).times(1);
    release_in_order(all, label, &first, &second).await
}

/// The same with a commit, and an abort as the end of the next transaction: a client that can confuse the two shows what it aborts.
async fn delay_a_commit(all: &Processes, id: &str) -> u64 {
    let proxy = all.broker.proxy();
    let label = |end: &str| format!("EndTxn {id} {end}");
    let first = proxy.inject(Match::request(label("commit")), Action::Hold).times(1);
    // An abort before the commit is another transaction's.
    if !reached(&first, 1).await {
        first.release();
        return 0;
    }
    let second = proxy.inject(Match::request(label("abort")), Action::Hold).times(1);
    release_in_order(all, label(""), &first, &second).await
}

/// Lets the first of two held requests pass when the second one is held, and the second one when the first is answered.
async fn release_in_order(all: &Processes, label: String, first: &FaultHandle, second: &FaultHandle) -> u64 {
    let answers = all.broker.proxy().inject(Match::answer_to(label), Action::Delay(Duration::ZERO));
    let is_held = reached(first, 1).await && reached(second, 1).await;
    let answered = answers.count();
    first.release();
    if is_held {
        reached(&answers, answered + 1).await;
    }
    for injected in [second, &answers] {
        injected.release();
    }
    u64::from(is_held)
}

/// Waits until this many frames were hit, but not for long.
async fn reached(injected: &FaultHandle, count: u64) -> bool {
    let end = Instant::now() + ENDS;
    while injected.count() < count && Instant::now() < end {
        tokio::time::sleep(POLL).await;
    }
    injected.count() >= count
}
