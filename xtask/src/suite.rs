//! `cargo xtask test`: the steps, run one after the other.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use crate::child::{self, ChildResult};
use crate::report::{Row, SuiteReport};

/// The inputs of every step.
pub struct Context {
    root: PathBuf,
    long: bool,
    filter: Option<String>,
}

/// One check of the workspace.
pub struct Step {
    /// Its name in the summary.
    pub name: &'static str,
    /// Time limit; the step is killed after it.
    pub limit: Duration,
    /// It cannot run if the workspace does not compile.
    pub needs_build: bool,
    /// Runs the step. It runs commands through [`Step::run`], which enforces the time limit, or skips.
    pub action: fn(&Context, &Step) -> Outcome,
}

/// The result of a step.
pub enum Outcome {
    /// It ran. Result lines of Rust's test binaries, pytest and node on its standard output are counted; a step that
    /// prints none counts as one.
    Ran(ChildResult),
    /// It did not run.
    Skipped(Skip),
}

/// Why a step did not run. Every skip is listed at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Skip {
    /// A program or a file is missing that could be installed: a failure under `CI=true`.
    Because(String),
    /// A package registry is unreachable, so a client could not be installed: not a failure, even under `CI=true`.
    RegistryOutOfReach(String),
}

const BUILD: &str = "build";

/// The steps of every run, in order.
const STEPS: &[Step] = &[
    Step { name: "format", limit: Duration::from_mins(5), needs_build: false, action: format },
    Step { name: "clippy", limit: Duration::from_mins(45), needs_build: false, action: clippy },
    Step { name: BUILD, limit: Duration::from_mins(45), needs_build: false, action: build },
    Step { name: "tests", limit: Duration::from_mins(50), needs_build: true, action: tests },
    Step { name: "doc tests", limit: Duration::from_mins(30), needs_build: true, action: doc_tests },
];

/// Steps that need more than cargo: real clients, real services. To add one, write a function like those below and a
/// line here. With a FILTER only the steps whose name contains it are run.
const CLIENT_STEPS: &[Step] = crate::clients::STEPS;

fn format(cx: &Context, step: &Step) -> Outcome {
    step.run(cx, cx.cargo(&["fmt", "--all", "--check"]))
}

