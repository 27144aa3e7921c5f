//! Private Redis servers, alone or as a Cluster, that tests kill, pause and start again.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::private_server::free_ports;

/// Time for a server to start, and for a Cluster to agree.
const PATIENCE: Duration = Duration::from_mins(1);
/// How often a server is started on another port because its own was taken meanwhile.
const STARTS_MAX: usize = 5;

/// A Redis server in a folder of its own. It ends with the process, also if that is killed.
///
/// ```no_run
/// use hapax_faults::RedisServer;
///
/// let server = RedisServer::start(&["appendonly yes", "appendfsync always"])?;
/// server.cli(&["SET", "a", "1"])?;
/// server.kill();
/// server.run()?;
/// assert_eq!(server.cli(&["GET", "a"])?, "1");
/// # Ok::<(), String>(())
/// ```
pub struct RedisServer {
    folder: TempDir,
    port: u16,
    bus_port: u16,
    tls_port: u16,
    settings: Vec<String>,
    /// What follows the file on the command line.
    flags: Vec<String>,
    watch: Mutex<Option<Watch>>,
}

/// The server's process, under a shell that kills it when our end of its input is closed: by [`RedisServer::kill`], or because
/// this process has ended in whatever way.
struct Watch {
    shell: Child,
    input: ChildStdin,
    server: String,
}

impl RedisServer {
    /// Starts a server with these settings, each a line of its configuration.
    pub fn start(settings: &[&str]) -> Result<Self, String> {
        Self::start_with(settings, &[])
    }

