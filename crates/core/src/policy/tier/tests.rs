//! Each finding is triggered once, and narrowly missed once; `said` has what it says.

mod said;

use std::collections::BTreeSet;

use super::*;
use crate::capabilities::Order;
use crate::message::KeySource;
use crate::name::QueueName;
use crate::policy::{LEASE_MS_MAX, MESSAGE_BYTES_MAX, RETENTION_MS_MAX, RetryPolicy};
use crate::queue::{DeadLetterPolicy, OnDead, QueueKind};
use crate::store::QueueTotals;

const DAY_MS: u64 = 24 * 3600 * 1000;

/// A queue in a store with all features, set up correctly for its tier.
fn sound(tier: Tier) -> Facts {
    let store = Capabilities {
        atomic_settle: true,
        settle_ends_claims: true,
        durable_lease: true,
        fence: true,
        order: Order::PerGroup,
        halt_group: true,
        dedup_ms_max: RETENTION_MS_MAX,
        message_bytes_max: MESSAGE_BYTES_MAX,
        ..Capabilities::none("perfect")
    };
    let dead_letter = Some(DeadLetterPolicy { queue: QueueName::new("dead").unwrap() });
    let queue = QueueConfig {
        tier,
        dead_letter,
        retry: RetryPolicy::exponential(1_000, 60_000),
        key_pointer: Some("/id".into()),
        ..QueueConfig::default()
    };
    let can = LedgerCapabilities { name: "perfect".into(), durable: true, fence: true, may_evict: false };
    Facts {
        dead_retention_ms: Some(14 * DAY_MS),
        stats: Some(QueueStats {
            totals: QueueTotals { delivered: 100_000, expired: 999, ..QueueTotals::default() },
            ..QueueStats::default()
        }),
        key_source: Some(KeySource::Body),
        producer_retry_ms: Some(300_000),
        ledger: Some(LedgerFacts { capabilities: can, same_store: true, ttl_ms: 4 * DAY_MS }),
        handler: Some(HandlerFacts {
            lease: HandlerLease::Fixed { lease_ms: 30_000 },
            heartbeat_ms_max: None,
            p99_ms: Some(30_000),
            on_doubt: OnDoubt::Retry,
            idempotent_by_derived_key: true,
            database: HandlerDatabase::WithLedger,
        }),
        ..Facts::new(queue, store)
    }
}

fn ledger(facts: &mut Facts) -> &mut LedgerFacts {
    facts.ledger.as_mut().unwrap()
}

fn handler(facts: &mut Facts) -> &mut HandlerFacts {
    facts.handler.as_mut().unwrap()
}

fn stats(facts: &mut Facts) -> &mut QueueStats {
    facts.stats.as_mut().unwrap()
}

fn totals(facts: &mut Facts) -> &mut QueueTotals {
    &mut stats(facts).totals
}

/// A queue that was observed, and has nothing to advise.
fn calm() -> ObservedQueue {
    ObservedQueue {
        window_ms: 600_000,
        delivered: 1_000,
        held_count: 20,
        lease_ms: 30_000,
        ..ObservedQueue::default()
    }
}

/// One whose lease is too short.
fn slow() -> ObservedQueue {
    ObservedQueue { expired: 10, late: 10, held_p99_ms: Some(41_000), ..calm() }
}

/// One whose lease is too short, with few duplicates so far.
fn outlived() -> ObservedQueue {
    ObservedQueue { settled: 500, overran: 5, held_p99_ms: Some(30_000), expired: 9, late: 5, ..calm() }
}

/// One whose deliveries are mostly of one group.
fn hot() -> ObservedQueue {
    ObservedQueue { hot_group: Some("g".into()), hot_group_delivered: 500, ..calm() }
}

/// A queue that waits 12 h between attempts.
fn patient(facts: &mut Facts, max_attempts: u32) {
    facts.queue.retry = RetryPolicy::exponential(LEASE_MS_MAX, 0).attempts(max_attempts);
}

fn fifo(facts: &mut Facts) {
    facts.queue.kind = QueueKind::Fifo;
    facts.queue.on_dead = OnDead::HaltGroup;
}

type Change = fn(&mut Facts);

/// Facts that trigger a finding, and facts that narrowly miss it.
struct Case {
    code: &'static str,
    tier: Tier,
    hit: Change,
    misses: &'static [(Tier, Change)],
}

