//! A transaction that loses against another one (a deadlock, or one that could not be serialized) is repeated: the caller
//! notices nothing, the effect happens once, and it is counted once.

mod common;

use std::time::Duration;

use common::{Database, Server, ask, completed, granted, id};
use hapax_core::{
    ClaimEnding, DedupId, Delivery, EndClaim, Extend, GroupId, Ledger as _, NewMessage, QueueAdmin as _,
    QueueConfig, QueueName, QueueStore as _, Receive, Resolution, Settle, Settled, Settlement,
};
use hapax_postgres::PostgresStore;
use sqlx::{Executor as _, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_lost_receive_is_repeated,
        lost_batches_of_several_queues_are_repeated,
        a_lost_settle_is_repeated_and_counted_once,
        a_lost_decision_of_an_operator_is_repeated,
        a_batch_of_ends_that_loses_in_its_second_round_is_counted_once,
        a_batch_that_is_refused_leaves_no_transaction_and_no_lock,
    ])
}

/// How often an operation loses here: often, but less often than it is repeated.
const LOSSES: i64 = 12;
const CODES: [&str; 2] = ["40001", "40P01"];

const FAULT: &str = "
CREATE SCHEMA fault;
CREATE SEQUENCE fault.count;
CREATE FUNCTION fault.lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF nextval('fault.count') <= TG_ARGV[0]::bigint THEN RAISE EXCEPTION 'it loses' USING ERRCODE = TG_ARGV[1]; END IF;
  RETURN coalesce(NEW, OLD);
END $$;
";

/// A database in which statements lose.
struct Losing {
    database: Database,
    store: PostgresStore,
}

impl Losing {
    async fn new(server: &'static Server) -> Self {
        let database = Database::migrated(server).await;
        database.connect().await.execute(FAULT).await.unwrap();
        let store = database.open().await;
        Self { database, store }
    }

    /// The next statements of this kind lose: `INSERT ON hapax.q_claim`.
    async fn lose(&self, kind: &str, losses: i64, code: &str) {
        let sql = format!(
            "SELECT setval('fault.count', 1, false); CREATE OR REPLACE TRIGGER lose BEFORE {kind} FOR EACH ROW \
             EXECUTE FUNCTION fault.lose({losses}, '{code}')"
        );
        self.database.connect().await.execute(sql.as_str()).await.unwrap();
    }

    /// Ends it, after checking that the statements did lose.
    async fn end(&self, kind: &str, losses: i64) {
        let mut connection = self.database.connect().await;
        let row = connection.fetch_one("SELECT last_value FROM fault.count").await.unwrap();
        assert!(row.get::<i64, _>(0) > losses, "{kind} was not repeated {losses} times");
        let table = kind.split(" ON ").nth(1).unwrap();
        connection.execute(format!("DROP TRIGGER lose ON {table}").as_str()).await.unwrap();
    }

