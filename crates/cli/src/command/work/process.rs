//! One run of the command in its own process group: passes the input, reads the output, and ends the command together
//! with all processes that it started.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use hapax::core::ledger::OUTCOME_BYTES_MAX;
use hapax::core::policy::ERROR_BYTES_MAX;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::start;
use super::watchdog::Watchdog;

/// How long to wait for the output of a command that has ended: a child of it may keep the pipe open.
const OUTPUT_WAIT_MAX: Duration = Duration::from_secs(1);
/// How often to check whether a command has ended, in case a signal was missed.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// A longer line of output is passed on in pieces of this size.
const LINE_BYTES_MAX: usize = 8 * 1024;

/// The state that all running commands watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HaltState {
    /// Continue.
    Running,
    /// End: SIGTERM.
    Terminate,
    /// The grace period is over: SIGKILL.
    Kill,
}

/// Why a command was told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// It exceeded its maximum run time.
    TimedOut,
    /// `hapax work` itself shuts down.
    ShutDown,
}

/// The command and its limits.
#[derive(Clone)]
pub struct CommandRunner {
    pub program: OsString,
    pub args: Vec<OsString>,
    pub run_max: Option<Duration>,
    /// The time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Kills the command if this process is killed.
    pub watchdog: Arc<Watchdog>,
    /// The command's output is copied to our standard error.
    pub shows_output: bool,
}

/// How a run ended.
#[derive(Debug)]
pub struct CommandResult {
    /// The exit code; `None`: ended by a signal.
    pub code: Option<i32>,
    pub signal: Option<i32>,
    /// Why it was told to end, if so.
    pub stopped: Option<StopReason>,
    pub stdout: CapturedOutput,
    /// The end of its standard error.
    pub stderr: String,
}

/// Standard output, up to the maximum size of an outcome.
#[derive(Debug, Default)]
pub struct CapturedOutput {
    pub bytes: Vec<u8>,
    /// Total number of bytes.
    pub total: u64,
    /// The command has ended and something else still holds the pipe: there may be more.
    pub is_open: bool,
}

impl CapturedOutput {
    /// Whether `bytes` may not be all of it.
    pub fn is_cut(&self) -> bool {
        self.is_open || self.total > self.bytes.len() as u64
    }
}

/// Kills the whole process group when dropped: a lost lease drops the run that holds this.
struct ProcessGroup<'a> {
    leader: Pid,
    armed: bool,
    watchdog: &'a Watchdog,
}

impl ProcessGroup<'_> {
    /// Must not be called after the leader was reaped: another process may then have its id.
    fn signal(&self, signal: Signal) {
        // All processes of the group may have ended already.
        let _ = kill_process_group(self.leader, signal);
    }
}

impl Drop for ProcessGroup<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.signal(Signal::KILL);
            self.watchdog.group_ended(self.leader);
        }
    }
}

/// Checks that the command exists before a message is received for it.
pub fn check(program: &Path) -> anyhow::Result<()> {
    let shown = program.display();
    if program.components().count() > 1 {
        return is_executable(program).with_context(|| format!("the command {shown} cannot be started"));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).map(|folder: PathBuf| folder.join(program));
    if places.any(|place| is_executable(&place).is_ok()) {
        return Ok(());
    }
    bail!("the command {shown} cannot be started: no folder of PATH has a program of this name")
}

fn is_executable(place: &Path) -> anyhow::Result<()> {
    let found = std::fs::metadata(place)?;
    if !found.is_file() || rustix::fs::access(place, rustix::fs::Access::EXEC_OK).is_err() {
        bail!("it is no program that may be executed");
    }
    Ok(())
}

impl CommandRunner {
    /// Runs the command once. An error: it could not be started, and nothing happened.
    ///
    /// If dropped while it runs, it kills the process group at once.
    pub async fn run(
        &self,
        env: Vec<(OsString, OsString)>,
        stale: &[OsString],
        body: Bytes,
        prefix: &str,
        halt: watch::Receiver<HaltState>,
    ) -> std::io::Result<CommandResult> {
        // Registered before the start, so that no end is missed.
        let mut ends = signal(SignalKind::child())?;
        let secret = format!("{:032x}:", fastrand::u128(..));
        let mut command = start::command(&secret, &self.program, &self.args)?;
        for name in stale {
            command.env_remove(name);
        }
        command.envs(env).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let leader = leader(&child)?;
        let mut group = ProcessGroup { leader, armed: true, watchdog: &self.watchdog };
        // The command itself starts when `write_body` tells it to.
        self.watchdog.group_started(leader);

        let (mut stdout, mut stderr) = (CapturedOutput::default(), Vec::new());
        let mut io = Box::pin({
            let (feed, out, err) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
            let (stdout, stderr) = (&mut stdout, &mut stderr);
            let echo = || self.shows_output.then(|| Echo::new(prefix));
            let (out_echo, err_echo) = (echo(), echo());
            async move {
                tokio::join!(
                    write_body(feed, body),
                    capture(out, stdout, out_echo),
                    capture_end(err, stderr, err_echo)
                );
            }
        });
        let (mut io_done, mut stopped, mut killed) = (false, None, false);
        let run_until = self.run_max.map(|max| Instant::now() + max);
        let mut kill_at = None;
        loop {
            tokio::select! {
                () = &mut io, if !io_done => io_done = true,
                () = exited(leader, &mut ends) => break,
                why = stop_requested(halt.clone(), run_until), if stopped.is_none() => {
                    group.signal(Signal::TERM);
                    stopped = Some(why);
                    kill_at = Some(Instant::now() + self.grace);
                }
                () = grace_over(halt.clone(), kill_at), if stopped.is_some() && !killed => {
                    group.signal(Signal::KILL);
                    killed = true;
                }
            }
        }
        // The leader has ended but is not reaped, so its process group id is not reused yet: kill everything that is
        // left of the delivery.
        group.signal(Signal::KILL);
        group.armed = false;
        self.watchdog.group_ended(leader);
        let status = child.wait().await?;
        if !io_done {
            io_done = timeout(OUTPUT_WAIT_MAX, &mut io).await.is_ok();
        }
        drop(io);
        stdout.is_open = !io_done;
        if let Some(error) = start::failure(&secret, &stdout.bytes) {
            return Err(error);
        }
        let stderr = String::from_utf8_lossy(&stderr).trim().to_owned();
        Ok(CommandResult { code: status.code(), signal: status.signal(), stopped, stdout, stderr })
    }
}

