//! How often this process and the servers that it starts wait for a disk: a library that they are started with counts the calls
//! (`syncs.c`).

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Names the file with the count; empty if it is not counted.
const COUNT: &str = "HAPAX_TIERS_SYNCS";

/// Starts this program once more, with the library. `None`: it is that process, or nothing can be counted here.
pub fn run_counted() -> Option<ExitCode> {
    if std::env::var_os(COUNT).is_some() {
        return None;
    }
    // Servers may run as another user, who has to reach it.
    let folder = tempfile::tempdir().expect("a folder");
    let allow = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode));
    allow(folder.path(), 0o755).expect("its owner may say who reads it");
    let (library, count) = (folder.path().join("syncs.so"), folder.path().join("count"));
    std::fs::write(&count, [0; 8]).expect("a file");
    allow(&count, 0o666).expect("its owner may say who writes it");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/tiers/syncs.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O2", "-o"]).arg(&library).arg(source).status();
    if !built.as_ref().is_ok_and(std::process::ExitStatus::success) {
        eprintln!("syncs are not counted: cc does not build {source}: {built:?}");
        return None;
    }
    let program = std::env::current_exe().expect("a program knows where it is");
    let mut again = Command::new(program);
    again.args(std::env::args_os().skip(1)).env("LD_PRELOAD", &library).env(COUNT, &count);
    let ended = again.status().expect("it starts");
    Some(if ended.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The number of syncs until now; `None`: they are not counted.
pub fn count() -> Option<f64> {
    let bytes = std::fs::read(std::env::var_os(COUNT)?).ok()?;
    Some(u64::from_ne_bytes(bytes.try_into().ok()?) as f64)
}
