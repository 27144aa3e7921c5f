//! `hapax work`: drains, stops commands that do not end, ends the processes that they started, survives its own crash.

mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Server, hapax};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_mins(3);

/// A running `hapax work`.
struct Work {
    child: Child,
    server: Server,
}

impl Work {
    fn start(server: Server, args: &[&str], script: &str) -> Self {
        let mut command = hapax(&server.folder, &["work", "jobs", "--json"]);
        command.args(args).args(["--", "sh", "-c", script]).env("HAPAX_ENDPOINT", &server.endpoint);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self { child, server }
    }

    /// Waits until a file has content; returns it.
    fn file(&self, name: &str) -> String {
        let path = self.server.folder.path().join(name);
        let mut text = String::new();
        until(name, || {
            text = std::fs::read_to_string(&path).unwrap_or_default();
            text.ends_with('\n')
        });
        text.trim().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its exit code and its report.
    fn end(&mut self) -> (Option<i32>, Vec<Value>) {
        until("hapax work ends", || self.child.try_wait().unwrap().is_some());
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (self.child.wait().unwrap().code(), lines)
    }

    fn peek(&self) -> Value {
        let mut messages = self.server.run(&["receive", "jobs", "--json"]).json();
        messages.as_array_mut().unwrap().pop().expect("a message is ready")
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "it took too long: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_alive(pid: &str) -> bool {
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    // A zombie process that waits to be reaped counts as dead.
    let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    test_kill_process(pid).is_ok() && !state.contains(") Z ")
}

fn jobs(args: &[&str]) -> Server {
    let server = Server::start();
    server.run(&[&["queue", "create", "jobs", "--tier", "effectively-once"], args].concat()).ok();
    server.run(&["send", "jobs", "x", "--key", "k"]).ok();
    server
}

#[test]
fn a_drain_lets_the_command_finish() {
    let script = "echo begun > begun; while ! test -e go; do sleep 0.02; done; echo finished";
    let mut work = Work::start(jobs(&[]), &[], script);
    work.file("begun");
    work.signal(Signal::TERM);
    let notes = BufReader::new(work.child.stderr.take().unwrap());
    let mut notes = notes.lines().map(Result::unwrap);
    assert!(notes.any(|note| note.contains("stopping: 1 command to finish")));
    std::fs::write(work.server.folder.path().join("go"), "").unwrap();
    let (code, lines) = work.end();
    assert_eq!(code, Some(0));
    assert_eq!(lines[0]["ended"], "done", "{lines:?}");
    let entry = work.server.run(&["ledger", "show", "--queue", "jobs", "k", "--json"]).json();
    assert_eq!(entry["outcome"]["value"], "finished");
}

#[test]
fn behind_the_bound_the_command_and_what_it_started_are_stopped_and_the_message_is_put_back_uncounted() {
    // Neither the command nor the process that it started reacts to SIGTERM.
    let script = "trap '' TERM; sh -c 'trap \"\" TERM; while :; do sleep 0.05; done' & echo $! > grandchild; \
                  echo $$ > child; while :; do sleep 0.05; done";
    let mut work = Work::start(jobs(&[]), &["--drain", "50ms", "--kill-after", "100ms"], script);
    let (child, grandchild) = (work.file("child"), work.file("grandchild"));
    work.signal(Signal::TERM);
    let (code, lines) = work.end();
    assert_eq!(code, Some(0));
    assert_eq!(lines[0]["ended"], "deferred", "{lines:?}");
    assert!(lines[0]["detail"].as_str().unwrap().contains("stopped at the end of the drain"), "{lines:?}");
    until("both are dead", || !is_alive(&child) && !is_alive(&grandchild));
    let entry = work.server.run(&["ledger", "show", "--queue", "jobs", "k", "--json"]).json();
    assert_eq!(entry["state"], "in_doubt", "it may have acted: {entry}");
    assert_eq!(work.peek()["attempt"], 1, "a drain counts no attempt");
}

#[test]
fn a_second_signal_does_not_wait() {
    let mut work = Work::start(jobs(&[]), &["--drain", "10m"], "echo $$ > child; sleep 600");
    let child = work.file("child");
    work.signal(Signal::TERM);
    // Two signals in quick succession may be merged into one: the second one is repeated until it takes effect.
    let deadline = Instant::now() + PATIENCE;
    while work.child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "it waits for the drain's bound");
        work.signal(Signal::INT);
        std::thread::sleep(Duration::from_millis(20));
    }
    let (code, lines) = work.end();
    assert_eq!((code, &lines[0]["ended"]), (Some(0), &"deferred".into()), "{lines:?}");
    assert!(!is_alive(&child));
}