fn clippy(cx: &Context, step: &Step) -> Outcome {
    let args = ["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
    step.run(cx, cx.cargo(&args))
}

/// All targets except benchmarks, whose own harness would run them, and doc tests, which cargo only runs separately.
const TARGETS: [&str; 7] =
    ["test", "--workspace", "--all-features", "--lib", "--bins", "--tests", "--examples"];

fn build(cx: &Context, step: &Step) -> Outcome {
    let mut command = cx.cargo(&TARGETS);
    command.arg("--no-run");
    step.run(cx, command)
}

fn tests(cx: &Context, step: &Step) -> Outcome {
    let mut command = cx.cargo(&TARGETS);
    crate::clients::with_readme_tools(cx, step, &mut command);
    crate::binaries::run(cx, step, command, cx.filter.as_slice())
}

fn doc_tests(cx: &Context, step: &Step) -> Outcome {
    let mut command = cx.cargo(&["test", "--workspace", "--all-features", "--doc", "--no-fail-fast"]);
    command.args(cx.filter.as_slice());
    step.run(cx, command)
}

impl Context {
    /// The options of the command line.
    pub fn new(root: PathBuf, long: bool, filter: Option<String>) -> Self {
        Self { root, long, filter }
    }

    /// Whether everything is run, however long it takes.
    pub fn is_long(&self) -> bool {
        self.long
    }

    /// The workspace's root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Cargo's target directory.
    pub fn target(&self) -> PathBuf {
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
        self.root.join(target)
    }

    /// A cargo command in the workspace's root.
    pub fn cargo(&self, args: &[&str]) -> Command {
        let mut command = crate::cargo(&self.root);
        command.args(args);
        self.with_environment(command)
    }

    /// A time limit, which `--long` multiplies by eight.
    pub fn limit(&self, limit: Duration) -> Duration {
        limit * if self.long { 8 } else { 1 }
    }

    /// Tells a command of tests what kind of run this is.
    pub fn with_environment(&self, mut command: Command) -> Command {
        if self.long {
            command.env("HAPAX_LONG", "1");
        }
        if is_ci() {
            // Nothing is built a second time there, and without it a cold build writes and compiles less.
            command.env("CARGO_INCREMENTAL", "0");
        }
        // Some tests make a thread panic on purpose; a failed test names its place without a backtrace.
        command.env("RUST_BACKTRACE", "0");
        command
    }
}

impl Step {
    /// Runs a command within the step's time limit.
    pub fn run(&self, cx: &Context, mut command: Command) -> Outcome {
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        println!("\n==> {}: {} {}", self.name, program(&command), args.join(" "));
        Outcome::Ran(child::run(&mut command, cx.limit(self.limit)))
    }
}

/// The program's name without its path.
fn program(command: &Command) -> String {
    let path = PathBuf::from(command.get_program());
    path.file_name().unwrap_or(command.get_program()).to_string_lossy().into_owned()
}

/// Runs every step, regardless of the results of earlier ones, and reports.
pub fn run(cx: &Context) -> ExitCode {
    // Installs the signal handler first, so that an interrupt is noticed from here on.
    let _ = child::interrupted();
    let wanted = |step: &&Step| cx.filter.as_deref().is_none_or(|filter| step.name.contains(filter));
    let services = crate::services::TEST_STEPS.iter();
    let chosen = services.chain(CLIENT_STEPS).filter(wanted);
    let steps = crate::services::STEPS.iter().chain(STEPS).chain(chosen);
    let steps: Vec<&Step> = steps.collect();
    let report = SuiteReport { rows: run_steps(cx, &steps), ci: is_ci(), filter: cx.filter.clone() };
    println!("{report}");
    if child::interrupted() {
        ExitCode::from(130)
    } else if report.problems().is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Whether a skip is a failure.
fn is_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true")
}

fn run_steps(cx: &Context, steps: &[&Step]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for step in steps {
        let build_failed = rows.iter().any(|row| row.name == BUILD && row.totals().failed > 0);
        let start = Instant::now();
        let outcome = if child::interrupted() {
            Outcome::Skipped(Skip::Because("interrupted before its turn".into()))
        } else if build_failed && step.needs_build {
            Outcome::Skipped(Skip::Because("the workspace does not compile".into()))
        } else {
            (step.action)(cx, step)
        };
        rows.push(Row { name: step.name, took: start.elapsed(), outcome });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context() -> Context {
        Context::new(std::env::temp_dir(), false, None)
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn step(name: &'static str, needs_build: bool, action: fn(&Context, &Step) -> Outcome) -> Step {
        Step { name, limit: Duration::from_mins(1), needs_build, action }
    }

    #[test]
    fn a_failed_step_does_not_stop_the_next() {
        let failing = step("a", false, |cx, step| step.run(cx, shell("exit 1")));
        let holding = step("b", true, |cx, step| step.run(cx, shell("exit 0")));
        let rows = run_steps(&context(), &[&failing, &holding]);
        assert_eq!((rows[0].totals().failed, rows[1].totals().passed), (1, 1));
    }

    #[test]
    fn steps_that_need_a_build_are_skipped_without_one() {
        let failing = step(BUILD, false, |cx, step| step.run(cx, shell("exit 101")));
        let needing = step("tests", true, |_, _| panic!("must not run"));
        let rows = run_steps(&context(), &[&failing, &needing]);
        let Outcome::Skipped(Skip::Because(reason)) = &rows[1].outcome else { panic!("it ran") };
        assert_eq!(reason, "the workspace does not compile");
    }

    #[test]
    fn a_long_run_tells_its_tests() {
        let telling = step("a", false, |cx, step| {
            step.run(cx, cx.with_environment(shell("test \"${HAPAX_LONG:-0}\" = 1")))
        });
        let long = Context { long: true, ..context() };
        assert_eq!(run_steps(&long, &[&telling])[0].totals().failed, 0);
    }
}
