//! What private servers share: the user that they run as, a free port, and a shell that ends them with this process.

use std::io::{ErrorKind, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

/// Time for a server to start or stop.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// User and group of a process.
pub(crate) type User = (u32, u32);

/// A server's process, under a shell that ends it when our end of its input is closed: by [`Watch::stop`], or because this
/// process has ended in whatever way.
pub(crate) struct Watch {
    shell: Child,
    input: ChildStdin,
}

impl Watch {
    /// Starts a program whose output goes to the file `log` of a folder. At the end of this process, the shell sends it the
    /// signal `end`, and removes the folder.
    ///
    /// A shell lets the programs that it starts in the background ignore INT and QUIT: QUIT ends only those that handle it.
    pub fn start(
        end: &str,
        folder: &Path,
        user: Option<User>,
        program: &Path,
        args: &[impl AsRef<std::ffi::OsStr>],
    ) -> Result<Self, String> {
        // The shell reads a signal's name, or the end of its input.
        let script = r#"end=$1; dir=$2; shift 2; "$@" >>"$dir/log" 2>&1 </dev/null & pid=$!
            if read signal; then kill -s "$signal" $pid; wait $pid
            else kill -s "$end" $pid; wait $pid; rm -rf "$dir"; fi"#;
        let mut shell = command(Path::new("sh"), user);
        shell.args(["-c", script, "sh", end]).arg(folder).arg(program).args(args);
        shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut shell = shell.process_group(0).spawn().map_err(|error| error.to_string())?;
        let input = shell.stdin.take().expect("its input is piped");
        Ok(Self { shell, input })
    }

    /// Whether the server has ended by itself. The shell, which waits for its input, does not notice.
    pub fn has_ended(&self) -> bool {
        self.server().is_some_and(|server| {
            // The state follows the name, which is in brackets.
            std::fs::read_to_string(format!("/proc/{server}/stat")).is_ok_and(|stat| {
                stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'))
            })
        })
    }

    /// The server's process id.
    pub fn server(&self) -> Option<String> {
        let shell = self.shell.id();
        let children = std::fs::read_to_string(format!("/proc/{shell}/task/{shell}/children")).ok()?;
        children.split_whitespace().next().map(str::to_owned)
    }

    /// Sends a signal to the server by its name, and does not wait.
    pub fn signal(&self, signal: &str) {
        let server = self.server().expect("it runs");
        let sent = Command::new("kill").args(["-s", signal, &server]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the server's process can be signalled");
    }

    /// Sends a signal to the server by its name, and waits for its end.
    pub fn stop(mut self, signal: &str) {
        writeln!(self.input, "{signal}").expect("the shell reads it");
        drop(self.input);
        self.shell.wait().expect("the shell ends with the server");
    }
}

/// A command that runs as a user, without settings of ours that would change it.
pub(crate) fn command(program: &Path, user: Option<User>) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/").env_remove("LC_ALL").env("LC_ALL", "C").env_remove("PGDATA");
    if let Some((uid, gid)) = user {
        command.uid(uid).gid(gid);
    }
    command
}

/// The user to run servers as that refuse to run as root; `None`: our own.
pub(crate) fn unprivileged() -> Result<Option<User>, String> {
    if id(&["-u"]) != Some(0) {
        return Ok(None);
    }
    let ids = id(&["-u", "postgres"]).zip(id(&["-g", "postgres"]));
    ids.map(Some).ok_or_else(|| "PostgreSQL does not run as root, and there is no user `postgres`".to_owned())
}

fn id(args: &[&str]) -> Option<u32> {
    let output = Command::new("id").args(args).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

/// Different ports of loopback that were free a moment ago, for servers that bind them later, or again after they were killed.
///
/// They are below those that the system gives to outgoing connections: one of those would be taken by any client while the server
/// does not run, and a client that tries to reach it there could even connect to itself. And none of them is chosen again while this
/// process runs, by any process: a server that was killed finds its port free when it is started again.
///
/// # Panics
/// If none is free.
pub fn free_ports<const COUNT: usize>() -> [u16; COUNT] {
    let listeners = [(); COUNT].map(|()| free_listener());
    listeners.map(|listener| listener.local_addr().expect("it listens").port())
}

/// One of [`free_ports`].
pub(crate) fn free_port() -> u16 {
    let [port] = free_ports();
    port
}

/// The first port to choose; below it are those of well-known services.
const PORTS_BEGIN: u16 = 10_240;
/// How many ports are tried.
const PORTS_TRIED_MAX: usize = 1_000;

fn free_listener() -> TcpListener {
    let end = outgoing_ports_begin();
    let chosen = (PORTS_BEGIN < end).then(|| {
        let ports = (0..PORTS_TRIED_MAX).map(|_| fastrand::u16(PORTS_BEGIN..end));
        let mut reserved = ports.filter(|port| reserve(*port, std::process::id()));
        reserved.find_map(|port| TcpListener::bind(("127.0.0.1", port)).ok())
    });
    chosen.flatten().unwrap_or_else(|| TcpListener::bind("127.0.0.1:0").expect("a free port"))
}

/// Notes in a file that this process has chosen a port. Returns whether no other one has, and no earlier call.
///
/// A lock on the file would end with its process, but takes one of the process's open files for each port.
fn reserve(port: u16, process: u32) -> bool {
    let file = reservation(port);
    let reserved = || {
        std::fs::create_dir_all(file.parent().expect("it is in a folder"))?;
        let mut file = std::fs::File::options().write(true).create_new(true).open(&file)?;
        write!(file, "{process}")
    };
    match reserved() {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            // One whose process has ended is free for the next call. It is not taken at once: two processes could.
            let owner = std::fs::read_to_string(&file).unwrap_or_default();
            if owner.parse::<u32>().is_ok_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
                let _ = std::fs::remove_file(&file);
            }
            false
        }
        // Without a folder to write to, ports are not reserved.
        Ok(()) | Err(_) => true,
    }
}

/// The file of a port. Each user has a folder: one could not free what another one has left.
fn reservation(port: u16) -> PathBuf {
    let user = std::fs::metadata("/proc/self").map(|process| process.uid()).unwrap_or_default();
    std::env::temp_dir().join(format!("hapax-ports-{user}")).join(port.to_string())
}

/// The first port that the system gives to outgoing connections.
fn outgoing_ports_begin() -> u16 {
    const LINUX_DEFAULT: u16 = 32_768;
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    range.split_whitespace().next().and_then(|begin| begin.parse().ok()).unwrap_or(LINUX_DEFAULT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_chosen_once_while_its_process_runs() {
        let [port] = free_ports();
        assert!(!reserve(port, 1), "this process has it, although nothing listens there");
        let ended = Command::new("true").spawn().and_then(|mut child| {
            child.wait()?;
            Ok(child.id())
        });
        std::fs::write(reservation(port), ended.unwrap().to_string()).unwrap();
        assert!(!reserve(port, std::process::id()), "its process has ended, and the next call may have it");
        assert!(reserve(port, std::process::id()));
    }

    #[test]
    fn free_ports_differ_and_no_outgoing_connection_gets_one() {
        let ports: [u16; 50] = free_ports();
        let different: std::collections::BTreeSet<u16> = ports.into_iter().collect();
        assert_eq!(different.len(), 50, "{ports:?}");
        if outgoing_ports_begin() > PORTS_BEGIN {
            assert!(ports.iter().all(|port| *port < outgoing_ports_begin()), "{ports:?}");
        }
    }
}
