//! The producer's states under transaction version 2, without input or output.
//!
//! ```text
//!                 initialised                begin             seal             commit
//! Uninitialised ──────────────▶ Ready ──────────────▶ Open ──────────▶ Sealed ─────────▶ Committing
//!                                ▲                     │ fail            │                 │     │
//!                                │                     ▼                 ▼ abort           │     │ give_up
//!                                │                   Failed ─────────▶ Aborting            │     ▼
//!                                │                          abort        │                 │   Unknown
//!                                └───────────────────────────────────────┴─────────────────┘     │
//!                                                    ended                                       │
//!                                ▲                                                               │
//!                                └───────────────────────────────────────────────────────────────┘
//!                                                    initialised
//! ```
//! Any state can become `Fenced`, the end. The rules, each checked by the model in `tests/producer_model.rs`:
//!
//! - An end of a transaction and an initialisation give a new identity; one that does not advance is refused. Sequences
//!   start at 0 under each identity.
//! - A partition has at most one batch without a response. It is repeated with the same identity and sequence until it is
//!   answered or the transaction is aborted.
//! - Offsets are sent once in a transaction, after its last batch was formed, and repeated with the same content: a
//!   delayed copy of smaller offsets cannot replace later ones.
//! - After a commit was sent, only the commit may be sent again. When it stays unanswered its outcome is unknown, and
//!   only an initialisation leads on; the committed offsets say which outcome it was.
//! - An empty transaction ends without a request: a broker that knows of no transaction refuses to commit it.

use std::collections::BTreeMap;

/// A producer's identity on the brokers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The producer id.
    pub producer_id: i64,
    /// Grows with every transaction and initialisation.
    pub epoch: i16,
}

impl std::fmt::Display for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "producer {} epoch {}", self.producer_id, self.epoch)
    }
}

/// A producer's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// It has no identity yet.
    Uninitialised,
    /// No transaction.
    Ready,
    /// A transaction that accepts batches.
    Open,
    /// A transaction whose last batch was formed; its offsets may have been sent.
    Sealed,
    /// A transaction that can only be aborted.
    Failed,
    /// The commit was sent and is not answered yet.
    Committing,
    /// The abort was sent and is not answered yet.
    Aborting,
    /// The commit stayed unanswered: committed or aborted, only an initialisation tells.
    Unknown,
    /// Another producer with the same transactional id took over.
    Fenced,
}

/// A call that the state does not allow; nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misuse {
    /// Not in this state.
    #[error("{call} is not allowed in the state {state:?}")]
    State {
        /// The call.
        call: &'static str,
        /// The state.
        state: State,
    },
    /// The partition's last batch is not answered yet.
    #[error("a batch of the partition is not answered yet")]
    BatchUnanswered,
    /// The broker gave an identity that is not newer than the present one: it does not speak transaction version 2.
    #[error("the broker gave the identity {given} after {present}")]
    IdentityNotAdvanced {
        /// The present identity.
        present: Identity,
        /// The one that was given.
        given: Identity,
    },
}

/// How a transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// It has nothing in it: no request is needed, and the state is `Ready` again.
    Empty,
    /// An EndTxn request under this identity, repeated until it is answered.
    Request(Identity),
}

/// The identity and sequence of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Batch {
    /// The producer's identity.
    pub identity: Identity,
    /// The sequence of the first record.
    pub sequence: i32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Sequence {
    next: i32,
    unanswered: bool,
}

/// The machine, over partitions named by `P`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Machine<P: Ord> {
    state: State,
    identity: Option<Identity>,
    sequences: BTreeMap<P, Sequence>,
    /// Offsets were sent in this transaction.
    offsets: bool,
}

impl<P: Ord> Default for Machine<P> {
    fn default() -> Self {
        Self { state: State::Uninitialised, identity: None, sequences: BTreeMap::new(), offsets: false }
    }
}

impl<P: Ord> Machine<P> {
    /// The state.
    pub fn state(&self) -> State {
        self.state
    }

    /// The present identity.
    pub fn identity(&self) -> Option<Identity> {
        self.identity
    }

