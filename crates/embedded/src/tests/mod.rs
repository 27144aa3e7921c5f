//! Tests below the public surface.

mod history;
mod model;
mod model_test;
mod rig;
mod sim_storage;
mod simulation;
