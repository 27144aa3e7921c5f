//! The process of `hapax copy`, killed with SIGKILL while a request of it is under way, or its response; connections that are
//! cut; a pooler. Producers and consumers work on the source until it refuses them, and on another queue of the target all
//! the time. At the end what was sent and not acked is in the target, once, with every outcome that was recorded.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::filled::{QUEUES, block_on, claim, filled, queue, runtime, text};
use common::postgres::{Test, database};
use common::{Server, hapax, run};
use hapax::core::store::SharedStore;
use hapax::core::{Claim, ClaimEnding, EndClaim, Json, RecordedOutcome};
use hapax::{EntryId, Hapax, QueueConfig, Receive, Settle, Settlement, StoreError};
use hapax_faults::{Action, FaultProxy, Match, PgBouncer, PostgresServer, Process, Protocol};
use libtest_mimic::{Completion, Failed, Trial};
use tempfile::TempDir;

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(3);
/// The least number of times that a copy is killed.
const KILLS_MIN: usize = 10;

fn main() -> ExitCode {
    let through_a_pooler = Trial::ignorable_test("a_copy_through_a_pooler_completes", || {
        let ignored = |why| Ok::<_, Failed>(Completion::ignored_with(format!("needs PgBouncer: {why}")));
        let server = match common::postgres::shared() {
            Ok(server) => server,
            Err(why) => return ignored(why.to_owned()),
        };
        match PgBouncer::start(server.address(), 3) {
            // It ends with the process: its clients live as long.
            Ok(pooler) => a_copy_through_a_pooler_completes(server, Box::leak(Box::new(pooler))),
            Err(why) => return ignored(why),
        }
        Ok(Completion::Completed)
    });
    let tests: &[Test] = &[
        ("a_copy_from_a_server_to_a_database_is_killed", a_copy_from_a_server_to_a_database_is_killed),
        ("a_copy_from_a_database_to_a_folder_is_killed", a_copy_from_a_database_to_a_folder_is_killed),
        ("a_copy_whose_connections_are_cut_completes", a_copy_whose_connections_are_cut_completes),
    ];
    common::postgres::main_with(tests, vec![through_a_pooler])
}

/// The messages that producers were told are sent, those whose ack was confirmed, and the keys whose outcome was.
#[derive(Debug, Default)]
struct Traffic {
    sent: BTreeSet<String>,
    acked: BTreeSet<String>,
    recorded: BTreeSet<String>,
}

fn refusal<T>(answer: Result<T, StoreError>) -> Option<String> {
    match answer {
        Err(error @ StoreError::Moved(_)) => Some(error.to_string()),
        Err(error) => panic!("{error}"),
        Ok(_) => None,
    }
}