    fn start_with(settings: &[&str], flags: &[&str]) -> Result<Self, String> {
        let mut problem = String::new();
        for _ in 0..STARTS_MAX {
            let folder = TempDir::with_prefix("hapax-redis-").map_err(|error| error.to_string())?;
            let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
            let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
            let [port, bus_port, tls_port] = free_ports();
            let server = Self { folder, port, bus_port, tls_port, settings, flags, watch: Mutex::default() };
            match server.run() {
                Ok(()) => return Ok(server),
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Its address, `host:port`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Its address for TLS, `host:port`, if it was started with the settings of [`RedisTls`](crate::RedisTls).
    pub fn tls_address(&self) -> String {
        format!("localhost:{}", self.tls_port)
    }

    fn has_tls(&self) -> bool {
        has_tls(&self.settings)
    }

    /// The port at which its replicas, Sentinels and other nodes reach it.
    fn peer_port(&self) -> u16 {
        if self.has_tls() { self.tls_port } else { self.port }
    }

    /// Runs a command with `redis-cli`; returns its output.
    pub fn cli(&self, command: &[&str]) -> Result<String, String> {
        let mut cli = Command::new("redis-cli");
        cli.args(["-e", "-h", "127.0.0.1", "-p", &self.port.to_string()])
            .args(command)
            .env_remove("REDISCLI_AUTH");
        let done = cli.stdin(Stdio::null()).output().map_err(|error| format!("redis-cli: {error}"))?;
        let text = String::from_utf8_lossy(&done.stdout).trim_end().to_owned();
        if done.status.success() {
            return Ok(text);
        }
        Err(format!("{command:?}: {text}{}", String::from_utf8_lossy(&done.stderr)))
    }

    /// Kills it with SIGKILL and returns when it has ended.
    ///
    /// # Panics
    /// If it does not run.
    pub fn kill(&self) {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Watch { mut shell, mut input, .. } = watch.expect("it runs");
        writeln!(input, "KILL").expect("the shell reads it");
        drop(input);
        shell.wait().expect("the shell ends with the server");
    }

    /// Pauses it (SIGSTOP).
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Lets it continue after a pause.
    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, signal: &str) {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let server = &watch.as_ref().expect("it runs").server;
        let sent = Command::new("kill").args(["-s", signal, server]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the server's process can be signalled");
    }

    /// Starts it again, on the same data and port.
    pub fn run(&self) -> Result<(), String> {
        let dir = self.folder.path();
        let mut config = format!(
            "port {}\nbind 127.0.0.1\ndir {}\nlogfile {}\n",
            self.port,
            dir.display(),
            dir.join("log").display()
        );
        if self.has_tls() {
            config.extend(["tls-port ", &self.tls_port.to_string(), "\n"]);
        }
        if self.flags.is_empty() {
            // A Sentinel has neither.
            config.extend(["cluster-port ", &self.bus_port.to_string(), "\nsave \"\"\n"]);
        }
        for setting in &self.settings {
            config += setting;
            config += "\n";
        }
        let file = dir.join("redis.conf");
        // A server that was started before may have changed its file: Sentinel keeps there what it knows.
        if self.flags.is_empty() || !file.exists() {
            fs::write(&file, config).map_err(|error| error.to_string())?;
        }
        // The shell reads a signal's name, or the end of its input. At the end of this process, it also removes the folder.
        let script = r#"dir=$1; shift; "$@" >>"$dir/log" 2>&1 </dev/null & pid=$!; echo $pid
            if read signal; then kill -s "$signal" $pid; wait $pid
            else kill -s KILL $pid; wait $pid; rm -rf "$dir"; fi"#;
        let mut shell = Command::new("sh");
        shell
            .args(["-c", script, "sh"])
            .arg(dir)
            .arg(program())
            .arg(&file)
            .args(&self.flags)
            .current_dir("/");
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut shell = shell.process_group(0).spawn().map_err(|error| error.to_string())?;
        let input = shell.stdin.take().expect("its input is piped");
        let mut server = String::new();
        let output = shell.stdout.take().expect("its output is piped");
        BufReader::new(output).read_line(&mut server).map_err(|error| error.to_string())?;
        let server = server.trim().to_owned();
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(Watch { shell, input, server });
        self.wait_until_ready()
    }

    fn wait_until_ready(&self) -> Result<(), String> {
        let start = Instant::now();
        loop {
            // A server that is still loading answers with an error. The folder tells it apart from a stranger on the port.
            let dir = match self.flags.as_slice() {
                [] => self.cli(&["CONFIG", "GET", "dir"]),
                _ => self.cli(&["INFO", "server"]),
            };
            if dir.as_ref().is_ok_and(|dir| dir.contains(&self.folder.path().display().to_string())) {
                return Ok(());
            }
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            if start.elapsed() > PATIENCE
                || log.contains("Address already in use")
                || log.contains("not found")
            {
                return Err(format!("redis-server did not start: {dir:?} {log}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        if self.watch.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            self.kill();
        }
    }
}

/// The program of a server; `HAPAX_TEST_REDIS_PROGRAM` names another one, for example that of Valkey.
fn program() -> String {
    std::env::var("HAPAX_TEST_REDIS_PROGRAM").unwrap_or_else(|_| "redis-server".to_owned())
}

fn has_tls<S: AsRef<str>>(settings: &[S]) -> bool {
    settings.iter().any(|setting| setting.as_ref().starts_with("tls-cert-file "))
}

/// The URL of a store on these servers, by TLS where they have it.
fn url(kind: &str, servers: &[RedisServer]) -> String {
    let has_tls = servers.iter().all(RedisServer::has_tls);
    let address = |server: &RedisServer| if has_tls { server.tls_address() } else { server.address() };
    let addresses: Vec<String> = servers.iter().map(address).collect();
    format!("{}+{kind}://{}", if has_tls { "rediss" } else { "redis" }, addresses.join(","))
}

/// A master with two replicas, and three Sentinels that watch it under the name `shop`.
pub struct RedisSentinels {
    /// The master at the start, then its replicas.
    pub nodes: Vec<RedisServer>,
    /// The Sentinels.
    pub sentinels: Vec<RedisServer>,
}

impl RedisSentinels {
    /// Starts six servers, and returns when the Sentinels know each other and the replicas. The settings are those of the
    /// three that hold data. A master that is silent for this time is replaced.
    pub fn start(settings: &[&str], down_after: Duration) -> Result<Self, String> {
        let mut nodes = vec![RedisServer::start(settings)?];
        let port = nodes[0].peer_port();
        for _ in 0..2 {
            let follow = format!("replicaof 127.0.0.1 {port}");
            nodes.push(RedisServer::start(&[settings, &[&follow]].concat())?);
        }
        let watch = format!("sentinel monitor shop 127.0.0.1 {port} 2");
        let down = format!("sentinel down-after-milliseconds shop {}", down_after.as_millis());
        let own = [watch.as_str(), &down, "sentinel failover-timeout shop 10000"];
        let tls = settings.iter().copied().filter(|setting| setting.starts_with("tls-"));
        let settings: Vec<&str> = own.into_iter().chain(tls).collect();
        let sentinels = (0..3).map(|_| RedisServer::start_with(&settings, &["--sentinel"]));
        let all = Self { nodes, sentinels: sentinels.collect::<Result<_, _>>()? };
        let start = Instant::now();
        let knows_all = |sentinel: &RedisServer| {
            let master = sentinel.cli(&["SENTINEL", "MASTER", "shop"]).unwrap_or_default();
            let mut words = master.lines().map(str::trim);
            let mut number =
                |name: &str| words.find(|word| *word == name).and_then(|_| words.next()).map(str::to_owned);
            (number("num-slaves").as_deref(), number("num-other-sentinels").as_deref())
                == (Some("2"), Some("2"))
        };
        let in_step = |node: &RedisServer| {
            node.cli(&["INFO", "replication"]).is_ok_and(|info| info.contains("link_status:up"))
        };
        while !all.sentinels.iter().all(knows_all) || !all.nodes[1..].iter().all(in_step) {
            if start.elapsed() > PATIENCE {
                return Err("the Sentinels do not know each other and the replicas".to_owned());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(all)
    }

    /// The URL of the store.
    pub fn url(&self) -> String {
        url("sentinel", &self.sentinels) + "/shop"
    }

    /// The node that the first Sentinel takes for the master, by its place.
    pub fn master(&self) -> Option<usize> {
        let told = self.sentinels[0].cli(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "shop"]).ok()?;
        let port = told.lines().nth(1)?.trim().parse::<u16>().ok()?;
        self.nodes.iter().position(|node| node.peer_port() == port)
    }
}

/// A Redis Cluster of three masters with a replica each.
pub struct RedisCluster {
    /// The masters at the start, then their replicas in the same order.
    pub nodes: Vec<RedisServer>,
}

/// Masters of a Cluster.
const MASTERS: usize = 3;

impl RedisCluster {
    /// Starts six servers with these settings, and returns when they agree.
    pub fn start(settings: &[&str]) -> Result<Self, String> {
        let mut settings = [settings, &["cluster-enabled yes"]].concat();
        if has_tls(&settings) {
            settings.extend(["tls-cluster yes", "cluster-announce-hostname localhost"]);
        }
        let nodes = (0..2 * MASTERS).map(|_| RedisServer::start(&settings)).collect::<Result<Vec<_>, _>>()?;
        let cluster = Self { nodes };
        let ends = [0, 5461, 10_923, 16_384];
        for (at, node) in cluster.nodes.iter().enumerate() {
            // Different epochs, so that the nodes need not settle a conflict.
            node.cli(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()])?;
            if at < MASTERS {
                let (from, to) = (ends[at].to_string(), (ends[at + 1] - 1).to_string());
                node.cli(&["CLUSTER", "ADDSLOTSRANGE", &from, &to])?;
            }
            let first = &cluster.nodes[0];
            let (port, bus_port) = (first.peer_port().to_string(), first.bus_port.to_string());
            node.cli(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus_port])?;
        }
        let count = format!("cluster_known_nodes:{}", 2 * MASTERS);
        cluster.wait("know each other", |node| {
            node.cli(&["CLUSTER", "INFO"]).is_ok_and(|info| info.contains(&count))
        })?;
        for at in 0..MASTERS {
            let id = cluster.nodes[at].cli(&["CLUSTER", "MYID"])?;
            let replica = &cluster.nodes[at + MASTERS];
            cluster.wait("know the masters", |_| replica.cli(&["CLUSTER", "REPLICATE", &id]).is_ok())?;
        }
        cluster.wait_until_whole()?;
        Ok(cluster)
    }

    /// Returns when all slots are served, and the replica of each master has all that the master had when the replica was
    /// connected: before, the loss of the master would be a second fault.
    pub fn wait_until_whole(&self) -> Result<(), String> {
        self.wait("are whole", |node| {
            let state = node.cli(&["CLUSTER", "INFO"]).unwrap_or_default();
            let role = node.cli(&["INFO", "replication"]).unwrap_or_default();
            let in_step = role.contains("master_link_status:up") || role.contains("state=online");
            state.contains("cluster_state:ok") && in_step
        })?;
        let numbers = |info: &str, name: &str| -> Vec<u64> {
            let found =
                info.split([',', '\r', '\n']).filter_map(|fact| fact.strip_prefix(name)?.parse().ok());
            found.collect()
        };
        for node in &self.nodes {
            let info = node.cli(&["INFO", "replication"])?;
            if !info.contains("role:master") {
                continue;
            }
            let written = numbers(&info, "master_repl_offset:");
            let has_all = |asked: &RedisServer| {
                let info = asked.cli(&["INFO", "replication"]).unwrap_or_default();
                asked.address() != node.address()
                    || numbers(&info, "offset=").iter().any(|has| written[0] <= *has)
            };
            self.wait("have all that their masters have", has_all)?;
        }
        Ok(())
    }

    fn wait(&self, what: &str, holds: impl Fn(&RedisServer) -> bool) -> Result<(), String> {
        let start = Instant::now();
        while !self.nodes.iter().all(&holds) {
            if start.elapsed() > PATIENCE {
                return Err(format!("the nodes of the Cluster do not {what}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// The URL of the store.
    pub fn url(&self) -> String {
        url("cluster", &self.nodes)
    }
}
