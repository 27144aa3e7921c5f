//! A run on Kafka from its start to its report.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hapax_faults::Action;

use super::KafkaOptions;
use super::broker::{Broker, create_topics, delete_topics};
use super::drain::drain;
use super::fault::KafkaFault;
use super::inject::{Hit, Injector};
use super::processes::Processes;
use super::site::KafkaSite;
use crate::fault::Schedule;
use crate::history::{self, Act, Caused};
use crate::recorder::Reporter;
use crate::report::{Report, ReportedFault, RunFacts};
use crate::run::{DIRECTOR, Progress, check};
use crate::workload::{Shape, Workload};

/// How long the first records may take.
const BEGIN: Duration = Duration::from_mins(3);
/// How long a fault waits for records to be shown.
const FLOW: Duration = Duration::from_secs(20);

/// Runs everything; an error means that there is no verdict.
pub async fn run(options: &KafkaOptions, tell: &mut dyn FnMut(Progress<'_>)) -> anyhow::Result<Report> {
    let folder = tempfile::Builder::new().prefix("hapax-verify-").tempdir()?;
    let started = Instant::now();
    tell(Progress::Phase(format!("on {}", options.broker)));
    let broker = Broker::start(&options.broker, options.faults.contains(&KafkaFault::CrashBroker))?;
    let history = options.history.clone().unwrap_or_else(|| folder.path().join("history.jsonl"));
    let names: Vec<String> = options.workloads.iter().map(|workload| workload.name.to_owned()).collect();
    let site = KafkaSite {
        brokers: broker.addresses(),
        proxied: broker.proxy().address().to_string(),
        recorder: ([127, 0, 0, 1], 0).into(),
        run: format!("{:08x}", fastrand::u32(..)),
        workloads: names.clone(),
        session_ms: broker.session_ms(),
    };
    let mut all = Processes::start(&options.program, broker, site, &history)?;
    let cluster = all.broker.cluster();
    let of = |workload| [all.site.input(workload), all.site.output(workload)];
    let topics: Vec<String> = options.workloads.iter().flat_map(of).collect();
    create_topics(&cluster, &topics).await?;
    let injected = storm(options, &mut all, &history, tell).await;
    all.stop_producer();
    all.stop_processors();
    let cleaned = delete_topics(&cluster, &topics).await;
    let faults = injected?;
    cleaned.context("the run's topics are left behind")?;

    tell(Progress::Phase("checking the history".into()));
    let findings = check(&options.program, &history, &names)?;
    let events = history::read(&history)?;
    let facts = RunFacts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store: options.broker.clone(),
        store_name: "Kafka".to_owned(),
        ledger: None,
        seed: options.seed,
        seconds: started.elapsed().as_secs_f64(),
        command: options.command.clone(),
    };
    Ok(Report::new(facts, &options.workloads, findings, faults, &events))
}

