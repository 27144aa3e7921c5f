//! The processes of a run, and the proxies between them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hapax::{Hapax, OnDoubt};
use hapax_faults::{FaultProxy, Process, Protocol};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::fault::{LeaderLoss, Side, WireFault};
use crate::handler::UserHandler;
use crate::own_store::OwnStore;
use crate::preload::Preload;
use crate::recorder::EFFECTS;
use crate::roles::{self, ROLE_COMMAND, ROLE_VARIABLE, Role, Site};
use crate::workload::{HANDLER, Shape, Workload};

/// Worker processes. While one is stopped or dead, the other takes over.
const WORKERS: usize = 2;

/// Tells a handler where its effects are counted.
const SINK_VARIABLE: &str = "HAPAX_VERIFY_SINK";
/// How long a process is started again that ends at once.
const START: Duration = Duration::from_secs(30);
/// How long a store may take to accept a connection.
const REACHED: Duration = Duration::from_secs(10);
/// How long the user's failover command may take.
const COMMAND_MAX: Duration = Duration::from_mins(3);
/// Size of files while the disk is full: beyond their first page, no write succeeds.
const FILE_BYTES_MAX: u64 = 4_096;

/// What a run consists of.
pub struct Cluster {
    program: PathBuf,
    store_url: String,
    site: Site,
    /// One server, or two over a store that several processes can share.
    servers: Vec<Process>,
    addresses: Vec<SocketAddr>,
    /// Before the server: the producer's way, the workers', and the relay's.
    proxies: [FaultProxy; 3],
    /// Before the store, where there is one that frames can be seen of.
    store_proxy: Option<StoreProxy>,
    /// `hapax proxy` before the upstream of a workload, and the callers' way to it.
    http_proxies: Vec<HttpProxy>,
    /// The user's handler, and the processes that run it.
    handler: Option<UserHandler>,
    handlers: Vec<Process>,
    /// The user's command for a failover of the store.
    failover_command: Option<String>,
    /// Breaks disk and clock, if there is a library for it.
    preload: Option<Preload>,
    /// The store's server, if this run has started it.
    own_store: Option<OwnStore>,
    pub recorder: Process,
    pub producer: Option<Process>,
    pub workers: Vec<Process>,
    /// The relay, if a workload has one.
    pub relay: Option<Process>,
}

impl Cluster {
    /// Starts the servers and the recorder.
    pub fn start(
        program: &Path,
        store_url: &str,
        own_store: Option<OwnStore>,
        servers: usize,
        mut site: Site,
        user: UserPrograms,
        history: &Path,
    ) -> anyhow::Result<Self> {
        let recorder = start(program, &Role::Recorder(history.to_owned(), user.upstream))?;
        let ready = recorder.find_line("at ").map_err(|_| {
            std::thread::sleep(Duration::from_millis(50));
            anyhow::anyhow!(
                "the recorder does not start: {}",
                last_lines(recorder.log().trim_start_matches("error: "))
            )
        })?;
        site.recorder = ready.trim_start_matches("at ").trim().parse().with_context(|| ready.clone())?;
        let folder = site.bank.parent().context("the run has a folder")?;
        let preload = user.preload.map(|library| Preload::new(&library, folder)).transpose()?;
        let store_proxy = StoreProxy::start(store_url)?;
        let store_url = store_proxy.as_ref().map_or(store_url, |proxy| proxy.url.as_str()).to_owned();
        site.database = store_url.starts_with("postgres").then(|| store_url.clone());
        let mut cluster = Self {
            program: program.to_owned(),
            store_url,
            store_proxy,
            own_store,
            preload,
            http_proxies: Vec::new(),
            handler: user.handler,
            failover_command: user.failover_command,
            handlers: Vec::new(),
            proxies: [proxy()?, proxy()?, proxy()?],
            site,
            servers: Vec::new(),
            addresses: Vec::new(),
            recorder,
            producer: None,
            workers: Vec::new(),
            relay: None,
        };
        for _ in 0..servers {
            let (server, address) = cluster.start_server()?;
            cluster.servers.push(server);
            cluster.addresses.push(address);
        }
        cluster.retarget();
        Ok(cluster)
    }

