//! A backup of a running store is complete; restored, it waits for a decision and reuses no id and no fence.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::queue;
use hapax_core::{
    Browse, Maintenance, NewMessage, QueueAdmin, QueueConfig, QueueStore, Receive, Settle, StoreError,
};
use hapax_embedded::{Embedded, OpenError, Options};
use rusqlite::Connection;

fn open(folder: &Path) -> Embedded {
    Embedded::open(folder, Options::default()).unwrap()
}

async fn send(store: &Embedded, bodies: &[&str]) -> BTreeSet<String> {
    let batch = bodies.iter().map(|body| NewMessage::new(body.to_string())).collect();
    let sent = store.send(&queue(), batch).await.unwrap();
    sent.into_iter().map(|sent| sent.unwrap().id.to_string()).collect()
}

async fn started(folder: &Path) -> Embedded {
    let store = open(folder);
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    store
}

async fn numbers(store: &Embedded) -> BTreeSet<u64> {
    let (mut found, mut after) = (BTreeSet::new(), None);
    loop {
        let page = store.browse(&queue(), Browse { limit: 1_000, after, ..Browse::default() }).await.unwrap();
        found.extend(
            page.items.iter().map(|item| {
                std::str::from_utf8(item.body.as_ref().unwrap()).unwrap().parse::<u64>().unwrap()
            }),
        );
        after = page.next;
        if after.is_none() {
            return found;
        }
    }
}

