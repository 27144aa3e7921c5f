//! The tier `transactional` with queue and business tables in one PostgreSQL database, and with the queue elsewhere: money
//! is moved once per key, whatever breaks.

mod bank;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bank::{Bank, Transfer, run_until};
use hapax_core::outbox::{NewOutboxMessage, OutboxStore as _};
use hapax_core::{
    AsyncInbox as _, Claim, ClaimEnding, ClaimRequest, DeadLetterPolicy, EndClaim, EntryId, Fingerprint,
    GroupId, Json, Ledger as _, NewMessage, OnDead, OnDoubt, QueueAdmin, QueueConfig, QueueName, QueueStore,
    RecordedOutcome, RedriveFilter, RedriveRequest, Resolution, Tier, policy::RetryPolicy,
};
use hapax_faults::{Action, FaultProxy, Match, PostgresServer, Protocol};
use hapax_postgres::{InboxOptions, Isolation, Options, PostgresInbox, PostgresStore};
use hapax_worker::{Cx, HandlerOutcome, Point, Worker};
use sqlx::{Executor as _, PgConnection};

fn main() -> std::process::ExitCode {
    bank::main(&[
        ("standard_queue_with_all_that_can_happen", |server| {
            bank::block_on(all_that_can_happen(server, Kind::Standard, Isolation::ReadCommitted));
        }),
        ("fifo_queue_with_all_that_can_happen", |server| {
            bank::block_on(all_that_can_happen(server, Kind::Fifo, Isolation::ReadCommitted));
        }),
        ("fifo_queue_that_halts_with_all_that_can_happen", |server| {
            bank::block_on(all_that_can_happen(server, Kind::Halting, Isolation::ReadCommitted));
        }),
        ("standard_queue_with_all_that_can_happen_serializable", |server| {
            bank::block_on(all_that_can_happen(server, Kind::Standard, Isolation::Serializable));
        }),
        ("fifo_queue_that_halts_with_all_that_can_happen_serializable", |server| {
            bank::block_on(all_that_can_happen(server, Kind::Halting, Isolation::Serializable));
        }),
        ("a_serialization_failure_starts_the_run_again", |server| bank::block_on(write_skew(server))),
        ("the_queue_elsewhere_is_acked_after_the_commit", |server| bank::block_on(queue_elsewhere(server))),
        ("a_commit_whose_response_is_lost_is_found", |server| bank::block_on(lost_response(server))),
        ("a_commit_whose_response_is_late_is_found", |server| bank::block_on(late_response(server))),
        ("a_commit_that_never_arrived_is_made_again", |server| bank::block_on(lost_commit(server))),
        ("a_commit_is_all_or_nothing", |server| bank::block_on(all_or_nothing(server))),
        ("sessions_terminated_at_each_point_move_money_once", |server| {
            bank::block_on(terminated_sessions(server, Kind::Standard));
        }),
        ("sessions_terminated_at_each_point_move_money_once_fifo", |server| {
            bank::block_on(terminated_sessions(server, Kind::Fifo));
        }),
        ("a_deadlock_starts_the_run_again", |server| bank::block_on(deadlock(server))),
        ("a_delivery_that_is_over_moves_nothing", |server| bank::block_on(superseded(server))),
        ("a_handler_that_ends_its_transaction_is_rejected", |server| {
            bank::block_on(ends_its_transaction(server));
        }),
        ("the_next_of_a_group_follows_the_commit_without_the_sweeper", |server| {
            bank::block_on(promotion(server));
        }),
        ("after_a_crash_the_sweeper_announces_the_next_of_a_group", |server| {
            bank::block_on(crash_before_promotion(server));
        }),
        ("a_handler_holds_no_row_of_its_queue", |server| bank::block_on(holds_no_row(server))),
        ("a_handler_publishes_in_its_transaction", |server| bank::block_on(publishes(server))),
        ("a_stuck_commit_stops_no_other_group", |server| bank::block_on(stuck_commit(server))),
        ("a_doubt_that_was_decided_is_not_parked", |server| {
            bank::block_on(decided_before_it_was_parked(server));
        }),
    ])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Standard,
    Fifo,
    Halting,
}

fn config(kind: Kind, dead: &QueueName) -> QueueConfig {
    let base = if kind == Kind::Standard { QueueConfig::default() } else { QueueConfig::fifo() };
    QueueConfig {
        tier: Tier::Transactional,
        retry: RetryPolicy::at_once().attempts(3),
        dead_letter: Some(DeadLetterPolicy { queue: dead.clone() }),
        on_dead: if kind == Kind::Halting { OnDead::HaltGroup } else { OnDead::Continue },
        ..base
    }
}

