//! The child processes of a run: the same program, told by its arguments what to be.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax::Hapax;
use hapax::client::{Client, Options};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::check;
use crate::history;
use crate::workload::{LEASE_MS, Workload};
use crate::{orders, producer, recorder, worker};

/// The program's first argument for a child process.
pub const ROLE_COMMAND: &str = "__verify";
/// The variable with the [`Role`] in JSON. Not an argument: those can be seen by all, and a URL may hold a password.
pub(crate) const ROLE_VARIABLE: &str = "HAPAX_VERIFY_ROLE";

/// How long a role tries to reach a server that was killed.
const CONNECT: Duration = Duration::from_mins(3);
/// Timeout of a request. Shorter than the default, so that a dropped answer does not stop a run for half a minute.
const REQUEST: Duration = Duration::from_millis(1_500);

/// The lease when no more faults are injected.
const CALM_LEASE: Duration = Duration::from_secs(30);

/// What a child process says when it has begun its work.
pub(crate) const READY: &str = "ready";

/// What a child process is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Role {
    /// A server of the store with this URL: the program's own `serve` command.
    Server(String),
    /// The recorder of this history. It passes what a proxy sends on to this URL, if there is one.
    Recorder(PathBuf, Option<String>),
    /// The checker of this history, for these workloads. It prints findings in JSON.
    Checker(PathBuf, Vec<String>),
    /// A producer.
    Producer(Site),
    /// Workers of all workloads, and the controls.
    Worker(Site),
    /// A proxy before the upstream of a workload: the program's own `proxy` command with these arguments.
    Proxy(Vec<String>),
    /// A worker that runs the user's command: the program's own `work` command with these arguments.
    Handler(Vec<String>),
    /// A worker in the user's own program.
    OwnHandler(Site),
    /// A relay of the outbox, and the control beside it.
    Relay(Site),
    /// A process of a run on Kafka.
    #[cfg(feature = "kafka")]
    Kafka(crate::kafka::KafkaRole),
}

/// What producers and workers have to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Site {
    /// The server, through the fault proxy.
    pub endpoint: String,
    /// The recorder.
    pub recorder: SocketAddr,
    /// The name of the run, which is part of the names of queues.
    pub run: String,
    /// Names of the workloads.
    pub workloads: Vec<String>,
    /// A ledger in another store.
    pub ledger: Option<String>,
    /// The SQLite file of the transactional workload.
    pub bank: PathBuf,
    /// The addresses of proxies, by their workload.
    pub proxies: Vec<(String, SocketAddr)>,
    /// The PostgreSQL store, which then has the bank's table, instead of the file.
    pub database: Option<String>,
    /// No faults are injected any more: leases and timeouts are long, so that a slow machine gets something done within them.
    pub calm: bool,
}

impl Site {
    /// The lease of deliveries and claims.
    pub fn lease(&self) -> Duration {
        if self.calm { CALM_LEASE } else { Duration::from_millis(LEASE_MS) }
    }

    /// The timeout of requests to the server.
    pub fn request_timeout(&self) -> Duration {
        if self.calm { CALM_LEASE / 2 } else { REQUEST }
    }

    fn workloads(&self) -> anyhow::Result<Vec<Workload>> {
        named(&self.workloads)
    }
}

pub(crate) fn named(names: &[String]) -> anyhow::Result<Vec<Workload>> {
    names.iter().map(|name| Workload::named(name).with_context(|| format!("no workload {name}"))).collect()
}

/// Reads this process's role. From now on it dies with its parent, so that no process of a run outlives the run.
pub fn begin() -> anyhow::Result<Role> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let role = std::env::var(ROLE_VARIABLE).context("this command is for `hapax verify` only")?;
    Ok(serde_json::from_str(&role)?)
}

/// Runs a role other than the server's.
pub async fn run(role: Role) -> anyhow::Result<()> {
    match role {
        Role::Server(_) | Role::Proxy(..) | Role::Handler(..) | Role::OwnHandler(_) => {
            bail!("a program runs its own commands")
        }
        Role::Recorder(history, upstream) => {
            recorder::run(&history, upstream.as_deref(), |address| say(&format!("at {address}"))).await
        }
        Role::Checker(history, workloads) => print_findings(&history, &workloads),
        Role::Producer(site) => producer::run(&site, &site.workloads()?).await,
        Role::Relay(site) => orders::run_relay(&site, &site.workloads()?).await,
        Role::Worker(site) => worker::run(&site, &site.workloads()?).await,
        #[cfg(feature = "kafka")]
        Role::Kafka(role) => crate::kafka::run_role(role).await,
    }
}

fn print_findings(history: &Path, workloads: &[String]) -> anyhow::Result<()> {
    let history = history::read(history)?;
    let is_end = |event: &history::Event| matches!(event.event.act, history::Act::Drained { .. });
    if !history.iter().any(is_end) {
        bail!("the history has no end: the run did not list what is left");
    }
    let findings: Vec<_> =
        named(workloads)?.iter().map(|workload| check::check(&history, workload)).collect();
    say(&serde_json::to_string(&findings)?);
    Ok(())
}

/// Writes a whole line at once for the parent.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush());
}

/// Tells the parent that this process has begun its work.
pub fn ready() {
    say(READY);
}

/// Connects to the site's server, which may be down for a moment.
pub async fn connect(site: &Site) -> anyhow::Result<Hapax> {
    connect_with(&site.endpoint, site.request_timeout()).await
}

/// Connects to a server, which may be down for a moment, with this timeout of requests.
pub async fn connect_with(endpoint: &str, timeout: Duration) -> anyhow::Result<Hapax> {
    let connect = || async {
        let options = Options { timeout, connect_timeout: timeout, ..Options::default() };
        anyhow::Ok(Hapax::with_store(Arc::new(Client::connect_with(endpoint, options).await?)))
    };
    repeat(connect).await
}

/// Repeats a call for a while.
pub async fn repeat<T, E: Into<anyhow::Error>, F: Future<Output = Result<T, E>>>(
    mut call: impl FnMut() -> F,
) -> anyhow::Result<T> {
    let end = tokio::time::Instant::now() + CONNECT;
    loop {
        match call().await {
            Ok(done) => return Ok(done),
            Err(error) if tokio::time::Instant::now() > end => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
