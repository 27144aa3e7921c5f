//! `hapax copy`: embedded -> PostgreSQL -> embedded with equal checksums, killed at every kind of step on the way, while
//! the source refuses and the target works.

mod common;

use std::collections::BTreeMap;
use std::process::{Command, ExitCode, Stdio};

use common::filled::{QUEUES, block_on, claim, complete, filled, one, queue, send, text};
use common::postgres::database;
use common::{Server, hapax, run};
use hapax::copy::{CopyError, CopyProgress, CopyReport, CopyRequest, copy, release};
use hapax::core::store::{Browse, MessageState, MessageView, SharedStore};
use hapax::core::{Claim, CopyState, EntryFilter, EntryState, EntryView, ExportedItem, Fence, TransferScope};
use hapax::{EntryId, Hapax, Priority, Receive, Settle, Settlement, StoreError};
use hapax_faults::PostgresServer;
use tempfile::TempDir;

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
        ("what_differs_after_the_copy_is_noticed_and_stays_closed", differences),
    ])
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

/// The messages of all queues as they are shown, without their places. What is in flight comes as returned.
async fn views(store: &SharedStore) -> BTreeMap<String, (&'static str, MessageView)> {
    let mut all = BTreeMap::new();
    for name in QUEUES {
        let page = store.browse(&queue(name), Browse { limit: 1_000, ..Browse::default() }).await.unwrap();
        assert!(page.next.is_none(), "{name} has more than one page");
        for mut view in page.items {
            view.sequence = 0;
            if view.state == MessageState::InFlight {
                view.state = MessageState::Ready;
            }
            if view.state != MessageState::Delayed {
                view.due_ms = 0;
            }
            all.insert(view.id.to_string(), (name, view));
        }
    }
    all
}

/// The entries of the ledger as they are shown, without fences. What is held comes as in doubt.
async fn entries(store: &SharedStore) -> BTreeMap<String, EntryView> {
    let page = store.entries(EntryFilter { limit: 1_000, ..EntryFilter::default() }).await.unwrap();
    let normal = |mut entry: EntryView| {
        entry.fence = Fence(0);
        if entry.state != EntryState::Completed {
            (entry.state, entry.lease_ms, entry.ended_ms, entry.prune_ms) =
                (EntryState::InDoubt, 0, None, None);
        }
        (entry.id.to_string(), entry)
    };
    page.items.into_iter().map(normal).collect()
}

