//! The commands that talk to a server, one file each.

pub mod backup;
pub mod bench;
pub mod copy;
pub mod dead;
pub mod doctor;
#[cfg(feature = "kafka")]
pub mod kafka;
pub mod ledger;
pub mod message;
pub mod migrate;
pub mod outbox;
pub mod parked;
pub mod policy;
pub mod proxy;
pub mod queue;
pub mod receive;
pub mod relay;
pub mod send;
pub mod top;
pub mod transfer;
pub mod verify;
pub mod work;
