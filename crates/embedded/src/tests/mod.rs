//! Tests below the public surface.

mod below_sqlite;
mod history;
mod model;
mod model_test;
mod refused_receive;
mod rig;
mod sim_storage;
mod simulation;