fn leader(child: &Child) -> std::io::Result<Pid> {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    pid.ok_or_else(|| std::io::Error::other("the command has no process id"))
}

/// Completes when the process has ended; does not reap it.
async fn exited(process: Pid, ends: &mut tokio::signal::unix::Signal) {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    // An error means that there is no such child any more.
    while matches!(waitid(WaitId::Pid(process), options), Ok(None)) {
        let _ = timeout(POLL_INTERVAL, ends.recv()).await;
    }
}

/// Completes when the command has to end.
async fn stop_requested(halt: watch::Receiver<HaltState>, run_until: Option<Instant>) -> StopReason {
    let too_long = async {
        match run_until {
            Some(at) => sleep_until(at).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = wait_for(halt, HaltState::Terminate) => StopReason::ShutDown,
        () = too_long => StopReason::TimedOut,
    }
}

/// Completes when the grace period is over.
async fn grace_over(halt: watch::Receiver<HaltState>, kill_at: Option<Instant>) {
    tokio::select! {
        () = wait_for(halt, HaltState::Kill) => {}
        () = sleep_until(kill_at.unwrap_or_else(Instant::now)) => {}
    }
}

async fn wait_for(mut halt: watch::Receiver<HaltState>, at_least: HaltState) {
    if halt.wait_for(|halt| *halt >= at_least).await.is_err() {
        // The sender is gone, so the state cannot change any more.
        std::future::pending::<()>().await;
    }
}

/// Starts the command and writes the body to its input. A command that does not read it is not an error.
async fn write_body(stdin: Option<ChildStdin>, body: Bytes) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(&[start::GO]).await;
        let _ = stdin.write_all(&body).await;
    }
}

/// Reads to the end; keeps the maximum size of an outcome.
async fn capture(from: Option<impl AsyncRead + Unpin>, kept: &mut CapturedOutput, mut echo: Option<Echo>) {
    let Some(mut from) = from else { return };
    let mut chunk = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        let room = OUTCOME_BYTES_MAX - kept.bytes.len();
        kept.bytes.extend_from_slice(&chunk[..read.min(room)]);
        kept.total += read as u64;
        if let Some(echo) = &mut echo {
            echo.add(&chunk[..read]).await;
        }
    }
    if let Some(echo) = echo {
        echo.end().await;
    }
}

/// Reads to the end; keeps the last part.
async fn capture_end(from: Option<impl AsyncRead + Unpin>, tail: &mut Vec<u8>, mut echo: Option<Echo>) {
    let Some(mut from) = from else { return };
    let mut chunk = vec![0; 4 * 1024];
    while let Ok(read @ 1..) = from.read(&mut chunk).await {
        tail.extend_from_slice(&chunk[..read]);
        tail.drain(..tail.len().saturating_sub(ERROR_BYTES_MAX));
        if let Some(echo) = &mut echo {
            echo.add(&chunk[..read]).await;
        }
    }
    if let Some(echo) = echo {
        echo.end().await;
    }
}

/// Copies whole lines to our own standard error, each with a prefix that identifies the message.
struct Echo {
    prefix: String,
    line: Vec<u8>,
}

impl Echo {
    fn new(prefix: &str) -> Self {
        Self { prefix: format!("{prefix} | "), line: Vec::new() }
    }

    async fn add(&mut self, bytes: &[u8]) {
        self.line.extend_from_slice(bytes);
        let whole = match self.line.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => end + 1,
            None if self.line.len() >= LINE_BYTES_MAX => self.line.len(),
            None => return,
        };
        let rest = self.line.split_off(whole);
        let lines = std::mem::replace(&mut self.line, rest);
        self.write(&lines).await;
    }

    async fn end(mut self) {
        if !self.line.is_empty() {
            let line = std::mem::take(&mut self.line);
            self.write(&line).await;
        }
    }

    /// Writes in one call, so that lines of concurrent commands do not mix.
    async fn write(&self, lines: &[u8]) {
        let mut text = Vec::with_capacity(lines.len() + 2 * self.prefix.len());
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            text.extend_from_slice(self.prefix.as_bytes());
            text.extend_from_slice(line);
        }
        if text.last() != Some(&b'\n') {
            text.push(b'\n');
        }
        let mut ours = tokio::io::stderr();
        // If standard error is closed, the run continues.
        let _ = ours.write_all(&text).await;
        let _ = ours.flush().await;
    }
}

/// Waits for this time, then raises the halt state.
pub async fn raise_after(halt: &watch::Sender<HaltState>, bound: Duration, say: HaltState) {
    sleep(bound).await;
    halt.send_if_modified(|now| {
        let later = *now < say;
        if later {
            *now = say;
        }
        later
    });
}
