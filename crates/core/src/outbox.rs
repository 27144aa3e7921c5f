//! The outbox seam: messages that were written in business transactions, and the sinks that they are published to.
//!
//! An [`OutboxStore`] is what a relay reads; a [`Publisher`] is what it publishes to. A message belongs to a *bucket* by its
//! key, and has a number that grows within the bucket. A *route* publishes the messages of some topics to one sink; it has a
//! position of its own in each bucket, so that a sink that is down delays no other route.

use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;
use serde::Serialize;

use crate::error::StoreError;
use crate::policy::tier::{Finding, Severity};

/// The header that carries the W3C trace context in which a message was enqueued.
pub const TRACEPARENT_HEADER: &str = "traceparent";

/// Maximum bytes of a message's body.
pub const OUTBOX_BODY_BYTES_MAX: usize = 1024 * 1024;

/// A message to be written in the caller's transaction.
///
/// ```
/// use hapax_core::outbox::NewOutboxMessage;
///
/// let message = NewOutboxMessage::new("orders.placed", r#"{"order":7}"#).key("order-7").header("tenant", "north");
/// assert_eq!(message.key.as_deref(), Some("order-7"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewOutboxMessage {
    /// What it is about; routes choose messages by it. 1 to 255 bytes without control characters.
    pub topic: String,
    /// Messages with the same key are published in order. 1 to 255 bytes; `None`: in any order.
    pub key: Option<String>,
    /// The payload, at most [`OUTBOX_BODY_BYTES_MAX`] bytes.
    pub body: Bytes,
    /// Named texts that are published with the body.
    pub headers: BTreeMap<String, String>,
    /// It is not delivered before this time, in milliseconds since 1970. It has then no place in the order of its key.
    pub deliver_at_ms: Option<u64>,
}

impl NewOutboxMessage {
    /// A message without a key.
    pub fn new(topic: impl Into<String>, body: impl Into<Bytes>) -> Self {
        Self { topic: topic.into(), body: body.into(), ..Self::default() }
    }

    /// Publishes it behind the earlier messages with this key.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// The trace context of the caller, as the W3C header `traceparent`.
    #[must_use]
    pub fn traceparent(self, value: impl Into<String>) -> Self {
        self.header(TRACEPARENT_HEADER, value)
    }

    /// Delivers it not before this time, in milliseconds since 1970.
    #[must_use]
    pub fn deliver_at_ms(mut self, at_ms: u64) -> Self {
        self.deliver_at_ms = Some(at_ms);
        self
    }
}

/// A message of an outbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OutboxMessage {
    /// Its bucket, by its key.
    pub bucket: u16,
    /// Its number in the bucket; grows with every message, with gaps.
    pub number: u64,
    /// Its id: random, so that it is never given to another message, not even after a backup was restored.
    pub id: String,
    /// What it is about.
    pub topic: String,
    /// Its key.
    pub key: Option<String>,
    /// The payload.
    #[serde(skip)]
    pub body: Bytes,
    /// Named texts.
    pub headers: BTreeMap<String, String>,
    /// When it may be delivered, in milliseconds since 1970.
    pub deliver_at_ms: Option<u64>,
    /// When it was enqueued, in milliseconds since 1970.
    pub enqueued_ms: u64,
}

impl OutboxMessage {
    /// The key in whose order it is published; `None`: it has no place in an order.
    pub fn ordered_key(&self) -> Option<&str> {
        self.key.as_deref().filter(|_| self.deliver_at_ms.is_none())
    }
}

/// Whether a sink recognises a message that is published twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum SinkDedup {
    /// It does not: a crash of the relay may repeat messages, and the consumer must recognise them by their id.
    None,
    /// For this time after it was published first.
    Window {
        /// The time.
        window_ms: u64,
    },
    /// The sink's owner promises to recognise the id.
    ByReceiver,
    /// Messages and the ids of what was published are one transaction of the sink: nothing is repeated for readers that leave
    /// aborted transactions out.
    Transaction,
}

impl SinkDedup {
    /// What a crash of a relay can repeat, as a part of a sentence.
    ///
    /// ```
    /// use hapax_core::outbox::SinkDedup;
    ///
    /// let queue = SinkDedup::Window { window_ms: 3_600_000 };
    /// assert_eq!(queue.after_a_crash(), "a crash repeats nothing within 60 min");
    /// ```
    pub fn after_a_crash(self) -> String {
        match self {
            Self::Window { window_ms } => {
                format!("a crash repeats nothing within {} min", window_ms / 60_000)
            }
            Self::ByReceiver => {
                "a crash may repeat the last messages; the receiver recognises them by their id".to_owned()
            }
            Self::Transaction => {
                "a crash repeats nothing for readers of committed transactions (read_committed)".to_owned()
            }
            Self::None => "a crash may repeat the last messages; consumers must recognise them".to_owned(),
        }
    }
}