use Tier::{AtLeastOnce, AtMostOnce, EffectivelyOnce, Transactional};

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case {
        code: "ledger-missing", tier: EffectivelyOnce, hit: |f| f.ledger = None,
        misses: &[(AtLeastOnce, |f| f.ledger = None), (Transactional, |f| f.ledger = None)],
    },
    Case {
        code: "ledger-not-durable", tier: EffectivelyOnce, hit: |f| ledger(f).capabilities.durable = false,
        misses: &[(AtLeastOnce, |f| ledger(f).capabilities.durable = false)],
    },
    Case {
        code: "ledger-not-durable", tier: Transactional, hit: |f| ledger(f).capabilities.durable = false, misses: &[],
    },
    Case {
        code: "ledger-may-evict", tier: EffectivelyOnce, hit: |f| ledger(f).capabilities.may_evict = true,
        misses: &[(AtLeastOnce, |f| ledger(f).capabilities.may_evict = true)],
    },
    Case {
        code: "ledger-fence-may-repeat", tier: EffectivelyOnce, hit: |f| ledger(f).capabilities.fence = false,
        misses: &[(AtLeastOnce, |f| ledger(f).capabilities.fence = false), (Transactional, |f| ledger(f).capabilities.fence = false)],
    },
    Case {
        code: "ledger-ttl-too-short", tier: EffectivelyOnce,
        hit: |f| { ledger(f).same_store = false; ledger(f).ttl_ms = 4 * DAY_MS - 1; },
        misses: &[
            (EffectivelyOnce, |f| { ledger(f).same_store = false; ledger(f).ttl_ms = 4 * DAY_MS; }),
            (EffectivelyOnce, |f| ledger(f).ttl_ms = 1_000),
            (AtLeastOnce, |f| { ledger(f).same_store = false; ledger(f).ttl_ms = 1_000; }),
        ],
    },
    Case {
        code: "ledger-ttl-too-short", tier: Transactional,
        hit: |f| { ledger(f).same_store = false; ledger(f).ttl_ms = DAY_MS; }, misses: &[],
    },
    Case {
        code: "database-missing", tier: Transactional, hit: |f| handler(f).database = HandlerDatabase::None,
        misses: &[(EffectivelyOnce, |f| handler(f).database = HandlerDatabase::None), (Transactional, |f| f.handler = None)],
    },
    Case {
        code: "database-not-supported", tier: Transactional,
        hit: |f| handler(f).database = HandlerDatabase::Unsupported { kind: "a spreadsheet".into() },
        misses: &[(EffectivelyOnce, |f| handler(f).database = HandlerDatabase::Unsupported { kind: "x".into() })],
    },
    Case {
        code: "ledger-in-other-database", tier: Transactional, hit: |f| handler(f).database = HandlerDatabase::Other,
        misses: &[(EffectivelyOnce, |f| handler(f).database = HandlerDatabase::Other)],
    },
    Case {
        code: "lease-zero", tier: AtLeastOnce, hit: |f| { f.handler = None; f.queue.lease_ms = 0; },
        misses: &[
            (AtMostOnce, |f| { f.handler = None; f.queue.lease_ms = 0; }),
            (AtLeastOnce, |f| { f.handler = None; f.queue.lease_ms = 1; }),
            (AtLeastOnce, |f| { handler(f).lease = HandlerLease::Auto; f.queue.lease_ms = 0; }),
        ],
    },
    Case {
        code: "lease-zero", tier: EffectivelyOnce,
        hit: |f| { handler(f).lease = HandlerLease::Fixed { lease_ms: 0 }; handler(f).p99_ms = None; }, misses: &[],
    },
    Case {
        code: "order-not-kept", tier: AtLeastOnce, hit: |f| { fifo(f); f.store.order = Order::None; },
        misses: &[(AtLeastOnce, |f| f.store.order = Order::None), (AtLeastOnce, fifo)],
    },
    Case {
        code: "halt-group-not-supported", tier: AtLeastOnce, hit: |f| { fifo(f); f.store.halt_group = false; },
        misses: &[
            (AtLeastOnce, fifo),
            (AtLeastOnce, |f| f.store.halt_group = false),
            (AtLeastOnce, |f| { fifo(f); f.queue.on_dead = OnDead::Continue; f.store.halt_group = false; }),
        ],
    },
    Case {
        code: "message-size-not-supported", tier: AtLeastOnce,
        hit: |f| f.store.message_bytes_max = MESSAGE_BYTES_MAX - 1,
        misses: &[(AtLeastOnce, |f| { f.store.message_bytes_max = 4096; f.queue.message_bytes_max = 4096; })],
    },
    Case {
        code: "dedup-window-too-long", tier: AtLeastOnce, hit: |f| f.store.dedup_ms_max = 299_999,
        misses: &[(AtLeastOnce, |f| f.store.dedup_ms_max = 300_000)],
    },
    Case {
        code: "lease-below-p99", tier: AtLeastOnce, hit: |f| handler(f).p99_ms = Some(30_001),
        misses: &[
            (AtMostOnce, |f| handler(f).p99_ms = Some(30_001)),
            (AtLeastOnce, |f| { handler(f).p99_ms = Some(60_000); handler(f).heartbeat_ms_max = Some(60_000); }),
            (AtLeastOnce, |f| { handler(f).p99_ms = Some(60_000); handler(f).lease = HandlerLease::Auto; }),
            (AtLeastOnce, |f| handler(f).heartbeat_ms_max = Some(10_000)),
            (AtLeastOnce, |f| handler(f).p99_ms = None),
        ],
    },
    Case {
        code: "lease-below-p99", tier: AtLeastOnce,
        hit: |f| { handler(f).p99_ms = Some(60_001); handler(f).heartbeat_ms_max = Some(60_000); }, misses: &[],
    },
    Case {
        code: "lease-below-p99", tier: AtLeastOnce, hit: |f| f.observed = Some(outlived()),
        misses: &[
            (AtMostOnce, |f| f.observed = Some(outlived())),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { overran: 4, settled: 20, ..outlived() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { settled: 501, ..outlived() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { held_count: 19, ..outlived() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { held_p99_ms: Some(29_999), ..outlived() })),
            // One cause, one finding: this is `leases-expire`.
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { expired: 10, late: 10, ..outlived() })),
        ],
    },
    Case {
        code: "leases-expire", tier: AtLeastOnce, hit: |f| totals(f).expired = 1_000,
        misses: &[
            (AtMostOnce, |f| totals(f).expired = 1_000),
            (AtLeastOnce, |f| { totals(f).delivered = 9; totals(f).expired = 9; }),
            (AtLeastOnce, |f| { totals(f).delivered = 0; totals(f).expired = 1_000; }),
        ],
    },
    Case {
        code: "leases-expire", tier: AtLeastOnce,
        hit: |f| { totals(f).delivered = 10; totals(f).expired = 10; }, misses: &[],
    },
    Case {
        code: "leases-expire", tier: AtLeastOnce, hit: |f| f.observed = Some(slow()),
        misses: &[
            (AtMostOnce, |f| f.observed = Some(slow())),
            // Once they are observed, the store's counters of an earlier time do not count.
            (AtLeastOnce, |f| { totals(f).expired = 50_000; f.observed = Some(ObservedQueue { expired: 9, ..slow() }); }),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { delivered: 1_001, ..slow() })),
            // One cause, one finding: this is `scaling-loses-leases`.
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { late: 4, consumers_stopped: 3, ..slow() })),
        ],
    },
    Case {
        code: "scaling-loses-leases", tier: AtLeastOnce,
        hit: |f| f.observed = Some(ObservedQueue { late: 4, consumers_stopped: 3, ..slow() }),
        misses: &[
            (AtMostOnce, |f| f.observed = Some(ObservedQueue { late: 4, consumers_stopped: 3, ..slow() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { late: 5, consumers_stopped: 3, ..slow() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { late: 4, consumers_started: 1, consumers_stopped: 1, ..slow() })),
        ],
    },
    Case {
        code: "lease-far-above-work", tier: AtLeastOnce,
        hit: |f| f.observed = Some(ObservedQueue { expired: 1, lease_ms: 600_000, held_p99_ms: Some(30_000), ..slow() }),
        misses: &[
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { expired: 0, lease_ms: 600_000, held_p99_ms: Some(1), ..slow() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { expired: 1, lease_ms: 600_000, held_p99_ms: Some(30_001), ..slow() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { expired: 1, lease_ms: 600_000, held_count: 19, ..slow() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { expired: 1, lease_ms: 119_999, held_p99_ms: Some(1), ..slow() })),
        ],
    },
    Case {
        code: "lease-far-above-work", tier: AtLeastOnce,
        hit: |f| f.observed = Some(ObservedQueue { expired: 1, lease_ms: 120_000, held_p99_ms: Some(1), ..slow() }), misses: &[],
    },
    Case {
        code: "poison-messages", tier: AtLeastOnce, hit: |f| f.observed = Some(ObservedQueue { poison: 1, ..calm() }),
        misses: &[(AtLeastOnce, |f| f.observed = Some(calm()))],
    },
    Case {
        code: "messages-die", tier: AtLeastOnce, hit: |f| f.observed = Some(ObservedQueue { dead: 10, ..calm() }),
        misses: &[
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { dead: 9, ..calm() })),
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { dead: 4, delivered: 4, ..calm() })),
        ],
    },
    Case {
        code: "messages-die", tier: AtLeastOnce, hit: |f| f.observed = Some(ObservedQueue { dead: 5, delivered: 5, ..calm() }),
        misses: &[],
    },
    Case {
        // Delivered by another process.
        code: "messages-die", tier: AtLeastOnce, hit: |f| f.observed = Some(ObservedQueue { dead: 5, delivered: 0, ..calm() }),
        misses: &[],
    },
    Case {
        code: "groups-halted", tier: AtLeastOnce, hit: |f| stats(f).halted = 1,
        misses: &[(AtLeastOnce, |f| stats(f).parked = 1)],
    },
    Case {
        code: "keys-collide", tier: EffectivelyOnce, hit: |f| f.observed = Some(ObservedQueue { conflicts: 100, ..calm() }),
        misses: &[
            (AtLeastOnce, |f| f.observed = Some(ObservedQueue { conflicts: 100, ..calm() })),
            (EffectivelyOnce, |f| f.observed = Some(ObservedQueue { conflicts: 99, ..calm() })),
            (EffectivelyOnce, |f| f.observed = Some(ObservedQueue { conflicts: 100, delivered: 2_001, ..calm() })),
        ],
    },
    Case {
        code: "keys-collide", tier: EffectivelyOnce,
        hit: |f| f.observed = Some(ObservedQueue { conflicts: 100, delivered: 2_000, ..calm() }), misses: &[],
    },
    Case {
        code: "ledger-never-hit", tier: EffectivelyOnce, hit: |f| f.observed = Some(ObservedQueue { granted: 10_000, ..calm() }),
        misses: &[
            (EffectivelyOnce, |f| f.observed = Some(ObservedQueue { granted: 9_999, ..calm() })),
            (EffectivelyOnce, |f| f.observed = Some(ObservedQueue { granted: 10_000, replayed: 1, ..calm() })),
            (EffectivelyOnce, |f| f.observed = Some(ObservedQueue { granted: 10_000, conflicts: 1, ..calm() })),
            (Transactional, |f| f.observed = Some(ObservedQueue { granted: 10_000, ..calm() })),
        ],
    },
    Case {
        code: "hot-group", tier: AtLeastOnce, hit: |f| { fifo(f); stats(f).ready = 500; f.observed = Some(hot()); },
        misses: &[
            (AtLeastOnce, |f| { stats(f).ready = 500; f.observed = Some(hot()); }),
            (AtLeastOnce, |f| { fifo(f); stats(f).ready = 500; f.observed = Some(ObservedQueue { hot_group_delivered: 499, ..hot() }); }),
            (AtLeastOnce, |f| { fifo(f); stats(f).ready = 499; f.observed = Some(hot()); }),
            (AtLeastOnce, |f| { fifo(f); stats(f).ready = 500; f.observed = Some(ObservedQueue { delivered: 99, hot_group_delivered: 99, ..hot() }); }),
        ],
    },
    Case {
        code: "hot-group", tier: AtLeastOnce,
        hit: |f| { fifo(f); stats(f).ready = 500; f.observed = Some(ObservedQueue { delivered: 100, hot_group_delivered: 100, ..hot() }); },
        misses: &[],
    },
    Case {
        code: "queue-grows", tier: AtLeastOnce, hit: |f| { stats(f).ready = 10_000; totals(f).sent = 20_000; totals(f).acked = 10_000; },
        misses: &[
            (AtLeastOnce, |f| { stats(f).ready = 9_999; totals(f).sent = 20_000; }),
            (AtLeastOnce, |f| { stats(f).ready = 10_000; totals(f).sent = 20_000; totals(f).acked = 10_001; }),
            (AtLeastOnce, |f| { stats(f).ready = 10_000; totals(f).sent = 999; }),
        ],
    },
    Case {
        code: "queue-grows", tier: AtLeastOnce, hit: |f| { stats(f).ready = 10_000; totals(f).sent = 1_000; }, misses: &[],
    },
    Case {
        code: "key-is-message-id", tier: EffectivelyOnce, hit: |f| f.key_source = Some(KeySource::MessageId),
        misses: &[
            (AtLeastOnce, |f| f.key_source = Some(KeySource::MessageId)),
            (EffectivelyOnce, |f| f.key_source = Some(KeySource::DedupId)),
            (EffectivelyOnce, |f| f.key_source = None),
            (EffectivelyOnce, |f| { fifo(f); f.key_source = None; f.queue.key_pointer = None; }),
        ],
    },
    Case {
        code: "key-is-message-id", tier: Transactional,
        hit: |f| { f.key_source = None; f.queue.key_pointer = None; }, misses: &[],
    },
    Case {
        code: "key-is-content", tier: EffectivelyOnce,
        hit: |f| { f.key_source = None; f.queue.key_pointer = None; f.queue.dedup.content_based = true; },
        misses: &[
            (AtLeastOnce, |f| { f.key_source = None; f.queue.key_pointer = None; f.queue.dedup.content_based = true; }),
            (EffectivelyOnce, |f| { f.key_source = None; f.queue.dedup.content_based = true; }),
            (EffectivelyOnce, |f| f.key_source = Some(KeySource::DedupId)),
        ],
    },
    Case {
        code: "effect-may-repeat", tier: EffectivelyOnce, hit: |f| handler(f).idempotent_by_derived_key = false,
        misses: &[
            (AtLeastOnce, |f| handler(f).idempotent_by_derived_key = false),
            (Transactional, |f| handler(f).idempotent_by_derived_key = false),
            (EffectivelyOnce, |f| { handler(f).idempotent_by_derived_key = false; handler(f).on_doubt = OnDoubt::Park; }),
            (EffectivelyOnce, |f| f.handler = None),
        ],
    },
    Case {
        code: "no-attempt-limit", tier: EffectivelyOnce, hit: |f| f.queue.retry.max_attempts = 0,
        misses: &[
            (AtLeastOnce, |f| f.queue.retry.max_attempts = 0),
            (EffectivelyOnce, |f| f.queue.dead_letter = None),
        ],
    },
    Case {
        code: "own-dead-letters", tier: AtLeastOnce,
        hit: |f| { f.queue.dead_letter = None; drop(f.queue.extra.insert("RedrivePolicy".into(), "3 q".into())); },
        misses: &[(AtLeastOnce, |f| drop(f.queue.extra.insert("RedrivePolicy".into(), "3 q".into())))],
    },
    Case {
        code: "retries-at-once", tier: EffectivelyOnce, hit: |f| f.queue.retry.base_ms = 0,
        misses: &[
            (AtLeastOnce, |f| f.queue.retry.base_ms = 0),
            (EffectivelyOnce, |f| { f.queue.retry.base_ms = 0; f.queue.retry.max_attempts = 1; }),
            (AtMostOnce, |f| f.queue.retry = RetryPolicy::at_once()),
        ],
    },
    Case {
        code: "retries-at-once", tier: AtLeastOnce, hit: |f| f.queue.retry = RetryPolicy::at_once(),
        misses: &[(AtLeastOnce, |f| f.queue.retry.max_attempts = 0)],
    },
    Case {
        // Eight delays of 12 h: exactly the retention.
        code: "retention-ends-retries", tier: AtLeastOnce,
        hit: |f| patient(f, 9),
        misses: &[
            (AtLeastOnce, |f| patient(f, 8)),
            (AtMostOnce, |f| patient(f, 9)),
        ],
    },
    Case {
        code: "retention-drops-messages", tier: AtLeastOnce, hit: |f| totals(f).retention_dropped = 1,
        misses: &[(AtMostOnce, |f| totals(f).retention_dropped = 1)],
    },
    Case {
        code: "dead-letter-queue-missing", tier: AtMostOnce, hit: |f| f.dead_queue_missing = true,
        misses: &[(AtLeastOnce, |f| { f.queue.dead_letter = None; f.dead_queue_missing = true; })],
    },
    Case {
        code: "dead-letters-short-lived", tier: AtLeastOnce, hit: |f| f.dead_retention_ms = Some(4 * DAY_MS),
        misses: &[
            (AtLeastOnce, |f| f.dead_retention_ms = Some(4 * DAY_MS + 1)),
            (AtLeastOnce, |f| { fifo(f); f.dead_retention_ms = Some(60_000); }),
            (AtMostOnce, |f| f.dead_retention_ms = Some(60_000)),
            (AtLeastOnce, |f| { f.queue.dead_letter = None; f.dead_retention_ms = Some(60_000); }),
        ],
    },
    Case {
        code: "ledger-ttl-below-redrive", tier: EffectivelyOnce,
        hit: |f| { ledger(f).same_store = false; ledger(f).ttl_ms = 18 * DAY_MS - 1; },
        misses: &[
            (EffectivelyOnce, |f| { ledger(f).same_store = false; ledger(f).ttl_ms = 18 * DAY_MS; }),
            (EffectivelyOnce, |f| ledger(f).ttl_ms = 1_000),
            (EffectivelyOnce, |f| { ledger(f).same_store = false; f.dead_retention_ms = None; }),
            (EffectivelyOnce, |f| { ledger(f).same_store = false; f.queue.dead_letter = None; }),
        ],
    },
    Case {
        code: "ledger-ttl-below-redrive", tier: EffectivelyOnce,
        hit: |f| { fifo(f); ledger(f).same_store = false; ledger(f).ttl_ms = 22 * DAY_MS - 1; }, misses: &[],
    },
    Case {
        code: "dedup-window-short", tier: AtLeastOnce, hit: |f| f.producer_retry_ms = Some(300_001),
        misses: &[
            (AtLeastOnce, |f| f.producer_retry_ms = None),
            (EffectivelyOnce, |f| f.producer_retry_ms = Some(4 * DAY_MS)),
        ],
    },
    Case {
        code: "dedup-window-short", tier: EffectivelyOnce,
        hit: |f| f.producer_retry_ms = Some(4 * DAY_MS + 1), misses: &[],
    },
    Case {
        // A message that is sent again has another id, and the ledger does not know it.
        code: "dedup-window-short", tier: EffectivelyOnce,
        hit: |f| { f.key_source = Some(KeySource::MessageId); f.producer_retry_ms = Some(300_001); }, misses: &[],
    },
    Case {
        code: "order-has-holes", tier: AtLeastOnce, hit: |f| { fifo(f); f.queue.on_dead = OnDead::Continue; },
        misses: &[
            (AtLeastOnce, fifo),
            (AtLeastOnce, |f| {
                fifo(f);
                f.queue.on_dead = OnDead::Continue;
                f.queue.dead_letter = None;
                f.queue.retry.max_attempts = 0;
            }),
            (AtMostOnce, |f| { fifo(f); f.queue.on_dead = OnDead::Continue; }),
        ],
    },
    Case {
        code: "order-has-holes", tier: AtLeastOnce,
        hit: |f| { fifo(f); f.queue.on_dead = OnDead::Continue; f.queue.dead_letter = None; }, misses: &[],
    },
    Case {
        code: "order-has-holes", tier: AtLeastOnce,
        hit: |f| { fifo(f); f.queue.on_dead = OnDead::Continue; f.queue.retry.max_attempts = 0; }, misses: &[],
    },
    Case {
        code: "delivery-fence-may-repeat", tier: AtLeastOnce, hit: |f| f.store.fence = false,
        misses: &[(AtMostOnce, |f| f.store.fence = false)],
    },
    Case {
        code: "delivery-not-durable", tier: AtLeastOnce, hit: |f| f.store.durable_lease = false,
        misses: &[(AtMostOnce, |f| f.store.durable_lease = false)],
    },
    Case {
        code: "settle-not-atomic", tier: AtLeastOnce, hit: |f| f.store.atomic_settle = false,
        misses: &[(AtMostOnce, |f| f.store.atomic_settle = false)],
    },
];

