//! A store that is observed is still that store: it passes the suites of the store behind it.

#[path = "common/harness.rs"]
mod harness;

use std::process::ExitCode;

fn main() -> ExitCode {
    hapax_conformance::main(
        hapax_conformance::Observed(harness::Fresh),
        &[hapax_conformance::cases(), hapax_conformance::ledger_cases()],
        harness::SKIPS,
    )
}
