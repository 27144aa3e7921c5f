//! A server of PostgreSQL or Redis that a run starts for itself, and may kill; or several, of which one takes over.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use hapax_faults::{PostgresServer, RedisSentinels, RedisServer};

/// The database of a run's own PostgreSQL.
const DATABASE: &str = "postgres";
/// A master that is silent for this time is replaced.
const DOWN_AFTER: Duration = Duration::from_secs(1);
/// How long a replica may take to become the master.
const FAILOVER: Duration = Duration::from_secs(40);

/// The server of a run's own store. It ends with the run.
pub enum OwnStore {
    Postgres(PostgresServer),
    Redis(RedisServer),
    /// A master with two replicas, and three Sentinels.
    Sentinels(RedisSentinels),
}

impl OwnStore {
    /// Starts the server that a store's URL asks for: `private:postgres`, `private:redis` or `private:redis-sentinel`. `None`
    /// for any other URL.
    pub fn start(url: &str) -> Option<anyhow::Result<Self>> {
        let server = match url.strip_prefix("private:")? {
            "postgres" => PostgresServer::start(&[]).map(Self::Postgres),
            "redis" => RedisServer::start(&["appendonly yes", "appendfsync always"]).map(Self::Redis),
            "redis-sentinel" => {
                let settings = ["min-replicas-to-write 1", "min-replicas-max-lag 10", "appendonly yes"];
                RedisSentinels::start(&settings, DOWN_AFTER).map(Self::Sentinels)
            }
            other => Err(format!(
                "there is no private:{other}; there are private:postgres, private:redis and private:redis-sentinel"
            )),
        };
        Some(server.map_err(anyhow::Error::msg))
    }

    /// The store's URL.
    pub fn url(&self) -> String {
        match self {
            Self::Postgres(server) => server.url(DATABASE),
            Self::Redis(server) => format!("redis://{}", server.address()),
            Self::Sentinels(all) => format!("{}?hapax_durability=replicated", all.url()),
        }
    }

    /// Ends the server as a crash does, and starts it again on the same data and port. Of several, the master is ended, and
    /// started again when another has taken over.
    pub fn restart(&self) -> anyhow::Result<()> {
        let started = match self {
            // SIGKILL would leave PostgreSQL's other processes behind; they end at once at this signal, and write nothing.
            Self::Postgres(server) => {
                server.stop("QUIT");
                server.run()
            }
            Self::Redis(server) => {
                server.kill();
                server.run()
            }
            Self::Sentinels(all) => fail_over(all),
        };
        started.map_err(anyhow::Error::msg).context("the store's server")
    }
}

/// Kills the master, waits until the Sentinels have another, and starts the old one again as a replica.
fn fail_over(all: &RedisSentinels) -> Result<(), String> {
    let end = Instant::now() + FAILOVER;
    let master = wait_until(end, || all.master()).ok_or("the Sentinels know no master")?;
    all.nodes[master].kill();
    let other = wait_until(end, || all.master().filter(|now| *now != master));
    all.nodes[master].run()?;
    other.map(drop).ok_or_else(|| "no replica took over".to_owned())
}

fn wait_until<T>(end: Instant, mut found: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        match found() {
            Some(found) => return Some(found),
            None if Instant::now() > end => return None,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
