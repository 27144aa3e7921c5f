//! The README's shell blocks, run from the top as a reader would run them, with the binary under test instead of `cargo
//! run --release` and free ports instead of the usual ones.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use hapax_faults::{PostgresServer, free_ports};
use libtest_mimic::{Arguments, Completion, Trial};
use rustix::process::{Pid, Signal, kill_process_group};

const README: &str = include_str!("../../../README.md");

/// Timeout; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(3);

/// The shell of a reader. `cargo run --release --` becomes the binary, in the background if it would block its
/// terminal; commands that only build, install or test are left out.
const TERMINALS: &str = r#"
set -euo pipefail
answers() {
    for _ in $(seq 600); do curl -s -o first.answer "http://$1" && return; sleep 0.1; done
    echo "nothing answers at $1"; return 1
}
cargo() {
    case "$*" in
        "run --release -- serve")
            "$HAPAX" serve --listen "$SERVER" > serve.log 2>&1 &
            answers "$SERVER/readyz" ;;
        "run --release -- proxy "*)
            shift 4
            answers "$SERVICE/"
            "$HAPAX" proxy "$@" --listen "$PROXY" > proxy.log 2>&1 &
            answers "$PROXY/" ;;
        "run --quiet --release -- "*) shift 4; "$HAPAX" "$@" ;;
        "new "*) mkdir "$2" ;;
        "run") [ "$(basename "$PWD")" = charges ] ;;
        "xtask test" | "add "*) ;;
        *) echo "the README runs an unexpected command: cargo $*"; exit 1 ;;
    esac
}
"#;

/// The fenced shell blocks, in order.
fn blocks(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<Vec<&str>> = None;
    for line in text.lines() {
        match (line, &mut block) {
            ("```sh", None) => block = Some(Vec::new()),
            ("```", Some(lines)) => {
                found.push(lines.join("\n"));
                block = None;
            }
            (line, Some(lines)) => lines.push(line),
            (_, None) => {}
        }
    }
    found
}

/// The blocks as one script, with these ports for server, proxy and service.
fn script(ports: [u16; 3]) -> String {
    let blocks = blocks(README);
    assert!(blocks.len() >= 8, "the README has lost its examples: {blocks:?}");
    let mut script = TERMINALS.to_owned();
    for block in blocks {
        script.extend([block.as_str(), "\n"]);
    }
    for (printed, port) in ["9324", "9325", "8080"].iter().zip(ports) {
        script = script.replace(&format!("127.0.0.1:{printed}"), &format!("127.0.0.1:{port}"));
        script = script.replace(&format!("(\"127.0.0.1\", {printed})"), &format!("(\"127.0.0.1\", {port})"));
    }
    script
}

/// What the examples call besides `hapax`, and what to install for it.
const TOOLS: [(&str, &str); 4] =
    [("bash", "bash"), ("curl", "curl"), ("python3", "Python 3"), ("aws", "the AWS CLI, pip install awscli")];

/// Which tools are not to be found, in words.
fn missing_tools() -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_found = |tool: &str| std::env::split_paths(&path).any(|folder| folder.join(tool).is_file());
    let missing = TOOLS.iter().filter(|(tool, _)| !is_found(tool));
    let missing: Vec<String> = missing.map(|(tool, what)| format!("{tool} ({what})")).collect();
    (!missing.is_empty())
        .then(|| format!("not on PATH: {}; `cargo xtask test` installs what it can", missing.join(", ")))
}

/// Not the usual test harness: without the tools that a reader needs, the test is reported as ignored, never as passed.
fn main() -> ExitCode {
    let readme = Trial::ignorable_test("the_readme_runs_from_top_to_bottom", || {
        if let Some(missing) = missing_tools() {
            return Ok(Completion::ignored_with(missing));
        }
        the_readme_runs_from_top_to_bottom(&[]);
        Ok(Completion::Completed)
    });
    let on_postgres = Trial::ignorable_test("the_readme_runs_on_postgres", || {
        if let Some(missing) = missing_tools() {
            return Ok(Completion::ignored_with(missing));
        }
        let server = match PostgresServer::start_in_memory() {
            Ok(server) => server,
            Err(why) => return Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
        };
        the_readme_runs_on_postgres(&server);
        Ok(Completion::Completed)
    });
    libtest_mimic::run(&Arguments::from_args(), vec![readme, on_postgres]).exit_code()
}

