//! Runs a child with a time limit, copies its output and counts its test results.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::totals::{Reader, is_passed_line};

/// Poll interval for a running child.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a child's output may stay open after its end; then the processes that hold it are killed.
const OUTPUT_WAIT_MAX: Duration = Duration::from_secs(5);

/// How a child ended.
#[derive(Debug)]
pub struct ChildResult {
    /// `None` when it succeeded, else what went wrong.
    pub problem: Option<String>,
    /// Its test results.
    pub results: Reader,
}

/// Runs `command` to its end or to the time limit. It gets its own process group, so that all processes that it started
/// end with it.
pub fn run(command: &mut Command, limit: Duration) -> ChildResult {
    run_into(command, limit, std::io::stdout())
}

/// The same, with its output written elsewhere.
pub fn run_into(command: &mut Command, limit: Duration, ours: impl Write + Send + 'static) -> ChildResult {
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn() {
        Ok(child) => child,
        Err(error) => {
            let problem = format!("{} could not be started: {error}", command.get_program().display());
            return ChildResult { problem: Some(problem), results: Reader::default() };
        }
    };
    let output = read_aside(child.stdout.take().expect("stdout is piped"), ours);
    let mut problem = wait(&mut child, limit);
    let results = output.recv_timeout(OUTPUT_WAIT_MAX).or_else(|_| {
        // A process that it started outlived it and holds its output open; its group still exists.
        kill(&child);
        problem.get_or_insert_with(|| "left processes behind, which were killed".to_owned());
        output.recv_timeout(OUTPUT_WAIT_MAX)
    });
    let results = results.unwrap_or_else(|_| {
        problem.get_or_insert_with(|| "its output never ended".to_owned());
        Reader::default()
    });
    ChildResult { problem, results }
}

fn wait(child: &mut Child, limit: Duration) -> Option<String> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => return None,
            Ok(Some(status)) => return Some(status.to_string()),
            Ok(None) => {}
            Err(error) => return Some(format!("could not be waited for: {error}")),
        }
        let problem = if interrupted() {
            "interrupted".to_owned()
        } else if start.elapsed() >= limit {
            format!("killed after {} s, its time bound", limit.as_secs())
        } else {
            thread::sleep(POLL_INTERVAL);
            continue;
        };
        kill(child);
        // Reaps it; it was killed, so this returns soon.
        return child.wait().map_or_else(|error| Some(error.to_string()), |_| Some(problem));
    }
}

fn kill(child: &Child) {
    if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
        // It is fine if the group is already gone.
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Copies the output to ours as it arrives, without the lines of passed tests, and counts test results; sends them at its
/// end.
fn read_aside(output: ChildStdout, mut ours: impl Write + Send + 'static) -> Receiver<Reader> {
    let (answer, results) = channel();
    thread::spawn(move || {
        let (mut reader, mut output, mut line) = (Reader::default(), BufReader::new(output), Vec::new());
        while let Ok(1..) = output.read_until(b'\n', &mut line) {
            reader.read(&line);
            if !is_passed_line(&line) {
                // Our reader may be gone (`| head`); the child's results still count.
                let _ = ours.write_all(&line).and_then(|()| ours.flush());
            }
            line.clear();
        }
        let _ = answer.send(reader);
    });
    results
}

/// Whether SIGINT or SIGTERM was received. The children are not in our process group, so an interrupt of the terminal
/// does not reach them.
pub fn interrupted() -> bool {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let flag = FLAG.get_or_init(|| {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, flag.clone()).expect("these signals can be handled");
        }
        flag
    });
    flag.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Discards the child's output, because an outer run would count it.
    fn shell(script: &str, limit: Duration) -> ChildResult {
        run_into(Command::new("sh").args(["-c", script]), limit, std::io::sink())
    }

    #[test]
    fn results_are_counted() {
        let ended = shell("echo 'test result: ok. 2 passed; 0 failed; 1 ignored'", Duration::from_mins(1));
        assert_eq!((ended.problem, ended.results.totals.passed), (None, 2));
        assert_eq!(ended.results.totals.skipped, 1);
    }

    #[test]
    fn a_failure_is_told() {
        let ended = shell("exit 3", Duration::from_mins(1));
        assert_eq!(ended.problem.as_deref(), Some("exit status: 3"));
        let ended = run(&mut Command::new("/nonexistent/program"), Duration::from_mins(1));
        assert!(ended.problem.unwrap().starts_with("/nonexistent/program could not be started"));
    }

    #[test]
    fn the_time_bound_ends_the_whole_group() {
        let start = Instant::now();
        // The inner sleep holds the output open: the run ends soon only if the inner sleep is killed too.
        let ended = shell("echo begun; sleep 300 & sleep 300", Duration::from_millis(200));
        assert_eq!(ended.problem.as_deref(), Some("killed after 0 s, its time bound"));
        assert!(start.elapsed() < OUTPUT_WAIT_MAX, "{:?}", start.elapsed());
    }
}
