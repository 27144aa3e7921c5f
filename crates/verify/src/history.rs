//! The history of a run: what each process tried, what it was answered, and what took effect.
//!
//! One process, the recorder, appends to it; a line of JSON is one event. The checker reads nothing else.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

/// The answer to an operation, as its caller knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// It took effect.
    Ok,
    /// It did not.
    Failed,
    /// The answer was lost: it may have taken effect.
    Unknown,
}

/// What a bank did with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// The money was moved.
    Moved,
    /// It was moved earlier under the same key.
    Known,
    /// The account is closed: nothing was moved.
    Closed,
}

/// Where a message, or its key, was at the end of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// In the dead letters.
    Dead,
    /// Set aside in its own queue.
    Parked,
    /// In doubt in the ledger.
    InDoubt,
    /// Still in its queue.
    Waiting,
    /// Not published by the relay yet.
    Outbox,
    /// In the outbox as not published, for a long time in which nothing else was waiting.
    Unmarked,
}

/// One step of an operation on a ledger key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum ClaimStep {
    /// A claim was asked for.
    Ask,
    /// It was granted under this fence.
    Granted {
        /// The fence.
        fence: u64,
        /// The time that was left of the lease, as the store answered it.
        #[serde(default)]
        lease_ms: u64,
    },
    /// The key had ended with this outcome.
    Replayed {
        /// The outcome.
        outcome: String,
    },
    /// Another process holds the key.
    Busy,
    /// The answer to the claim was lost; its owner asks again.
    Unanswered,
    /// The claim is about to be extended.
    Extend {
        /// The fence of the grant.
        fence: u64,
    },
    /// The extension was answered.
    Extended {
        /// The fence of the grant.
        fence: u64,
        /// The answer.
        answer: Answer,
        /// The time that is left of the lease, as the store answered it.
        #[serde(default)]
        lease_ms: u64,
    },
    /// The claim is about to be completed with this outcome.
    Complete {
        /// The fence of the grant.
        fence: u64,
        /// The outcome.
        outcome: String,
    },
    /// The completion was answered.
    Completed {
        /// The fence of the grant.
        fence: u64,
        /// The answer.
        answer: Answer,
    },
}

impl ClaimStep {
    /// Whether its answer was lost. Refused completions are no sign of a fault: some contenders are too slow on purpose.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unanswered | Self::Completed { answer: Answer::Unknown, .. })
    }
}

