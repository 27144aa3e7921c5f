//! The PostgreSQL server of the tests, with connections to it.

use std::ops::Deref;

use hapax_faults::{PgBouncer, PostgresServer};
use sqlx::{Connection as _, PgConnection};

/// Sessions of a pooler for each database. Few, so that clients have to share them.
const SESSIONS: usize = 3;

/// A running server.
pub struct Server {
    postgres: PostgresServer,
    /// Stores reach it through this.
    pooler: Option<Pooler>,
}

struct Pooler {
    process: PgBouncer,
    /// Stores have a direct URL to listen.
    listens: bool,
}

impl Server {
    /// A server that runs already: `postgres://user@host:port/?query`.
    pub fn given(url: &str) -> Self {
        Self { postgres: PostgresServer::given(url), pooler: None }
    }

    /// Starts a server with these settings in a folder of its own.
    pub fn start(settings: &[&str]) -> Result<Self, String> {
        Ok(Self { postgres: PostgresServer::start(settings)?, pooler: None })
    }

    /// Starts a server that does not wait for a disk.
    pub fn start_in_memory() -> Result<Self, String> {
        Ok(Self { postgres: PostgresServer::start_in_memory()?, pooler: None })
    }

    /// Starts a server with files in its data folder, such as a certificate.
    pub fn start_with_files(settings: &[&str], files: &[(&str, &str)]) -> Result<Self, String> {
        Ok(Self { postgres: PostgresServer::start_with_files(settings, files)?, pooler: None })
    }

    /// Puts a PgBouncer between stores and the server; `listens`: stores pass it by to listen.
    pub fn behind_pooler(self, listens: bool) -> Result<Self, String> {
        let process = PgBouncer::start(self.address(), SESSIONS)?;
        Ok(Self { pooler: Some(Pooler { process, listens }), ..self })
    }

    pub async fn connect(&self, database: &str) -> PgConnection {
        PgConnection::connect(&self.url(database)).await.unwrap()
    }

    /// The URL of a store.
    pub fn store_url(&self, database: &str) -> String {
        let direct = self.url(database);
        let Some(pooler) = &self.pooler else { return direct };
        let through = direct.replace(&self.address().to_string(), &pooler.process.address().to_string());
        assert_ne!(direct, through);
        let listen = format!("&hapax_listen_url={}", direct.replace(':', "%3A").replace('/', "%2F"));
        format!("{through}?hapax_pooler=true{}", if pooler.listens { &listen } else { "" })
    }

    pub fn has_pooler(&self) -> bool {
        self.pooler.is_some()
    }
}

impl Deref for Server {
    type Target = PostgresServer;

    fn deref(&self) -> &PostgresServer {
        &self.postgres
    }
}