    /// Starts the producer and the workers.
    pub fn start_clients(&mut self) -> anyhow::Result<()> {
        self.workers = (0..WORKERS).map(|number| self.start_worker(number)).collect::<anyhow::Result<_>>()?;
        if self.has_relay() {
            self.relay = Some(self.start_relay()?);
        }
        for workload in self.site.workloads.clone() {
            if let Some(Workload { name, shape: Shape::Proxy(on_doubt), .. }) = Workload::named(&workload) {
                let callers = proxy()?;
                self.site.proxies.push((workload, callers.address()));
                let (process, address) = start_until_it_runs(|| self.start_proxy(name, on_doubt))?;
                callers.retarget(address);
                self.http_proxies.push(HttpProxy { name, on_doubt, callers, process });
            }
        }
        if let Some(handler) = &self.handler {
            self.handlers =
                (0..WORKERS).map(|_| self.start_handler(handler)).collect::<anyhow::Result<_>>()?;
        }
        self.producer = Some(self.start_producer()?);
        Ok(())
    }

    /// Whether a workload has a relay.
    pub fn has_relay(&self) -> bool {
        self.site
            .workloads
            .iter()
            .any(|name| Workload::named(name).is_some_and(|of| of.shape == Shape::Outbox))
    }

    /// Kills the relay.
    pub fn stop_relay(&mut self) {
        if let Some(mut relay) = self.relay.take() {
            relay.kill();
        }
    }

    /// Kills the relay and starts another.
    pub fn restart_relay(&mut self) -> anyhow::Result<()> {
        self.stop_relay();
        self.relay = Some(self.start_relay()?);
        Ok(())
    }

    /// Whether a workload goes through `hapax proxy`.
    pub fn has_proxies(&self) -> bool {
        !self.http_proxies.is_empty()
    }

    /// Kills the proxies and starts them again, on other ports.
    pub fn restart_proxies(&mut self) -> anyhow::Result<()> {
        for number in 0..self.http_proxies.len() {
            let proxy = &mut self.http_proxies[number];
            proxy.process.kill();
            let (name, on_doubt) = (proxy.name, proxy.on_doubt);
            let (process, address) = start_until_it_runs(|| self.start_proxy(name, on_doubt))?;
            let proxy = &mut self.http_proxies[number];
            proxy.process = process;
            proxy.callers.retarget(address);
        }
        Ok(())
    }

    /// A connection to a server that is not broken by the proxies.
    pub async fn connect(&self) -> anyhow::Result<Hapax> {
        // An operator is patient: a store that was just cut off may need seconds.
        roles::connect_with(&format!("http://{}", self.addresses[0]), Duration::from_secs(15)).await
    }

    pub fn site(&self) -> &Site {
        &self.site
    }

    /// The proxy of a side, if it has one; the first of those of callers.
    pub fn proxy(&self, side: Side) -> Option<&FaultProxy> {
        self.proxies_of(side).into_iter().next()
    }

    /// The proxies of a side.
    pub fn proxies_of(&self, side: Side) -> Vec<&FaultProxy> {
        match side {
            Side::Store => self.store_proxy.iter().map(|proxy| &proxy.proxy).collect(),
            Side::Callers => self.http_proxies.iter().map(|proxy| &proxy.callers).collect(),
            side => vec![&self.proxies[side as usize]],
        }
    }

    /// Whether a fault on the wire can be injected.
    pub fn has_proxy(&self, wire: &WireFault) -> bool {
        let speaks = |proxy: &StoreProxy| wire.protocol().is_none_or(|protocol| protocol == proxy.protocol);
        match wire.side {
            Side::Store => self.store_proxy.as_ref().is_some_and(speaks),
            Side::Callers => self.has_proxies(),
            Side::Producers | Side::Workers | Side::Relays => true,
        }
    }

    /// Whether the store's server was started by this run.
    pub fn owns_store(&self) -> bool {
        self.own_store.is_some()
    }

    /// Whether the store is in the server's own files.
    pub fn is_in_files(&self) -> bool {
        self.store_folder().is_some()
    }

    fn store_folder(&self) -> Option<&Path> {
        self.store_url.strip_prefix("embedded:").map(Path::new)
    }