/// What a sink says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SinkDescription {
    /// Its kind and place, without secrets.
    pub name: String,
    /// Whether it recognises repeated messages.
    pub dedup: SinkDedup,
    /// It keeps messages back until their `deliver_at_ms`. Otherwise the relay does.
    pub delays: bool,
    /// Maximum count of messages in one call.
    pub batch_max: usize,
    /// Maximum count of calls at the same time, each with messages of other keys.
    pub calls_max: usize,
    /// What an operator should know, as sentences.
    pub warnings: Vec<String>,
}

/// What became of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishAnswer {
    /// The sink has it, durably.
    Published,
    /// The sink had it already.
    Duplicate,
    /// The sink will never accept it.
    Refused(String),
    /// The sink did not accept this message; it is worth another attempt, others are not affected.
    Failed(String),
    /// The sink takes nothing now, or did not answer. The message may have been published.
    Unavailable(String),
    /// It was not tried, since an earlier message of its key was not published.
    NotTried,
}

/// A sink.
#[async_trait]
pub trait Publisher: Send + Sync {
    /// What it says about itself.
    fn describe(&self) -> SinkDescription;

    /// Publishes messages, and answers for each in order. Messages of one key are published in the order of the batch, and
    /// none of them after one that was not published.
    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer>;

    /// The same for a relay. A sink that remembers by itself what was published needs to know whose messages they are; the others
    /// do not.
    async fn publish_from(&self, source: &PublishSource<'_>, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        let _ = source;
        self.publish(batch).await
    }

    /// A held message that this sink has published is removed from the outbox.
    fn released(&self, message: &OutboxMessage) {
        let _ = message;
    }
}

/// Where the messages of a call come from.
pub struct PublishSource<'a> {
    /// The outbox.
    pub store: &'a dyn OutboxStore,
    /// The route.
    pub route: &'a str,
    /// The name of the relay among those of the route.
    pub relay: &'a str,
    /// The buckets of the messages, as they were held when the messages were read.
    pub buckets: &'a [SourceBucket],
    /// The messages were set aside before: the outbox keeps each until it is released.
    pub held: bool,
}

/// A bucket whose messages are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceBucket {
    /// The bucket and its fence.
    pub lease: BucketLease,
    /// The position that the outbox has recorded, if the relay knows it: messages up to there are not read again, apart from
    /// held ones.
    pub recorded: Option<u64>,
}

/// A bucket that a relay holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketLease {
    /// The bucket.
    pub bucket: u16,
    /// Grows whenever the bucket changes hands.
    pub fence: u64,
}

/// What a relay holds after it renewed its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tended {
    /// Its buckets.
    pub held: Vec<BucketLease>,
    /// How many of them it should give back, so that other relays get their share.
    pub surplus: usize,
}

/// A part of a bucket to be read: numbers behind `after`, up to `through`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketRange {
    /// The bucket.
    pub bucket: u16,
    /// Published up to here.
    pub after: u64,
    /// Nothing up to here can appear any more.
    pub through: u64,
}

/// How far buckets can be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Polled {
    /// Those that can be read further.
    pub ranges: Vec<BucketRange>,
    /// Those that were published less far than the relay believes, because the outbox was restored from a backup or a copy
    /// that lagged behind has taken over: their positions are to be read again.
    pub rewound: Vec<u16>,
}

/// A position of a bucket that is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advance {
    /// The bucket, as it is held.
    pub lease: BucketLease,
    /// The position that the relay knows of. If the outbox has a smaller one, nothing is recorded.
    pub after: u64,
    /// Everything up to here was published or is held.
    pub position: u64,
}

/// A message that is set aside because the sink did not accept it, or an earlier one of its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeldMessage {
    /// The message.
    pub message: OutboxMessage,
    /// Attempts so far.
    pub attempts: u32,
    /// It is not tried again until an operator decides.
    pub parked: bool,
    /// Time until the next attempt; `None`: it is parked, or waits behind an earlier one of its key.
    pub retry_after_ms: Option<u64>,
    /// The sink's last answer.
    pub error: Option<String>,
}

