//! The processes of a run, and the proxies between them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use hapax::Hapax;
use hapax_faults::{FaultProxy, Process, Protocol};

use crate::fault::Side;
use crate::roles::{self, ROLE_COMMAND, ROLE_VARIABLE, Role, Site};

/// Worker processes. While one is stopped or dead, the other takes over.
const WORKERS: usize = 2;

/// What a run consists of.
pub struct Cluster {
    program: PathBuf,
    store_url: String,
    site: Site,
    /// One server, or two over a store that several processes can share.
    servers: Vec<Process>,
    addresses: Vec<SocketAddr>,
    /// Before the server: the producer's way, and the workers'.
    proxies: [FaultProxy; 2],
    pub recorder: Process,
    pub producer: Option<Process>,
    pub workers: Vec<Process>,
}

impl Cluster {
    /// Starts the servers and the recorder.
    pub fn start(
        program: &Path,
        store_url: &str,
        servers: usize,
        mut site: Site,
        history: &Path,
    ) -> anyhow::Result<Self> {
        let recorder = start(program, &Role::Recorder(history.to_owned()))?;
        site.recorder = recorder.wait_for_prefix("at ").parse()?;
        let mut cluster = Self {
            program: program.to_owned(),
            store_url: store_url.to_owned(),
            proxies: [proxy()?, proxy()?],
            site,
            servers: Vec::new(),
            addresses: Vec::new(),
            recorder,
            producer: None,
            workers: Vec::new(),
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
        self.workers = (0..WORKERS).map(|_| self.start_worker()).collect::<anyhow::Result<_>>()?;
        self.producer = Some(self.start_producer()?);
        Ok(())
    }

    /// A connection to a server that is not broken by the proxies.
    pub async fn connect(&self) -> anyhow::Result<Hapax> {
        roles::connect(&format!("http://{}", self.addresses[0])).await
    }

    pub fn site(&self) -> &Site {
        &self.site
    }

    pub fn proxy(&self, side: Side) -> &FaultProxy {
        &self.proxies[side as usize]
    }

    pub fn servers(&self) -> usize {
        self.servers.len()
    }

    /// Kills a server and starts it again, on another port.
    pub fn restart_server(&mut self, number: usize) -> anyhow::Result<()> {
        self.servers[number].kill();
        let (server, address) = self.start_server()?;
        self.servers[number] = server;
        self.addresses[number] = address;
        self.retarget();
        Ok(())
    }

    /// Kills a worker and starts another.
    pub fn restart_worker(&mut self, number: usize) -> anyhow::Result<()> {
        self.workers[number].kill();
        self.workers[number] = self.start_worker()?;
        Ok(())
    }

    /// Kills the producer and starts another.
    pub fn restart_producer(&mut self) -> anyhow::Result<()> {
        self.stop_producer();
        self.producer = Some(self.start_producer()?);
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
            .chain([("the recorder", &mut self.recorder)]);
        for (name, process) in named {
            if let Some(status) = process.ended() {
                anyhow::bail!("{name} ended by itself ({status}): {}", last_lines(&process.log()));
            }
        }
        Ok(())
    }

    fn retarget(&self) {
        let last = self.addresses.len() - 1;
        self.proxies[Side::Producers as usize].retarget(self.addresses[0]);
        self.proxies[Side::Workers as usize].retarget(self.addresses[last]);
    }

    fn start_server(&self) -> anyhow::Result<(Process, SocketAddr)> {
        let server = start(&self.program, &Role::Server(self.store_url.clone()))?;
        let api = server.find_line("  API   ").map_err(|_| {
            // Its standard error ends after its standard output.
            std::thread::sleep(std::time::Duration::from_millis(50));
            let log = server.log();
            anyhow::anyhow!("a server does not start: {}", last_lines(log.trim_start_matches("error: ")))
        })?;
        let address = api.trim().trim_start_matches("API").trim().trim_start_matches("http://");
        let address = address.parse().with_context(|| api.clone())?;
        Ok((server, address))
    }

    fn start_worker(&self) -> anyhow::Result<Process> {
        let role = Role::Worker(self.site_through(Side::Workers));
        start(&self.program, &role)
    }

    fn start_producer(&self) -> anyhow::Result<Process> {
        start(&self.program, &Role::Producer(self.site_through(Side::Producers)))
    }

    fn site_through(&self, side: Side) -> Site {
        let endpoint = format!("http://{}", self.proxy(side).address());
        Site { endpoint, ..self.site.clone() }
    }
}

/// A proxy whose target is not known yet.
fn proxy() -> anyhow::Result<FaultProxy> {
    Ok(FaultProxy::start(SocketAddr::from(([127, 0, 0, 1], 9)), Protocol::Http)?)
}

/// Starts a child process of this program.
pub fn start(program: &Path, role: &Role) -> anyhow::Result<Process> {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HAPAX_") {
            command.env_remove(name);
        }
    }
    command.arg(ROLE_COMMAND).env(ROLE_VARIABLE, serde_json::to_string(role)?);
    Process::start(&mut command).with_context(|| program.display().to_string())
}

fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}