    /// What breaks disk and clock.
    pub fn preload(&self) -> Option<&Preload> {
        self.preload.as_ref()
    }

    /// Kills the first server, takes away what its store has not synced, and starts it again.
    pub fn cut_power(&mut self) -> anyhow::Result<()> {
        self.servers[0].kill();
        if let (Some(preload), Some(folder)) = (&self.preload, self.store_folder()) {
            preload.cut_power(folder)?;
        }
        self.restart_server(0)
    }

    /// Kills the store's server and starts it again, on the same data.
    pub fn restart_store(&self) -> anyhow::Result<()> {
        self.own_store.as_ref().map_or(Ok(()), OwnStore::restart)
    }

    /// Whether the store's servers were started by this run, and one can take over from another.
    pub fn has_replicas(&self) -> bool {
        self.own_store.as_ref().is_some_and(OwnStore::has_replicas)
    }

    /// Whether a failover can be caused in this way.
    pub fn can_fail_over(&self, loss: LeaderLoss) -> bool {
        if loss == LeaderLoss::Command { self.failover_command.is_some() } else { self.has_replicas() }
    }

    /// Lets a replica take over from the store's leader; returns when the old leader has returned.
    pub fn fail_over(&self, loss: LeaderLoss, random: &mut fastrand::Rng) -> anyhow::Result<()> {
        if loss == LeaderLoss::Command {
            return self.failover_command.as_deref().map_or(Ok(()), run_command);
        }
        let moved = |leader: SocketAddr| {
            if let Some(proxy) = &self.store_proxy {
                proxy.proxy.retarget(leader);
                // Connections to a leader that does not answer would wait for their timeout.
                proxy.proxy.cut_all();
            }
        };
        self.own_store.as_ref().map_or(Ok(()), |store| store.fail_over(loss, random, moved))
    }

    /// Cuts a replica of the store off for a while.
    pub fn cut_replica(&self, random: &mut fastrand::Rng) -> anyhow::Result<()> {
        self.own_store.as_ref().map_or(Ok(()), |store| store.cut_replica(random))
    }

    /// Lets no file of the first server grow, or lets them grow again.
    pub fn limit_files(&self, on: bool) -> anyhow::Result<()> {
        let pid = i32::try_from(self.servers[0].id()).ok().and_then(Pid::from_raw);
        let limit = Rlimit { current: on.then_some(FILE_BYTES_MAX), maximum: None };
        prlimit(pid, Resource::Fsize, limit).context("a server's limit of the size of files")?;
        Ok(())
    }

    pub fn servers(&self) -> usize {
        self.servers.len()
    }

    /// Kills a server and starts it again, on another port.
    pub fn restart_server(&mut self, number: usize) -> anyhow::Result<()> {
        self.servers[number].kill();
        let (server, address) = start_until_it_runs(|| self.start_server())?;
        self.servers[number] = server;
        self.addresses[number] = address;
        self.retarget();
        Ok(())
    }

    /// Kills a worker and starts another.
    pub fn restart_worker(&mut self, number: usize) -> anyhow::Result<()> {
        self.workers[number].kill();
        self.workers[number] = self.start_worker(number)?;
        // A machine's crash ends both.
        if let Some(handler) = self.handlers.get_mut(number) {
            handler.kill();
            let handler = self.handler.as_ref().context("there is a handler")?;
            self.handlers[number] = self.start_handler(handler)?;
        }
        Ok(())
    }

    /// Starts workers, handlers and relay again, with leases and timeouts that suit a slow machine.
    pub fn calm_down(&mut self) -> anyhow::Result<()> {
        self.site.calm = true;
        for number in 0..self.workers.len() {
            self.restart_worker(number)?;
        }
        if self.relay.is_some() { self.restart_relay() } else { Ok(()) }
    }

    /// Stops a worker (SIGSTOP), or lets it continue (SIGCONT).
    pub fn pause_worker(&self, number: usize, on: bool) {
        for worker in self.workers.get(number).into_iter().chain(self.handlers.get(number)) {
            if on { worker.pause() } else { worker.resume() }
        }
    }

    /// Kills a worker.
    pub fn remove_worker(&mut self, number: usize) {
        self.workers.remove(number).kill();
        if number < self.handlers.len() {
            self.handlers.remove(number).kill();
        }
    }

