//! Real servers that tests start private instances of: finds their programs, or installs them, and runs tests on the kinds
//! of servers that the usual run does not use.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hapax_faults::{PROGRAMS_VARIABLE, PatroniCluster, PgBouncer, PostgresServer};

use crate::child;
use crate::kafka;
use crate::suite::{Context, Outcome, Skip, Step};
use crate::valkey;

/// Steps that come before the tests.
pub const STEPS: &[Step] = &[
    Step { name: "service: postgres", limit: Duration::from_mins(10), needs_build: false, action: postgres },
    Step { name: "service: redis", limit: Duration::from_mins(10), needs_build: false, action: redis },
    Step {
        name: "service: valkey",
        limit: Duration::from_mins(10),
        needs_build: false,
        action: valkey::install,
    },
    Step { name: "service: nats", limit: Duration::from_mins(10), needs_build: false, action: nats },
    Step {
        name: "service: postgres 18",
        limit: Duration::from_mins(10),
        needs_build: false,
        action: postgres_18,
    },
    Step {
        name: "service: pgbouncer",
        limit: Duration::from_mins(10),
        needs_build: false,
        action: pgbouncer,
    },
    Step {
        name: "service: prometheus",
        limit: Duration::from_mins(10),
        needs_build: false,
        action: prometheus,
    },
    Step { name: "service: kafka", limit: Duration::from_mins(10), needs_build: false, action: kafka::step },
    Step { name: "service: patroni", limit: Duration::from_mins(10), needs_build: false, action: patroni },
];

/// Steps that come after the tests: a selection of them on other kinds of servers; with `--long`, all of them.
pub const TEST_STEPS: &[Step] = &[
    Step {
        name: "tests on postgres 18",
        limit: Duration::from_mins(15),
        needs_build: true,
        action: tests_on_18,
    },
    Step {
        name: "tests behind pgbouncer",
        limit: Duration::from_mins(15),
        needs_build: true,
        action: tests_behind_pgbouncer,
    },
    Step {
        name: "tests on valkey",
        limit: Duration::from_mins(15),
        needs_build: true,
        action: valkey::tests,
    },
];

