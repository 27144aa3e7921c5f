//! The orders example holds its promise: the books balance although every process and the database are killed.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use hapax_faults::PostgresServer;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() -> ExitCode {
    let trial = Trial::ignorable_test("the_books_balance", || {
        if PostgresServer::programs().as_os_str().is_empty() {
            return Ok::<_, Failed>(Completion::ignored_with("needs PostgreSQL 15"));
        }
        the_books_balance();
        Ok(Completion::Completed)
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}

/// The example's program, built here if it is missing or older than its source.
fn example() -> PathBuf {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|found| found.modified()).ok();
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/orders");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/orders");
    let newest = std::fs::read_dir(source).unwrap().filter_map(|file| changed(&file.unwrap().path())).max();
    if changed(&program) < newest {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--workspace", "--all-features", "--example", "orders"]);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "the example does not build");
    }
    program
}

fn the_books_balance() {
    let seconds = if std::env::var_os("HAPAX_LONG").is_some() { "60" } else { "6" };
    let output = Command::new(example()).args(["--seconds", seconds]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}\n{complaints}");
    assert!(said.contains("The books balance"), "{said}");
    println!("{said}");
}