async fn create(store: &dyn QueueAdmin, kind: Kind) -> (QueueName, QueueName) {
    let suffix = if kind == Kind::Standard { "" } else { ".fifo" };
    let name = |stem: &str| QueueName::new(format!("{stem}{suffix}")).unwrap();
    let (queue, dead) = (name("transfers"), name("dead"));
    let plain = if kind == Kind::Standard { QueueConfig::default() } else { QueueConfig::fifo() };
    store.create_queue(&dead, plain).await.unwrap();
    store.create_queue(&queue, config(kind, &dead)).await.unwrap();
    (queue, dead)
}

fn message(transfer: &Transfer, kind: Kind, producer: usize) -> NewMessage {
    let message = NewMessage::new(serde_json::to_vec(transfer).unwrap());
    let message = message.idempotency_key(&transfer.key().parse().unwrap());
    if kind == Kind::Standard {
        return message;
    }
    let dedup = format!("{}-{producer}", transfer.number).parse().unwrap();
    message.group(GroupId::new(format!("group-{}", transfer.number % 3)).unwrap()).dedup(dedup)
}

/// What the handler does with a transfer, by its number.
fn trouble(number: u32) -> &'static str {
    match number % 10 {
        3 => "fails once",
        5 => "is rejected until it is mended",
        7 => "is in doubt until it is resolved",
        _ => "none",
    }
}

