//! A private Apache Kafka broker that tests kill, pause and start again.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::private_server::{Watch, free_ports};
use crate::{FaultProxy, Protocol, RedisTls};

/// Time for a broker to start. Java takes some seconds, on a busy machine many.
const PATIENCE: Duration = Duration::from_mins(3);
/// How often a broker is started on other ports because one of its own was taken meanwhile.
const STARTS_MAX: usize = 3;
/// A small heap, and no time spent on optimising.
const JVM: [&str; 3] = ["-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"];
/// Ports of a node: its own listener, that behind the proxy, the controller's, and those of the secured listeners.
const NODE_PORTS: usize = 3 + SECURED.len();
/// The identity of every cluster that is made here.
const CLUSTER: &str = "SGFwYXhUZXN0Q2x1c3Rlcg";

/// One node that is broker and controller, on loopback, in a folder of its own. It ends with the process, also if that is
/// killed.
///
/// It has two addresses: [`KafkaServer::address`] is its own, and clients that begin at [`KafkaServer::proxied`] stay behind
/// [`KafkaServer::proxy`], because the broker tells them the proxy's address. Topics are not made by themselves.
///
/// ```no_run
/// use hapax_faults::{Action, KafkaServer, Match};
///
/// let broker = KafkaServer::start(&["num.partitions=3"])?;
/// println!("{}", broker.address());
/// let held = broker.proxy().inject(Match::request("EndTxn"), Action::Hold).times(1);
/// broker.kill();
/// broker.run()?;
/// # Ok::<(), String>(())
/// ```
pub struct KafkaServer {
    version: &'static str,
    address: SocketAddr,
    proxy: FaultProxy,
    /// The listeners with encryption or authentication, by name.
    secured: Vec<(&'static str, SocketAddr)>,
    // Before the folder, so that the broker ends first.
    watch: Mutex<Option<Watch>>,
    folder: TempDir,
}

/// Listeners of a secured broker beside the plain ones: name and protocol.
const SECURED: [(&str, &str); 3] = [("TLS", "SSL"), ("SASL", "SASL_PLAINTEXT"), ("BOTH", "SASL_SSL")];

impl KafkaServer {
    /// The version that the tests use.
    pub const VERSION: &str = "4.3.1";
    /// The last version without transaction version 2.
    pub const VERSION_3: &str = "3.9.1";

    /// The name of the folder with the jars of a version.
    pub fn folder(version: &str) -> String {
        format!("kafka-{version}")
    }

    /// The folder with the broker's jars: that of `HAPAX_TEST_KAFKA_JARS`, or where `cargo xtask test` put them.
    ///
    /// # Errors
    /// If there is none; the text says what to do.
    pub fn jars() -> Result<PathBuf, String> {
        Self::jars_of(Self::VERSION)
    }

    /// The same of a version. Those of [`KafkaServer::VERSION_3`] are copied by `cargo xtask test --long`.
    ///
    /// # Errors
    /// If there is none; the text says what to do.
    pub fn jars_of(version: &str) -> Result<PathBuf, String> {
        let given = std::env::var_os("HAPAX_TEST_KAFKA_JARS").filter(|_| version == Self::VERSION);
        let program = std::env::current_exe().unwrap_or_default();
        // Cargo's target folder is one of those that this program is in.
        let built = program.ancestors().map(|folder| folder.join("services").join(Self::folder(version)));
        let installed = Path::new("/opt/hapax-services").join(Self::folder(version));
        let mut folders = given.map(PathBuf::from).into_iter().chain([installed]).chain(built);
        folders.find(|folder| folder.is_dir()).ok_or_else(|| {
            let long = if version == Self::VERSION { "" } else { " --long" };
            format!("Kafka {version} is not installed; `cargo xtask test{long}` copies its jars with Maven")
        })
    }

    /// Starts a broker; each setting is a line of its configuration, `name=value`.
    ///
    /// # Errors
    /// If it is not installed or does not start; the text has its log.
    pub fn start(settings: &[&str]) -> Result<Self, String> {
        Self::start_formatted(settings, &[])
    }

    /// The same with arguments for the tool that formats its folder, for example `--feature transaction.version=0`.
    ///
    /// # Errors
    /// If it is not installed or does not start; the text has its log.
    pub fn start_formatted(settings: &[&str], format: &[&str]) -> Result<Self, String> {
        repeated(|| Self::start_once(Self::VERSION, settings, format, &[]))
    }

