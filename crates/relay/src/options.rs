//! The options of a relay.

use std::time::Duration;

use hapax_core::policy::RetryPolicy;

/// The options of a relay.
#[derive(Debug, Clone)]
pub struct RelayOptions {
    /// The route's name: what it has published is remembered under it. Relays with the same name share the work.
    pub route: String,
    /// Patterns of the topics that it publishes; `*` stands for any characters. Default all.
    pub topics: Vec<String>,
    /// The name of this process among the relays of the route. Default random.
    pub relay: String,
    /// How long the buckets of a relay that does not answer stay its own. Default 15 s.
    pub lease: Duration,
    /// Maximum count of messages in memory. Default 2,000.
    pub batch_max: usize,
    /// Maximum bytes of bodies in memory, apart from one message of each bucket. Default 16 MiB.
    pub batch_bytes_max: usize,
    /// When a message that failed is tried again, and after how many attempts it is parked. Attempts count only while the
    /// sink accepts other messages. Default 1 s, doubling up to 1 min, with full jitter; 20 attempts.
    pub retry: RetryPolicy,
    /// While the sink takes nothing. Default 100 ms, doubling up to 10 s, with full jitter.
    pub outage: RetryPolicy,
    /// Maximum count of keys that are set aside: with more, nothing is read until some are published. Default 10,000.
    pub held_keys_max: usize,
    /// The longest time between two looks at an outbox that is idle for long. Default 200 ms.
    pub idle_poll: Duration,
    /// How often published messages are cleaned up. Default 10 s.
    pub rotate: Duration,
    /// The relay is not ready when it has made no progress for this long. Default 30 s.
    pub stalled: Duration,
}

impl RelayOptions {
    /// The defaults for a route.
    pub fn route(name: impl Into<String>) -> Self {
        Self {
            route: name.into(),
            topics: vec!["*".to_owned()],
            relay: format!("{:016x}", fastrand::u64(..)),
            lease: Duration::from_secs(15),
            batch_max: 2_000,
            batch_bytes_max: 16 * 1024 * 1024,
            retry: RetryPolicy::exponential(1_000, 60_000),
            outage: RetryPolicy::exponential(100, 10_000),
            held_keys_max: 10_000,
            idle_poll: Duration::from_millis(200),
            rotate: Duration::from_secs(10),
            stalled: Duration::from_secs(30),
        }
    }

    /// Publishes only these topics.
    #[must_use]
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics = topics.into_iter().map(Into::into).collect();
        self
    }
}