/// The end of a transaction of Kafka, as its producer knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransactionEnd {
    /// The commit was answered with success.
    Committed,
    /// The abort was answered with success.
    Aborted,
    /// The commit was not answered: committed or aborted.
    Unknown,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Act {
    /// A producer wants this payment to be made.
    Intent {
        /// The payment.
        id: String,
        /// The account, within which order matters on a FIFO queue.
        account: String,
        /// The payment's number within the account.
        number: u64,
    },
    /// A producer's send was answered.
    Send {
        /// The payment.
        id: String,
        /// The answer.
        answer: Answer,
    },
    /// A bank was called.
    Call {
        /// The payment.
        id: String,
        /// The account.
        account: String,
        /// The payment's number within the account.
        number: u64,
        /// The fence of the run.
        fence: u64,
        /// How often the message was delivered.
        deliveries: u32,
        /// Whether an earlier run may have called.
        takeover: bool,
        /// What the bank did.
        effect: Effect,
        /// The bank's transaction number.
        receipt: u64,
    },
    /// A reader of committed records saw the record of a payment in an output topic.
    Shown {
        /// The payment.
        id: String,
        /// The account, which is the record's key.
        account: String,
        /// The payment's number within the account.
        number: u64,
        /// The transaction that the record belongs to; empty without one.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        transaction: String,
        /// The output's partition.
        partition: i32,
        /// The record's offset in it.
        offset: i64,
    },
    /// A transaction ended at its producer.
    Transaction {
        /// The transaction: the process and a number.
        transaction: String,
        /// Records that were sent in it.
        records: u64,
        /// How it ended.
        end: TransactionEnd,
        /// Whether the handler let it fail on purpose.
        #[serde(default)]
        intended: bool,
    },
    /// A processor ended with an error, and was started again.
    Restarted {
        /// The error.
        why: String,
    },
    /// A consumer received a message.
    Delivered {
        /// The payment.
        id: String,
        /// The message.
        message: String,
        /// The delivery's fence.
        fence: u64,
        /// How often the message was delivered.
        deliveries: u32,
        /// When the consumer asked, by the recorder's clock.
        asked_ms: u64,
        /// The time that was left of the lease, as the store answered it.
        lease_ms: u64,
    },
    /// A delivery ended at its worker.
    Settle {
        /// The payment.
        id: String,
        /// The message.
        message: String,
        /// The delivery's fence.
        fence: u64,
        /// Whether the delivery was acked.
        ack: bool,
        /// The store's answer.
        answer: Answer,
        /// Whether its handler ran.
        ran: bool,
        /// How often the message was delivered.
        deliveries: u32,
        /// Why the store refused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// An operation on a ledger key.
    Claim {
        /// The key.
        id: String,
        /// The step.
        #[serde(flatten)]
        step: ClaimStep,
    },
    /// The ledger's entry at the end of the run.
    Entry {
        /// The payment.
        id: String,
        /// Whether it is completed.
        completed: bool,
        /// The recorded outcome: the bank's transaction number.
        outcome: Option<u64>,
    },
    /// A caller of the proxy got a response of success.
    Response {
        /// The payment.
        id: String,
        /// A hash of the response's body.
        digest: u64,
    },
    /// A message, or key, that was not done at the end of the run.
    Left {
        /// The payment.
        id: String,
        /// Where it is.
        place: Place,
    },
    /// A fault began.
    FaultBegins {
        /// Its number in the schedule.
        number: u32,
        /// What it is.
        fault: String,
    },
    /// A fault and its aftermath are over.
    FaultEnds {
        /// Its number in the schedule.
        number: u32,
        /// Requests that it hit, or processes.
        hits: u64,
        /// What it caused.
        caused: Caused,
    },
    /// The wall clock of a process has another difference to the recorder's than before.
    Clock {
        /// How far it is ahead; negative: behind.
        ahead_ms: i64,
    },
    /// An operator acted: dead letters were redriven, doubts resolved.
    Operator {
        /// The action.
        action: String,
        /// How many messages or keys.
        count: u64,
    },
    /// The run waited for the rest of the messages, before it listed what is left.
    Drained {
        /// Whether the store counted nothing any more.
        empty: bool,
        /// Why it was not waited for any longer, if something is left.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
}

impl Act {
    /// The payment that was made or shown: id, account, and number within the account.
    pub fn effect(&self) -> Option<(&str, &str, u64)> {
        match self {
            Self::Call { id, account, number, effect: Effect::Moved, .. }
            | Self::Shown { id, account, number, .. } => Some((id, account, *number)),
            _ => None,
        }
    }
}

/// What a fault caused: the difference of the recorder's counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Caused {
    /// Sends whose answer was lost.
    pub sends_unknown: u64,
    /// Sends that failed.
    pub sends_failed: u64,
    /// Payments that a new producer process had to send again, because it did not know how the last send ended.
    pub sends_resumed: u64,
    /// Bank calls for messages that were delivered before, other than by an operator.
    pub redelivered: u64,
    /// Bank calls after a takeover.
    pub takeovers: u64,
    /// Calls that the bank recognised by their key.
    pub known: u64,
    /// Settles that the store refused, or whose answer was lost.
    pub settles_refused: u64,
    /// Duplicate deliveries that got the recorded outcome.
    pub replayed: u64,
    /// Claims, and completions of claims, whose answer was lost.
    pub claims_unknown: u64,
    /// Processes whose wall clock was set, as they saw it.
    pub clocks_stepped: u64,
    /// Transactions that were open when their process, or their broker, was killed or stopped.
    pub transactions_hit: u64,
    /// Transactions that were aborted, other than those whose handler failed on purpose.
    pub transactions_aborted: u64,
    /// Transactions whose commit was not answered.
    pub transactions_unknown: u64,
    /// Processors that ended with an error.
    pub restarts: u64,
}

impl Caused {
    /// The counters by name.
    pub fn named(&self) -> [(&'static str, u64); 14] {
        [
            ("sends unknown", self.sends_unknown),
            ("sends failed", self.sends_failed),
            ("sends resumed", self.sends_resumed),
            ("redelivered", self.redelivered),
            ("takeovers", self.takeovers),
            ("known to the bank", self.known),
            ("settles refused", self.settles_refused),
            ("replayed", self.replayed),
            ("claims unknown", self.claims_unknown),
            ("clocks stepped", self.clocks_stepped),
            ("open transactions hit", self.transactions_hit),
            ("transactions aborted", self.transactions_aborted),
            ("commits unknown", self.transactions_unknown),
            ("processors restarted", self.restarts),
        ]
    }

    /// The difference to an earlier state.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            sends_unknown: self.sends_unknown - earlier.sends_unknown,
            sends_failed: self.sends_failed - earlier.sends_failed,
            sends_resumed: self.sends_resumed - earlier.sends_resumed,
            redelivered: self.redelivered - earlier.redelivered,
            takeovers: self.takeovers - earlier.takeovers,
            known: self.known - earlier.known,
            settles_refused: self.settles_refused - earlier.settles_refused,
            replayed: self.replayed - earlier.replayed,
            claims_unknown: self.claims_unknown - earlier.claims_unknown,
            clocks_stepped: self.clocks_stepped - earlier.clocks_stepped,
            transactions_hit: self.transactions_hit - earlier.transactions_hit,
            transactions_aborted: self.transactions_aborted - earlier.transactions_aborted,
            transactions_unknown: self.transactions_unknown - earlier.transactions_unknown,
            restarts: self.restarts - earlier.restarts,
        }
    }

    /// Whether something happened that does not happen without faults. Producers send some payments twice on purpose, so
    /// replays prove nothing.
    pub fn bit(&self) -> bool {
        self.faulted() > 0
    }

    /// Operations whose answer was lost, late or repeated.
    pub fn faulted(&self) -> u64 {
        self.sends_unknown
            + self.sends_failed
            + self.sends_resumed
            + self.redelivered
            + self.settles_refused
            + self.claims_unknown
            + self.transactions_hit
            + self.transactions_aborted
            + self.transactions_unknown
            + self.restarts
    }
}

