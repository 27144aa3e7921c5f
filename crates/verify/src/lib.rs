//! `hapax verify`: shows which guarantee holds, by breaking things.
//!
//! A run starts real processes: servers of the store, workers, producers, and a recorder that keeps the history and is the
//! banks. Faults follow a seeded schedule; each reports what it caused. At the end another process, the checker, reads the
//! history and nothing else.
//!
//! | module | content |
//! |---|---|
//! | [`workload`] | the workloads under a guarantee, and the controls, which have none |
//! | [`fault`] | the faults and their schedule |
//! | [`history`] | the events of a run, in a file |
//! | [`check`] | the checker: a pure function from a history to violations with their witnesses |
//! | [`report`] | verdicts, and their forms: text, JSON, JUnit, HTML |
//! | [`roles`] | the child processes |
//! | `kafka` | the same on a broker of Kafka; feature `kafka` |
//!
//! [`Handler`] puts a handler of your own under such a run, from a test of your own project.

mod aim;
mod charges;
pub mod check;
mod cluster;
mod drain;
pub mod fault;
mod handler;
pub mod history;
#[cfg(feature = "kafka")]
pub mod kafka;
mod operator;
mod orders;
mod own_store;
mod preload;
mod producer;
mod recorder;
pub mod report;
pub mod roles;
mod run;
mod waiting;
mod wire;
mod worker;
pub mod workload;

pub use handler::{Effects, Handler, UserHandler, verify, verify_in_test};
pub use recorder::{PROXIED, Payment, check_upstream};
pub use run::{Options, Progress, run};
