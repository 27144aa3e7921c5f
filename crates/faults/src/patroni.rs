//! PostgreSQL servers that Patroni keeps: one leads, the other follows, and takes over when the first is gone. With an etcd of
//! one member.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::PostgresServer;
use crate::private_server::{User, Watch, free_port, unprivileged};

const NODES: usize = 2;
/// Time for a start, a failover or the return of a node. Patroni waits for 20 s before it replaces a leader.
const PATIENCE: Duration = Duration::from_mins(3);

/// How the standby follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Replication {
    /// A commit waits for the standby, also while there is none (`synchronous_mode_strict`).
    Synchronous,
    /// A commit does not wait: a failover may lose the last ones.
    Asynchronous,
}

/// Two servers under Patroni. They end with the process, also if that is killed.
///
/// ```no_run
/// use hapax_faults::{PatroniCluster, Replication};
///
/// let cluster = PatroniCluster::start(Replication::Synchronous)?;
/// let dead = cluster.kill_leader();
/// println!("{} leads now", cluster.wait_for_leader()?);
/// cluster.run(dead)?; // it follows the new leader
/// cluster.wait_for_standby()?;
/// # Ok::<(), String>(())
/// ```
pub struct PatroniCluster {
    // In the order in which they are dropped: nodes release what they hold in etcd.
    nodes: Vec<Node>,
    etcd: Option<Watch>,
    folder: TempDir,
    user: Option<User>,
    replication: Replication,
}

struct Node {
    folder: PathBuf,
    api: SocketAddr,
    postgres: SocketAddr,
    watch: Mutex<Option<Watch>>,
}

/// Patroni as a child of a shell that passes signals on, so that it also ends its server. The shell gets its folder.
const PATRONI: &str = r#"patroni "$0/patroni.yml" & pid=$!; echo $pid > "$0/patroni.pid"
    trap 'kill -s TERM $pid; wait $pid; exit' QUIT TERM INT; wait $pid"#;

impl PatroniCluster {
    /// Starts both nodes, and waits until one leads and the other follows.
    ///
    /// # Errors
    /// If a program is not installed or does not start; the text says what to do.
    pub fn start(replication: Replication) -> Result<Self, String> {
        Self::programs()?;
        let user = unprivileged()?;
        let folder = TempDir::with_prefix("hapax-patroni-").map_err(|error| error.to_string())?;
        let own = |path: &Path| match user {
            Some((uid, gid)) => chown(path, Some(uid), Some(gid)).map_err(|error| error.to_string()),
            None => Ok(()),
        };
        own(folder.path())?;
        let (client, peer) = (free_port(), free_port());
        let etcd = folder.path().join("etcd");
        fs::create_dir(&etcd).map_err(|error| error.to_string())?;
        own(&etcd)?;
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let args = [
            format!("--data-dir={}", etcd.join("data").display()),
            "--unsafe-no-fsync".to_owned(),
            format!("--listen-client-urls={}", url(client)),
            format!("--advertise-client-urls={}", url(client)),
            format!("--listen-peer-urls={}", url(peer)),
            format!("--initial-advertise-peer-urls={}", url(peer)),
            format!("--initial-cluster=default={}", url(peer)),
        ];
        let etcd = Watch::start("TERM", &etcd, user, Path::new("etcd"), &args)?;
        let mut nodes = Vec::new();
        for number in 0..NODES {
            let path = folder.path().join(format!("node{number}"));
            fs::create_dir(&path).map_err(|error| error.to_string())?;
            let local = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
            let (api, postgres) = (local(free_port()), local(free_port()));
            let settings = settings(number, &path, client, api, postgres, replication);
            fs::write(path.join("patroni.yml"), settings).map_err(|error| error.to_string())?;
            own(&path)?;
            nodes.push(Node { folder: path, api, postgres, watch: Mutex::default() });
        }
        let cluster = Self { nodes, etcd: Some(etcd), folder, user, replication };
        for number in 0..NODES {
            cluster.run(number)?;
        }
        cluster.wait_for_leader()?;
        cluster.wait_for_standby()?;
        Ok(cluster)
    }

    /// Whether everything is installed.
    ///
    /// # Errors
    /// If not; the text says what to do.
    pub fn programs() -> Result<(), String> {
        for (program, package) in [("patroni", "patroni"), ("etcd", "etcd-server")] {
            let mut version = Command::new(program);
            version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
            if !version.status().is_ok_and(|status| status.success()) {
                return Err(format!("{program} is not installed; install Debian's {package}"));
            }
        }
        Ok(())
    }