/// The messages and entries of a store, seen without an export: what both exports leave out would not be missed by their
/// checksums.
type Seen = (BTreeMap<String, (&'static str, MessageView)>, BTreeMap<String, EntryView>);

async fn seen(store: &SharedStore) -> Seen {
    (views(store).await, entries(store).await)
}

fn equal(before: &Seen, after: &Seen) {
    for (id, view) in &before.0 {
        assert_eq!(after.0.get(id), Some(view), "message {id}");
    }
    for (id, entry) in &before.1 {
        assert_eq!(after.1.get(id), Some(entry), "entry {id}");
    }
    assert_eq!((before.0.len(), before.1.len()), (after.0.len(), after.1.len()));
}

/// A delivery that is over, and of which nothing is copied; gives its fence, as if the store's clock were an hour ahead.
async fn gone_ahead(store: &SharedStore) -> u64 {
    let transfer = store.transfer().unwrap();
    let bound = transfer.fence_bound().await.unwrap();
    transfer.raise_fence(Fence(bound.0 + 3_600_000_000)).await.unwrap();
    send(store, "once", text("gone")).await;
    let delivery = one(store, "once").await;
    let ack = Settle::new(delivery.receipt, Settlement::Ack);
    store.settle(&queue("once"), vec![ack]).await.unwrap().remove(0).unwrap();
    delivery.fence.0
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
    let (before, gone) = block_on(async {
        hapax::postgres::migrate(&database, &hapax::postgres::Options::default(), false).await.unwrap();
        let store = Hapax::open(&first).await.unwrap();
        filled(store.store()).await;
        let gone = gone_ahead(store.store()).await;
        let before = seen(store.store()).await;
        store.store().close().await.unwrap();
        (before, gone)
    });
    let there = move_killed(&first, &database);
    // The database is the source now; a process that has it open sees that, too.
    let (open, middle) = block_on(async {
        let open = Hapax::open(&database).await.unwrap();
        equal(&before, &seen(open.store()).await);
        send(open.store(), "jobs-dead", text("known to this process")).await;
        one(open.store(), "jobs-dead").await;
        let middle = seen(open.store()).await;
        (open, middle)
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
        equal(&middle, &seen(to.store()).await);
        let fence = highest_fence(from.store(), "jobs").await;
        works(to.store()).await;
        let fence = fence.max(gone);
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

/// A target that has not what the source has: nothing is opened. Once it is deleted there, the copy can be completed.
fn differences(server: &'static PostgresServer) {
    let urgent = "hapax.q_ready SET body = 'changed' WHERE prio = 7";
    for (differs, change) in [
        ("queue jobs", format!("UPDATE {urgent}")),
        ("queue jobs", "DELETE FROM hapax.q_ready WHERE prio = 7".to_owned()),
        ("queue steps.fifo", "UPDATE hapax.q_fifo SET attempts = attempts + 1 WHERE grp = 'free'".to_owned()),
        (
            "the ledger",
            "UPDATE hapax.ledger_entry SET outcome = '9' WHERE scope = 'tenant-a/orders'".to_owned(),
        ),
        ("the ledger", "DELETE FROM hapax.ledger_entry WHERE scope = 'tenant-b/orders'".to_owned()),
    ] {
        let (database, name_of_database) = database(server);
        let folder = tempfile::tempdir().unwrap();
        let from = format!("embedded:{}", folder.path().display());
        block_on(async {
            hapax::postgres::migrate(&database, &hapax::postgres::Options::default(), false).await.unwrap();
            let (source, target) = (Hapax::open(&from).await.unwrap(), Hapax::open(&database).await.unwrap());
            filled(source.store()).await;
            let request = CopyRequest::new(&from, &database, "test");
            let (mut pages, step) = (0, format!("Page {differs}"));
            let mut tell = |progress: &CopyProgress| {
                pages += u32::from(name(progress) == step);
                if name(progress) == step && pages == 1 {
                    server.sql(&name_of_database, &change).unwrap();
                }
            };
            let error = copy(source.store(), target.store(), &request, &mut tell).await.unwrap_err();
            let told = error.to_string();
            assert!(matches!(&error, CopyError::Differs { what, .. } if what == differs), "{change}: {told}");
            assert!(told.contains("--release") && told.contains("repeat"), "{told}");
            let early = target.store().send(&queue("jobs"), vec![text("early")]).await.unwrap_err();
            assert!(early.to_string().contains("is being copied from"), "{change}: {early}");
            let late = source.store().send(&queue("jobs"), vec![text("late")]).await.unwrap_err();
            assert!(matches!(late, StoreError::Moved(_)), "{change}: {late}");
            // As the error says.
            if let Some(queue_name) = differs.strip_prefix("queue ") {
                target.store().delete_queue(&queue(queue_name)).await.unwrap();
            } else {
                for scope in ["tenant-a/orders", "tenant-b/orders"] {
                    let id = EntryId::new(scope.parse().unwrap(), "7".parse().unwrap());
                    drop(target.store().forget(&id, "test").await);
                }
            }
            let report = copy(source.store(), target.store(), &request, &mut |_| {}).await.unwrap();
            assert!(report.added() > 0, "{change}: {report:?}");
            send(target.store(), "jobs", text("open")).await;
        });
    }
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
    // One store by two names, without a queue to tell by.
    let other_name = format!("{database}?application_name=x");
    let same = run(&folder, &["copy", "--from", &database, "--to", &other_name]);
    assert!(same.code == Some(1) && same.stderr.contains("lead to one store"), "{same:?}");
    let opened = run(&folder, &["copy", "--release", "--from", &database]).ok();
    assert!(opened.contains("nothing was closed"), "{opened}");
    // A queue of the target that is in use is not touched.
    run(&folder, &["queue", "create", "jobs", "--endpoint", &database]).ok();
    run(&folder, &["send", "jobs", "other", "--endpoint", &database]).ok();
    let (code, why) = copy(&database, &[]);
    assert!(code == Some(1) && why.contains("is not empty"), "{why}");
    run(&folder, &["send", "jobs", "b", "--endpoint", "embedded:./hapax-data"]).ok();
    // One store by two names: the remedy must not be to delete the queue.
    for more in ["application_name=other", "hapax_connections_max=3"] {
        let same = format!("{database}?{more}");
        let why = run(&folder, &["copy", "--from", &database, "--to", &same]).failed(1);
        assert!(why.contains("lead to one store") && !why.contains("delete"), "{why}");
    }
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
