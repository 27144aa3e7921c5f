//! Real servers that tests start private instances of: finds their programs, or installs them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::child;
use crate::suite::{Context, Outcome, Skip, Step};

/// Steps that come before the tests.
pub const STEPS: &[Step] = &[Step {
    name: "service: postgres",
    limit: Duration::from_mins(10),
    needs_build: false,
    action: postgres,
}];

/// PostgreSQL 15, from Debian's package, or whichever is on the path. The tests start it themselves.
fn postgres(cx: &Context, step: &Step) -> Outcome {
    let debian = "/usr/lib/postgresql/15/bin/postgres";
    if Path::new(debian).exists() {
        return step.run(cx, with_args(debian, &["--version"]));
    }
    if has("postgres") {
        return step.run(cx, with_args("postgres", &["--version"]));
    }
    if !has("apt-get") || !is_root() {
        let remedy =
            "PostgreSQL 15 is not installed; install Debian's postgresql-15, or put its programs on the path";
        return Outcome::Skipped(Skip::Because(remedy.to_owned()));
    }
    if child::run(&mut with_args("apt-get", &["update", "--quiet", "--error-on=any"]), step.limit)
        .problem
        .is_some()
    {
        return Outcome::Skipped(Skip::RegistryOutOfReach("PostgreSQL 15 could not be installed".to_owned()));
    }
    let mut install = with_args("apt-get", &["install", "--yes", "--no-install-recommends", "postgresql-15"]);
    // In runlevel 1 the package does not start the server that it sets up.
    install.env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
    if let Outcome::Ran(result) = step.run(cx, install)
        && result.problem.is_some()
    {
        return Outcome::Ran(result);
    }
    step.run(cx, with_args(debian, &["--version"]))
}

fn with_args(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// Whether a program is installed.
pub fn has(program: &str) -> bool {
    child::run(Command::new(program).arg("--version"), Duration::from_mins(1)).problem.is_none()
}

/// Whether system packages can be installed.
pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout.trim_ascii() == b"0")
}
