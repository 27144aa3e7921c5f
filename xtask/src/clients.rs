//! The steps that run real clients against the real binary: each installs its dependencies under `target/clients/`,
//! once, and the suites in `clients/` start private servers.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hapax_faults::{PostgresServer, RedisServer};

use crate::child;
use crate::suite::{Context, Outcome, Skip, Step};

/// The steps, in order.
pub const STEPS: &[Step] = &[
    Step { name: "clients: boto3", limit: Duration::from_mins(15), needs_build: true, action: boto3 },
    Step {
        name: "clients: boto3 (query)",
        limit: Duration::from_mins(15),
        needs_build: true,
        action: boto3_query,
    },
    Step {
        name: "clients: boto3 (postgres)",
        limit: Duration::from_mins(20),
        needs_build: true,
        action: boto3_postgres,
    },
    Step {
        name: "clients: boto3 (redis)",
        limit: Duration::from_mins(20),
        needs_build: true,
        action: boto3_redis,
    },
    Step {
        name: "clients: robustness",
        limit: Duration::from_mins(15),
        needs_build: true,
        action: robustness,
    },
    Step { name: "clients: claims", limit: Duration::from_mins(10), needs_build: true, action: claims },
    Step { name: "clients: aws-cli", limit: Duration::from_mins(10), needs_build: true, action: aws_cli },
    Step { name: "clients: celery", limit: Duration::from_mins(10), needs_build: true, action: celery },
    Step { name: "clients: proxy", limit: Duration::from_mins(15), needs_build: true, action: proxy },
    Step { name: "clients: psycopg", limit: Duration::from_mins(10), needs_build: true, action: psycopg },
    Step { name: "clients: pg (js)", limit: Duration::from_mins(10), needs_build: true, action: pg_js },
    Step {
        name: "clients: pg outbox (js)",
        limit: Duration::from_mins(10),
        needs_build: true,
        action: pg_outbox_js,
    },
    Step { name: "clients: js", limit: Duration::from_mins(10), needs_build: true, action: js },
    Step { name: "clients: rust", limit: Duration::from_mins(30), needs_build: true, action: rust },
    Step {
        name: "clients: rust (postgres)",
        limit: Duration::from_mins(30),
        needs_build: true,
        action: rust_postgres,
    },
];

fn boto3(cx: &Context, step: &Step) -> Outcome {
    pytest(cx, step, "json", &["behaviour", "-n", "4"])
}

fn boto3_query(cx: &Context, step: &Step) -> Outcome {
    pytest(cx, step, "query", &["behaviour", "-n", "4"])
}

/// The behaviour suite through servers whose store is a database of a private PostgreSQL server. What does not hold there
/// yet is listed in `clients/python/behaviour/not_on_postgres.txt`.
fn boto3_postgres(cx: &Context, step: &Step) -> Outcome {
    on_postgres(|set| pytest_with(cx, step, "json", &["behaviour", "-n", "4"], set))
}

/// The behaviour suite through servers whose store is a private Redis server, each with a prefix of its own. What does not hold
/// there yet is listed in `clients/python/behaviour/not_on_redis.txt`.
fn boto3_redis(cx: &Context, step: &Step) -> Outcome {
    if !crate::services::has("redis-server") {
        return Outcome::Skipped(Skip::RegistryOutOfReach("Redis is not installed".to_owned()));
    }
    let server = match RedisServer::start(&["appendonly yes", "appendfsync always"]) {
        Ok(server) => server,
        Err(why) => return Outcome::Skipped(Skip::Because(why)),
    };
    let url = format!("redis://{}", server.address());
    pytest_with(cx, step, "json", &["behaviour", "-n", "4"], &[("HAPAX_TEST_REDIS", &url)])
}

/// The SQL functions inside of one's own transaction, from Python.
fn psycopg(cx: &Context, step: &Step) -> Outcome {
    on_postgres(|set| pytest_with(cx, step, "postgres", &["transactional", "outbox"], set))
}

