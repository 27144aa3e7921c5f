//! What each finding says: its evidence, and a change.

use super::*;

/// A situation, and what is said about it: evidence, cause and change.
#[rustfmt::skip]
const SAID: &[(&str, Tier, Change, &str, &str)] = &[
    (
        "leases-expire", AtLeastOnce, |f| f.observed = Some(slow()),
        "lease 30 s, P99 41 s: 1.0% of deliveries were repeated because their lease ran out (10 of 1000 in 10 min), and 10 settles came too late",
        "set the lease to 1 min 15 s (`hapax queue set QUEUE --lease 75s`), to `auto` in the worker, or let consumers extend it while they work",
    ),
    (
        "leases-expire", AtLeastOnce, |f| f.observed = Some(ObservedQueue { held_p99_ms: Some(2_000), ..slow() }),
        "1.0% of deliveries were repeated because their lease ran out (10 of 1000 in 10 min), and 10 settles came too late; the lease is 30 s, P99 2 s",
        "find out why consumers end or hang without a settle: their logs, their memory limit, how they are stopped",
    ),
    (
        "leases-expire", AtLeastOnce, |f| f.observed = Some(ObservedQueue { expired: 31, late: 3, ..slow() }),
        "lease 30 s, P99 41 s: 3.1% of deliveries were repeated because their lease ran out (31 of 1000 in 10 min), and 3 settles came too late",
        "set the lease to 1 min 15 s (`hapax queue set QUEUE --lease 75s`), to `auto` in the worker, or let consumers extend it while they work",
    ),
    (
        "leases-expire", AtLeastOnce, |f| totals(f).expired = 1_000,
        "1.0% of deliveries expired (1000 of 100000) and 0 settles came too late; the lease is 30 s",
        "set a lease above the handler's time, `auto`, or a heartbeat; or find out why consumers die",
    ),
    (
        "lease-below-p99", AtLeastOnce, |f| f.observed = Some(outlived()),
        "lease 30 s, P99 30 s: 5 of 500 settles in 10 min came after the end of their lease, 5 of them too late; each could have been delivered again while it was worked on",
        "set the lease to 50 s (`hapax queue set QUEUE --lease 50s`), to `auto` in the worker, or let consumers extend it while they work",
    ),
    (
        "lease-below-p99", AtLeastOnce, |f| f.observed = Some(ObservedQueue { late: 9, ..outlived() }),
        "lease 30 s, P99 30 s: 5 of 500 settles in 10 min came after the end of their lease, 5 of them too late; each could have been delivered again while it was worked on",
        "set the lease to 50 s (`hapax queue set QUEUE --lease 50s`), to `auto` in the worker, or let consumers extend it while they work",
    ),
    (
        "lease-below-p99", AtLeastOnce, |f| { handler(f).p99_ms = Some(70_000); handler(f).heartbeat_ms_max = Some(60_000); },
        "a delivery is held for 1 min at most, and the latest ones took 1 min 10 s (P99): the slowest runs are delivered again while they run",
        "set a lease above 1 min 10 s, `auto`, or a heartbeat that lasts as long",
    ),
    (
        "scaling-loses-leases", AtLeastOnce,
        |f| f.observed = Some(ObservedQueue { late: 4, consumers_started: 1, consumers_stopped: 2, ..slow() }),
        "10 leases ran out in 10 min while 1 consumers started and 2 stopped: consumers are stopped in the middle of their work",
        "stop consumers with SIGTERM and give them time to drain (Kubernetes: terminationGracePeriodSeconds above --drain), and scale in more slowly",
    ),
    (
        "lease-far-above-work", AtLeastOnce,
        |f| f.observed = Some(ObservedQueue { expired: 7, lease_ms: 600_000, held_p99_ms: Some(30_000), ..slow() }),
        "lease 10 min, P99 30 s: after the end of a consumer 7 messages waited for their lease before they were delivered again",
        "set the lease to 3 min 15 s (`hapax queue set QUEUE --lease 195s`)",
    ),
    (
        "lease-far-above-work", AtLeastOnce,
        |f| f.observed = Some(ObservedQueue { expired: 1, lease_ms: 600_000, held_p99_ms: Some(1_000), ..slow() }),
        "lease 10 min, P99 1 s: after the end of a consumer 1 messages waited for their lease before they were delivered again",
        "set the lease to 30 s (`hapax queue set QUEUE --lease 30s`)",
    ),
    (
        "poison-messages", AtLeastOnce,
        |f| f.observed = Some(ObservedQueue { poison: 3, poison_example: Some("m-1".into()), ..calm() }),
        "3 messages were delivered 6 times or more and are still in the queue, for example m-1",
        "`hapax why QUEUE m-1` shows its errors; mend the handler or reject such messages, and lower retry.max_attempts (now 20)",
    ),
    (
        "messages-die", AtLeastOnce,
        |f| f.observed = Some(ObservedQueue {
            dead: 12, dead_error: Some(CommonError { error: "no such card".into(), count: 8 }), ..calm()
        }),
        "12 messages died in 10 min (1.2% of deliveries), 8 of them with: no such card",
        "`hapax dead list` shows them; mend what that error says, then `hapax dead redrive`",
    ),
    (
        "groups-halted", AtLeastOnce, |f| stats(f).halted = 2,
        "2 messages wait in groups that are halted because an earlier message of the group died",
        "`hapax parked list` shows the groups; decide about the dead letter, then `hapax parked release QUEUE --group GROUP`",
    ),
    (
        "keys-collide", EffectivelyOnce, |f| f.observed = Some(ObservedQueue { conflicts: 100, ..calm() }),
        "100 claims met their key in progress (10.0% of deliveries in 10 min): many messages have the same key",
        "if they are copies of one message, find the producer that sends twice; if they are different effects, give each its own key",
    ),
    (
        "ledger-never-hit", EffectivelyOnce, |f| f.observed = Some(ObservedQueue { granted: 10_000, ..calm() }),
        "10000 claims were made, and not one was a duplicate: the ledger has cost its writes and stopped nothing",
        "that is the price of insurance; where the effect is idempotent by itself, at-least-once is enough",
    ),
    (
        "hot-group", AtLeastOnce, |f| { fifo(f); stats(f).ready = 600; f.observed = Some(hot()); },
        "group g has 500 of 1000 deliveries in 10 min while 600 messages wait: one group is worked on by one consumer at a time",
        "use a finer group where order is not needed across the whole of it; more consumers do not help",
    ),
    (
        "queue-grows", AtLeastOnce, |f| { stats(f).ready = 10_000; totals(f).sent = 20_000; totals(f).acked = 7; },
        "10000 messages wait; of 20000 that were sent, 7 are done: the queue grows",
        "add consumers, or set a quota so that producers are refused before the store is full",
    ),
    (
        "retention-drops-messages", AtLeastOnce, |f| totals(f).retention_dropped = 3,
        "3 messages were dropped because they were older than 4 d",
        "add consumers, raise retention_ms, or look at what keeps failing",
    ),
    // What a configuration cannot keep.
    (
        "ledger-missing", EffectivelyOnce, |f| f.ledger = None,
        "effectively-once needs a ledger, and there is none beside the perfect store",
        "use a store that has one or pass a ledger, or want at-least-once",
    ),
    (
        "ledger-not-durable", EffectivelyOnce, |f| ledger(f).capabilities.durable = false,
        "the perfect ledger may forget what it has answered when it stops",
        "turn on its persistence or use a durable ledger; a forgotten outcome is a second effect",
    ),
    (
        "ledger-may-evict", EffectivelyOnce, |f| ledger(f).capabilities.may_evict = true,
        "the perfect ledger may drop entries before their time when it runs out of room",
        "set it to refuse writes instead (Redis: maxmemory-policy noeviction), or use another ledger",
    ),
    (
        "ledger-fence-may-repeat", EffectivelyOnce, |f| ledger(f).capabilities.fence = false,
        "the perfect ledger's fences may repeat, so a lapsed holder may end its successor's claim",
        "use a ledger whose fences only grow, also through a failover",
    ),
    (
        "ledger-ttl-too-short", Transactional, |f| { ledger(f).same_store = false; ledger(f).ttl_ms = 3_600_000; },
        "outcomes are kept for 1 h, and a message may be delivered again for 4 d (the queue's retention)",
        "keep outcomes at least that long, or the messages not as long; or put queue and ledger into one store, which keeps the entries of its own messages",
    ),
    (
        "database-missing", Transactional, |f| handler(f).database = HandlerDatabase::None,
        "transactional needs the database that the handler writes to, and the handler has none",
        "give the worker the handler's database, or want effectively-once",
    ),
    (
        "database-not-supported", Transactional,
        |f| handler(f).database = HandlerDatabase::Unsupported { kind: "a spreadsheet".into() },
        "transactional cannot take part in the transactions of a spreadsheet",
        "use a database that Hapax keeps a ledger in, or want effectively-once",
    ),
    (
        "ledger-in-other-database", Transactional, |f| handler(f).database = HandlerDatabase::Other,
        "transactional needs ledger and business write in one database, and the ledger is in another one",
        "put the ledger into the handler's database, or want effectively-once",
    ),
    (
        "lease-zero", AtLeastOnce, |f| { f.handler = None; f.queue.lease_ms = 0; },
        "the lease is 0, so a message is back in the queue while its handler runs",
        "set a lease above the handler's time, or `auto`",
    ),
    (
        "order-not-kept", AtLeastOnce, |f| { fifo(f); f.store.order = Order::None; },
        "the queue is FIFO, and the perfect store keeps no order",
        "use another store, or a standard queue",
    ),
    (
        "halt-group-not-supported", AtLeastOnce, |f| { fifo(f); f.store.halt_group = false; },
        "the perfect store cannot halt a group while one of its messages is dead or parked",
        "set on_dead to continue if the messages behind it may be delivered, or use another store",
    ),
    (
        "dedup-window-too-long", AtLeastOnce, |f| f.store.dedup_ms_max = 60_000,
        "deduplication ids are to be remembered for 5 min, and the perfect store remembers them for 1 min at most",
        "shorten dedup.window_ms, or use another store",
    ),
    (
        "message-size-not-supported", AtLeastOnce,
        |f| { f.queue.message_bytes_max = 4_096; f.store.message_bytes_max = 1_024; },
        "messages may have 4096 bytes, and the perfect store takes 1024 at most",
        "lower message_bytes_max and send references to larger data, or use another store",
    ),
    (
        "key-is-message-id", EffectivelyOnce, |f| f.key_source = Some(KeySource::MessageId),
        "some messages are known only by their message id: that covers a redelivery, not a producer that sends twice",
        "send the attribute hapax-idempotency-key, or set key_pointer to where the body has the key",
    ),
    (
        "key-is-content", EffectivelyOnce,
        |f| { f.key_source = None; f.queue.key_pointer = None; f.queue.dedup.content_based = true; },
        "a message without an idempotency key or deduplication id is known by its body: a second one with the same body gets the first one's outcome, be it meant or not",
        "send the attribute hapax-idempotency-key, or set key_pointer to where the body has the key",
    ),
    (
        "effect-may-repeat", EffectivelyOnce, |f| handler(f).idempotent_by_derived_key = false,
        "on_doubt is retry, and it is not declared that the effect honours the derived key: after a crash between effect and completion it happens twice",
        "pass the derived key to whatever the handler calls and declare it, or set on_doubt to park",
    ),
    (
        "no-attempt-limit", EffectivelyOnce, |f| f.queue.retry.max_attempts = 0,
        "the queue has no limit on attempts: a message that always fails is tried for 4 d and then dropped",
        "set retry.max_attempts, and dead_letter.queue to keep such messages apart",
    ),
    (
        "own-dead-letters", AtLeastOnce,
        |f| { f.queue.dead_letter = None; drop(f.queue.extra.insert("RedrivePolicy".into(), "3 q".into())); },
        "the queue is its own dead-letter queue: a message that always fails stays in it for 4 d and is then dropped",
        "name another queue in its RedrivePolicy",
    ),
    (
        "retries-at-once", EffectivelyOnce, |f| f.queue.retry.base_ms = 0,
        "a failed message returns at once: a handler that fails fast uses up 20 attempts in a moment",
        "set retry.base_ms and retry.cap_ms, so that an outage shorter than the backoff kills no message",
    ),
    (
        "retries-at-once", AtLeastOnce, |f| f.queue.retry = RetryPolicy::at_once(),
        "a failed message returns at once, and nothing limits its attempts: a handler that fails fast is run as often as it can be",
        "set retry.base_ms and retry.cap_ms, so that an outage shorter than the backoff kills no message",
    ),
    (
        "retention-ends-retries", AtLeastOnce, |f| patient(f, 11),
        "11 attempts may take 5 d of backoff, and the queue keeps a message for 4 d: it is dropped before it is dead",
        "raise retention_ms, or lower retry.cap_ms or retry.max_attempts",
    ),
    (
        "dead-letter-queue-missing", AtLeastOnce, |f| f.dead_queue_missing = true,
        "the dead-letter queue dead does not exist: messages that are dead stay parked in this queue",
        "create it again, or name another one or none; then release what is parked",
    ),
    (
        "dead-letters-short-lived", AtLeastOnce, |f| f.dead_retention_ms = Some(DAY_MS),
        "a dead letter keeps its message's age, and its queue keeps it for 1 d since it was sent (4 d here): one that dies late is dropped before anyone sees it",
        "give the dead-letter queue a longer retention than this one",
    ),
    (
        "ledger-ttl-below-redrive", EffectivelyOnce, |f| { ledger(f).same_store = false; ledger(f).ttl_ms = 5 * DAY_MS; },
        "outcomes are kept for 5 d, and a dead letter may be redriven and delivered for 18 d",
        "keep outcomes that long, or redrive no dead letter that is older than they are",
    ),
    (
        "dedup-window-short", AtLeastOnce, |f| f.producer_retry_ms = Some(3_600_000),
        "producers repeat a send for up to 1 h, and a repetition is recognised for 5 min",
        "raise dedup.window_ms (up to the retention), or let producers give up earlier",
    ),
    (
        "order-has-holes", AtLeastOnce, |f| { fifo(f); f.queue.on_dead = OnDead::Continue; },
        "on_dead is continue: after a dead letter or a parked message its group continues, and its order has a hole",
        "set on_dead to halt-group where later messages need the earlier ones",
    ),
    (
        "delivery-fence-may-repeat", AtLeastOnce, |f| f.store.fence = false,
        "the fences of the perfect store's deliveries may repeat after a failover",
        "do not let a sink turn zombies away by a delivery's fence alone",
    ),
    (
        "delivery-not-durable", AtLeastOnce, |f| f.store.durable_lease = false,
        "the perfect store may forget the last deliveries when its process dies: messages come back early, attempts uncounted",
        "expect duplicates after a crash of the store; on PostgreSQL, hapax_sync_receives=true in its URL prevents it",
    ),
    (
        "settle-not-atomic", AtLeastOnce, |f| f.store.atomic_settle = false,
        "a settle takes the perfect store several steps: a crash between them may leave a message both in its queue and among the dead letters",
        "use another store, or look for the message id before a redrive",
    ),
];

/// The tier cannot hold in these cases; in all others it is doubtful.
const REFUSALS: &[&str] = &[
    "ledger-missing",
    "ledger-not-durable",
    "ledger-may-evict",
    "ledger-fence-may-repeat",
    "ledger-ttl-too-short",
    "database-missing",
    "database-not-supported",
    "ledger-in-other-database",
    "lease-zero",
    "order-not-kept",
    "halt-group-not-supported",
    "dedup-window-too-long",
    "message-size-not-supported",
];

#[test]
fn each_finding_has_its_evidence_a_change_and_its_severity() {
    for (code, tier, change, message, remedy) in SAID {
        let all = found(*tier, *change);
        let finding =
            all.iter().find(|finding| finding.code == *code).unwrap_or_else(|| panic!("{code}: {all:?}"));
        assert_eq!((finding.message.as_str(), finding.remedy.as_str()), (*message, *remedy));
        assert_eq!(finding.is_refusal(), REFUSALS.contains(code), "{code}");
    }
    for rule in rules() {
        assert!(SAID.iter().any(|said| said.0 == rule.code), "nothing is expected of {}", rule.code);
    }
}