/// Duplicates from three producers, two workers of two stores, failures, dead letters with a redrive, doubts that are parked
/// and resolved: at the end each transfer was made once, the accounts balance, and nothing is left.
async fn all_that_can_happen(server: &'static PostgresServer, kind: Kind, isolation: Isolation) {
    const COUNT: u32 = 30;
    let bank = Bank::open(server).await;
    let second = bank.store_again().await;
    let (queue, dead) = create(&bank.store, kind).await;
    let transfers: Vec<Transfer> = (0..COUNT).map(Transfer::new).collect();
    for transfer in transfers.iter().filter(|transfer| trouble(transfer.number).contains("doubt")) {
        doubt(&bank.store, &queue, transfer).await;
    }
    for producer in 0..3 {
        for transfer in &transfers {
            let store = if producer == 1 { &second } else { &bank.store };
            store.send(&queue, vec![message(transfer, kind, producer)]).await.unwrap().remove(0).unwrap();
        }
    }
    let (mended, failed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let mut workers = Vec::new();
    for store in [&bank.store, &second] {
        let options = InboxOptions { isolation, ..InboxOptions::default() };
        let inbox = PostgresInbox::with_options(store, options).unwrap();
        let (mended, failed) = (mended.clone(), failed.clone());
        let builder = Worker::over(Arc::new(store.clone()), queue.clone()).concurrency(8);
        let worker = builder.async_transactional_handler(&inbox, move |transfer: Transfer, db, cx: Cx| {
            let (mended, failed) = (mended.clone(), failed.clone());
            Box::pin(async move {
                transfer.make(db, &cx).await?;
                match trouble(transfer.number) {
                    "fails once" if cx.attempt() == 1 => {
                        failed.fetch_add(1, Ordering::SeqCst);
                        Err(sqlx::Error::Protocol("told to fail".into()))
                    }
                    "is rejected until it is mended" if !mended.load(Ordering::SeqCst) => {
                        Ok(HandlerOutcome::reject("told to reject"))
                    }
                    _ => Ok(HandlerOutcome::Done(transfer.number)),
                }
            })
        });
        workers.push(worker.build().await.unwrap());
    }
    let stop = tokio::sync::watch::Sender::new(false);
    let running: Vec<_> = workers
        .into_iter()
        .map(|worker| {
            let mut stop = stop.subscribe();
            tokio::spawn(worker.run(async move { drop(stop.wait_for(|stop| *stop).await) }))
        })
        .collect();

    // Each doubt is resolved once its message is parked; what is rejected is mended and redriven once.
    let of = |what: &str| {
        transfers.iter().filter(|transfer| trouble(transfer.number).contains(what)).collect::<Vec<_>>()
    };
    let mut resolved = BTreeSet::new();
    bank::until("everything is settled", async || {
        let (stats, letters) =
            (bank.store.stats(&queue).await.unwrap(), bank.store.stats(&dead).await.unwrap());
        if stats.parked > 0 {
            for transfer in of("doubt") {
                let id = EntryId::of_queue(&queue, transfer.key().parse().unwrap());
                if !resolved.contains(&transfer.number)
                    && bank.store.resolve(&id, Resolution::Absent, "test").await.is_ok()
                {
                    resolved.insert(transfer.number);
                }
            }
        }
        if letters.ready > 0 {
            mended.store(true, Ordering::SeqCst);
            let redrive = RedriveRequest {
                from: dead.clone(),
                to: None,
                filter: RedriveFilter::default(),
                per_second: None,
                by: "test".into(),
            };
            // Another one may be running.
            drop(bank.store.start_redrive(redrive).await);
        }
        let waiting =
            stats.ready + stats.delayed + stats.in_flight + stats.parked + letters.ready + letters.in_flight;
        // The figures of a store may be some moments old, and of two queues of different age; the rows are not.
        let left = "SELECT sum(n) FROM (SELECT count(*) n FROM hapax.q_ready UNION ALL SELECT count(*) FROM hapax.q_claim \
                    UNION ALL SELECT count(*) FROM hapax.q_due UNION ALL SELECT count(*) FROM hapax.q_fifo \
                    UNION ALL SELECT count(*) FROM hapax.q_parked) tables";
        waiting == 0 && server.sql(&bank.database, left).unwrap().trim() == "0"
    })
    .await;
    stop.send_replace(true);
    for worker in running {
        assert!(worker.await.unwrap().unwrap().drained);
    }
    assert_eq!(resolved.len(), of("doubt").len(), "each doubt was parked, then resolved");
    assert!(failed.load(Ordering::SeqCst) >= of("fails").len() as u32);
    bank.check(&transfers).await;
    if kind == Kind::Halting {
        // A message that is rejected or in doubt halts its group, so the order of each group is kept throughout.
        for group in 0..3 {
            let made =
                bank.numbers().await.into_iter().filter(|number| number % 3 == group).collect::<Vec<_>>();
            assert!(made.is_sorted(), "{made:?}");
        }
    }
}

/// Leaves the key of a transfer in doubt, as a worker of `effectively-once` would.
async fn doubt(store: &PostgresStore, queue: &QueueName, transfer: &Transfer) {
    let id = EntryId::of_queue(queue, transfer.key().parse().unwrap());
    let mut request = ClaimRequest::new(id.clone(), "earlier".parse().unwrap(), 60_000);
    let body = serde_json::to_vec(transfer).unwrap();
    request.fingerprint = Some(Fingerprint::new(blake3::hash(&body).to_hex()).unwrap());
    request.on_doubt = OnDoubt::Park;
    let Claim::Granted(grant) = store.claim(vec![request]).await.unwrap().remove(0).unwrap() else {
        panic!()
    };
    let end = EndClaim { id, token: grant.token, ending: ClaimEnding::Doubt };
    store.end(vec![end]).await.unwrap().remove(0).unwrap();
}

async fn make(transfer: Transfer, db: &mut PgConnection, cx: Cx) -> Result<u32, sqlx::Error> {
    transfer.make(db, &cx).await?;
    cx.effect_point().await;
    Ok(transfer.number)
}

/// The queue is in the embedded store: ledger entry and business write are one transaction, the ack comes after it.
async fn queue_elsewhere(server: &'static PostgresServer) {
    let bank = Bank::open(server).await;
    let folder = tempfile::tempdir().unwrap();
    let embedded =
        Arc::new(hapax_embedded::Embedded::open(folder.path(), hapax_embedded::Options::default()).unwrap());
    let queue = QueueName::new("transfers").unwrap();
    embedded
        .create_queue(&queue, QueueConfig { tier: Tier::Transactional, ..QueueConfig::default() })
        .await
        .unwrap();
    let transfers: Vec<Transfer> = (0..20).map(Transfer::new).collect();
    for producer in 0..3 {
        for transfer in &transfers {
            embedded
                .send(&queue, vec![message(transfer, Kind::Standard, producer)])
                .await
                .unwrap()
                .remove(0)
                .unwrap();
        }
    }
    let inbox = PostgresInbox::new(&bank.store);
    let builder = Worker::over(embedded.clone(), queue.clone()).concurrency(8);
    let worker =
        builder.async_transactional_handler(&inbox, |transfer, db, cx| Box::pin(make(transfer, db, cx)));
    let report = run_until(worker.build().await.unwrap(), async || {
        let stats = embedded.stats(&queue).await.unwrap();
        stats.ready + stats.delayed + stats.in_flight == 0
    })
    .await;
    assert_eq!((report.counts.done, report.counts.replayed), (20, 40), "{report:?}");
    bank.check(&transfers).await;
}

/// A bank whose worker has its transactions through a proxy. Its queue does not go through it, so that the first COMMIT that
/// the proxy sees is a handler's.
struct Far {
    bank: Bank,
    proxy: Arc<FaultProxy>,
    store: PostgresStore,
    queue: QueueName,
    transfers: Vec<Transfer>,
}

async fn far(server: &'static PostgresServer, kind: Kind, count: u32) -> Far {
    let bank = Bank::open(server).await;
    let proxy = Arc::new(FaultProxy::start(bank.address, Protocol::Postgres).unwrap());
    let through = bank.url.replace(&bank.address.to_string(), &proxy.address().to_string());
    assert_ne!(bank.url, through);
    let options = Options { operation_timeout: Duration::from_secs(2), ..Options::default() };
    let store = PostgresStore::open(&through, options).await.unwrap();
    let (queue, _) = create(&bank.store, kind).await;
    let transfers: Vec<Transfer> = (0..count).map(Transfer::new).collect();
    for transfer in &transfers {
        bank.store.send(&queue, vec![message(transfer, kind, 0)]).await.unwrap().remove(0).unwrap();
    }
    Far { bank, proxy, store, queue, transfers }
}

impl Far {
    /// Works until the queue is empty; every transfer was made once then. The fault is for the first commit. `commits`: how
    /// often a transaction was about to be committed, and how often that was confirmed.
    async fn work(&self, on: Match, action: Action, commits: (u32, u32)) {
        let inbox = PostgresInbox::new(&self.store);
        let (proxy, fault) = (self.proxy.clone(), Arc::new(OnceLock::new()));
        let (injected, passed) = (fault.clone(), Arc::new([AtomicU32::new(0), AtomicU32::new(0)]));
        let counted = passed.clone();
        let hook = move |point: Point| match point {
            Point::BeforeCommit => {
                injected.get_or_init(|| proxy.inject(on.clone(), action).times(1));
                counted[0].fetch_add(1, Ordering::SeqCst);
            }
            Point::AfterCommit => drop(counted[1].fetch_add(1, Ordering::SeqCst)),
            _ => {}
        };
        let builder =
            Worker::over(Arc::new(self.bank.store.clone()), self.queue.clone()).concurrency(1).hook(hook);
        let worker =
            builder.async_transactional_handler(&inbox, |transfer, db, cx| Box::pin(make(transfer, db, cx)));
        let report =
            run_until(worker.build().await.unwrap(), async || self.bank.is_empty(&self.queue).await).await;
        let fault = fault.get().expect("a transaction was about to be committed");
        fault.release();
        assert_eq!(fault.count(), 1);
        let passed = (passed[0].load(Ordering::SeqCst), passed[1].load(Ordering::SeqCst));
        assert_eq!(passed, commits, "{report:?}");
        let counts = &report.counts;
        assert_eq!((counts.done, counts.retried, counts.stale_settles), (3, 0, 0), "{report:?}");
        self.bank.check(&self.transfers).await;
    }
}

async fn lost_response(server: &'static PostgresServer) {
    for kind in [Kind::Standard, Kind::Fifo] {
        far(server, kind, 3).await.work(Match::answer_to("COMMIT"), Action::Cut, (3, 2)).await;
    }
}

/// The response is held for longer than the worker waits for it.
async fn late_response(server: &'static PostgresServer) {
    for kind in [Kind::Standard, Kind::Fifo] {
        far(server, kind, 3).await.work(Match::answer_to("COMMIT"), Action::Hold, (3, 2)).await;
    }
}

/// The request is cut: nothing was committed, and the run is started again.
async fn lost_commit(server: &'static PostgresServer) {
    for kind in [Kind::Standard, Kind::Fifo] {
        far(server, kind, 3).await.work(Match::request("COMMIT"), Action::Cut, (4, 3)).await;
    }
}

/// Effect, entry and the end of the delivery are there after one commit, or none of them.
async fn all_or_nothing(server: &'static PostgresServer) {
    for (on, found) in [(Match::request("COMMIT"), "0 0 1"), (Match::answer_to("COMMIT"), "1 1 0")] {
        for kind in [Kind::Standard, Kind::Fifo] {
            for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
                let what = format!("{on:?}, {kind:?}, {isolation:?}");
                let Far { bank, proxy, store, queue, .. } = far(server, kind, 1).await;
                let delivery = receive_one(&bank.store, &queue).await;
                let options = InboxOptions { isolation, ..InboxOptions::default() };
                let inbox = PostgresInbox::with_options(&store, options).unwrap();
                let entry = hapax_core::InboxEntry {
                    id: EntryId::of_queue(&queue, delivery.key.clone()),
                    fingerprint: "f".parse().unwrap(),
                };
                let mut tx = inbox.begin(&entry).await.unwrap();
                inbox.hold(&mut tx, &delivery.receipt).await.unwrap();
                assert_eq!(inbox.enter(&mut tx, &entry).await.unwrap(), hapax_core::InboxLookup::Fresh);
                let effect = "INSERT INTO journal (number) VALUES (1)";
                PostgresInbox::connection(&mut tx).execute(effect).await.unwrap();
                let fault = proxy.inject(on.clone(), Action::Cut).times(1);
                let outcome = RecordedOutcome::done(Json::of("x").unwrap());
                let ended = inbox.complete(tx, &entry, outcome, 60_000, &delivery.receipt).await;
                assert!(matches!(ended, Err(hapax_core::InboxError::Unknown(_))), "{what}: {ended:?}");
                assert_eq!(fault.count(), 1, "{what}");
                let holders = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
                               WHERE d.datname = current_database() AND mode = 'RowExclusiveLock' \
                               AND relation = 'hapax.ledger_entry'::regclass";
                bank::until("the transaction has ended", async || {
                    server.sql(&bank.database, holders).unwrap().trim() == "0"
                })
                .await;
                let parts = "SELECT concat_ws(' ', (SELECT count(*) FROM journal), \
                             (SELECT count(*) FROM hapax.ledger_entry), (SELECT count(*) FROM hapax.q_claim))";
                assert_eq!(server.sql(&bank.database, parts).unwrap().trim(), found, "{what}");
            }
        }
    }
}