/// Variables of the environment, by name and value.
type Variables<'a> = &'a [(&'a str, &'a str)];

/// Runs a suite with a private PostgreSQL server, which is named by variables of the environment.
fn on_postgres(run: impl FnOnce(Variables<'_>) -> Outcome) -> Outcome {
    if PostgresServer::programs().as_os_str().is_empty() {
        // The step that installs it has said why it could not, and failed if it should.
        return Outcome::Skipped(Skip::RegistryOutOfReach("PostgreSQL 15 is not installed".to_owned()));
    }
    let server = match PostgresServer::start_in_memory() {
        Ok(server) => server,
        Err(why) => return Outcome::Skipped(Skip::Because(why)),
    };
    let url = server.url("");
    run(&[("HAPAX_TEST_POSTGRES", url.trim_end_matches('/')), ("PATH", &path_with_postgres())])
}

/// The path, with the programs of PostgreSQL first.
fn path_with_postgres() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{}:{path}", PostgresServer::programs().display())
}

/// One after the other, because they measure times.
fn robustness(cx: &Context, step: &Step) -> Outcome {
    pytest(cx, step, "json", &["robustness"])
}

fn claims(cx: &Context, step: &Step) -> Outcome {
    pytest(cx, step, "json", &["claims", "-n", "2"])
}

fn aws_cli(cx: &Context, step: &Step) -> Outcome {
    pytest(cx, step, "json", &["aws_cli", "-n", "3"])
}

fn celery(cx: &Context, step: &Step) -> Outcome {
    pytest(cx, step, "celery", &["celery_app"])
}

/// The idempotency proxy, tested by schemathesis.
fn proxy(cx: &Context, step: &Step) -> Outcome {
    pytest(cx, step, "proxy", &["proxy"])
}

fn pytest(cx: &Context, step: &Step, requirements: &str, args: &[&str]) -> Outcome {
    pytest_with(cx, step, requirements, args, &[])
}

/// The same with variables of the environment.
fn pytest_with(
    cx: &Context,
    step: &Step,
    requirements: &str,
    args: &[&str],
    variables: Variables<'_>,
) -> Outcome {
    let python = match venv(cx, step, requirements) {
        Ok(python) => python,
        Err(outcome) => return outcome,
    };
    let mut command = with_binary(cx, &python);
    command.current_dir(cx.root().join("clients/python")).args(["-m", "pytest"]).args(args);
    command.envs(variables.iter().copied());
    step.run(cx, command)
}

fn js(cx: &Context, step: &Step) -> Outcome {
    node_test(cx, step, &["clients/js/sqs.test.js"], "with_server.py", &[])
}

/// The SQL functions inside of one's own transaction, from Node.
fn pg_js(cx: &Context, step: &Step) -> Outcome {
    let files = ["clients/js/pg.test.js", "examples/transactional/charge.js"];
    on_postgres(|set| node_test(cx, step, &files, "migrated.py", set))
}

/// The same for `hapax.enqueue`.
fn pg_outbox_js(cx: &Context, step: &Step) -> Outcome {
    let files = ["clients/js/outbox.test.js", "examples/outbox/order.js"];
    on_postgres(|set| node_test(cx, step, &files, "migrated.py", set))
}

