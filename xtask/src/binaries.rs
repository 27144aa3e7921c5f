//! Runs the test binaries of the workspace, some at the same time: most of them wait for servers, leases and faults, and one
//! after the other they would take twice as long.

use std::collections::VecDeque;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::child::{self, ChildResult};
use crate::suite::{Context, Outcome, Step};
use crate::totals::Reader;

/// How many run at the same time. More of them would make waits run out on a machine with two cores.
const LANES: usize = 2;
/// Time limit of one binary, which `--long` multiplies like that of its step.
const LIMIT: Duration = Duration::from_mins(15);
/// The binaries that take longest, the longest first. They begin first, so that none is left over at the end.
const LONGEST: &[&str] = &[
    "kafka",
    "kafka_sink",
    "published_losses",
    "verify_holds_on_shared_stores",
    "share",
    "kafka_run",
    "verify_on_kafka",
    "queues",
    "complaints",
    "cluster_faults",
    "transactional_on_postgres",
];

/// A test binary that cargo has built.
#[derive(Debug, PartialEq, Eq)]
struct Binary {
    /// The name of its target.
    name: String,
    program: PathBuf,
    /// The folder of its package, where cargo would run it.
    folder: PathBuf,
}

/// Runs all binaries that `build`, a `cargo test --no-run`, builds.
pub fn run(cx: &Context, step: &Step, mut build: Command, args: &[String]) -> Outcome {
    build.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let binaries = match built(&mut build) {
        Ok(binaries) => binaries,
        Err(problem) => {
            return Outcome::Ran(ChildResult { problem: Some(problem), results: Reader::default() });
        }
    };
    println!("\n==> {}: {} binaries, {LANES} at a time", step.name, binaries.len());
    let path =
        build.get_envs().find(|(name, _)| *name == "PATH").and_then(|(_, path)| path.map(ToOwned::to_owned));
    let command = |binary: &Binary| {
        let mut command = crate::without_cargo(Command::new(&binary.program));
        command.current_dir(&binary.folder).args(args);
        command.envs(path.iter().map(|path| ("PATH", path)));
        cx.with_environment(command)
    };
    let start = Instant::now();
    let limit = cx.limit(step.limit);
    let sum = Mutex::new(ChildResult { problem: None, results: Reader::default() });
    in_lanes(longest_first(binaries), |binary| {
        let rest = limit.saturating_sub(start.elapsed());
        let ended = run_one(&binary, command(&binary), cx.limit(LIMIT).min(rest));
        add(&mut lock(&sum), ended);
    });
    Outcome::Ran(sum.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs all items in their order, some at the same time.
fn in_lanes<T: Send>(items: Vec<T>, run: impl Fn(T) + Sync) {
    let left = Mutex::new(VecDeque::from(items));
    // The list is not locked while an item runs.
    let next = || lock(&left).pop_front();
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                while let Some(item) = next() {
                    run(item);
                }
            });
        }
    });
}

/// Runs one and prints its output when it has ended, so that the outputs of two do not mix.
fn run_one(binary: &Binary, mut command: Command, limit: Duration) -> ChildResult {
    let (start, output) = (Instant::now(), Output::default());
    let mut ended = child::run_into(&mut command, limit, output.clone());
    if ended.problem.is_none() && ended.results.binaries == 0 {
        ended.problem = Some("ended without a result line".to_owned());
    }
    if let Some(problem) = &mut ended.problem {
        *problem = format!("{}: {problem}", binary.name);
    }
    let title = format!("{} of {}", binary.name, binary.folder.file_name().unwrap_or_default().display());
    let text = lock(&output.0);
    let text = String::from_utf8_lossy(&text);
    println!("\n    {title}, {:.1} s{}", start.elapsed().as_secs_f64(), text.trim_end());
    ended
}