crate::metrics! {
    /// What waits in an outbox for one route.
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
    pub struct RouteStatus is "hapax_outbox", kept by Store, labels ["route"];
    plain {
        /// The route's name.
        pub route: String,
        /// The sink, without secrets.
        pub target: String,
        /// Patterns of its topics.
        pub topics: Vec<String>,
        /// What a crash of a relay can repeat at its sink.
        pub after_a_crash: String,
    }
    nested {}
    /// Relays of the route that run.
    gauge relays,
    /// Numbers that were drawn and not published; some may have been rolled back.
    gauge lag,
    /// When the oldest unpublished message was enqueued.
    gauge oldest_ms("oldest_timestamp_seconds", Milliseconds): Option<u64>,
    /// Messages that are set aside, parked or not.
    gauge held,
    /// Keys whose first message is parked.
    gauge parked,
}

/// A message of an outbox that waits for longer than this is reported, in milliseconds.
pub const LAG_MS_MAX: u64 = 60_000;

impl RouteStatus {
    /// The warning `relay-lags`, if the oldest message of the route has waited for too long at `now_ms`, by the clock of the
    /// outbox.
    pub fn lag_finding(&self, now_ms: u64) -> Option<Finding> {
        let waited_ms = now_ms.saturating_sub(self.oldest_ms?);
        if waited_ms <= LAG_MS_MAX {
            return None;
        }
        let Self { route, relays, lag, held, parked, .. } = self;
        let seconds = waited_ms / 1000;
        let message = format!(
            "the oldest message of the outbox waits for {seconds} s to be published by route {route}: up to {lag} are not published, \
             {held} are set aside after failures, {parked} keys are parked, {relays} relays run"
        );
        let remedy = match (*relays, *lag, *parked) {
            (0, _, _) => {
                "start a relay of this route, or `hapax outbox forget` it if it is not used any more"
            }
            (_, 0, 1..) => {
                "`hapax outbox parked`: mend what the sink refuses, then `hapax outbox retry` or `skip`"
            }
            _ => {
                "`/readyz` of the relay says what the sink or the database answers; else look for a transaction that has \
                 enqueued and stays open (in PostgreSQL: pg_stat_activity)"
            }
        };
        let (code, severity) = ("relay-lags".into(), Severity::Warning);
        Some(Finding { code, severity, message, remedy: remedy.to_owned() })
    }
}

/// How a table of the outbox was cleaned up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rotated {
    /// Tables that were emptied.
    pub emptied: u64,
    /// Tables that a transaction had open; they are tried again.
    pub busy: u64,
    /// Tables in which messages were found that no route takes; they are kept.
    pub unrouted: u64,
}

/// An outbox, as its relays see it.
#[async_trait]
pub trait OutboxStore: Send + Sync {
    /// How many buckets it has, at most 64.
    fn bucket_count(&self) -> u16;

    /// Makes a route known: what it has not published is kept. `topics` are patterns, see [`topic_matches`]. Messages that no
    /// route took so far, and this one does, are published.
    async fn register(
        &self,
        route: &str,
        topics: &[String],
        sink: &SinkDescription,
    ) -> Result<(), StoreError>;

    /// Forgets a route and everything that is held for it. Returns whether it was there. Fails while one of its relays runs.
    async fn forget(&self, route: &str, by: &str) -> Result<bool, StoreError>;

    /// Renews the lease of a relay, and takes its share of the buckets that no running relay holds. Fails if the route is
    /// not known.
    async fn tend(&self, route: &str, relay: &str, lease_ms: u64) -> Result<Tended, StoreError>;

    /// Gives buckets back; an empty list means all, and the relay ends.
    async fn give_back(&self, route: &str, relay: &str, buckets: &[BucketLease]) -> Result<(), StoreError>;

    /// How far each of these buckets was published.
    async fn positions(&self, route: &str, buckets: &[u16]) -> Result<Vec<(u16, u64)>, StoreError>;

    /// Of these buckets with the numbers that were read, those that can be read further, and up to where.
    async fn poll(&self, route: &str, read: &[(u16, u64)]) -> Result<Polled, StoreError>;

    /// Messages of these ranges, in order within each bucket; at most `rows` and about `bytes` of each bucket.
    async fn read(
        &self,
        ranges: &[BucketRange],
        rows: usize,
        bytes: usize,
    ) -> Result<Vec<OutboxMessage>, StoreError>;