    /// Whether an initialisation may be sent. The coordinator ends a transaction that is under way.
    pub fn initialise(&self) -> Result<(), Misuse> {
        match self.state {
            State::Fenced => Err(self.misuse("initialise")),
            _ => Ok(()),
        }
    }

    /// The initialisation was answered.
    pub fn initialised(&mut self, identity: Identity) -> Result<(), Misuse> {
        self.initialise()?;
        self.advance(identity)
    }

    /// Begins a transaction. No request is needed.
    pub fn begin(&mut self) -> Result<(), Misuse> {
        self.expect("begin", &[State::Ready])?;
        self.state = State::Open;
        Ok(())
    }

    /// Forms the next batch of a partition, of `records` records.
    pub fn batch(&mut self, partition: P, records: i32) -> Result<Batch, Misuse> {
        self.expect("batch", &[State::Open])?;
        let Some(identity) = self.identity else { return Err(self.misuse("batch")) };
        let sequence = self.sequences.entry(partition).or_default();
        if sequence.unanswered {
            return Err(Misuse::BatchUnanswered);
        }
        let batch = Batch { identity, sequence: sequence.next };
        sequence.unanswered = true;
        // Kafka's sequences continue with 0 after the largest number.
        sequence.next = sequence.next.checked_add(records).unwrap_or_else(|| {
            i32::try_from(i64::from(sequence.next) + i64::from(records) - i64::from(i32::MAX) - 1)
                .unwrap_or(0)
        });
        Ok(batch)
    }

    /// The partition's batch was written.
    pub fn batch_written(&mut self, partition: &P) {
        if let Some(sequence) = self.sequences.get_mut(partition) {
            sequence.unanswered = false;
        }
    }

    /// The last batch was formed; offsets may be sent now.
    pub fn seal(&mut self, with_offsets: bool) -> Result<Option<Identity>, Misuse> {
        self.expect("seal", &[State::Open])?;
        self.state = State::Sealed;
        self.offsets = with_offsets;
        Ok(self.identity)
    }

    /// The transaction cannot be committed any more.
    pub fn fail(&mut self) {
        if matches!(self.state, State::Open | State::Sealed) {
            self.state = State::Failed;
        }
    }

    /// Commits a sealed transaction whose batches are all written, or again one that is being committed.
    pub fn commit(&mut self) -> Result<Ending, Misuse> {
        self.expect("commit", &[State::Sealed, State::Committing])?;
        if self.sequences.values().any(|sequence| sequence.unanswered) {
            return Err(Misuse::BatchUnanswered);
        }
        Ok(self.end(State::Committing))
    }

    /// Aborts a transaction whose commit was not sent, or again one that is being aborted.
    pub fn abort(&mut self) -> Result<Ending, Misuse> {
        self.expect("abort", &[State::Open, State::Sealed, State::Failed, State::Aborting])?;
        Ok(self.end(State::Aborting))
    }

    /// The end was answered with the producer's next identity.
    pub fn ended(&mut self, identity: Identity) -> Result<(), Misuse> {
        self.expect("ended", &[State::Committing, State::Aborting])?;
        self.advance(identity)
    }

    /// The first request to commit was refused, hence the transaction is not committed.
    pub fn commit_refused(&mut self) {
        if self.state == State::Committing {
            self.state = State::Failed;
        }
    }

    /// The commit is repeated no more.
    pub fn give_up(&mut self) {
        if self.state == State::Committing {
            self.state = State::Unknown;
        }
    }

    /// Another producer took over.
    pub fn fenced(&mut self) {
        self.state = State::Fenced;
    }

    fn end(&mut self, state: State) -> Ending {
        match self.identity {
            Some(identity) if self.offsets || !self.sequences.is_empty() => {
                self.state = state;
                Ending::Request(identity)
            }
            _ => {
                self.state = State::Ready;
                Ending::Empty
            }
        }
    }