/// Test binaries that run on any kind of server. Their names occur in one package only.
const ANYWHERE: &[&str] = &[
    "queues",
    "ledger",
    "merged_calls",
    "migrations",
    "inbox",
    "inbox_bounds",
    "outbox",
    "transactions_and_closing",
];
/// Those that need more of a server than a URL, and the ones that take long.
const LONG_ON_18: &[&str] = &[
    "relays",
    "transactional_on_postgres",
    "kill_nine_at_each_point",
    "queue_floors",
    "ledger_plans_do_not_flip",
    "queue_plans_do_not_flip",
    "ledger_under_outages",
    "attack_ledger",
    "attack_queues",
    "attack_races",
    "portable_read_committed",
    "portable_serializable",
    "pgbouncer",
    "servers_share_one_database",
    "doctor_examines_the_database",
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

/// Prometheus and its checker of pages and rules, from the path or from Debian's package. The tests start it themselves.
fn prometheus(cx: &Context, step: &Step) -> Outcome {
    let (package, program) = ("prometheus", "promtool");
    found_or_installed(cx, step, &Service { name: "Prometheus", package, program, installed: program })
}

/// NATS, from the path or from Debian's package. The tests start it themselves.
fn nats(cx: &Context, step: &Step) -> Outcome {
    let program = "nats-server";
    found_or_installed(cx, step, &Service { name: "NATS", package: program, program, installed: program })
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
    match install(cx, step, name, package) {
        None => step.run(cx, with_args(installed, &["--version"])),
        Some(outcome) => outcome,
    }
}

/// PgBouncer, from Debian's package, or whichever is on the path.
fn pgbouncer(cx: &Context, step: &Step) -> Outcome {
    if PgBouncer::program().is_err()
        && let Some(outcome) = install(cx, step, "PgBouncer", "pgbouncer")
    {
        return outcome;
    }
    match PgBouncer::program() {
        Ok(program) => step.run(cx, with_args(&program.to_string_lossy(), &["--version"])),
        Err(why) => Outcome::Skipped(Skip::Because(why)),
    }
}

/// Patroni and etcd, from Debian's packages, for the tests of failover. Only a long run needs them, and there is nothing to do
/// in another.
fn patroni(cx: &Context, step: &Step) -> Outcome {
    if !cx.is_long() {
        return step.run(cx, with_args("true", &[]));
    }
    for package in ["patroni", "etcd-server"] {
        if PatroniCluster::programs().is_err()
            && let Some(outcome) = install(cx, step, "Patroni with etcd", package)
        {
            return outcome;
        }
    }
    match PatroniCluster::programs() {
        Ok(()) => step.run(cx, with_args("patroni", &["--version"])),
        Err(why) => Outcome::Skipped(Skip::Because(why)),
    }
}

/// Installs a package of Debian. `Some`: it could not be installed.
pub fn install(cx: &Context, step: &Step, what: &str, package: &str) -> Option<Outcome> {
    if !has("apt-get") || !is_root() {
        let remedy =
            format!("{what} is not installed; install Debian's {package}, or put its programs on the path");
        return Some(Outcome::Skipped(Skip::Because(remedy)));
    }
    let update = &mut with_args("apt-get", &["update", "--quiet", "--error-on=any"]);
    if child::run(update, step.limit).problem.is_some() {
        return Some(Outcome::Skipped(Skip::RegistryOutOfReach(format!("{what} could not be installed"))));
    }
    let mut install = with_args("apt-get", &["install", "--yes", "--no-install-recommends", package]);
    // In runlevel 1 the package does not start the server that it sets up.
    install.env("DEBIAN_FRONTEND", "noninteractive").env("RUNLEVEL", "1");
    match step.run(cx, install) {
        Outcome::Ran(result) if result.problem.is_none() => None,
        outcome => Some(outcome),
    }
}

/// The version of the package with PostgreSQL 18's programs.
const VERSION_18: &str = "18.0.0";

/// Where servers are that are not installed. As root, tests run some as another user, who may not be able to read the
/// workspace.
pub fn services_folder(cx: &Context) -> PathBuf {
    if is_root() { PathBuf::from("/opt/hapax-services") } else { cx.target().join("services") }
}

fn folder_of_18(cx: &Context) -> PathBuf {
    services_folder(cx).join(format!("postgresql-{VERSION_18}"))
}

/// PostgreSQL 18, from a package of Maven that has `postgres` and `initdb`; clients are those of PostgreSQL 15.
fn postgres_18(cx: &Context, step: &Step) -> Outcome {
    let folder = folder_of_18(cx);
    let program = folder.join("bin/postgres");
    if !program.exists() {
        if !has("mvn")
            && let Some(outcome) = install(cx, step, "Maven, for PostgreSQL 18", "maven")
        {
            return outcome;
        }
        if let Err(outcome) = unpack_18(cx, step, &folder) {
            return outcome;
        }
    }
    step.run(cx, with_args(&program.to_string_lossy(), &["--version"]))
}

/// Unpacks the package beside the folder, and moves it there when it is complete.
fn unpack_18(cx: &Context, step: &Step, folder: &Path) -> Result<(), Outcome> {
    let machine = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64v8",
        other => {
            let why = format!("there is no package of PostgreSQL 18 for {other}");
            return Err(Outcome::Skipped(Skip::Because(why)));
        }
    };
    let failed = |what: &Path, error: &std::io::Error| {
        Outcome::Skipped(Skip::Because(format!("{}: {error}", what.display())))
    };
    let new = folder.with_file_name(format!("postgresql-{VERSION_18}.{}", std::process::id()));
    let content = new.join("content");
    std::fs::create_dir_all(&content).map_err(|error| failed(&content, &error))?;
    let artifact = format!("io.zonky.test.postgres:embedded-postgres-binaries-linux-{machine}:{VERSION_18}");
    let artifact = format!("-Dartifact={artifact}");
    let output = format!("-DoutputDirectory={}", new.display());
    let mut get = with_args("mvn", &["--batch-mode", "--quiet", "dependency:unpack", &artifact, &output]);
    get.current_dir(&new);
    let out_of_reach =
        || Outcome::Skipped(Skip::RegistryOutOfReach("PostgreSQL 18 could not be had".to_owned()));
    println!("\n==> {}: {artifact}", step.name);
    if child::run(&mut get, step.limit).problem.is_some() {
        let _ = std::fs::remove_dir_all(&new);
        return Err(out_of_reach());
    }
    let packed = std::fs::read_dir(&new).map_err(|error| failed(&new, &error))?;
    let packed = packed
        .flatten()
        .map(|entry| entry.path())
        .find(|file| file.extension().is_some_and(|ext| ext == "txz"));
    let packed = packed.ok_or_else(out_of_reach)?;
    let tar = ["--extract", "--file", &packed.to_string_lossy(), "--directory", &content.to_string_lossy()];
    if let Outcome::Ran(result) = step.run(cx, with_args("tar", &tar))
        && result.problem.is_some()
    {
        return Err(Outcome::Ran(result));
    }
    // Another run may have been faster.
    let moved = std::fs::rename(&content, folder);
    let _ = std::fs::remove_dir_all(&new);
    if folder.join("bin/postgres").exists() { Ok(()) } else { moved.map_err(|error| failed(folder, &error)) }
}

