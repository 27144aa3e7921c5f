//! Kills the commands when `hapax work` itself is killed.
//!
//! SIGKILL leaves no time to clean up, so a second process does it. It reads the running process groups from a pipe,
//! and when the pipe closes it kills those that are left. A parent-death signal was rejected: it reaches the command,
//! but not the processes that the command started.

use std::collections::BTreeSet;
use std::io::{BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use rustix::process::{Pid, Signal, kill_process_group};

use super::start::own_program;

/// The subcommand of the second process.
pub const WATCHDOG_COMMAND: &str = "__watchdog";

/// Handle of the second process. Dropping it ends that process.
pub struct Watchdog {
    pipe: Mutex<Option<ChildStdin>>,
    child: Mutex<Child>,
}

impl Watchdog {
    /// Starts it in its own process group, so that Ctrl-C at the terminal does not reach it.
    pub fn start() -> std::io::Result<Self> {
        let mut command = Command::new(own_program()?);
        command.arg(WATCHDOG_COMMAND).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        Ok(Self { pipe: Mutex::new(child.stdin.take()), child: Mutex::new(child) })
    }

    /// Reports that a process group is running.
    pub fn group_started(&self, group: Pid) {
        self.write_line('+', group);
    }

    /// Reports that a process group has ended or was killed. Call this before its leader is reaped: after that, another
    /// process may have its id.
    pub fn group_ended(&self, group: Pid) {
        self.write_line('-', group);
    }

    fn write_line(&self, sign: char, group: Pid) {
        let mut pipe = self.pipe.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = pipe.as_mut() else { return };
        let line = format!("{sign}{}\n", group.as_raw_nonzero());
        if let Err(error) = open.write_all(line.as_bytes()) {
            tracing::warn!(%error, "the watchdog has gone: commands outlive this process if it is killed");
            *pipe = None;
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.pipe.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = self.child.lock().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

/// The second process: reads until the first one is gone, then kills the remaining groups.
pub fn watch() {
    let mut groups = BTreeSet::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let Some((sign, number)) = line.split_at_checked(1) else { continue };
        let Some(group) = number.parse().ok().and_then(Pid::from_raw) else { continue };
        match sign {
            "+" => groups.insert(group.as_raw_nonzero()),
            _ => groups.remove(&group.as_raw_nonzero()),
        };
    }
    for group in groups {
        if let Some(group) = Pid::from_raw(group.get()) {
            // It may have ended meanwhile.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}
