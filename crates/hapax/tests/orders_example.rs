//! The orders example holds its promise: the books balance although every process and the database are killed.

use std::process::{Command, ExitCode};

use hapax_faults::{PostgresServer, example_program};
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

fn the_books_balance() {
    let seconds = if std::env::var_os("HAPAX_LONG").is_some() { "60" } else { "6" };
    let output = Command::new(example_program("orders")).args(["--seconds", seconds]).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let complaints = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}\n{complaints}");
    assert!(said.contains("The books balance"), "{said}");
    println!("{said}");
}