    /// Starts one more worker.
    pub fn add_worker(&mut self) -> anyhow::Result<()> {
        let worker = self.start_worker(self.workers.len())?;
        self.workers.push(worker);
        if let Some(handler) = &self.handler {
            let handler = self.start_handler(handler)?;
            self.handlers.push(handler);
        }
        Ok(())
    }

    /// Kills the producer and starts another; returns when it has begun. What it resumes is an effect of this kill, and not of the
    /// next fault.
    pub fn restart_producer(&mut self) -> anyhow::Result<()> {
        self.stop_producer();
        let producer = self.start_producer()?;
        // If it ended by itself, that is told later.
        let _ = producer.find_line(roles::READY);
        self.producer = Some(producer);
        Ok(())
    }

    /// Kills the producer.
    pub fn stop_producer(&mut self) {
        if let Some(mut producer) = self.producer.take() {
            producer.kill();
        }
    }

    /// Fails if a process has ended by itself: faults kill processes, and nothing else may.
    pub fn check_alive(&mut self) -> anyhow::Result<()> {
        let named = self
            .servers
            .iter_mut()
            .map(|process| ("a server", process))
            .chain(self.workers.iter_mut().map(|process| ("a worker", process)))
            .chain(self.producer.iter_mut().map(|process| ("the producer", process)))
            .chain(self.relay.iter_mut().map(|process| ("the relay", process)))
            .chain(self.http_proxies.iter_mut().map(|proxy| ("a proxy", &mut proxy.process)))
            .chain(self.handlers.iter_mut().map(|process| ("a worker of your handler", process)))
            .chain([("the recorder", &mut self.recorder)]);
        for (name, process) in named {
            if let Some(status) = process.ended() {
                bail!("{name} ended by itself ({status}): {}", last_lines(&process.log()));
            }
        }
        Ok(())
    }

    /// What the user's program of a workload is called, and the last lines that were logged about it.
    pub fn says_of_user_program(&self, workload: &str) -> (&'static str, String) {
        let (what, log) = match workload {
            HANDLER => ("your handler", self.handlers.iter().map(Process::log).collect()),
            _ => ("your service", self.recorder.log()),
        };
        let says = last_lines(&log);
        (what, if says.is_empty() { "nothing".to_owned() } else { says })
    }

    fn retarget(&self) {
        let last = self.addresses.len() - 1;
        self.proxies[Side::Producers as usize].retarget(self.addresses[0]);
        self.proxies[Side::Workers as usize].retarget(self.addresses[last]);
        self.proxies[Side::Relays as usize].retarget(self.addresses[last]);
    }

    fn start_server(&self) -> anyhow::Result<(Process, SocketAddr)> {
        let mut command = command_of(&self.program, &Role::Server(self.store_url.clone()))?;
        if let (Some(preload), Some(folder)) = (&self.preload, self.store_folder()) {
            preload.load_into_server(&mut command, folder)?;
        }
        let server = Process::start(&mut command).with_context(|| self.program.display().to_string())?;
        let api = server.find_line("  API   ").map_err(|_| {
            // Its standard error ends after its standard output.
            std::thread::sleep(Duration::from_millis(50));
            let log = server.log();
            anyhow::anyhow!("a server does not start: {}", last_lines(log.trim_start_matches("error: ")))
        })?;
        let address = api.trim().trim_start_matches("API").trim().trim_start_matches("http://");
        let address = address.parse().with_context(|| api.clone())?;
        Ok((server, address))
    }

    fn start_client(&self, role: &Role, number: usize) -> anyhow::Result<Process> {
        let mut command = command_of(&self.program, role)?;
        if let Some(preload) = &self.preload {
            preload.load_into_client(&mut command, number);
        }
        Process::start(&mut command).with_context(|| self.program.display().to_string())
    }

    fn start_worker(&self, number: usize) -> anyhow::Result<Process> {
        self.start_client(&Role::Worker(self.site_through(Side::Workers)), number)
    }

    fn start_producer(&self) -> anyhow::Result<Process> {
        self.start_client(&Role::Producer(self.site_through(Side::Producers)), 0)
    }

