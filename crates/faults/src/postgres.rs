//! A private PostgreSQL server that tests stop and start. It runs as another user if need be: it refuses to run as root.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::private_server::{PATIENCE, User, Watch, command, free_port, unprivileged};

/// The variable of the environment that names a folder with the programs `postgres` and `initdb`. Without it, and for
/// programs that are not in it, Debian's PostgreSQL 15 is used, what is on the path, or Debian's newest version.
pub const PROGRAMS_VARIABLE: &str = "HAPAX_POSTGRES_BIN";

/// A PostgreSQL server. One that was started here ends with the process, also if that is killed.
///
/// Roles log in without a password, except for one with the name [`ROLE_WITH_PASSWORD`].
///
/// ```no_run
/// use hapax_faults::PostgresServer;
///
/// let server = PostgresServer::start_in_memory()?;
/// server.sql("postgres", "CREATE DATABASE shop")?;
/// server.stop("QUIT"); // as in a crash
/// server.run()?;
/// println!("{}", server.url("shop"));
/// # Ok::<(), String>(())
/// ```
pub struct PostgresServer {
    /// The URL without the database.
    base: String,
    query: String,
    own: Option<Own>,
}

/// What belongs to a server that was started here.
struct Own {
    folder: TempDir,
    user: Option<User>,
    port: u16,
    settings: Vec<String>,
    watch: Mutex<Option<Watch>>,
}

const PREFIX: &str = "hapax-postgres-";
/// Room in memory that a server may need, in bytes.
const MEMORY_MIN: u64 = 2 << 30;

/// The folder for files in memory, if there is room.
fn memory() -> Option<&'static Path> {
    let folder = Path::new("/dev/shm");
    let room = rustix::fs::statvfs(folder).ok()?;
    (room.f_bavail.saturating_mul(room.f_frsize) >= MEMORY_MIN).then_some(folder)
}

/// The role that must give its password to log in.
pub const ROLE_WITH_PASSWORD: &str = "with_password";

impl PostgresServer {
    /// A server that runs already: `postgres://user@host:port/?query`.
    pub fn given(url: &str) -> Self {
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        Self { base: base.trim_end_matches('/').to_owned(), query: query.to_owned(), own: None }
    }

    /// Starts a server with these settings in a folder of its own.
    pub fn start(settings: &[&str]) -> Result<Self, String> {
        Self::start_with_files(settings, &[])
    }

    /// Starts a server whose data is in memory where there is room, so that it need not wait for a disk: for tests that crash
    /// no machine. It is as durable as PostgreSQL is, by its settings.
    pub fn start_in_memory() -> Result<Self, String> {
        let settings = ["max_wal_size=128MB", "min_wal_size=32MB"];
        match memory() {
            Some(memory) => Self::start_in(TempDir::with_prefix_in(PREFIX, memory), &settings, &[]),
            None => Self::start(&settings),
        }
    }

    /// The same with files in its data folder, by name and content: for TLS, `server.crt` and `server.key`. What is given
    /// for `pg_hba.conf` comes before the rules that let everyone in.
    pub fn start_with_files(settings: &[&str], files: &[(&str, &str)]) -> Result<Self, String> {
        Self::start_in(TempDir::with_prefix(PREFIX), settings, files)
    }