/// What an earlier step has said: why it could not be installed, and that it failed if it should have been.
pub fn not_installed(what: &str) -> Outcome {
    Outcome::Skipped(Skip::RegistryOutOfReach(format!("{what} is not installed")))
}

fn tests_on_18(cx: &Context, step: &Step) -> Outcome {
    let programs = folder_of_18(cx).join("bin");
    if !programs.join("postgres").exists() || PostgresServer::programs().as_os_str().is_empty() {
        return not_installed("PostgreSQL 18, or a client of PostgreSQL,");
    }
    let more = if cx.is_long() { LONG_ON_18 } else { &[] };
    let mut command = tests_of(cx, ANYWHERE.iter().chain(more));
    command.env(PROGRAMS_VARIABLE, programs);
    step.run(cx, command)
}

fn tests_behind_pgbouncer(cx: &Context, step: &Step) -> Outcome {
    if PgBouncer::program().is_err() || PostgresServer::programs().as_os_str().is_empty() {
        return not_installed("PgBouncer, or PostgreSQL 15,");
    }
    let mut command = tests_of(cx, ANYWHERE.iter());
    command.env("HAPAX_TEST_PGBOUNCER", "polling");
    step.run(cx, command)
}

/// Runs test binaries, a selection of their cases unless the run is a long one. The whole workspace is chosen, so that
/// nothing is built again.
pub fn tests_of<'n>(cx: &Context, names: impl Iterator<Item = &'n &'n str>) -> Command {
    let mut command = cx.cargo(&["test", "--workspace", "--all-features", "--no-fail-fast"]);
    for name in names {
        command.args(["--test", name]);
    }
    if !cx.is_long() {
        command.env("HAPAX_TEST_SMOKE", "1");
    }
    command
}

pub fn with_args(program: &str, args: &[&str]) -> Command {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_selected_test_binaries_exist_once() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
        for name in [ANYWHERE, LONG_ON_18, valkey::TESTS, valkey::LONG_TESTS].concat() {
            let packages = std::fs::read_dir(&crates).unwrap().flatten();
            let files = [format!("tests/{name}.rs"), format!("tests/{name}/main.rs")];
            let has = |package: &Path| files.iter().any(|file| package.join(file).exists());
            assert_eq!(packages.filter(|package| has(&package.path())).count(), 1, "{name}");
        }
    }
}
