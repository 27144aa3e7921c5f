//! A queue and its dead-letter queue, created together.

use hapax_core::name::{NameError, QueueName};
use hapax_core::policy::RETENTION_MS_MAX;
use hapax_core::store::SharedStore;
use hapax_core::{AdminError, QueueConfig, RedriveAllow};

use crate::Error;

/// A queue and its dead-letter queue.
///
/// ```
/// use hapax::{QueueConfig, QueuePair};
///
/// let pair = QueuePair::new("emails".parse().unwrap(), QueueConfig::default()).unwrap();
/// assert_eq!(pair.dead_name.as_str(), "emails-dead");
/// assert_eq!(pair.config.dead_letter.unwrap().queue, pair.dead_name);
/// let fifo = QueuePair::new("orders.fifo".parse().unwrap(), QueueConfig::fifo()).unwrap();
/// assert_eq!(fifo.dead_name.as_str(), "orders-dead.fifo");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuePair {
    /// The queue.
    pub name: QueueName,
    /// Its configuration, which names the dead-letter queue.
    pub config: QueueConfig,
    /// The dead-letter queue: the queue's name with the suffix `-dead`.
    pub dead_name: QueueName,
    /// Its configuration: the longest retention, and only this queue may use it for dead letters.
    pub dead_config: QueueConfig,
}

impl QueuePair {
    /// Computes names and configurations. Fails if the name of the dead-letter queue would be too long.
    pub fn new(name: QueueName, config: QueueConfig) -> Result<Self, NameError> {
        let dead_name = match name.as_str().strip_suffix(".fifo") {
            Some(stem) => format!("{stem}-dead.fifo"),
            None => format!("{name}-dead"),
        };
        let dead_name = QueueName::new(&dead_name)?;
        let dead_config = QueueConfig {
            retention_ms: RETENTION_MS_MAX,
            redrive_allow: RedriveAllow::Queues(vec![name.clone()]),
            ..QueueConfig::of(config.kind)
        };
        let config = config.dead_letters_to(dead_name.clone());
        Ok(Self { name, config, dead_name, dead_config })
    }

    /// Creates both, the dead-letter queue first. An existing queue with the same configuration stays as it is; with
    /// another one it is an error, and nothing is changed. Safe to repeat. Returns whether the queue itself is new.
    pub async fn create(&self, store: &SharedStore) -> Result<bool, Error> {
        create(store, &self.dead_name, &self.dead_config).await?;
        create(store, &self.name, &self.config).await
    }
}

/// Creates a queue. An existing one with another configuration is an error.
pub(crate) async fn create(
    store: &SharedStore,
    name: &QueueName,
    config: &QueueConfig,
) -> Result<bool, Error> {
    match store.create_queue(name, config.clone()).await {
        Err(AdminError::Exists(queue, field)) => Err(Error::QueueDiffers { queue, field }),
        created => Ok(created?),
    }
}