/// Which sessions of a database are ended.
#[derive(Debug, Clone, Copy)]
enum Sessions {
    /// Those of handlers' transactions.
    Inbox,
    /// All of the worker, also those of its queue.
    All,
}

async fn terminated_sessions(server: &'static PostgresServer, kind: Kind) {
    // A worker of this tier does not pass the other points.
    let not_passed = |point: &Point| matches!(point, Point::AfterClaim | Point::AfterComplete);
    for at in Point::ALL.into_iter().filter(|point| !not_passed(point)) {
        for sessions in [Sessions::Inbox, Sessions::All] {
            terminated_at(server, kind, sessions, at).await;
        }
    }
}

async fn terminated_at(server: &'static PostgresServer, kind: Kind, sessions: Sessions, at: Point) {
    let what = format!("{kind:?}, {sessions:?}, {at}");
    let bank = Bank::open(server).await;
    let (queue, _) = create(&bank.store, kind).await;
    let transfers: Vec<Transfer> = (0..3).map(Transfer::new).collect();
    for transfer in &transfers {
        bank.store.send(&queue, vec![message(transfer, kind, 0)]).await.unwrap().remove(0).unwrap();
    }
    let (worker_store, passed, hit) = (bank.store_again().await, Arc::new(AtomicU32::new(0)), Arc::default());
    let inbox = PostgresInbox::new(&worker_store);
    let (name, hits): (_, Arc<AtomicU32>) = (bank.database.clone(), Arc::clone(&hit));
    let hook = move |point: Point| {
        // The second time, so that the inbox has a session at every point.
        if point == at && passed.fetch_add(1, Ordering::SeqCst) == 1 {
            let whose = match sessions {
                Sessions::Inbox => "= 'hapax-inbox'",
                Sessions::All => "<> ''",
            };
            let kill = format!(
                "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() \
                 AND datname = current_database() AND application_name {whose}"
            );
            let ended = server.sql(&name, &kill).unwrap().trim().parse().unwrap();
            hits.fetch_add(ended, Ordering::SeqCst);
        }
    };
    let builder = Worker::over(Arc::new(worker_store), queue.clone()).concurrency(1).hook(hook);
    let worker =
        builder.async_transactional_handler(&inbox, |transfer, db, cx| Box::pin(make(transfer, db, cx)));
    run_until(worker.build().await.unwrap(), async || bank.is_empty(&queue).await).await;
    // Behind a pooler no session is the inbox's between two transactions.
    let must_hit = !bank.is_pooled() || matches!(sessions, Sessions::All);
    assert!(!must_hit || hit.load(Ordering::SeqCst) > 0, "{what}: no session was ended");
    bank.check(&transfers).await;
}

