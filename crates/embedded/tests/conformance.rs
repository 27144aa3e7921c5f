//! The embedded store passes the suites of the queues, the ledger and the documents, and that of what is told of messages.

#[path = "common/harness.rs"]
mod harness;

use std::process::ExitCode;

fn main() -> ExitCode {
    let skips = [harness::SKIPS, &["o01_two_processes::*"]].concat();
    hapax_conformance::main(
        harness::Fresh,
        &[
            hapax_conformance::cases(),
            hapax_conformance::ledger_cases(),
            hapax_conformance::document_cases(),
            hapax_conformance::observed_cases(),
        ],
        Vec::leak(skips),
    )
}
