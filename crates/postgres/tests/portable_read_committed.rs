//! The portable form of the schema passes the suites of the ledger and of the documents at READ COMMITTED.

mod common;

fn main() -> std::process::ExitCode {
    common::suite::main("hapax_portable=true&options[default_transaction_isolation]=read%5C%20committed")
}