// Deadlocks and write skew: `deadlock` and `write_skew`.
include!("bank/conflicts.rs");

/// Consumed message, business write and the message that follows are one transaction: duplicates and failed runs publish
/// nothing.
async fn publishes(server: &'static PostgresServer) {
    const COUNT: u32 = 12;
    let bank = Bank::open(server).await;
    let (queue, _) = create(&bank.store, Kind::Standard).await;
    let transfers: Vec<Transfer> = (0..COUNT).map(Transfer::new).collect();
    for producer in 0..2 {
        for transfer in &transfers {
            let message = message(transfer, Kind::Standard, producer);
            bank.store.send(&queue, vec![message]).await.unwrap().remove(0).unwrap();
        }
    }
    let (inbox, outbox) = (PostgresInbox::new(&bank.store), bank.store.outbox().unwrap());
    let into = outbox.clone();
    let builder = Worker::over(Arc::new(bank.store.clone()), queue.clone()).concurrency(4);
    let worker = builder.async_transactional_handler(&inbox, move |transfer: Transfer, db, cx: Cx| {
        let outbox = into.clone();
        Box::pin(async move {
            transfer.make(db, &cx).await?;
            let made =
                NewOutboxMessage::new("transfers.made", transfer.number.to_string()).key(&transfer.from);
            let enqueued = outbox.enqueue(db, &made).await;
            enqueued.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
            if transfer.number.is_multiple_of(3) && cx.attempt() == 1 {
                return Err(sqlx::Error::Protocol("told to fail".into()));
            }
            Ok(())
        })
    });
    run_until(worker.build().await.unwrap(), async || bank.is_empty(&queue).await).await;
    bank.check(&transfers).await;
    let published = outbox.unpublished("none", 100).await.unwrap();
    let mut numbers: Vec<u32> =
        published.iter().map(|message| String::from_utf8_lossy(&message.body).parse().unwrap()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..COUNT).collect::<Vec<_>>(), "one message for each transfer that was made");
}

