//! The connection breaks after the server has committed, and before its answer arrives: the caller is told that the outcome is
//! unknown, and a repetition does no harm.

mod common;

use common::{Database, Server};
use hapax_core::{
    DedupId, Delivery, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
    Receive, SendError, Sent, Settle, SettleError, Settled, StoreError,
};
use hapax_faults::{Action, FaultHandle, FaultProxy, Match, Protocol};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Executor as _, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_send_whose_answer_is_cut_is_unknown_and_its_repetition_a_duplicate,
        a_merged_send_whose_answer_is_cut_is_unknown_and_stored_once,
        an_ack_whose_answer_is_cut_is_unknown_and_its_repetition_finds_it_done,
        a_send_and_an_ack_in_one_statement_are_both_unknown_and_both_done,
    ])
}

/// Tries at most: a cut that hits the preparation of a statement comes before its execution.
const TRIES: usize = 20;

/// A store whose answers can be cut, and one that sees what is in the database.
struct Site {
    database: Database,
    proxy: FaultProxy,
    cut: PostgresStore,
    direct: PostgresStore,
    queue: QueueName,
}

impl Site {
    async fn start(server: &'static Server, name: &str) -> Self {
        let (database, queue) = (Database::migrated(server).await, QueueName::new(name).unwrap());
        let proxy = FaultProxy::start(server.address(), Protocol::Postgres).unwrap();
        let through = database.url().replace(&server.address().to_string(), &proxy.address().to_string());
        assert_ne!(through, database.url());
        let direct = database.open().await;
        let config = if queue.is_fifo() { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        direct.create_queue(&queue, config).await.unwrap();
        let cut = PostgresStore::open(&through, Options::default()).await.unwrap();
        Self { database, proxy, cut, direct, queue }
    }

    fn cut_answer_to(&self, sql: &str) -> FaultHandle {
        self.proxy.inject(Match::answer_to(sql), Action::Cut).times(1)
    }

    /// Messages that wait. The store's own figures may be old, if a count took long.
    async fn ready(&self) -> i64 {
        self.count("(SELECT count(*) FROM hapax.q_ready) + (SELECT count(*) FROM hapax.q_fifo)").await
    }

    async fn in_flight(&self) -> i64 {
        self.count("(SELECT count(*) FROM hapax.q_claim)").await
    }

    async fn count(&self, what: &str) -> i64 {
        let mut db = self.database.connect().await;
        db.fetch_one(format!("SELECT {what}").as_str()).await.unwrap().get(0)
    }

    /// Sends through the store whose answers are cut.
    async fn send(&self, message: NewMessage) -> Result<Result<Sent, SendError>, StoreError> {
        self.cut.send(&self.queue, vec![message]).await.map(|mut answers| answers.remove(0))
    }

    async fn ack(&self, delivery: &Delivery) -> Result<Result<Settled, SettleError>, StoreError> {
        let ack = vec![Settle::ack(delivery.receipt.clone())];
        self.cut.settle(&self.queue, ack).await.map(|mut answers| answers.remove(0))
    }

    async fn received(&self) -> Delivery {
        self.direct.send(&self.queue, vec![NewMessage::new("x")]).await.unwrap().remove(0).unwrap();
        let ask = Receive { wait_ms: Some(20_000), lease_ms: Some(600_000), ..Receive::up_to(1) };
        self.direct.receive(&self.queue, ask).await.unwrap().remove(0)
    }
}

fn is_unknown<T>(answer: &Result<T, StoreError>) -> bool {
    matches!(answer, Err(StoreError::OutcomeUnknown(_)))
}

/// With a deduplication id a send is a transaction, and its commit is what is cut.
async fn a_send_whose_answer_is_cut_is_unknown_and_its_repetition_a_duplicate(server: &'static Server) {
    for name in ["jobs", "jobs.fifo"] {
        let site = Site::start(server, name).await;
        let cut = async |at: usize| {
            let message = NewMessage::new("paid").dedup(DedupId::new(format!("order-{at}")).unwrap());
            let message =
                if name == "jobs" { message } else { message.group(GroupId::new("orders").unwrap()) };
            let cut = site.cut_answer_to("COMMIT");
            let first = site.send(message.clone()).await;
            cut.remove();
            // Otherwise it has hit a transaction of the store's own.
            (!matches!(first, Ok(Ok(_)))).then_some((message, first))
        };
        let mut hit = None;
        for at in 0..TRIES {
            let before = site.ready().await;
            hit = cut(at).await;
            assert_eq!(site.ready().await, before + 1, "{name}: it was committed");
            if hit.is_some() {
                break;
            }
        }
        let (message, first) = hit.expect("a cut hits a send");
        assert!(is_unknown(&first), "{name}: {first:?}");
        let ready = site.ready().await;
        let again = site.send(message.clone()).await.unwrap().unwrap();
        let other = site.direct.send(&site.queue, vec![message]).await.unwrap().remove(0).unwrap();
        assert!(again.duplicate && other.duplicate, "{name}: {again:?} {other:?}");
        assert_eq!(again.id, other.id, "{name}: it is told which message it was");
        assert_eq!(site.ready().await, ready, "{name}: it is there once");
    }
}

/// Without a deduplication id a send is one statement, which others may share. A repetition would be another message.
async fn a_merged_send_whose_answer_is_cut_is_unknown_and_stored_once(server: &'static Server) {
    let site = Site::start(server, "jobs").await;
    for _ in 0..TRIES {
        site.send(NewMessage::new("before")).await.unwrap().unwrap();
        let before = site.ready().await;
        let cut = site.cut_answer_to("q_send");
        let sent = site.send(NewMessage::new("cut")).await;
        assert!(cut.count() == 1 && is_unknown(&sent), "{sent:?}");
        match site.ready().await - before {
            1 => return,
            stored => assert_eq!(stored, 0),
        }
    }
    panic!("no cut came after the statement was executed");
}

async fn an_ack_whose_answer_is_cut_is_unknown_and_its_repetition_finds_it_done(server: &'static Server) {
    let site = Site::start(server, "jobs").await;
    for _ in 0..TRIES {
        assert_eq!(site.ack(&site.received().await).await, Ok(Ok(Settled::Acked)));
        let delivery = site.received().await;
        let cut = site.cut_answer_to("q_ack");
        let acked = site.ack(&delivery).await;
        assert!(cut.count() == 1 && is_unknown(&acked), "{acked:?}");
        if site.in_flight().await == 0 {
            assert_eq!(site.ack(&delivery).await, Ok(Err(SettleError::Gone)));
            return;
        }
        assert_eq!(site.ack(&delivery).await, Ok(Ok(Settled::Acked)));
    }
    panic!("no cut came after the statement was executed");
}

async fn a_send_and_an_ack_in_one_statement_are_both_unknown_and_both_done(server: &'static Server) {
    let site = Site::start(server, "jobs").await;
    let both =
        async |delivery: &Delivery| tokio::join!(site.send(NewMessage::new("both")), site.ack(delivery));
    for _ in 0..TRIES {
        let (sent, acked) = both(&site.received().await).await;
        assert!(sent.unwrap().is_ok() && acked == Ok(Ok(Settled::Acked)));
        let (delivery, ready) = (site.received().await, site.ready().await);
        let cut = site.cut_answer_to("q_write");
        let (sent, acked) = both(&delivery).await;
        if cut.count() == 0 {
            cut.remove();
            continue;
        }
        assert!(is_unknown(&sent) && is_unknown(&acked), "{sent:?} {acked:?}");
        if site.in_flight().await == 0 {
            assert_eq!(site.ready().await, ready + 1, "neither is done without the other");
            assert_eq!(site.ack(&delivery).await, Ok(Err(SettleError::Gone)));
            return;
        }
        assert_eq!(site.ready().await, ready, "neither is done without the other");
        assert_eq!(site.ack(&delivery).await, Ok(Ok(Settled::Acked)));
    }
    panic!("no cut came after the statement was executed");
}