    /// Starts a broker of [`KafkaServer::VERSION_3`].
    ///
    /// # Errors
    /// If it is not installed or does not start; the text has its log.
    pub fn start_version_3() -> Result<Self, String> {
        repeated(|| Self::start_once(Self::VERSION_3, &[], &[], &[]))
    }

    /// Starts three nodes of one cluster: topics have three copies by default, of which two have a record before it is acknowledged.
    /// Clients behind the proxy of one node are told the proxies of all.
    ///
    /// # Errors
    /// If they are not installed or do not start; the text has a log.
    pub fn start_three() -> Result<[Self; 3], String> {
        repeated(|| {
            let ports = free_ports::<{ 3 * NODE_PORTS }>();
            let ports: Vec<[u16; NODE_PORTS]> = ports.as_chunks().0.to_vec();
            let voter =
                |(node, ports): (usize, &[u16; NODE_PORTS])| format!("{}@127.0.0.1:{}", node + 1, ports[2]);
            let voters: Vec<String> = ports.iter().enumerate().map(voter).collect();
            let voters = format!("controller.quorum.voters={}", voters.join(","));
            let mut nodes = Vec::new();
            for (node, ports) in ports.into_iter().enumerate() {
                let node = format!("node.id={}", node + 1);
                let settings = [&[node.as_str(), &voters][..], &THREE_COPIES].concat();
                nodes.push(Self::prepare(Self::VERSION, ports, &settings, &[], &[])?);
            }
            // None answers before most of them run.
            std::thread::scope(|scope| {
                let runs: Vec<_> = nodes.iter().map(|node| scope.spawn(move || node.run())).collect();
                runs.into_iter().try_for_each(|run| run.join().expect("it does not panic"))
            })?;
            nodes.try_into().map_err(|_| "three nodes".to_owned())
        })
    }

    /// Starts a broker with all kinds of listeners: [`KafkaServer::secured`] has those with encryption or authentication.
    /// `alice` and `bob` are its users, with the passwords `alice-secret` and `bob-secret`, by PLAIN and both kinds of SCRAM.
    /// Clients without a user may do everything, users only what access control lists allow. A client with a certificate at the
    /// listener `TLS` is the user of the certificate's name. `tls` has to live as long as it.
    ///
    /// # Errors
    /// If it is not installed or does not start; the text has its log.
    pub fn start_secured(tls: &RedisTls, settings: &[&str]) -> Result<Self, String> {
        let stores = format!(
            "ssl.keystore.type=PEM\nssl.keystore.location={}\nssl.truststore.type=PEM\nssl.truststore.location={}\n\
             listener.name.tls.ssl.client.auth=requested",
            tls.identity().display(),
            tls.authority().display()
        );
        let plain = "org.apache.kafka.common.security.plain.PlainLoginModule required \
                     user_alice=\"alice-secret\" user_bob=\"bob-secret\";";
        let scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;";
        let mut logins = Vec::new();
        for listener in ["sasl", "both"] {
            for (mechanism, module) in [("plain", plain), ("scram-sha-256", scram), ("scram-sha-512", scram)]
            {
                logins.push(format!("listener.name.{listener}.{mechanism}.sasl.jaas.config={module}"));
            }
        }
        let rights = "sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512\n\
                      authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n\
                      super.users=User:ANONYMOUS";
        let mut all = vec![stores.as_str(), rights];
        all.extend(logins.iter().map(String::as_str));
        all.extend(settings);
        let users: Vec<String> = ["alice", "bob"]
            .into_iter()
            .flat_map(|user| {
                ["SCRAM-SHA-256", "SCRAM-SHA-512"]
                    .map(|kind| format!("{kind}=[name={user},password={user}-secret]"))
            })
            .collect();
        let format: Vec<&str> = users.iter().flat_map(|user| ["--add-scram", user.as_str()]).collect();
        repeated(|| Self::start_once(Self::VERSION, &all, &format, &SECURED))
    }

    /// The address of a secured broker's listener: `TLS`, `SASL` (without encryption) or `BOTH`.
    ///
    /// # Panics
    /// If it has none of this name.
    pub fn secured(&self, name: &str) -> SocketAddr {
        let found = self.secured.iter().find(|(listener, _)| *listener == name);
        found.unwrap_or_else(|| panic!("no listener {name}")).1
    }

