//! Real servers that tests start private instances of: finds their programs, or installs them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::child;
use crate::suite::{Context, Outcome, Skip, Step};

/// Steps that come before the tests.
pub const STEPS: &[Step] = &[
    Step { name: "service: postgres", limit: Duration::from_mins(10), needs_build: false, action: postgres },
    Step { name: "service: redis", limit: Duration::from_mins(10), needs_build: false, action: redis },
];

/// PostgreSQL 15, from Debian's package, or whichever is on the path. The tests start it themselves.
fn postgres(cx: &Context, step: &Step) -> Outcome {
    let debian = "/usr/lib/postgresql/15/bin/postgres";
    if Path::new(debian).exists() {
        return step.run(cx, with_args(debian, &["--version"]));
    }
    found_or_installed(
        cx,
        step,
        &Service { name: "PostgreSQL 15", package: "postgresql-15", program: "postgres", installed: debian },
    )
}

/// Redis 7, from the path or from Debian's package. The tests start it themselves.
fn redis(cx: &Context, step: &Step) -> Outcome {
    let program = "redis-server";
    found_or_installed(cx, step, &Service { name: "Redis 7", package: program, program, installed: program })
}

/// A server that Debian has a package of.
struct Service {
    name: &'static str,
    package: &'static str,
    /// The program on the path.
    program: &'static str,
    /// The program that the package installs.
    installed: &'static str,
}

fn found_or_installed(cx: &Context, step: &Step, service: &Service) -> Outcome {
    let Service { name, package, program, installed } = service;
    if has(program) {
        return step.run(cx, with_args(program, &["--version"]));
    }
    if !has("apt-get") || !is_root() {
        let remedy =
            format!("{name} is not installed; install Debian's {package}, or put its programs on the path");
        return Outcome::Skipped(Skip::Because(remedy));
    }
    if child::run(&mut with_args("apt-get", &["update", "--quiet", "--error-on=any"]), step.limit)
        .problem
        .is_some()
    {
        return Outcome::Skipped(Skip::RegistryOutOfReach(format!("{name} could not be installed")));
    }
    let mut install = with_args("apt-get", &["install", "--yes", "--no-install-recommends", package]);
    // In runlevel 1 the package does not start the server that it sets up.
    install.env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
    if let Outcome::Ran(result) = step.run(cx, install)
        && result.problem.is_some()
    {
        return Outcome::Ran(result);
    }
    step.run(cx, with_args(installed, &["--version"]))
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