/// Sends to `jobs` until that is refused; gives the bodies and the refusal.
async fn produce(store: SharedStore, producer: u32) -> (BTreeSet<String>, String) {
    let mut sent = BTreeSet::new();
    for number in 0.. {
        let body = format!("p{producer}-{number}");
        match store.send(&queue("jobs"), vec![text(&body)]).await {
            Ok(answers) => {
                answers[0].as_ref().unwrap();
                sent.insert(body);
            }
            refused => return (sent, refusal(refused).unwrap()),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    unreachable!("numbers do not end")
}

/// Receives from `jobs` and acks until that is refused; gives the acked bodies and the refusal.
async fn consume(store: SharedStore) -> (BTreeSet<String>, String) {
    let (jobs, mut acked) = (queue("jobs"), BTreeSet::new());
    loop {
        let got = match store.receive(&jobs, Receive::up_to(3)).await {
            Ok(got) => got,
            refused => return (acked, refusal(refused).unwrap()),
        };
        for delivery in got {
            let body = String::from_utf8_lossy(&delivery.body).into_owned();
            match store.settle(&jobs, vec![Settle::new(delivery.receipt, Settlement::Ack)]).await {
                Ok(answers) => drop(answers[0].as_ref().is_ok_and(|_| acked.insert(body))),
                refused => return (acked, refusal(refused).unwrap()),
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Claims keys and completes them until that is refused; gives the keys and the refusal.
async fn record(store: SharedStore) -> (BTreeSet<String>, String) {
    let mut recorded = BTreeSet::new();
    for number in 0.. {
        let key = format!("k{number}");
        let id = EntryId::new("users".parse().unwrap(), key.parse().unwrap());
        let grant = match claim(&store, "users", &key).await {
            Ok(Claim::Granted(grant)) => grant,
            Ok(other) => panic!("{key} is free: {other:?}"),
            refused => return (recorded, refusal(refused).unwrap()),
        };
        let outcome = RecordedOutcome::done(Json::of(&number).unwrap());
        let ending = ClaimEnding::Complete { outcome, ttl_ms: 86_400_000 };
        match store.end(vec![EndClaim { id, token: grant.token, ending }]).await {
            Ok(answers) => drop(answers[0].as_ref().is_ok_and(|()| recorded.insert(key))),
            refused => return (recorded, refusal(refused).unwrap()),
        }
        // Not faster than a copy is, so that the copy of a ledger that stays open by mistake ends as well.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    unreachable!("numbers do not end")
}

/// Two producers, a consumer and a user of the ledger of a source, until each was refused with the name of the target.
fn traffic(source: &SharedStore, target: &str) -> tokio::task::JoinHandle<Traffic> {
    let (source, target) = (source.clone(), hapax::without_secrets(target));
    let all = async move {
        let producers = [0, 1].map(|number| tokio::spawn(produce(source.clone(), number)));
        let consumer = tokio::spawn(consume(source.clone()));
        let ledger_user = tokio::spawn(record(source.clone()));
        let mut traffic = Traffic::default();
        for producer in producers {
            let (sent, why) = producer.await.unwrap();
            assert!(why.contains(&target), "{why}");
            traffic.sent.extend(sent);
        }
        let (acked, why) = consumer.await.unwrap();
        assert!(why.contains(&target), "{why}");
        traffic.acked = acked;
        let (recorded, why) = ledger_user.await.unwrap();
        assert!(why.contains(&target), "{why}");
        traffic.recorded = recorded;
        traffic
    };
    runtime().spawn(all)
}

/// Waits until each user of a source was refused.
fn refused(users: tokio::task::JoinHandle<Traffic>) -> Traffic {
    let ended = block_on(async { tokio::time::timeout(PATIENCE, users).await });
    ended.expect("after the copy, users of the source are not refused").unwrap()
}

/// Waits until producers and consumers are at work.
fn until_busy(source: &SharedStore) {
    let deadline = Instant::now() + PATIENCE;
    while block_on(source.stats(&queue("jobs"))).unwrap().ready < 620 {
        assert!(Instant::now() < deadline, "nothing is sent");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Copies, and kills the process at ever later requests and responses, until a copy ends before that. Gives how often it was
/// killed.
fn copy_killed(from: &str, to: &str, proxy: &FaultProxy, mut between: impl FnMut(usize)) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let (mut kills, mut frames) = (0, 5);
    loop {
        let on = if kills % 2 == 0 { Match::request("") } else { Match::answer_to("") };
        let held = proxy.inject(on, Action::Hold).after(frames).times(1);
        let mut process = Process::start(&mut hapax(&folder, &["copy", "--from", from, "--to", to])).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let ended = loop {
            if held.count() > 0 {
                break None;
            }
            if let Some(status) = process.ended() {
                break Some(status);
            }
            assert!(Instant::now() < deadline, "a copy hangs: {}", process.log());
            std::thread::sleep(Duration::from_millis(1));
        };
        if let Some(status) = ended {
            held.remove();
            assert!(status.success(), "after {kills} kills: {}", process.log());
            return kills;
        }
        let status = process.kill();
        assert_eq!(status.signal(), Some(9), "{status}: {}", process.log());
        // What the dead process has asked for may still arrive.
        held.release();
        kills += 1;
        between(kills);
        frames += 2 + frames / 8;
    }
}

/// A producer and a consumer of a queue that belongs to the target alone.
async fn works_beside(target: &SharedStore, kills: usize) {
    let own = queue("own");
    target.create_queue(&own, QueueConfig::default()).await.unwrap();
    let sent = target.send(&own, vec![text(&kills.to_string())]).await.unwrap();
    assert!(sent[0].is_ok());
    let got = target.receive(&own, Receive::up_to(1)).await.unwrap().remove(0);
    assert_eq!(got.body, kills.to_string().as_bytes());
    let settled = target.settle(&own, vec![Settle::new(got.receipt, Settlement::Ack)]).await.unwrap();
    assert!(settled[0].is_ok());
}

/// What was sent and not acked is in the target, once, and so is every outcome; the source refuses all its users, the target none.
async fn check(source: &SharedStore, target: &SharedStore, to: &str, traffic: &Traffic) {
    assert!(!traffic.sent.is_empty() && !traffic.acked.is_empty(), "producers and consumers worked");
    let mut there = BTreeMap::new();
    loop {
        let got = target.receive(&queue("jobs"), Receive::up_to(10)).await.unwrap();
        if got.is_empty() {
            break;
        }
        for delivery in got {
            *there.entry(String::from_utf8_lossy(&delivery.body).into_owned()).or_insert(0) += 1;
        }
    }
    let wanted: BTreeMap<String, i32> =
        traffic.sent.difference(&traffic.acked).map(|body| (body.clone(), 1)).collect();
    there.retain(|body, _| body.starts_with('p'));
    assert_eq!(there, wanted);
    assert!(!traffic.recorded.is_empty(), "keys were used");
    for key in &traffic.recorded {
        let there = claim(target, "users", key).await.unwrap();
        assert!(matches!(there, Claim::Completed { .. }), "{key} is not completed in the target: {there:?}");
    }
    let to = hapax::without_secrets(to);
    for name in QUEUES {
        let why = refusal(source.receive(&queue(name), Receive::up_to(1)).await).expect("it is closed");
        assert!(why.contains(&to), "{name}: {why}");
        target.queue(&queue(name)).await.unwrap();
    }
    assert!(refusal(claim(source, "new", "key").await).expect("it is closed").contains(&to));
    claim(target, "new", "key").await.unwrap();
}

fn through(direct: &str, server: &PostgresServer, proxy: &FaultProxy) -> String {
    direct.replace(&server.address().to_string(), &proxy.address().to_string())
}

fn again_adds_nothing(from: &str, to: &str) {
    let folder = tempfile::tempdir().unwrap();
    let again = run(&folder, &["copy", "--from", from, "--to", to, "--json"]).json();
    assert!(again["parts"].as_array().unwrap().iter().all(|part| part["added"] == 0), "{again}");
}

fn migrated(database: &str) {
    block_on(hapax::postgres::migrate(database, &hapax::postgres::Options::default(), false)).unwrap();
}

/// A server on a folder, as a store; queues and ledger are filled.
fn filled_server() -> (Server, SharedStore) {
    let server = Server::start();
    let store = block_on(Hapax::open(&server.endpoint)).unwrap().store().clone();
    block_on(filled(&store));
    (server, store)
}

fn a_copy_from_a_server_to_a_database_is_killed(server: &'static PostgresServer) {
    let (database, _) = database(server);
    migrated(&database);
    let proxy = FaultProxy::start(server.address(), Protocol::Postgres).unwrap();
    let (from, to) = (filled_server(), through(&database, server, &proxy));
    let target = block_on(Hapax::open(&database)).unwrap().store().clone();
    let users = traffic(&from.1, &to);
    until_busy(&from.1);
    let kills = copy_killed(&from.0.endpoint, &to, &proxy, |kills| block_on(works_beside(&target, kills)));
    assert!(kills >= KILLS_MIN, "{kills} kills");
    let traffic = refused(users);
    again_adds_nothing(&from.0.endpoint, &to);
    block_on(check(&from.1, &target, &to, &traffic));
}

fn a_copy_from_a_database_to_a_folder_is_killed(server: &'static PostgresServer) {
    let (database, _) = database(server);
    migrated(&database);
    let proxy = FaultProxy::start(server.address(), Protocol::Postgres).unwrap();
    let folder: TempDir = tempfile::tempdir().unwrap();
    let (from, to) = (through(&database, server, &proxy), format!("embedded:{}", folder.path().display()));
    let source = block_on(Hapax::open(&database)).unwrap().store().clone();
    block_on(filled(&source));
    let users = traffic(&source, &to);
    until_busy(&source);
    let kills = copy_killed(&from, &to, &proxy, |kills| {
        block_on(async {
            let target = Hapax::open(&to).await.unwrap();
            works_beside(target.store(), kills).await;
            target.store().close().await.unwrap();
        });
    });
    assert!(kills >= KILLS_MIN, "{kills} kills");
    let traffic = refused(users);
    again_adds_nothing(&from, &to);
    let target = block_on(Hapax::open(&to)).unwrap().store().clone();
    block_on(check(&source, &target, &to, &traffic));
}

/// Every tenth request and every tenth response cuts its connection; one process completes the copy all the same.
fn a_copy_whose_connections_are_cut_completes(server: &'static PostgresServer) {
    let (database, _) = database(server);
    migrated(&database);
    let proxy = FaultProxy::start(server.address(), Protocol::Postgres).unwrap();
    let (from, to) = (filled_server(), through(&database, server, &proxy));
    let target = block_on(Hapax::open(&database)).unwrap().store().clone();
    let users = traffic(&from.1, &to);
    until_busy(&from.1);
    // After the store is open: to open it is not repeated.
    let cuts: Vec<_> = (1..=8)
        .map(|number| {
            let on = if number % 2 == 0 { Match::request("") } else { Match::answer_to("") };
            proxy.inject(on, Action::Cut).after(10 + number * 10).times(1)
        })
        .collect();
    let folder = tempfile::tempdir().unwrap();
    run(&folder, &["copy", "--from", &from.0.endpoint, "--to", &to]).ok();
    let hit = cuts.iter().filter(|cut| cut.count() > 0).count();
    assert!(hit >= 5, "{hit} connections were cut");
    let traffic = refused(users);
    again_adds_nothing(&from.0.endpoint, &to);
    block_on(check(&from.1, &target, &to, &traffic));
}

/// There and back: the database is the target of one copy and the source of another.
fn a_copy_through_a_pooler_completes(server: &'static PostgresServer, pooler: &PgBouncer) {
    let (database, _) = database(server);
    migrated(&database);
    let through = database.replace(&server.address().to_string(), &pooler.address().to_string());
    let through = format!("{through}?hapax_pooler=true");
    let (from, folder) = (filled_server(), tempfile::tempdir().unwrap());
    let middle = block_on(Hapax::open(&through)).unwrap().store().clone();
    let users = traffic(&from.1, &through);
    until_busy(&from.1);
    run(&folder, &["copy", "--from", &from.0.endpoint, "--to", &through]).ok();
    let traffic = refused(users);
    block_on(check(&from.1, &middle, &through, &traffic));
    let to = format!("embedded:{}", folder.path().join("back").display());
    run(&folder, &["copy", "--from", &through, "--to", &to]).ok();
    let why = refusal(block_on(middle.receive(&queue("jobs"), Receive::up_to(1)))).expect("it is closed");
    assert!(why.contains(&to), "{why}");
    let target = block_on(Hapax::open(&to)).unwrap().store().clone();
    let left = block_on(target.stats(&queue("jobs"))).unwrap();
    // The check before has received all of it.
    assert!(left.ready + left.delayed >= 600, "{left:?}");
}
