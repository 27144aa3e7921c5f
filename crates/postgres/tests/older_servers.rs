//! Servers of the versions before work on the present schema, beside servers of this version: the statements are those that they send.

mod common;

use common::{Database, Server};
use hapax_core::{
    Delivery, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle,
    SettleError, Settled, Settlement,
};
use hapax_postgres::PostgresStore;
use sqlx::{Executor as _, PgConnection, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        acks_and_sends_of_version_9_are_done_together,
        a_fifo_receive_of_version_10_leases_in_order,
        a_delivery_of_version_10_is_acked_by_this_version,
        a_message_that_version_10_puts_below_the_others_comes_first,
    ])
}

/// Acks and sends of one batch, as version 9 sends them.
const BOTH_9: &str = "SELECT acked, fences, hapax.q_send($4, $5, $6, $7, $8, $9, $10, $11, $12, $13) AS sent FROM hapax.q_ack($1, $2, $3)";
/// A receive of a FIFO queue, as version 10 sends it.
const RECEIVE_10: &str = "SELECT r.slot, r.now_ms AS at_ms, (r.m).* FROM hapax.q_recv_fifo($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) r";
/// What can be delivered of groups, as version 10 announces it.
const ANNOUNCE_10: &str = "SELECT hapax.q_heads($1, $2)";

struct Site {
    database: Database,
    store: PostgresStore,
    queue: QueueName,
    /// The connection of a server of an older version.
    old: PgConnection,
    queue_id: i32,
    version: i64,
}

