//! Tests below the public API.

mod below_sqlite;
mod corners;
mod history;
mod ledger_simulation;
mod listings;
mod model;
mod model_test;
mod releases;
mod rig;
mod rollbacks;
mod schema_versions;
mod sender_hints;
mod sim_storage;
mod simulation;
mod writer_ends;
