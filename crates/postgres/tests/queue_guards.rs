//! Guards of the queues' SQL, one test for each. Where another part of the store would do the same a moment later (the
//! sweeper ends leases, deletes what is too old and reads changed queues), the call follows at once, several times.

mod common;

use std::process::ExitCode;

use common::{Clock, Database, Server};
use hapax_core::{
    Delivery, Extend, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive,
    Settle, Settlement,
};
use hapax_postgres::PostgresStore;
use sqlx::Executor as _;

fn main() -> ExitCode {
    common::main(tests![
        a_lease_that_has_ended_is_not_extended,
        a_receive_knows_what_another_process_has_changed,
        a_send_knows_what_another_process_has_changed,
        a_message_behind_the_first_of_its_group_keeps_its_delay,
        fences_of_a_message_grow_although_the_sequence_was_set_back,
        groups_that_are_held_hide_no_other,
        a_message_past_its_retention_is_not_delivered,
    ])
}

/// Rounds of tests that are quicker than the sweeper.
const ROUNDS: usize = 5;

/// A store with a queue, and a clock that only the test moves.
struct Bed {
    clock: Clock,
    store: PostgresStore,
    name: QueueName,
    fifo: bool,
    // Last, so that the store is dropped before it.
    database: Database,
}

impl Bed {
    async fn new(server: &'static Server, fifo: bool) -> Self {
        let database = Database::migrated(server).await;
        let clock = database.with_clock().await;
        let store = database.open().await;
        let name = QueueName::new(if fifo { "jobs.fifo" } else { "jobs" }).unwrap();
        let config = if fifo { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        store.create_queue(&name, QueueConfig { lease_ms: 10_000, ..config }).await.unwrap();
        Self { clock, store, name, fifo, database }
    }

    /// One for each kind of queue.
    async fn both(server: &'static Server) -> [Self; 2] {
        [Self::new(server, false).await, Self::new(server, true).await]
    }

    fn message(&self, body: &str, group: &str) -> NewMessage {
        let mut message = NewMessage::new(body.to_owned());
        if self.fifo {
            message.group = Some(GroupId::new(group).unwrap());
            message.dedup = Some(hapax_core::DedupId::new(body).unwrap());
        }
        message
    }

    async fn send(&self, body: &str) {
        self.send_to(body, "g").await;
    }

    async fn send_to(&self, body: &str, group: &str) {
        let sent = self.store.send(&self.name, vec![self.message(body, group)]).await;
        sent.unwrap().remove(0).unwrap();
    }

    async fn receive(&self, max: usize) -> Vec<Delivery> {
        let ask = Receive { wait_ms: Some(0), ..Receive::up_to(max) };
        self.store.receive(&self.name, ask).await.unwrap()
    }

    async fn settle(&self, delivery: &Delivery, settlement: Settlement) {
        let settle = Settle::new(delivery.receipt.clone(), settlement);
        self.store.settle(&self.name, vec![settle]).await.unwrap().remove(0).unwrap();
    }

    async fn sql(&self, sql: &str) {
        self.database.connect().await.execute(sql).await.unwrap();
    }

    /// Changes a number of the queue's configuration, as another process does; no hint tells this one.
    async fn configure(&self, field: &str, value: u64) {
        let sql = format!(
            "UPDATE hapax.q_queue SET version = nextval('hapax.q_revision'),
             config = jsonb_set(config::jsonb, '{{{field}}}', '{value}')::text"
        );
        self.sql(&sql).await;
    }
}

/// Bodies of deliveries.
fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|one| String::from_utf8(one.body.to_vec()).unwrap()).collect()
}

/// A FIFO group may have moved on when a lease ends. A standard queue allows a late extension, but not of a message that was
/// out of attempts when its lease ended.
async fn a_lease_that_has_ended_is_not_extended(server: &'static Server) {
    for bed in Bed::both(server).await {
        if !bed.fifo {
            let last = QueueConfig { lease_ms: 10_000, ..QueueConfig::sqs() };
            let last = QueueConfig { retry: last.retry.attempts(1), ..last };
            bed.store.set_queue(&bed.name, last, None).await.unwrap();
        }
        for round in 0..ROUNDS {
            let body = format!("m{round}");
            bed.send(&body).await;
            let held = bed.receive(1).await.remove(0);
            bed.clock.advance_ms(10_001).await;
            let late = Extend { receipt: held.receipt, lease_ms: 10_000, own_lease: false };
            let extended = bed.store.extend(&bed.name, vec![late]).await.unwrap().remove(0);
            assert!(extended.is_err(), "FIFO {}: a lease was extended after its end", bed.fifo);
            let again = bed.receive(1).await;
            let expected = if bed.fifo { vec![body] } else { Vec::new() };
            assert_eq!(bodies(&again), expected, "FIFO {}", bed.fifo);
            for delivery in &again {
                bed.settle(delivery, Settlement::Ack).await;
            }
        }
    }
}