    fn start_in(
        folder: std::io::Result<TempDir>,
        settings: &[&str],
        files: &[(&str, &str)],
    ) -> Result<Self, String> {
        let user = unprivileged()?;
        let folder = folder.map_err(|error| error.to_string())?;
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid), Some(gid)).map_err(|error| error.to_string())?;
        }
        let mut init = command(&program("initdb")?, user);
        init.args([
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
            "--pgdata",
        ]);
        let made = init.arg(folder.path().join("data")).output().map_err(|error| error.to_string())?;
        if !made.status.success() {
            return Err(format!("initdb: {}", String::from_utf8_lossy(&made.stderr)));
        }
        let access = folder.path().join("data/pg_hba.conf");
        let others = fs::read_to_string(&access).map_err(|error| error.to_string())?;
        let rule = format!("host all {ROLE_WITH_PASSWORD} all scram-sha-256\n{others}");
        fs::write(&access, rule).map_err(|error| error.to_string())?;
        for (name, content) in files {
            add_file(&folder.path().join("data").join(name), content, user)
                .map_err(|error| format!("{name}: {error}"))?;
        }
        let own = Own {
            folder,
            user,
            port: free_port(),
            settings: settings.iter().map(|&setting| setting.to_owned()).collect(),
            watch: Mutex::default(),
        };
        let server = Self {
            base: format!("postgres://postgres@127.0.0.1:{}", own.port),
            query: String::new(),
            own: Some(own),
        };
        server.run()?;
        Ok(server)
    }

    /// The URL of a database.
    pub fn url(&self, database: &str) -> String {
        let query = if self.query.is_empty() { String::new() } else { format!("?{}", self.query) };
        format!("{}/{database}{query}", self.base)
    }

    /// The folder of PostgreSQL's programs.
    pub fn programs() -> PathBuf {
        let found = program("psql").ok().and_then(|psql| Some(psql.parent()?.to_owned()));
        found.unwrap_or_default()
    }

    /// Runs statements with `psql`; returns the rows, a line each, their values separated by `|`.
    pub fn sql(&self, database: &str, sql: &str) -> Result<String, String> {
        let mut psql = command(&program("psql")?, None);
        psql.args([
            "--no-psqlrc",
            "--quiet",
            "--tuples-only",
            "--no-align",
            "--set=ON_ERROR_STOP=1",
            "-c",
            sql,
        ]);
        let done = psql.arg(self.url(database)).output().map_err(|error| error.to_string())?;
        if !done.status.success() {
            return Err(format!("{sql}: {}", String::from_utf8_lossy(&done.stderr)));
        }
        Ok(String::from_utf8_lossy(&done.stdout).trim_end().to_owned())
    }

    /// A session that stays open, for statements that are written to its input.
    pub fn session(&self, database: &str) -> Result<Child, String> {
        let mut psql = command(&program("psql")?, None);
        psql.args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align"]).arg(self.url(database));
        psql.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(|error| error.to_string())
    }

    /// Stops a server that was started here, with a signal by its name: `INT` disconnects clients, `QUIT` is as in a
    /// crash.
    ///
    /// # Panics
    /// If it does not run, or was not started here.
    pub fn stop(&self, signal: &str) {
        let own = self.own.as_ref().expect("only a server that was started here is stopped");
        let watch = own.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        watch.expect("it runs").stop(signal);
    }

    /// The server's address.
    ///
    /// # Panics
    /// If the server was given by a URL whose host is not an IP address with a port.
    pub fn address(&self) -> std::net::SocketAddr {
        let host = self.base.rsplit(['@', '/']).next().unwrap_or_default();
        host.parse().expect("an IP address and a port")
    }

    /// Sends a signal to all processes of a server that was started here: `STOP` pauses it, `CONT` continues it.
    ///
    /// # Panics
    /// If it was not started here.
    pub fn signal_all(&self, signal: &str) {
        let own = self.own.as_ref().expect("only a server that was started here is signalled");
        let file = own.folder.path().join("data/postmaster.pid");
        let Ok(text) = fs::read_to_string(file) else { return };
        let postmaster = text.lines().next().unwrap_or_default().to_owned();
        let children = format!("/proc/{postmaster}/task/{postmaster}/children");
        let children = fs::read_to_string(children).unwrap_or_default();
        let all = std::iter::once(postmaster.as_str()).chain(children.split_whitespace());
        // One that has ended meanwhile makes `kill` fail.
        let _ = Command::new("kill").arg(format!("-{signal}")).args(all).stderr(Stdio::null()).status();
    }

    /// Starts it again, on the same data and port. After a kill, a process of the old server may still hold the shared memory
    /// for a moment: the new one ends then, and is started once more.
    ///
    /// # Panics
    /// If it was not started here.
    pub fn run(&self) -> Result<(), String> {
        let start = Instant::now();
        loop {
            match self.run_once() {
                Err(_) if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(50)),
                done => return done,
            }
        }
    }

    fn run_once(&self) -> Result<(), String> {
        let own = self.own.as_ref().expect("only a server that was started here is started again");
        let (log, data) = (own.folder.path().join("log"), own.folder.path().join("data"));
        let mut args = vec!["-D".into(), data.into_os_string(), "-p".into(), own.port.to_string().into()];
        let fixed = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=200"];
        for setting in fixed.into_iter().chain(own.settings.iter().map(String::as_str)) {
            args.extend(["-c".into(), setting.into()]);
        }
        let watch = Watch::start("QUIT", own.folder.path(), own.user, &program("postgres")?, &args)?;
        let ready = own.wait_until_ready(&log, &watch);
        if ready.is_err() {
            // Dropping it would remove the data.
            watch.stop("KILL");
            return ready;
        }
        *own.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        Ok(())
    }
}

impl Own {
    fn wait_until_ready(&self, log: &Path, watch: &Watch) -> Result<(), String> {
        let start = Instant::now();
        let mut ready = command(&program("pg_isready")?, None);
        ready.args(["--quiet", "--host=127.0.0.1", "--port", &self.port.to_string()]);
        while !ready.status().map_err(|error| error.to_string())?.success() {
            if watch.has_ended() || start.elapsed() > PATIENCE {
                return Err(format!(
                    "the server did not start: {}",
                    fs::read_to_string(log).unwrap_or_default()
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

/// Writes a file that only the server can read, before the content that it has.
fn add_file(file: &Path, content: &str, user: Option<User>) -> std::io::Result<()> {
    let others = if file.exists() { fs::read_to_string(file)? } else { String::new() };
    fs::write(file, format!("{content}{others}"))?;
    fs::set_permissions(file, fs::Permissions::from_mode(0o600))?;
    user.map_or(Ok(()), |(uid, gid)| chown(file, Some(uid), Some(gid)))
}

/// A program of PostgreSQL, from the folder that the environment names, from Debian's folders or from the path.
fn program(name: &str) -> Result<PathBuf, String> {
    let given = std::env::var_os(PROGRAMS_VARIABLE).map(PathBuf::from);
    let debian = Path::new("/usr/lib/postgresql");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = given.into_iter().chain([debian.join("15/bin")]).chain(std::env::split_paths(&path));
    let mut folders =
        folders.chain(versions(debian).into_iter().map(|version| debian.join(format!("{version}/bin"))));
    let found = folders.find_map(|folder| Some(folder.join(name)).filter(|file| file.exists()));
    found.ok_or_else(|| format!("{name} is not installed; install postgresql-15"))
}

/// The versions in Debian's folder that the store works with, the newest first.
fn versions(debian: &Path) -> Vec<u32> {
    let folders = fs::read_dir(debian).into_iter().flatten().flatten();
    let mut versions: Vec<u32> = folders
        .filter_map(|folder| folder.file_name().to_str()?.parse().ok())
        .filter(|version| *version > 15)
        .collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    versions
}
