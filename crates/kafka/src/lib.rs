//! Exactly-once inside Kafka, and from Kafka to a database.
//!
//! The transactional producer is this crate's own: it speaks transaction version 2 of the protocol (Kafka 4.0 and
//! later), in which every end of a transaction raises the producer's epoch, so that a delayed request of one
//! transaction cannot reach the next one.
//!
//! | module | content |
//! |---|---|
//! | [`wire`] | connections with bounds on time and size, TLS, SASL, metadata, coordinators |
//! | [`machine`] | the producer's states, without input or output, checked by a model |
//! | [`producer`] | the transactional producer: both together |
//! | [`publisher`] | records that belong together, with or without a transaction |
//! | [`compacted`] | the last committed value of a key in a compacted topic |
//! | [`partition`] | names of partitions and of members of groups |
//! | [`admin`] | lag, open transactions, and the checks before the first record |
//! | `consumer` | librdkafka's consumer behind a narrow seam; feature `consumer` |
//! | `processor` | consume, handle, produce: offsets and output in one transaction; feature `consumer` |
//! | `to_database` | records into a database, each once; feature `consumer` |
//! | [`share`] | a share group as a source of a worker: leases, retries, dead letters |
//! | [`refusal`] | configuration that is refused before a connection is made |
//! | [`security`] | TLS and SASL, once for both clients |

pub mod admin;
mod batches;
pub mod compacted;
#[cfg(feature = "consumer")]
pub mod consumer;
pub mod machine;
pub mod partition;
#[cfg(feature = "consumer")]
pub mod processor;
pub mod producer;
pub mod publisher;
pub mod refusal;
pub mod security;
pub mod share;
#[cfg(feature = "consumer")]
pub mod to_database;
pub mod wire;
