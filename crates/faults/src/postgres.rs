//! A private PostgreSQL server that tests stop and start. It runs as another user if need be: it refuses to run as root.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Time for the server to start or stop.
const PATIENCE: Duration = Duration::from_mins(1);

/// A PostgreSQL server. One that was started here ends with the process, also if that is killed.
///
/// Roles log in without a password, except for one with the name [`ROLE_WITH_PASSWORD`].
///
/// ```no_run
/// use hapax_faults::PostgresServer;
///
/// let server = PostgresServer::start(&["fsync=off"])?;
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
    user: Option<(u32, u32)>,
    port: u16,
    settings: Vec<String>,
    watch: Mutex<Option<Watch>>,
}

/// The server's process, under a shell that ends it when our end of its input is closed: by [`PostgresServer::stop`], or because
/// this process has ended in whatever way.
struct Watch {
    shell: Child,
    input: ChildStdin,
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
        let user = if is_root() { Some(postgres_user()?) } else { None };
        let folder = TempDir::with_prefix("hapax-postgres-").map_err(|error| error.to_string())?;
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
        let Watch { mut shell, mut input } = watch.expect("it runs");
        writeln!(input, "{signal}").expect("the shell reads it");
        drop(input);
        shell.wait().expect("the shell ends with the server");
    }

    /// Address of a server that was started here.
    ///
    /// # Panics
    /// If it was not started here.
    pub fn address(&self) -> std::net::SocketAddr {
        let own = self.own.as_ref().expect("only the address of a server that was started here is known");
        ([127, 0, 0, 1], own.port).into()
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

    /// Starts it again, on the same data and port.
    ///
    /// # Panics
    /// If it was not started here.
    pub fn run(&self) -> Result<(), String> {
        let own = self.own.as_ref().expect("only a server that was started here is started again");
        let (log, data) = (own.folder.path().join("log"), own.folder.path().join("data"));
        // The shell reads a signal's name, or the end of its input.
        // At the end of this process, it also removes the folder.
        let script = r#"dir=$1; shift; "$@" >>"$dir/log" 2>&1 </dev/null & pid=$!
            if read signal; then kill -s "$signal" $pid; wait $pid
            else kill -s QUIT $pid; wait $pid; rm -rf "$dir"; fi"#;
        let mut shell = command(Path::new("sh"), own.user);
        shell.args(["-c", script, "sh"]).arg(own.folder.path()).arg(program("postgres")?).arg("-D").arg(data);
        let port = own.port.to_string();
        for setting in ["listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=200"] {
            shell.args(["-c", setting]);
        }
        for setting in &own.settings {
            shell.args(["-c", setting]);
        }
        shell.args(["-p", &port]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut shell = shell.process_group(0).spawn().map_err(|error| error.to_string())?;
        let input = shell.stdin.take().expect("its input is piped");
        *own.watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(Watch { shell, input });
        own.wait_until_ready(&log)
    }
}

impl Own {
    fn wait_until_ready(&self, log: &Path) -> Result<(), String> {
        let start = Instant::now();
        let mut ready = command(&program("pg_isready")?, None);
        ready.args(["--quiet", "--host=127.0.0.1", "--port", &self.port.to_string()]);
        while !ready.status().map_err(|error| error.to_string())?.success() {
            if start.elapsed() > PATIENCE {
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

fn command(program: &Path, user: Option<(u32, u32)>) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/").env_remove("LC_ALL").env("LC_ALL", "C").env_remove("PGDATA");
    if let Some((uid, gid)) = user {
        command.uid(uid).gid(gid);
    }
    command
}

/// A program of PostgreSQL 15, from Debian's folder or from the path.
fn program(name: &str) -> Result<PathBuf, String> {
    let debian = PathBuf::from("/usr/lib/postgresql/15/bin").join(name);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name));
    let mut found = std::iter::once(debian).chain(found);
    found.find(|file| file.exists()).ok_or_else(|| format!("{name} is not installed; install postgresql-15"))
}

fn is_root() -> bool {
    id(&["-u"]) == Some(0)
}

fn postgres_user() -> Result<(u32, u32), String> {
    let ids = id(&["-u", "postgres"]).zip(id(&["-g", "postgres"]));
    ids.ok_or_else(|| "PostgreSQL does not run as root, and there is no user `postgres`".to_owned())
}

fn id(args: &[&str]) -> Option<u32> {
    let output = Command::new("id").args(args).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port").port()
}
