//! The private PostgreSQL server, and what is counted in it.

use std::collections::HashMap;

use hapax_faults::PostgresServer;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

/// A server with fsync on. Checkpoints are rare: the first change of a page after one writes the whole page to the WAL,
/// and that would hit whichever contestant has its turn then.
pub struct Server {
    server: PostgresServer,
    admin: PgConnection,
    postmaster: String,
}

/// Counters at one moment.
pub struct Counters {
    wal_bytes: f64,
    /// CPU seconds of each process of the server.
    cpu: HashMap<String, f64>,
    client_cpu_secs: f64,
}

/// What was used between two moments.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    pub wal_bytes: f64,
    pub server_cpu_secs: f64,
    pub client_cpu_secs: f64,
}

/// What the server counts of statements.
#[derive(Debug, Clone, Copy, Default)]
pub struct Statements {
    pub calls: f64,
    /// Pages that were looked at, in memory or on disk.
    pub buffers: f64,
}

impl Server {
    pub async fn start() -> Self {
        let settings = [
            "shared_preload_libraries=pg_stat_statements",
            "shared_buffers=512MB",
            "checkpoint_timeout=1h",
            "max_wal_size=20GB",
            "max_connections=500",
        ];
        let server = PostgresServer::start(&settings).expect("PostgreSQL 15 starts");
        let mut admin = PgConnection::connect(&server.url("postgres")).await.expect("a connection");
        admin.execute("CREATE EXTENSION pg_stat_statements").await.expect("statements are counted");
        let pid: i32 =
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut admin).await.expect("a pid");
        let status =
            std::fs::read_to_string(format!("/proc/{pid}/status")).expect("Linux tells about processes");
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).expect("it has a parent");
        let postmaster = parent.trim().to_owned();
        let mut server = Self { server, admin, postmaster };
        server.track(false).await;
        server
    }

    pub fn url(&self, database: &str) -> String {
        self.server.url(database)
    }

    pub async fn connect(&self, database: &str) -> PgConnection {
        PgConnection::connect(&self.url(database)).await.expect("a connection")
    }

    /// Makes a database with these statements.
    pub async fn create(&mut self, database: &str, sql: &str) {
        let create = format!("CREATE DATABASE {database} TEMPLATE template0 ENCODING 'UTF8'");
        self.admin.execute(create.as_str()).await.expect("a database is made");
        self.connect(database).await.execute(sql).await.expect("its tables are made");
    }

    /// Counting statements costs time with each of them, so it is off while rates are measured.
    async fn track(&mut self, on: bool) {
        let set =
            format!("ALTER SYSTEM SET pg_stat_statements.track = '{}'", if on { "top" } else { "none" });
        self.admin.execute(set.as_str()).await.expect("the setting is changed");
        self.admin.execute("SELECT pg_reload_conf()").await.expect("the settings are read again");
        // Sessions read them before their next statement.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }

    pub async fn count_statements(&mut self) {
        self.track(true).await;
        self.admin.execute("SELECT pg_stat_statements_reset()").await.expect("counting starts");
    }

    /// Ends counting; gives what was counted in a database.
    pub async fn counted(&mut self, database: &str) -> Statements {
        let sql = "SELECT coalesce(sum(calls), 0)::float8, coalesce(sum(shared_blks_hit + shared_blks_read), 0)::float8 \
                   FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = $1";
        let row = sqlx::query(sql).bind(database).fetch_one(&mut self.admin).await.expect("the counts");
        self.track(false).await;
        Statements { calls: row.get(0), buffers: row.get(1) }
    }

    pub async fn counters(&mut self) -> Counters {
        let sql = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8";
        let wal_bytes = sqlx::query_scalar(sql).fetch_one(&mut self.admin).await.expect("the WAL's end");
        let children = format!("/proc/{0}/task/{0}/children", self.postmaster);
        let children = std::fs::read_to_string(children).unwrap_or_default();
        let cpu = |pid: &str| {
            let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
            Some((pid.to_owned(), text.split(' ').next()?.parse::<f64>().ok()? / 1e9))
        };
        let cpu = children.split_whitespace().filter_map(cpu).collect();
        Counters { wal_bytes, cpu, client_cpu_secs: crate::measure::cpu_secs() }
    }

    /// What was used since. A process of the server that has ended meanwhile is not counted.
    pub async fn used_since(&mut self, before: &Counters) -> Used {
        let now = self.counters().await;
        let spent = |(pid, secs): (&String, &f64)| secs - before.cpu.get(pid).copied().unwrap_or(0.0);
        Used {
            wal_bytes: now.wal_bytes - before.wal_bytes,
            server_cpu_secs: now.cpu.iter().map(spent).sum(),
            client_cpu_secs: now.client_cpu_secs - before.client_cpu_secs,
        }
    }
}
