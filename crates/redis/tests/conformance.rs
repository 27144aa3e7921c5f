//! The Redis store passes the suites of the ledger and of the documents on one node.

mod common;

fn main() -> std::process::ExitCode {
    common::suite::main(|| common::url(common::shared()), hapax_redis::Durability::Local)
}
