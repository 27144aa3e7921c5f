//! The flags that describe a queue's policy, shared by `queue create` and `queue set`.

use clap::Args;
use hapax::core::policy::Jitter;
use hapax::core::{DedupScope, OnDead, Tier};
use hapax::{DeadLetterPolicy, QueueConfig, QueueName};

use crate::text::{parse_ms, parse_pair, parse_word};

/// Flags that are not given leave their field as it is; on a new queue, at its default.
#[derive(Debug, Args)]
#[command(next_help_heading = "Policy")]
pub struct PolicyArgs {
    /// How long a consumer may work on a delivery: up to 12h [default: 30s].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    lease: Option<u64>,
    /// How long a message is kept: 1m to 14d [default: 4d].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    retention: Option<u64>,
    /// How long a new message stays invisible: up to 15m [default: 0].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    delay: Option<u64>,
    /// How long a receive waits if it does not set its own wait: up to 20s [default: 0].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    wait: Option<u64>,
    /// Maximum size of a message: 1024 to 1048576 [default: 1048576].
    #[arg(long, value_name = "BYTES")]
    message_bytes_max: Option<u64>,
    /// The guarantee that consumers want: at-most-once, at-least-once, effectively-once, transactional.
    #[arg(long, value_parser = parse_word::<Tier>)]
    tier: Option<Tier>,
    /// The delay after the first failed attempt, doubled after each further one; 0 means no delay [default: 1s].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    retry_base: Option<u64>,
    /// The longest delay between attempts: up to 12h [default: 5m; FIFO: 10s].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    retry_cap: Option<u64>,
    /// How much of a retry's delay is random: full, none [default: full].
    #[arg(long, value_parser = parse_word::<Jitter>)]
    retry_jitter: Option<Jitter>,
    /// After this many attempts a message is dead: up to 1000; 0 means no limit [default: 20].
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,
    /// The queue for dead letters. Without one they are parked in their own queue.
    #[arg(long, value_name = "QUEUE")]
    dead_letter: Option<QueueName>,
    /// Parks dead letters in their own queue.
    #[arg(long, conflicts_with = "dead_letter")]
    no_dead_letter: bool,
    /// Whether a parked or dead message halts its FIFO group: continue, halt-group [default: halt-group].
    #[arg(long, value_parser = parse_word::<OnDead>)]
    on_dead: Option<OnDead>,
    /// How long a deduplication id is remembered: up to the retention; 0 turns it off [default: 5m].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    dedup_window: Option<u64>,
    /// Deduplicates messages without an id by their body.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    dedup_content: Option<bool>,
    /// Within which set of messages a deduplication id is unique: queue, group [default: queue].
    #[arg(long, value_parser = parse_word::<DedupScope>)]
    dedup_scope: Option<DedupScope>,
    /// Maximum number of messages in the queue; 0 means no limit.
    #[arg(long, value_name = "N")]
    messages_max: Option<u64>,
    /// Maximum bytes of bodies and attributes in the queue; 0 means no limit.
    #[arg(long, value_name = "BYTES")]
    bytes_max: Option<u64>,
    /// JSON pointer to the idempotency key in the body, for example /order/id; empty for none.
    #[arg(long, value_name = "POINTER")]
    key_pointer: Option<String>,
    /// A label; may be repeated. An empty value removes it.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_pair)]
    tag: Vec<(String, String)>,
}

fn set<T>(field: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *field = value;
    }
}

fn set_limit(field: &mut Option<u64>, given: Option<u64>) {
    if let Some(limit) = given {
        *field = (limit > 0).then_some(limit);
    }
}

impl PolicyArgs {
    /// Overrides a configuration with the given flags.
    pub fn apply_to(self, config: &mut QueueConfig) {
        set(&mut config.lease_ms, self.lease);
        set(&mut config.retention_ms, self.retention);
        set(&mut config.delay_ms, self.delay);
        set(&mut config.wait_ms, self.wait);
        set(&mut config.message_bytes_max, self.message_bytes_max);
        set(&mut config.tier, self.tier);
        set(&mut config.retry.base_ms, self.retry_base);
        set(&mut config.retry.cap_ms, self.retry_cap);
        set(&mut config.retry.jitter, self.retry_jitter);
        set(&mut config.retry.max_attempts, self.max_attempts);
        set(&mut config.on_dead, self.on_dead);
        set(&mut config.dedup.window_ms, self.dedup_window);
        set(&mut config.dedup.content_based, self.dedup_content);
        set(&mut config.dedup.scope, self.dedup_scope);
        set_limit(&mut config.quota.messages_max, self.messages_max);
        set_limit(&mut config.quota.bytes_max, self.bytes_max);
        if let Some(pointer) = self.key_pointer {
            config.key_pointer = (!pointer.is_empty()).then_some(pointer);
        }
        for (name, value) in self.tag {
            if value.is_empty() {
                config.tags.remove(&name);
            } else {
                config.tags.insert(name, value);
            }
        }
        if self.no_dead_letter {
            config.dead_letter = None;
        } else if let Some(queue) = self.dead_letter {
            config.dead_letter = Some(DeadLetterPolicy { queue });
        }
    }
}
