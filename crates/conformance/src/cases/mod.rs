//! The cases, one file per point of the design; `suite.rs` lists them.

pub(crate) mod p00_changes;
pub(crate) mod p00_counters;
pub(crate) mod p00_keys;
pub(crate) mod p00_messages;
pub(crate) mod p00_queues;
pub(crate) mod p01_durability;
pub(crate) mod p02_receipts;
pub(crate) mod p03_retry;
pub(crate) mod p04_dead_letters;
pub(crate) mod p05_redrive;
pub(crate) mod p06_attempts;
pub(crate) mod p06_crossings;
pub(crate) mod p06_dead_groups;
pub(crate) mod p06_dedup;
pub(crate) mod p06_delay;
pub(crate) mod p06_fifo;
pub(crate) mod p07_long_poll;
pub(crate) mod p08_limits;
pub(crate) mod p09_deliveries;
pub(crate) mod p10_fences;
pub(crate) mod p11_quotas;
pub(crate) mod p12_two_handles;
pub(crate) mod p13_transfer;
pub(crate) mod p14_copy;
