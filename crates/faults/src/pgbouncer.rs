//! A private PgBouncer before a PostgreSQL server, in transaction mode: whatever a client leaves in a session, the next one
//! finds.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tempfile::TempDir;

use crate::private_server::{PATIENCE, Watch, free_port, unprivileged};

/// A running PgBouncer. It ends with the process, also if that is killed.
///
/// Sessions are few and are given out in turn, so that two statements of a client that are not in one transaction usually
/// run in two sessions.
///
/// ```no_run
/// use hapax_faults::{PgBouncer, PostgresServer};
///
/// let server = PostgresServer::start_in_memory()?;
/// let pooler = PgBouncer::start(server.address(), 3)?;
/// println!("postgres://postgres@{}/postgres", pooler.address());
/// # Ok::<(), String>(())
/// ```
pub struct PgBouncer {
    port: u16,
    // Before the folder, so that the program ends first.
    watch: Option<Watch>,
    folder: TempDir,
}

/// Ends it at once. Before version 1.23 it does not handle QUIT.
const END: &str = "TERM";

impl PgBouncer {
    /// Starts it before a server that lets the role `postgres` in without a password, with at most `sessions` sessions
    /// for each database.
    ///
    /// # Errors
    /// If it is not installed or does not start; the text says what to do.
    pub fn start(server: SocketAddr, sessions: usize) -> Result<Self, String> {
        let (program, user) = (Self::program()?, unprivileged()?);
        let folder = TempDir::with_prefix("hapax-pgbouncer-").map_err(|error| error.to_string())?;
        let port = free_port();
        let write = |name: &str, text: &str| {
            fs::write(folder.path().join(name), text).map_err(|error| format!("{name}: {error}"))
        };
        write("users.txt", "\"postgres\" \"\"\n")?;
        let users = folder.path().join("users.txt");
        let settings = format!(
            "[databases]\n* = host={} port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = transaction\n\
             default_pool_size = {sessions}\nmax_client_conn = 1000\nserver_round_robin = 1\n",
            server.ip(),
            server.port(),
            users.display(),
        );
        write("pgbouncer.ini", &settings)?;
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid), Some(gid)).map_err(|error| error.to_string())?;
        }
        let watch = Watch::start(END, folder.path(), user, &program, &[folder.path().join("pgbouncer.ini")])?;
        let pooler = Self { port, watch: Some(watch), folder };
        pooler.wait_until_ready()?;
        Ok(pooler)
    }

    /// The address that clients connect to.
    pub fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// The program, from Debian's folder or from the path.
    ///
    /// # Errors
    /// If it is not installed.
    pub fn program() -> Result<PathBuf, String> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders = std::iter::once(PathBuf::from("/usr/sbin")).chain(std::env::split_paths(&path));
        let found = folders.find_map(|folder| Some(folder.join("pgbouncer")).filter(|file| file.exists()));
        found.ok_or_else(|| "pgbouncer is not installed; install Debian's pgbouncer".to_owned())
    }

    fn wait_until_ready(&self) -> Result<(), String> {
        let start = Instant::now();
        while TcpStream::connect(self.address()).is_err() {
            if start.elapsed() > PATIENCE {
                return Err(format!("PgBouncer did not start: {}", log(self.folder.path())));
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(())
    }
}

fn log(folder: &Path) -> String {
    fs::read_to_string(folder.join("log")).unwrap_or_default()
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.stop(END);
        }
    }
}