/// An event before the recorder has numbered it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewEvent {
    /// The process that reports it.
    pub who: String,
    /// The workload that it belongs to; empty for faults.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub workload: String,
    /// What happened.
    #[serde(flatten)]
    pub act: Act,
}

/// One line of the history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its number: the order in which the recorder learned of events.
    pub n: u64,
    /// Milliseconds since the start of the recorder.
    pub ms: u64,
    /// The event.
    #[serde(flatten)]
    pub event: NewEvent,
}

impl Event {
    /// The payment or key that it is about.
    pub fn id(&self) -> Option<&str> {
        match &self.event.act {
            Act::Intent { id, .. }
            | Act::Send { id, .. }
            | Act::Call { id, .. }
            | Act::Shown { id, .. }
            | Act::Delivered { id, .. }
            | Act::Settle { id, .. }
            | Act::Claim { id, .. }
            | Act::Entry { id, .. }
            | Act::Response { id, .. }
            | Act::Left { id, .. } => Some(id),
            Act::FaultBegins { .. }
            | Act::FaultEnds { .. }
            | Act::Transaction { .. }
            | Act::Restarted { .. }
            | Act::Clock { .. }
            | Act::Operator { .. }
            | Act::Drained { .. } => None,
        }
    }
}

/// Appends events to a file. Each is handed to the operating system before this returns, so that it survives `kill -9`.
pub struct Writer {
    file: std::fs::File,
    next: u64,
    start: std::time::Instant,
}

impl Writer {
    /// A new file.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let file = std::fs::File::create(path).with_context(|| path.display().to_string())?;
        Ok(Self { file, next: 1, start: std::time::Instant::now() })
    }

    /// The time of an event that is appended now.
    pub fn now_ms(&self) -> anyhow::Result<u64> {
        Ok(u64::try_from(self.start.elapsed().as_millis())?)
    }

    /// Appends events in one write.
    pub fn append(&mut self, events: impl IntoIterator<Item = NewEvent>) -> anyhow::Result<()> {
        let ms = self.now_ms()?;
        let mut lines = Vec::new();
        for event in events {
            serde_json::to_writer(&mut lines, &Event { n: self.next, ms, event })?;
            lines.push(b'\n');
            self.next += 1;
        }
        Ok(self.file.write_all(&lines)?)
    }
}

/// Reads a history. A damaged line is an error, and so is one that is missing: what was recorded must not be skipped.
pub fn read(path: &Path) -> anyhow::Result<Vec<Event>> {
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let mut events = Vec::new();
    for (at, line) in BufReader::new(file).lines().enumerate() {
        let at = at as u64 + 1;
        let here = || format!("{} line {at}", path.display());
        let event: Event = serde_json::from_str(&line?).with_context(here)?;
        if event.n != at {
            bail!("{}: its number is {}, so events are missing", here(), event.n);
        }
        events.push(event);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("history");
        let step = ClaimStep::Completed { fence: 7, answer: Answer::Unknown };
        let acts = [
            Act::Send { id: "a-1".into(), answer: Answer::Ok },
            Act::Claim { id: "k".into(), step },
            Act::FaultEnds { number: 1, hits: 2, caused: Caused { known: 3, ..Caused::default() } },
        ];
        let events = acts.map(|act| NewEvent { who: "p".into(), workload: "payments".into(), act });
        let mut writer = Writer::create(&path).unwrap();
        writer.append(events[..1].to_vec()).unwrap();
        writer.append(events[1..].to_vec()).unwrap();
        let read = read(&path).unwrap();
        assert_eq!(read.iter().map(|event| event.n).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(read.into_iter().map(|event| event.event).eq(events));
        // A line that is missing, or not complete, is told.
        let text = std::fs::read_to_string(&path).unwrap();
        let without_second = [0, 2].map(|line| text.lines().nth(line).unwrap()).join("\n");
        for (damaged, says) in
            [(without_second.as_str(), "events are missing"), (&text[..text.len() - 9], "line 3")]
        {
            std::fs::write(&path, damaged).unwrap();
            let error = super::read(&path).unwrap_err();
            assert!(format!("{error:#}").contains(says), "{error:#}");
        }
    }
}
