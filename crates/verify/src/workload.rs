//! The workloads of a run: those under a guarantee of Hapax, and the controls, which have none.

use hapax::core::policy::Jitter;
use hapax::{DeadLetterPolicy, OnDead, OnDoubt, QueueConfig, QueueName, RetryPolicy, Tier};

/// How a workload's messages are consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A worker of Hapax at `effectively-once`.
    Worker(OnDoubt),
    /// A worker of Hapax at `transactional`: the bank is a table in the database of the inbox.
    Transactional,
    /// Consumers without a worker of Hapax, at `at-least-once`: receive, pay, ack.
    Receiver,
    /// No queue: processes claim keys of the ledger, and complete them.
    Claims,
    /// Orders in a database with an outbox: relays publish, and workers of Hapax consume.
    Outbox,
    /// Requests through `hapax proxy` to a service.
    Proxy(OnDoubt),
    /// A handler of the user's: a command that `hapax work` runs, or a program of its own.
    Own,
    /// Control: ack, then pay.
    AckBefore,
    /// Control: pay, then ack.
    AckAfter,
    /// Control: look the key up, pay if it is not there or cannot be looked up, record it, then ack.
    LookUp,
    /// Control: a relay that publishes what is not marked, then marks it.
    PublishMark,
    /// Records of a topic of Kafka, through the transactional processor.
    Processor,
    /// Control on Kafka: produce, then commit the offsets.
    ProduceCommit,
    /// Control on Kafka: commit the offsets, then produce.
    CommitProduce,
    /// Control on Kafka, of our own tests: librdkafka's transactions.
    Librdkafka,
}

/// What the bank of a workload checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bank {
    /// Idempotent by the derived key of a call.
    Keyed,
    /// Checks nothing: each call moves money.
    Trusting,
    /// A table without a constraint that would catch a duplicate.
    Table,
}

/// A workload.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// Its name, for `--only`.
    pub name: &'static str,
    /// What it is.
    pub title: &'static str,
    /// The guarantee's boundary, or what is wrong with a control.
    pub boundary: &'static str,
    /// The tier of its queue.
    pub tier: Tier,
    /// How its messages are consumed.
    pub shape: Shape,
    /// What its bank checks.
    pub bank: Bank,
    /// Whether payments of an account are in order.
    pub fifo: bool,
    /// Whether some accounts are closed at times, so that payments are rejected. An operator redrives them from the dead
    /// letters later; in a FIFO queue they are parked, and released.
    pub rejects: bool,
}

/// The workload of the user's own handler.
pub const HANDLER: &str = "handler";

/// All workloads, controls last.
pub const ALL: [Workload; 16] = [
    Workload {
        name: "payments",
        title: "payments to a bank that checks keys",
        boundary: "once at a third party that is idempotent by the derived key; doubt is retried",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Worker(OnDoubt::Retry),
        bank: Bank::Keyed,
        fifo: false,
        rejects: false,
    },
    Workload {
        name: "parked",
        title: "payments to a bank that checks nothing",
        boundary: "at most once at a third party; what is in doubt is parked until an operator decides",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Worker(OnDoubt::Park),
        bank: Bank::Trusting,
        fifo: false,
        rejects: false,
    },
    Workload {
        name: "accounts",
        title: "payments in order for each account",
        boundary: "in order within a FIFO group, once at a third party that is idempotent by the derived key",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Worker(OnDoubt::Retry),
        bank: Bank::Keyed,
        fifo: true,
        rejects: false,
    },
    Workload {
        name: "redrive",
        title: "rejected payments, redriven under load",
        boundary: "each dead letter is accounted for, and takes effect once after its redrive",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Worker(OnDoubt::Retry),
        bank: Bank::Keyed,
        fifo: false,
        rejects: true,
    },
    Workload {
        name: "halted",
        title: "rejected payments that halt their account",
        boundary: "in order within a FIFO group, also after a payment that was rejected: the group waits for it",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Worker(OnDoubt::Retry),
        bank: Bank::Keyed,
        fifo: true,
        rejects: true,
    },
    Workload {
        name: "transfers",
        title: "transfers in the database of the inbox",
        boundary: "once inside that database, at every crash point",
        tier: Tier::Transactional,
        shape: Shape::Transactional,
        bank: Bank::Table,
        fifo: false,
        rejects: false,
    },
    Workload {
        name: "deliveries",
        title: "messages that consumers receive and ack themselves",
        boundary: "at least once; no message is delivered while its lease lasts, and an outdated receipt acks nothing",
        tier: Tier::AtLeastOnce,
        shape: Shape::Receiver,
        bank: Bank::Keyed,
        fifo: false,
        rejects: false,
    },
    Workload {
        name: "claims",
        title: "keys that several processes claim",
        boundary: "a key has one holder at a time, growing fences, and one outcome",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Claims,
        bank: Bank::Trusting,
        fifo: false,
        rejects: false,
    },
    Workload {
        name: crate::orders::WORKLOAD,
        title: "orders in a database with an outbox",
        boundary: "a committed order is published, in order for each account, and takes effect once at a third party that is \
                   idempotent by the derived key",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Outbox,
        bank: Bank::Keyed,
        fifo: true,
        rejects: false,
    },
    Workload {
        name: crate::recorder::PROXIED,
        title: "requests through the proxy to a service that checks nothing",
        boundary: "at most once at the service; an interrupted request is in doubt, and answered with 409",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Proxy(OnDoubt::Park),
        bank: Bank::Trusting,
        fifo: false,
        rejects: false,
    },
    Workload {
        name: "charges-keyed",
        title: "requests through the proxy to a service that checks keys",
        boundary: "once at a service that is idempotent by the derived key; doubt is retried",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Proxy(OnDoubt::Retry),
        bank: Bank::Keyed,
        fifo: false,
        rejects: false,
    },
    Workload {
        name: HANDLER,
        title: "your own handler: a command (--handler-cmd), or Rust",
        boundary: "once, if the handler passes its derived key on and the third party is idempotent by it; doubt is retried",
        tier: Tier::EffectivelyOnce,
        shape: Shape::Own,
        bank: Bank::Keyed,
        fifo: false,
        rejects: false,
    },
    control("ack-before", "naive: ack, then pay", "loses what is under way in a crash", Shape::AckBefore),
    control("ack-after", "naive: pay, then ack", "repeats what is under way in a crash", Shape::AckAfter),
    control(
        "look-up",
        "naive: look up, pay, record; fail open",
        "repeats what was paid but not recorded, or could not be looked up",
        Shape::LookUp,
    ),
    control(
        "publish-mark",
        "naive: publish, then mark as published",
        "publishes again what was not marked in a crash",
        Shape::PublishMark,
    ),
];

