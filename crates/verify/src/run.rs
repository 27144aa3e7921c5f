//! A run from its start to its report.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hapax::core::EntryFilter;
use hapax::{Hapax, StoreUrl};
use hapax_faults::{Action, FaultHandle, FaultProxy};

use crate::aim::Aim;
use crate::check::Findings;
use crate::cluster::{Cluster, UserPrograms, start};
use crate::drain;
use crate::fault::{
    self, ClockStep, DiskFault, Fault, HITS_PER_PART, LeaderLoss, PART, Schedule, Side, Target, WINDOW,
    WireFault,
};
use crate::handler::UserHandler;
use crate::history::{self, Act, Caused};
use crate::operator::{self, Doubts};
use crate::orders;
use crate::own_store::OwnStore;
use crate::preload::Disk;
use crate::recorder::{PROXIED, Reporter};
use crate::report::{Report, ReportedFault, RunFacts};
use crate::roles::{self, Role, Site};
use crate::worker::transfers;
use crate::workload::{HANDLER, Workload};

/// The name of this process in the history.
pub(crate) const DIRECTOR: &str = "director";

/// How long a program of the user's may take until its first effect.
const USER_PROGRAM: Duration = Duration::from_secs(30);

/// What to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// The program whose child processes are started: this one.
    pub program: PathBuf,
    /// The store; a temporary folder when `None`.
    pub store: Option<String>,
    /// A ledger in another store.
    pub ledger: Option<String>,
    /// The workloads; controls are added.
    pub workloads: Vec<Workload>,
    /// The faults of a round; not empty.
    pub faults: Vec<Fault>,
    /// How long faults are injected.
    pub time: Duration,
    /// The seed of the schedule.
    pub seed: u64,
    /// The user's own handler, for the workload `handler`.
    pub handler: Option<UserHandler>,
    /// The user's own service behind the proxy: `http://HOST:PORT/PATH`.
    pub upstream: Option<String>,
    /// A command for the shell that makes a replica of the store take over, and ends when it has.
    pub failover_command: Option<String>,
    /// A library with faults of disk and clock, built from `preload/faults.c`.
    pub preload: Option<PathBuf>,
    /// Uses a store that holds other queues.
    pub shared_store: bool,
    /// Keeps the history in this file.
    pub history: Option<PathBuf>,
    /// The command that repeats the run, for the report.
    pub command: String,
}

/// What a run tells while it runs.
#[derive(Debug)]
pub enum Progress<'a> {
    /// A sentence.
    Phase(String),
    /// A fault is over.
    Fault(&'a ReportedFault),
}

/// Runs everything; an error means that there is no verdict.
pub async fn run(options: &Options, tell: &mut dyn FnMut(Progress<'_>)) -> anyhow::Result<Report> {
    let folder = tempfile::Builder::new().prefix("hapax-verify-").tempdir()?;
    let started = Instant::now();
    let own_store = options.store.as_deref().and_then(OwnStore::start).transpose()?;
    let store_url = match (&own_store, &options.store) {
        (Some(own), _) => own.url()?,
        (None, Some(url)) => url.clone(),
        (None, None) => format!("embedded:{}", folder.path().join("store").display()),
    };
    let parsed: StoreUrl = store_url.parse()?;
    let servers = match parsed {
        StoreUrl::Embedded(_) => 1,
        StoreUrl::Postgres(_) | StoreUrl::Redis(_) => 2,
        _ => bail!("verify starts servers itself; name a store: embedded:PATH, postgres://… or redis://…"),
    };
    let history = options.history.clone().unwrap_or_else(|| folder.path().join("history.jsonl"));
    let names: Vec<String> = options.workloads.iter().map(|workload| workload.name.to_owned()).collect();
    let site = Site {
        endpoint: String::new(),
        recorder: ([127, 0, 0, 1], 0).into(),
        run: format!("{:08x}", fastrand::u32(..)),
        workloads: names.clone(),
        ledger: options.ledger.clone(),
        bank: folder.path().join("bank.db"),
        proxies: Vec::new(),
        database: None,
        calm: false,
    };
    let user = UserPrograms {
        handler: options.handler.clone(),
        upstream: options.upstream.clone(),
        failover_command: options.failover_command.clone(),
        preload: options.preload.clone(),
    };
    tell(Progress::Phase(format!("starting {servers} server(s) over {parsed}")));
    let mut cluster = Cluster::start(&options.program, &store_url, own_store, servers, site, user, &history)?;
    let hapax = cluster.connect().await?;
    refuse_used_store(&hapax, options).await?;
    let store_name = store_name(&hapax).await;
    let injected = storm(options, &mut cluster, &hapax, tell).await;
    cluster.stop_relay();
    let cleaned = roles::repeat(|| clean_up(&cluster, &options.workloads)).await;
    let faults = injected?;
    cleaned.context("the run's queues are left behind in the store")?;

    tell(Progress::Phase("checking the history".into()));
    let findings = check(&options.program, &history, &names)?;
    let events = history::read(&history)?;
    let facts = RunFacts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store: parsed.to_string(),
        store_name,
        ledger: options.ledger.as_deref().map(hapax::without_secrets),
        seed: options.seed,
        seconds: started.elapsed().as_secs_f64(),
        command: options.command.clone(),
    };
    Ok(Report::new(facts, &options.workloads, findings, faults, &events))
}

