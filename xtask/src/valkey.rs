//! Valkey 8, from the backports of Debian 12, unpacked into a folder: it need not be installed. Tests of Redis run on it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::services::{has, is_root, not_installed, services_folder, tests_of, with_args};
use crate::suite::{Context, Outcome, Skip, Step};

/// Test binaries that run on it, and those of a long run.
pub const TESTS: &[&str] = &["queue_conformance", "queue_moves", "redis_outages"];
pub const LONG_TESTS: &[&str] =
    &["cluster_queue_conformance", "cluster_conformance", "cluster_faults", "published_losses", "sentinel"];
/// The packages with its programs.
const PACKAGES: [&str; 2] = ["valkey-server", "valkey-tools"];
/// Names the program to the tests.
const VARIABLE: &str = "HAPAX_TEST_REDIS_PROGRAM";

fn program(cx: &Context) -> PathBuf {
    services_folder(cx).join("valkey/usr/bin/valkey-server")
}

pub fn install(cx: &Context, step: &Step) -> Outcome {
    let program = program(cx);
    if !program.exists()
        && let Err(outcome) = unpack(cx, step)
    {
        return outcome;
    }
    step.run(cx, with_args(&program.to_string_lossy(), &["--version"]))
}

/// Gets the packages from the archive that this system uses, and unpacks them.
fn unpack(cx: &Context, step: &Step) -> Result<(), Outcome> {
    let skipped = |why: String| Outcome::Skipped(Skip::Because(why));
    if !has("apt-get") || !is_root() {
        return Err(skipped("Valkey is unpacked from Debian's backports: needs apt-get and root".to_owned()));
    }
    let Some(source) = backports(Path::new("/etc/apt/sources.list.d/debian.sources")) else {
        return Err(skipped("the archive of Debian 12 is not configured, which has Valkey".to_owned()));
    };
    let folder = services_folder(cx).join("valkey");
    let new = folder.with_file_name(format!("valkey.{}", std::process::id()));
    let failed = |error: std::io::Error| skipped(format!("{}: {error}", new.display()));
    let list = new.join("backports.sources");
    std::fs::create_dir_all(new.join("lists/partial")).map_err(failed)?;
    std::fs::write(&list, source).map_err(failed)?;
    // Lists of its own: those of the system stay as they are.
    let options = [
        format!("Dir::Etc::SourceList={}", list.display()),
        "Dir::Etc::SourceParts=-".to_owned(),
        format!("Dir::State::Lists={}", new.join("lists").display()),
    ];
    let apt = |args: &[&str]| {
        let mut command = with_args("apt-get", args);
        for option in &options {
            command.args(["-o", option]);
        }
        command.current_dir(&new);
        command
    };
    let mut steps = vec![
        apt(&["update", "--quiet", "--error-on=any"]),
        apt(&[&["download", "--quiet"], &PACKAGES[..]].concat()),
    ];
    println!("\n==> {}: {}", step.name, PACKAGES.join(" "));
    let unpack = |name: &str| with_args("sh", &["-c", &format!("dpkg --extract {name}_*.deb content")]);
    steps.extend(PACKAGES.map(|name| {
        let mut command: Command = unpack(name);
        command.current_dir(&new);
        command
    }));
    for mut command in steps {
        if child::run(&mut command, step.limit).problem.is_some() {
            let _ = std::fs::remove_dir_all(&new);
            return Err(Outcome::Skipped(Skip::RegistryOutOfReach("Valkey could not be had".to_owned())));
        }
    }
    // Another run may have been faster.
    let moved = std::fs::rename(new.join("content"), &folder);
    let _ = std::fs::remove_dir_all(&new);
    if program(cx).exists() { Ok(()) } else { moved.map_err(failed) }
}

/// The first archive of a file of sources, with its backports instead of its own suites.
fn backports(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let first = text.split("\n\n").next()?;
    let line = |line: &str| match line.strip_prefix("Suites: ") {
        Some(suites) => format!("Suites: {}-backports", suites.split_whitespace().next().unwrap_or_default()),
        None => line.to_owned(),
    };
    Some(first.lines().map(line).collect::<Vec<_>>().join("\n") + "\n")
}

pub fn tests(cx: &Context, step: &Step) -> Outcome {
    let program = program(cx);
    if !program.exists() {
        return not_installed("Valkey");
    }
    let more = if cx.is_long() { LONG_TESTS } else { &[] };
    let mut command = tests_of(cx, TESTS.iter().chain(more));
    command.env(VARIABLE, program);
    step.run(cx, command)
}
