//! The cases about what is told of messages; `observed_suite.rs` lists them.

mod process;

pub(crate) mod o00_one_process;
pub(crate) mod o01_two_processes;
