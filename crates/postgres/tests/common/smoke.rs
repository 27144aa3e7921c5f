//! The cases that are run on every kind of server; all are run on PostgreSQL 15, and everywhere with `--long`.

use hapax_conformance::Case;

/// Modules of the suites: what differs between servers and behind a pooler is waiting, locking, fences and two processes.
const MODULES: &[&str] = &[
    "p01_durability",
    "p06_attempts",
    "p07_long_poll",
    "p10_fences",
    "p12_two_handles",
    "l04_tokens",
    "l07_fences",
    "l14_two_handles",
    "d00_documents",
];

/// Whether only a selection is run.
pub fn is_smoke() -> bool {
    std::env::var_os("HAPAX_TEST_SMOKE").is_some()
}

/// Whether a case is run.
pub fn is_selected(case: &Case) -> bool {
    !is_smoke() || MODULES.contains(&case.module)
}
