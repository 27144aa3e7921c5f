//! The stores, and what they and this process use.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use hapax::postgres::{Options, PostgresStore};
use hapax_faults::{PostgresServer, RedisServer};
use tempfile::TempDir;

use crate::syncs;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Embedded,
    Postgres,
    Redis,
}

impl Place {
    pub const ALL: [Self; 3] = [Self::Embedded, Self::Postgres, Self::Redis];

    pub fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::Postgres => "postgres",
            Self::Redis => "redis",
        }
    }
}

enum Server {
    None,
    Postgres(PostgresServer),
    Redis(RedisServer),
}

/// A place with its server. Folders are on a real disk, because on others syncs cost nothing.
pub struct Site {
    server: Server,
    folder: TempDir,
}

/// One store, with nothing in it, and the folder of the handler's own data.
#[derive(Debug, Clone)]
pub struct Empty {
    pub url: String,
    pub folder: std::path::PathBuf,
}

impl Site {
    /// `None`: the server is not installed.
    pub fn start(place: Place) -> Option<Self> {
        let server = match place {
            Place::Embedded => Ok(Server::None),
            Place::Postgres => PostgresServer::start(&[]).map(Server::Postgres),
            Place::Redis => RedisServer::start(&["appendonly yes", "appendfsync always"]).map(Server::Redis),
        };
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        match server {
            Ok(server) => Some(Self { server, folder }),
            Err(why) => {
                eprintln!("{} is left out: {why}", place.name());
                None
            }
        }
    }

    pub async fn fresh(&self) -> Empty {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("tiers_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = self.folder.path().join(&name);
        std::fs::create_dir(&folder).expect("a folder");
        let url = match &self.server {
            Server::None => format!("embedded:{}", folder.join("store").display()),
            Server::Redis(redis) => format!("redis://{}?hapax_prefix={name}", redis.address()),
            Server::Postgres(postgres) => {
                postgres
                    .sql("postgres", &format!("CREATE DATABASE {name} TEMPLATE template0"))
                    .expect("a database");
                let url = postgres.url(&name);
                let options = Options { migrate: true, ..Options::default() };
                PostgresStore::open(&url, options).await.expect("it is migrated").shut_down();
                postgres.sql(&name, "CREATE TABLE effects (number bigint)").expect("a table");
                url
            }
        };
        Empty { url, folder }
    }

    /// What was used until now.
    pub fn used(&self) -> Totals {
        let (children, server_bytes) = match &self.server {
            Server::None => (HashMap::new(), None),
            Server::Postgres(postgres) => {
                let bytes =
                    postgres.sql("postgres", "SELECT pg_current_wal_lsn() - '0/0'").expect("an answer");
                let pids = postgres
                    .sql("postgres", "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity")
                    .expect("an answer");
                (pids.split_whitespace().map(|pid| (pid.to_owned(), cpu_us(pid))).collect(), number(&bytes))
            }
            Server::Redis(redis) => {
                let info = redis.cli(&["INFO"]).expect("an answer");
                let field = |name: &str| {
                    let found = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
                    found.unwrap_or_default().trim().to_owned()
                };
                let pid = field("process_id");
                ([(pid.clone(), cpu_us(&pid))].into(), number(&field("aof_current_size")))
            }
        };
        let bytes = server_bytes.unwrap_or(0.0) + written();
        Totals { cpu_us: cpu_us("self"), servers: children, bytes, syncs: syncs::count().unwrap_or(f64::NAN) }
    }
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok()
}

/// Processor time of all threads of a process.
fn cpu_us(pid: &str) -> f64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0.0 };
    let nanos = tasks.flatten().map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(number).unwrap_or(0.0)
    });
    nanos.sum::<f64>() / 1e3
}

/// Bytes that this process gave to its files.
fn written() -> f64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    text.lines().find_map(|line| number(line.strip_prefix("write_bytes:")?)).unwrap_or(0.0)
}

pub struct Totals {
    cpu_us: f64,
    /// By process id: sessions of a database come and go.
    servers: HashMap<String, f64>,
    bytes: f64,
    /// Not a number if they are not counted.
    syncs: f64,
}

/// What was used between two times, for each message.
#[derive(Debug, Clone, Copy)]
pub struct Used {
    pub cpu_us: f64,
    pub server_cpu_us: f64,
    pub bytes: f64,
    pub syncs: f64,
}

impl Totals {
    pub fn since(&self, before: &Self) -> Used {
        let spent = |(pid, us): (&String, &f64)| us - before.servers.get(pid).copied().unwrap_or(0.0);
        Used {
            cpu_us: self.cpu_us - before.cpu_us,
            server_cpu_us: self.servers.iter().map(spent).sum::<f64>().max(0.0),
            bytes: self.bytes - before.bytes,
            syncs: self.syncs - before.syncs,
        }
    }
}

impl Used {
    pub fn for_each(self, messages: usize) -> Self {
        let each = |total: f64| total / messages as f64;
        Self {
            cpu_us: each(self.cpu_us),
            server_cpu_us: each(self.server_cpu_us),
            bytes: each(self.bytes),
            syncs: each(self.syncs),
        }
    }
}