/// One task sends 0, 1, 2... and another acks them in that order: at any moment the store holds one range of numbers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_load_is_one_moment_of_the_store() {
    let root = tempfile::tempdir().unwrap();
    let store = Arc::new(started(&root.path().join("store")).await);
    let stop = Arc::new(AtomicBool::new(false));
    let (sent, acked) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let producer = tokio::spawn({
        let (store, stop, sent) = (store.clone(), stop.clone(), sent.clone());
        async move {
            for number in 0.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                store.send(&queue(), vec![NewMessage::new(number.to_string())]).await.unwrap()[0]
                    .as_ref()
                    .unwrap();
                sent.store(number + 1, Ordering::SeqCst);
            }
        }
    });
    let consumer = tokio::spawn({
        let (store, stop, acked) = (store.clone(), stop.clone(), acked.clone());
        async move {
            while !stop.load(Ordering::SeqCst) {
                let one = Receive { wait_ms: Some(50), ..Receive::default() };
                for delivery in store.receive(&queue(), one).await.unwrap() {
                    let settled = store.settle(&queue(), vec![Settle::ack(delivery.receipt)]).await.unwrap();
                    settled[0].as_ref().unwrap();
                    acked.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    });

    for round in 0..5 {
        // Waits until the load has progressed, on a machine of any speed.
        while sent.load(Ordering::SeqCst) < (round + 1) * 40 {
            tokio::task::yield_now().await;
        }
        let (sent_before, acked_before) = (sent.load(Ordering::SeqCst), acked.load(Ordering::SeqCst));
        let to = root.path().join(format!("{round}.db"));
        let taken = {
            let (store, to) = (store.clone(), to.clone());
            tokio::task::spawn_blocking(move || store.backup(to))
        };
        taken.await.unwrap().unwrap();
        let (sent_after, acked_after) = (sent.load(Ordering::SeqCst), acked.load(Ordering::SeqCst));

        let folder = root.path().join(format!("restored-{round}"));
        Embedded::restore(&to, &folder).unwrap();
        let db = Connection::open(folder.join("hapax.db")).unwrap();
        let sound: String = db.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(sound, "ok");
        drop(db);
        let found = numbers(&open(&folder)).await;
        let (first, end) = match (found.first(), found.last()) {
            (Some(first), Some(last)) => (*first, last + 1),
            _ => continue,
        };
        assert_eq!(found.len() as u64, end - first, "there is a gap in {first}..{end}");
        // One more of each may be committed than was counted.
        assert!((acked_before..=acked_after + 1).contains(&first), "{acked_before} {first} {acked_after}");
        assert!((sent_before..=sent_after + 1).contains(&end), "{sent_before} {end} {sent_after}");
    }
    stop.store(true, Ordering::SeqCst);
    producer.await.unwrap();
    consumer.await.unwrap();
}

#[tokio::test]
async fn a_restored_store_is_paused_until_someone_resumes_it() {
    let root = tempfile::tempdir().unwrap();
    let store = started(&root.path().join("store")).await;
    send(&store, &["before"]).await;
    store.backup(root.path().join("b.db")).unwrap();
    drop(store);

    let folder = root.path().join("restored");
    Embedded::restore(root.path().join("b.db"), &folder).unwrap();
    for _ in 0..2 {
        let store = open(&folder);
        let refused = store.receive(&queue(), Receive::up_to(10)).await.unwrap_err();
        assert!(matches!(&refused, StoreError::Paused(why) if why.contains("delivered again")), "{refused}");
        send(&store, &["while paused"]).await;
        let status = store.status().await.unwrap();
        assert!(status.paused.is_some() && status.warnings[0].contains("paused"), "{status:?}");
    }
    let store = open(&folder);
    store.resume("ops@example").await.unwrap();
    assert_eq!(store.receive(&queue(), Receive::up_to(10)).await.unwrap().len(), 3);
    assert_eq!(store.status().await.unwrap().paused, None);
    store.resume("someone else").await.unwrap();
    drop(store);
    assert_eq!(open(&folder).status().await.unwrap().paused, None, "resumed for good");

    let db = Connection::open(folder.join("hapax.db")).unwrap();
    let mut audit = db.prepare("SELECT by, what FROM audit").unwrap();
    let rows: Vec<(String, String)> =
        audit.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(Result::unwrap).collect();
    assert_eq!(rows.len(), 1, "what was not paused was not resumed: {rows:?}");
    assert_eq!(rows[0].0, "ops@example");
    assert!(rows[0].1.starts_with("resumed"));
}

#[tokio::test]
async fn ids_and_fences_issued_after_the_backup_are_not_issued_again() {
    let root = tempfile::tempdir().unwrap();
    let store = started(&root.path().join("store")).await;
    let before = send(&store, &["1", "2", "3"]).await;
    store.backup(root.path().join("b.db")).unwrap();
    let mut original = send(&store, &["4", "5", "6"]).await;
    let deliveries = store.receive(&queue(), Receive::up_to(10)).await.unwrap();
    let fence_max = deliveries.iter().map(|d| d.fence).max().unwrap();
    assert_eq!(deliveries.len(), 6);
    drop(store);
    original.extend(before.iter().cloned());

    let mut issued = original;
    // Two stores from one backup differ from each other as they do from the original.
    for name in ["one", "two"] {
        let folder = root.path().join(name);
        Embedded::restore(root.path().join("b.db"), &folder).unwrap();
        // Paused, resumed, and afterwards: every open may begin new ids.
        for resume in [false, true, false] {
            let store = open(&folder);
            if resume {
                store.resume("test").await.unwrap();
            }
            for id in send(&store, &["a", "b"]).await {
                assert!(issued.insert(id.clone()), "id {id} was issued twice");
            }
        }
        let store = open(&folder);
        let deliveries = store.receive(&queue(), Receive::up_to(100)).await.unwrap();
        assert_eq!(deliveries.len(), 9);
        let ids: BTreeSet<_> = deliveries.iter().map(|d| d.id.to_string()).collect();
        assert!(before.is_subset(&ids), "what was in the backup keeps its id");
        assert!(ids.is_subset(&issued), "an id stays what it was when it was issued");
        assert!(deliveries.iter().all(|d| d.fence > fence_max), "fences grow through a restore");
    }
}

#[tokio::test]
async fn nothing_is_overwritten() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("store");
    let store = started(&folder).await;
    let backup = root.path().join("b.db");
    std::fs::write(&backup, "precious").unwrap();
    assert!(matches!(store.backup(&backup), Err(OpenError::Exists { .. })));
    assert_eq!(std::fs::read(&backup).unwrap(), b"precious");
    std::fs::remove_file(&backup).unwrap();
    // A file that only looks like a file of the backup.
    std::fs::write(root.path().join("b.part"), "precious").unwrap();
    store.backup(&backup).unwrap();
    assert_eq!(std::fs::read(root.path().join("b.part")).unwrap(), b"precious");
    drop(store);

    let refused = Embedded::restore(&backup, &folder);
    assert!(matches!(refused, Err(OpenError::Exists { .. })), "a folder with a store");

    let other = root.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("hapax.db-wal"), "of a store whose database was moved away").unwrap();
    let refused = Embedded::restore(&backup, &other);
    assert!(matches!(refused, Err(OpenError::Exists { .. })), "SQLite would replay another store's log");

    let nothing = Embedded::restore(root.path().join("none.db"), root.path().join("new"));
    assert!(matches!(nothing, Err(OpenError::Io { .. })));
    std::fs::write(root.path().join("text.db"), "not a database, and long enough to be looked at".repeat(99))
        .unwrap();
    Embedded::restore(root.path().join("text.db"), root.path().join("new")).unwrap_err();
    assert!(!root.path().join("new/hapax.db").exists());
}

