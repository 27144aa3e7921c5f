//! The program over krafka, another client of Kafka in Rust. It is built here, because it is no member of the workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest compiler that builds it.
const RUST: (u32, u32) = (1, 95);

/// Builds the program, and returns its path; the error says why there is none.
///
/// # Panics
/// If its own code cannot be compiled.
pub fn build() -> Result<PathBuf, String> {
    let version =
        Command::new("rustc").arg("--version").output().map_err(|error| format!("rustc: {error}"))?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    if !is_new_enough(&version) {
        return Err(format!("krafka needs Rust {}.{}, and this is {}", RUST.0, RUST.1, version.trim()));
    }
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("contestants/krafka/Cargo.toml");
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists());
    let target = target.ok_or("cargo's target folder was not found")?.join("krafka");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--locked", "--manifest-path"]).arg(manifest);
    command.arg("--target-dir").arg(&target);
    let built = command.output().map_err(|error| format!("cargo: {error}"))?;
    let log = String::from_utf8_lossy(&built.stderr);
    if built.status.success() {
        return Ok(target.join("release/krafka-contestant"));
    }
    // Not the program's fault.
    let is_out_of_reach = ["failed to download", "failed to get", "Unable to update"];
    assert!(is_out_of_reach.iter().any(|sign| log.contains(sign)), "the program over krafka: {log}");
    Err(format!("krafka could not be had from the registry: {log}"))
}

fn is_new_enough(version: &str) -> bool {
    let numbers = version.split(' ').nth(1).unwrap_or_default();
    let mut numbers = numbers.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= RUST
}
