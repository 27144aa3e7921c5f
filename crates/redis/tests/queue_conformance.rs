//! The Redis store passes the suite of the queues on one node, but for what it declares.

mod common;

fn main() -> std::process::ExitCode {
    common::suite::queues(|| common::url(common::shared()), hapax_redis::Durability::Local)
}