    fn advance(&mut self, given: Identity) -> Result<(), Misuse> {
        if let Some(present) = self.identity
            && (given.producer_id == present.producer_id && given.epoch <= present.epoch)
        {
            return Err(Misuse::IdentityNotAdvanced { present, given });
        }
        self.identity = Some(given);
        self.sequences.clear();
        self.offsets = false;
        self.state = State::Ready;
        Ok(())
    }

    fn expect(&self, call: &'static str, states: &[State]) -> Result<(), Misuse> {
        if states.contains(&self.state) { Ok(()) } else { Err(self.misuse(call)) }
    }

    fn misuse(&self, call: &'static str) -> Misuse {
        Misuse::State { call, state: self.state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Identity = Identity { producer_id: 7, epoch: 0 };
    const SECOND: Identity = Identity { producer_id: 7, epoch: 1 };

    fn ready() -> Machine<u8> {
        let mut machine = Machine::default();
        machine.initialised(FIRST).unwrap();
        machine
    }

    #[test]
    fn a_commit_gives_a_new_identity_and_sequences_from_0() {
        let mut machine = ready();
        machine.begin().unwrap();
        assert_eq!(machine.batch(1, 10).unwrap(), Batch { identity: FIRST, sequence: 0 });
        assert_eq!(machine.batch(1, 1), Err(Misuse::BatchUnanswered));
        machine.batch_written(&1);
        assert_eq!(machine.batch(1, 1).unwrap().sequence, 10);
        machine.seal(true).unwrap();
        assert_eq!(machine.commit(), Err(Misuse::BatchUnanswered));
        machine.batch_written(&1);
        assert_eq!(machine.commit(), Ok(Ending::Request(FIRST)));
        assert_eq!(machine.commit(), Ok(Ending::Request(FIRST)), "it may be repeated");
        machine.ended(SECOND).unwrap();
        machine.begin().unwrap();
        assert_eq!(machine.batch(1, 1).unwrap(), Batch { identity: SECOND, sequence: 0 });
    }

    #[test]
    fn a_commit_that_was_sent_is_never_aborted() {
        let mut machine = ready();
        machine.begin().unwrap();
        machine.seal(true).unwrap();
        machine.commit().unwrap();
        assert!(machine.abort().is_err());
        machine.give_up();
        assert_eq!(machine.state(), State::Unknown);
        assert!(machine.abort().is_err() && machine.begin().is_err() && machine.commit().is_err());
        assert_eq!(machine.initialise(), Ok(()));
        machine.initialised(SECOND).unwrap();
        assert_eq!(machine.state(), State::Ready);
    }

    #[test]
    fn an_identity_that_does_not_advance_is_refused() {
        let mut machine = ready();
        machine.begin().unwrap();
        machine.seal(true).unwrap();
        machine.commit().unwrap();
        assert_eq!(machine.ended(FIRST), Err(Misuse::IdentityNotAdvanced { present: FIRST, given: FIRST }));
        // A new producer id starts again at epoch 0.
        machine.ended(Identity { producer_id: 8, epoch: 0 }).unwrap();
    }

    #[test]
    fn an_empty_transaction_needs_no_request() {
        let mut machine = ready();
        machine.begin().unwrap();
        assert_eq!(machine.abort(), Ok(Ending::Empty));
        machine.begin().unwrap();
        machine.seal(false).unwrap();
        assert_eq!(machine.commit(), Ok(Ending::Empty));
        assert_eq!(machine.state(), State::Ready);
    }

    #[test]
    fn a_fenced_producer_stays_fenced() {
        let mut machine = ready();
        machine.fenced();
        assert!(machine.initialise().is_err() && machine.begin().is_err());
        assert!(machine.initialised(SECOND).is_err());
        assert_eq!(machine.state(), State::Fenced);
    }

    #[test]
    fn sequences_continue_with_0_after_the_largest_number() {
        let mut machine = ready();
        machine.begin().unwrap();
        machine.batch(1, i32::MAX).unwrap();
        machine.batch_written(&1);
        assert_eq!(machine.batch(1, 2).unwrap().sequence, i32::MAX);
        machine.batch_written(&1);
        assert_eq!(machine.batch(1, 1).unwrap().sequence, 1);
    }
}