/// Runs the first of these files with node's test runner, started by a script of `clients/python`.
fn node_test(cx: &Context, step: &Step, files: &[&str], starter: &str, variables: Variables<'_>) -> Outcome {
    for tool in ["python3", "node", "npm"] {
        if let Err(skip) = version(tool) {
            return Outcome::Skipped(skip);
        }
    }
    let from = cx.root().join("clients/js");
    let installed = match ToolFolder::new(cx, "js", &[&from.join("package-lock.json")]) {
        Ok(installed) => installed,
        Err(outcome) => return outcome,
    };
    // Node resolves packages from the folder of the script, so the tests are copied to the installed packages.
    let copied = ["clients/js/package.json", "clients/js/package-lock.json"].iter().chain(files);
    for file in copied.map(|file| cx.root().join(file)) {
        let name = file.file_name().unwrap_or_default();
        if let Err(error) = std::fs::copy(&file, installed.folder.join(name)) {
            return failed(format!("{}: {error}", file.display()));
        }
    }
    let npm = |args: &[&str]| {
        let mut command = Command::new("npm");
        command.current_dir(&installed.folder).args(args);
        command
    };
    let install = npm(&["ci", "--no-audit", "--no-fund", "--ignore-scripts"]);
    if let Err(outcome) = installed.install(step, vec![install], npm(&["view", "is-number", "version"])) {
        return outcome;
    }
    let mut command = with_binary(cx, Path::new("python3"));
    command.current_dir(&installed.folder).arg(cx.root().join("clients/python").join(starter));
    command.envs(variables.iter().copied()).args(["node", "--test", "--test-reporter=tap"]);
    command.args(files.first().and_then(|file| Path::new(file).file_name()));
    step.run(cx, command)
}

fn rust(cx: &Context, step: &Step) -> Outcome {
    rust_package(cx, step, "rust", "with_server.py", &[])
}

/// The SQL functions inside of one's own transaction, from other Rust crates than sqlx.
fn rust_postgres(cx: &Context, step: &Step) -> Outcome {
    on_postgres(|set| rust_package(cx, step, "rust-postgres", "migrated.py", set))
}

/// Runs the tests of a package in `clients`, started by a script of `clients/python`.
fn rust_package(
    cx: &Context,
    step: &Step,
    package: &str,
    starter: &str,
    variables: Variables<'_>,
) -> Outcome {
    if let Err(skip) = version("python3") {
        return Outcome::Skipped(skip);
    }
    let (folder, target) =
        (cx.root().join("clients").join(package), cx.target().join("clients").join(package));
    let cargo = |args: &[&str]| {
        let mut command = cx.cargo(args);
        command.current_dir(&folder).env("CARGO_TARGET_DIR", &target);
        command
    };
    let fetched = child::run(&mut cargo(&["fetch", "--locked"]), step.limit);
    if let Some(problem) = fetched.problem {
        return out_of_reach_or_failed(&problem, cargo(&["info", "itoa"]));
    }
    let built = child::run(&mut cargo(&["test", "--locked", "--tests", "--no-run"]), step.limit);
    if built.problem.is_some() {
        return Outcome::Ran(built);
    }
    let mut command = with_binary(cx, Path::new("python3"));
    command.current_dir(&folder).env("CARGO_TARGET_DIR", &target).envs(variables.iter().copied());
    command.arg(cx.root().join("clients/python").join(starter)).arg(cargo(&[]).get_program());
    step.run(cx, with_args(command, &["test", "--locked", "--tests"]))
}

fn with_args(mut command: Command, args: &[&str]) -> Command {
    command.args(args);
    command
}

/// A command with the path of the built binary, and without the user's AWS settings.
fn with_binary(cx: &Context, program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env("HAPAX_BIN", cx.target().join("debug/hapax"))
        .env("PYTHONPYCACHEPREFIX", cx.target().join("clients/pycache"))
        .env("NO_PROXY", "127.0.0.1,localhost")
        .env("no_proxy", "127.0.0.1,localhost");
    for name in ["AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS", "AWS_SESSION_TOKEN"] {
        command.env_remove(name);
    }
    command
}