/// The same with a URL for the store of the server and for the ledger of the proxy, and nothing else changed.
fn the_readme_runs_on_postgres(server: &PostgresServer) {
    let url = server.url("postgres");
    let migrated =
        Command::new(env!("CARGO_BIN_EXE_hapax")).args(["migrate", "--store", &url]).output().unwrap();
    assert!(migrated.status.success(), "{migrated:?}");
    the_readme_runs_from_top_to_bottom(&[("HAPAX_STORE", url.clone()), ("HAPAX_LEDGER", url)]);
    let count = |sql: &str| server.sql("postgres", sql).unwrap();
    assert_eq!(count("SELECT count(*) > 0 FROM hapax.q_queue"), "t", "the queues are in the database");
    assert_eq!(
        count("SELECT count(*) > 0 FROM hapax.ledger_entry WHERE scope LIKE 'http/%'"),
        "t",
        "and so is the proxy's ledger"
    );
}

/// Runs it with the variables of the environment that choose a store.
fn the_readme_runs_from_top_to_bottom(store: &[(&str, String)]) {
    let [server, proxy, service] = free_ports();
    let folder = tempfile::tempdir().unwrap();
    // The README makes a project beside the clone.
    let clone = folder.path().join("clone");
    std::fs::create_dir(&clone).unwrap();
    let mut command = Command::new("bash");
    command.current_dir(&clone).args(["-c", &script([server, proxy, service])]).process_group(0);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HAPAX_")) {
        command.env_remove(name);
    }
    command
        .envs(store.iter().map(|(name, value)| (name, value)))
        .env("HAPAX", env!("CARGO_BIN_EXE_hapax"))
        .env("SERVER", format!("127.0.0.1:{server}"))
        .env("SERVICE", format!("127.0.0.1:{service}"))
        .env("PROXY", format!("127.0.0.1:{proxy}"))
        .env("HAPAX_ENDPOINT", format!("http://127.0.0.1:{server}"))
        .stdin(Stdio::null());
    let (mut reader, writer) = std::io::pipe().unwrap();
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut child = command.spawn().unwrap();
    drop(command);
    let group = Pid::from_child(&child);
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(child.wait()));
    let ended = told.recv_timeout(PATIENCE);
    // End the servers in the background.
    let _ = kill_process_group(group, Signal::KILL);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    let log = |name: &str| std::fs::read_to_string(clone.join(name)).unwrap_or_default();
    let all = format!("{text}\n--- serve\n{}\n--- proxy\n{}", log("serve.log"), log("proxy.log"));
    let status = ended.unwrap_or_else(|_| panic!("it did not end:\n{all}")).unwrap();
    assert!(status.success(), "{status}:\n{all}");

    // The output that the README promises.
    assert_eq!(text.matches("\ndone\t").count(), 1, "{all}");
    assert_eq!(text.matches("\nreplayed\t").count(), 1, "{all}");
    assert_eq!(text.matches("\nrejected\t").count(), 1, "{all}");
    assert!(text.contains("nothing to charge"), "{all}");
    assert!(text.contains("hello again") && text.contains("\"Body\": \"hello\""), "{all}");
    assert_eq!(text.matches("201 Created").count(), 2, "{all}");
    assert_eq!(text.to_lowercase().matches("idempotent-replayed: true").count(), 1, "{all}");
    assert_eq!(text.matches("\"POST /charges HTTP/1.1\" 201 -").count(), 1, "{all}");
    assert!(!text.contains("warning"), "an example of ours triggers a warning of ours:\n{all}");
}
