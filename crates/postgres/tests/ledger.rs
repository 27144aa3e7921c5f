//! The PostgreSQL store passes the suites of the ledger and of the documents.

mod common;

fn main() -> std::process::ExitCode {
    common::suite::main("")
}
