//! Publishing records that belong together.

use crate::producer::{IdempotentProducer, NewRecord, Producer, ProducerConfig, ProducerError};
use crate::wire::Connect;

/// Publishes records, with or without a transaction.
///
/// ```no_run
/// use hapax_kafka::producer::{NewRecord, ProducerConfig};
/// use hapax_kafka::publisher::Publisher;
/// use hapax_kafka::wire::Connect;
///
/// # async fn example() -> Result<(), hapax_kafka::producer::ProducerError> {
/// let config = ProducerConfig::new(Connect::plain(["localhost:9092"]), "shop-1");
/// let mut publisher = Publisher::transactional(config).await?;
/// publisher.publish(vec![
///     NewRecord::new("orders", "order 7", "placed"),
///     NewRecord::new("payments", "order 7", "due"),
/// ])
/// .await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Publisher(Mode);

#[derive(Debug)]
enum Mode {
    Transactional(Producer),
    Idempotent(IdempotentProducer),
}

impl Publisher {
    /// Each call is a transaction: readers of committed records see all of its records or none, also if this process dies. It
    /// takes the transactional id over, and fences the publisher that had it.
    pub async fn transactional(config: ProducerConfig) -> Result<Self, ProducerError> {
        Ok(Self(Mode::Transactional(Producer::connect(config).await?)))
    }

    /// No transactions: retries repeat nothing, but a call that fails may have published some of its records.
    pub async fn idempotent(connect: Connect) -> Result<Self, ProducerError> {
        Ok(Self(Mode::Idempotent(IdempotentProducer::connect(connect).await?)))
    }

    /// Publishes records; they are written when it returns. In a transaction, an error means that none is visible, unless it is
    /// [`ProducerError::Unknown`]: then all are visible or none, and only a reader can tell.
    ///
    /// The call must not be cancelled; the next one would not begin where this one stopped.
    pub async fn publish(&mut self, records: Vec<NewRecord>) -> Result<(), ProducerError> {
        match &mut self.0 {
            Mode::Transactional(producer) => transact(producer, records).await,
            Mode::Idempotent(producer) => {
                for record in records {
                    producer.send(record).await?;
                }
                producer.flush().await
            }
        }
    }
}

async fn transact(producer: &mut Producer, records: Vec<NewRecord>) -> Result<(), ProducerError> {
    use crate::machine::State;
    match producer.state() {
        State::Ready => {}
        // A commit that stayed unanswered, and was reported to the caller.
        State::Unknown => producer.recover().await?,
        _ => producer.abort().await?,
    }
    producer.begin()?;
    let sent = async {
        for record in records {
            producer.send(record).await?;
        }
        producer.commit().await
    };
    match sent.await {
        Err(error) if matches!(producer.state(), State::Open | State::Sealed | State::Failed) => {
            // If the abort fails too, the next call repeats it, or the coordinator does it in time.
            let _ = producer.abort().await;
            Err(error)
        }
        done => done,
    }
}