async fn a_receive_knows_what_another_process_has_changed(server: &'static Server) {
    for bed in Bed::both(server).await {
        for round in 1..=ROUNDS as u64 {
            // The process knows the queue since its last call.
            bed.send(&format!("m{round}")).await;
            bed.configure("lease_ms", 10_000 + round).await;
            let got = bed.receive(1).await;
            assert_eq!(got[0].lease_ms, 10_000 + round, "the lease of the new configuration");
            bed.settle(&got[0], Settlement::Ack).await;
        }
        let other = bed.database.open().await;
        bed.send("held-back").await;
        other.pause_queue(&bed.name, "ann", None).await.unwrap();
        assert_eq!(bodies(&bed.receive(1).await), [""; 0], "a paused queue hands out nothing");
    }
}

async fn a_send_knows_what_another_process_has_changed(server: &'static Server) {
    for bed in Bed::both(server).await {
        for round in 0..ROUNDS {
            // The process knows since then that nothing is delayed.
            bed.send(&format!("now-{round}")).await;
            let got = bed.receive(1).await;
            bed.settle(&got[0], Settlement::Ack).await;
            bed.configure("delay_ms", 60_000).await;
            let body = format!("later-{round}");
            bed.send(&body).await;
            assert_eq!(bodies(&bed.receive(1).await), [""; 0], "the delay of the new configuration");
            bed.clock.advance_ms(60_001).await;
            let got = bed.receive(1).await;
            assert_eq!(bodies(&got), [body]);
            bed.settle(&got[0], Settlement::Ack).await;
            bed.configure("delay_ms", 0).await;
        }
    }
}

/// Its group's first message is announced and the receive has room for both.
async fn a_message_behind_the_first_of_its_group_keeps_its_delay(server: &'static Server) {
    let bed = Bed::new(server, true).await;
    bed.send("first").await;
    bed.send("second").await;
    let got = bed.receive(2).await;
    assert_eq!(bodies(&got), ["first", "second"]);
    bed.settle(&got[1], Settlement::Defer { after_ms: 60_000 }).await;
    bed.settle(&got[0], Settlement::Defer { after_ms: 0 }).await;
    let got = bed.receive(2).await;
    assert_eq!(bodies(&got), ["first"], "the second one is delayed");
    bed.settle(&got[0], Settlement::Ack).await;
    assert_eq!(bodies(&bed.receive(2).await), [""; 0]);
    bed.clock.advance_ms(60_001).await;
    assert_eq!(bodies(&bed.receive(2).await), ["second"]);
}

/// As after a failover to a server that lags, on a connection that a pooler has kept.
async fn fences_of_a_message_grow_although_the_sequence_was_set_back(server: &'static Server) {
    for bed in Bed::both(server).await {
        bed.send("x").await;
        let mut last = bed.receive(1).await.remove(0);
        for retried in [true, false, true, false] {
            bed.sql("SELECT setval('hapax.fence', 1)").await;
            if retried {
                bed.settle(&last, Settlement::Defer { after_ms: 0 }).await;
            } else {
                bed.clock.advance_ms(10_001).await;
            }
            let next = bed.receive(1).await.remove(0);
            assert!(next.fence > last.fence, "{:?} after {:?}", next.fence, last.fence);
            last = next;
        }
    }
}

/// A receive looks at some hundred announced groups. Groups whose first message is held are not among them.
async fn groups_that_are_held_hide_no_other(server: &'static Server) {
    const HELD: usize = 150;
    let bed = Bed::new(server, true).await;
    for round in 0..2 {
        for group in 0..HELD {
            bed.send_to(&format!("{group}-{round}"), &format!("g{group}")).await;
        }
        if round == 0 {
            let mut held = 0;
            while held < HELD {
                let got = bed.receive(10).await;
                assert!(!got.is_empty(), "only {held} groups were delivered");
                held += got.len();
            }
        }
    }
    bed.send_to("other", "other").await;
    assert_eq!(bodies(&bed.receive(1).await), ["other"]);
    assert_eq!(bodies(&bed.receive(10).await), [""; 0]);
}

/// The sweeper deletes such messages at times; until then a receive passes over them.
async fn a_message_past_its_retention_is_not_delivered(server: &'static Server) {
    for bed in Bed::both(server).await {
        let retention = QueueConfig::sqs().retention_ms;
        for round in 0..ROUNDS {
            bed.send(&format!("old-{round}")).await;
            bed.clock.advance_ms(retention + 1).await;
            let body = format!("new-{round}");
            bed.send(&body).await;
            let got = bed.receive(2).await;
            assert_eq!(bodies(&got), [body], "round {round}");
            bed.settle(&got[0], Settlement::Ack).await;
        }
        let stats = bed.store.stats(&bed.name).await.unwrap();
        assert_eq!(stats.ready + stats.in_flight + stats.delayed, 0, "{stats:?}");
    }
}