/// The delivery has passed to another consumer while the handler ran: its transaction is rolled back.
async fn superseded(server: &'static PostgresServer) {
    for kind in [Kind::Standard, Kind::Fifo] {
        let bank = Bank::open(server).await;
        let (queue, _) = create(&bank.store, kind).await;
        let transfers = vec![Transfer::new(1)];
        bank.store.send(&queue, vec![message(&transfers[0], kind, 0)]).await.unwrap().remove(0).unwrap();
        let inbox = PostgresInbox::new(&bank.store);
        let (runs, name) = (Arc::new(AtomicU32::new(0)), bank.database.clone());
        let counted = runs.clone();
        let builder = Worker::over(Arc::new(bank.store.clone()), queue.clone()).lease(Duration::from_secs(3));
        let worker = builder.async_transactional_handler(&inbox, move |transfer: Transfer, db, cx: Cx| {
            if counted.fetch_add(1, Ordering::SeqCst) == 0 {
                server.sql(&name, "UPDATE hapax.q_claim SET fence = nextval('hapax.fence')").unwrap();
            }
            Box::pin(make(transfer, db, cx))
        });
        let worker = worker.build().await.unwrap();
        let report = run_until(worker, async || bank.is_empty(&queue).await).await;
        // The first run has left nothing behind, so the second one is not a duplicate.
        assert_eq!((report.counts.done, report.counts.replayed), (1, 0), "{kind:?}: {report:?}");
        assert_eq!(runs.load(Ordering::SeqCst), 2, "{kind:?}");
        bank.check(&transfers).await;
    }
}

async fn ends_its_transaction(server: &'static PostgresServer) {
    let bank = Bank::open(server).await;
    let (queue, dead) = create(&bank.store, Kind::Standard).await;
    bank.store
        .send(&queue, vec![message(&Transfer::new(1), Kind::Standard, 0)])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    let inbox = PostgresInbox::new(&bank.store);
    let builder = Worker::over(Arc::new(bank.store.clone()), queue.clone());
    let worker = builder.async_transactional_handler(&inbox, |transfer: Transfer, db, cx: Cx| {
        Box::pin(async move {
            transfer.make(db, &cx).await?;
            db.execute("ROLLBACK").await?;
            Ok::<_, sqlx::Error>(())
        })
    });
    let report = run_until(worker.build().await.unwrap(), async || bank.is_empty(&queue).await).await;
    assert_eq!((report.counts.done, report.counts.rejected), (0, 1), "{report:?}");
    let letter = bank
        .store
        .browse(&dead, hapax_core::Browse { limit: 10, ..hapax_core::Browse::default() })
        .await
        .unwrap()
        .items
        .remove(0);
    let told = format!("{:?}", letter.dead);
    assert!(told.contains("the handler ended the transaction"), "{told}");
    bank.check(&[]).await;
}

async fn receive_one(store: &PostgresStore, queue: &QueueName) -> hapax_core::Delivery {
    let mut found = None;
    bank::until("a message is delivered", async || {
        let ask = hapax_core::Receive::up_to(1).wait(Duration::from_secs(1));
        found = store.receive(queue, ask).await.unwrap().pop();
        found.is_some()
    })
    .await;
    found.expect("it was just found")
}

