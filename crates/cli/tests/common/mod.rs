//! Runs the real binary: servers on free ports, commands against them.

// Each test file uses only a part.
#![allow(dead_code)]

pub mod collector;
pub mod filled;
pub mod postgres;
pub mod preload;
pub mod proxied;
pub mod relay;
pub mod told;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Timeout of every wait; only failures reach it.
pub const PATIENCE: Duration = Duration::from_mins(3);

/// The program in the given folder, without the environment of the tests.
pub fn hapax(folder: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("HAPAX_") {
            command.env_remove(name);
        }
    }
    command.current_dir(folder.path()).args(args).stdin(Stdio::null());
    command
}

/// Runs a command to its end, with a timeout: a server that should have refused to start is stopped.
#[track_caller]
pub fn run(folder: &TempDir, args: &[&str]) -> Done {
    run_within(PATIENCE, folder, args)
}

/// As [`run`], with a timeout of its own.
#[track_caller]
pub fn run_within(patience: Duration, folder: &TempDir, args: &[&str]) -> Done {
    let mut command = hapax(folder, args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let (end, ended) = channel();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).map(|_| text)
    });
    let output = std::thread::spawn(move || {
        let mut text = Vec::new();
        let read = stdout.read_to_end(&mut text).map(|_| text);
        let _ = end.send(());
        read
    });
    let is_in_time = ended.recv_timeout(patience).is_ok();
    if !is_in_time {
        kill_process(pid, Signal::KILL).unwrap();
    }
    let (stdout, stderr) = (output.join().unwrap().unwrap(), reader.join().unwrap().unwrap());
    let done = Done::new(Output { status: child.wait().unwrap(), stdout, stderr });
    assert!(is_in_time, "{args:?} did not end: {done:?}");
    done
}

/// The result of a command.
#[derive(Debug)]
pub struct Done {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    pub fn new(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Its standard output, if it succeeded.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }

    /// Its output parsed as JSON, if it succeeded.
    #[track_caller]
    pub fn json(self) -> serde_json::Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Its one-line error message, if it failed with this code.
    #[track_caller]
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.stderr.starts_with("error: ") && self.stderr.lines().count() == 1, "{self:?}");
        self.stderr
    }
}

/// A running server in its own folder.
pub struct Server {
    child: Child,
    lines: Receiver<String>,
    pub folder: TempDir,
    pub endpoint: String,
}

impl Server {
    /// Starts one on a free port and waits until it is ready.
    pub fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), &[])
    }

    /// Starts one in a folder, with additional arguments.
    pub fn start_in(folder: TempDir, args: &[&str]) -> Self {
        let mut command = hapax(&folder, &["serve", "--listen", "127.0.0.1:0"]);
        command.args(args);
        Self::start_by(folder, command)
    }

    /// Starts one by a command that runs it in this folder.
    pub fn start_by(folder: TempDir, mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (tell, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let mut server = Self { child, lines, folder, endpoint: String::new() };
        let api = server.line("  API   ");
        api.trim_start_matches("  API   ").clone_into(&mut server.endpoint);
        server
    }

    /// The next line that contains this text.
    #[track_caller]
    pub fn line(&mut self, containing: &str) -> String {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(containing) => return line,
                Ok(_) => {}
                Err(error) => {
                    let _ = self.child.kill();
                    panic!("no line with {containing:?}: {error}; it logged: {}", self.log());
                }
            }
        }
    }

    pub fn process_id(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Runs a client command against it.
    pub fn run(&self, args: &[&str]) -> Done {
        let output = hapax(&self.folder, args).env("HAPAX_ENDPOINT", &self.endpoint).output();
        Done::new(output.unwrap())
    }

    /// The address without its scheme.
    pub fn address(&self) -> &str {
        self.endpoint.trim_start_matches("http://")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The rest of its output until its end.
    #[track_caller]
    pub fn rest(&mut self) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let rest = std::iter::from_fn(|| self.lines.recv_timeout(left()).ok()).collect();
        assert!(Instant::now() < deadline, "the server did not end");
        rest
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        self.rest();
        self.child.wait().unwrap()
    }

    /// Its log; call this after its end.
    pub fn log(&mut self) -> String {
        let mut log = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        log
    }

    /// Shuts it down in order; returns its folder.
    pub fn stop(mut self) -> TempDir {
        self.signal(Signal::TERM);
        assert_eq!(self.wait().code(), Some(0));
        std::mem::replace(&mut self.folder, tempfile::tempdir().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