/// A test that failed makes its binary fail: its name is told, and one problem stands for all.
fn add(sum: &mut ChildResult, ended: ChildResult) {
    if let Some(problem) = ended.problem {
        let all = sum.problem.get_or_insert_default();
        if !all.is_empty() {
            all.push_str("; ");
        }
        all.push_str(&problem);
    }
    sum.results.add(ended.results);
}

/// The binaries that cargo names, which it builds if they are not there.
fn built(build: &mut Command) -> Result<Vec<Binary>, String> {
    let output = build.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cargo could not be started: {error}"))?;
    if !output.status.success() {
        return Err(format!("the tests do not build: {}", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let binaries: Vec<Binary> = text.lines().filter_map(binary).collect();
    if binaries.is_empty() { Err("cargo named no test binary".to_owned()) } else { Ok(binaries) }
}

/// A line of cargo's output that tells of a test binary.
fn binary(line: &str) -> Option<Binary> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    Some(Binary {
        name: message["target"]["name"].as_str()?.to_owned(),
        program: message["executable"].as_str()?.into(),
        folder: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
    })
}

fn longest_first(mut binaries: Vec<Binary>) -> Vec<Binary> {
    let place = |binary: &Binary| LONGEST.iter().position(|name| *name == binary.name);
    binaries.sort_by_key(|binary| place(binary).unwrap_or(LONGEST.len()));
    binaries
}

/// The output of a binary.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str) -> Binary {
        Binary { name: name.to_owned(), program: "sh".into(), folder: "/a/package".into() }
    }

    fn ran(script: &str) -> ChildResult {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run_one(&shell("one"), command, Duration::from_mins(1))
    }

    #[test]
    fn test_binaries_are_read_from_the_output_of_cargo() {
        let line = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/core/Cargo.toml","target":{{"name":"leases"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = binary(&line(true, r#""/w/target/leases-1""#)).unwrap();
        assert_eq!((found.name.as_str(), found.folder.to_str()), ("leases", Some("/w/crates/core")));
        assert_eq!(binary(&line(false, r#""/w/target/debug/hapax""#)), None, "a program that tests call");
        assert_eq!(binary(&line(true, "null")), None);
        assert_eq!(binary("warning: not JSON"), None);
    }

    #[test]
    fn the_results_of_all_binaries_are_added_up() {
        let mut sum = ChildResult { problem: None, results: Reader::default() };
        add(&mut sum, ran("echo 'test result: ok. 2 passed; 0 failed; 1 ignored'"));
        assert_eq!((sum.problem.clone(), sum.results.totals.passed), (None, 2));
        add(
            &mut sum,
            ran(
                "echo 'test a::b ... FAILED'; echo 'test result: FAILED. 3 passed; 1 failed; 0 ignored'; exit 101",
            ),
        );
        assert_eq!((sum.results.totals.passed, sum.results.totals.failed), (5, 1));
        assert_eq!(sum.results.failures.names, ["a::b"]);
        assert_eq!(sum.problem.as_deref(), Some("one: exit status: 101"));
    }

    #[test]
    fn a_binary_without_a_result_has_failed() {
        assert_eq!(ran("exit 0").problem.as_deref(), Some("one: ended without a result line"));
    }

    #[test]
    fn some_run_at_the_same_time() {
        let (arrived, met) = (Mutex::new(0), std::sync::Condvar::new());
        in_lanes((0..LANES).collect(), |_| {
            *lock(&arrived) += 1;
            met.notify_all();
            let all = |arrived: &mut usize| *arrived < LANES;
            let (arrived, wait) =
                met.wait_timeout_while(lock(&arrived), Duration::from_mins(1), all).unwrap();
            assert!(!wait.timed_out(), "{arrived} of {LANES} have begun");
        });
    }

    #[test]
    fn the_longest_begin_first() {
        let order = longest_first(vec![shell("b"), shell(LONGEST[0]), shell("a")]);
        let names: Vec<&str> = order.iter().map(|binary| binary.name.as_str()).collect();
        assert_eq!(names, [LONGEST[0], "b", "a"]);
    }
}
