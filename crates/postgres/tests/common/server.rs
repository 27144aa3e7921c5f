//! The PostgreSQL server of the tests, with connections to it.

use std::ops::Deref;

use hapax_faults::PostgresServer;
use sqlx::{Connection as _, PgConnection};

/// A running server.
pub struct Server(PostgresServer);

impl Server {
    /// A server that runs already: `postgres://user@host:port/?query`.
    pub fn given(url: &str) -> Self {
        Self(PostgresServer::given(url))
    }

    /// Starts a server with these settings in a folder of its own.
    pub fn start(settings: &[&str]) -> Result<Self, String> {
        PostgresServer::start(settings).map(Self)
    }

    pub async fn connect(&self, database: &str) -> PgConnection {
        PgConnection::connect(&self.url(database)).await.unwrap()
    }
}

impl Deref for Server {
    type Target = PostgresServer;

    fn deref(&self) -> &PostgresServer {
        &self.0
    }
}
