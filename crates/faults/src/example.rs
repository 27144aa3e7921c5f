//! Programs of the workspace that tests run and cargo does not build for them.

use std::path::PathBuf;
use std::process::Command;

/// The program of an example, by its name. `cargo test` builds examples as tests, not as programs, so it is built here, which
/// takes a moment if it is up to date.
///
/// # Panics
/// If the example does not build.
pub fn example_program(name: &str) -> PathBuf {
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "--workspace", "--all-features", "--example", name]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    // A build script that looks at what cargo tells a test about its package would run again, and everything that depends on it
    // would be compiled again: here, and then again by the next command.
    for (variable, _) in std::env::vars_os() {
        let is_told = |name: &str| name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_");
        if variable.to_str().is_some_and(is_told) {
            build.env_remove(variable);
        }
    }
    let status = build.status().expect("cargo can be started");
    assert!(status.success(), "the example {name} does not build: {status}");
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.ancestors().nth(2).expect("a test is in target/PROFILE/deps");
    folder.join("examples").join(name)
}