/// Starts the processes, injects faults, and waits until everything is read.
async fn storm(
    options: &KafkaOptions,
    all: &mut Processes,
    history: &std::path::Path,
    tell: &mut dyn FnMut(Progress<'_>),
) -> anyhow::Result<Vec<ReportedFault>> {
    let wanted = faults_on(options, all)?;
    all.start_clients()?;
    let reporter = Reporter::new(all.site.recorder, DIRECTOR);
    wait_for_load(options, all, &reporter).await?;
    let (seconds, seed) = (options.time.as_secs(), options.seed);
    tell(Progress::Phase(format!("injecting faults for {seconds} s, seed {seed}")));
    let mut schedule = Schedule::new(options.seed, wanted.clone());
    let mut injector = Injector::new(&reporter, &options.workloads);
    let (end, mut faults) = (Instant::now() + options.time, Vec::new());
    loop {
        let fault = match schedule.next_fault() {
            fault if Instant::now() < end => fault,
            // What a short run has not shown yet of the controls.
            _ => match injector.owed(&wanted).await? {
                Some(fault) => fault,
                None => break,
            },
        };
        wait_for_flow(&reporter, &options.workloads[0]).await?;
        let number = faults.len() as u32 + 1;
        let before = reporter.counts().await?;
        let at = Instant::now();
        reporter.report("", vec![Act::FaultBegins { number, fault: fault.to_string() }]).await?;
        let Hit { hits, transactions } = injector.inject(all, fault, schedule.random()).await?;
        tokio::time::sleep(aftermath(fault)).await;
        let mut caused = reporter.counts().await?.caused.since(&before.caused);
        caused.transactions_hit = transactions;
        reporter.report("", vec![Act::FaultEnds { number, hits, caused }]).await?;
        let bit = did_bite(fault, hits, &caused);
        let faulted = if is_on_wire(fault) { hits } else { caused.faulted() };
        let ms = at.elapsed().as_millis() as u64;
        let injected = ReportedFault { number, fault: fault.to_string(), ms, hits, caused, bit, faulted };
        tell(Progress::Fault(&injected));
        faults.push(injected);
        all.check_alive()?;
    }
    tell(Progress::Phase("waiting until everything is read".into()));
    drain(all, &reporter, &options.workloads, history).await?;
    Ok(faults)
}

/// The faults that can be injected here.
fn faults_on(options: &KafkaOptions, all: &Processes) -> anyhow::Result<Vec<KafkaFault>> {
    let librdkafka = options.workloads.iter().any(|workload| workload.shape == Shape::Librdkafka);
    let possible = |fault: &KafkaFault| match fault {
        KafkaFault::CrashBroker | KafkaFault::PauseBroker => all.broker.is_own(),
        KafkaFault::Wire(wire) => librdkafka || wire.is_ours(),
        _ => true,
    };
    let faults: Vec<KafkaFault> = options.faults.iter().copied().filter(possible).collect();
    if faults.is_empty() {
        bail!("none of these faults can be injected into this broker");
    }
    Ok(faults)
}

/// Waits until every workload has shown something.
async fn wait_for_load(
    options: &KafkaOptions,
    all: &mut Processes,
    reporter: &Reporter,
) -> anyhow::Result<()> {
    let end = Instant::now() + BEGIN;
    loop {
        let counts = reporter.counts().await?;
        let moved = |name: &str| counts.per_workload.get(name).map_or(0, |progress| progress.moved);
        if options.workloads.iter().all(|workload| moved(workload.name) > 0) {
            return Ok(());
        }
        all.check_alive()?;
        if Instant::now() > end {
            bail!("the workloads do not begin");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until records are shown again: a fault that meets a group without members that work hits nothing. A dead member keeps its
/// partitions until its session ends.
async fn wait_for_flow(reporter: &Reporter, ours: &Workload) -> anyhow::Result<()> {
    let moved = async || {
        let counts = reporter.counts().await?;
        anyhow::Ok(counts.per_workload.get(ours.name).map_or(0, |progress| progress.moved))
    };
    let (before, end) = (moved().await?, Instant::now() + FLOW);
    while moved().await? == before && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// How long the effects of a fault are watched after it.
fn aftermath(fault: KafkaFault) -> Duration {
    match fault {
        KafkaFault::CrashBroker | KafkaFault::PauseBroker | KafkaFault::Partition | KafkaFault::LateEnd => {
            Duration::from_secs(2)
        }
        KafkaFault::Wire(wire) if wire.action != Action::Duplicate => Duration::from_secs(2),
        _ => Duration::from_secs(1),
    }
}

fn is_on_wire(fault: KafkaFault) -> bool {
    matches!(fault, KafkaFault::Wire(_) | KafkaFault::LateEnd | KafkaFault::Unanswered)
}

/// Whether a fault changed something. A request that is lost, late or repeated is a change by itself: its sender has to repeat it, or
/// the broker gets it twice.
fn did_bite(fault: KafkaFault, hits: u64, caused: &Caused) -> bool {
    hits > 0 && (is_on_wire(fault) || caused.bit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kafka::{ASKED_FOR, ROUND};

    #[test]
    fn a_fault_bites_only_if_it_changed_something() {
        for fault in ROUND.into_iter().chain(ASKED_FOR) {
            let (nothing, open) = (Caused::default(), Caused { transactions_hit: 1, ..Caused::default() });
            assert_eq!(did_bite(fault, 1, &nothing), is_on_wire(fault), "{fault}");
            assert!(did_bite(fault, 1, &open), "{fault}");
            assert!(!did_bite(fault, 0, &open), "{fault}: it hit nothing");
        }
    }
}
