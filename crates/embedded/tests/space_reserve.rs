//! When the disk becomes full, sends are refused first, so that messages can still be settled.

mod common;

use std::path::Path;
use std::process::{Command, ExitCode};

use common::queue;
use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueStore, Receive, Settle, StoreError};
use hapax_embedded::{Embedded, Options};
use libtest_mimic::{Arguments, Completion, Trial};

async fn settles_still_commit(store: &Embedded, expected: usize) {
    let mut settled = 0;
    loop {
        // A receive is also bounded in bytes, so several may be needed.
        let deliveries = store.receive(&queue(), Receive::up_to(1_000)).await.unwrap();
        if deliveries.is_empty() {
            break;
        }
        for delivery in deliveries {
            let acked = store.settle(&queue(), vec![Settle::ack(delivery.receipt)]).await.unwrap();
            acked[0].as_ref().unwrap();
            settled += 1;
        }
    }
    assert_eq!(settled, expected);
    assert_eq!(store.status().await.unwrap().stopped, None);
}

fn full(answer: Result<impl std::fmt::Debug, StoreError>) -> String {
    match answer {
        Err(StoreError::Full(why)) => why,
        other => panic!("expected Full: {other:?}"),
    }
}

async fn sends_are_refused_below_the_reserve_and_settles_are_not() -> Completion {
    let folder = tempfile::tempdir().unwrap();
    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    store.send(&queue(), vec![NewMessage::new("1"), NewMessage::new("2")]).await.unwrap();
    drop(store);

    // No disk has that much free space.
    let store =
        Embedded::open(folder.path(), Options { reserve_bytes: u64::MAX, ..Options::default() }).unwrap();
    let why = full(store.send(&queue(), vec![NewMessage::new("3")]).await);
    assert!(why.contains("kept for settling"), "{why}");
    settles_still_commit(&store, 2).await;
    drop(store);
    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    store.send(&queue(), vec![NewMessage::new("4")]).await.unwrap()[0].as_ref().unwrap();
    assert_eq!(store.stats(&queue()).await.unwrap().ready, 1);
    Completion::Completed
}

/// A small file system in memory. `new` returns `None` if mounting is not permitted.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn new(at: &'a Path, megabytes: u32) -> Option<Self> {
        let size = format!("size={megabytes}m");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "hapax-test"]).arg(at).output();
        mount.is_ok_and(|mount| mount.status.success()).then_some(Self(at))
    }

    fn resize(&self, megabytes: u32) -> bool {
        let size = format!("remount,size={megabytes}m");
        Command::new("mount").args(["-o", &size]).arg(self.0).output().unwrap().status.success()
    }

    /// Leaves less than a megabyte free: a smaller size than the files have is refused.
    fn fill_up(&self) {
        assert!((1..32).any(|megabytes| self.resize(megabytes)));
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

/// Sends until the store is full; returns the number of accepted messages.
async fn fill(store: &Embedded) -> usize {
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    let body = || vec![NewMessage::new(vec![7; 50_000])];
    let mut accepted = 0;
    loop {
        match store.send(&queue(), body()).await {
            Ok(sent) => accepted += usize::from(sent[0].is_ok()),
            Err(StoreError::Full(_)) => break,
            Err(other) => panic!("after {accepted} sends: {other}"),
        }
    }
    for _ in 0..5 {
        full(store.send(&queue(), body()).await);
    }
    let stats = store.stats(&queue()).await.unwrap();
    let counts = (stats.ready, stats.totals.sent);
    assert_eq!(counts, (accepted as u64, accepted as u64), "what was refused left no trace");
    assert_eq!(store.status().await.unwrap().stopped, None);
    assert!(accepted > 20, "{accepted}");
    accepted
}

async fn with_the_reserve_everything_can_be_settled_on_a_disk_that_takes_no_more() -> Completion {
    let folder = tempfile::tempdir().unwrap();
    let Some(_mounted) = Mounted::new(folder.path(), 96) else { return skip() };
    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    let accepted = fill(&store).await;
    settles_still_commit(&store, accepted).await;
    drop(store);
    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    assert_eq!(store.stats(&queue()).await.unwrap().ready, 0);
    Completion::Completed
}

async fn a_full_disk_loses_nothing_and_recovers_with_free_space() -> Completion {
    let folder = tempfile::tempdir().unwrap();
    let Some(mounted) = Mounted::new(folder.path(), 8) else { return skip() };
    let options = || Options { reserve_bytes: 0, ..Options::default() };
    let store = Embedded::open(folder.path(), options()).unwrap();
    let accepted = fill(&store).await;
    assert!(mounted.resize(32));
    store.send(&queue(), vec![NewMessage::new("room again")]).await.unwrap()[0].as_ref().unwrap();
    mounted.fill_up();
    drop(store);
    assert!(mounted.resize(32));
    let store = Embedded::open(folder.path(), options()).unwrap();
    settles_still_commit(&store, accepted + 1).await;
    Completion::Completed
}

fn skip() -> Completion {
    Completion::ignored_with("no permission to mount a small file system")
}

fn test<T: Future<Output = Completion> + 'static>(name: &str, body: fn() -> T) -> Trial {
    Trial::ignorable_test(name, move || Ok(tokio::runtime::Runtime::new()?.block_on(body())))
}

/// Not the usual test harness: a case that cannot run here is reported as ignored, never as passed.
fn main() -> ExitCode {
    let tests = vec![
        test(
            "sends_are_refused_below_the_reserve_and_settles_are_not",
            sends_are_refused_below_the_reserve_and_settles_are_not,
        ),
        test(
            "with_the_reserve_everything_can_be_settled_on_a_disk_that_takes_no_more",
            with_the_reserve_everything_can_be_settled_on_a_disk_that_takes_no_more,
        ),
        test(
            "a_full_disk_loses_nothing_and_recovers_with_free_space",
            a_full_disk_loses_nothing_and_recovers_with_free_space,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}