/// Installs what the README's examples call and puts it on the command's path. What cannot be had here stays away: the test
/// of the README then reports by name what it lacks.
pub fn with_readme_tools(cx: &Context, step: &Step, command: &mut Command) {
    for (tool, packages) in
        [("curl", &["curl"][..]), ("jq", &["jq"]), ("python3", &["python3", "python3-venv"])]
    {
        if version(tool).is_err() && crate::services::is_root() {
            let mut install = Command::new("apt-get");
            install.args(["install", "--yes", "--no-install-recommends"]).args(packages);
            child::run(&mut install, Duration::from_mins(5));
        }
    }
    // It has the AWS CLI.
    match venv(cx, step, "json") {
        Ok(python) => {
            let ours = std::env::var_os("PATH").unwrap_or_default();
            let folders = python.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(&ours));
            if let Ok(path) = std::env::join_paths(folders) {
                command.env("PATH", path);
            }
        }
        Err(_) => println!("==> {}: without the AWS CLI, which the README's examples need", step.name),
    }
}

/// A Python with the requirements of one suite.
fn venv(cx: &Context, step: &Step, requirements: &str) -> Result<PathBuf, Outcome> {
    version("python3").map_err(Outcome::Skipped)?;
    let file = cx.root().join(format!("clients/python/requirements-{requirements}.txt"));
    let installed = ToolFolder::new(cx, requirements, &[&file])?;
    let python = installed.folder.join("bin/python");
    let mut create = Command::new("python3");
    create.args(["-m", "venv", "--clear"]).arg(&installed.folder);
    let pip = |args: &[&str]| {
        let mut command = Command::new(&python);
        command.args(["-m", "pip", "--disable-pip-version-check", "--quiet"]).args(args);
        command
    };
    let mut install = pip(&["install", "--requirement"]);
    install.arg(&file);
    let mut probe = pip(&["download", "--no-deps", "--no-cache-dir", "six", "--dest"]);
    probe.arg(installed.folder.join("probe"));
    installed.install(step, vec![create, install], probe)?;
    Ok(python)
}

/// An installation, in a folder named after a hash of its inputs.
struct ToolFolder {
    folder: PathBuf,
    complete: PathBuf,
}

impl ToolFolder {
    fn new(cx: &Context, name: &str, made_from: &[&Path]) -> Result<Self, Outcome> {
        let mut hasher = DefaultHasher::new();
        for file in made_from {
            let text = std::fs::read(file).map_err(|error| failed(format!("{}: {error}", file.display())))?;
            text.hash(&mut hasher);
        }
        let folder = cx.target().join(format!("clients/{name}-{:016x}", hasher.finish()));
        std::fs::create_dir_all(&folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
        let complete = folder.join("installed");
        Ok(Self { folder, complete })
    }

    /// Runs the commands unless they were run before. A failure counts if the registry answers `probe`; otherwise the
    /// step is skipped, because nothing could be installed.
    fn install(&self, step: &Step, commands: Vec<Command>, probe: Command) -> Result<(), Outcome> {
        if self.complete.exists() {
            return Ok(());
        }
        for mut command in commands {
            println!("\n==> {}: installing into {}", step.name, self.folder.display());
            if let Some(problem) = child::run(&mut command, step.limit).problem {
                return Err(out_of_reach_or_failed(&problem, probe));
            }
        }
        std::fs::write(&self.complete, "").map_err(|error| failed(error.to_string()))
    }
}

fn out_of_reach_or_failed(problem: &str, mut probe: Command) -> Outcome {
    if child::interrupted() || child::run(&mut probe, Duration::from_mins(3)).problem.is_none() {
        return failed(format!("what it needs could not be installed: {problem}"));
    }
    Outcome::Skipped(Skip::RegistryOutOfReach("its packages could not be installed".to_owned()))
}

fn failed(problem: String) -> Outcome {
    Outcome::Ran(child::ChildResult { problem: Some(problem), results: crate::totals::Reader::default() })
}

/// Whether a program is installed.
fn version(program: &str) -> Result<(), Skip> {
    match child::run(Command::new(program).arg("--version"), Duration::from_mins(1)).problem {
        None => Ok(()),
        Some(problem) => Err(Skip::Because(format!("{program} is not to be had: {problem}"))),
    }
}