    fn start_relay(&self) -> anyhow::Result<Process> {
        self.start_client(&Role::Relay(self.site_through(Side::Relays)), 1)
    }

    fn start_proxy(&self, name: &str, on_doubt: OnDoubt) -> anyhow::Result<(Process, SocketAddr)> {
        let ledger = format!("http://{}", self.proxies[Side::Workers as usize].address());
        let args = [
            ("--upstream", format!("http://{}", self.site.recorder)),
            ("--ledger", ledger),
            ("--listen", "127.0.0.1:0".to_owned()),
            ("--admin-listen", "none".to_owned()),
            ("--name", format!("hapax-verify-{}-{name}", self.site.run)),
            ("--on-doubt", if on_doubt == OnDoubt::Park { "park" } else { "retry" }.to_owned()),
            ("--lease", "1s".to_owned()),
            ("--wait", "500ms".to_owned()),
            ("--log-level", "error".to_owned()),
        ];
        let args = args.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
        let process = start(&self.program, &Role::Proxy(args))?;
        let line = process.find_line("  Proxy ").map_err(|_| {
            std::thread::sleep(Duration::from_millis(50));
            anyhow::anyhow!("a proxy does not start: {}", last_lines(&process.log()))
        })?;
        let address = line.split_once("://").and_then(|(_, rest)| rest.split(' ').next());
        let address = address.and_then(|address| address.parse().ok()).with_context(|| line.clone())?;
        Ok((process, address))
    }

    fn start_handler(&self, handler: &UserHandler) -> anyhow::Result<Process> {
        let command = match handler {
            UserHandler::Command(command) => command,
            UserHandler::Program(program, arguments) => {
                let role = Role::OwnHandler(self.site_through(Side::Workers));
                let mut command = without_settings(program);
                command.args(arguments).env(ROLE_VARIABLE, serde_json::to_string(&role)?);
                return Process::start(&mut command).with_context(|| program.display().to_string());
            }
        };
        let workload = Workload::named(HANDLER).expect("it is listed");
        let endpoint = format!("http://{}", self.proxies[Side::Workers as usize].address());
        let queue = workload.queue(&self.site.run).to_string();
        let lease = format!("{}s", self.site.lease().as_secs());
        let args = ["--endpoint", &endpoint, "--concurrency", "3", "--idempotent-by-derived-key", "--quiet"];
        let args = args.into_iter().chain(["--lease", &lease]);
        let args = args.chain([queue.as_str(), "--", "sh", "-c", command]).map(str::to_owned);
        let role = Role::Handler(args.collect());
        let sink = format!("http://{}{EFFECTS}{HANDLER}", self.site.recorder);
        Process::start(command_of(&self.program, &role)?.env(SINK_VARIABLE, sink))
            .with_context(|| self.program.display().to_string())
    }

    fn site_through(&self, side: Side) -> Site {
        let endpoint = format!("http://{}", self.proxies[side as usize].address());
        Site { endpoint, ..self.site.clone() }
    }
}

/// Programs of the user's that take part.
pub struct UserPrograms {
    pub handler: Option<UserHandler>,
    /// A service behind the proxy.
    pub upstream: Option<String>,
    /// A command for the shell that makes a replica of the store take over.
    pub failover_command: Option<String>,
    /// A library that is loaded into processes of the run.
    pub preload: Option<PathBuf>,
}

/// `hapax proxy` before the upstream of a workload.
struct HttpProxy {
    name: &'static str,
    on_doubt: OnDoubt,
    /// The callers' way to it, whose address stays.
    callers: FaultProxy,
    process: Process,
}

/// A proxy between the store and the processes that use it.
struct StoreProxy {
    proxy: FaultProxy,
    protocol: Protocol,
    /// The store's URL through the proxy.
    url: String,
}

impl StoreProxy {
    /// `None` for a store in this machine's files, for one that is several servers, and for one that is elsewhere: its
    /// connections may be encrypted, and then no frame can be seen.
    fn start(url: &str) -> anyhow::Result<Option<Self>> {
        let Some((protocol, target, through)) = through_proxy(url) else { return Ok(None) };
        // Else a server would say that the proxy has closed its connection.
        std::net::TcpStream::connect_timeout(&target, REACHED)
            .with_context(|| format!("the store {} cannot be reached", hapax::without_secrets(url)))?;
        let proxy = FaultProxy::start(target, protocol)?;
        let url = through.replace(PROXY_ADDRESS, &proxy.address().to_string());
        Ok(Some(Self { proxy, protocol, url }))
    }
}