/// What a process leaves that was killed while it wrote a copy: the copy can be made again under the same name.
#[tokio::test]
async fn a_leftover_partial_copy_blocks_no_later_backup() {
    let root = tempfile::tempdir().unwrap();
    let store = started(&root.path().join("store")).await;
    let sent = send(&store, &["1", "2"]).await;
    let whole = root.path().join("whole.db");
    store.backup(&whole).unwrap();
    let whole = std::fs::read(&whole).unwrap();
    for (number, left) in [&whole[..0], &[0; 8192], &whole[..whole.len() / 2]].into_iter().enumerate() {
        let backup = root.path().join(format!("{number}.db"));
        std::fs::write(root.path().join(format!("{number}.db.part")), left).unwrap();
        std::fs::write(root.path().join(format!("{number}.db.part-journal")), "half a journal").unwrap();
        store.backup(&backup).unwrap();

        let folder = root.path().join(format!("restored-{number}"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("hapax.db.part"), left).unwrap();
        Embedded::restore(&backup, &folder).unwrap();
        assert_eq!(numbers(&open(&folder)).await.len(), sent.len(), "{} bytes were left", left.len());
        assert!(!folder.join("hapax.db.part").exists());
        assert!(!root.path().join(format!("{number}.db.part-journal")).exists());
    }
}

#[tokio::test]
async fn a_copy_under_way_and_another_programs_file_are_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let store = started(&root.path().join("store")).await;
    let (backup, part) = (root.path().join("b.db"), root.path().join("b.db.part"));
    // As another process holds it that writes a backup of this name.
    let under_way = std::fs::File::create(&part).unwrap();
    under_way.lock().unwrap();
    assert!(matches!(store.backup(&backup), Err(OpenError::Exists { path }) if path == part));
    assert!(part.exists());
    drop(under_way);
    store.backup(&backup).unwrap();

    let (backup, part) = (root.path().join("c.db"), root.path().join("c.db.part"));
    std::fs::write(&part, "precious").unwrap();
    assert!(matches!(store.backup(&backup), Err(OpenError::Exists { path }) if path == part));
    assert_eq!(std::fs::read(&part).unwrap(), b"precious");
}

#[tokio::test]
async fn a_closed_store_is_not_backed_up() {
    // Another process may have opened its folder by now.
    let root = tempfile::tempdir().unwrap();
    let store = started(&root.path().join("store")).await;
    store.close();
    store.backup(root.path().join("b.db")).unwrap_err();
    assert!(!root.path().join("b.db").exists());
}