#[test]
fn a_command_may_run_only_so_long() {
    let server = jobs(&["--retry-base", "10m", "--retry-cap", "10m"]);
    let mut work = Work::start(server, &["--run-max", "100ms", "--once"], "echo $$ > child; sleep 600");
    let (code, lines) = work.end();
    assert_eq!((code, &lines[0]["ended"]), (Some(0), &"retried".into()), "{lines:?}");
    assert!(lines[0]["detail"].as_str().unwrap().contains("longer than --run-max"), "{lines:?}");
    // On a slow machine it is stopped before it has written its process id.
    let child = std::fs::read_to_string(work.server.folder.path().join("child")).unwrap_or_default();
    assert!(!child.ends_with('\n') || !is_alive(child.trim()));
}

#[test]
fn processes_that_a_command_started_end_with_it() {
    let script = "sleep 600 & echo $! > grandchild; exit 0";
    let mut work = Work::start(jobs(&[]), &["--once"], script);
    let grandchild = work.file("grandchild");
    let (code, lines) = work.end();
    assert_eq!((code, &lines[0]["ended"]), (Some(0), &"done".into()));
    until("the grandchild is dead", || !is_alive(&grandchild));
}

#[test]
fn a_lost_lease_kills_the_command() {
    // The store no longer answers: the lease ends by the worker's own clock.
    let script = "echo $$ > child; sleep 600";
    let mut work = Work::start(jobs(&[]), &["--lease", "5s", "--drain", "0"], script);
    let child = work.file("child");
    let entry = work.server.run(&["ledger", "show", "--queue", "jobs", "k", "--json"]).json();
    assert_eq!(entry["state"], "processing");
    assert!(is_alive(&child));
    work.server.signal(Signal::STOP);
    until("the command is dead", || !is_alive(&child));
    work.server.signal(Signal::CONT);
    work.signal(Signal::TERM);
    work.end();
}

#[test]
fn a_crash_of_the_worker_brings_the_message_back_as_a_takeover() {
    // A command that has read its input is known to the watchdog.
    let script = "cat > body; echo $$ > child; echo $HAPAX_FENCE $HAPAX_DERIVED_KEY > first; exec sleep 600";
    let mut work = Work::start(jobs(&[]), &["--lease", "3s"], script);
    let (orphan, first) = (work.file("child"), work.file("first"));
    work.child.kill().unwrap();
    work.child.wait().unwrap();
    until("the command ended with its worker", || !is_alive(&orphan));
    let script = "echo $HAPAX_TAKEOVER $HAPAX_ATTEMPT; echo $HAPAX_FENCE $HAPAX_DERIVED_KEY > second";
    let again = hapax(&work.server.folder, &["work", "jobs", "--json", "--once", "--", "sh", "-c", script])
        .env("HAPAX_ENDPOINT", &work.server.endpoint)
        .output()
        .unwrap();
    assert_eq!(again.status.code(), Some(0));
    let second = work.file("second");
    let (first, second) = (first.split_once(' ').unwrap(), second.split_once(' ').unwrap());
    assert_eq!(first.1, second.1, "the derived key is the same in each attempt");
    assert!(first.0.parse::<u64>().unwrap() < second.0.parse().unwrap(), "the fence grows");
    let entry = work.server.run(&["ledger", "show", "--queue", "jobs", "k", "--json"]).json();
    assert_eq!(entry["outcome"]["value"], "1 2", "told that it takes over: {entry}");
}

#[test]
fn a_command_that_cannot_be_started_costs_no_attempt() {
    let server = jobs(&[]);
    for program in ["no-such-program", "./no-such-file", "."] {
        let error = server.run(&["work", "jobs", "--", program]).failed(1);
        assert!(error.contains(&format!("the command {program} cannot be started")), "{error}");
    }
    // A script whose interpreter is missing passes every check before the start, and then cannot be run.
    let script = server.folder.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let done = server.run(&["work", "jobs", "--json", "--", "./script"]);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.stderr.contains("error: the command ./script cannot be started: "), "{done:?}");
    let line: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(line["ended"], "deferred", "{line}");
    let entry = server.run(&["ledger", "show", "--queue", "jobs", "k", "--json"]);
    assert_eq!(entry.code, Some(1), "nothing happened, so nothing is in doubt: {entry:?}");
    assert_eq!(server.run(&["receive", "jobs", "--json"]).json()[0]["attempt"], 1);
}