    fn start_once(
        version: &'static str,
        settings: &[&str],
        format: &[&str],
        secured: &[(&'static str, &'static str)],
    ) -> Result<Self, String> {
        let broker = Self::prepare(version, free_ports(), settings, format, secured)?;
        broker.run()?;
        Ok(broker)
    }

    /// Makes a folder for a node, with its configuration, and formats it.
    fn prepare(
        version: &'static str,
        [own, proxied, controller, more @ ..]: [u16; NODE_PORTS],
        settings: &[&str],
        format: &[&str],
        secured: &[(&'static str, &'static str)],
    ) -> Result<Self, String> {
        let folder = TempDir::with_prefix("hapax-kafka-").map_err(|error| error.to_string())?;
        let listeners: Vec<Listener> = secured
            .iter()
            .zip(more)
            .map(|((name, protocol), port)| Listener { name, protocol, port })
            .collect();
        let loopback = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
        let proxy =
            FaultProxy::start(loopback(proxied), Protocol::Kafka).map_err(|error| error.to_string())?;
        let text =
            configuration(folder.path(), [own, proxied, controller], proxy.address(), &listeners, settings);
        fs::write(folder.path().join("server.properties"), text).map_err(|error| error.to_string())?;
        fs::write(folder.path().join("log4j2.properties"), LOGGING).map_err(|error| error.to_string())?;
        let secured = listeners.iter().map(|listener| (listener.name, loopback(listener.port))).collect();
        let (address, watch) = (loopback(own), Mutex::default());
        let broker = Self { version, address, proxy, secured, watch, folder };
        broker.format(format)?;
        Ok(broker)
    }

    /// The broker's own address, which is that of its clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address for clients that are to stay behind the proxy.
    pub fn proxied(&self) -> SocketAddr {
        self.proxy.address()
    }

    /// The proxy before the broker's second listener.
    pub fn proxy(&self) -> &FaultProxy {
        &self.proxy
    }

    /// The broker's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Whether it has ended by itself; [`KafkaServer::log`] says why.
    pub fn has_ended(&self) -> bool {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        watch.as_ref().is_some_and(Watch::has_ended)
    }

    /// The id of its process, if it runs.
    pub fn process_id(&self) -> Option<String> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.server()
    }

    /// Kills it with SIGKILL and returns when it has ended.
    ///
    /// # Panics
    /// If it does not run.
    pub fn kill(&self) {
        self.stop("KILL");
    }

    /// Ends it with a signal by its name, and waits for its end: `TERM` is a clean end.
    ///
    /// # Panics
    /// If it does not run.
    pub fn stop(&self, signal: &str) {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        watch.expect("it runs").stop(signal);
    }

    /// Pauses it (SIGSTOP).
    ///
    /// # Panics
    /// If it does not run.
    pub fn pause(&self) {
        self.signal("STOP");
    }

