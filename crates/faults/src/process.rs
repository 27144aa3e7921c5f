//! A program that tests start, read from, pause and kill.

use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// Timeout of every wait. It is longer than any step takes on a slow machine; only failures reach it.
pub const TIMEOUT: Duration = Duration::from_mins(1);

/// Poll interval for states without an event.
const POLL: Duration = Duration::from_millis(2);

/// A command that runs one test of the current test binary in a separate process.
///
/// The caller sets an environment variable that tells the test that it is the child.
pub fn rerun_test(name: &str) -> Command {
    let program = std::env::current_exe().expect("a test binary knows its own path");
    let mut command = Command::new(program);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command
}

/// A running program. It is killed when this value is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    lines: Receiver<String>,
    log: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Starts a program. Its standard output is read line by line, its standard error is collected for [`Self::log`].
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (sender, lines) = channel();
        let stdout = child.stdout.take().expect("standard output is piped");
        let stderr = child.stderr.take().expect("standard error is piped");
        let log = Arc::new(Mutex::new(String::new()));
        let collected = log.clone();
        let readers = vec![
            std::thread::spawn(move || {
                let _ = BufReader::new(stdout)
                    .lines()
                    .map_while(Result::ok)
                    .try_for_each(|line| sender.send(line));
            }),
            std::thread::spawn(move || collect_log(stderr, &collected)),
        ];
        Ok(Self { child, lines, log, readers })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Writes a line to the program's standard input.
    #[track_caller]
    pub fn write_line(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("standard input is open");
        writeln!(stdin, "{line}").expect("the program reads its standard input");
    }

    /// Takes the program's standard input; dropping it is the end of the input.
    pub fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The next line of its standard output; `None` at the end of the output.
    #[track_caller]
    pub fn next_line(&self) -> Option<String> {
        match self.lines.recv_timeout(TIMEOUT) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("the program printed nothing for {TIMEOUT:?}; it logged:\n{}", self.log())
            }
        }
    }

    /// The next line of its standard output that is there already.
    pub fn try_next_line(&self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Waits for a line that contains `text`, skipping others.
    #[track_caller]
    pub fn wait_for_line(&self, text: &str) -> String {
        self.find_line(text).unwrap_or_else(|why| panic!("{why}"))
    }

    /// As [`wait_for_line`](Self::wait_for_line); the error has what the program logged.
    pub fn find_line(&self, text: &str) -> Result<String, String> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(text) => return Ok(line),
                Ok(_) => {}
                Err(error) => {
                    return Err(format!("no line with {text:?} ({error}); it logged:\n{}", self.log()));
                }
            }
        }
    }

    /// Waits for a line that starts with `word`; returns the rest of the line, trimmed.
    #[track_caller]
    pub fn wait_for_prefix(&self, word: &str) -> String {
        loop {
            let line = self.wait_for_line(word);
            if let Some(rest) = line.strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Its standard error so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends a signal.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the process is ours and not reaped");
    }

    /// Pauses all its threads (SIGSTOP) and returns when they have stopped.
    #[track_caller]
    pub fn pause(&self) {
        self.signal(Signal::STOP);
        let deadline = Instant::now() + TIMEOUT;
        let options = WaitOptions::UNTRACED | WaitOptions::NOHANG;
        while !waitpid(Some(self.pid()), options)
            .expect("the process is a child of this one")
            .is_some_and(|(_, status)| status.stopped())
        {
            assert!(Instant::now() < deadline, "process {} does not stop", self.id());
            std::thread::sleep(POLL);
        }
    }

    /// Lets a paused process continue (SIGCONT).
    #[track_caller]
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it with SIGKILL and waits for its end. No thread of it runs when this returns.
    #[track_caller]
    pub fn kill(&mut self) -> ExitStatus {
        self.child.kill().expect("the process is ours");
        self.wait()
    }

    /// The exit status, if it has ended.
    #[track_caller]
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the process is a child of this one")
    }

    /// Waits for its end. Lines that were not read yet can still be read.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            if Instant::now() >= deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                panic!("the program did not end within {TIMEOUT:?}; it logged:\n{}", self.log());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits for its end; returns the lines since the last one read, and the whole standard error.
    ///
    /// Do not call this for a program whose own children keep its output open: it waits for the end of the output.
    #[track_caller]
    pub fn finish(mut self) -> (ExitStatus, Vec<String>, String) {
        drop(self.child.stdin.take());
        let status = self.wait();
        let lines = std::iter::from_fn(|| self.next_line()).collect();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        let log = self.log();
        (status, lines, log)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect_log(mut from: impl Read, log: &Mutex<String>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let text = String::from_utf8_lossy(&buffer[..count]);
        log.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
    }
}
