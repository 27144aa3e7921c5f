//! The faults of a run on Kafka.

use std::fmt;

use hapax_faults::{Action, Match};

use crate::fault::{LATE, write_wire};

/// A fault on the wire between processors and brokers: it hits one kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KafkaWireFault {
    /// The request's name.
    pub request: &'static str,
    /// Whether the response is hit, and not the request.
    pub answer: bool,
    /// What the proxy does with it.
    pub action: Action,
}

impl KafkaWireFault {
    /// The frames that it hits, of transactional ids that begin so.
    pub fn on(&self, ids: &str) -> Match {
        let label = format!("{} {ids}", self.request);
        if self.answer { Match::answer_to(label) } else { Match::request(label) }
    }

    /// Whether the processor's own producer sends such requests. In transaction version 2 the offsets' own request adds the group to
    /// the transaction.
    pub fn is_ours(&self) -> bool {
        self.request != ADD_OFFSETS
    }
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KafkaFault {
    /// SIGKILL of a processor, then a restart.
    KillProcessor,
    /// SIGKILL of the broker, where the run has started it, then a restart.
    CrashBroker,
    /// The broker is stopped (SIGSTOP), where the run has started it, then continues (SIGCONT).
    PauseBroker,
    /// A processor is stopped (SIGSTOP) past its session and its transaction, then continues (SIGCONT).
    Pause,
    /// The same, and another process with its transactional id begins meanwhile.
    Zombie,
    /// One more member joins the group, and is killed.
    Join,
    /// Nothing passes between processors and brokers; connections stay open.
    Partition,
    /// A request that ends a transaction arrives when the next one is about to end.
    LateEnd,
    /// No request that commits a transaction of a processor is answered until its outcome is unknown to it.
    Unanswered,
    /// One kind of request is hit.
    Wire(KafkaWireFault),
}

impl fmt::Display for KafkaFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KillProcessor => f.write_str("kill -9 of a processor"),
            Self::CrashBroker => f.write_str("crash of the broker"),
            Self::PauseBroker => f.write_str("pause of the broker"),
            Self::Pause => f.write_str("pause past session and transaction"),
            Self::Zombie => f.write_str("zombie: pause past a successor's start"),
            Self::Join => f.write_str("a member joins and is killed"),
            Self::Partition => f.write_str("partition between processors and brokers"),
            Self::LateEnd => f.write_str("EndTxn: request delayed into the next transaction"),
            Self::Unanswered => f.write_str("EndTxn: unanswered past the transaction's time"),
            Self::Wire(wire) => write_wire(f, wire.request, wire.answer, wire.action),
        }
    }
}

const END: &str = "EndTxn";
const PRODUCE: &str = "Produce";
const OFFSETS: &str = "TxnOffsetCommit";
const ADD_OFFSETS: &str = "AddOffsetsToTxn";

const fn request(request: &'static str, action: Action) -> KafkaFault {
    KafkaFault::Wire(KafkaWireFault { request, answer: false, action })
}

const fn response(request: &'static str, action: Action) -> KafkaFault {
    KafkaFault::Wire(KafkaWireFault { request, answer: true, action })
}

/// Each fault that a round has. Kills are more frequent: each hits only what is under way at that moment.
pub const ROUND: [KafkaFault; 25] = [
    KafkaFault::KillProcessor,
    KafkaFault::KillProcessor,
    KafkaFault::KillProcessor,
    KafkaFault::PauseBroker,
    KafkaFault::Pause,
    KafkaFault::Zombie,
    KafkaFault::Join,
    KafkaFault::Partition,
    KafkaFault::LateEnd,
    KafkaFault::Unanswered,
    request(END, LATE),
    request(END, Action::Drop),
    request(END, Action::Duplicate),
    response(END, Action::Drop),
    request(PRODUCE, LATE),
    request(PRODUCE, Action::Drop),
    request(PRODUCE, Action::Duplicate),
    response(PRODUCE, Action::Drop),
    request(OFFSETS, LATE),
    request(OFFSETS, Action::Drop),
    request(OFFSETS, Action::Duplicate),
    response(OFFSETS, Action::Drop),
    request(ADD_OFFSETS, LATE),
    request(ADD_OFFSETS, Action::Duplicate),
    response(ADD_OFFSETS, Action::Drop),
];

/// Faults that a run has only if they are asked for. The only broker of a cluster can lose the end of a transaction when it crashes: its
/// coordinator leaves out the partitions that have no leader yet (seen with Kafka 4.3.1), and no client can do anything about it.
pub const ASKED_FOR: [KafkaFault; 1] = [KafkaFault::CrashBroker];