    /// Lets it continue after a pause.
    ///
    /// # Panics
    /// If it does not run.
    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, signal: &str) {
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        watch.as_ref().expect("it runs").signal(signal);
    }

    /// Starts it again, on the same data and ports. Returns when it answers on both of its addresses and listens on the secured
    /// ones: it opens one listener after the other, and ends if a later one fails.
    ///
    /// # Errors
    /// If it does not answer in time; the text has its log.
    pub fn run(&self) -> Result<(), String> {
        let mut args = self.java("kafka.Kafka")?;
        args.push(self.folder.path().join("server.properties").display().to_string());
        let watch = Watch::start("KILL", self.folder.path(), None, Path::new("java"), &args)?;
        let start = Instant::now();
        let secured = || self.secured.iter().all(|(_, address)| TcpStream::connect(address).is_ok());
        while !(answers(self.address) && answers(self.proxied()) && secured()) {
            if watch.has_ended() || start.elapsed() > PATIENCE {
                // Dropping it would remove the data.
                watch.stop("KILL");
                return Err(format!("Kafka did not start: {}", self.log()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        Ok(())
    }

    /// Prepares the folder for the data.
    fn format(&self, args: &[&str]) -> Result<(), String> {
        let mut tool = Command::new("java");
        tool.args(self.java("kafka.tools.StorageTool")?).args([
            "format",
            "--cluster-id",
            CLUSTER,
            "--config",
        ]);
        tool.arg(self.folder.path().join("server.properties")).args(args);
        let done = tool.stdin(Stdio::null()).output().map_err(|error| format!("java: {error}"))?;
        if done.status.success() {
            return Ok(());
        }
        let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        Err(format!("Kafka's folder could not be formatted: {out}{err}"))
    }

    /// The arguments of Java that come before those of the program.
    fn java(&self, class: &str) -> Result<Vec<String>, String> {
        let mut args = JVM.map(str::to_owned).to_vec();
        let logging = self.folder.path().join("log4j2.properties");
        args.push(format!("-Dlog4j2.configurationFile={}", logging.display()));
        args.extend([
            "-cp".to_owned(),
            format!("{}/*", Self::jars_of(self.version)?.display()),
            class.to_owned(),
        ]);
        Ok(args)
    }
}

impl Drop for KafkaServer {
    fn drop(&mut self) {
        if self.watch.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
            self.kill();
        }
    }
}

const LOGGING: &str = "\
status = error
appender.console.type = Console
appender.console.name = STDOUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = STDOUT
# It tells at this level that it leaves out the end of a transaction.
logger.markers.name = kafka.coordinator.transaction.TransactionMarkerChannelManager
logger.markers.level = info
";

/// One copy of everything, few partitions of the internal topics, no waiting for members to join, and transactions that are
/// timed out soon after their time.
const SETTINGS: &str = "\
process.roles=broker,controller
node.id=1
inter.broker.listener.name=DIRECT
controller.listener.names=CONTROLLER
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=2
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=2
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.session.timeout.ms=5000
group.consumer.min.heartbeat.interval.ms=500
group.consumer.heartbeat.interval.ms=1000
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
log.segment.bytes=16777216
log.cleaner.dedupe.buffer.size=8388608
num.network.threads=2
num.io.threads=4
";

/// Settings of the nodes of a cluster of three.
const THREE_COPIES: [&str; 6] = [
    "default.replication.factor=3",
    "min.insync.replicas=2",
    "offsets.topic.replication.factor=3",
    "transaction.state.log.replication.factor=3",
    "transaction.state.log.min.isr=2",
    // A node that was killed is soon taken for dead.
    "broker.session.timeout.ms=3000",
];

/// Starts again, because a port may have been taken meanwhile.
fn repeated<T>(start: impl Fn() -> Result<T, String>) -> Result<T, String> {
    let mut problem = String::new();
    for _ in 0..STARTS_MAX {
        match start() {
            Ok(started) => return Ok(started),
            Err(error) => problem = error,
        }
    }
    Err(problem)
}

/// A listener with its port.
struct Listener {
    name: &'static str,
    protocol: &'static str,
    port: u16,
}

/// The text of the configuration. Of two lines with the same name, the later one holds.
fn configuration(
    folder: &Path,
    [own, proxied, controller]: [u16; 3],
    proxy: SocketAddr,
    more: &[Listener],
    settings: &[&str],
) -> String {
    let host = "127.0.0.1";
    let list = |one: &dyn Fn(&Listener) -> String| more.iter().map(one).collect::<String>();
    let places = list(&|listener| format!(",{}://{host}:{}", listener.name, listener.port));
    let protocols = list(&|listener| format!(",{}:{}", listener.name, listener.protocol));
    let mut text = format!(
        "{SETTINGS}log.dirs={}\ncontroller.quorum.voters=1@{host}:{controller}\n\
         listener.security.protocol.map=DIRECT:PLAINTEXT,PROXIED:PLAINTEXT,CONTROLLER:PLAINTEXT{protocols}\n\
         listeners=DIRECT://{host}:{own},PROXIED://{host}:{proxied},CONTROLLER://{host}:{controller}{places}\n\
         advertised.listeners=DIRECT://{host}:{own},PROXIED://{proxy}{places}\n",
        folder.join("data").display(),
    );
    for setting in settings {
        text += setting;
        text += "\n";
    }
    text
}

/// Whether a broker answers a request for the versions that it knows. The answer repeats a number of the request, which
/// tells it from a stranger on the port.
fn answers(address: SocketAddr) -> bool {
    const NUMBER: [u8; 4] = *b"hpx?";
    // The length, ApiVersions in version 0, the number, and no client id.
    let request = [&[0, 0, 0, 10, 0, 18, 0, 0][..], &NUMBER, &[0xff, 0xff]].concat();
    let ask = || {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(&request)?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        Ok::<_, std::io::Error>(answer)
    };
    ask().is_ok_and(|answer| answer[4..] == NUMBER)
}
