//! Two servers on one PostgreSQL, many clients, and faults at random times: servers are killed, the database crashes, stands
//! still, loses sessions, and the answers to its commits are late or lost. Clients work on a standard queue, on a FIFO queue and
//! on keys of the ledger; the checker is `hapax_conformance::attack`.
//!
//! `HAPAX_SEED=n` chooses other faults, `HAPAX_LONG=1` runs twenty times as long.

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::hapax;
use hapax::client::Client;
use hapax::core::{Ledger, QueueAdmin};
use hapax_conformance::attack::{LedgerAttack, PATIENCE, QueueAttack, Random, seed, time};
use hapax_faults::{FaultProxy, PostgresFault, PostgresServer, Process, Protocol};
use tempfile::TempDir;

on_postgres![nothing_that_was_accepted_is_lost];

const SERVERS: usize = 2;
/// Kinds of faults: those of the database, and the kill of a server.
const KINDS: usize = PostgresFault::ALL.len() + 1;

/// A server that is killed and started again. Clients reach it at one address.
struct Hapax {
    folder: TempDir,
    args: Vec<String>,
    process: Mutex<Process>,
    clients: FaultProxy,
}

impl Hapax {
    fn start(store: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut args: Vec<String> = vec!["serve".into(), "--listen".into(), "127.0.0.1:0".into()];
        args.extend(["--store".into(), store.into(), "--log-level".into(), "error".into()]);
        args.extend(["--postgres-operation-timeout".into(), "4s".into()]);
        args.extend(["--postgres-connect-timeout".into(), "2s".into()]);
        let (process, address) = run(&folder, &args);
        let clients = FaultProxy::start(address, Protocol::Bytes).unwrap();
        Self { folder, args, process: Mutex::new(process), clients }
    }

    fn kill_and_start(&self) {
        let mut process = self.process.lock().unwrap();
        process.kill();
        let (again, address) = run(&self.folder, &self.args);
        self.clients.retarget(address);
        *process = again;
    }

    async fn connect(&self) -> Arc<Client> {
        Arc::new(Client::connect(&format!("http://{}", self.clients.address()), None).await.unwrap())
    }
}

/// Starts a server, again if the database has just lost its connection.
fn run(folder: &TempDir, args: &[String]) -> (Process, std::net::SocketAddr) {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let start = Instant::now();
    loop {
        let process = Process::start(&mut hapax(folder, &args)).unwrap();
        while let Some(line) = process.next_line() {
            if let Some(endpoint) = line.strip_prefix("  API   ") {
                return (process, endpoint.trim().trim_start_matches("http://").parse().unwrap());
            }
        }
        assert!(start.elapsed() < PATIENCE, "the server does not start: {}", process.log());
    }
}

struct Site {
    postgres: PostgresServer,
    answers: FaultProxy,
    servers: Vec<Hapax>,
}

impl Site {
    /// What is answered as accepted must survive a crash, so the database is durable.
    fn start() -> Self {
        let postgres = PostgresServer::start(&["fsync=on", "max_wal_size=256MB"]).unwrap();
        let answers = FaultProxy::start(postgres.address(), Protocol::Postgres).unwrap();
        let url = postgres.url("postgres");
        common::run(&tempfile::tempdir().unwrap(), &["migrate", "--store", &url]).ok();
        let through = url.replace(&postgres.address().to_string(), &answers.address().to_string());
        assert_ne!(url, through);
        let servers = (0..SERVERS).map(|_| Hapax::start(&through)).collect();
        Self { postgres, answers, servers }
    }

    /// Injects a fault, and waits for its end; returns what it hit.
    fn inject(&self, kind: usize, random: &mut Random) -> u64 {
        if let Some(fault) = PostgresFault::ALL.get(kind) {
            return fault.inject(&self.postgres, &self.answers, &mut |bound| random.below(bound));
        }
        self.servers[random.below(SERVERS as u64) as usize].kill_and_start();
        1
    }

    /// Injects faults for a time, until each kind has hit and `enough` has happened.
    async fn trouble(self: &Arc<Self>, time: Duration, enough: impl Fn() -> bool) -> [u64; KINDS] {
        let mut random = Random::new(seed());
        let (start, mut count, mut round) = (Instant::now(), [0; KINDS], 0);
        while start.elapsed() < time || count.contains(&0) || !enough() {
            assert!(start.elapsed() < time + 2 * PATIENCE, "too little has happened: {count:?}");
            tokio::time::sleep(Duration::from_millis(200) + random.ms(800)).await;
            // Each kind occurs, whatever the seed is.
            let kind = if round < KINDS { round } else { random.below(KINDS as u64) as usize };
            let (site, mut choices) = (self.clone(), Random::new(random.below(u64::MAX)));
            let hit = tokio::task::spawn_blocking(move || site.inject(kind, &mut choices)).await;
            count[kind] += hit.unwrap();
            round += 1;
        }
        count
    }
}

fn nothing_that_was_accepted_is_lost(_: &'static PostgresServer) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let site = Arc::new(tokio::task::spawn_blocking(Site::start).await.unwrap());
        let mut clients = Vec::new();
        for server in &site.servers {
            clients.push(server.connect().await);
        }
        let queues = || clients.iter().map(|client| client.clone() as Arc<dyn QueueAdmin>).collect();
        let ledgers = clients.iter().map(|client| client.clone() as Arc<dyn Ledger>).collect();
        let standard = QueueAttack::begin(queues(), "orders", false).await;
        let fifo = QueueAttack::begin(queues(), "steps", true).await;
        let keys = LedgerAttack::begin(ledgers);
        let enough = || standard.accepted() > 100 && fifo.accepted() > 100 && keys.keys() > 30;
        let start = Instant::now();
        let hits = site.trouble(time(12), enough).await;
        eprintln!("{:?}: faults that hit, by kind: {hits:?}", start.elapsed());
        // Clients of each kind end their work, so both servers and the database have come back.
        keys.end().await;
        eprintln!("{:?}: the keys have ended", start.elapsed());
        standard.end().await;
        eprintln!("{:?}: the standard queue has ended", start.elapsed());
        fifo.end().await;
        eprintln!("{:?}: the FIFO queue has ended", start.elapsed());
    });
}