    /// Starts a node that was killed.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn run(&self, node: usize) -> Result<(), String> {
        let Node { folder, watch, .. } = &self.nodes[node];
        let args = ["-c".into(), PATRONI.into(), folder.clone().into_os_string()];
        let started = Watch::start("TERM", folder, self.user, Path::new("sh"), &args)?;
        *watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(started);
        Ok(())
    }

    /// The server that leads, unless there is none now.
    pub fn leader(&self) -> Option<SocketAddr> {
        self.leading().map(|node| self.nodes[node].postgres)
    }

    fn leading(&self) -> Option<usize> {
        (0..NODES).find(|node| has_role(self.nodes[*node].api, "primary"))
    }

    /// Kills Patroni and its server on the node that leads, as if the machine had died. Gives its number.
    ///
    /// # Panics
    /// If no node leads.
    pub fn kill_leader(&self) -> usize {
        let leading = self.leading().expect("a node leads");
        self.nodes[leading].signal_all("-KILL");
        if let Some(watch) = self.nodes[leading].watch.lock().unwrap_or_else(PoisonError::into_inner).take() {
            watch.stop("TERM");
        }
        leading
    }

    /// Stops Patroni and its server on the node that leads (SIGSTOP), as if the machine were paused or cut off. Gives its
    /// number.
    ///
    /// # Panics
    /// If no node leads.
    pub fn pause_leader(&self) -> usize {
        let leading = self.leading().expect("a node leads");
        self.nodes[leading].signal_all("-STOP");
        leading
    }

    /// Lets a node continue that was stopped; it still takes itself for the leader.
    ///
    /// # Errors
    /// If it has ended meanwhile.
    pub fn resume_node(&self, node: usize) -> Result<(), String> {
        if self.nodes[node].signal_all("-CONT") { Ok(()) } else { Err(format!("node {node} has ended")) }
    }

    /// Stops the process of the standby that receives what the leader has committed: the standby falls behind from now on. It
    /// loses what it has not received when it takes over; see [`end_receiver`](Self::end_receiver). Gives the process.
    ///
    /// # Errors
    /// If the standby does not follow the leader.
    pub fn stop_receiver(&self) -> Result<u32, String> {
        let leading = self.leading();
        let standby = (0..NODES).find(|node| Some(*node) != leading).ok_or("every node leads")?;
        let postmaster = fs::read_to_string(self.nodes[standby].folder.join("data/postmaster.pid"));
        let postmaster = postmaster.map_err(|error| error.to_string())?;
        let postmaster = postmaster.lines().next().unwrap_or_default();
        let children = fs::read_to_string(format!("/proc/{postmaster}/task/{postmaster}/children"));
        let children = children.map_err(|error| error.to_string())?;
        let is_receiver = |pid: &&str| {
            fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|title| title.contains("walreceiver"))
        };
        let receiver = children.split_whitespace().find(is_receiver).ok_or("the standby receives nothing")?;
        signal("-STOP", receiver)?;
        receiver.parse().map_err(|_| format!("a process has the number {receiver}"))
    }

    /// Lets the stopped process continue: the standby receives what it has missed.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn continue_receiver(&self, receiver: u32) -> Result<(), String> {
        signal("-CONT", &receiver.to_string())
    }

    /// Waits until the standby takes over, which asks the stopped process to end, and lets that happen. It ends before it reads
    /// what has arrived meanwhile.
    ///
    /// # Errors
    /// If the standby does not take over in time.
    pub fn end_receiver(&self, receiver: u32) -> Result<(), String> {
        const TERM: u64 = 1 << (15 - 1);
        let asked = || {
            let status = fs::read_to_string(format!("/proc/{receiver}/status")).unwrap_or_default();
            let pending = |line: &str| {
                let bits = line.strip_prefix("ShdPnd:").or_else(|| line.strip_prefix("SigPnd:"))?;
                u64::from_str_radix(bits.trim(), 16).ok()
            };
            status.lines().filter_map(pending).any(|bits| bits & TERM != 0).then_some(())
        };
        self.wait("the standby does not take over", asked)?;
        signal("-CONT", &receiver.to_string())
    }

    /// Waits until a node leads; gives its server.
    ///
    /// # Errors
    /// If none does in time.
    pub fn wait_for_leader(&self) -> Result<SocketAddr, String> {
        self.wait("no node leads", || self.leader())
    }

    /// Waits until the other node follows; if commits wait for it, until Patroni has noted that, which is a moment after the
    /// first of them: before, the node would not take over.
    ///
    /// # Errors
    /// If it does not in time.
    pub fn wait_for_standby(&self) -> Result<(), String> {
        let role = match self.replication {
            Replication::Synchronous => "synchronous",
            Replication::Asynchronous => "replica?lag=16MB",
        };
        let follows = |node: &Node| has_role(node.api, role);
        self.wait("no node follows", || self.nodes.iter().any(follows).then_some(()))
    }

    fn wait<T>(&self, problem: &str, mut look: impl FnMut() -> Option<T>) -> Result<T, String> {
        let start = Instant::now();
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            if start.elapsed() > PATIENCE {
                let logs: Vec<String> =
                    self.nodes.iter().map(|node| last_lines(&node.folder.join("log"))).collect();
                return Err(format!(
                    "{problem} in {}: {}",
                    self.folder.path().display(),
                    logs.join("\n---\n")
                ));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for PatroniCluster {
    fn drop(&mut self) {
        for node in &self.nodes {
            if let Some(watch) = node.watch.lock().unwrap_or_else(PoisonError::into_inner).take() {
                watch.stop("TERM");
            }
        }
        if let Some(etcd) = self.etcd.take() {
            etcd.stop("TERM");
        }
    }
}

impl Node {
    /// Sends a signal to Patroni, its server, and the processes of the server. Returns whether all were there.
    fn signal_all(&self, signal: &str) -> bool {
        let first_line = |file: &str| {
            let text = fs::read_to_string(self.folder.join(file)).unwrap_or_default();
            text.lines().next().unwrap_or_default().to_owned()
        };
        let (patroni, server) = (first_line("patroni.pid"), first_line("data/postmaster.pid"));
        assert!(!patroni.is_empty() && !server.is_empty(), "a node that leads runs");
        let children = fs::read_to_string(format!("/proc/{server}/task/{server}/children"));
        let children = children.unwrap_or_default();
        let all = [patroni.as_str(), server.as_str()].into_iter().chain(children.split_whitespace());
        // One that has ended meanwhile makes `kill` fail.
        let sent = Command::new("kill").arg(signal).args(all).stderr(Stdio::null()).status();
        sent.is_ok_and(|sent| sent.success())
    }
}

/// The end of a log: what went wrong is there, and the whole has megabytes.
fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

fn signal(name: &str, process: &str) -> Result<(), String> {
    let sent = Command::new("kill").args([name, process]).status().map_err(|error| error.to_string())?;
    if sent.success() { Ok(()) } else { Err(format!("kill {name} {process}: {sent}")) }
}

/// Asks a node's Patroni whether it has a role.
fn has_role(api: SocketAddr, role: &str) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut connection = TcpStream::connect_timeout(&api, Duration::from_secs(1))?;
        connection.set_read_timeout(Some(Duration::from_secs(2)))?;
        write!(connection, "GET /{role} HTTP/1.0\r\nHost: patroni\r\n\r\n")?;
        let mut head = [0; 64];
        let read = connection.read(&mut head)?;
        Ok(String::from_utf8_lossy(&head[..read]).into_owned())
    };
    ask().is_ok_and(|head| head.contains(" 200 "))
}