/// The next message of a group is announced right after the commit, and not only when the sweeper finds it.
async fn promotion(server: &'static PostgresServer) {
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        let bank = Bank::open(server).await;
        let (queue, _) = create(&bank.store, Kind::Fifo).await;
        for number in [0, 3] {
            let sent =
                bank.store.send(&queue, vec![message(&Transfer::new(number), Kind::Fifo, 0)]).await.unwrap();
            assert!(sent[0].is_ok());
        }
        let first = receive_one(&bank.store, &queue).await;
        // The sweeper begins by a look at all queues, which reads this table. Deliveries and their ends do not.
        let mut blind = bank.connect().await;
        blind.execute("BEGIN; LOCK TABLE hapax.q_redrive IN ACCESS EXCLUSIVE MODE").await.unwrap();
        let options = InboxOptions { isolation, ..InboxOptions::default() };
        let inbox = PostgresInbox::with_options(&bank.store, options).unwrap();
        let entry = hapax_core::InboxEntry {
            id: EntryId::of_queue(&queue, first.key.clone()),
            fingerprint: "f".parse().unwrap(),
        };
        let mut tx = inbox.begin(&entry).await.unwrap();
        inbox.hold(&mut tx, &first.receipt).await.unwrap();
        assert_eq!(inbox.enter(&mut tx, &entry).await.unwrap(), hapax_core::InboxLookup::Fresh);
        let outcome = RecordedOutcome::done(Json::of("x").unwrap());
        assert!(inbox.complete(tx, &entry, outcome, 60_000, &first.receipt).await.unwrap());
        let next = receive_one(&bank.store, &queue).await;
        assert_ne!(next.id, first.id, "{isolation:?}");
        blind.execute("ROLLBACK").await.unwrap();
    }
}

/// A process dies right after its commit: the group's next message is delivered all the same.
async fn crash_before_promotion(server: &'static PostgresServer) {
    let bank = Bank::open(server).await;
    let (queue, _) = create(&bank.store, Kind::Fifo).await;
    for number in [0, 3] {
        let sent =
            bank.store.send(&queue, vec![message(&Transfer::new(number), Kind::Fifo, 0)]).await.unwrap();
        assert!(sent[0].is_ok());
    }
    let ask = hapax_core::Receive::up_to(1);
    let first = bank.store.receive(&queue, ask.clone()).await.unwrap().remove(0);
    // As the transaction of a process that died: only the statement of the settle, then the commit.
    let settle = "SELECT hapax.q_settle(queue_id, seq, fence) FROM hapax.q_claim";
    server.sql(&bank.database, settle).unwrap();
    let next = receive_one(&bank.store, &queue).await;
    assert_ne!(next.id, first.id);
    let left = server.sql(&bank.database, "SELECT count(*) FROM hapax.q_settled").unwrap();
    assert_eq!(left.trim(), "0", "the sweeper has followed the end of the first delivery");
}

/// The settle is the last statement: while the handler runs, heartbeats can renew the lease of its delivery.
async fn holds_no_row(server: &'static PostgresServer) {
    for kind in [Kind::Standard, Kind::Fifo] {
        let bank = Bank::open(server).await;
        let (queue, _) = create(&bank.store, kind).await;
        let transfers = vec![Transfer::new(1)];
        bank.store.send(&queue, vec![message(&transfers[0], kind, 0)]).await.unwrap().remove(0).unwrap();
        let (inbox, name) = (PostgresInbox::new(&bank.store), bank.database.clone());
        let builder = Worker::over(Arc::new(bank.store.clone()), queue.clone());
        let worker = builder.async_transactional_handler(&inbox, move |transfer: Transfer, db, cx: Cx| {
            let free = "SELECT count(*) FROM (SELECT 1 FROM hapax.q_claim FOR UPDATE SKIP LOCKED) free";
            assert_eq!(server.sql(&name, free).unwrap().trim(), "1", "{kind:?}");
            Box::pin(make(transfer, db, cx))
        });
        let report = run_until(worker.build().await.unwrap(), async || bank.is_empty(&queue).await).await;
        assert_eq!(report.counts.done, 1, "{kind:?}: {report:?}");
        bank.check(&transfers).await;
    }
}