/// The store's name for itself, with its server's version.
async fn store_name(hapax: &Hapax) -> String {
    let facts = hapax.store().examine().await.unwrap_or_default().facts;
    let version = ["database_version", "server_version"].iter().find_map(|name| facts.get(*name)?.as_str());
    let name = hapax.store().capabilities().name;
    version.map_or(name.clone(), |version| format!("{name} {version}"))
}

/// A run fills queues and ledger, and kills servers: a store in use is not the place for it.
async fn refuse_used_store(hapax: &Hapax, options: &Options) -> anyhow::Result<()> {
    if options.shared_store {
        return Ok(());
    }
    let queues = hapax.store().queues().await?;
    let entries = hapax.ledger().entries(EntryFilter { limit: 1, ..EntryFilter::default() }).await?;
    if let Some(queue) = queues.first() {
        bail!(
            "the store holds {} queue(s), for example {}; use an empty store, or --shared-store",
            queues.len(),
            queue.name
        );
    }
    if !entries.items.is_empty() {
        bail!("the store's ledger holds entries; use an empty store, or --shared-store");
    }
    Ok(())
}

/// Starts the workloads, injects faults, and waits until everything is settled.
async fn storm(
    options: &Options,
    cluster: &mut Cluster,
    hapax: &Hapax,
    tell: &mut dyn FnMut(Progress<'_>),
) -> anyhow::Result<Vec<ReportedFault>> {
    let run = cluster.site().run.clone();
    operator::create_queues(hapax, &options.workloads, &run).await?;
    transfers::create(cluster.site()).await?;
    orders::create(cluster.site()).await?;
    cluster.start_clients()?;
    let reporter = Reporter::new(cluster.site().recorder, DIRECTOR);
    wait_for_load(cluster, &reporter).await?;
    wait_for_user_programs(cluster, &reporter, options).await?;
    tell(Progress::Phase(format!(
        "injecting faults for {} s, seed {}",
        options.time.as_secs(),
        options.seed
    )));
    let round = faults_on(cluster, &options.faults, &options.workloads)?;
    let mut schedule = Schedule::new(options.seed, round.clone());
    let end = Instant::now() + options.time;
    let (mut faults, mut doubts) = (Vec::new(), Doubts::default());
    let mut aim = Aim::new(&reporter, &options.workloads);
    loop {
        let fault = match schedule.next_fault() {
            fault if Instant::now() < end => fault,
            // What a short run has not shown yet.
            _ => match aim.owed_fault(&round, &options.workloads).await? {
                Some(fault) => fault,
                None => break,
            },
        };
        let number = faults.len() as u32 + 1;
        let before = reporter.counts().await?;
        let at = Instant::now();
        reporter.report("", vec![Act::FaultBegins { number, fault: fault.to_string() }]).await?;
        let hits = match inject(cluster, fault, &mut schedule, &mut aim).await {
            // A command of the user's may fail once without an end of the run; then it hit nothing.
            Err(error) if fault == Fault::Failover(LeaderLoss::Command) => {
                tell(Progress::Phase(format!("{error:#}")));
                0
            }
            hits => hits?,
        };
        tokio::time::sleep(fault::aftermath(fault)).await;
        let after = reporter.counts().await?;
        let caused = after.caused.since(&before.caused);
        reporter.report("", vec![Act::FaultEnds { number, hits, caused }]).await?;
        let bit = did_bite(fault, hits, &caused);
        let faulted = if matches!(fault, Fault::Wire(_) | Fault::KillRelay(_) | Fault::OpenOrder) {
            hits
        } else {
            caused.faulted()
        };
        let ms = at.elapsed().as_millis() as u64;
        let injected = ReportedFault { number, fault: fault.to_string(), ms, hits, caused, bit, faulted };
        tell(Progress::Fault(&injected));
        faults.push(injected);
        cluster.check_alive()?;
        if number.is_multiple_of(3) {
            let open = !number.is_multiple_of(2);
            reporter.open_accounts(open).await?;
            // A store that is cut off at this moment is asked again the next time.
            let _ = visit(cluster, &reporter, &options.workloads, &mut doubts, open).await;
        }
    }
    tell(Progress::Phase("waiting until everything is settled".into()));
    drain::drain(cluster, &reporter, &options.workloads, &mut doubts, tell).await?;
    Ok(faults)
}

/// What an operator does while the run goes on: decides about doubts, and lets what was rejected run again. Else they would
/// all be waiting at the end.
async fn visit(
    cluster: &Cluster,
    reporter: &Reporter,
    workloads: &[Workload],
    doubts: &mut Doubts,
    accounts_are_open: bool,
) -> anyhow::Result<()> {
    let hapax = cluster.connect().await?;
    for workload in workloads {
        doubts.resolve(&hapax, cluster, reporter, workload).await?;
    }
    if accounts_are_open {
        operator::retry_rejected(&hapax, reporter, workloads, &cluster.site().run).await?;
    }
    Ok(())
}

/// The faults that can be injected here, and that can change something in a workload: those between servers and store need a proxy
/// there.
fn faults_on(cluster: &Cluster, wanted: &[Fault], workloads: &[Workload]) -> anyhow::Result<Vec<Fault>> {
    let ours = || workloads.iter().filter(|workload| !workload.is_control());
    let possible = |fault: &Fault| match fault {
        Fault::Wire(wire) => cluster.has_proxy(wire),
        Fault::Kill(Target::Store) => cluster.owns_store() && !cluster.has_replicas(),
        Fault::Failover(loss) => cluster.can_fail_over(*loss),
        Fault::ReplicaCut => cluster.has_replicas(),
        Fault::Kill(Target::Proxy) => cluster.has_proxies(),
        Fault::KillRelay(_) => cluster.has_relay(),
        Fault::OpenOrder => {
            let in_postgres = cluster.site().database.is_some();
            cluster.has_relay() && in_postgres && cluster.proxy(Side::Store).is_some()
        }
        Fault::Partition => cluster.proxy(Side::Store).is_some(),
        Fault::DiskFull => cluster.is_in_files(),
        Fault::Disk(_) => cluster.is_in_files() && cluster.preload().is_some(),
        Fault::ClockStep => cluster.preload().is_some(),
        Fault::Kill(_) | Fault::Pause | Fault::Scale => true,
    };
    let reaches = |fault: &Fault| fault.is_for_controls() || ours().any(|workload| fault.reaches(workload));
    let faults: Vec<Fault> =
        wanted.iter().copied().filter(|fault| possible(fault) && reaches(fault)).collect();
    if faults.is_empty() {
        bail!("none of these faults can be injected into this store and reach these workloads");
    }
    Ok(faults)
}

async fn wait_for_load(cluster: &mut Cluster, reporter: &Reporter) -> anyhow::Result<()> {
    let deadline = Instant::now() + Duration::from_mins(3);
    while reporter.counts().await?.moved < 20 {
        cluster.check_alive()?;
        if Instant::now() > deadline {
            bail!("the workloads do not begin");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// A program of the user's that has no effect without faults has none with them, and the run would say so after minutes.
async fn wait_for_user_programs(
    cluster: &mut Cluster,
    reporter: &Reporter,
    options: &Options,
) -> anyhow::Result<()> {
    let has = |name: &str| options.workloads.iter().any(|workload| workload.name == name);
    let needed = [(HANDLER, options.handler.is_some()), (PROXIED, options.upstream.is_some())];
    let deadline = Instant::now() + USER_PROGRAM;
    for (name, _) in needed.into_iter().filter(|(name, is_given)| *is_given && has(name)) {
        while reporter.counts().await?.per_workload.get(name).is_none_or(|progress| progress.moved == 0) {
            cluster.check_alive()?;
            if Instant::now() > deadline {
                let seconds = USER_PROGRAM.as_secs();
                let (what, says) = cluster.says_of_user_program(name);
                bail!(
                    "{what} had no effect in {seconds} s, without any fault; the last that it said: {says}"
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}

/// Injects a fault; returns what it hit: frames, or processes.
async fn inject(
    cluster: &mut Cluster,
    fault: Fault,
    schedule: &mut Schedule,
    aim: &mut Aim<'_>,
) -> anyhow::Result<u64> {
    let random = schedule.random();
    match fault {
        Fault::Kill(Target::Producer) => cluster.restart_producer()?,
        Fault::Kill(Target::Worker) => aim.kill_worker(cluster, random).await?,
        Fault::Kill(Target::Server) => {
            let number = random.usize(..cluster.servers());
            aim.kill_server(cluster, number).await?;
        }
        Fault::Pause => {
            let (worker, time) = (aim.worker_to_pause(cluster, random).await?, fault::pause(random));
            cluster.pause_worker(worker, true);
            tokio::time::sleep(time).await;
            cluster.pause_worker(worker, false);
        }
        Fault::Kill(Target::Store) => cluster.restart_store()?,
        Fault::Failover(loss) => cluster.fail_over(loss, random)?,
        Fault::ReplicaCut => cluster.cut_replica(random)?,
        Fault::Kill(Target::Proxy) => cluster.restart_proxies()?,
        Fault::KillRelay(point) => return aim.kill_relay(cluster, point).await,
        Fault::OpenOrder => return aim.keep_order_open(cluster).await,
        Fault::Scale => {
            let worker = random.usize(..cluster.workers.len());
            cluster.remove_worker(worker);
            tokio::time::sleep(fault::SCALED).await;
            cluster.add_worker()?;
            cluster.add_worker()?;
            tokio::time::sleep(fault::SCALED).await;
            cluster.remove_worker(0);
        }
        Fault::Partition => {
            let Some(proxy) = cluster.proxy(Side::Store) else { return Ok(0) };
            proxy.partition(true);
            tokio::time::sleep(fault::PARTITIONED).await;
            proxy.partition(false);
        }
        Fault::DiskFull => {
            cluster.limit_files(true)?;
            tokio::time::sleep(fault::FULL).await;
            cluster.limit_files(false)?;
            cluster.restart_server(0)?;
        }
        Fault::Disk(disk) => break_disk(cluster, disk, aim).await?,
        Fault::ClockStep => {
            let Some(preload) = cluster.preload() else { return Ok(0) };
            for _ in 0..fault::CLOCK_STEPS {
                preload.step_clocks(ClockStep::random(random))?;
                tokio::time::sleep(fault::CLOCK_STEP).await;
            }
        }
        Fault::Wire(wire) => return Ok(break_wire(cluster, wire).await),
    }
    Ok(1)
}

async fn break_disk(cluster: &mut Cluster, fault: DiskFault, aim: &Aim<'_>) -> anyhow::Result<()> {
    let (disk, time) = match fault {
        DiskFault::SyncFails => (Disk::SyncFails, fault::FULL),
        DiskFault::WriteFails => (Disk::WriteFails, fault::FULL),
        DiskFault::Slow => (Disk::SyncIsSlow, fault::SLOW),
        DiskFault::PowerCut => return aim.cut_power(cluster).await,
    };
    let set = |cluster: &Cluster, disk| cluster.preload().map_or(Ok(()), |preload| preload.set_disk(disk));
    set(cluster, disk)?;
    tokio::time::sleep(time).await;
    set(cluster, Disk::Works)?;
    if fault == DiskFault::Slow { Ok(()) } else { cluster.restart_server(0) }
}

async fn break_wire(cluster: &Cluster, wire: WireFault) -> u64 {
    let (end, mut hits) = (Instant::now() + WINDOW, 0);
    let proxies = cluster.proxies_of(wire.side);
    while Instant::now() < end {
        let inject = |proxy: &&FaultProxy| proxy.inject(wire.on(), wire.action).times(HITS_PER_PART);
        let injected: Vec<FaultHandle> = proxies.iter().map(inject).collect();
        tokio::time::sleep(PART).await;
        for injected in injected {
            injected.remove();
            hits += injected.count();
        }
    }
    hits
}

/// Whether a fault changed something.
fn did_bite(fault: Fault, hits: u64, caused: &Caused) -> bool {
    let duplicated = matches!(fault, Fault::Wire(wire) if wire.action == Action::Duplicate);
    // Nothing may depend on a wall clock: all that a step can show is that processes saw another time. What else happens then is of
    // another fault.
    if fault == Fault::ClockStep {
        return caused.clocks_stepped > 0;
    }
    // A relay is killed when a request or response of its own is under way: that one is lost.
    // An order that stays open counts only if others have overtaken it.
    let certain = matches!(fault, Fault::KillRelay(_) | Fault::OpenOrder);
    hits > 0 && (certain || caused.bit() || duplicated && caused.replayed + caused.known > 0)
}

/// Checks the history in a process of its own.
pub(crate) fn check(program: &Path, history: &Path, names: &[String]) -> anyhow::Result<Vec<Findings>> {
    let checker = start(program, &Role::Checker(history.to_owned(), names.to_vec()))?;
    let (status, lines, log) = checker.finish();
    if !status.success() {
        bail!("the checker failed ({status}): {log}");
    }
    Ok(serde_json::from_str(lines.last().context("the checker printed nothing")?)?)
}

/// Deletes the run's queues. Its ledger entries expire; those of a temporary store go with it.
async fn clean_up(cluster: &Cluster, workloads: &[Workload]) -> anyhow::Result<()> {
    transfers::drop_bank(cluster.site()).await?;
    orders::clean_up(cluster.site()).await?;
    let hapax = cluster.connect().await?;
    let run = &cluster.site().run;
    for workload in workloads.iter().filter(|workload| workload.has_queue()) {
        for queue in [Some(workload.queue(run)), workload.dead_queue(run)].into_iter().flatten() {
            match hapax.store().delete_queue(&queue).await {
                Ok(()) | Err(hapax::StoreError::NoSuchQueue(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::ROUND;

    #[test]
    fn a_fault_bites_only_if_it_changed_something() {
        let nothing = Caused::default();
        let duplicate =
            |fault: &Fault| matches!(fault, Fault::Wire(wire) if wire.action == Action::Duplicate);
        for fault in ROUND {
            // To kill a relay in the middle of a request is a change by itself, and so is an order that was overtaken.
            let certain = matches!(fault, Fault::KillRelay(_) | Fault::OpenOrder);
            assert_eq!(did_bite(fault, 1, &nothing), certain, "{fault}");
            let lost = Caused { sends_unknown: 1, ..nothing };
            assert_eq!(did_bite(fault, 1, &lost), fault != Fault::ClockStep, "{fault}");
            assert!(!did_bite(fault, 0, &lost), "{fault}: it hit nothing, so it was not the cause");
            // Producers send some payments twice on purpose.
            let replayed = Caused { replayed: 1, ..nothing };
            assert_eq!(did_bite(fault, 1, &replayed), certain || duplicate(&fault), "{fault}");
            let stepped = Caused { clocks_stepped: 1, ..nothing };
            assert_eq!(did_bite(fault, 1, &stepped), certain || fault == Fault::ClockStep, "{fault}");
        }
    }
}