/// The workloads on Kafka, controls last.
pub const KAFKA: [Workload; 4] = [
    Workload {
        name: "processor",
        title: "records through the transactional processor",
        boundary: "once inside Kafka, for readers of committed records, in order within a key",
        tier: Tier::Transactional,
        shape: Shape::Processor,
        bank: Bank::Trusting,
        fifo: true,
        rejects: false,
    },
    control(
        "produce-commit",
        "naive: produce, then commit offsets",
        "repeats what was produced and not committed in a crash",
        Shape::ProduceCommit,
    ),
    control(
        "commit-produce",
        "naive: commit offsets, then produce",
        "loses what was committed and not produced in a crash",
        Shape::CommitProduce,
    ),
    control(
        "librdkafka",
        "librdkafka's transactions",
        "a delayed commit ends its next transaction (KAFKA-17754)",
        Shape::Librdkafka,
    ),
];

const fn control(name: &'static str, title: &'static str, boundary: &'static str, shape: Shape) -> Workload {
    Workload {
        name,
        title,
        boundary,
        tier: Tier::AtLeastOnce,
        shape,
        bank: Bank::Trusting,
        fifo: false,
        rejects: false,
    }
}

/// The lease of all queues and claims. A pause has to be longer.
pub const LEASE_MS: u64 = 1_000;

impl Workload {
    /// A workload by its name.
    pub fn named(name: &str) -> Option<Self> {
        ALL.into_iter().chain(KAFKA).find(|workload| workload.name == name)
    }

    /// Whether it is a known-bad program that the checker has to catch.
    pub fn is_control(&self) -> bool {
        matches!(
            self.shape,
            Shape::AckBefore
                | Shape::AckAfter
                | Shape::LookUp
                | Shape::PublishMark
                | Shape::ProduceCommit
                | Shape::CommitProduce
                | Shape::Librdkafka
        )
    }

    /// Whether its messages go through a queue.
    pub fn has_queue(&self) -> bool {
        !matches!(self.shape, Shape::Claims | Shape::PublishMark | Shape::Proxy(_)) && !self.is_on_kafka()
    }

    /// Whether it reads and writes topics of Kafka.
    pub fn is_on_kafka(&self) -> bool {
        let kafka = [Shape::Processor, Shape::ProduceCommit, Shape::CommitProduce, Shape::Librdkafka];
        kafka.contains(&self.shape)
    }

    /// Whether producers write its payments to a database, and relays publish them.
    pub fn is_relayed(&self) -> bool {
        matches!(self.shape, Shape::Outbox | Shape::PublishMark)
    }

    /// The accounts that producers pay from, each in order. Controls have fewer: they need no load.
    pub fn accounts(&self) -> u64 {
        match self.shape {
            Shape::Claims => 0,
            Shape::Worker(_) if self.rejects && self.fifo => 2,
            Shape::Worker(_) => 5,
            Shape::Processor => 8,
            // One in each partition; pairs that share a bucket of the outbox.
            Shape::ProduceCommit | Shape::CommitProduce | Shape::Librdkafka | Shape::Outbox => 4,
            Shape::Transactional | Shape::Proxy(_) => 3,
            _ => 2,
        }
    }

    /// Its queue in a run.
    pub fn queue(&self, run: &str) -> QueueName {
        let suffix = if self.fifo { ".fifo" } else { "" };
        QueueName::new(format!("hapax-verify-{run}-{}{suffix}", self.name)).expect("a valid name")
    }

    /// Its dead-letter queue in a run, if it has one.
    pub fn dead_queue(&self, run: &str) -> Option<QueueName> {
        let name = || QueueName::new(format!("hapax-verify-{run}-{}-dead", self.name)).expect("a valid name");
        (self.rejects && !self.fifo).then(name)
    }

    /// The configuration of its queue.
    pub fn config(&self, run: &str) -> QueueConfig {
        let retry = RetryPolicy { base_ms: 20, cap_ms: 200, jitter: Jitter::Full, max_attempts: 0 };
        let kind = if self.fifo { QueueConfig::fifo() } else { QueueConfig::default() };
        QueueConfig {
            tier: self.tier,
            lease_ms: LEASE_MS,
            retry,
            on_dead: if self.fifo { OnDead::HaltGroup } else { OnDead::Continue },
            dead_letter: self.dead_queue(run).map(|queue| DeadLetterPolicy { queue }),
            ..kind
        }
    }
}