fn settings(
    number: usize,
    folder: &Path,
    etcd: u16,
    api: SocketAddr,
    postgres: SocketAddr,
    replication: Replication,
) -> String {
    let synchronous = replication == Replication::Synchronous;
    let (data, programs) = (folder.join("data"), PostgresServer::programs());
    format!(
        "scope: hapax
name: node{number}
restapi: {{listen: '{api}', connect_address: '{api}'}}
etcd3: {{host: '127.0.0.1:{etcd}'}}
bootstrap:
  dcs:
    ttl: 20
    loop_wait: 1
    retry_timeout: 3
    synchronous_mode: {synchronous}
    synchronous_mode_strict: {synchronous}
    postgresql:
      use_pg_rewind: true
      parameters: {{max_connections: 200, wal_keep_size: 512MB, max_wal_size: 256MB}}
  initdb: [encoding: UTF8, locale: C, no-sync]
  pg_hba: ['host all all 127.0.0.1/32 trust', 'host replication all 127.0.0.1/32 trust']
postgresql:
  listen: '{postgres}'
  connect_address: '{postgres}'
  data_dir: {}
  bin_dir: {}
  pgpass: {}
  authentication:
    superuser: {{username: postgres}}
    replication: {{username: postgres}}
  parameters: {{unix_socket_directories: ''}}
watchdog: {{mode: 'off'}}
",
        data.display(),
        programs.display(),
        folder.join("pgpass").display()
    )
}
