//! Tests below the public surface.

mod below_sqlite;
mod history;
mod model;
mod model_test;
mod refused_receive;
mod rig;
mod schema_versions;
mod sim_storage;
mod simulation;
mod writer_ends;
