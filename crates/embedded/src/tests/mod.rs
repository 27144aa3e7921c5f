//! Tests below the public surface.

mod below_sqlite;
mod corners;
mod history;
mod model;
mod model_test;
mod rig;
mod sim_storage;
mod simulation;