fn found(tier: Tier, change: Change) -> Vec<Finding> {
    let mut facts = sound(tier);
    change(&mut facts);
    check(&facts)
}

#[test]
fn what_is_in_good_order_has_no_findings() {
    for tier in [AtMostOnce, AtLeastOnce, EffectivelyOnce, Transactional] {
        assert_eq!(found(tier, |_| {}), [], "{tier:?}");
    }
}

#[test]
fn each_finding_is_made_when_it_is_true_and_only_then() {
    for Case { code, tier, hit, misses } in CASES {
        let all = found(*tier, *hit);
        assert!(all.iter().any(|finding| finding.code == *code), "{code} is not among {all:?}");
        for (at, (tier, miss)) in misses.iter().enumerate() {
            let all = found(*tier, *miss);
            assert!(all.iter().all(|finding| finding.code != *code), "near miss {at} of {code}: {all:?}");
        }
    }
}

#[test]
fn each_code_is_triggered_and_missed_and_no_two_are_alike() {
    let hit: BTreeSet<_> = CASES.iter().map(|case| case.code).collect();
    let missed: BTreeSet<_> =
        CASES.iter().filter(|case| !case.misses.is_empty()).map(|case| case.code).collect();
    let all: BTreeSet<_> = rules().map(|rule| rule.code).collect();
    assert_eq!(hit, all);
    assert_eq!(missed, all);
    assert_eq!(rules().count(), all.len());
    assert!(all.iter().all(|code| codes().contains_key(code)) && codes().contains_key("store-stopped"));
}

