//! A commit's request that is delayed until the next transaction is open (KAFKA-17754).
//!
//! The proxy holds the first EndTxn. The producer hears nothing, closes the connection, and repeats the request on another
//! one, which the broker answers. In the next transaction, record B is sent; then the broker receives the request that was held.
//!
//! librdkafka's own transactions are the control: they must show the failure, else the schedule proves nothing.

use std::time::Duration;

use hapax_faults::{Action, FaultHandle, Match};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("control_librdkafka_shows_an_aborted_record", librdkafka_shows_an_aborted_record),
        shared("control_librdkafka_tears_a_transaction", librdkafka_tears_a_transaction),
    ]
}

/// The end of the second transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Second {
    Aborts,
    /// After one more record, C.
    Commits,
}

/// The first EndTxn of a producer, held by the proxy, and the count of the answers to its EndTxn requests.
pub struct HeldCommit {
    held: FaultHandle,
    answers: FaultHandle,
}

impl HeldCommit {
    pub fn new(broker: &Broker, transactional_id: &str) -> Self {
        let label = format!("EndTxn {transactional_id}");
        Self {
            held: broker.proxy().inject(Match::request(label.as_str()), Action::Hold).times(1),
            answers: broker.proxy().inject(Match::answer_to(label), Action::Delay(Duration::ZERO)),
        }
    }

    /// Lets the held request pass, and returns when the broker has answered it.
    pub async fn release(&self) {
        assert_eq!(self.held.count(), 1, "the commit was held");
        let answered = self.answers.count();
        assert!(answered > 0, "the commit was repeated");
        self.held.release();
        self.answers.wait_for(answered + 1).await;
    }
}

fn librdkafka_shows_an_aborted_record(broker: &Broker) {
    let seen = run_librdkafka(broker, "late-aborts", Second::Aborts);
    assert_eq!(seen, ["A", "B"], "B was aborted: if it is not seen, the schedule does not hit");
}

fn librdkafka_tears_a_transaction(broker: &Broker) {
    let seen = run_librdkafka(broker, "late-commits", Second::Commits);
    assert_eq!(seen, ["A", "B"], "B and C belong together: if both are seen, the schedule does not hit");
}

fn run_librdkafka(broker: &Broker, name: &str, second: Second) -> Vec<String> {
    broker.create_topic(name, 1);
    let producer: FutureProducer = broker
        .config()
        .set("bootstrap.servers", broker.proxied().to_string())
        .set("transactional.id", name)
        // Requests without an answer are repeated on another connection after this time.
        .set("socket.timeout.ms", "3000")
        .set("transaction.timeout.ms", "120000")
        .create()
        .unwrap();
    let send = |value: &str| {
        let record = FutureRecord::<(), str>::to(name).partition(0).payload(value);
        broker.block_on(producer.send(record, PATIENCE)).map_err(|(error, _)| error)
    };
    producer.init_transactions(PATIENCE).unwrap();
    let commit = HeldCommit::new(broker, name);
    producer.begin_transaction().unwrap();
    send("A").unwrap();
    producer.commit_transaction(PATIENCE).unwrap();
    producer.begin_transaction().unwrap();
    send("B").unwrap();
    broker.block_on(commit.release());
    // What the producer is told now is no part of the control: the records are.
    let _ = match second {
        Second::Aborts => producer.abort_transaction(PATIENCE),
        Second::Commits => send("C").and_then(|_| producer.commit_transaction(PATIENCE)),
    };
    broker.read(name, Isolation::Committed)
}
