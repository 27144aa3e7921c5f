//! The maintenance commands of the Hapax workspace. `cargo xtask help` lists them.

mod args;
mod bench;
mod binaries;
mod child;
mod clients;
mod kafka;
mod report;
mod services;
mod suite;
mod totals;
mod valkey;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use args::Command;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args::parse(&args) {
        Ok(Command::Help) => {
            print!("{}", args::HELP);
            ExitCode::SUCCESS
        }
        Ok(Command::Test { long, filter }) => suite::run(&suite::Context::new(root(), long, filter)),
        Ok(Command::Bench { bench, passed_on }) => bench::run(&root(), bench, &passed_on),
        Err(problem) => {
            eprintln!("error: {problem}\n\nRun `cargo xtask help` for the commands.");
            ExitCode::from(2)
        }
    }
}

/// The workspace's root, independent of the current directory.
fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies one folder below the root").to_owned()
}

/// The cargo that runs this program, in the workspace's root.
fn cargo(root: &Path) -> std::process::Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = without_cargo(std::process::Command::new(program));
    command.current_dir(root);
    command
}

/// Does not pass on what cargo tells this program about itself: a build script that looks at it would run again whenever
/// cargo is then started by hand.
fn without_cargo(mut command: std::process::Command) -> std::process::Command {
    for (name, _) in std::env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_"))
        {
            command.env_remove(name);
        }
    }
    command
}
