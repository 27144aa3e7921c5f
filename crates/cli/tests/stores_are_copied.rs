//! `hapax copy`: embedded -> PostgreSQL -> embedded with equal checksums, killed at every kind of step on the way, while
//! the source refuses and the target works.

mod common;

use std::process::{Command, ExitCode, Stdio};
use std::sync::OnceLock;

use common::postgres::database;
use common::{Server, hapax, run};
use hapax::copy::{CopyProgress, CopyReport, CopyRequest, copy, release};
use hapax::core::store::SharedStore;
use hapax::core::{
    Claim, ClaimEnding, ClaimRequest, CopyState, EndClaim, ExportedItem, Json, RecordedOutcome, TransferScope,
};
use hapax::{
    DeadLetterPolicy, EntryId, Hapax, MessageId, NewMessage, OnDead, OnDoubt, Priority, QueueConfig,
    QueueName, Receive, Settle, Settlement, StoreError, Tier,
};
use hapax_faults::PostgresServer;
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Set for a process that copies and dies: source, target, and the step after which it dies.
const CHILD: &str = "COPY_TEST_CHILD";

fn main() -> ExitCode {
    if let Ok(child) = std::env::var(CHILD) {
        let parts: Vec<&str> = child.split('\n').collect();
        die_after(parts[0], parts[1], parts[2]);
        return ExitCode::SUCCESS;
    }
    common::postgres::main(&[
        ("there_and_back_with_equal_checksums_killed_on_the_way", there_and_back),
        ("the_command_copies_and_releases", the_command),
        ("some_queues_are_copied_with_their_entries", some_queues),
        ("what_cannot_be_copied_is_refused_and_changes_nothing", refusals),
    ])
}

/// On one runtime for the whole process: a store works on the one that it was opened on.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let build = || tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    RUNTIME.get_or_init(build).block_on(future)
}

/// A step by its name, for example `Page queue jobs`.
fn name(step: &CopyProgress) -> String {
    match step {
        CopyProgress::Closed(what) => format!("Closed {what}"),
        CopyProgress::Created(what) => format!("Created {what}"),
        CopyProgress::Page { what, .. } => format!("Page {what}"),
        CopyProgress::Verified(what) => format!("Verified {what}"),
        CopyProgress::Completed(what) => format!("Completed {what}"),
        CopyProgress::Opened(what) => format!("Opened {what}"),
    }
}

async fn copied(from: &str, to: &str, mut tell: impl FnMut(&CopyProgress) + Send) -> CopyReport {
    let (source, target) = (Hapax::open(from).await.unwrap(), Hapax::open(to).await.unwrap());
    let request = CopyRequest::new(from, to, "test");
    let report = copy(source.store(), target.store(), &request, &mut tell).await.unwrap();
    source.store().close().await.unwrap();
    target.store().close().await.unwrap();
    report
}

fn die_after(from: &str, to: &str, step: &str) {
    block_on(copied(from, to, |progress| {
        if name(progress) == step {
            // As kill -9: nothing is closed, flushed or answered.
            std::process::abort();
        }
    }));
}