/// Stands for the proxy's address in a URL.
const PROXY_ADDRESS: &str = "\0";

/// The protocol and the address of a store on loopback, and its URL with a mark in place of the address.
fn through_proxy(url: &str) -> Option<(Protocol, SocketAddr, String)> {
    let (scheme, rest) = url.split_once("://")?;
    let (protocol, port) = match scheme {
        "postgres" | "postgresql" => (Protocol::Postgres, 5432),
        "redis" => (Protocol::Redis, 6379),
        _ => return None,
    };
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let (user, host) = authority.rsplit_once('@').map_or(("", authority), |(user, host)| (user, host));
    let address = match host {
        "localhost" | "127.0.0.1" => SocketAddr::from(([127, 0, 0, 1], port)),
        host => host.replace("localhost:", "127.0.0.1:").parse().ok()?,
    };
    let at = if user.is_empty() { "" } else { "@" };
    let mut through = format!("{scheme}://{user}{at}{PROXY_ADDRESS}{path}");
    if protocol == Protocol::Postgres && !path.contains("sslmode=") {
        through.push_str(if path.contains('?') { "&sslmode=disable" } else { "?sslmode=disable" });
    }
    let plain = !path.contains("sslmode=") || path.contains("sslmode=disable");
    (address.ip().is_loopback() && plain).then_some((protocol, address, through))
}

/// A proxy whose target is not known yet.
fn proxy() -> anyhow::Result<FaultProxy> {
    Ok(FaultProxy::start(SocketAddr::from(([127, 0, 0, 1], 9)), Protocol::Http)?)
}

/// Starts a process as a supervisor does: it may end at once because its store was cut off a moment before.
fn start_until_it_runs<T>(start: impl Fn() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let end = Instant::now() + START;
    loop {
        match start() {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(200)),
            started => return started,
        }
    }
}

/// Runs a command of the user's to its end. What it says on its standard error is seen by the user.
fn run_command(command: &str) -> anyhow::Result<()> {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut shell = shell.spawn().context("the shell for the failover command")?;
    let end = Instant::now() + COMMAND_MAX;
    loop {
        match shell.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => bail!("the failover command {command:?} failed ({status}); nothing was injected"),
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            None => {
                let _ = (shell.kill(), shell.wait());
                bail!("the failover command {command:?} did not end in {} s", COMMAND_MAX.as_secs());
            }
        }
    }
}

/// Starts a child process of this program.
pub fn start(program: &Path, role: &Role) -> anyhow::Result<Process> {
    Process::start(&mut command_of(program, role)?).with_context(|| program.display().to_string())
}

fn command_of(program: &Path, role: &Role) -> anyhow::Result<Command> {
    let mut command = without_settings(program);
    command.arg(ROLE_COMMAND).env(ROLE_VARIABLE, serde_json::to_string(role)?);
    Ok(command)
}

/// A program without the settings of Hapax in this process's environment.
fn without_settings(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("HAPAX_") && name != hapax::core::mutant::VARIABLE {
            command.env_remove(name);
        }
    }
    command
}

pub(crate) fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_store_on_loopback_gets_a_proxy() {
        let through = |url| through_proxy(url).map(|(_, address, through)| (address.port(), through));
        let expected = (5433, "postgres://ann:pw@\0/shop?sslmode=disable".to_owned());
        assert_eq!(through("postgres://ann:pw@127.0.0.1:5433/shop"), Some(expected));
        let expected = (6379, "redis://\0/5?hapax_durability=local".to_owned());
        assert_eq!(through("redis://localhost/5?hapax_durability=local"), Some(expected));
        for none in [
            "embedded:./data",
            "postgres://db.example/shop",
            "postgres://127.0.0.1/shop?sslmode=require",
            "redis+cluster://127.0.0.1:7000,127.0.0.1:7001",
            "rediss://127.0.0.1",
        ] {
            assert_eq!(through(none), None, "{none}");
        }
    }
}
