//! A server of PostgreSQL or Redis that a run starts for itself, and may kill.

use anyhow::Context as _;
use hapax_faults::{PostgresServer, RedisServer};

/// The database of a run's own PostgreSQL.
const DATABASE: &str = "postgres";

/// The server of a run's own store. It ends with the run.
pub enum OwnStore {
    Postgres(PostgresServer),
    Redis(RedisServer),
}

impl OwnStore {
    /// Starts the server that a store's URL asks for: `private:postgres` or `private:redis`. `None` for any other URL.
    pub fn start(url: &str) -> Option<anyhow::Result<Self>> {
        let server = match url.strip_prefix("private:")? {
            "postgres" => PostgresServer::start(&[]).map(Self::Postgres),
            "redis" => RedisServer::start(&["appendonly yes", "appendfsync always"]).map(Self::Redis),
            other => {
                Err(format!("there is no private:{other}; there are private:postgres and private:redis"))
            }
        };
        Some(server.map_err(anyhow::Error::msg))
    }

    /// The store's URL.
    pub fn url(&self) -> String {
        match self {
            Self::Postgres(server) => server.url(DATABASE),
            Self::Redis(server) => format!("redis://{}", server.address()),
        }
    }

    /// Ends the server as a crash does, and starts it again on the same data and port.
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
        };
        started.map_err(anyhow::Error::msg).context("the store's server")
    }
}