/// Runs a copy in a process of its own that dies after a step.
fn killed(from: &str, to: &str, step: &str) {
    let child = Command::new(std::env::current_exe().unwrap())
        .env(CHILD, [from, to, step].join("\n"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    let aborted = std::os::unix::process::ExitStatusExt::signal(&child);
    assert_eq!(aborted, Some(6), "the copy ended, or failed, before the step {step:?}: {child}");
}

fn queue(name: &str) -> QueueName {
    name.parse().unwrap()
}

fn dying(dead: &str, config: QueueConfig) -> QueueConfig {
    let dead_letter = Some(DeadLetterPolicy { queue: queue(dead) });
    QueueConfig { dead_letter, ..config }
}

fn text(body: &str) -> NewMessage {
    NewMessage::new(body.as_bytes().to_vec())
}

async fn send(store: &SharedStore, to: &str, message: NewMessage) -> MessageId {
    store.send(&queue(to), vec![message]).await.unwrap().remove(0).unwrap().id
}

async fn one(store: &SharedStore, from: &str) -> hapax::Delivery {
    store.receive(&queue(from), Receive::up_to(1)).await.unwrap().remove(0)
}

async fn settle(store: &SharedStore, of: &str, delivery: &hapax::Delivery, settlement: Settlement) {
    let settle = Settle::new(delivery.receipt.clone(), settlement);
    store.settle(&queue(of), vec![settle]).await.unwrap().remove(0).unwrap();
}

async fn claim(store: &SharedStore, scope: &str, key: &str) -> Result<Claim, StoreError> {
    let id = EntryId::new(scope.parse().unwrap(), key.parse().unwrap());
    let request =
        ClaimRequest { on_doubt: OnDoubt::Park, ..ClaimRequest::new(id, "me".parse().unwrap(), 3_600_000) };
    Ok(store.claim(vec![request]).await?.remove(0).unwrap())
}

async fn complete(store: &SharedStore, scope: &str, key: &str, outcome: &str) {
    let Claim::Granted(grant) = claim(store, scope, key).await.unwrap() else { panic!("{key} is free") };
    let id = EntryId::new(scope.parse().unwrap(), key.parse().unwrap());
    let outcome = RecordedOutcome::done(Json::parse(outcome).unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 86_400_000 };
    store.end(vec![EndClaim { id, token: grant.token, ending }]).await.unwrap().remove(0).unwrap();
}

/// Every kind of thing that a store holds. The names of the queues are in the order in which they are copied.
const QUEUES: [&str; 6] = ["jobs-dead", "jobs", "once", "resting", "steps-dead.fifo", "steps.fifo"];

/// Deduplication ids are remembered for longer than the test takes.
fn remembering() -> QueueConfig {
    let mut config = QueueConfig::default();
    config.dedup.window_ms = 21_600_000;
    config
}

async fn filled(store: &SharedStore) {
    let halting = QueueConfig { on_dead: OnDead::HaltGroup, ..QueueConfig::fifo() };
    for (name, config) in [
        ("jobs-dead", QueueConfig::default()),
        ("jobs", dying("jobs-dead", remembering())),
        ("once", QueueConfig::default().tier(Tier::EffectivelyOnce)),
        ("resting", QueueConfig::default()),
        ("steps-dead.fifo", QueueConfig::fifo()),
        ("steps.fifo", dying("steps-dead.fifo", halting)),
    ] {
        store.create_queue(&queue(name), config).await.unwrap();
    }
    jobs(store).await;
    for (group, body) in [("halted", "h0"), ("halted", "h1"), ("free", "f0"), ("free", "f1"), ("free", "f2")]
    {
        let dedup = body.parse().unwrap();
        send(store, "steps.fifo", text(body).group(group.parse().unwrap()).dedup(dedup)).await;
    }
    let first = one(store, "steps.fifo").await;
    settle(store, "steps.fifo", &first, Settlement::Reject { reason: "broken".into() }).await;
    send(store, "resting", text("asleep")).await;
    store.pause_queue(&queue("resting"), "ann", Some("incident")).await.unwrap();

    complete(store, "tenant-a/orders", "7", r#"{"paid":1}"#).await;
    complete(store, "tenant-b/orders", "7", r#"{"paid":2}"#).await;
    claim(store, "tenant-a/orders", "held").await.unwrap();
    send(store, "once", text("parked")).await;
    let parked = one(store, "once").await;
    claim(store, "queue/once", parked.key.as_str()).await.unwrap();
    settle(store, "once", &parked, Settlement::Park { reason: "in doubt".into() }).await;
}

fn in_six_hours() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_millis() as u64 + 21_600_000
}

async fn jobs(store: &SharedStore) {
    send(store, "jobs", text("dead")).await;
    let dead = one(store, "jobs").await;
    settle(store, "jobs", &dead, Settlement::Reject { reason: "never".into() }).await;
    send(store, "jobs", text("retried")).await;
    let retried = one(store, "jobs").await;
    let again = Settlement::Retry { after_ms: Some(21_600_000), error: Some("not yet".into()) };
    settle(store, "jobs", &retried, again).await;
    send(store, "jobs", text("acked").dedup("gone".parse().unwrap())).await;
    let acked = one(store, "jobs").await;
    settle(store, "jobs", &acked, Settlement::Ack).await;
    send(store, "jobs", text("flying")).await;
    one(store, "jobs").await;
    send(store, "jobs", text("urgent").priority(Priority(7))).await;
    send(store, "jobs", text("later").deliver_at_ms(in_six_hours())).await;
    send(store, "jobs", text("known").dedup("waits".parse().unwrap())).await;
    send(store, "jobs", NewMessage::new(vec![0xff; 700_000])).await;
    // More than one page.
    for _ in 0..6 {
        let batch = (0..100).map(|number| text(&format!("n{number}"))).collect();
        store.send(&queue("jobs"), batch).await.unwrap();
    }
}

/// Sends, receives, settles and claims of a store that is copied are refused and name the other one.
async fn refused(store: &SharedStore, other: &str) {
    let moved = |what: &str, error: StoreError| {
        let text = error.to_string();
        assert!(matches!(error, StoreError::Moved(_)) && text.contains(other), "{what}: {text}");
        assert!(error.is_retryable());
    };
    for name in QUEUES {
        let message = text("new").group("g".parse().unwrap()).dedup("new".parse().unwrap());
        let message = if name.contains("fifo") { message } else { text("new") };
        moved("send", store.send(&queue(name), vec![message]).await.unwrap_err());
        moved("receive", store.receive(&queue(name), Receive::up_to(1)).await.unwrap_err());
    }
    moved("claim", claim(store, "tenant-c/orders", "new").await.unwrap_err());
}

/// What the target does with what was copied: nothing is lost, changed or there twice.
async fn works(store: &SharedStore) {
    assert!(matches!(claim(store, "tenant-a/orders", "7").await, Ok(Claim::Completed { outcome, .. })
        if outcome.value.as_ref().unwrap().as_str() == r#"{"paid":1}"#));
    assert!(matches!(claim(store, "tenant-a/orders", "held").await, Ok(Claim::InDoubt { .. })));
    for (dedup, first) in [("gone", false), ("waits", false), ("never seen", true)] {
        let again = text("again").dedup(dedup.replace(' ', "-").parse().unwrap());
        let sent = store.send(&queue("jobs"), vec![again]).await.unwrap().remove(0).unwrap();
        assert_eq!(sent.duplicate, !first, "{dedup}");
    }
    let stats = store.stats(&queue("jobs")).await.unwrap();
    assert_eq!((stats.ready, stats.delayed, stats.parked), (604 + 1, 2, 0), "{stats:?}");
    let urgent = one(store, "jobs").await;
    assert_eq!((&urgent.body[..], urgent.priority), (&b"urgent"[..], Priority(7)));
    let resting = store.queue(&queue("resting")).await.unwrap().paused.unwrap();
    assert_eq!((resting.reason.as_deref(), resting.copy), (Some("incident"), None));
    assert_eq!(store.halted_groups(&queue("steps.fifo")).await.unwrap(), ["halted".parse().unwrap()]);
    let free = store.receive(&queue("steps.fifo"), Receive::up_to(10)).await.unwrap();
    let bodies: Vec<_> =
        free.iter().map(|delivery| String::from_utf8_lossy(&delivery.body).into_owned()).collect();
    assert_eq!(bodies, ["f0", "f1", "f2"]);
    let dead = store.receive(&queue("jobs-dead"), Receive::up_to(10)).await.unwrap();
    assert_eq!(dead[0].dead.as_ref().unwrap().error.as_deref(), Some("never"));
}

/// The parts of a report that an earlier run had not completed: name, items and checksum.
fn sums(report: &CopyReport) -> Vec<(String, u64, String)> {
    let sum = |part: &hapax::copy::CopiedPart| Some((part.what.clone(), part.items, part.checksum.clone()?));
    report.parts.iter().filter_map(sum).collect()
}

/// The highest fence of what a queue holds.
async fn highest_fence(store: &SharedStore, name: &str) -> u64 {
    let page =
        store.transfer().unwrap().export(&TransferScope::Queue(queue(name)), None, 1_000).await.unwrap();
    let fence = |item: &ExportedItem| match item {
        ExportedItem::Message(message) => message.fence.0,
        _ => 0,
    };
    page.items.iter().map(fence).max().unwrap()
}

fn there_and_back(server: &'static PostgresServer) {
    let (first, last) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let embedded = |folder: &TempDir| format!("embedded:{}", folder.path().display());
    let (first, last) = (embedded(&first), embedded(&last));
    let (database, _) = database(server);
    block_on(async {
        hapax::postgres::migrate(&database, &hapax::postgres::Options::default(), false).await.unwrap();
        let store = Hapax::open(&first).await.unwrap();
        filled(store.store()).await;
        store.store().close().await.unwrap();
    });
    let there = move_killed(&first, &database);
    // The database is the source now; a process that has it open sees that, too.
    let open = block_on(async {
        let open = Hapax::open(&database).await.unwrap();
        send(open.store(), "jobs-dead", text("known to this process")).await;
        one(open.store(), "jobs-dead").await;
        open
    });
    let back = move_killed(&database, &last);
    let without = |sums: &[(String, u64, String)], left_out: &str| {
        sums.iter().filter(|(what, ..)| what != left_out).cloned().collect::<Vec<_>>()
    };
    // One message was sent to the dead letters on the way.
    assert_eq!(without(&there, "queue jobs-dead"), without(&back, "queue jobs-dead"), "equal checksums");
    assert_eq!(there.len(), 1 + QUEUES.len());
    block_on(async {
        refused(open.store(), &last).await;
        let (from, to) = (Hapax::open(&first).await.unwrap(), Hapax::open(&last).await.unwrap());
        refused(from.store(), &hapax::without_secrets(&database)).await;
        let fence = highest_fence(from.store(), "jobs").await;
        works(to.store()).await;
        assert!(one(to.store(), "jobs").await.fence.0 > fence, "the target's fences exceed the source's");
        let opened = release(from.store(), &[], "test").await.unwrap();
        assert_eq!(opened.len(), 1 + QUEUES.len());
        send(from.store(), "jobs", text("open again")).await;
    });
}

/// Copies a store, killed after each kind of step; gives the checksums of every part.
fn move_killed(from: &str, to: &str) -> Vec<(String, u64, String)> {
    for step in [
        "Closed queue jobs-dead",
        "Closed the ledger",
        "Created queue jobs-dead",
        "Created queue steps.fifo",
        "Page the ledger",
        "Verified the ledger",
        "Page queue jobs-dead",
        "Page queue jobs",
        "Verified queue jobs",
        "Page queue steps.fifo",
        "Verified queue steps.fifo",
    ] {
        killed(from, to, step);
        block_on(async {
            let source = Hapax::open(from).await.unwrap();
            let error = source.store().send(&queue("jobs-dead"), vec![text("lost")]).await.unwrap_err();
            assert!(error.to_string().contains(&hapax::without_secrets(to)), "{step}: {error}");
            source.store().close().await.unwrap();
            if step.starts_with("Page queue") || step.starts_with("Verified queue") {
                let target = Hapax::open(to).await.unwrap();
                let error = target.store().send(&queue("jobs"), vec![text("too early")]).await.unwrap_err();
                assert!(error.to_string().contains("is being copied from"), "{step}: {error}");
                target.store().close().await.unwrap();
            }
        });
    }
    let ledger = block_on(ledger_sum(from));
    let mut sums_of = vec![("the ledger".to_owned(), ledger.items(), ledger.to_string())];
    sums_of.extend(block_on(queue_sums(from)));
    for step in ["Completed queue jobs-dead", "Opened queue jobs-dead", "Completed queue steps.fifo"] {
        killed(from, to, step);
    }
    let report = block_on(copied(from, to, |_| {}));
    assert_eq!((report.added(), sums(&report).len()), (0, 0), "all was there: {report:?}");
    let again = block_on(copied(from, to, |_| {}));
    assert_eq!(again.added(), 0);
    sums_of
}

async fn ledger_sum(url: &str) -> hapax::core::copy::Checksum {
    let store = Hapax::open(url).await.unwrap();
    let sum = sum_of(store.store(), &TransferScope::Ledger, hapax::core::copy::Checksum::of_ledger()).await;
    let state = store.store().transfer().unwrap().ledger_copy().await.unwrap();
    assert!(matches!(state, Some(CopyState::To { complete: true, .. })), "{state:?}");
    store.store().close().await.unwrap();
    sum
}

async fn queue_sums(url: &str) -> Vec<(String, u64, String)> {
    let store = Hapax::open(url).await.unwrap();
    let mut all = Vec::new();
    for name in QUEUES {
        let scope = TransferScope::Queue(queue(name));
        let sum = sum_of(store.store(), &scope, hapax::core::copy::Checksum::of_queue()).await;
        all.push((format!("queue {name}"), sum.items(), sum.to_string()));
    }
    store.store().close().await.unwrap();
    all
}

async fn sum_of(
    store: &SharedStore,
    scope: &TransferScope,
    mut sum: hapax::core::copy::Checksum,
) -> hapax::core::copy::Checksum {
    let mut after = None::<String>;
    loop {
        let page = store.transfer().unwrap().export(scope, after.as_deref(), 100).await.unwrap();
        for item in page.items.iter().filter(|item| !matches!(item, ExportedItem::Dedup(_))) {
            sum.add(item);
        }
        after = page.next;
        if after.is_none() {
            return sum;
        }
    }
}

/// As a new user runs it: from a running server to a database, and back open.
fn the_command(server: &'static PostgresServer) {
    let (database, _) = database(server);
    let source = Server::start();
    source.run(&["queue", "create", "jobs", "--dead-letters"]).ok();
    for body in ["a", "b", "c"] {
        source.run(&["send", "jobs", body]).ok();
    }
    run(&source.folder, &["migrate", "--store", &database]).ok();
    let arguments = ["copy", "--from", &source.endpoint, "--to", &database];
    let dry = run(&source.folder, &[&arguments[..], &["--dry-run"]].concat());
    assert!(dry.stdout.contains("3 messages") && dry.stderr.contains("nothing was changed"), "{dry:?}");
    source.run(&["send", "jobs", "d"]).ok();
    let done = run(&source.folder, &arguments);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.stdout.contains("queue jobs\t4 items\t0 remembered ids\t4 added\t"), "{done:?}");
    assert!(done.stderr.contains("hapax copy --release --from"), "the way back is stated: {done:?}");
    let refused = source.run(&["send", "jobs", "e"]).failed(1);
    assert!(refused.contains("queue jobs was copied to postgres://"), "{refused}");
    let sqs = sqs_send(&source, "jobs");
    assert!(sqs.starts_with("HTTP/1.1 503") && sqs.contains("was copied to postgres://"), "{sqs}");
    let again = run(&source.folder, &[&arguments[..], &["--json"]].concat()).json();
    assert!(again["parts"].as_array().unwrap().iter().all(|part| part["added"] == 0), "{again}");
    let got =
        run(&source.folder, &["receive", "jobs", "--max", "10", "--endpoint", &database, "--json"]).ok();
    assert_eq!(got.matches("\"body\"").count(), 4, "{got}");
    let opened = run(&source.folder, &["copy", "--release", "--from", &source.endpoint]).ok();
    assert!(opened.contains("queue jobs, queue jobs-dead, the ledger"), "{opened}");
    source.run(&["send", "jobs", "f"]).ok();
}

/// A send by the protocol of AWS's SDKs; gives the whole response.
fn sqs_send(server: &Server, queue: &str) -> String {
    use std::io::{Read as _, Write as _};
    let body = format!(r#"{{"QueueUrl":"{}/000000000000/{queue}","MessageBody":"x"}}"#, server.endpoint);
    let mut connection = std::net::TcpStream::connect(server.address()).unwrap();
    write!(
        connection,
        "POST / HTTP/1.1\r\nHost: {}\r\nContent-Type: application/x-amz-json-1.0\r\nX-Amz-Target: AmazonSQS.SendMessage\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        server.address(),
        body.len()
    )
    .unwrap();
    let mut response = String::new();
    connection.read_to_string(&mut response).unwrap();
    response
}

fn some_queues(server: &'static PostgresServer) {
    let (database, _) = database(server);
    let folder = tempfile::tempdir().unwrap();
    let from = format!("embedded:{}", folder.path().display());
    block_on(async {
        hapax::postgres::migrate(&database, &hapax::postgres::Options::default(), false).await.unwrap();
        let (source, target) = (Hapax::open(&from).await.unwrap(), Hapax::open(&database).await.unwrap());
        filled(source.store()).await;
        let queues = vec![queue("jobs")];
        let alone = CopyRequest { queues, ..CopyRequest::new(&from, &database, "test") };
        let error = copy(source.store(), target.store(), &alone, &mut |_| {}).await.unwrap_err();
        assert!(error.to_string().contains("--queue jobs-dead too"), "{error}");
        send(source.store(), "jobs", text("nothing was closed")).await;
        let request = CopyRequest { queues: vec![queue("once")], ..alone };
        let report = copy(source.store(), target.store(), &request, &mut |_| {}).await.unwrap();
        assert_eq!(report.items(), 1 + 1, "one message and its entry: {report:?}");
        // The other queues and the ledger of the source are open.
        send(source.store(), "jobs", text("still open")).await;
        complete(source.store(), "tenant-c/orders", "1", "1").await;
        let refused = source.store().send(&queue("once"), vec![text("new")]).await.unwrap_err();
        assert!(matches!(refused, StoreError::Moved(_)), "{refused}");
        assert!(matches!(claim(target.store(), "tenant-a/orders", "7").await, Ok(Claim::Granted(_))));
        send(target.store(), "once", text("new")).await;
    });
}

fn refusals(server: &'static PostgresServer) {
    let (database, _) = database(server);
    let folder = tempfile::tempdir().unwrap();
    run(&folder, &["queue", "create", "jobs", "--endpoint", "embedded:./none"]).failed(1);
    let filled = Server::start();
    filled.run(&["queue", "create", "jobs"]).ok();
    filled.run(&["send", "jobs", "a"]).ok();
    let folder = filled.stop();
    let copy = |to: &str, more: &[&str]| {
        let arguments = [&["copy", "--from", "embedded:./hapax-data", "--to", to][..], more].concat();
        let done = Command::output(&mut hapax(&folder, &arguments)).unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (code, why) = copy(&database, &[]);
    assert!(code == Some(1) && why.contains("hapax migrate"), "{why}");
    run(&folder, &["migrate", "--store", &database]).ok();
    let (code, why) = copy("embedded:./hapax-data", &[]);
    assert_eq!(code, Some(1), "one process opens a folder: {why}");
    let (code, why) = copy(&database, &["--queue", "nothing"]);
    assert!(code == Some(1) && why.contains("nothing does not exist"), "{why}");
    // A queue of the target that is in use is not touched.
    run(&folder, &["queue", "create", "jobs", "--endpoint", &database]).ok();
    run(&folder, &["send", "jobs", "other", "--endpoint", &database]).ok();
    let (code, why) = copy(&database, &[]);
    assert!(code == Some(1) && why.contains("is not empty"), "{why}");
    run(&folder, &["send", "jobs", "b", "--endpoint", "embedded:./hapax-data"]).ok();
    run(&folder, &["queue", "purge", "jobs", "--yes", "--endpoint", &database]).ok();
    let (code, why) = copy(&database, &[]);
    assert_eq!(code, Some(0), "{why}");
    // Two targets of one source, and a source as target, would lose or repeat messages.
    let (code, why) = copy("embedded:./third", &[]);
    assert!(code == Some(1) && why.contains("is copied to postgres://"), "{why}");
    let back = ["copy", "--from", &database, "--to", "embedded:./hapax-data"];
    let back = run(&folder, &back).failed(1);
    assert!(back.contains("was itself copied to"), "{back}");
}
