//! The Redis store passes the suite of the queues on a Cluster, each change confirmed by a replica, but for what it declares.

mod common;

fn main() -> std::process::ExitCode {
    common::suite::queues(|| common::shared_cluster().url(), hapax_redis::Durability::Replicated)
}
