//! The servers under test, as separate processes.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::text;

/// The newest version when this was written; ElasticMQ supports AWS JSON since 1.5.
const ELASTICMQ: &str = "1.7.1";

/// A server that runs until it is dropped.
pub struct Server {
    pub name: &'static str,
    pub address: SocketAddr,
    child: Child,
    /// Its data, deleted on drop.
    _folder: Option<tempfile::TempDir>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(
        name: &'static str,
        address: SocketAddr,
        command: &mut Command,
        folder: Option<tempfile::TempDir>,
    ) -> Result<Self, String> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.map_err(|error| format!("{name} could not be started: {error}"))?;
        let mut server = Self { name, address, child, _folder: folder };
        let until = Instant::now() + Duration::from_mins(1);
        while TcpStream::connect(address).is_err() {
            if let Ok(Some(status)) = server.child.try_wait() {
                return Err(format!("{name} ended before it listened ({status})"));
            }
            if Instant::now() > until {
                return Err(format!("{name} does not listen after 60 s"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(server)
    }

    /// CPU time used so far, in microseconds; the kernel counts in hundredths of a second.
    pub fn cpu_us(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // The process name in parentheses may contain any characters.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let times = fields.split_whitespace().skip(11).take(2);
        times.filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() * 10_000
    }

    /// Resident memory, in KiB.
    pub fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    }
}

fn free_address() -> Result<SocketAddr, String> {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).map_err(text)
}

/// The target folder: this binary is in `target/release/deps`.
fn target() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(text)?;
    own.ancestors().nth(3).map(Path::to_owned).ok_or("no target folder above the benchmark".to_owned())
}

fn bench_folder() -> Result<PathBuf, String> {
    let folder = match std::env::var_os("HAPAX_BENCH_DIR") {
        Some(folder) => PathBuf::from(folder),
        None => target()?.join("bench"),
    };
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder)
}

/// Builds the release binary of this workspace and returns its path.
fn built() -> Result<PathBuf, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    eprintln!(
        "Building the hapax binary as it is shipped. The first time takes some ten minutes; HAPAX_BIN names one that is there."
    );
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "--package", "hapax-cli"]);
    let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().map_err(text)?;
    if !status.success() {
        return Err(format!("the hapax binary could not be built ({status})"));
    }
    Ok(target()?.join("release/hapax"))
}

/// Hapax: the real binary, with its data on the same disk as the target folder.
pub fn hapax() -> Result<Server, String> {
    let binary = std::env::var_os("HAPAX_BIN").map_or_else(built, |binary| Ok(PathBuf::from(binary)))?;
    let folder = tempfile::tempdir_in(bench_folder()?).map_err(text)?;
    let address = free_address()?;
    let store = format!("embedded:{}", folder.path().join("data").display());
    let mut command = Command::new(&binary);
    command.args(["serve", "--listen", &address.to_string(), "--store", &store, "--log-level", "warn"]);
    Server::start("Hapax", address, &mut command, Some(folder))
}

/// ElasticMQ, fetched with Maven; it keeps messages in memory, its default.
pub fn elasticmq() -> Result<Server, String> {
    let folder = bench_folder()?.join(format!("elasticmq-{ELASTICMQ}"));
    let jars = folder.join("jars");
    if !jars.join(format!("elasticmq-server_2.13-{ELASTICMQ}.jar")).exists() {
        std::fs::create_dir_all(&folder).map_err(text)?;
        let pom = format!(
            "<project xmlns=\"http://maven.apache.org/POM/4.0.0\">\n  <modelVersion>4.0.0</modelVersion>\n  \
             <groupId>hapax</groupId>\n  <artifactId>bench</artifactId>\n  <version>1</version>\n  \
             <dependencies><dependency>\n    <groupId>org.elasticmq</groupId>\n    \
             <artifactId>elasticmq-server_2.13</artifactId>\n    <version>{ELASTICMQ}</version>\n  \
             </dependency></dependencies>\n</project>\n"
        );
        std::fs::write(folder.join("pom.xml"), pom).map_err(text)?;
        let mut maven = Command::new("mvn");
        maven.args(["-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"]);
        let status = maven.current_dir(&folder).stdin(Stdio::null()).status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => return Err(format!("Maven could not fetch it ({status})")),
            Err(error) => return Err(format!("Maven (mvn) is needed to fetch it: {error}")),
        }
    }
    let address = free_address()?;
    let config = folder.join("bench.conf");
    let text_of_config = format!(
        "include classpath(\"application.conf\")\n\
         node-address {{ protocol = http, host = 127.0.0.1, port = {port}, context-path = \"\" }}\n\
         rest-sqs {{ enabled = true, bind-hostname = \"127.0.0.1\", bind-port = {port}, sqs-limits = strict }}\n\
         rest-stats {{ enabled = false }}\nqueues-storage {{ enabled = false }}\n\
         messages-storage {{ enabled = false }}\n",
        port = address.port()
    );
    std::fs::write(&config, text_of_config).map_err(text)?;
    let mut command = Command::new("java");
    command.arg(format!("-Dconfig.file={}", config.display()));
    command.arg("-cp").arg(jars.join("*")).arg("org.elasticmq.server.Main");
    Server::start("ElasticMQ", address, &mut command, None)
}