    async fn queue(&self, name: &str) -> QueueName {
        let name = QueueName::new(name).unwrap();
        let config = if name.is_fifo() { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        self.store.create_queue(&name, config).await.unwrap();
        name
    }

    async fn send(&self, name: &QueueName, body: &str) {
        let mut message = NewMessage::new(body.to_owned());
        if name.is_fifo() {
            message = message.group(GroupId::new("g").unwrap()).dedup(DedupId::new(body).unwrap());
        }
        self.store.send(name, vec![message]).await.unwrap().remove(0).unwrap();
    }

    async fn receive(&self, name: &QueueName, attempt_id: Option<String>) -> Vec<Delivery> {
        let ask = Receive { wait_ms: Some(0), attempt_id, ..Receive::up_to(1) };
        self.store.receive(name, ask).await.unwrap()
    }
}

async fn a_lost_receive_is_repeated(server: &'static Server) {
    let losing = Losing::new(server).await;
    for (at, code) in CODES.into_iter().enumerate() {
        for (name, repeatable) in [("plain", false), ("groups.fifo", false), ("named.fifo", true)] {
            let name = losing.queue(&format!("{at}-{name}")).await;
            losing.send(&name, "one").await;
            let kind = if repeatable { "INSERT ON hapax.q_attempt" } else { "INSERT ON hapax.q_claim" };
            losing.lose(kind, LOSSES, code).await;
            let received = losing.receive(&name, repeatable.then(|| "again".to_owned())).await;
            losing.end(kind, LOSSES).await;
            assert_eq!(received.len(), 1, "{name}");
            assert_eq!(received[0].attempt, 1, "{name}");
            let stats = losing.store.stats(&name).await.unwrap();
            assert_eq!((stats.in_flight, stats.totals.delivered), (1, 1), "{name}");
        }
    }
}

/// Calls for several queues that are merged are one transaction.
async fn lost_batches_of_several_queues_are_repeated(server: &'static Server) {
    let losing = Losing::new(server).await;
    let store = &losing.store;
    for (at, code) in CODES.into_iter().enumerate() {
        let (a, b) = (losing.queue(&format!("{at}-a")).await, losing.queue(&format!("{at}-b")).await);
        // On a runtime with one thread, both calls wait before the first batch is taken.
        losing.lose("INSERT ON hapax.q_ready", LOSSES, code).await;
        let one = || vec![NewMessage::new("one")];
        let (sent_a, sent_b) = tokio::join!(store.send(&a, one()), store.send(&b, one()));
        assert!(sent_a.unwrap().remove(0).is_ok() && sent_b.unwrap().remove(0).is_ok());
        losing.end("INSERT ON hapax.q_ready", LOSSES).await;

        let (held_a, held_b) =
            (losing.receive(&a, None).await.remove(0), losing.receive(&b, None).await.remove(0));
        let longer = |held: &Delivery| {
            vec![Extend { receipt: held.receipt.clone(), lease_ms: 600_000, own_lease: false }]
        };
        // The batch is repeated. It passes over the row whose update has lost, because a lock was left there: that one takes
        // the way of a closer look, which replaces the row. So a batch can lose once for each row.
        losing.lose("UPDATE ON hapax.q_claim", 1, code).await;
        let (longer_a, longer_b) =
            tokio::join!(store.extend(&a, longer(&held_a)), store.extend(&b, longer(&held_b)));
        assert!(longer_a.unwrap().remove(0).is_ok() && longer_b.unwrap().remove(0).is_ok());
        losing.end("UPDATE ON hapax.q_claim", 1).await;
        // That way is repeated as often as the others.
        let lock = "BEGIN; SELECT 1 FROM hapax.q_claim FOR UPDATE; ROLLBACK";
        losing.database.connect().await.execute(lock).await.unwrap();
        losing.lose("INSERT ON hapax.q_claim", LOSSES, code).await;
        let (longer_a, longer_b) =
            tokio::join!(store.extend(&a, longer(&held_a)), store.extend(&b, longer(&held_b)));
        assert!(longer_a.unwrap().remove(0).is_ok() && longer_b.unwrap().remove(0).is_ok());
        losing.end("INSERT ON hapax.q_claim", LOSSES).await;

        losing.lose("DELETE ON hapax.q_claim", LOSSES, code).await;
        let ack = |held: &Delivery| vec![Settle::ack(held.receipt.clone())];
        let (acked_a, acked_b) = tokio::join!(store.settle(&a, ack(&held_a)), store.settle(&b, ack(&held_b)));
        assert_eq!(
            (acked_a.unwrap(), acked_b.unwrap()),
            (vec![Ok(Settled::Acked)], vec![Ok(Settled::Acked)])
        );
        losing.end("DELETE ON hapax.q_claim", LOSSES).await;
        for name in [&a, &b] {
            let stats = store.stats(name).await.unwrap();
            assert_eq!((stats.ready, stats.in_flight), (0, 0), "{name}");
            assert_eq!((stats.totals.sent, stats.totals.acked), (1, 1), "{name}");
        }
    }
}

async fn a_lost_settle_is_repeated_and_counted_once(server: &'static Server) {
    let losing = Losing::new(server).await;
    for (at, code) in CODES.into_iter().enumerate() {
        for (name, settlement) in [
            ("plain", Settlement::Ack),
            ("groups.fifo", Settlement::Ack),
            ("retried", Settlement::Retry { after_ms: None, error: None }),
        ] {
            let key = format!("{at}-{name}");
            let name = losing.queue(&key).await;
            losing.send(&name, "one").await;
            let held = losing.receive(&name, None).await.remove(0);
            let grant = granted(&losing.store, ask(&key, "ann")).await;
            let before = losing.store.ledger_stats().await.unwrap();
            losing.lose("DELETE ON hapax.q_claim", LOSSES, code).await;
            let mut settle = Settle::new(held.receipt, settlement);
            settle.claim = Some(completed(&key, &grant, "paid"));
            losing.store.settle(&name, vec![settle]).await.unwrap().remove(0).unwrap();
            losing.end("DELETE ON hapax.q_claim", LOSSES).await;
            let after = losing.store.ledger_stats().await.unwrap();
            assert_eq!(after.completed - before.completed, 1, "{name}");
        }
    }
}

async fn a_lost_decision_of_an_operator_is_repeated(server: &'static Server) {
    let losing = Losing::new(server).await;
    let store = &losing.store;
    for code in CODES {
        let key = format!("key-{code}");
        let grant = granted(store, ask(&key, "ann")).await;
        let doubt = EndClaim { ending: ClaimEnding::Doubt, ..completed(&key, &grant, "") };
        store.end(vec![doubt]).await.unwrap().remove(0).unwrap();
        losing.lose("INSERT ON hapax.audit", LOSSES, code).await;
        store.resolve(&id(&key), Resolution::Absent, "bob").await.unwrap();
        losing.end("INSERT ON hapax.audit", LOSSES).await;
        assert_eq!(store.entry(&id(&key)).await.unwrap(), None);
    }
}

/// The statements of a batch of ends are transactions of their own. If a later one loses, what the earlier ones did is not
/// done and counted again, and not forgotten.
async fn a_batch_of_ends_that_loses_in_its_second_round_is_counted_once(server: &'static Server) {
    let losing = Losing::new(server).await;
    let store = &losing.store;
    // The first write of `b` finds it changed; the second loses.
    let sql = "CREATE FUNCTION fault.second() RETURNS trigger LANGUAGE plpgsql AS $$ DECLARE n bigint; BEGIN
                 IF NEW.key <> 'b' THEN RETURN NEW; END IF;
                 n := nextval('fault.count');
                 IF n = 1 THEN RETURN NULL; END IF;
                 IF n = 2 THEN RAISE EXCEPTION 'it loses' USING ERRCODE = '40001'; END IF;
                 RETURN NEW;
               END $$;
               CREATE TRIGGER lose BEFORE UPDATE ON hapax.ledger_entry FOR EACH ROW EXECUTE FUNCTION fault.second()";
    let (a, b) = (granted(store, ask("a", "ann")).await, granted(store, ask("b", "ann")).await);
    losing.database.connect().await.execute(sql).await.unwrap();
    let ended = store.end(vec![completed("a", &a, "paid"), completed("b", &b, "paid")]).await.unwrap();
    assert_eq!(ended, [Ok(()), Ok(())]);
    losing.end("UPDATE ON hapax.ledger_entry", 2).await;
    let stats = store.ledger_stats().await.unwrap();
    assert_eq!((stats.completed, stats.open, stats.entries), (2, 0, 2));
}

/// An error that is not a conflict: the whole batch fails, and what it had done is rolled back before its callers are told.
async fn a_batch_that_is_refused_leaves_no_transaction_and_no_lock(server: &'static Server) {
    let losing = Losing::new(server).await;
    let (store, a, b) = (&losing.store, losing.queue("a").await, losing.queue("b").await);
    let last: &QueueName = &b;
    losing.lose("INSERT ON hapax.q_ready", 1_000, "53100").await;
    let one = || vec![NewMessage::new("one")];
    let (sent_a, sent_b) = tokio::join!(store.send(&a, one()), store.send(last, one()));
    assert!(sent_a.is_err() && sent_b.is_err(), "{sent_a:?} {sent_b:?}");
    let mut connection = losing.database.connect().await;
    let open = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                AND state LIKE 'idle in transaction%'";
    // The store's own sweeps are in a transaction for moments; one that was left open stays.
    let start = std::time::Instant::now();
    while connection.fetch_one(open).await.unwrap().get::<i64, _>(0) > 0 {
        assert!(start.elapsed() < Duration::from_mins(1), "a transaction was left open");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let rows: i64 = connection.fetch_one("SELECT count(*) FROM hapax.q_ready").await.unwrap().get(0);
    assert_eq!(rows, 0);
}
