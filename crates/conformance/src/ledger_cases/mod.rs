//! The ledger cases, one file per point of the protocol; `ledger_suite.rs` lists them.

pub(crate) mod l00_operators;
pub(crate) mod l01_transitions;
pub(crate) mod l02_claims;
pub(crate) mod l03_leases;
pub(crate) mod l04_tokens;
pub(crate) mod l05_doubt;
pub(crate) mod l06_settle;
pub(crate) mod l07_fences;
pub(crate) mod l09_fingerprints;
pub(crate) mod l10_scopes;
pub(crate) mod l11_outcomes;
pub(crate) mod l13_releases;
pub(crate) mod l13_retention;
pub(crate) mod l14_two_handles;
