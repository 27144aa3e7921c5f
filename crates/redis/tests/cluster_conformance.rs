//! The Redis store passes the suites of the ledger and of the documents on a Cluster, each change confirmed by a replica.

mod common;

fn main() -> std::process::ExitCode {
    common::suite::main(|| common::shared_cluster().url(), hapax_redis::Durability::Replicated)
}