#[test]
fn refusals_come_first() {
    let findings = found(EffectivelyOnce, |facts| {
        facts.queue.retry.max_attempts = 0;
        facts.queue.dedup.window_ms = RETENTION_MS_MAX + 1;
        ledger(facts).capabilities.durable = false;
    });
    let refused: Vec<_> = findings.iter().map(Finding::is_refusal).collect();
    assert_eq!(refused, [true, true, false]);
}

#[test]
fn a_finding_says_what_which_value_what_to_do_and_where_to_read_on() {
    let findings = found(EffectivelyOnce, |facts| {
        ledger(facts).same_store = false;
        ledger(facts).ttl_ms = 3_600_000;
        facts.dead_retention_ms = None;
    });
    assert_eq!(
        findings[0].to_string(),
        "ledger-ttl-too-short: outcomes are kept for 1 h, and a message may be delivered again for 4 d (the queue's \
         retention); keep outcomes at least that long, or the messages not as long; or put queue and ledger into one \
         store, which keeps the entries of its own messages (see docs/errors/ledger-ttl-too-short.md)"
    );
    let json = serde_json::to_value(&findings[0]).unwrap();
    assert_eq!((&json["code"], &json["severity"]), (&"ledger-ttl-too-short".into(), &"refusal".into()));
}