    /// Records positions. Returns the buckets that the relay holds no more, or whose position is to be read again.
    async fn advance(&self, route: &str, relay: &str, advances: &[Advance]) -> Result<Vec<u16>, StoreError>;

    /// Sets messages aside. One whose key is held already waits behind it, whatever it says itself. Messages that are there
    /// already are left alone. Returns the buckets that the relay holds no more.
    async fn hold(
        &self,
        route: &str,
        relay: &str,
        leases: &[BucketLease],
        messages: Vec<HeldMessage>,
    ) -> Result<Vec<u16>, StoreError>;

    /// The keys that are held in these buckets.
    async fn held_keys(&self, route: &str, buckets: &[u16]) -> Result<Vec<(u16, String)>, StoreError>;

    /// Held messages of these buckets that are due, at most `max`; at most one of each key.
    async fn due(&self, route: &str, buckets: &[u16], max: usize) -> Result<Vec<HeldMessage>, StoreError>;

    /// A held message was published: removes it, and makes the next one of its key due. Returns whether its key is still
    /// held, also if an operator has skipped the message; `None`: the relay does not hold the bucket any more.
    async fn release(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        message: &OutboxMessage,
    ) -> Result<Option<bool>, StoreError>;

    /// A held message failed again.
    async fn postpone(
        &self,
        route: &str,
        relay: &str,
        lease: BucketLease,
        held: &HeldMessage,
    ) -> Result<(), StoreError>;

    /// Cleans up what every route has published.
    async fn rotate(&self) -> Result<Rotated, StoreError>;

    /// Waits until something may have been enqueued, at most this long.
    async fn changed(&self, wait: std::time::Duration);

    /// What waits, by route.
    async fn status(&self) -> Result<Vec<RouteStatus>, StoreError>;

    /// Messages that are set aside, in order, at most `max`; only parked ones if asked.
    async fn held(
        &self,
        route: Option<&str>,
        parked: bool,
        max: usize,
    ) -> Result<Vec<(String, HeldMessage)>, StoreError>;

    /// Messages that wait to be published by a route, at most `max`.
    async fn unpublished(&self, route: &str, max: usize) -> Result<Vec<OutboxMessage>, StoreError>;

    /// Tries parked messages again: the one with this id, or all of the route. Returns how many.
    async fn retry(&self, route: &str, id: Option<&str>, by: &str) -> Result<u64, StoreError>;

    /// Deletes a held message unpublished, and continues with the next one of its key. Returns whether it was there.
    async fn skip(&self, route: &str, id: &str, by: &str) -> Result<bool, StoreError>;
}

/// A route cannot be forgotten: what it has not published would be deleted under a relay that publishes it.
pub fn route_runs(route: &str) -> StoreError {
    StoreError::Invalid(format!(
        "route {route} has a relay that runs; stop it first (one that was killed counts until its lease ends)"
    ))
}

/// A relay cannot continue: its route was forgotten, so messages are not kept for it any more.
pub fn route_is_unknown(route: &str) -> StoreError {
    StoreError::Invalid(format!("route {route} was forgotten; start its relay again to publish from here on"))
}

/// Whether a topic matches a pattern: the topic itself, where `*` stands for any characters.
///
/// ```
/// use hapax_core::outbox::topic_matches;
///
/// assert!(topic_matches("orders.*", "orders.placed") && topic_matches("*", "orders"));
/// assert!(!topic_matches("orders.*", "orders") && !topic_matches("orders", "orders.placed"));
/// ```
pub fn topic_matches(pattern: &str, topic: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == topic };
    let Some(mut left) = topic.strip_prefix(first) else { return false };
    let parts: Vec<&str> = rest.split('*').collect();
    let (last, middle) = parts.split_last().expect("a split has a part");
    for part in middle {
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_topics() {
        for (pattern, topic, matches) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("a*b", "ab", true),
            ("a*b", "aXbXb", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("*b", "ab", true),
            ("*b", "ba", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(topic_matches(pattern, topic), matches, "{pattern} {topic}");
        }
    }

    #[test]
    fn a_delayed_message_has_no_place_in_the_order() {
        let message = OutboxMessage {
            bucket: 0,
            number: 1,
            id: "i".into(),
            topic: "t".into(),
            key: Some("k".into()),
            body: Bytes::new(),
            headers: BTreeMap::new(),
            deliver_at_ms: None,
            enqueued_ms: 0,
        };
        assert_eq!(message.ordered_key(), Some("k"));
        assert_eq!(OutboxMessage { deliver_at_ms: Some(1), ..message }.ordered_key(), None);
    }
}
