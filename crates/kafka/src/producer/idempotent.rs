//! The producer without transactions.

use std::sync::Arc;
use std::time::Duration;

use super::{NewRecord, Producer, ProducerConfig, ProducerError};
use crate::machine::{Identity, State};
use crate::wire::{Cluster, Connect};

/// A producer whose retries do not repeat records: each batch has a sequence, by which the partition's leader recognises it.
///
/// There are no transactions: what is sent is visible at once, and a process that dies and sends again repeats its records.
///
/// ```no_run
/// use hapax_kafka::producer::{IdempotentProducer, NewRecord};
/// use hapax_kafka::wire::Connect;
///
/// # async fn example() -> Result<(), hapax_kafka::producer::ProducerError> {
/// let mut producer = IdempotentProducer::connect(Connect::plain(["localhost:9092"])).await?;
/// producer.send(NewRecord::new("clicks", "user 7", "home")).await?;
/// producer.flush().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct IdempotentProducer(Producer);

impl IdempotentProducer {
    /// Connects and gets an identity. Any version of Kafka since 0.11 has idempotent producers; the requests are those of 4.0.
    pub async fn connect(connect: Connect) -> Result<Self, ProducerError> {
        let cluster = Arc::new(Cluster::new(connect.clone()));
        let config = ProducerConfig {
            // Not used, and checked by brokers nevertheless.
            transaction_timeout: Duration::from_mins(1),
            ..ProducerConfig::new(connect, "")
        };
        let mut producer = Producer::unconnected(cluster, config);
        producer.initialise().await?;
        producer.begin()?;
        Ok(Self(producer))
    }

    /// The present identity.
    pub fn identity(&self) -> Option<Identity> {
        self.0.identity()
    }

    /// Adds a record. It is sent when enough wait, or with [`IdempotentProducer::flush`].
    pub async fn send(&mut self, record: NewRecord) -> Result<(), ProducerError> {
        self.require_identity().await?;
        self.0.send(record).await
    }

    /// Sends all records that wait, and waits until they are written. After an error of the kind
    /// [`Abortable`](super::ErrorKind::Abortable) the records that were not written are forgotten; those of the last batch of a
    /// partition may have been written or not.
    pub async fn flush(&mut self) -> Result<(), ProducerError> {
        self.require_identity().await?;
        self.0.flush().await
    }

    /// After a batch that was given up, only another identity starts with sequences that the leaders accept.
    async fn require_identity(&mut self) -> Result<(), ProducerError> {
        if self.0.state() != State::Open {
            self.0.initialise().await?;
            self.0.begin()?;
        }
        Ok(())
    }
}