#[test]
fn shares_are_rounded_down_and_named() {
    let findings = found(AtLeastOnce, |facts| {
        *totals(facts) = QueueTotals { delivered: 1_000, expired: 31, stale: 2, ..QueueTotals::default() };
    });
    assert!(
        findings[0].message.starts_with("3.1% of deliveries expired (31 of 1000) and 2 settles"),
        "{findings:?}"
    );
}

#[test]
fn what_was_seen_is_told_from_what_the_policy_allows_for() {
    let seen = found(EffectivelyOnce, |facts| facts.key_source = Some(KeySource::MessageId));
    assert!(seen[0].message.starts_with("some messages are known only by their message id"), "{seen:?}");
    let allowed = found(EffectivelyOnce, |facts| {
        facts.key_source = None;
        facts.queue.key_pointer = None;
    });
    assert!(allowed[0].message.starts_with("a message without an idempotency key"), "{allowed:?}");
}

#[test]
fn extremes_do_not_overflow() {
    let findings = found(EffectivelyOnce, |facts| {
        facts.queue.retention_ms = u64::MAX;
        facts.dead_retention_ms = Some(u64::MAX);
        facts.queue.retry = RetryPolicy::exponential(u64::MAX, u64::MAX).attempts(1_000);
        *totals(facts) = QueueTotals { delivered: u64::MAX, expired: u64::MAX, ..QueueTotals::default() };
        ledger(facts).same_store = false;
    });
    assert!(findings.iter().any(|finding| finding.code == "ledger-ttl-too-short"));
}