/// A transaction that has settled and does not commit holds up its own message only: heartbeats, sweeps, receives and
/// settles of other groups and messages go on.
async fn stuck_commit(server: &'static PostgresServer) {
    for kind in [Kind::Standard, Kind::Fifo] {
        let bank = Bank::open(server).await;
        let other = bank.store_again().await;
        let (queue, _) = create(&bank.store, kind).await;
        for number in 0..3 {
            let sent = bank.store.send(&queue, vec![message(&Transfer::new(number), kind, 0)]).await.unwrap();
            assert!(sent[0].is_ok());
        }
        let ask = hapax_core::Receive::up_to(2).lease(Duration::from_secs(8));
        let mut got = bank.store.receive(&queue, ask).await.unwrap();
        let (stuck, held) = (got.remove(0), got.remove(0));
        let inbox = PostgresInbox::new(&bank.store);
        let entry = hapax_core::InboxEntry {
            id: EntryId::of_queue(&queue, stuck.key.clone()),
            fingerprint: "f".parse().unwrap(),
        };
        let mut tx = inbox.begin(&entry).await.unwrap();
        inbox.enter(&mut tx, &entry).await.unwrap();
        inbox.record(&mut tx, &entry, RecordedOutcome::done(Json::of("x").unwrap()), 60_000).await.unwrap();
        assert!(inbox.settle(&mut tx, &stuck.receipt).await.unwrap());
        // Its own process is told that the lease holds; another's heartbeats are not held up by the locked row.
        let extend = |delivery: &hapax_core::Delivery| hapax_core::Extend {
            receipt: delivery.receipt.clone(),
            lease_ms: 60_000,
            own_lease: false,
        };
        let own = bank.store.extend(&queue, vec![extend(&stuck), extend(&held)]).await.unwrap();
        assert!(own.iter().all(Result::is_ok), "{kind:?}: {own:?}");
        let others = other.extend(&queue, vec![extend(&stuck), extend(&held)]).await.unwrap();
        assert!(others.iter().all(Result::is_ok), "{kind:?}: {others:?}");
        // The lease of the stuck one is over in the database; the sweeper and the receives pass it by.
        let over = "SELECT count(*) FROM hapax.q_claim WHERE until_ms <= hapax.now_ms() \
                    AND hapax.started_ms() + lease_ms <= hapax.now_ms()";
        bank::until("a lease is over", async || server.sql(&bank.database, over).unwrap().trim() == "1")
            .await;
        let third = receive_one(&other, &queue).await;
        // Its own group takes messages, too.
        let sent = other.send(&queue, vec![message(&Transfer::new(3), kind, 0)]).await.unwrap();
        assert!(sent[0].is_ok(), "{kind:?}: {sent:?}");
        for delivery in [&held, &third] {
            let settle = hapax_core::Settle::ack(delivery.receipt.clone());
            other.settle(&queue, vec![settle]).await.unwrap().remove(0).unwrap();
        }
        inbox.commit(tx).await.unwrap();
        let fourth = receive_one(&other, &queue).await;
        let settle = hapax_core::Settle::ack(fourth.receipt);
        other.settle(&queue, vec![settle]).await.unwrap().remove(0).unwrap();
        bank::until("the queue is empty", async || bank.is_empty(&queue).await).await;
    }
}

/// Where the queue of a worker is, beside the database of its inbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    SameDatabase,
    OtherDatabase,
    Embedded,
}

/// The doubt is resolved after the worker has met it and before the message is parked: the message continues.
async fn decided_before_it_was_parked(server: &'static PostgresServer) {
    for place in [Place::SameDatabase, Place::OtherDatabase, Place::Embedded] {
        for kind in [Kind::Standard, Kind::Fifo] {
            let (bank, other) = (Bank::open(server).await, Bank::open(server).await);
            let folder = tempfile::tempdir().unwrap();
            match place {
                Place::SameDatabase => decided_before_it_was_parked_in(&bank, bank.store.clone(), kind).await,
                Place::OtherDatabase => decided_before_it_was_parked_in(&bank, other.store, kind).await,
                Place::Embedded => {
                    let options = hapax_embedded::Options::default();
                    let store = hapax_embedded::Embedded::open(folder.path(), options).unwrap();
                    decided_before_it_was_parked_in(&bank, store, kind).await;
                }
            }
        }
    }
}

async fn decided_before_it_was_parked_in<S>(bank: &Bank, store: S, kind: Kind)
where
    S: QueueStore + QueueAdmin + 'static,
{
    let (queue, _) = create(&store, kind).await;
    let transfers = vec![Transfer::new(7)];
    doubt(&bank.store, &queue, &transfers[0]).await;
    store.send(&queue, vec![message(&transfers[0], kind, 0)]).await.unwrap().remove(0).unwrap();
    let (decided, ledger, of) = (Arc::new(AtomicBool::new(false)), bank.store.clone(), queue.clone());
    let key = transfers[0].key();
    let runtime = tokio::runtime::Handle::current();
    let hook = move |point: Point| {
        if point == Point::BeforeSettle && !decided.swap(true, Ordering::SeqCst) {
            let id = EntryId::of_queue(&of, key.parse().unwrap());
            let ledger = ledger.clone();
            let resolve = async move { ledger.resolve(&id, Resolution::Absent, "test").await };
            let runtime = runtime.clone();
            std::thread::spawn(move || runtime.block_on(resolve)).join().unwrap().unwrap();
        }
    };
    let (store, inbox) = (Arc::new(store), PostgresInbox::new(&bank.store));
    let builder = Worker::over(store.clone(), queue.clone()).hook(hook);
    let worker =
        builder.async_transactional_handler(&inbox, |transfer, db, cx| Box::pin(make(transfer, db, cx)));
    let report = run_until(worker.build().await.unwrap(), async || {
        let stats = store.stats(&queue).await.unwrap();
        stats.ready + stats.delayed + stats.in_flight + stats.parked == 0
    })
    .await;
    assert_eq!(report.counts.done, 1, "{report:?}");
    bank.check(&transfers).await;
}