impl Site {
    async fn start(server: &'static Server, name: &str) -> Self {
        let (database, queue) = (Database::migrated(server).await, QueueName::new(name).unwrap());
        let store = database.open().await;
        let config = if queue.is_fifo() { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        store.create_queue(&queue, config).await.unwrap();
        let mut old = database.connect().await;
        let row = old.fetch_one("SELECT id, version FROM hapax.q_queue").await.unwrap();
        let (queue_id, version) = (row.get(0), row.get(1));
        Self { database, store, queue, old, queue_id, version }
    }

    async fn send(&self, body: &str) {
        let message = NewMessage::new(body.to_owned());
        let message = if self.queue.is_fifo() {
            message.group(GroupId::new("g").unwrap()).dedup(body.parse().unwrap())
        } else {
            message
        };
        self.store.send(&self.queue, vec![message]).await.unwrap().remove(0).unwrap();
    }

    async fn receive_by(&self, store: &PostgresStore, max: usize) -> Vec<Delivery> {
        let ask = Receive { wait_ms: Some(20_000), lease_ms: Some(600_000), ..Receive::up_to(max) };
        store.receive(&self.queue, ask).await.unwrap()
    }

    async fn receive(&self, max: usize) -> Vec<Delivery> {
        self.receive_by(&self.store, max).await
    }

    async fn ack(&self, delivery: &Delivery) -> Result<Settled, SettleError> {
        let ack = vec![Settle::ack(delivery.receipt.clone())];
        self.store.settle(&self.queue, ack).await.unwrap().remove(0)
    }

    /// Acks of these deliveries and a send of this message by version 9: what was acked, with fences, and the new message's place.
    async fn both_9(
        &mut self,
        version: i64,
        acks: &[(i64, i64)],
        body: &str,
    ) -> (Vec<(i64, i64)>, Option<Vec<i64>>) {
        let (seqs, fences): (Vec<i64>, Vec<i64>) = acks.iter().copied().unzip();
        let query = sqlx::query(BOTH_9).bind(self.queue_id).bind(seqs).bind(fences);
        let query = query.bind(self.queue_id).bind(version).bind(vec![77_i64]).bind(vec![0_i16]);
        let query = query.bind(vec![body.len() as i32]).bind(vec![None::<String>]).bind(vec![None::<String>]);
        let query = query.bind(vec![0_i16]).bind(vec![None::<String>]).bind(vec![body.as_bytes().to_vec()]);
        let row = query.fetch_one(&mut self.old).await.unwrap();
        let (seqs, fences): (Vec<i64>, Vec<i64>) = (row.get("acked"), row.get("fences"));
        (seqs.into_iter().zip(fences).collect(), row.get("sent"))
    }

    /// Places and fences of what is in flight, in order.
    async fn in_flight(&mut self) -> Vec<(i64, i64)> {
        sqlx::query_as("SELECT seq, fence FROM hapax.q_claim ORDER BY seq")
            .fetch_all(&mut self.old)
            .await
            .unwrap()
    }
}

fn bodies(deliveries: &[Delivery]) -> Vec<&str> {
    deliveries.iter().map(|delivery| std::str::from_utf8(&delivery.body).unwrap()).collect()
}

async fn acks_and_sends_of_version_9_are_done_together(server: &'static Server) {
    let mut site = Site::start(server, "jobs").await;
    for body in ["one", "two"] {
        site.send(body).await;
    }
    let first = site.receive(2).await;
    assert_eq!(bodies(&first), ["one", "two"]);
    let claims = site.in_flight().await;
    let (one, two) = (claims[0], claims[1]);
    let stale = (two.0, two.1 - 1);
    let (acked, sent) = site.both_9(site.version, &[one, stale], "three").await;
    assert_eq!(acked, [one], "the newest fence alone is acked");
    assert_eq!(sent.map(|places| places.len()), Some(1));
    assert_eq!(site.ack(&first[0]).await, Err(SettleError::Gone));
    let three = site.receive(2).await;
    assert_eq!(bodies(&three), ["three"]);
    // A queue that has changed accepts nothing; the acks are done.
    let (acked, sent) = site.both_9(site.version + 1, &[two], "four").await;
    assert_eq!((acked, sent), (vec![two], None));
    assert_eq!(site.ack(&three[0]).await, Ok(Settled::Acked));
    assert_eq!(site.in_flight().await, []);
    let left: i64 = site.old.fetch_one("SELECT count(*) FROM hapax.q_ready").await.unwrap().get(0);
    assert_eq!(left, 0);
}

/// A server of version 10 receives, and its lease ends: this version delivers again what it had, and keeps the order.
async fn a_fifo_receive_of_version_10_leases_in_order(server: &'static Server) {
    let mut site = Site::start(server, "steps.fifo").await;
    for body in ["one", "two", "three"] {
        site.send(body).await;
    }
    let query = sqlx::query(RECEIVE_10).bind(site.queue_id).bind(site.version).bind(vec![100_i64; 2]);
    let query = query.bind(None::<Vec<Option<&str>>>).bind(vec![0_i32; 2]).bind(3_600_000_i64);
    let query = query.bind(true).bind(false).bind(false).bind(0_i64);
    let rows = query.fetch_all(&mut site.old).await.unwrap();
    let got: Vec<(i32, Option<Vec<u8>>)> =
        rows.iter().map(|row| (row.get("slot"), row.get("body"))).collect();
    let body = |body: &str| Some(body.as_bytes().to_vec());
    assert_eq!(got, [(0, None), (1, body("one")), (2, body("two")), (-4, None)]);
    // What follows the first message in its group is taken back with it, and counts no attempt.
    for (expected, attempt) in [("one", 2), ("two", 1), ("three", 1)] {
        let again = site.receive(1).await;
        assert_eq!((bodies(&again), again[0].attempt), (vec![expected], attempt));
        assert_eq!(site.ack(&again[0]).await, Ok(Settled::Acked));
    }
}

/// The receive of this version, with the statement of version 10 in it, so that its deliveries have receipts.
const RECEIVES_AS_10: &str = "
CREATE OR REPLACE FUNCTION hapax.q_recv_fifo(p_queue int, p_version bigint, p_lease bigint[], p_consumer text[], p_call int[],
    p_retention bigint, p_alone boolean, p_single boolean, p_probe boolean, p_from bigint, p_floor bigint)
 RETURNS TABLE (slot int, now_ms bigint, m hapax.q_claim) LANGUAGE sql AS $$
  SELECT r.slot, r.now_ms, r.m FROM hapax.q_recv_fifo($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) r $$";

async fn a_delivery_of_version_10_is_acked_by_this_version(server: &'static Server) {
    let mut site = Site::start(server, "steps.fifo").await;
    for body in ["one", "two", "three", "four"] {
        site.send(body).await;
    }
    // This version has received before, and begins its looks behind what it knows to be gone.
    let one = site.receive(1).await;
    assert_eq!(site.ack(&one[0]).await, Ok(Settled::Acked));
    let present =
        "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname = 'q_recv_fifo' AND p.pronargs = 11";
    let present: String = site.old.fetch_one(present).await.unwrap().get(0);
    let other = site.database.open().await;
    site.old.execute(RECEIVES_AS_10).await.unwrap();
    let two = site.receive_by(&other, 1).await;
    assert_eq!(bodies(&two), ["two"]);
    site.old.execute(present.as_str()).await.unwrap();
    // The group waits for its delivery.
    let ask = Receive { wait_ms: Some(0), ..Receive::up_to(10) };
    assert_eq!(bodies(&site.store.receive(&site.queue, ask).await.unwrap()), [""; 0]);
    // It is returned and delivered again by this version, then by the old one, and is acked by this one.
    let retry =
        vec![Settle::new(two[0].receipt.clone(), Settlement::Retry { after_ms: Some(0), error: None })];
    site.store.settle(&site.queue, retry).await.unwrap().remove(0).unwrap();
    let two = site.receive(1).await;
    assert_eq!(bodies(&two), ["two"]);
    assert_eq!(site.ack(&two[0]).await, Ok(Settled::Acked));
    site.old.execute(RECEIVES_AS_10).await.unwrap();
    let three = site.receive_by(&other, 1).await;
    assert_eq!(bodies(&three), ["three"]);
    site.old.execute(present.as_str()).await.unwrap();
    assert_eq!(site.ack(&three[0]).await, Ok(Settled::Acked));
    let four = site.receive(10).await;
    assert_eq!(bodies(&four), ["four"]);
    assert_eq!(site.ack(&four[0]).await, Ok(Settled::Acked));
}

/// A message comes back to its place in its group, as after a release of a parked one. This version has learned that all before the others is
/// gone, and the group's row says so.
async fn a_message_that_version_10_puts_below_the_others_comes_first(server: &'static Server) {
    let mut site = Site::start(server, "steps.fifo").await;
    for body in ["one", "two", "three", "four"] {
        site.send(body).await;
    }
    let announce = async |db: &mut PgConnection, queue_id: i32| {
        db.execute("SELECT 1 FROM hapax.q_group FOR UPDATE").await.unwrap();
        sqlx::query(ANNOUNCE_10).bind(vec![queue_id]).bind(vec!["g"]).execute(db).await.unwrap();
    };
    let queue_id = site.queue_id;
    let away = "BEGIN; CREATE TABLE public.away AS SELECT * FROM hapax.q_fifo ORDER BY seq LIMIT 1;
                DELETE FROM hapax.q_fifo WHERE seq = (SELECT seq FROM public.away)";
    site.old.execute(away).await.unwrap();
    announce(&mut site.old, queue_id).await;
    site.old.execute("COMMIT").await.unwrap();
    let two = site.receive(1).await;
    assert_eq!(bodies(&two), ["two"]);
    assert_eq!(site.ack(&two[0]).await, Ok(Settled::Acked));
    // As an announcement of this version does now and then.
    site.old.execute("BEGIN").await.unwrap();
    site.old.execute("SELECT 1 FROM hapax.q_group FOR UPDATE").await.unwrap();
    site.old
        .execute(format!("SELECT hapax.q_heads('{{{queue_id}}}', '{{g}}', false, true)").as_str())
        .await
        .unwrap();
    site.old.execute("COMMIT").await.unwrap();
    let above: bool = site
        .old
        .fetch_one("SELECT (SELECT low FROM hapax.q_group) > (SELECT seq FROM public.away)")
        .await
        .unwrap()
        .get(0);
    assert!(above, "the place of the group is above that of the message");
    site.old.execute("BEGIN; INSERT INTO hapax.q_fifo SELECT * FROM public.away").await.unwrap();
    announce(&mut site.old, queue_id).await;
    site.old.execute("COMMIT").await.unwrap();
    for expected in ["one", "three", "four"] {
        let got = site.receive(1).await;
        assert_eq!(bodies(&got), [expected]);
        assert_eq!(site.ack(&got[0]).await, Ok(Settled::Acked));
    }
}