/// Killed with SIGKILL, `hapax work` cannot clean up; its commands and the processes that they started end
/// nevertheless.
#[test]
fn a_kill_takes_the_commands_along() {
    // A command that has read its input is known to the watchdog.
    let script =
        "cat > body; sh -c 'while :; do sleep 0.05; done' & echo $! > grandchild; echo $$ > child; wait";
    let mut work = Work::start(jobs(&[]), &[], script);
    let (child, grandchild) = (work.file("child"), work.file("grandchild"));
    assert!(is_alive(&child) && is_alive(&grandchild));
    work.signal(Signal::KILL);
    work.child.wait().unwrap();
    until("both are dead", || !is_alive(&child) && !is_alive(&grandchild));
}

/// The same for a worker that is killed at the moment in which the process of a command appears, before anything can know
/// of that process.
#[test]
fn a_kill_at_the_start_of_a_command_leaves_nothing_running() {
    let server = jobs(&[]);
    let script = "echo $$ >> started; exec sleep 600";
    for round in 0..20 {
        server.run(&["send", "jobs", "x", "--key", &format!("round-{round}")]).ok();
        let mut command =
            hapax(&server.folder, &["work", "jobs", "--lease", "600s", "--", "sh", "-c", script]);
        let mut work = command.env("HAPAX_ENDPOINT", &server.endpoint).stderr(Stdio::null()).spawn().unwrap();
        let id = work.id();
        // The first process of `hapax work` is its watchdog.
        let deadline = Instant::now() + PATIENCE;
        while children(id).len() < 2 {
            assert!(
                Instant::now() < deadline,
                "no command was started, or this kernel does not list children"
            );
        }
        let processes = children(id);
        work.kill().unwrap();
        work.wait().unwrap();
        until("all of its processes have ended", || !processes.iter().any(|process| is_alive(process)));
    }
    let started = std::fs::read_to_string(server.folder.path().join("started")).unwrap_or_default();
    assert!(!started.lines().any(is_alive), "{started}");
}

/// The processes that a process has started.
fn children(process: u32) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let paths = threads.filter_map(|thread| Some(thread.ok()?.path().join("children")));
    let lists: Vec<_> = paths.filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    lists.iter().flat_map(|list| list.split_whitespace()).map(str::to_owned).collect()
}

/// The output of a command is printed line by line with its message's id, and a summary follows at the end.
#[test]
fn output_has_a_prefix_and_the_end_a_summary() {
    let server = jobs(&[]);
    let script = "echo out; echo err >&2; printf unfinished";
    let done = server.run(&["work", "jobs", "--until-empty", "--json", "--", "sh", "-c", script]);
    let line: Value = serde_json::from_str(done.stdout.trim()).unwrap();
    let id = line["id"].as_str().unwrap();
    for word in ["out", "err", "unfinished"] {
        let shown = format!("{} | {word}\n", &id[id.len() - 8..]);
        assert!(done.stderr.contains(&shown), "{shown:?} is not in {:?}", done.stderr);
    }
    let last = done.stderr.lines().last().unwrap();
    assert!(last.starts_with("1 delivery in ") && last.ends_with(": 1 done"), "{last}");
    server.run(&["send", "jobs", "x", "--key", "other"]).ok();
    let quiet = server.run(&["work", "jobs", "--until-empty", "--quiet", "--", "sh", "-c", script]);
    assert!(!quiet.stderr.contains(" | "), "{}", quiet.stderr);
}

#[test]
fn the_summary_tells_what_died() {
    let server = Server::start();
    server
        .run(&["queue", "create", "jobs", "--dead-letters", "--max-attempts", "2", "--retry-base", "0s"])
        .ok();
    server.run(&["send", "jobs", "x"]).ok();
    let failed = server.run(&["work", "jobs", "--until-empty", "--quiet", "--", "sh", "-c", "exit 7"]);
    let last = failed.stderr.lines().last().unwrap();
    assert!(last.starts_with("2 deliveries in ") && last.ends_with(": 1 retried, 1 dead"), "{last}");
}
